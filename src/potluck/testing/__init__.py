"""Fakes that ship with the library, for our tests and for those of its users."""

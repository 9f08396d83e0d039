"""Decisions, pure: each takes a message and the time and returns what is to be done."""

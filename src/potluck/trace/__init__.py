"""Traces: the flight recorder of a process and its dumps."""

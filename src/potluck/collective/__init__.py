"""Collectives: schedules run on a backend, with one result or one error on all ranks."""

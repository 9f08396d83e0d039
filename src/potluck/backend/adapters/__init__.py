"""Adapters for engines, such as MPI, that have already connected the ranks and move the bytes."""

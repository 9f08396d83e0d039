"""Engines below: what moves bytes where somebody else has already connected the ranks."""

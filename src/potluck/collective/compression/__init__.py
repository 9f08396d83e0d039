"""Compression: gradients in fewer bytes; one file per method."""

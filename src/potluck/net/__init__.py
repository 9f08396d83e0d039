"""Bytes: frames, the one narrow door to the network, and what stands behind it."""

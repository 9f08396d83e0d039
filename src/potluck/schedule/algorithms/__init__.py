"""The algorithms of collectives, one file each."""

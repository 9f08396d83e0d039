"""Clusters: threads and connections that drive membership, and views as calls see them."""

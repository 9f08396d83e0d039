"""Metrics: what a process counts about everything that it does with others.

One :class:`~potluck.metrics.registry.DistributedMetrics` for a process, written by all layers and
read as a snapshot.  Busy places only append to a journal, which takes no lock; a reader works it
off.  All metrics are listed in :mod:`potluck.metrics.catalogue`.
"""

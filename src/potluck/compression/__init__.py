"""Compression: gradients in fewer bytes; one file per method.

A new number format is a codec in ``codecs.py``, named in ``strategy.py``; any other method is a
``Method`` in a file of its own, named in ``strategy.py`` and ``choice.py``, where each gets the
number that it has in files.
"""

"""Compression: gradients in fewer bytes; one file per method.

A new number format is a file with a codec, named in ``strategy.py`` and ``codecs.py``; any other
method a file with a ``Method``, named in ``strategy.py`` and ``registry.py``, where each gets the
number that it has in files.
"""

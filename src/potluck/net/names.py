"""A readable name for every node, such as ``calm-otter``.

People recognise a machine by it.  It is computed from the node id, so it never changes and needs no
agreement; but it has only 14 bits, two nodes may share one, and anybody can search for a key with a
wanted name.  So names are shown, and ids decide.
"""

from __future__ import annotations

import hashlib

from potluck.net.words import ADJECTIVES, ANIMALS
from potluck.vocabulary import NodeId

__all__ = ["short_name"]


def short_name(node: NodeId) -> str:
    """The readable name that belongs to this id, the same on every machine."""
    digest = hashlib.sha256(b"potluck short name v1\0" + node.encode()).digest()
    return f"{ADJECTIVES[digest[0] % len(ADJECTIVES)]}-{ANIMALS[digest[1] % len(ANIMALS)]}"

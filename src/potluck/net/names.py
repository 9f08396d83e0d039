"""What machines are called: by the names people gave them, or else one made from the id.

The made name, such as ``calm-otter``, never changes and needs no agreement; but it has only 14
bits, two nodes may share one, and anybody can search for a key with a wanted name.  So names are
shown, and ids decide.
"""

from __future__ import annotations

import hashlib
import os
import socket

from potluck.net.words import ADJECTIVES, ANIMALS
from potluck.vocabulary import NodeId

__all__ = ["MAX_NAME", "machine_name", "short_name"]

MAX_NAME = 64
"""Characters of a machine's name, as many as a label of a host name has."""


def machine_name() -> str:
    """What this machine is called everywhere: ``POTLUCK_NAME``, or its host name.

    Without the domain, which differs with the network a laptop is in.
    """
    named = os.environ.get("POTLUCK_NAME", "")
    return (named or socket.gethostname().partition(".")[0])[:MAX_NAME]


def short_name(node: NodeId) -> str:
    """The readable name that belongs to this id, the same on every machine."""
    digest = hashlib.sha256(b"potluck short name v1\0" + node.encode()).digest()
    return f"{ADJECTIVES[digest[0] % len(ADJECTIVES)]}-{ANIMALS[digest[1] % len(ANIMALS)]}"

"""Free TCP ports that stay free until they are used.

Asking the kernel for any port and closing it again invites somebody else to get the same one: it
comes from the range that outgoing connections use.  These come from below that range, and a lock
file keeps a second run of the tests on this machine from choosing the same.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path

FIRST, LAST = 20_000, 32_000  # Linux takes outgoing ports from 32768 up, others from 49152

_folder = Path(tempfile.gettempdir()) / f"potluck-test-ports-{os.getuid()}"
_locks: dict[int, int] = {}  # port -> descriptor that holds its lock until this process ends


def free_port(count: int = 1) -> int:
    """The first of ``count`` neighbouring ports that nobody uses; ours until the process ends."""
    starts = list(range(FIRST, LAST - count))
    random.SystemRandom().shuffle(starts)  # not the seeded one: two runs may share a seed
    for start in starts:
        ports = range(start, start + count)
        if all(_reserve(port) for port in ports):
            return start
    msg = "every port is taken"
    raise RuntimeError(msg)


def _reserve(port: int) -> bool:
    if port in _locks:
        return False
    _folder.mkdir(exist_ok=True)
    descriptor = os.open(_folder / str(port), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with contextlib.closing(socket.create_server(("", port))):
            pass
        if socket.has_ipv6:
            with contextlib.closing(socket.create_server(("::", port), family=socket.AF_INET6)):
                pass
    except OSError:
        os.close(descriptor)
        return False
    _locks[port] = descriptor
    return True

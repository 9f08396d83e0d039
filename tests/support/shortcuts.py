"""Ranks of one machine that leave TCP for local sockets, which tests otherwise do not."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from unittest import mock

from potluck.net.unix_socket import SWITCH


@contextlib.contextmanager
def shortcuts(setting: str = "on") -> Iterator[None]:
    """Let this process take them, or not, until the end of the block."""
    with mock.patch.dict(os.environ, {SWITCH: setting}):
        yield

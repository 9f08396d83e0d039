"""Losing a peer: what was seen becomes words that help."""

from __future__ import annotations

import errno
import os

import pytest

from potluck.backend.losses import peer_lost
from potluck.backend.reader import PeerEnded


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        (PeerEnded(), "crashed or was killed"),
        (ConnectionResetError(errno.ECONNRESET, "reset"), "crashed or was killed"),
        (OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)), "no longer answers"),
        (OSError(errno.EHOSTUNREACH, os.strerror(errno.EHOSTUNREACH)), "no longer answers"),
        (OSError(errno.ENETDOWN, os.strerror(errno.ENETDOWN)), "no longer answers"),
        (OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS)), os.strerror(errno.ENOBUFS)),
    ],
)
def test_the_reason_is_told_in_words(reason: OSError, words: str) -> None:
    """A laptop that was closed is unreachable for its neighbours: the error says so."""
    error = peer_lost(1, "laptop at 10.0.0.7:4000", reason)
    assert error.rank == 1
    assert error.cause is not None
    assert words in error.cause
    assert str(error).startswith("Rank 1 (laptop at 10.0.0.7:4000) is gone: ")

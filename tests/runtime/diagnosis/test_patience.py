"""Waiting for what has no deadline of its own."""

from __future__ import annotations

import threading
import time

from potluck.runtime.diagnosis.patience import within
from support.threads import PATIENCE


def test_one_who_takes_too_long_is_left() -> None:
    """What is assumed instead is returned at the deadline."""
    gate = threading.Event()
    began = time.monotonic()
    assert within(0.05, lambda: gate.wait(PATIENCE), False) is False
    assert time.monotonic() - began < PATIENCE
    gate.set()

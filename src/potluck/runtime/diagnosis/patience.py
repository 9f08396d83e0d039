"""Waiting for what has no deadline of its own, such as a resolver, for so long and no longer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

__all__ = ["within"]

Found = TypeVar("Found")


def within(seconds: float, look: Callable[[], Found], otherwise: Found) -> Found:
    """What ``look`` returns if it does so in time and without an error; else ``otherwise``.

    One who takes longer is left to its thread, which does not keep the process alive.

    >>> within(1.0, lambda: 7, 0), within(1.0, lambda: 1 // 0, 0)
    (7, 0)
    """
    found: list[Found] = []

    def run() -> None:
        try:
            found.append(look())
        except Exception:  # noqa: BLE001 - whatever the system does not tell stays unknown
            return

    thread = threading.Thread(target=run, name="look", daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else otherwise

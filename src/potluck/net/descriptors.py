"""Which descriptors are ours, so that a forked child can let go of them.

A child made by :func:`os.fork` (a data loader, for instance) inherits every socket.  Were it to
keep them, the death of its parent would go unnoticed, because the connection would still be open.
So the child closes every Potluck descriptor at once and silently, without a word on the wire: it
takes no lock (another thread of the parent may have held it at the fork) and shuts nothing down.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Protocol

from potluck.forking import call_in_children

__all__ = ["on_fork", "track"]


class _Closable(Protocol):
    def close(self) -> None: ...


class _Heir(Protocol):
    def become_forked(self) -> None:
        """Runs in the child: refuse all further use, take no lock."""


# Keyed by id: the objects need not be hashable, and a plain dict is copied in one step.
_owned: dict[int, weakref.ref[_Closable]] = {}
_heirs: dict[int, weakref.ref[_Heir]] = {}


def track(owner: _Closable) -> None:
    """Close ``owner`` in every forked child; forget it when it is collected."""
    key = id(owner)
    _owned[key] = weakref.ref(owner, lambda _: _owned.pop(key, None))


def on_fork(heir: _Heir) -> None:
    """Tell ``heir`` in every forked child, after the descriptors are closed."""
    key = id(heir)
    _heirs[key] = weakref.ref(heir, lambda _: _heirs.pop(key, None))


def _let_go() -> None:
    for owner in [reference() for reference in list(_owned.values())]:
        if owner is not None:
            with contextlib.suppress(OSError):
                owner.close()
    for heir in [reference() for reference in list(_heirs.values())]:
        if heir is not None:
            heir.become_forked()
    _owned.clear()
    _heirs.clear()


call_in_children(_let_go)

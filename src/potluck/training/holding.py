"""While an operation is under way, PyTorch refuses to resize the storages that it uses.

Resizing frees a storage's memory, and an operation that runs beside the program would then read or
write what is no longer the tensor's.  A storage of memory that PyTorch does not own cannot be
resized.  So a held storage gets such a description of its own memory, and the real one, which owns
the memory, stays with the hold until that is released.  The address does not change.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from potluck.forking import call_in_children

__all__ = ["Hold"]

_swap: Any = getattr(torch.UntypedStorage, "_swap_data_ptr_", None)  # older versions have none


class _Memory:
    """Bytes at an address, as numpy's array interface describes them; owns nothing."""

    __slots__ = ("__array_interface__",)

    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


class _Held:
    """A storage in use, with what owns its memory meanwhile."""

    __slots__ = ("_address", "_owner", "_storage", "users")

    def __init__(self, storage: torch.UntypedStorage, address: int) -> None:
        self.users = 1
        self._storage, self._address = storage, address
        seen = np.asarray(_Memory(address, storage.nbytes()))
        self._owner = torch.frombuffer(seen, dtype=torch.uint8).untyped_storage()
        _swap(storage, self._owner)

    @property
    def key(self) -> int:
        return int(self._storage._cdata)  # noqa: SLF001

    @property
    def is_in_place(self) -> bool:
        """Whether the storage has this memory still; moving it elsewhere is not prevented."""
        return self._storage.data_ptr() == self._address

    def end(self) -> None:
        if self.is_in_place:
            _swap(self._storage, self._owner)


_all: dict[int, _Held] = {}
_lock = threading.Lock()  # not one that its owner may take again: see _leaving
_leaving: deque[_Held] = deque()
"""Uses that are over.  A finalizer may run inside the lock, so it only adds to this."""


@call_in_children
def _renew_lock() -> None:
    """Another thread of the parent may have had it."""
    global _lock  # noqa: PLW0603
    _lock = threading.Lock()


def _hold(storage: torch.UntypedStorage) -> _Held | None:
    """Hold a storage; None where that is not needed, or would change what it is."""
    with _lock:
        _settle()
        held = _all.get(int(storage._cdata))  # noqa: SLF001
        if held is not None and held.is_in_place:
            held.users += 1
            return held
        if not storage.resizable() or storage.is_shared() or not storage.nbytes():
            return None
        held = _Held(storage, storage.data_ptr())
        _all[held.key] = held
        return held


def _settle() -> None:
    """End the holds that nothing uses any more; with the lock."""
    while _leaving:
        held = _leaving.popleft()
        held.users -= 1
        if held.users == 0:
            if _all.get(held.key) is held:
                del _all[held.key]
            held.end()


class Hold:
    """The storages of an operation, until it has ended.

    >>> tensor = torch.ones(2)
    >>> hold = Hold([tensor])
    >>> tensor.untyped_storage().resizable()
    False
    >>> hold.release(); tensor.untyped_storage().resizable()
    True
    """

    __slots__ = ("_held",)

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._held: list[_Held] = []
        if _swap is None:
            return
        for tensor in tensors:
            if tensor.layout is torch.strided and tensor.is_cpu:
                held = _hold(tensor.untyped_storage())
                if held is not None:
                    self._held.append(held)

    def release(self) -> None:
        """Let the storages be resized again, if nothing else uses them; twice does no harm."""
        if self._held:
            mine, self._held = self._held, []
            _leaving.extend(mine)
            with _lock:
                _settle()

    def __del__(self) -> None:
        """Release what was not: an operation that did not even begin."""
        _leaving.extend(self._held)
        while _leaving and _lock.acquire(blocking=False):  # else, who has it will
            try:
                _settle()
            finally:
                _lock.release()

"""Work as PyTorch sees it: what ``async_op=True`` returns, and what C++ waits for.

Errors reach the waiting caller unchanged.  A future is handed out as the successor of an empty one:
an error set on a future directly would end the process when DistributedDataParallel reads it.
"""

from __future__ import annotations

import copy
import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from types import FunctionType
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from potluck._platform import call_in_children
from potluck.collective.call import Work
from potluck.errors import Timeout

# --------------------------------------------------------------------------------------------------
# Keeps ``torch.compile`` out of what PyTorch calls here.
#
# Its tracer would follow DistributedDataParallel into the operations of a group, where sockets and
# threads are.

Class = TypeVar("Class", bound=type)

_ALSO = frozenset(
    {"__call__", "_allgather_base", "_reduce_scatter_base", "_start_coalescing", "_end_coalescing"}
)
"""Methods that PyTorch calls although they are not public."""

_disable = torch.compiler.disable(  # type: ignore[no-untyped-call]
    reason="an operation of Potluck is not part of a graph"
)


def untraced_methods(kind: Class) -> Class:
    """The class; the tracer stops before its public methods and looks at nothing they call."""
    for name, member in list(vars(kind).items()):
        if isinstance(member, FunctionType) and (not name.startswith("_") or name in _ALSO):
            setattr(kind, name, _disable(member))
    return kind


# --------------------------------------------------------------------------------------------------

LEAST = 1e-3
"""Seconds for a look at what may be done already."""


def seconds(limit: timedelta | float | None) -> float | None:
    """A time limit in seconds; None where PyTorch means that there is none.

    >>> seconds(timedelta(minutes=1)), seconds(timedelta(0)), seconds(timedelta(milliseconds=-1))
    (60.0, None, None)
    """
    if limit is None:
        return None
    value = limit.total_seconds() if isinstance(limit, timedelta) else float(limit)
    return value if value > 0 else None


def in_their_words(error: Timeout) -> Timeout:
    """The same, naming what a user of PyTorch has set."""
    told = copy.copy(error)
    told.message = f"{error.message} (the timeout of the call or of the process group)"
    return told


def future_of(work: Work[Any], value: Callable[[], Any]) -> torch.futures.Future[Any]:
    """A future of what a work leads to, or of what went wrong.

    Callbacks of futures run on the thread that does the works.  One that starts a further work and
    waits for its future would block that thread for ever: so such a work is done before.
    """
    if work._help is not None:  # noqa: SLF001 - does nothing on any other thread
        work._help(work)  # noqa: SLF001
    begun: torch.futures.Future[None] = torch.futures.Future()

    def outcome(_: object) -> Any:
        work.result()
        return value()

    future: torch.futures.Future[Any] = begun.then(outcome)
    work.add_done_callback(lambda: begun.set_result(None))
    return future


def future_of_half(
    work: Work[Any], tensors: list[torch.Tensor]
) -> torch.futures.Future[list[torch.Tensor]]:
    """The same of tensors, in C++ too: there BuiltinCommHookType.FP16_COMPRESS asks for a list.

    A future made by Python holds a Python object.  One that TorchScript has begun holds what it
    says; it waits without a thread.
    """
    begun = future_of(work, nothing)
    fork: Any = torch.jit.fork
    typed: torch.futures.Future[list[torch.Tensor]] = fork(_after(), begun, tensors)
    return typed


def nothing() -> None:
    """Nothing remains to be done."""


@functools.cache
def _after() -> Any:
    unit = torch.jit.CompilationUnit(
        """
def after(begun: Future[int], tensors: List[Tensor]) -> List[Tensor]:
    torch.jit.wait(begun)
    return tensors
"""
    )
    return unit.after


@untraced_methods
class PotluckWork(dist.Work):
    """An operation under way, with the tensors that it fills."""

    def __init__(
        self,
        work: Work[Any],
        outputs: Sequence[torch.Tensor] = (),
        *,
        limit: float | None = None,
        source: Callable[[], int] | None = None,
        after: Work[None] | None = None,
    ) -> None:
        super().__init__()
        self._work = work
        self._outputs = list(outputs)
        self._limit = limit
        self._source = source
        self._after = after
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Return when it is done, or raise what went wrong; zero means no limit, as in C++."""
        limit = seconds(timeout)
        try:
            self._work.wait(self._limit if limit is None else limit)
        except Timeout as error:
            raise in_their_words(error) from None
        if self._after is not None:
            self._after.wait(1.0)
        return True

    def synchronize(self) -> None:
        """The same: there is no device that could run ahead."""
        self.wait()

    def block_current_stream(self) -> None:
        """The same."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        return self._work.done

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self._work.done and self._work.exception() is None

    def exception(self) -> Any:
        """What went wrong, or None."""
        return self._work.exception() if self._work.done else None

    def result(self) -> list[torch.Tensor]:
        """The tensors that it filled."""
        self.wait()
        return self._outputs

    def source_rank(self) -> int:
        """Who sent what was received."""
        if self._source is None:
            msg = "Only a receive has a source"
            raise RuntimeError(msg)
        return self._source()

    def _source_rank(self) -> int:
        return self.source_rank()

    def get_future(self) -> torch.futures.Future[Any]:
        """A future with the tensors, or with what went wrong."""
        if self._future is None:
            if self._outputs and self._outputs[0].dtype is torch.float16:
                self._future = future_of_half(self._work, self._outputs)
            else:
                self._future = future_of(self._work, lambda: self._outputs)
        return self._future

    def get_future_result(self) -> torch.futures.Future[Any]:
        """The same; there are no further kinds of results."""
        return self.get_future()


def _until(deadline: float | None) -> timedelta:
    """What is left, as a limit of PyTorch: none at all would be no limit."""
    if deadline is None:
        return timedelta(0)
    return timedelta(seconds=max(LEAST, deadline - time.monotonic()))


@untraced_methods
class AllWork(dist.Work):
    """Several operations that were started together."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        super().__init__()
        self._works = list(works)

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Wait for all of them; the limit is for all together."""
        limit = seconds(timeout)
        deadline = None if limit is None else time.monotonic() + limit
        for work in self._works:
            work.wait(_until(deadline))
        return True

    def synchronize(self) -> None:
        """The same."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether all have ended."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Whether all have ended well."""
        return all(work.is_success() for work in self._works)

    def exception(self) -> Any:
        """What went wrong first, or None."""
        found = (work.exception() for work in self._works)
        return next((error for error in found if error is not None), None)

    def result(self) -> list[torch.Tensor]:
        """All tensors that they filled."""
        return [tensor for work in self._works for tensor in work.result()]

    def get_future(self) -> torch.futures.Future[Any]:
        """A future with all tensors."""
        futures = [work.get_future() for work in self._works]
        return torch.futures.collect_all(futures).then(
            lambda done: [tensor for each in done.value() for tensor in each.value()]
        )


# --------------------------------------------------------------------------------------------------
# While an operation is under way, PyTorch refuses to resize the storages that it uses.
#
# Resizing frees a storage's memory, and an operation that runs beside the program would then read
# or write what is no longer the tensor's.  A storage of memory that PyTorch does not own cannot be
# resized.  So a held storage gets such a description of its own memory, and the real one, which
# owns the memory, stays with the hold until that is released.  The address does not change.

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


class StorageHold:
    """The storages of an operation, until it has ended.

    >>> tensor = torch.ones(2)
    >>> hold = StorageHold([tensor])
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

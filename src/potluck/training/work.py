"""Work as PyTorch sees it: what ``async_op=True`` returns, and what C++ waits for.

Errors reach whoever waits as they are.  A future is handed out as the successor of an empty one:
an error set on a future directly would end the process when DistributedDataParallel reads it.
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from potluck.errors import Timeout
from potluck.runtime.work import Work
from potluck.training.untraced import untraced_methods

__all__ = ["AllWork", "PotluckWork", "future_of", "in_their_words", "seconds"]


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
    told.message = f"{error.message}, and the timeout of {error.seconds:.3g} s has passed"
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

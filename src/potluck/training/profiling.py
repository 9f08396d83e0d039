"""Names and shapes of operations in PyTorch's profiler; costs next to nothing while none runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from potluck.runtime.work import Work

__all__ = ["Record", "record"]


class Record:
    """An operation in a profile, from its start to its end on another thread.

    The profiler takes for asynchronous what ends elsewhere; so whoever carries the operation out
    calls :meth:`finish`, and whoever waits for it waits for that.
    """

    def __init__(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        self._handle = torch.autograd._record_function_with_args_enter(  # type: ignore[attr-defined] # noqa: SLF001
            name, *tensors
        )
        self.ended: Work[None] = Work()

    def finish(self) -> None:
        """The operation has ended."""
        if not self.ended.done:
            torch.autograd._record_function_with_args_exit(self._handle)  # type: ignore[attr-defined] # noqa: SLF001
            self.ended.succeed(None)


class Watched:
    """An errand for the courier: the record of a message ends with it."""

    def __init__(self, work: Work[object], entry: Record) -> None:
        self._work = work
        self._entry = entry

    @property
    def done(self) -> bool:
        """Whether the message has moved."""
        if self._work.done:
            self._entry.finish()
        return self._entry.ended.done


def record(name: str, tensors: Sequence[torch.Tensor]) -> Record | None:
    """Show an operation in the profile that is being taken, if one is."""
    if torch.autograd._profiler_enabled():  # type: ignore[attr-defined] # noqa: SLF001
        return Record(name, tensors)
    return None

"""Messages of the process group: from one rank to another, or from whoever sends first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from potluck.arrays.base import Access
from potluck.runtime.any_source import AnySource, AnyTransfer
from potluck.runtime.transfers import Transfer
from potluck.runtime.work import Work
from potluck.training.holding import Hold
from potluck.training.process_group_base import NAME, GroupBase, both
from potluck.training.profiling import Record, Watched, record
from potluck.training.untraced import untraced_methods
from potluck.training.work import PotluckWork

__all__ = ["MessagingGroup"]


@untraced_methods
class MessagingGroup(GroupBase):
    """Sends and receives; all of them are under way when they return."""

    def __init__(self, backend: Any, timeout: timedelta | None, group_id: str = "") -> None:
        super().__init__(backend, timeout, group_id)
        self._receives = AnySource(backend)

    def send(self, tensors: Sequence[torch.Tensor], dst: int, tag: int = 0) -> dist.Work:
        """Start sending; the tensor must not change until the work is done."""
        (tensor,) = tensors
        entry = record(f"{NAME}:send", [tensor])
        hold, lease = Hold([tensor]), self._lend([tensor], Access.READ)
        operation = self._context.post_send(lease.flat.view("u1"), dst, tag=tag)
        transfer = Transfer(operation, self._context.progress, both(hold.release, lease.give_back))
        return self._under_way(transfer, tensor, entry, hold)

    def recv(self, tensors: Sequence[torch.Tensor], src: int, tag: int = 0) -> dist.Work:
        """Start receiving from a rank; the tensor must not be used until the work is done."""
        (tensor,) = tensors
        entry = record(f"{NAME}:recv", [tensor])
        hold = Hold([tensor])
        lease = self._lend([tensor], Access.UPDATE)  # a shorter message leaves the rest as it is
        operation = self._receives.post(lease.flat.view("u1"), src, tag)
        transfer = Transfer(operation, self._context.progress, both(hold.release, lease.give_back))
        return self._under_way(transfer, tensor, entry, hold, lambda: src)

    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int = 0) -> dist.Work:
        """Start receiving from whoever sends first."""
        (tensor,) = tensors
        entry = record(f"{NAME}:recvAnySource", [tensor])
        hold, lease = Hold([tensor]), self._lend([tensor], Access.UPDATE)
        finish = both(hold.release, lease.give_back)
        transfer = AnyTransfer(self._receives, lease.flat.view("u1"), tag, finish)
        return self._under_way(transfer, tensor, entry, hold, lambda: transfer.source)

    def _under_way(
        self,
        transfer: Work[Any],
        tensor: torch.Tensor,
        entry: Record | None,
        hold: Hold,
        source: Callable[[], int] | None = None,
    ) -> dist.Work:
        transfer.add_done_callback(hold.release)  # where it has failed
        if entry is not None:
            self._courier.carry(Watched(transfer, entry))
        elif not transfer.done:
            self._courier.carry(transfer)
        work = PotluckWork(
            transfer,
            [tensor],
            limit=self._context.timeout,
            source=source,
            after=None if entry is None else entry.ended,
        )
        return self._joined(work)

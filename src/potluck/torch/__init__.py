"""Registers the backend ``potluck`` with PyTorch: three lines take a script to the cluster.

::

    import torch.distributed as dist, potluck.torch
    dist.init_process_group("potluck")

Everything that stands on ``torch.distributed`` then runs on it.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from potluck.torch.hooks import CompressHook, compress_hook
from potluck.torch.process_group import ProcessGroup, register
from potluck.torch.store import Options

__all__ = ["CompressHook", "Options", "ProcessGroup", "compress_hook", "monitored_barrier"]


def monitored_barrier(
    group: dist.ProcessGroup | None = None,
    timeout: timedelta | float | None = None,
    *,
    wait_all_ranks: bool = True,
) -> None:
    """Wait for all ranks of a group; the error on every rank names those that are late.

    Takes the place of ``dist.monitored_barrier``, which asks for Gloo by name.
    """
    chosen: object = dist.group.WORLD if group is None else group
    if chosen is dist.GroupMember.NON_GROUP_MEMBER:
        return  # this rank is in another group
    if not isinstance(chosen, ProcessGroup):
        msg = "potluck.torch.monitored_barrier is for groups of the backend 'potluck'"
        raise TypeError(msg)
    limit = timedelta(seconds=timeout) if isinstance(timeout, int | float) else timeout
    chosen.monitored_barrier(limit, wait_all_ranks)


register()

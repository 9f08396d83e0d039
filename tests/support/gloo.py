"""Process groups of PyTorch on threads of this process."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import torch
import torch.distributed as dist

from support.threads import together


def gloo_groups(folder: Path, size: int) -> list[dist.ProcessGroup]:
    """All ranks of a group over Gloo."""

    def join(rank: int) -> dist.ProcessGroup:
        store = dist.FileStore(str(folder / "store"), size)  # type: ignore[attr-defined]
        group = dist.ProcessGroup(store, rank, size)
        gloo = dist.ProcessGroupGloo(store, rank, size, dt.timedelta(seconds=30))
        kind = dist.ProcessGroup.BackendType.GLOO
        group._register_backend(torch.device("cpu"), kind, gloo)
        group._set_default_backend(kind)
        return group

    return together(*(lambda rank=rank: join(rank) for rank in range(size)))

"""The process group that PyTorch calls ``potluck``: every collective, every message."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from potluck.backend.base import Backend
from potluck.backend.simulated import SimulatedBackend
from potluck.backend.sub import SubBackend
from potluck.runtime.presence import attend
from potluck.training.forming import Options, form
from potluck.training.process_group_base import NAME
from potluck.training.process_group_exchanging import ExchangingGroup
from potluck.training.process_group_messages import MessagingGroup
from potluck.training.process_group_moving import MovingGroup
from potluck.training.process_group_reducing import ReducingGroup
from potluck.training.rendezvous import register_scheme, store_below

__all__ = ["ProcessGroup", "create", "register"]


class ProcessGroup(ReducingGroup, MovingGroup, ExchangingGroup, MessagingGroup):
    """One rank of a group, as ``torch.distributed`` wants it."""


def create(opts: Any, pg_options: Any = None) -> ProcessGroup:
    """Make the group that PyTorch asks for; called by ``init_process_group`` and ``new_group``."""
    backend = _backend_for(opts, Options.read(pg_options))
    if isinstance(backend, SimulatedBackend):  # alone: the others are attended when they form
        attend(backend)
    group = ProcessGroup(backend, opts.timeout, opts.group_id)
    store = store_below(opts.store)
    if store is not None and store.backend is backend:
        group.keep(store)
    return group


def _backend_for(opts: Any, options: Options) -> Backend:
    """A part of the group that is there already, or a group of its own."""
    members = list(opts.global_ranks_in_group)
    world = dist.group.WORLD
    if members and isinstance(world, ProcessGroup):
        return SubBackend(world.context.innermost, members, name=opts.group_id, in_order=True)
    store = store_below(opts.store)
    if store is not None:  # they have met already
        return SubBackend(store.backend, members, in_order=True) if members else store.backend
    timeout: timedelta = opts.timeout
    return form(opts.store, opts.group_rank, opts.group_size, timeout, options)


def register() -> None:
    """Make the name known to PyTorch; once is enough, twice does no harm."""
    register_scheme()
    if NAME.upper() not in dist.Backend._plugins:  # noqa: SLF001 - there is no other way to ask
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu"])

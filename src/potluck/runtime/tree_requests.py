"""Requests on trees: what a call with a dict, a list or a tuple of arrays means.

The checks that a rank can make alone are made here, before anything moves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from potluck.arrays.base import Access, Lease
from potluck.collective.compression.compressor import TensorCompressor
from potluck.collective.strategies import Strategy
from potluck.collective.task import Collective
from potluck.runtime import requests
from potluck.runtime.call import Call, Purpose
from potluck.runtime.compressed_reduction import COMPRESSIBLE, CompressedReduction
from potluck.runtime.group import Group
from potluck.runtime.requests import Op, Place, Request
from potluck.runtime.tree_calls import Tree, TreeRoutine, Unit

__all__ = ["broadcast_request", "reduction_request"]


def reduction_request(
    group: Group,
    place: Place,
    name_of: Callable[[int], str],
    tree: Tree,
    op: Op,
    *,
    strategy: Strategy | None,
    tensor: TensorCompressor | None,
) -> Request[Any]:
    """Reduce all arrays of a tree, in place where they can be changed."""
    tree.check(lambda lease: requests.reducer_for(op, lease))  # or it would fail in the middle

    def make(unit: Unit) -> Call:
        lease = Lease(unit.flat, unit.shape, _nothing)
        reducer = requests.reducer_for(op, lease)
        task = place.whole(Collective.ALL_REDUCE, unit.flat.size)
        if tensor is None or unit.flat.dtype not in COMPRESSIBLE:
            return Call(task, unit.flat, unit.flat, reducer, strategy, purpose=purpose)
        part = TensorCompressor(tensor.compressor, f"{tensor.name}/{unit.number}")
        return CompressedReduction(group, place, lease, lease, reducer, part, strategy).call()

    purpose = Purpose.ALL_REDUCE_TREE
    routine = TreeRoutine(tree, place, purpose, name_of, make)
    call = routine.call(lambda size: place.whole(Collective.ALL_REDUCE, size))
    if tree.leases:
        call = replace(call, reducer=requests.reducer_for(op, tree.leases[0]))
    return Request(call, tree.give_back)


def broadcast_request(
    place: Place,
    name_of: Callable[[int], str],
    tree: Any,
    root: int,
    strategy: Strategy | None,
) -> Request[Any]:
    """Give all ranks the arrays of one rank's tree, in place where they can be changed."""
    is_root = place.rank == root
    lent = Tree(tree, Access.READ if is_root else Access.UPDATE)

    def make(unit: Unit) -> Call:
        task = place.whole(Collective.BROADCAST, unit.flat.size, root)
        source = unit.flat if is_root else requests.nothing(unit.flat.dtype)
        return Call(task, source, unit.flat, None, strategy, purpose=purpose)

    purpose = Purpose.BROADCAST_TREE
    routine = TreeRoutine(lent, place, purpose, name_of, make)
    call = routine.call(lambda size: place.whole(Collective.BROADCAST, size, root))
    return Request(call, lent.give_back)


def _nothing() -> None:
    return None

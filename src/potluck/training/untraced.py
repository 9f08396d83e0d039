"""Keeps ``torch.compile`` out of what PyTorch calls here.

Its tracer would follow DistributedDataParallel into the operations of a group, where sockets and
threads are.
"""

from __future__ import annotations

from types import FunctionType
from typing import TypeVar

import torch

__all__ = ["untraced_methods"]

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

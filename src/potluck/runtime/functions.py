"""Collectives as functions, on any backend: ``all_reduce(backend, array)``.

They block.  For asynchronous work, metrics and objects make a :class:`DistributedContext` of the
backend; both may be used side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeVar

from potluck.backend.base import Backend
from potluck.runtime.compressing import Compression
from potluck.runtime.distributed import DistributedBackend
from potluck.runtime.lifted import Lifted
from potluck.runtime.requests import Op, StrategyName
from potluck.vocabulary import Seconds

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "allreduce",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
]

A = TypeVar("A")


def _lifted(backend: Backend) -> DistributedBackend:
    return backend if isinstance(backend, DistributedBackend) else Lifted(backend)


def all_reduce(
    backend: Backend,
    array: A,
    op: Op = "sum",
    *,
    out: A | None = None,
    dtype: Any = None,
    strategy: StrategyName = None,
    compression: Compression = None,
    timeout: Seconds | None = None,
) -> A:
    """Give every rank the reduction of all ranks' arrays, in place or in ``out``.

    >>> from potluck import SimulatedBackend
    >>> backend, = SimulatedBackend.create_group(1)
    >>> buffer = bytearray(8)
    >>> all_reduce(backend, buffer, dtype="float32") is buffer
    True
    >>> backend.close()
    """
    return _lifted(backend).all_reduce(
        array,
        op,
        out=out,
        dtype=dtype,
        strategy=strategy,
        compression=compression,
        timeout=timeout,
    )


allreduce = all_reduce
"""The name that some know it by."""


def reduce(
    backend: Backend,
    array: A,
    root: int = 0,
    op: Op = "sum",
    *,
    out: A | None = None,
    dtype: Any = None,
    strategy: StrategyName = None,
    timeout: Seconds | None = None,
) -> A | None:
    """Give one rank the reduction of all ranks' arrays; the others get None.

    >>> from concurrent.futures import ThreadPoolExecutor
    >>> import numpy as np
    >>> from potluck import SimulatedBackend
    >>> def run(backend):
    ...     with backend:
    ...         return reduce(backend, np.array([backend.rank + 1]))
    >>> with ThreadPoolExecutor(2) as ranks:
    ...     print(list(ranks.map(run, SimulatedBackend.create_group(2))))
    [array([3]), None]
    """
    return _lifted(backend).reduce(
        array, root, op, out=out, dtype=dtype, strategy=strategy, timeout=timeout
    )


def reduce_scatter(
    backend: Backend,
    array: A,
    op: Op = "sum",
    *,
    counts: Sequence[int] | None = None,
    out: A | None = None,
    dtype: Any = None,
    timeout: Seconds | None = None,
) -> A:
    """Reduce all ranks' arrays and give each rank its own rows of the result.

    >>> from concurrent.futures import ThreadPoolExecutor
    >>> import numpy as np
    >>> from potluck import SimulatedBackend
    >>> def run(backend):
    ...     with backend:
    ...         return reduce_scatter(backend, np.array([1, 2])).tolist()
    >>> with ThreadPoolExecutor(2) as ranks:
    ...     print(list(ranks.map(run, SimulatedBackend.create_group(2))))
    [[2], [4]]
    """
    return _lifted(backend).reduce_scatter(
        array, op, counts=counts, out=out, dtype=dtype, timeout=timeout
    )


def broadcast(
    backend: Backend,
    array: A,
    root: int = 0,
    *,
    strategy: StrategyName = None,
    timeout: Seconds | None = None,
) -> A:
    """Give every rank the array of one, in place.

    >>> from concurrent.futures import ThreadPoolExecutor
    >>> import numpy as np
    >>> from potluck import SimulatedBackend
    >>> def run(backend):
    ...     with backend:
    ...         return broadcast(backend, np.array([backend.rank + 7])).tolist()
    >>> with ThreadPoolExecutor(2) as ranks:
    ...     print(list(ranks.map(run, SimulatedBackend.create_group(2))))
    [[7], [7]]
    """
    return _lifted(backend).broadcast(array, root, strategy=strategy, timeout=timeout)


def all_gather(
    backend: Backend,
    array: A,
    *,
    counts: Sequence[int] | Literal["ask"] | None = None,
    out: A | None = None,
    timeout: Seconds | None = None,
) -> A:
    """Give every rank all ranks' arrays, one after the other along the first dimension.

    >>> from concurrent.futures import ThreadPoolExecutor
    >>> import numpy as np
    >>> from potluck import SimulatedBackend
    >>> def run(backend):
    ...     with backend:
    ...         return all_gather(backend, np.array([backend.rank])).tolist()
    >>> with ThreadPoolExecutor(2) as ranks:
    ...     print(list(ranks.map(run, SimulatedBackend.create_group(2))))
    [[0, 1], [0, 1]]
    """
    return _lifted(backend).all_gather(array, counts=counts, out=out, timeout=timeout)


def gather(
    backend: Backend,
    array: A,
    root: int = 0,
    *,
    counts: Sequence[int] | Literal["ask"] | None = None,
    out: A | None = None,
    timeout: Seconds | None = None,
) -> A | None:
    """Give one rank all ranks' arrays, one after the other; the others get None.

    >>> from concurrent.futures import ThreadPoolExecutor
    >>> import numpy as np
    >>> from potluck import SimulatedBackend
    >>> def run(backend):
    ...     with backend:
    ...         return gather(backend, np.array([backend.rank]))
    >>> with ThreadPoolExecutor(2) as ranks:
    ...     print(list(ranks.map(run, SimulatedBackend.create_group(2))))
    [array([0, 1]), None]
    """
    return _lifted(backend).gather(array, root, counts=counts, out=out, timeout=timeout)


def scatter(
    backend: Backend,
    array: A | None = None,
    root: int = 0,
    *,
    counts: Sequence[int] | None = None,
    out: A | None = None,
    timeout: Seconds | None = None,
) -> A:
    """Give each rank its rows of one rank's array; the others pass ``out``.

    >>> from concurrent.futures import ThreadPoolExecutor
    >>> import numpy as np
    >>> from potluck import SimulatedBackend
    >>> def run(backend):
    ...     with backend:
    ...         rows = np.array([3, 4]) if backend.rank == 0 else None
    ...         return scatter(backend, rows, out=np.zeros(1, int)).tolist()
    >>> with ThreadPoolExecutor(2) as ranks:
    ...     print(list(ranks.map(run, SimulatedBackend.create_group(2))))
    [[3], [4]]
    """
    return _lifted(backend).scatter(array, root, counts=counts, out=out, timeout=timeout)


def all_to_all(
    backend: Backend,
    array: A,
    *,
    send_counts: Sequence[int] | None = None,
    counts: Sequence[Sequence[int]] | None = None,
    out: A | None = None,
    timeout: Seconds | None = None,
) -> A:
    """Give each rank its rows of every rank's array, one after the other in rank order.

    >>> from concurrent.futures import ThreadPoolExecutor
    >>> import numpy as np
    >>> from potluck import SimulatedBackend
    >>> def run(backend):
    ...     with backend:
    ...         return all_to_all(backend, np.arange(2) + 10 * backend.rank).tolist()
    >>> with ThreadPoolExecutor(2) as ranks:
    ...     print(list(ranks.map(run, SimulatedBackend.create_group(2))))
    [[0, 10], [1, 11]]
    """
    return _lifted(backend).all_to_all(
        array, send_counts=send_counts, counts=counts, out=out, timeout=timeout
    )


def barrier(backend: Backend, *, timeout: Seconds | None = None) -> None:
    """Return when every rank has called this.

    >>> from concurrent.futures import ThreadPoolExecutor
    >>> import numpy as np
    >>> from potluck import SimulatedBackend
    >>> def run(backend):
    ...     with backend:
    ...         return barrier(backend, timeout=10)
    >>> with ThreadPoolExecutor(2) as ranks:
    ...     print(list(ranks.map(run, SimulatedBackend.create_group(2))))
    [None, None]
    """
    _lifted(backend).barrier(timeout)

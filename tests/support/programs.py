"""Random calls of collectives, and what numpy says they must give."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from potluck import DistributedContext
from potluck.collective.call import rows_for
from potluck.schedule.reduce import DTYPES

KINDS = (
    *("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter"),
    *("gather", "scatter", "all_to_all"),
)


@dataclass(frozen=True)
class Step:
    """One call, the same on all ranks but for what they bring along."""

    kind: str
    dtype: Any
    counts: tuple[int, ...]
    """Rows of each rank."""
    width: int
    root: int
    strided: bool
    started: bool
    seed: int

    def brings(self, rank: int) -> Any:
        """What a rank has: small numbers, so that every type can add up five of them."""
        each = sum(self.counts) if self.kind != "all_gather" else self.counts[rank]
        rows = self.counts[rank] if self.kind == "gather" else each
        source = np.random.default_rng([self.seed, rank])
        values = source.integers(0, 20, (rows, self.width)).astype(self.dtype)
        if not self.strided:
            return values
        spread = np.zeros((rows, self.width * 2), self.dtype)
        spread[:, ::2] = values
        return spread[:, ::2]

    def call(self, context: DistributedContext) -> Any:
        """Make the call on one rank."""
        array = self.brings(context.rank)
        options: dict[str, Any] = {"async_op": True} if self.started else {}
        if self.kind in {"reduce", "broadcast", "gather", "scatter"}:
            options["root"] = self.root
        if self.kind in {"all_gather", "gather", "reduce_scatter", "scatter"}:
            options["counts"] = self.counts
        if self.kind == "scatter":
            options["out"] = np.zeros((self.counts[context.rank], self.width), self.dtype)
            array = array if context.rank == self.root else None
        return getattr(context, self.kind)(array, **options)

    def expected(self, rank: int) -> Any:
        """What that rank must get."""
        arrays = [self.brings(each) for each in range(len(self.counts))]
        if self.kind in {"all_reduce", "reduce", "reduce_scatter"}:
            total = np.add.reduce([each.astype(self.dtype) for each in arrays], dtype=self.dtype)
            if self.kind == "reduce":
                return total if rank == self.root else None
            return total if self.kind == "all_reduce" else self.own(total, rank)
        if self.kind == "broadcast":
            return arrays[self.root]
        if self.kind == "scatter":
            return self.own(arrays[self.root], rank)
        if self.kind == "all_to_all":
            ends = np.cumsum([0, *rows_for(sum(self.counts), len(self.counts))])
            return np.concatenate([each[ends[rank] : ends[rank + 1]] for each in arrays])
        return np.concatenate(arrays) if self.kind == "all_gather" or rank == self.root else None

    def own(self, array: Any, rank: int) -> Any:
        """The rows of an array that belong to a rank."""
        start = sum(self.counts[:rank])
        return array[start : start + self.counts[rank]]


def steps(size: int) -> st.SearchStrategy[Step]:
    """Any call of a group of so many ranks."""
    return st.builds(
        Step,
        kind=st.sampled_from(KINDS),
        dtype=st.sampled_from(DTYPES),
        counts=st.tuples(*[st.integers(0, 9)] * size),
        width=st.integers(0, 3),
        root=st.integers(0, size - 1),
        strided=st.booleans(),
        started=st.booleans(),
        seed=st.integers(0, 1 << 32),
    )


def compare(program: list[Step], rank: int, results: list[Any]) -> None:
    """Fail where a rank's results are not what they must be."""
    for step, result in zip(program, results, strict=True):
        expected = step.expected(rank)
        assert (result is None) == (expected is None)
        if expected is not None:
            assert result.dtype == step.dtype
            assert np.array_equal(result, expected), (step, result, expected)


def run(program: list[Step], context: DistributedContext) -> list[Any]:
    """Make all calls, and wait for those that were started at the end."""
    results = [step.call(context) for step in program]
    return [
        result.wait(30) if step.started else result
        for step, result in zip(program, results, strict=True)
    ]

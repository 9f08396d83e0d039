"""One try of a step: the record that everybody sends, then the buckets, always in this order.

It may begin before all gradients are there, while a backward pass still computes; whoever has
nothing to compute makes the same operations at once.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from potluck.arrays.base import Array
from potluck.collective.compression.compressor import GradientCompressor
from potluck.core.steps import Position
from potluck.errors import DistributedError
from potluck.runtime.distributed import DistributedBackend
from potluck.runtime.work import Work
from potluck.training.elastic_averaging import Buckets, Gradients
from potluck.training.elastic_record import LENGTH, Record

__all__ = ["Try"]

ENDING = 5.0
"""Seconds in which operations of a view that is over come to their end."""


class Try:
    """What of a step is under way in one view."""

    def __init__(
        self,
        attempt: Position,
        group: DistributedBackend,
        record: Record,
        compressor: GradientCompressor | None,
    ) -> None:
        self.attempt, self.weight = attempt, record.weight
        self._group, self._compressor = group, compressor
        self._row = record.encode()
        self._told: Work[npt.NDArray[np.int64]] | None = None
        self._records: tuple[Record, ...] = ()
        self._works: list[Work[Array]] = []

    def start(self) -> None:
        """Send the record meanwhile."""
        self._told = self._group.gather_records(self._row, async_op=True)

    def records(self, timeout: float | None) -> tuple[Record, ...]:
        """What everybody brings."""
        if not self._records:
            told = self._told
            rows = (
                self._group.gather_records(self._row, timeout)
                if told is None
                else told.wait(timeout)
            )
            numbered = enumerate(rows.reshape(-1, LENGTH).tolist())
            self._records = tuple(Record.decode(row, rank) for rank, row in numbered)
        return self._records

    @property
    def begun(self) -> int:
        """Buckets that are under way or done."""
        return len(self._works)

    def launch(self, buckets: Buckets, timeout: float | None) -> None:
        """Begin with the next bucket, which is packed."""
        total = 0.0
        if self._compressor is not None:
            total = sum(record.weight for record in self.records(timeout))
        self._works.append(buckets.start(self.begun, self._group, self._compressor, total))

    def finish(self, gradients: Gradients, timeout: float | None) -> None:
        """Have the mean of everything."""
        buckets = gradients.buckets
        while self.begun < len(buckets.all):
            gradients.pack(self.begun, self.weight)
            self.launch(buckets, timeout)
        for number, work in enumerate(self._works):
            work.wait(timeout)
            buckets.finish(number, is_compressed=self._compressor is not None)

    def abandon(self) -> None:
        """The view is over: wait until nothing of this is under way any more."""
        deadline = time.monotonic() + ENDING
        under_way: list[Work[Any]] = [*self._works, *([self._told] if self._told else [])]
        for work in under_way:
            with contextlib.suppress(DistributedError):
                work.ends_within(deadline)

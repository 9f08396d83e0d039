"""ElasticTrainer: training that goes on while machines come and go.

A step is a transaction: gradients are averaged out of place, and applied only when every member
holds the average.  If a member is lost in the middle, the survivors decide alike whether the step
counts; if not, they average again what they have computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from potluck.collective.compression.compressor import GradientCompressor
from potluck.core.steps import Position
from potluck.runtime.context import DistributedContext
from potluck.runtime.work import Work
from potluck.training.checkpoint import Checkpoint, Checkpointer
from potluck.training.elastic_averaging import Gradients
from potluck.training.elastic_member import Member, Pending, StepOutcome
from potluck.training.sampler import ElasticSampler
from potluck.training.sampler_intervals import Intervals, total
from potluck.training.sampler_order import Indices
from potluck.training.state import TrainingState
from potluck.training.state_sync import SyncReport

__all__ = ["ElasticTrainer", "StepOutcome"]


class ElasticTrainer(Member):
    """Runs steps on a cluster, or on any group.

    ``apply`` gets the tree of averaged gradients and changes the model; it is called for committed
    steps alone, and the arrays are lent for the call.  ``sampler`` and ``batch`` (samples of all
    members together) hand out data; ``compressor`` saves bytes.  Every ``verify_every`` steps the
    members compare their states, and put right what differs.

    >>> import numpy as np
    >>> from potluck import DistributedContext, SimulatedBackend
    >>> weights = np.zeros(2)
    >>> def descend(gradient): weights[:] -= 0.5 * gradient
    >>> with DistributedContext(SimulatedBackend.create_group(1)[0]) as group:
    ...     trainer = ElasticTrainer(group, TrainingState(model=weights), descend)
    ...     trainer.step(np.array([2.0, 4.0])).step
    1
    >>> weights.tolist()
    [-1.0, -2.0]
    """

    def __init__(
        self,
        cluster: DistributedContext,
        state: TrainingState,
        apply: Callable[[Any], None],
        *,
        sampler: ElasticSampler | None = None,
        batch: int | None = None,
        compressor: GradientCompressor | None = None,
        verify_every: int = 100,
        timeout: float | None = None,
    ) -> None:
        if (sampler is None) != (batch is None):
            msg = "sampler= and batch= belong together: batch is what all members take per step"
            raise ValueError(msg)
        whole = state if sampler is None else state.with_part("sampler", sampler)
        super().__init__(cluster, whole, apply)
        self.sampler, self.batch = sampler, batch or 0
        self._compressor = compressor
        if compressor is not None:
            compressor.auto_commit = False  # what it remembers changes when a step is committed
        self._verify_every, self._timeout = verify_every, timeout
        self._taken_at = 0.0

    @property
    def step_count(self) -> int:
        """Steps that are committed."""
        return self.position.step

    def start(self) -> None:
        """Meet the others and get the state; returns when this member can begin to compute."""
        self._repeat(lambda _: None)

    def take(self) -> Indices:
        """This member's samples for the next step; the same ones until that is done."""
        if self.sampler is None:
            msg = "This trainer has no sampler= and batch= to take samples from"
            raise ValueError(msg)
        if self._taken is None:
            view = self._settled
            share = self._share(view) if view is not None else self._repeat(self._share)
            self._taken: Intervals | None = share
        self._taken_at = time.perf_counter()
        return self.sampler.indices(self._taken)

    def step(self, gradients: Any, weight: float | None = None) -> StepOutcome:
        """Average these gradients with those of all members, and apply the result everywhere.

        ``weight`` is how much they count: unless given, the samples taken, or 1.  With a weight of
        0 they are not looked at.  Returns when the step is committed and applied here.
        """
        size = 1 if self._taken is None else total(self._taken)
        if self._taken is not None:
            self._speed.note(size, time.perf_counter() - self._taken_at)
        counts = float(size) if weight is None else float(weight)
        if self._pending is None or not self._report.holds:
            self._pending = Pending(Gradients(gradients, self._room), counts)
        # Otherwise the last call was interrupted with a result that the others may have applied.
        return self._repeat(self._try)

    def verify(self) -> SyncReport:
        """Compare the states of all members, and put right those that differ; all call this."""
        self.last_sync = self._repeat(self._compare)
        return self.last_sync

    # -- checkpoints -----------------------------------------------------------------------------

    def save(self, checkpointer: Checkpointer) -> Work[Any]:
        """Save the state after the last committed step, meanwhile."""
        lineage, epoch, step = self.position
        return checkpointer.save(self._state.capture(), step, lineage=lineage, epoch=epoch)

    def resume(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint; call it before :meth:`start`."""
        if self._settled is not None:
            msg = "A checkpoint is loaded before the trainer starts: the others have a state now"
            raise ValueError(msg)
        self._state.restore(checkpoint.tree())
        self._become(Position(checkpoint.lineage, checkpoint.epoch, checkpoint.step))

    def __enter__(self) -> Self:
        """Meet the others."""
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """The cluster is the caller's to close."""

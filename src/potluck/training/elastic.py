"""ElasticTrainer: training that goes on while machines come and go.

A step is a transaction: gradients are averaged out of place, and applied only when every member
holds the average.  If a member is lost in the middle, the survivors decide alike whether the step
counts; if not, they average again what they have computed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, Self

from potluck.closing import Closing
from potluck.collective.compression.compressor import GradientCompressor
from potluck.logs import get_logger
from potluck.runtime.context import DistributedContext
from potluck.runtime.work import Work
from potluck.training.checkpoint import Checkpoint, Checkpointer
from potluck.training.counting import count_save, count_step
from potluck.training.elastic_averaging import Buckets, Gradients
from potluck.training.elastic_early import HeadStart
from potluck.training.elastic_outcome import Pending, StepOutcome
from potluck.training.elastic_record import HEAVIEST
from potluck.training.elastic_saving import Saving, own_part, restore_own
from potluck.training.sampler import ElasticSampler
from potluck.training.sampler_intervals import Intervals, total
from potluck.training.sampler_order import Indices
from potluck.training.state import TrainingState
from potluck.training.state_sync import SyncReport
from potluck.vocabulary import Seconds, in_seconds

__all__ = ["ElasticTrainer", "StepOutcome"]

logger = get_logger(__name__)


class ElasticTrainer(HeadStart, Closing):
    """Runs steps on a cluster, or on any group.

    ``apply`` gets the tree of averaged gradients and changes the model; it is called for committed
    steps alone, and the arrays are lent for the call.  ``sampler`` and ``batch`` (samples of all
    members together) hand out data; ``compressor`` saves bytes.  Every ``verify_every`` steps the
    members compare their states, and put right what differs.  Every ``save_every`` steps they save
    into the folder ``checkpoints``, each its own or one for all, where ``keep`` checkpoints stay;
    with ``potluck run --resume`` this goes on from the last good one.  If all are damaged that
    raises :class:`~potluck.IoError`, unless ``fresh_start`` asks to begin anew then.

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
        checkpoints: str | os.PathLike[str] | None = None,
        save_every: int = 100,
        keep: int = 3,
        fresh_start: bool = False,
        timeout: Seconds | None = None,
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
        self._verify_every, self._timeout = verify_every, in_seconds(timeout)
        self._taken_at = 0.0
        self._saving = Saving(checkpoints, save_every, keep, fresh_start=fresh_start)
        found = self._saving.found()
        for each in self._saving.damaged:
            self._ground.note_event(each)
        if found is not None:
            self.resume(found)

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
        return self.step_in_buckets(gradients, weight)

    def step_in_buckets(
        self,
        tree: Any,
        weight: float | None,
        limit: int | None = None,
        buckets: Buckets | None = None,
    ) -> StepOutcome:
        """The same in operations of at most ``limit`` bytes, some of which may be under way."""
        if self._taken is not None:
            self._pace.meter.note(total(self._taken), time.perf_counter() - self._taken_at)
        counts = self.counts(weight)
        if self._pending is None and self._begun is not None and self._begun.weight != counts:
            msg = f"Its averaging has begun with the weight {self._begun.weight:g}, not {counts:g}"
            raise ValueError(msg)
        if self._pending is None or not (self._report.holds or self._begun):
            gradients = Gradients(tree, self.room, limit=limit, buckets=buckets)
            self._pending = Pending(gradients, counts)
        # Otherwise the last call was interrupted: the others may have what it was about.
        outcome = count_step(self._group.metrics, lambda: self._repeat(self._try))
        if outcome.counted and self._saving.is_due(outcome.step):
            work = self._saving.save(self._state.capture(), self._own(), self._report.history)
            if work is not None:
                count_save(self._group.metrics, work, self._saving.last_nbytes)
        return outcome

    def note_loss(self, loss: float) -> None:
        """Let metrics, and whoever looks at the run, know this member's loss of the last step."""
        if self._group.metrics is not None:
            self._group.metrics.training.loss.set(float(loss))

    def counts(self, weight: float | None) -> float:
        """How much this member's gradients count; raises ``ValueError`` for what is no weight."""
        if weight is not None:
            if not 0 <= float(weight) <= HEAVIEST:  # also if it is not a number
                msg = f"A weight must be a number from 0 to {HEAVIEST:g}, got {weight}"
                raise ValueError(msg)
            return float(weight)
        return 1.0 if self._taken is None else float(total(self._taken))

    def verify(self) -> SyncReport:
        """Compare the states of all members, and put right those that differ; all call this."""
        self.last_sync = self._repeat(self._compare)
        return self.last_sync

    # -- checkpoints -----------------------------------------------------------------------------

    def save(self, checkpointer: Checkpointer) -> Work[Any]:
        """Save the state after the last committed step, meanwhile."""
        history, tree = self._report.history, self._state.capture()
        lineage, epoch, step = history.position
        work = checkpointer.save(
            tree, step, lineage=lineage, epoch=epoch, history=history, own=self._own()
        )
        return count_save(self._group.metrics, work, checkpointer.last_nbytes)

    def resume(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint; call it before :meth:`start`.

        If the members resume from different checkpoints, the one that contains the other counts,
        then the one that followed a common ancestor longer, then the one with more samples.
        """
        if self._settled is not None:
            msg = "A checkpoint is loaded before the trainer starts: the others have a state now"
            raise ValueError(msg)
        tree = checkpoint.tree()
        try:
            self._state.restore(tree)
        except (ValueError, KeyError, TypeError, RuntimeError) as error:
            msg = (
                f"The checkpoint {checkpoint.folder} is of another training than this: {error}. "
                "Use the script that saved it, or another folder."
            )
            raise ValueError(msg) from error
        if self._compressor is not None:
            restore_own(checkpoint, self._compressor, self._group.rank, self._group.world_size)
        logger.info("Continuing from step %d, saved in %s", checkpoint.step, checkpoint.folder)
        self._loaded = checkpoint.history.position
        self._become(checkpoint.history)

    def _own(self) -> Any:
        return own_part(self._compressor, self._rank)

    def close(self) -> None:
        """Wait for what is being saved; the cluster is the caller's to close."""
        self._saving.close()

    def __enter__(self) -> Self:
        """Meet the others."""
        self.start()
        return self

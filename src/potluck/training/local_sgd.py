"""Local SGD and DiLoCo: members train by themselves and meet every H steps.

Each member changes its own copy of the parameters.  At a meeting the way that each has gone since
the last one, its *outer gradient*, is averaged, compressed if wanted; an outer optimiser (SGD with
Nesterov's momentum) changes what all had in common by that, and all members continue from there.  A
meeting is an elastic step, so members may come and go.

With ``overlap`` a meeting takes place while members continue computing: what it gives is taken over
that many steps later, and what was computed in between is kept on top of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from potluck._types import Seconds, in_seconds
from potluck.arrays import trees
from potluck.arrays.adapters import adapter_of, as_buffer
from potluck.arrays.base import Access, Array
from potluck.cluster.connections import DialPool
from potluck.collective.call import Work
from potluck.collective.context import DistributedContext
from potluck.compression.compressor import GradientCompressor
from potluck.training.averaging import StepOutcome
from potluck.training.elastic import ElasticTrainer
from potluck.training.sampler import ElasticSampler, Indices
from potluck.training.state import TrainingState

RATE, MOMENTUM = 0.7, 0.9
"""Of the outer optimiser: what DiLoCo's authors found to work over a wide range."""


class LocalSgd:
    """Lets members meet every ``every`` steps.

    ``parameters`` is a tree of arrays that are changed in place, or a pair of functions that get
    and set such a tree.  With ``rate=1`` and ``momentum=0`` a meeting averages the parameters:
    plain local SGD; the defaults are DiLoCo's.  ``compression`` is a method such as ``"int8"`` or
    ``"topk:0.01"``, always with error feedback; None sends all bits.  ``sampler`` and ``batch``
    (samples of all members between two meetings) hand out data.  Further parts of the state that
    all have in common may be given by name; optimisers of the steps in between are each member's
    own.  ``overlap`` is the number of steps that a meeting may take while computing continues;
    until then the cluster is used by nothing else, and :meth:`finish` ends the last one.

    >>> from potluck import DistributedContext, SimulatedBackend
    >>> weights = np.zeros(3, np.float32)
    >>> with DistributedContext(SimulatedBackend.create_group(1)[0]) as group:
    ...     meetings = LocalSgd(group, weights, every=2, rate=1.0, momentum=0.0)
    ...     for _ in range(2):
    ...         weights += 1
    ...         outcome = meetings.step()
    >>> outcome.step, weights.tolist()
    (1, [2.0, 2.0, 2.0])
    """

    def __init__(
        self,
        cluster: DistributedContext,
        parameters: Any,
        *,
        every: int = 50,
        rate: float = RATE,
        momentum: float = MOMENTUM,
        compression: str | None = "int8",
        sampler: ElasticSampler | None = None,
        batch: int | None = None,
        overlap: int = 0,
        checkpoints: str | os.PathLike[str] | None = None,
        save_every: int = 1,
        fresh_start: bool = False,
        timeout: Seconds | None = None,
        **parts: Any,
    ) -> None:
        if every < 1 or not 0 <= momentum < 1:
            msg = f"every must be at least 1 and momentum in [0, 1), got {every} and {momentum}"
            raise ValueError(msg)
        if not 0 <= overlap <= every or (overlap and (parts or sampler is not None)):
            msg = (
                "overlap must be between 0 and every, and cannot be combined with a sampler or "
                "further parts: they would change meanwhile"
            )
            raise ValueError(msg)
        self.overlap = overlap
        self._meeting: Work[StepOutcome] | None = None
        self._since = 0  # steps since it began
        self._left: list[Array] = []  # where the parameters were then
        self._pool = DialPool(at_once=1)
        self._timeout = in_seconds(timeout)
        self.every, self.rate, self.momentum = every, rate, momentum
        self._get, self._set = _access(parameters)
        self._anchor = [_copy(leaf) for leaf in self._leaves()]
        self._speed = [np.zeros_like(array) for array in self._anchor]
        self._made, self._weight = 0, 0.0
        self.compressor = None if compression is None else GradientCompressor(compression)
        state = TrainingState(**{"outer": (self._capture, self._restore), **parts})
        self.trainer = ElasticTrainer(
            cluster,
            state,
            self._apply,
            sampler=sampler,
            batch=batch,
            compressor=self.compressor,
            checkpoints=checkpoints,
            save_every=save_every,
            fresh_start=fresh_start,
            timeout=timeout,
        )
        """Runs the meetings."""

    def start(self) -> None:
        """Meet the others and get the parameters; returns when this member can begin."""
        self.trainer.start()
        if self.trainer.others_wait and not self._made:
            self.meet()  # with nothing to bring: they need not wait for all our steps

    def take(self) -> Indices:
        """This member's samples until the next meeting."""
        return self.trainer.take()

    def step(self, weight: float = 1.0) -> StepOutcome | None:
        """Call it after every step; returns how a meeting went once it is over.

        ``weight`` is how much the step counts, such as its number of samples.
        """
        self._made += 1
        self._weight += weight
        self._since += 1
        outcome = self.finish() if self._meeting and self._since >= self.overlap else None
        if self._made < self.every:
            return outcome
        if not self.overlap:
            return self.meet()
        self._begin()
        return outcome

    def meet(self) -> StepOutcome:
        """Meet now, and wait for the result; all members call this."""
        self.finish()
        outcome = self.trainer.step(self._way(), self._weight)
        self._made, self._weight = 0, 0.0
        return outcome

    def finish(self) -> StepOutcome | None:
        """Take over what the meeting under way gives, if there is one; waits for it."""
        meeting = self._meeting
        if meeting is None:
            return None
        try:
            outcome = meeting.wait(self._timeout)
        finally:
            if meeting.done:
                self._meeting = None
        # What was computed since then stays, unless it was for a state that is gone.
        self._publish(self._left if outcome.counted else None)
        self._left = []
        return outcome

    def _begin(self) -> None:
        """Meet while computing continues."""
        way, weight = self._way(), self._weight
        self._left = [
            np.array(trees.flat_array(leaf), anchor.dtype)
            for anchor, leaf in zip(self._anchor, self._leaves(), strict=True)
        ]
        self._made, self._weight, self._since = 0, 0.0, 0
        meeting: Work[StepOutcome] = Work(lambda: f"Meeting {self.trainer.step_count + 1}")
        self._meeting = meeting

        def run() -> None:
            try:
                meeting.succeed(self.trainer.step(way, weight))
            except Exception as error:  # noqa: BLE001 - raised where the meeting is waited for
                meeting.fail(error)

        self._pool.run(run)

    def _way(self) -> list[Array]:
        """How far this member has gone since the last meeting."""
        return [
            (anchor - trees.flat_array(leaf)).astype(np.float32)
            for anchor, leaf in zip(self._anchor, self._leaves(), strict=True)
        ]

    # -- the outer optimiser ---------------------------------------------------------------------

    def _apply(self, mean: Any) -> None:
        for anchor, speed, way in zip(self._anchor, self._speed, mean, strict=True):
            np.add(self.momentum * speed, way, out=speed)
            np.subtract(anchor, self.rate * (way + self.momentum * speed), out=anchor)
        if self._meeting is None:
            self._publish()

    def _publish(self, left: list[Array] | None = None) -> None:
        """Continue from what all have in common, and from this member's own steps since then."""
        tree = self._get()
        made = []
        for place, (_, leaf) in enumerate(trees.leaves_of(tree)):
            buffer = adapter_of(leaf).allocate(leaf, tuple(leaf.shape))
            values = self._anchor[place]
            if left is not None:
                values = values + (trees.flat_array(leaf) - left[place])
            np.copyto(buffer.flat, values, casting="unsafe")
            made.append(buffer.commit())
        self._set(trees.replaced(tree, iter(made)))

    def _leaves(self) -> list[Any]:
        return [leaf for _, leaf in trees.leaves_of(self._get())]

    def _capture(self) -> dict[str, Any]:
        return {"anchor": self._anchor, "speed": self._speed}

    def _restore(self, tree: dict[str, Any]) -> None:
        for mine, theirs in ((self._anchor, tree["anchor"]), (self._speed, tree["speed"])):
            if [array.shape for array in mine] != [array.shape for array in theirs]:
                msg = "The other members have different parameters: all must train the same model"
                raise ValueError(msg)
            for array, value in zip(mine, theirs, strict=True):
                np.copyto(array, value)
        if self._meeting is None:  # otherwise the meeting is taken over by who computes
            self._made, self._weight = 0, 0.0
            self._publish()


def _access(parameters: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    if isinstance(parameters, tuple) and len(parameters) == 2 and all(map(callable, parameters)):  # noqa: PLR2004
        return parameters
    if not trees.leaves_of(parameters):
        msg = "There are no arrays in these parameters"
        raise ValueError(msg)

    def put(tree: Any) -> None:
        for (_, mine), (_, new) in zip(
            trees.leaves_of(parameters), trees.leaves_of(tree), strict=True
        ):
            buffer = as_buffer(mine, Access.WRITE)
            np.copyto(buffer.flat, trees.flat_array(new))
            buffer.commit()

    return lambda: parameters, put


def _copy(leaf: Any) -> Array:
    """The elements in at least single precision."""
    flat = trees.flat_array(leaf)
    wide = flat.dtype if flat.dtype == np.float64 else np.dtype(np.float32)
    return flat.astype(wide)

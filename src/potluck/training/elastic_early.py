"""HeadStart: averaging begins while the backward pass still computes.

Operations and their order are those of any step, so members that have nothing to compute, or do
not begin early, take part; the sums have the same bits.  What was begun in a view that ends counts
nothing: the step is then made from the gradients, which nobody has touched.
"""

from __future__ import annotations

from collections.abc import Callable

from potluck.core.steps import Position
from potluck.errors import DistributedError
from potluck.logs import get_logger
from potluck.training.elastic_averaging import Buckets
from potluck.training.elastic_member import Member
from potluck.vocabulary import View

__all__ = ["HeadStart"]

logger = get_logger(__name__)


class HeadStart(Member):
    """A member that may begin a step before its gradients are there."""

    def begin_early(self, buckets: Buckets, weight: float) -> None:
        """Tell the others what will come, unless a view ends meanwhile."""
        if self._settled is None or self._pending is not None or self._broken is not None:
            return
        if not weight:
            return  # perhaps nobody brings anything, and then nothing is averaged

        def begin(view: View) -> None:
            attempt = Position(view.lineage, view.epoch, self.position.step + 1)
            self._begun = self._begin(weight, buckets.signature, attempt)
            self._begun.start()

        self._if_settled(begin)

    def go_on_early(self, buckets: Buckets, number: int) -> None:
        """Average a bucket that is packed, meanwhile; each comes after the one before it."""

        def launch(_: View) -> None:
            if self._begun is not None and self._begun.begun == number:
                self._begun.launch(buckets, self._timeout)

        if self._begun is not None:
            self._if_settled(launch)

    def _if_settled(self, action: Callable[[View], None]) -> None:
        try:
            with self._ground.stand(0.0) as view:
                if view == self._settled:
                    action(view)
        except DistributedError as error:  # step() finds out what has become of the view
            logger.debug("Not early: %s", error)

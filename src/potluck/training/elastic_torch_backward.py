"""Backward: watches a backward pass of PyTorch and has each bucket averaged once it is there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from potluck.arrays.base import Access
from potluck.arrays.lending import lend
from potluck.errors import BackendUnavailable
from potluck.training.elastic import ElasticTrainer
from potluck.training.elastic_averaging import Buckets, Leaf

__all__ = ["Backward"]


class Backward:
    """The hooks on the parameters of a model; they do nothing but in a watched pass."""

    def __init__(
        self,
        trainer: ElasticTrainer,
        parameters: Mapping[str, torch.nn.Parameter],
        limit: int,
    ) -> None:
        self._trainer, self._limit = trainer, limit
        self._parameters = list(parameters.values())
        self._names = list(parameters)
        self._number: dict[torch.Tensor, int] = {
            each: place for place, each in enumerate(self._parameters)
        }
        self._ready: dict[int, tuple[torch.Tensor, int]] = {}  # each gradient, and its version
        self._sent: set[int] = set()  # gradients whose averaging has begun
        self.weight = 0.0
        """Of the pass that was watched last."""
        self.failure = ""
        """What ended a watched pass in the middle, if something did."""
        self._is_watching = False
        self.buckets: Buckets | None = None
        """Of the pass that was watched since the last step, if one was."""
        self._hooks: list[Any] = []

    def begin(self, weight: float) -> None:
        """Watch the pass that follows."""
        self._check_failure()
        if self.buckets is not None:
            msg = "One backward pass is watched for each step(): the last one before it"
            raise ValueError(msg)
        if not self._hooks:
            self._hooks = [
                each.register_post_accumulate_grad_hook(self._arrived)  # type: ignore[no-untyped-call]
                for each in self._parameters
            ]
        self.weight, self._is_watching = weight, True
        self.buckets = self._planned()
        self._next = 0
        self._trainer.begin_early(self.buckets, weight)

    def end(self) -> None:
        """The pass is over."""
        self._is_watching = False

    def take(self) -> Buckets | None:
        """The buckets of the watched pass, for the step; raises if gradients have changed since."""
        self._check_failure()
        for number, (gradient, version) in self._ready.items():
            if self._parameters[number].grad is not gradient or gradient._version != version:  # noqa: SLF001
                msg = (
                    f"The gradient of {self._names[number]} was changed after its averaging began. "
                    "Leave out overlap() where they are changed before the step, as by clipping, "
                    "or added up by several passes."
                )
                raise ValueError(msg)
        buckets, self.buckets = self.buckets, None
        self._ready.clear()
        self._sent.clear()
        return buckets

    def _check_failure(self) -> None:
        if self.failure:
            raise BackendUnavailable(
                "The others have a part of this member's gradients, and will not get the rest",
                cause=f"the backward pass in overlap() failed: {self.failure}",
                hint="Start it again, or leave out overlap() where a pass may fail.",
            )

    def _planned(self) -> Buckets:
        leaves = []
        for name, parameter in zip(self._names, self._parameters, strict=True):
            flat = lend(parameter.detach(), Access.READ).flat
            leaves.append(Leaf(name, tuple(parameter.shape), str(flat.dtype), flat.size))
        return Buckets(leaves, limit=self._limit, room=self._trainer.room)

    def _arrived(self, parameter: torch.Tensor) -> None:
        if not self._is_watching or self.buckets is None or parameter.grad is None:
            return
        number = self._number[parameter]
        if number in self._sent:
            return  # its bucket is on the way: take() sees that another pass has changed it
        self._ready[number] = parameter.grad, parameter.grad._version  # noqa: SLF001
        while self._next < len(self.buckets.all):
            leaves = self.buckets.all[self._next].leaves
            if not all(leaf in self._ready for leaf in leaves):
                return  # all members average buckets in the same order
            flats = [lend(self._ready[leaf][0], Access.READ).flat for leaf in leaves]
            self.buckets.pack(self._next, flats, self.weight)
            self._trainer.go_on_early(self.buckets, self._next)
            self._sent.update(leaves)
            self._next += 1

"""ElasticOptimizer: elastic steps for a usual loop of PyTorch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from potluck.arrays.adapters import as_buffer
from potluck.arrays.base import Access
from potluck.collective.context import DistributedContext
from potluck.errors import BackendUnavailable
from potluck.training.averaging import Buckets, Leaf, StepOutcome
from potluck.training.elastic import ElasticTrainer
from potluck.training.state import TrainingState

# --------------------------------------------------------------------------------------------------
# Backward: watches a backward pass of PyTorch and has each bucket averaged once it is there.


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
            flat = as_buffer(parameter.detach(), Access.READ).flat
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
            flats = [as_buffer(self._ready[leaf][0], Access.READ).flat for leaf in leaves]
            self.buckets.pack(self._next, flats, self.weight)
            self._trainer.go_on_early(self.buckets, self._next)
            self._sent.update(leaves)
            self._next += 1


# --------------------------------------------------------------------------------------------------

BUCKET = 8 << 20
"""Bytes that are averaged in one operation: enough to fill a link, few enough to begin early."""


class ElasticOptimizer(torch.optim.Optimizer):
    """An optimiser whose ``step()`` is one step of all members together.

    The loop stays as it is: ``zero_grad()``, a forward and a backward pass, ``step()``.  Gradients
    are averaged with those of the others, and the wrapped optimiser makes its step once all members
    hold the average.  Call ``start()`` before the first forward pass, and ``step(weight=n)`` where
    batches differ in size.  Options, such as ``sampler`` and ``batch``, are those of
    :class:`~potluck.training.elastic.ElasticTrainer`; further parts of the state, such as a
    scheduler, are given in ``parts``.  With ``with optimizer.overlap(): loss.backward()``
    averaging begins while the backward pass computes.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module,
        cluster: DistributedContext,
        *,
        parts: dict[str, Any] | None = None,
        bucket: int = BUCKET,
        **options: Any,
    ) -> None:
        # Not our own parameters: everything an optimiser knows is that of the wrapped one.
        self._wrapped = optimizer
        self.__dict__.update(
            {name: each for name, each in optimizer.__dict__.items() if name.endswith("_hooks")}
        )
        self._parameters = {
            name: each for name, each in model.named_parameters() if each.requires_grad
        }
        state = TrainingState(model=model, optimizer=optimizer, **(parts or {}))
        self.trainer = ElasticTrainer(cluster, state, self._apply, **options)
        """Runs the steps."""
        self._bucket = bucket
        self._backward = Backward(self.trainer, self._parameters, bucket)
        self.outcome: StepOutcome | None = None
        """How the last step went."""

    def start(self) -> None:
        """Meet the others and get the state."""
        self.trainer.start()

    @contextlib.contextmanager
    def overlap(self, weight: float | None = None) -> Iterator[None]:
        """Average gradients while the backward pass in this block computes them.

        It is the last one before ``step()``: passes before it, which add up gradients, are outside
        of such blocks; gradients are not changed after it.  A ``weight`` is that of the step.
        Members need not agree on whether they do this; results have the same bits.
        """
        self._backward.begin(self.trainer.counts(weight))
        try:
            yield
        except BaseException as error:
            self._backward.failure = repr(error)
            raise
        finally:
            self._backward.end()

    def step(self, closure: Callable[[], Any] | None = None, *, weight: float | None = None) -> Any:
        """Average the gradients with those of all members, and step.

        A ``closure`` is called once, to compute loss and gradients; what it returns is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            if torch.is_tensor(loss) and loss.device.type == "cpu" and loss.numel() == 1:
                self.trainer.note_loss(loss.item())  # from elsewhere, waiting for it would cost
        buckets = self._backward.take()
        gradients = {
            name: torch.zeros_like(each) if each.grad is None else each.grad
            for name, each in self._parameters.items()
        }
        if weight is None and buckets is not None:
            weight = self._backward.weight
        self.outcome = self.trainer.step_in_buckets(gradients, weight, self._bucket, buckets)
        return loss

    def _apply(self, mean: dict[str, torch.Tensor]) -> None:
        for name, parameter in self._parameters.items():
            if parameter.grad is None:
                parameter.grad = mean[name]
            else:
                parameter.grad.copy_(mean[name])
        self._wrapped.step()

    # -- the wrapped one ---------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Those of the wrapped optimiser."""
        return self._wrapped.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """That of the wrapped optimiser."""
        return self._wrapped.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Those of the wrapped optimiser."""
        return self._wrapped.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - as PyTorch has it
        """Forget the gradients."""
        self._wrapped.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train more parameters; all members do the same."""
        self._wrapped.add_param_group(param_group)
        known = {id(each) for each in self._parameters.values()}
        for each in self._wrapped.param_groups[-1]["params"]:
            if each.requires_grad and id(each) not in known:
                self._parameters[f"added.{len(self._parameters)}"] = each
        self._backward = Backward(self.trainer, self._parameters, self._bucket)

    def state_dict(self) -> dict[str, Any]:
        """That of the wrapped optimiser."""
        return self._wrapped.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Into the wrapped optimiser."""
        self._wrapped.load_state_dict(state_dict)

    def __repr__(self) -> str:
        """What it wraps."""
        return f"ElasticOptimizer({self._wrapped!r})"

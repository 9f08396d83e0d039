"""ElasticOptimizer: elastic steps for a usual loop of PyTorch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from potluck.runtime.context import DistributedContext
from potluck.training.elastic import ElasticTrainer, StepOutcome
from potluck.training.elastic_torch_backward import Backward
from potluck.training.state import TrainingState

__all__ = ["ElasticOptimizer"]

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

"""ElasticOptimizer: elastic steps for a usual loop of PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from potluck.runtime.context import DistributedContext
from potluck.training.elastic import ElasticTrainer, StepOutcome
from potluck.training.state import TrainingState

__all__ = ["ElasticOptimizer"]


class ElasticOptimizer(torch.optim.Optimizer):
    """An optimiser whose ``step()`` is one step of all members together.

    The loop stays as it is: ``zero_grad()``, a forward and a backward pass, ``step()``.  Gradients
    are averaged with those of the others, and the wrapped optimiser makes its step once all members
    hold the average.  Call ``start()`` before the first forward pass, and ``step(weight=n)`` where
    batches differ in size.  Options, such as ``sampler`` and ``batch``, are those of
    :class:`~potluck.training.elastic.ElasticTrainer`; further parts of the state, such as a
    scheduler, are given in ``parts``.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module,
        cluster: DistributedContext,
        *,
        parts: dict[str, Any] | None = None,
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
        self.outcome: StepOutcome | None = None
        """How the last step went."""

    def start(self) -> None:
        """Meet the others and get the state."""
        self.trainer.start()

    def step(self, closure: Callable[[], Any] | None = None, *, weight: float | None = None) -> Any:
        """Average the gradients with those of all members, and step.

        A ``closure`` is called once, to compute loss and gradients; what it returns is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gradients = {
            name: torch.zeros_like(each) if each.grad is None else each.grad
            for name, each in self._parameters.items()
        }
        self.outcome = self.trainer.step(gradients, weight)
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

    def state_dict(self) -> dict[str, Any]:
        """That of the wrapped optimiser."""
        return self._wrapped.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Into the wrapped optimiser."""
        self._wrapped.load_state_dict(state_dict)

    def __repr__(self) -> str:
        """What it wraps."""
        return f"ElasticOptimizer({self._wrapped!r})"

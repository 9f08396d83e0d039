"""Elastic steps, state and local SGD with the arrays of JAX and MLX."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from potluck import DistributedContext, ElasticTrainer, LocalSgd, TrainingState
from potluck.training.checkpoint import Checkpointer, latest
from support.contexts import in_group

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.parametrize("name", ["jax", "mlx"]),
]


def library(name: str) -> Any:
    """What makes arrays."""
    return importlib.import_module({"jax": "jax.numpy", "mlx": "mlx.core"}[name])


class Box:
    """Parameters that cannot be changed in place, as these libraries like them."""

    def __init__(self, name: str, start: float) -> None:
        make = library(name)
        self.tree: Any = {
            "weight": make.full((2, 3), start),
            "bias": make.full((4,), start, dtype=make.bfloat16),
        }

    def put(self, tree: Any) -> None:
        """Go on with others."""
        self.tree = tree

    def values(self) -> list[Any]:
        """For comparing."""
        return [self.tree["weight"].tolist(), self.tree["bias"].tolist()]


def test_a_tree_is_trained_and_a_state_follows(name: str) -> None:
    """Means are arrays of the library; the first one's parameters come to all as what they were."""
    make = library(name)

    def action(context: DistributedContext) -> Any:
        box = Box(name, float(context.rank))
        kinds = {key: type(each) for key, each in box.tree.items()}

        def apply(mean: Any) -> None:
            assert {key: type(each) for key, each in mean.items()} == kinds
            box.put({key: each - 0.5 * mean[key] for key, each in box.tree.items()})

        trainer = ElasticTrainer(context, TrainingState(model=(lambda: box.tree, box.put)), apply)
        trainer.start()
        assert {key: type(each) for key, each in box.tree.items()} == kinds
        assert box.tree["bias"].dtype == make.bfloat16
        assert box.values() == [[[0.0] * 3] * 2, [0.0] * 4]
        for _ in range(2):
            gradient = {
                key: make.ones_like(each) * (1 + context.rank) for key, each in box.tree.items()
            }
            trainer.step(gradient, weight=1 + 2 * context.rank)
        return box.values()

    # (1 · 1 + 3 · 2) / 4 in each step, half of it twice
    assert in_group(2, action) == [[[[-1.75] * 3] * 2, [-1.75] * 4]] * 2


def test_a_checkpoint_gives_back_what_was_saved(name: str, tmp_path: Path) -> None:
    """The same library, types and values."""
    box = Box(name, 1.5)
    with Checkpointer(tmp_path) as saver:
        saver.save(box.tree, 3)
    found = latest(tmp_path)
    assert found is not None
    again = found.tree()
    assert {key: type(each) for key, each in again.items()} == {
        key: type(each) for key, each in box.tree.items()
    }
    assert again["bias"].dtype == box.tree["bias"].dtype
    assert again["weight"].tolist() == box.tree["weight"].tolist()


def test_members_meet_rarely(name: str) -> None:
    """Parameters are averaged, and are arrays of the library afterwards."""

    def action(context: DistributedContext) -> Any:
        box = Box(name, 0.0)
        meetings = LocalSgd(
            context,
            (lambda: box.tree, box.put),
            every=2,
            rate=1.0,
            momentum=0.0,
            compression=None,
        )
        meetings.start()
        for _ in range(2):
            box.put({key: each + context.rank for key, each in box.tree.items()})
            meetings.step()
        assert type(box.tree["weight"]) is type(Box(name, 0.0).tree["weight"])
        return np.array(box.tree["weight"]).tolist()

    assert in_group(2, action) == [[[1.0] * 3] * 2] * 2

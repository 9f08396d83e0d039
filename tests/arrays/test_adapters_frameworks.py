"""Arrays of JAX and MLX on their processors' engines, in trees beside those of numpy."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

from potluck import CollectiveMismatch, DistributedContext
from support.contexts import in_group

pytestmark = pytest.mark.frameworks


def library(name: str) -> Any:
    """What makes arrays."""
    return importlib.import_module({"jax": "jax.numpy", "mlx": "mlx.core"}[name])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
@pytest.mark.parametrize("name", ["jax", "mlx"])
def test_arrays_are_reduced(name: str, dtype: str) -> None:
    """Of the same kind, type and shape afterwards."""
    make = library(name)

    def action(context: DistributedContext) -> None:
        array = make.full((2, 3), 1 + context.rank, dtype=getattr(make, dtype))
        result = context.all_reduce(array)
        assert type(result) is type(array)
        assert (result.dtype, result.shape) == (array.dtype, array.shape)
        assert result.tolist() == [[3, 3, 3]] * 2
        moved = context.broadcast(make.full((2,), 7.0 + context.rank), root=1)
        assert moved.tolist() == [8.0, 8.0]

    in_group(2, action)


def test_a_tree_may_hold_arrays_of_all_libraries() -> None:
    """Those that can be changed are; the others come back anew, in the same places."""
    jax, mlx = library("jax"), library("mlx")

    def action(context: DistributedContext) -> None:
        scale = 1.0 + context.rank
        tree: dict[str, Any] = {
            "numpy": np.full(3, scale),
            "jax": {"weight": jax.full((2, 2), scale), "bias": jax.full(2, scale)},
            "mlx": [mlx.full((2,), scale), (mlx.full((1,), scale), None)],
            "large": jax.full(100_000, scale),
        }
        frozen = tree["jax"]["weight"]
        result: Any = context.all_reduce(tree, "mean")
        assert result["numpy"] is tree["numpy"]
        assert result["numpy"].tolist() == [1.5] * 3
        assert result["jax"]["weight"].tolist() == [[1.5, 1.5]] * 2
        assert frozen.tolist() == [[scale, scale]] * 2
        assert result["jax"]["bias"].tolist() == [1.5, 1.5]
        assert result["mlx"][0].tolist() == [1.5, 1.5]
        assert result["mlx"][1][0].tolist() == [1.5]
        assert result["mlx"][1][1] is None
        assert float(result["large"].sum()) == 150_000.0
        assert [type(each).__module__.split(".")[0] for each in result["mlx"][:1]] == ["mlx"]

    in_group(2, action)


def test_a_tree_of_gradients_as_jax_makes_them() -> None:
    """The sum over ranks is the gradient of the joined batch."""
    jax = importlib.import_module("jax")
    make = library("jax")
    batch = make.arange(24.0).reshape(6, 4) / 24

    def loss(weights: Any, rows: Any) -> Any:
        return ((rows @ weights["w"] + weights["b"]) ** 2).sum()

    weights = {"w": make.ones((4, 2)), "b": make.zeros(2)}
    whole = jax.grad(loss)(weights, batch)

    def action(context: DistributedContext) -> None:
        mine = jax.grad(loss)(weights, batch[context.rank :: context.world_size])
        together = context.all_reduce(mine)
        for name in ("w", "b"):
            assert np.allclose(together[name], whole[name], rtol=1e-5)

    in_group(3, action)


def test_ranks_may_use_different_libraries_but_not_different_shapes() -> None:
    """Numbers travel, not arrays of a library."""
    makers = [np, library("jax"), library("mlx")]

    def action(context: DistributedContext) -> None:
        make = makers[context.rank]
        result: Any = context.all_reduce([make.full((2,), 1.0, dtype=make.float32)])
        assert result[0].tolist() == [3.0, 3.0]
        with pytest.raises(CollectiveMismatch, match=r"0: float32\[2\].*0: float32\[3\]"):
            context.all_reduce([make.full((2 + context.rank // 2,), 1.0, dtype=make.float32)])

    in_group(3, action)

"""Trees: taken apart, put together, and written down without pickle."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from potluck.arrays import trees
from potluck.errors import MalformedFrame


class Pair(NamedTuple):
    """As libraries of optimisers use them."""

    mean: Any
    steps: int


def test_a_tree_keeps_its_containers_when_its_arrays_are_replaced() -> None:
    """Dicts, ordered dicts, lists, tuples and named tuples come back as they were."""
    tree = OrderedDict(a=[np.zeros(2), 5], b=Pair(np.ones(3), 7), c=(np.float32(1), None))
    leaves = trees.leaves_of(tree)
    assert [path for path, _ in leaves] == ["a.0", "b.0", "c.0"]
    made = trees.replaced(tree, iter(["x", "y", "z"]))
    assert made == OrderedDict(a=["x", 5], b=Pair("y", 7), c=("z", None))
    assert isinstance(made, OrderedDict)
    assert isinstance(made["b"], Pair)


def test_a_written_tree_comes_back() -> None:
    """Shape and plain values from bytes; arrays by name, also where two paths look alike."""
    tree = {"a.b": np.arange(3), "a": {"b": np.ones((2, 2)), 7: [None, True, (0.5, "x")]}}
    shape, arrays = trees.written(tree)
    assert list(arrays) == ["a.b", "a.b'"]
    back = trees.read(shape, arrays)
    assert np.array_equal(back["a.b"], np.arange(3))
    assert np.array_equal(back["a"]["b"], np.ones((2, 2)))
    assert back["a"][7] == [None, True, (0.5, "x")]
    assert list(trees.written(np.zeros(1))[1]) == ["array"]


def test_tensors_come_back_as_tensors() -> None:
    """The state of an optimiser survives, bfloat16 included, with numpy in between."""
    model = torch.nn.Linear(3, 2).to(torch.bfloat16)
    optimiser = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    optimiser.step()
    state = {"model": model.state_dict(), "optimiser": optimiser.state_dict()}
    shape, arrays = trees.written(state)
    plain = {
        name: trees.flat_array(each).copy().reshape(tuple(each.shape))
        for name, each in arrays.items()
    }
    assert {type(each) for each in plain.values()} == {np.ndarray}
    back = trees.read(shape, plain)
    other = torch.nn.Linear(3, 2).to(torch.bfloat16)
    other.load_state_dict(back["model"])
    assert torch.equal(other.weight, model.weight)
    copy = torch.optim.Adam(other.parameters())
    copy.load_state_dict(back["optimiser"])
    assert torch.equal(
        copy.state[other.weight]["exp_avg"], optimiser.state[model.weight]["exp_avg"]
    )


def test_what_cannot_be_written_down_says_so() -> None:
    """An object of another kind is refused, and damaged bytes are no tree."""
    with pytest.raises(TypeError, match="cannot be sent"):
        trees.written({"a": object()})
    with pytest.raises(MalformedFrame):
        trees.read(b"\xc1", {})

"""States: declared by parts, compared by chunks, and brought to those who lack them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from potluck.errors import MalformedFrame
from potluck.training import trees
from potluck.training.state import TrainingState
from potluck.training.state_chunks import CHUNK, Chunks, Layout

# --- parts ---


def test_every_kind_of_part_is_captured_and_restored() -> None:
    """Models of PyTorch, pairs of functions, random generators and arrays in place."""
    model = torch.nn.Linear(2, 2)
    chance = np.random.default_rng(4)
    table: dict[str, Any] = {"a": [np.zeros(3, np.float32), np.ones((2, 2))]}
    box = [5]

    def put(value: int) -> None:
        box[0] = value

    state = TrainingState(
        model=model, chance=chance, table=table, count=(lambda: box[0], put), tensor=torch.zeros(2)
    )
    assert state.names == ["model", "chance", "table", "count", "tensor"]
    saved = Chunks(state.capture())
    stream = bytearray(b"".join(saved.read(number) for number in range(len(saved.digests))))
    expected = chance.normal(size=3), model.weight.detach().clone()
    with torch.no_grad():
        model.weight.fill_(9)
    table["a"][0][:] = 7
    box[0] = 6
    state.restore(trees.read(saved.layout.shape, saved.layout.parts(stream)))
    assert np.array_equal(chance.normal(size=3), expected[0])
    assert torch.equal(model.weight, expected[1])
    assert table["a"][0].tolist() == [0, 0, 0]
    assert box == [5]


def test_what_does_not_fit_is_refused() -> None:
    """No parts, parts without a way in, other names, other arrays, other shapes."""
    with pytest.raises(ValueError, match="at least one part"):
        TrainingState()
    with pytest.raises(TypeError, match="model: a str is no part of a state"):
        TrainingState(model="weights.bin")
    state = TrainingState(model={"w": np.zeros(2)})
    with pytest.raises(ValueError, match="has the parts model, but what came has optimizer"):
        state.restore({"optimizer": {}})
    with pytest.raises(ValueError, match="other arrays"):
        state.restore({"model": {"v": np.zeros(2)}})
    with pytest.raises(ValueError, match=r"model\.w: 2 values of float64 are here, 3 of float64"):
        state.restore({"model": {"w": np.zeros(3)}})
    assert state.with_part("model", np.zeros(1)) is state


# --- chunks ---


def test_a_hash_covers_everything() -> None:
    """A value, a type, a shape, a name or a plain number: any difference shows."""
    different: list[Any] = [
        {"a": np.zeros(4), "n": 1},
        {"a": np.array([0, 0, 0, 1.0]), "n": 1},
        {"a": np.zeros(8, np.float32), "n": 1},
        {"a": np.zeros((2, 2)), "n": 1},
        {"b": np.zeros(4), "n": 1},
        {"a": np.zeros(4), "n": 2},
    ]
    assert len({Chunks(tree).digest for tree in different}) == len(different)
    assert Chunks(different[0]).digest == Chunks({"a": np.zeros(4), "n": 1}).digest


def test_chunks_cross_the_borders_of_arrays() -> None:
    """Arrays of odd sizes and types come back from the stream as they were."""
    source = np.random.default_rng(1)
    tree = {
        "bytes": source.integers(0, 255, 3, np.uint8),
        "large": source.normal(size=CHUNK // 8 + 3),
        "none": np.empty((0, 2)),
        "rest": source.normal(size=5).astype(np.float32),
    }
    chunks = Chunks(tree)
    assert len(chunks.digests) == 2
    stream = bytearray(chunks.read(0) + chunks.read(1))
    assert len(stream) == chunks.nbytes == chunks.layout.nbytes
    for name, array in chunks.layout.parts(stream).items():
        assert np.array_equal(array, tree[name])
    chunks.layout.check()


SHAPE = Chunks({"a": np.zeros(1)}).layout.shape


@pytest.mark.parametrize(
    "layout",
    [
        Layout(SHAPE, (("a", "object", (1,)),)),
        Layout(SHAPE, (("a", "float64", (1 << 47,)),)),
        Layout(SHAPE, (("a", "nonsense", (1,)),)),
        Layout(SHAPE, (("a", "f8", (1,)),)),
        Layout(SHAPE, (("a", "(99,)f8", (1,)),)),
        Layout(SHAPE, (("a", "f8,f8", (1,)),)),
        Layout(SHAPE, (("a", "float64", (1,) * 65),)),
        Layout(SHAPE, (("b", "float64", (1,)),)),
        Layout(SHAPE, ()),
        Layout(SHAPE, (("a", "float64", (1,)),) * 2),
        Layout(SHAPE, (("a", "float64", (1,)), ("b", "float64", (1,)))),
        Layout(b"", ()),
        Layout(b"\x92\x00\x05", ()),
    ],
    ids=str,
)
def test_a_layout_that_cannot_be_is_refused(layout: Layout) -> None:
    """Before anything is allocated for it."""
    with pytest.raises(MalformedFrame):
        layout.check()


def test_arrays_that_cannot_be_changed_are_refused_at_once() -> None:
    """Not in the middle of a training, when a state comes."""
    frozen = np.zeros(3)
    frozen.flags.writeable = False
    with pytest.raises(TypeError, match=r"model\.w cannot be changed in place: pass a pair"):
        TrainingState(model={"w": frozen})

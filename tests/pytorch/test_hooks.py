"""The hook of DistributedDataParallel on ranks in one process: what it remembers, and of what."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import GradBucket

from potluck import SimulatedBackend
from potluck.torch.hooks import CompressHook, compress_hook
from potluck.torch.process_group import ProcessGroup
from support.threads import together


class Bucket:
    """Gradients of some parameters, as DistributedDataParallel hands them over."""

    def __init__(
        self, parameters: Sequence[torch.Tensor], values: Sequence[float], index: int = 0
    ) -> None:
        self._parameters = list(parameters)
        self._index = index
        self._buffer = torch.tensor(values, dtype=parameters[0].dtype)

    def index(self) -> int:
        """Its place among the buckets."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """All gradients, one after the other."""
        return self._buffer

    def parameters(self) -> list[torch.Tensor]:
        """Whose gradients they are."""
        return self._parameters

    def gradients(self) -> list[torch.Tensor]:
        """Each with the shape of its parameter."""
        parts = torch.split(self._buffer, [each.numel() for each in self._parameters])
        return [part.view(each.shape) for part, each in zip(parts, self._parameters, strict=True)]


@pytest.fixture
def groups() -> Iterator[list[ProcessGroup]]:
    """Two ranks."""
    made = [
        ProcessGroup(backend, timedelta(seconds=20), "pair")
        for backend in SimulatedBackend.create_group(2)
    ]
    yield made
    for group in made:
        group.shutdown()


def on_both(groups: list[ProcessGroup], action: Callable[[ProcessGroup], Any]) -> Any:
    """What an action gives on both ranks, which is the same."""
    first, second = together(*(lambda each=group: action(each) for group in groups))
    assert first == second
    return first


def average(
    hook: CompressHook, parameters: Sequence[torch.Tensor], values: Sequence[float], index: int = 0
) -> list[float]:
    """What becomes of a bucket of gradients that all ranks have."""
    bucket = cast("GradBucket", Bucket(parameters, values, index))
    averaged: list[float] = hook(None, bucket).wait().tolist()
    return averaged


def pair() -> list[torch.Tensor]:
    """Two parameters of the same size."""
    return [nn.Parameter(torch.zeros(64)) for _ in range(2)]


GIVEN = [float(number % 13 + 1) for number in range(128)]
NOTHING = [0.0] * 128


def test_what_is_left_behind_belongs_to_parameters_not_to_places(
    groups: list[ProcessGroup],
) -> None:
    """After the first step the same parameters come in another order: theirs is forgotten."""

    def steps(group: ProcessGroup) -> list[list[float]]:
        hook = compress_hook("topk:0.1", process_group=group)
        first, second = pair()
        return [
            average(hook, [first, second], GIVEN),
            average(hook, [second, first], NOTHING),
            average(hook, [second, first], GIVEN),
            average(hook, [second, first], NOTHING),
        ]

    sent, moved, sent_again, left = on_both(groups, steps)
    assert moved == NOTHING
    assert sent == sent_again
    assert sum(sent) + sum(left) < sum(GIVEN)
    assert any(left)


def test_one_hook_serves_two_models(groups: list[ProcessGroup]) -> None:
    """Buckets with the same place and size, of different parameters, are different."""

    def steps(group: ProcessGroup) -> list[list[float]]:
        hook = compress_hook("topk:0.1", process_group=group)
        one, other = pair(), pair()
        return [
            average(hook, one, GIVEN),
            average(hook, other, NOTHING),
            average(hook, one, NOTHING),
        ]

    _, of_the_other, left = on_both(groups, steps)
    assert of_the_other == NOTHING
    assert any(left)


def test_what_was_saved_is_there_when_its_buckets_come_again(groups: list[ProcessGroup]) -> None:
    """Saved and loaded as PyTorch does by default; a new run begins with buckets of another cut."""

    def steps(group: ProcessGroup) -> list[list[float]]:
        hook = compress_hook("topk:0.1", process_group=group)
        first, second = pair()
        average(hook, [first, second], NOTHING)
        average(hook, [second, first], GIVEN)
        file = io.BytesIO()
        torch.save(hook.state_dict(), file)
        file.seek(0)
        again = compress_hook("topk:0.1", process_group=group)
        again.load_state_dict(torch.load(file))
        first, second = pair()
        return [
            average(again, [first, second], NOTHING),
            average(again, [second, first], NOTHING),
        ]

    before, left = on_both(groups, steps)
    assert before == NOTHING
    assert any(left)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_matrices_of_any_type_are_compressed_and_keep_what_they_left(
    groups: list[ProcessGroup], dtype: torch.dtype
) -> None:
    """By way of float32; also when they move to another place in the bucket."""

    def steps(group: ProcessGroup) -> tuple[list[str], float]:
        hook = compress_hook("powersgd:1", process_group=group)
        first, second = (nn.Parameter(torch.zeros(8, 8, dtype=dtype)) for _ in range(2))
        values = torch.eye(8).flatten().tolist()
        average(hook, [first, second], values + [0.0] * 64)
        moved = average(hook, [second, first], [0.0] * 128)
        assert not any(moved[:64])
        return sorted(hook.compressor.residuals), max(moved[64:])

    names, recovered = on_both(groups, steps)
    assert names == ["gradient 0 of (8, 8)", "gradient 1 of (8, 8)"]
    assert recovered > 0


def test_what_is_no_state_is_refused() -> None:
    """With what is missing in it."""
    with pytest.raises(ValueError, match="residuals, kept is missing"):
        compress_hook("int8").load_state_dict({})

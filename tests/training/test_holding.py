"""A held storage cannot be resized, keeps its memory, and is what it was afterwards."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable

import pytest
import torch

from potluck.training.holding import Hold
from support.threads import together

RESIZES: dict[str, Callable[[torch.Tensor], object]] = {
    "given away": lambda tensor: tensor.untyped_storage().resize_(0),
    "grown": lambda tensor: tensor.resize_(100),
    "an output": lambda tensor: torch.ones(100, out=tensor),
}


@pytest.mark.parametrize("way", RESIZES)
def test_a_held_storage_cannot_be_resized(way: str) -> None:
    """Its memory stays where it is, and what it holds can be read and changed."""
    tensor = torch.ones(6)
    storage, address = tensor.untyped_storage(), tensor.data_ptr()
    hold = Hold([tensor, tensor[2:]])
    with pytest.raises(RuntimeError, match="not resizable"):
        RESIZES[way](tensor.view(6))
    assert (tensor.data_ptr(), storage.nbytes()) == (address, 24)
    tensor += 1
    hold.release()
    assert (tensor.data_ptr(), storage.nbytes()) == (address, 24)
    assert tensor.tolist() == [2.0] * 6
    assert tensor.resize_(1000)[:6].tolist() == [2.0] * 6


def test_uses_may_end_in_any_order() -> None:
    """The last one counts, and a second release of one does not."""
    tensor = torch.ones(6)
    storage = tensor.untyped_storage()
    holds = [Hold([tensor]) for _ in range(3)]
    for hold in (holds[0], holds[0], holds[2]):
        hold.release()
        assert not storage.resizable()
    holds[1].release()
    assert storage.resizable()


def test_a_use_that_is_forgotten_has_ended() -> None:
    """The operation was refused before it began."""
    tensor = torch.ones(6)
    hold = Hold([tensor])
    assert not tensor.untyped_storage().resizable()
    del hold
    gc.collect()
    assert tensor.untyped_storage().resizable()


def test_memory_outlives_its_tensor_and_its_hold_outlives_it() -> None:
    """Whichever goes first, nothing is freed twice."""
    for _ in range(100):
        tensor = torch.ones(100_000)
        hold = Hold([tensor])
        alias = tensor.view(-1)
        del tensor
        assert alias.sum() == 100_000
        hold.release()
        assert alias.sum() == 100_000
        last = Hold([alias])
        del alias
        last.release()


def test_other_memory_is_left_alone() -> None:
    """Shared memory stays shared; what cannot be resized anyway still cannot."""
    shared = torch.ones(6).share_memory_()  # type: ignore[no-untyped-call]
    foreign = torch.ones(6)
    foreign.numpy()
    empty = torch.ones(0)
    hold = Hold([shared, foreign, empty, torch.ones(2, device="meta"), torch.eye(2).to_sparse()])
    assert shared.is_shared()
    hold.release()
    assert shared.is_shared()
    assert not foreign.untyped_storage().resizable()
    assert empty.untyped_storage().resizable()


def test_many_threads_may_hold_one_storage() -> None:
    """It is resizable exactly when none does, and its content is not touched."""
    tensor = torch.arange(1000.0)
    whole = tensor.sum()

    def use(seed: int) -> None:
        chance = random.Random(seed)
        holds: list[Hold] = []
        for _ in range(500):
            if holds and chance.random() < 0.5:
                hold = holds.pop(chance.randrange(len(holds)))
                if chance.random() < 0.5:
                    hold.release()
                del hold
            else:
                holds.append(Hold([tensor[chance.randrange(900) :]]))
            assert tensor.sum() == whole

    together(*(lambda seed=seed: use(seed) for seed in range(4)))
    gc.collect()
    assert tensor.untyped_storage().resizable()
    assert tensor.sum() == whole

"""A held storage cannot be resized, keeps its memory, and is what it was afterwards."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from potluck.collective.call import Work
from potluck.errors import PeerLost, Timeout
from potluck.torch.work import AllWork, PotluckWork, StorageHold
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
    hold = StorageHold([tensor, tensor[2:]])
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
    holds = [StorageHold([tensor]) for _ in range(3)]
    for hold in (holds[0], holds[0], holds[2]):
        hold.release()
        assert not storage.resizable()
    holds[1].release()
    assert storage.resizable()


def test_a_use_that_is_forgotten_has_ended() -> None:
    """The operation was refused before it began."""
    tensor = torch.ones(6)
    hold = StorageHold([tensor])
    assert not tensor.untyped_storage().resizable()
    del hold
    gc.collect()
    assert tensor.untyped_storage().resizable()


def test_memory_outlives_its_tensor_and_its_hold_outlives_it() -> None:
    """Whichever goes first, nothing is freed twice."""
    for _ in range(100):
        tensor = torch.ones(100_000)
        hold = StorageHold([tensor])
        alias = tensor.view(-1)
        del tensor
        assert alias.sum() == 100_000
        hold.release()
        assert alias.sum() == 100_000
        last = StorageHold([alias])
        del alias
        last.release()


def test_other_memory_is_left_alone() -> None:
    """Shared memory stays shared; what cannot be resized anyway still cannot."""
    shared = torch.ones(6).share_memory_()  # type: ignore[no-untyped-call]
    foreign = torch.ones(6)
    foreign.numpy()
    empty = torch.ones(0)
    hold = StorageHold(
        [shared, foreign, empty, torch.ones(2, device="meta"), torch.eye(2).to_sparse()]
    )
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
        holds: list[StorageHold] = []
        for _ in range(500):
            if holds and chance.random() < 0.5:
                hold = holds.pop(chance.randrange(len(holds)))
                if chance.random() < 0.5:
                    hold.release()
                del hold
            else:
                holds.append(StorageHold([tensor[chance.randrange(900) :]]))
            assert tensor.sum() == whole

    together(*(lambda seed=seed: use(seed) for seed in range(4)))
    gc.collect()
    assert tensor.untyped_storage().resizable()
    assert tensor.sum() == whole


# --------------------------------------------------------------------------------------------------
# Works as PyTorch sees them: errors as they are, futures that never end the process.


def test_waiting_raises_the_error_itself() -> None:
    """Not one of PyTorch's that has its words."""
    work: Work[None] = Work()
    made = PotluckWork(work, [torch.ones(1)])
    assert not made.is_completed()
    assert made.exception() is None
    work.fail(PeerLost("Rank 1 is gone", rank=1))
    with pytest.raises(PeerLost, match="Rank 1"):
        made.wait()
    with pytest.raises(PeerLost):
        made.result()
    assert made.is_completed()
    assert not made.is_success()
    assert isinstance(made.exception(), PeerLost)


def test_a_future_has_the_tensors_or_the_words_of_the_error() -> None:
    """Also one that was asked for before the end, and one with callbacks."""
    good: Work[None] = Work()
    tensor = torch.ones(1)
    early = PotluckWork(good, [tensor]).get_future().then(lambda done: done.value()[0] + 1)
    good.succeed(None)
    assert early.wait().item() == 2
    assert PotluckWork(good, [tensor]).get_future_result().wait()[0] is tensor
    bad: Work[None] = Work()
    future = PotluckWork(bad, [tensor]).get_future()
    bad.fail(PeerLost("Rank 1 is gone", rank=1))
    with pytest.raises(RuntimeError, match="Rank 1 is gone"):
        future.wait()


@pytest.mark.parametrize("limit", [timedelta(milliseconds=5), 0.005])
def test_a_wait_gives_up_after_its_limit(limit: timedelta | float) -> None:
    """And says so in the words of whoever has set it; the work goes on."""
    work: Work[None] = Work(lambda: "all_reduce")
    made = PotluckWork(work)
    with pytest.raises(
        Timeout, match=r"all_reduce timed out after 0\.005 s \(the timeout of the call"
    ):
        made.wait(limit)
    work.succeed(None)
    assert made.wait(timedelta(0))
    made.synchronize()
    made.block_current_stream()


def test_only_a_receive_has_a_source() -> None:
    """The rank whose message it was."""
    work: Work[None] = Work()
    assert PotluckWork(work, source=lambda: 3)._source_rank() == 3
    with pytest.raises(RuntimeError, match="receive"):
        PotluckWork(work).source_rank()


def test_several_works_are_waited_for_as_one() -> None:
    """All have ended, all tensors are there, and the first error is the error."""
    works: list[Work[None]] = [Work(), Work()]
    tensors = [torch.ones(1), torch.zeros(1)]
    both = AllWork([PotluckWork(work, [each]) for work, each in zip(works, tensors, strict=True)])
    works[0].succeed(None)
    assert not both.is_completed()
    future = both.get_future()
    works[1].succeed(None)
    assert both.wait()
    both.synchronize()
    assert both.is_success()
    assert both.exception() is None
    assert [each.item() for each in both.result()] == [1, 0]
    assert len(future.wait()) == 2
    lost: Work[None] = Work()
    lost.fail(PeerLost("gone", rank=1))
    failed = AllWork([PotluckWork(works[0]), PotluckWork(lost)])
    assert isinstance(failed.exception(), PeerLost)
    assert not failed.is_success()
    with pytest.raises(PeerLost):
        failed.wait()


class Slow(dist.Work):
    """Takes its time, and remembers how much it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.limit = 0.0

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Be done after a moment."""
        self.limit = 0.0 if timeout is None else timeout.total_seconds()
        time.sleep(0.01)
        return True


def test_the_limit_of_several_works_is_for_all_together() -> None:
    """The later ones have what the earlier ones left; after that a look, but never for ever."""
    works = [Slow() for _ in range(3)]
    AllWork(works).wait(timedelta(seconds=20))
    limits = [work.limit for work in works]
    assert 20.0 >= limits[0] > limits[1] > limits[2] > 0
    AllWork(works).wait(timedelta(seconds=0.005))
    assert 0 < works[2].limit < 0.005
    AllWork(works).wait()
    assert works[2].limit == 0.0

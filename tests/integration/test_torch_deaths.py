"""A rank is killed while PyTorch is at work: all others get an error that names it, and go on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # imported by DistributedDataParallel when first used: not in every child
import torch.distributed as dist
import torch.distributed.fsdp  # the same
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import potluck
import potluck.torch
from support.place import Failure, Place, as_failure
from support.ranks import Ranks
from support.torch_ranks import in_a_child, torch_group

pytestmark = pytest.mark.slow

SOON = 1.0
"""Seconds within which every rank must have heard."""

VICTIM = 2


def die(place: Place) -> None:
    """End this process without a word, if it is the victim's."""
    if place.rank == VICTIM:
        place.say("dying")
        os.kill(os.getpid(), signal.SIGKILL)


def network() -> nn.Sequential:
    """Some layers, large enough for several buckets."""
    return nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 256), nn.Linear(256, 8))


def backward(place: Place, compression: str | None = None) -> None:
    """Die in the middle of the way back, when some gradients are on their way."""
    layers = network()
    model = DistributedDataParallel(layers, bucket_cap_mb=0.1)
    if compression is not None:
        model.register_comm_hook(None, potluck.torch.compress_hook(compression))
    for step in range(4):
        if step == 3:
            weight: Any = layers[1].weight
            weight.register_hook(lambda _: die(place))
        model(torch.ones(4, 64)).sum().backward()


def sharded(place: Place) -> None:
    """Die between forward and backward of a sharded model."""
    from torch.distributed.fsdp import fully_shard

    layers = network()
    for layer in layers:
        fully_shard(layer)
    fully_shard(layers)
    for step in range(4):
        out = layers(torch.ones(4, 64))
        if step == 3:
            out.register_hook(lambda _: die(place))
        out.sum().backward()


def functional(place: Place) -> None:
    """Die before a functional collective, whose result is awaited when it is used."""
    import torch.distributed._functional_collectives as functional

    group = dist.group.WORLD
    assert group is not None
    for step in range(4):
        if step == 3:
            die(place)
        total = functional.all_reduce(torch.ones(10_000), "sum", group)
        (total + 1).sum()


def asynchronous(place: Place) -> None:
    """Die while several operations are under way, before the last of them."""
    for step in range(4):
        works = [dist.all_reduce(torch.ones(300_000), async_op=True) for _ in range(2)]
        if step == 3:
            die(place)
        works.append(dist.all_reduce(torch.ones(300_000), async_op=True))
        for work in works:
            work.wait()


def future(place: Place) -> None:
    """The same, awaited by futures."""
    for step in range(4):
        if step == 3:
            die(place)
        work = dist.all_reduce(torch.ones(1000), async_op=True)
        work.get_future().then(lambda done: done.value()[0] * 2).wait()


def messages(place: Place) -> None:
    """Die while the others wait for a message from anybody."""
    dist.barrier()
    die(place)
    dist.recv(torch.empty(3))


CASES: dict[str, Callable[[Place], None]] = {
    "backward": backward,
    "int8": lambda place: backward(place, "int8"),
    "topk": lambda place: backward(place, "topk:0.1"),
    "sharded": sharded,
    "functional": functional,
    "asynchronous": asynchronous,
    "future": future,
    "messages": messages,
}


def work_until_the_end(place: Place, store: str, case: str) -> Any:
    """The same in a child, so that this process is there for the next test."""
    return in_a_child(lambda: work(place, store, case))


def work(place: Place, store: str, case: str) -> Any:
    """What went wrong, and that the survivors can go on with a group of their own."""
    with torch_group(place, store):
        # Made before: PyTorch wants all ranks to take part in that.
        rest = dist.new_group([rank for rank in range(place.world_size) if rank != VICTIM])
        dist.barrier()
        try:
            CASES[case](place)
        except Exception as error:  # noqa: BLE001 - which one it is, is for the test to judge
            failure = as_failure(error)
        else:
            return None
        after = torch.ones(1)
        dist.all_reduce(after, group=rest)
        return [failure, after.item()]


@pytest.mark.parametrize("case", CASES)
def test_a_killed_rank_is_named_at_once(ranks: Ranks, tmp_path: Path, case: str) -> None:
    """Never a crash, a hang or a result that is silently wrong."""
    group = ranks.start(work_until_the_end, 3, str(tmp_path / "store"), case)
    killed = group[VICTIM].expect("dying")["at"]
    assert group[VICTIM].value() is None
    for survivor in (0, 1):
        outcome = group[survivor].value()
        assert outcome is not None, "no error"
        failure: Failure = outcome[0]
        assert f"Rank {VICTIM}" in failure["text"], failure["text"]
        assert "is gone" in failure["text"], failure["text"]
        assert failure["at"] - killed < SOON
        assert outcome[1] == 2.0

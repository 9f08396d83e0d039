"""TorchBackend: a process group of PyTorch as an engine below."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
import torch.distributed as dist

from potluck import (
    BackendUnavailable,
    DistributedContext,
    HybridBackend,
    InvalidWorldSize,
    ReduceOp,
    SimulatedBackend,
    Timeout,
    TorchBackend,
)
from potluck.torch.process_group import ProcessGroup
from support.engine_suite import exercise
from support.gloo import gloo_groups
from support.threads import together

Result = TypeVar("Result")


def on_gloo(folder: Path, size: int, action: Callable[[TorchBackend], Result]) -> list[Result]:
    """What every rank returns, in order."""
    groups = gloo_groups(folder, size)
    with ExitStack() as stack:
        backends = together(*(lambda group=group: TorchBackend(group) for group in groups))
        for backend in backends:
            stack.enter_context(backend)
        return together(*(lambda backend=backend: action(backend) for backend in backends))


def test_everything_works_over_gloo(tmp_path: Path) -> None:
    """Collectives of all types, messages, subgroups, compression, remote calls."""
    on_gloo(tmp_path, 3, exercise)


def test_the_engine_adds_up_what_it_can(tmp_path: Path) -> None:
    """It says what it cannot do, and does nothing then."""

    def add(backend: TorchBackend) -> tuple[list[bool], float]:
        array = np.full(10, backend.rank + 1, np.float32)
        odd = np.ones(3, np.uint16)
        told = [
            backend.all_reduce_by_engine(array, "sum", 20),
            backend.all_reduce_by_engine(array, "max", 20),
            backend.all_reduce_by_engine(odd, "sum", 20),
        ]
        return told, float(array[0])

    assert on_gloo(tmp_path, 2, add) == [([True, False, False], 3.0)] * 2


def test_a_context_lets_the_engine_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uncompressed sums go to the engine; compressed ones and named strategies do not."""
    asked: list[str] = []
    original = TorchBackend.all_reduce_by_engine

    def spy(self: TorchBackend, array: object, op: str, timeout: float | None) -> bool:
        asked.append(op)
        return original(self, array, op, timeout)  # type: ignore[arg-type]

    monkeypatch.setattr(TorchBackend, "all_reduce_by_engine", spy)

    def add(backend: TorchBackend) -> None:
        with DistributedContext(backend) as context:
            context.all_reduce(np.ones(100, np.float32), "mean")
            context.all_reduce(np.ones(100, np.float32), compression="int8")
            context.all_reduce(np.ones(100, np.float32), strategy="ring")

    on_gloo(tmp_path, 2, add)
    assert asked == ["mean", "mean"]


@pytest.mark.parametrize("op", [ReduceOp.SUM, "sum", "add", dist.ReduceOp.SUM])
def test_the_engine_knows_an_operation_by_every_name(tmp_path: Path, op: Any) -> None:
    """None of them is done in another way in silence: arrays, and tensors where they are."""

    def add(backend: TorchBackend) -> tuple[bool, bool, float, float]:
        array, tensor = np.ones(4, np.float32), torch.ones(4)
        by_engine = backend.all_reduce_by_engine(array, op, 20)
        where_it_is = backend.all_reduce_tensor(tensor, op, 20)
        return by_engine, where_it_is, float(array[0]), float(tensor[0])

    assert on_gloo(tmp_path, 2, add) == [(True, True, 2.0, 2.0)] * 2


def test_nccl_is_told_from_other_engines(tmp_path: Path) -> None:
    """Also below a hybrid and a context; where each device has an engine, by the one in use."""
    (group,) = gloo_groups(tmp_path, 1)
    (messages,) = SimulatedBackend.create_group(1)
    with TorchBackend(group) as engine:
        both = HybridBackend(messages, engine)
        context = DistributedContext(both)
        for each in (messages, engine, both, context):
            assert each.as_nccl_backend() is None
        engine.engine = "cpu:gloo,cuda:nccl"  # as PyTorch names it; there is no device to try
        assert engine.as_nccl_backend() is None
        engine.engine = "nccl"
        for each in (engine, both, context):
            assert each.as_nccl_backend() is engine
        assert messages.as_nccl_backend() is None
        context.close()


def test_what_a_rank_has_written_arrives_although_it_does_nothing_more(tmp_path: Path) -> None:
    """A large result of which the last bytes are on their way when the call returns."""

    def find(backend: TorchBackend) -> float:
        context = DistributedContext(backend)
        return float(context.all_reduce(np.full(1 << 20, backend.rank + 1.0), "max")[-1])

    assert on_gloo(tmp_path, 2, find) == [2.0, 2.0]


def test_two_backends_on_one_group_do_not_disturb_each_other(tmp_path: Path) -> None:
    """Each has its own tag, also after one was closed."""
    groups = gloo_groups(tmp_path, 2)

    def talk(group: dist.ProcessGroup) -> list[bytes]:
        heard = []
        for _ in range(2):
            with TorchBackend(group) as first, TorchBackend(group) as second:
                other = 1 - first.rank
                for backend, word in ((second, b"two"), (first, b"one")):
                    backend.send(word, other)
                for backend in (first, second):
                    inbox = bytearray(3)
                    backend.recv(inbox, other, timeout=20)
                    heard.append(bytes(inbox))
                first.barrier(20)
        return heard

    assert (
        together(*(lambda group=group: talk(group) for group in groups))
        == [[b"one", b"two"] * 2] * 2
    )


def test_leaving_is_noticed(tmp_path: Path) -> None:
    """A rank that closes its backend is gone for the others."""
    groups = gloo_groups(tmp_path, 2)
    left, right = together(*(lambda group=group: TorchBackend(group) for group in groups))
    with left:
        right.close()
        with pytest.raises(ConnectionError, match="rank 1"):
            left.recv(bytearray(1), 1, timeout=20)


def own_groups(limit: float) -> list[ProcessGroup]:
    """Two ranks of a process group that is itself one of ours."""
    made = SimulatedBackend.create_group(2)
    return [ProcessGroup(backend, dt.timedelta(seconds=limit)) for backend in made]


def test_a_peer_that_the_engine_has_lost_is_lost() -> None:
    """Also where the engine is one of ours, whose errors are no errors of PyTorch."""
    groups = own_groups(20)
    left, right = (TorchBackend(group) for group in groups)
    with left, right:
        groups[1].shutdown()
        with pytest.raises(ConnectionError, match="rank 1"):
            left.recv(bytearray(1), 1, timeout=20)
    groups[0].shutdown()


def test_a_link_may_be_silent_for_longer_than_the_limit_of_the_group() -> None:
    """That limit is for operations; nobody is lost because nobody had anything to say."""
    groups = own_groups(0.2)
    left, right = (TorchBackend(group) for group in groups)
    with left, right:
        time.sleep(0.5)
        together(lambda: left.barrier(20), lambda: right.barrier(20))
    for group in groups:
        group.shutdown()


def test_time_runs_out_in_the_engine_too(tmp_path: Path) -> None:
    """Rank 1 does not come."""
    groups = gloo_groups(tmp_path, 2)
    left, right = together(*(lambda group=group: TorchBackend(group) for group in groups))
    with left, right:
        with pytest.raises(Timeout, match="all-reduce by"):
            left.all_reduce_by_engine(np.ones(4, np.float32), "sum", 0.2)
        # The engine goes on waiting, and its threads with it, until rank 1 comes after all.
        right.all_reduce_by_engine(np.ones(4, np.float32), "sum", 20)


def test_without_a_process_group_the_error_says_what_to_do() -> None:
    """Somebody forgot to start PyTorch's."""
    with pytest.raises(BackendUnavailable, match="init_process_group"):
        TorchBackend()


def test_messages_go_one_way_and_sums_another(tmp_path: Path) -> None:
    """A hybrid of a group in memory and a group of PyTorch."""
    groups = gloo_groups(tmp_path, 2)
    engines = together(*(lambda group=group: TorchBackend(group) for group in groups))
    hybrids = [
        HybridBackend(messages, engine)
        for messages, engine in zip(SimulatedBackend.create_group(2), engines, strict=True)
    ]
    together(*(lambda hybrid=hybrid: exercise(hybrid) for hybrid in hybrids))


def test_a_hybrid_needs_the_same_ranks_twice(tmp_path: Path) -> None:
    """Two worlds of different size are no hybrid."""
    (group,) = gloo_groups(tmp_path, 1)
    with (
        TorchBackend(group) as engine,
        SimulatedBackend.create_group(2)[0] as messages,
        pytest.raises(InvalidWorldSize, match="must have the same 2 ranks"),
    ):
        HybridBackend(messages, engine)

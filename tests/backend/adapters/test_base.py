"""A backend that a user writes with the six documented methods carries everything."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import potluck
from potluck import (
    Backend,
    DistributedContext,
    DistributedError,
    PeerLost,
    SubBackend,
    Timeout,
    UnsupportedOperation,
)
from support.plain import QueueBackend, queue_group
from support.threads import together


@contextlib.contextmanager
def contexts(size: int) -> Iterator[list[DistributedContext]]:
    """A context on each rank."""
    made = [DistributedContext(backend) for backend in queue_group(size)]
    try:
        yield made
    finally:
        together(*(each.close for each in made))


def on_all(made: list[DistributedContext], act: Callable[[DistributedContext], Any]) -> list[Any]:
    """What each rank gets."""
    return together(*(lambda each=each: act(each) for each in made))


def rows(each: DistributedContext, count: int = 1) -> Any:
    """Rows that tell their rank."""
    return np.full(count, each.rank + 1)


CALLS: dict[str, tuple[Callable[[DistributedContext], Any], list[Any]]] = {
    "all_reduce": (lambda c: c.all_reduce(rows(c)).tolist(), [[6]] * 3),
    "mean": (lambda c: c.all_reduce(c.rank + 1.0, "mean"), [2.0] * 3),
    "reduce": (lambda c: c.reduce(c.rank + 1, root=1), [None, 6, None]),
    "broadcast": (lambda c: c.broadcast(rows(c), root=2).tolist(), [[3]] * 3),
    "all_gather": (lambda c: c.all_gather(rows(c)).tolist(), [[1, 2, 3]] * 3),
    "gather": (lambda c: c.gather(rows(c)) is not None, [True, False, False]),
    "scatter": (
        lambda c: c.scatter(np.arange(3) if c.rank == 0 else None, out=np.zeros(1, int)).tolist(),
        [[0], [1], [2]],
    ),
    "reduce_scatter": (lambda c: c.reduce_scatter(rows(c, 3)).tolist(), [[6]] * 3),
    "all_to_all": (
        lambda c: c.all_to_all(np.arange(3) + 10 * c.rank).tolist(),
        [[0, 10, 20], [1, 11, 21], [2, 12, 22]],
    ),
    "barrier": (lambda c: c.barrier(), [None] * 3),
    "objects": (lambda c: c.all_gather_object(c.rank), [[0, 1, 2]] * 3),
    "async": (lambda c: c.all_reduce(c.rank, async_op=True).wait(), [3] * 3),
    "compressed": (
        lambda c: c.all_reduce(np.ones(1000, np.float32), compression="float16")[0],
        [3.0] * 3,
    ),
    "function": (lambda c: potluck.all_reduce(c.backend, c.rank), [3] * 3),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_collective_runs_on_six_methods(name: str) -> None:
    """What is not in them is made of them."""
    act, expected = CALLS[name]
    with contexts(3) as made:
        assert on_all(made, act) == expected


def test_a_large_array_and_messages_with_tags_travel() -> None:
    """In pieces, and in any order of tags."""
    with contexts(2) as (left, right):
        total, _ = on_all([left, right], lambda each: each.all_reduce(np.ones(1 << 20)))
        assert total.sum() == 2 << 20
        left.send(b"first", 1, tag=7)
        left.send(b"later", 1, tag=9)
        inbox = bytearray(5)
        right.recv(inbox, 0, tag=9, timeout=30)
        assert inbox == b"later"
        with pytest.raises(Timeout):
            right.recv_timeout(inbox, 0, 0.05)


def test_subgroups_of_it_work() -> None:
    """Of a context, and of the backend itself."""
    with contexts(3) as made:
        pair = together(*(lambda each=each: each.subgroup([0, 2]) for each in made[::2]))
        assert together(*(lambda each=each: each.all_reduce(1) for each in pair)) == [2, 2]
    backends = queue_group(2)
    subs = [SubBackend(each, [0, 1]) for each in backends]
    subs[0].send(b"soup", 1)
    inbox = bytearray(4)
    subs[1].recv(inbox, 0, timeout=30)
    assert inbox == b"soup"
    together(*(each.close for each in backends))


def test_its_own_barrier_is_the_barrier() -> None:
    """The context does not replace what the user has written."""
    with contexts(2) as made:
        on_all(made, lambda each: each.barrier())
        assert [each.backend.barriers for each in made] == [1, 1]  # type: ignore[attr-defined]


def test_a_rank_that_leaves_is_named_to_the_others() -> None:
    """As over TCP: nobody waits for the time-out."""
    left, right = (DistributedContext(backend) for backend in queue_group(2))
    left.close()
    with pytest.raises(DistributedError, match="ank 0"):
        right.all_reduce(1, timeout=30)
    right.close()


def test_an_error_of_the_users_code_loses_the_peer_and_hangs_nobody() -> None:
    """Whatever it raises."""

    class Broken(QueueBackend):
        def send(self, data: Any, dst: int) -> None:  # type: ignore[override]
            raise ZeroDivisionError

    first, second = queue_group(2)
    left, right = DistributedContext(Broken(0, first._room)), DistributedContext(second)
    with pytest.raises(PeerLost):
        left.all_reduce(1, timeout=30)
    together(left.close, right.close)


def test_before_a_context_stands_on_it_messages_cannot_be_started() -> None:
    """The error says what to do."""
    backend = queue_group(1)[0]
    with pytest.raises(UnsupportedOperation, match="QueueBackend") as caught:
        backend.post_send(b"", 0)
    assert "DistributedContext" in str(caught.value.hint)


def test_a_class_without_any_of_them_is_told_which_to_write() -> None:
    """At its first message."""

    class Empty(Backend):
        rank = 0
        world_size = 1

    with pytest.raises(TypeError, match="send, recv, recv_timeout and barrier"):
        Empty().send(b"", 0)

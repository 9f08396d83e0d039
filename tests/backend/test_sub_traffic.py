"""Groups at the same time: overlapping and equal subgroups and their parent share the links."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from potluck import Backend, SimulatedBackend, SubBackend
from support.meshes import mesh_group, received
from support.threads import together

LAPS = 25


@contextlib.contextmanager
def simulated_group(size: int) -> Iterator[list[Backend]]:
    """In memory."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(one) for one in SimulatedBackend.create_group(size)]


@contextlib.contextmanager
def tcp_group(size: int) -> Iterator[list[Backend]]:
    """Over real sockets."""
    with mesh_group(size) as group:
        yield [*group]


GROUPS = pytest.mark.parametrize("make", [simulated_group, tcp_group])
Make = Callable[[int], contextlib.AbstractContextManager[list[Backend]]]


def talk(name: str, backend: Backend) -> None:
    """Exchange messages with everybody and meet at barriers, and take nobody else's."""
    peers = [rank for rank in range(backend.world_size) if rank != backend.rank]
    for lap in range(LAPS):
        for peer in peers:
            backend.send(f"{name} {backend.rank}>{peer} {lap:3}".encode(), peer)
        for peer in peers:
            text = f"{name} {peer}>{backend.rank} {lap:3}".encode()
            assert received(backend, peer, len(text)) == text
        backend.barrier()


@GROUPS
def test_overlapping_subgroups_and_the_parent_run_at_once(make: Make) -> None:
    """Rank 1 and rank 2 are in everything, on three threads each; all messages look alike."""
    with make(4) as group:
        left = [SubBackend(group[rank], [0, 1, 2]) for rank in (0, 1, 2)]
        right = [SubBackend(group[rank], [1, 2, 3]) for rank in (1, 2, 3)]
        together(
            *[partial(talk, "whole", b) for b in group],
            *[partial(talk, "left ", b) for b in left],
            *[partial(talk, "right", b) for b in right],
        )


@GROUPS
def test_subgroups_of_the_same_members_are_apart(make: Make) -> None:
    """Two subgroups created alike, two with names, and one that is the whole, all at once."""
    with make(3) as group:
        first, second = ([SubBackend(one, [0, 1, 2]) for one in group] for _ in range(2))
        named = [SubBackend(one, [0, 1, 2], name="pipeline") for one in group]
        other = [SubBackend(one, [0, 1, 2], name="replica") for one in group]
        together(
            *[partial(talk, "whole", b) for b in group],
            *[partial(talk, "first", b) for b in first],
            *[partial(talk, "secnd", b) for b in second],
            *[partial(talk, "named", b) for b in named],
            *[partial(talk, "other", b) for b in other],
        )


@GROUPS
def test_named_subgroups_may_be_created_in_any_order(make: Make) -> None:
    """Ranks that create them in different orders still agree which is which."""
    with make(2) as group:
        a0, b0 = (SubBackend(group[0], [0, 1], name=name) for name in ("a", "b"))
        b1, a1 = (SubBackend(group[1], [0, 1], name=name) for name in ("b", "a"))
        a0.send(b"for a", 1)
        b0.send(b"for b", 1)
        assert received(b1, 0, 5) == b"for b"
        assert received(a1, 0, 5) == b"for a"


@GROUPS
def test_a_barrier_of_a_subgroup_opens_no_other(make: Make) -> None:
    """While the subgroup meets again and again, the parent's barrier stays shut."""
    with make(3) as group:
        subs = [SubBackend(group[rank], [0, 1]) for rank in (0, 1)]
        parent = group[0].post_barrier()
        for _ in range(5):
            together(*[sub.barrier for sub in subs])
        assert not parent.done
        together(parent.wait, group[1].barrier, group[2].barrier)


@GROUPS
def test_one_group_waiting_holds_up_no_other(make: Make) -> None:
    """A receive nobody answers in one group, and messages nobody takes, leave the rest free."""
    with make(3) as group:
        quiet = SubBackend(group[0], [0, 1, 2], name="quiet")
        pending = quiet.post_recv_into(bytearray(4), 1)
        for _ in range(10):
            quiet.send(b"nobody asked", 2)
        together(*[partial(talk, "whole", b) for b in group])
        assert not pending.done
        assert pending.cancel()

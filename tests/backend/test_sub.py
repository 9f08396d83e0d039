"""SubBackend: some ranks of a backend as a group of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from potluck import (
    Backend,
    InvalidRank,
    InvalidWorldSize,
    PeerLost,
    SimulatedBackend,
    SizeMismatch,
    SubBackend,
    Timeout,
)
from support.meshes import mesh_group, received
from support.threads import Background, together


@contextlib.contextmanager
def parents(size: int) -> Iterator[list[SimulatedBackend]]:
    """A group to take parts of."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(one) for one in SimulatedBackend.create_group(size)]


def test_subbackend_local_rank_and_world_size() -> None:
    """Members are renumbered from 0 in ascending order."""
    with parents(4) as group:
        first, second = (SubBackend(group[rank], [1, 3]) for rank in (1, 3))
        assert (first.rank, first.world_size) == (0, 2)
        assert (second.rank, second.world_size) == (1, 2)


def test_subbackend_global_rank_not_in_members_is_error() -> None:
    """Only members create the subgroup; the error names the stranger."""
    with (
        parents(4) as group,
        pytest.raises(
            InvalidRank, match=r"^Rank 0 is not in the subgroup of ranks \[1, 3\]"
        ) as caught,
    ):
        SubBackend(group[0], [1, 3])
    assert (caught.value.rank, caught.value.world_size) == (0, 2)


def test_subbackend_empty_members_is_error() -> None:
    """A subgroup has at least one member."""
    with parents(2) as group, pytest.raises(InvalidWorldSize) as caught:
        SubBackend(group[0], [])
    assert caught.value.world_size == 0


@pytest.mark.parametrize("stranger", [4, 99, -1])
def test_a_member_the_parent_does_not_have_is_an_error(stranger: int) -> None:
    """The error names the member and the parent's size; -1 is not the last rank."""
    with parents(4) as group, pytest.raises(InvalidRank) as caught:
        SubBackend(group[0], [0, stranger])
    assert (caught.value.rank, caught.value.world_size) == (stranger, 4)


def test_subbackend_send_recv_routes_through_parent() -> None:
    """Ranks 0 and 1 of the subgroup are ranks 0 and 2 of the parent."""
    with parents(4) as group:
        left, right = (SubBackend(group[rank], [0, 2]) for rank in (0, 2))
        sender = Background(lambda: left.send(bytes([9, 8, 7]), 1))
        assert received(right, 0, 3) == bytes([9, 8, 7])
        sender.result()


@pytest.mark.parametrize("members", [[0, 2, 4], [1], [1, 5], [0, 1, 2, 3, 4, 5]])
def test_subbackend_barrier(members: list[int]) -> None:
    """Only the members take part, and each of them only leaves when all are there."""
    arrived = dict.fromkeys(members, 0)

    def visit(parent: Backend) -> None:
        sub = SubBackend(parent, members)
        for lap in range(1, 11):
            arrived[parent.rank] = lap
            sub.barrier()
            assert min(arrived.values()) >= lap

    with parents(6) as group:
        together(*[partial(visit, group[member]) for member in members])


def test_subbackend_to_global_to_local() -> None:
    """Both directions of the numbering; a stranger has no local rank."""
    with parents(4) as group:
        sub = SubBackend(group[0], [0, 2])
        assert [sub.to_global(0), sub.to_global(1)] == [0, 2]
        assert [sub.to_local(rank) for rank in range(4)] == [0, None, 1, None]
        assert sub.to_local(-1) is None
        assert sub.to_local(99) is None


@pytest.mark.parametrize("local", [2, 99, -1])
def test_a_local_rank_out_of_range_raises(local: int) -> None:
    """In the numbering, in a send and in a receive; -1 is not the last member."""
    with parents(4) as group:
        sub = SubBackend(group[0], [0, 2])
        for action in (
            lambda: sub.to_global(local),
            lambda: sub.send(b"1", local),
            lambda: sub.recv(bytearray(1), local),
            lambda: sub.recv_timeout(bytearray(1), local, 1.0),
        ):
            with pytest.raises(InvalidRank) as caught:
                action()
            assert (caught.value.rank, caught.value.world_size) == (local, 2)


def test_subbackend_sorts_and_dedups_members() -> None:
    """The order in which members are listed does not matter, nor does saying one twice."""
    with parents(4) as group:
        sub = SubBackend(group[2], [3, 2, 0, 2, 3])
        assert sub.members == (0, 2, 3)
        assert (sub.rank, sub.world_size) == (1, 3)


def test_members_may_come_from_any_iterable() -> None:
    """A generator is read once."""
    with parents(4) as group:
        assert SubBackend(group[2], (rank for rank in range(0, 4, 2))).members == (0, 2)


def test_the_parent_is_known_and_stays_open() -> None:
    """Closing a subgroup, or leaving its block, closes nothing of the parent's."""
    with parents(2) as group:
        with SubBackend(group[0], [0, 1]) as sub:
            assert sub.parent is group[0]
        group[0].send(b"open", 1)
        assert received(group[1], 0, 4) == b"open"


def test_a_message_to_oneself_arrives_in_a_subgroup() -> None:
    """Also where the local rank differs from the parent's."""
    with parents(4) as group:
        sub = SubBackend(group[3], [1, 3])
        sub.send(b"self", 1)
        assert received(sub, 1, 4) == b"self"


def test_time_outs_and_size_mismatches_pass_through() -> None:
    """The errors of the parent, and nothing is lost by a time-out."""
    with parents(3) as group:
        left, right = (SubBackend(group[rank], [0, 2]) for rank in (0, 2))
        with pytest.raises(Timeout):
            right.recv_timeout(bytearray(3), 0, 0.01)
        left.send(b"long one", 1)
        left.send(b"abc", 1)
        with pytest.raises(SizeMismatch) as caught:
            right.recv(bytearray(3), 0)
        assert (caught.value.expected, caught.value.got) == (3, 8)
        assert received(right, 0, 3) == b"abc"


def test_a_barrier_names_the_missing_member() -> None:
    """The rank that did not come is reported in the parent's numbering, like every error."""
    with parents(4) as group:
        sub = SubBackend(group[1], [1, 3])
        with pytest.raises(Timeout, match="rank 3 has not arrived") as caught:
            sub.barrier(timeout=0.05)
        assert caught.value.missing == (3,)


def test_the_loss_of_a_member_ends_the_subgroup_only() -> None:
    """Waiting for the lost member fails; a subgroup without it goes on."""
    with parents(4) as group:
        with_lost = [SubBackend(group[rank], [0, 1, 3]) for rank in (0, 1)]
        without = [SubBackend(group[rank], [0, 1]) for rank in (0, 1)]
        waiting = [Background(sub.barrier) for sub in with_lost]
        group[3].lose()
        for one in waiting:
            with pytest.raises(PeerLost) as caught:
                one.result()
            assert caught.value.rank == 3
        together(*[sub.barrier for sub in without])


def test_subgroups_nest() -> None:
    """A part of a part: the numbering and the traffic of each level are its own."""
    with parents(6) as group:
        middle = {rank: SubBackend(group[rank], [1, 3, 5]) for rank in (1, 3, 5)}
        inner = {rank: SubBackend(middle[rank], [0, 2]) for rank in (1, 5)}
        assert (inner[5].rank, inner[5].world_size, inner[5].members) == (1, 2, (0, 2))
        assert inner[5].parent is middle[5]
        assert middle[5].to_global(inner[5].to_global(1)) == 5
        inner[1].send(b"inner", 1)
        middle[1].send(b"midst", 2)
        group[1].send(b"outer", 5)
        assert received(group[5], 1, 5) == b"outer"
        assert received(middle[5], 0, 5) == b"midst"
        assert received(inner[5], 0, 5) == b"inner"
        together(inner[1].barrier, inner[5].barrier)


def test_a_nested_subgroup_is_not_the_outer_one_with_the_same_numbers() -> None:
    """Members (0, 1) of a subgroup and members (0, 1) of the parent are different groups."""
    with parents(3) as group:
        outer = [SubBackend(group[rank], [0, 1]) for rank in (0, 1)]
        whole = [SubBackend(group[rank], [0, 1, 2]) for rank in (0, 1)]
        inner = [SubBackend(sub, [0, 1]) for sub in whole]
        inner[0].send(b"inner", 1)
        outer[0].send(b"outer", 1)
        assert received(outer[1], 0, 5) == b"outer"
        assert received(inner[1], 0, 5) == b"inner"


def test_a_subgroup_takes_the_parents_time_limit() -> None:
    """Who set a default for the whole group has set it for its parts."""
    with parents(2) as group:
        group[0].timeout = 0.01
        sub = SubBackend(group[0], [0, 1])
        with pytest.raises(Timeout):
            sub.recv(bytearray(1), 1)


def test_members_can_be_numbered_as_they_are_listed() -> None:
    """Where somebody else has given out the ranks; messages and waiting ones go by them."""
    parents = SimulatedBackend.create_group(3)
    members = [2, 0, 1]
    subs = [SubBackend(parent, members, name="turned", in_order=True) for parent in parents]
    assert [sub.rank for sub in subs] == [1, 2, 0]
    assert subs[0].members == (2, 0, 1)
    assert subs[0].to_local(1) == 2
    subs[2].send(b"x", 1)  # from the third, the first of the group, to the first
    parents[0].progress(0.1)
    assert subs[0].has_message(0)
    assert not subs[0].has_message(2)
    inbox = bytearray(1)
    subs[0].recv(inbox, 0, timeout=20)
    assert inbox == b"x"
    for parent in parents:
        parent.close()


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ([0, 4], r"^A subgroup cannot have rank 4: the group has ranks 0 to 3$"),
        ([-1, 0], r"^A subgroup cannot have rank -1: the group has ranks 0 to 3$"),
        ([1], r"^Rank 0 is not in the subgroup of ranks \[1\]\. Only the members"),
    ],
)
def test_a_wrong_subgroup_gets_one_true_sentence(members: list[int], said: str) -> None:
    """Of the group it would be part of, not of one that does not exist."""
    with parents(4) as group, pytest.raises(InvalidRank, match=said):
        SubBackend(group[0], members)


# --------------------------------------------------------------------------------------------------
# Groups at the same time: overlapping and equal subgroups and their parent share the links.

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

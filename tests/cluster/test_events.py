"""The error that operations of a view end with: made from the commit that followed, alone."""

from __future__ import annotations

import pytest

from potluck._types import NodeId, ProcessId, View
from potluck.cluster.events import after_skipping, ending, is_orderly, no_quorum, out_of_view
from potluck.errors import LeftOut, PeerLost, ViewChanged
from potluck.membership.events import Installed
from potluck.membership.messages import Cause, CauseCode, Commit, Proposal
from support.cluster_net import ClusterNet

A, B, C, D = (ProcessId(NodeId(letter * 32), 1) for letter in "abcd")
VIEW = View("f" * 32, 3, (A, B, C, D))


def commit(*members: ProcessId, causes: tuple[Cause, ...] = (), epoch: int = 4) -> Commit:
    """A view that followed."""
    return Commit(VIEW.lineage, epoch, Proposal(members, "because", causes=causes))


def lost(who: ProcessId, code: CauseCode = CauseCode.ENDED, reason: str = "killed") -> Cause:
    """Why one is left out."""
    return Cause(who, code, f"host-{who.node[0]}", f"10.0.0.{who.node[0]}", 0.5, reason)


def test_one_that_is_gone_is_named_with_rank_machine_address_and_cause() -> None:
    """As the proposer wrote it down."""
    error = ending(VIEW, [commit(A, B, D, causes=(lost(C),))], A)
    assert isinstance(error, PeerLost)
    assert (error.rank, error.node, error.host, error.cause) == (2, C.node, "host-c", "killed")
    assert str(error).startswith("Rank 2 (host-c at 10.0.0.c) is gone: killed. The others continue")


def test_all_that_are_gone_are_named_in_rank_order() -> None:
    """The fields are those of the first."""
    causes = lost(D, CauseCode.SILENT, "unplugged"), lost(B)
    error = ending(VIEW, [commit(A, C, causes=causes)], A)
    assert isinstance(error, PeerLost)
    assert error.message == "Ranks 1 (host-b at 10.0.0.b) and 3 (host-d at 10.0.0.d) are gone"
    assert (error.rank, error.host) == (1, "host-b")
    assert error.cause == "rank 1: killed; rank 3: unplugged"


@pytest.mark.parametrize(
    "after",
    [
        commit(A, B, D, causes=(lost(C),)),
        commit(A, B, C, D),
        commit(D, C, A, B, ProcessId(NodeId("e" * 32), 1)),
    ],
)
def test_all_members_of_the_next_view_raise_the_same(after: Commit) -> None:
    """Type, text and fields."""
    stay = [who for who in VIEW.members if who in after.proposal.members]
    errors = [ending(VIEW, [after], who) for who in stay]
    assert len({type(error) for error in errors}) == 1
    assert len({str(error) for error in errors}) == 1
    assert len({str(sorted(vars(error).items(), key=str)) for error in errors}) == 1


@pytest.mark.parametrize(
    ("members", "what"),
    [((A, B, C, D), "continue in a new view"), ((A, B, C, D, A._replace(incarnation=2)), "have")],
)
def test_if_no_member_is_gone_the_view_changed(members: tuple[ProcessId, ...], what: str) -> None:
    """With the reason of the proposal."""
    error = ending(VIEW, [commit(*members)], B)
    assert type(error) is ViewChanged
    assert what in error.message
    assert error.cause == "because"


def test_one_that_is_left_out_hears_why_and_of_no_other() -> None:
    """Never that those are gone who stay."""
    cause = lost(B, CauseCode.UNREACHABLE, "it and host-d do not hear each other")
    error = ending(VIEW, [commit(A, C, D, causes=(cause,))], B)
    assert type(error) is LeftOut
    assert "left out of view 4" in error.message
    assert error.cause == "it and host-d do not hear each other"
    assert "waits to be let in again" in str(error)
    assert (error.rank, error.node) == (1, B.node)


def test_a_merge_says_into_which_cluster_and_what_becomes_of_the_work() -> None:
    """Though the same members are named in the terminal view."""
    last = Commit(VIEW.lineage, 4, Proposal(VIEW.members, "two met", into="e" * 32))
    error = ending(VIEW, [last], A)
    assert type(error) is ViewChanged
    assert "merged into cluster eeeeeeee" in error.message
    assert "replaced" in str(error)


def test_only_the_first_commit_counts_and_missed_views_are_mentioned() -> None:
    """A process that skips epochs gets what the others got, if it learns that commit."""
    first, later = commit(A, B, D, causes=(lost(C),)), commit(A, B, epoch=6)
    error = ending(VIEW, [first, later], A)
    assert (error.rank, "missed" in str(error)) == (2, False)
    error = ending(VIEW, [later], A)
    assert "(this process missed views 4 to 5)" in str(error)
    assert "Ranks 2 (cccccccc/1) and 3 (dddddddd/1) are gone" in str(error)
    assert "missed view 4)" in str(ending(VIEW, [commit(A, B, C, D, epoch=5)], A))


def test_a_child_lineage_names_those_who_ended_like_any_other_successor() -> None:
    """Its views begin at 1, whatever the number of the view before: no view was missed."""
    causes = lost(A), lost(C, CauseCode.SILENT, "unplugged")
    child = Commit("e" * 32, 1, Proposal((B, D), "A and C have ended", causes=causes))
    errors = [ending(VIEW, [child], who) for who in (B, D)]
    assert all(type(error) is PeerLost for error in errors)
    assert len({str(error) for error in errors}) == 1
    assert (errors[0].rank, errors[0].node, errors[0].host) == (0, A.node, "host-a")
    assert errors[0].cause == "rank 0: killed; rank 2: unplugged"
    first = View(VIEW.lineage, 0, VIEW.members)
    later = Commit("e" * 32, 9, child.proposal)
    assert "missed" not in str(ending(first, [later], B))
    assert not is_orderly(VIEW, [child])


def test_members_that_begin_a_child_lineage_are_told_who_ended() -> None:
    """From the commit that membership hands over, not one made up here."""
    net = ClusterNet()
    a, b, c, d, e = net.form("abcde")
    before = net.view_of(d)
    net.cut_off([d, e], [a, b, c])
    net.run(1.2)  # they are paused, and nothing follows their view yet
    for victim in (a, b, c):
        net.kill(victim)
    net.run(4)
    net.cut.clear()
    net.run(8)
    child = net.view_of(d)
    assert (child.members, child.lineage == before.lineage) == ((d, e), False)
    errors = []
    for who in (d, e):
        installed = [x for _, each, x in net.effects if each == who and isinstance(x, Installed)]
        commits = installed[-1].commits
        assert [commit.lineage for commit in commits] == [child.lineage]
        errors.append(ending(before, commits, who))
    assert all(type(error) is PeerLost for error in errors)
    assert len({str(error) for error in errors}) == 1
    for name in "abc":
        assert f"({name}" in errors[0].message
    assert "its process has ended" in str(errors[0].cause)


def test_one_that_steps_aside_learns_why_and_that_it_joins_again() -> None:
    """No commit says so: it is no member's loss."""
    error = out_of_view("attic continues this job in another view")
    assert type(error) is ViewChanged
    assert "not in a view" in error.message
    assert "attic continues" in str(error)
    assert "joins again by itself" in str(error)


@pytest.mark.parametrize(("count", "said"), [(0, ""), (1, "1 earlier view was"), (3, "3 earlier")])
def test_what_was_not_reported_is_said_in_a_copy(count: int, said: str) -> None:
    """The error of the view itself is shared by all who raise it."""
    error = ending(VIEW, [commit(A, B, C, D)], B)
    told = after_skipping(error, count)
    assert told is not error
    assert said in str(told)
    assert error.cause == "because"


def test_what_may_be_finished_is_known_from_the_causes() -> None:
    """If all who are missing have left, or none is missing."""
    assert is_orderly(VIEW, [commit(A, B, C, D)])
    assert is_orderly(VIEW, [commit(A, B, C, causes=(lost(D, CauseCode.LEFT),))])
    assert not is_orderly(VIEW, [commit(A, B, causes=(lost(D, CauseCode.LEFT), lost(C)))])
    assert not is_orderly(VIEW, [commit(A, B, C)])


def test_a_call_without_a_next_view_names_whom_it_misses_and_since_when() -> None:
    """And what to do about it."""
    error = no_quorum("Waited 5 s", 5, VIEW, [lost(C, CauseCode.SILENT)], "paused")
    assert error.missing == (2,)
    assert "missing: rank 2 (host-c at 10.0.0.c, not heard for 0.5 s)" in str(error)
    assert "potluck continue" in str(error)
    assert str(no_quorum("Waited 5 s", 5, VIEW, [], "")).startswith("Waited 5 s. ")

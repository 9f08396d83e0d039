"""The error that operations of a view end with: made from the commit that followed, alone."""

from __future__ import annotations

from typing import Any

import pytest

from potluck._types import NodeId, ProcessId, View
from potluck.cluster import events
from potluck.cluster.events import (
    Announcer,
    ViewChange,
    after_skipping,
    ending,
    is_orderly,
    no_quorum,
    out_of_view,
)
from potluck.errors import LeftOut, PeerLost, ViewChanged
from potluck.membership.events import Installed, MembershipChange, MembershipEvent
from potluck.membership.messages import Cause, CauseCode, Commit, ProcessInfo, Proposal
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


def test_one_that_was_left_out_long_ago_is_not_told_the_reason_of_a_later_view() -> None:
    """The view that left it out is not known any more; the one it learns is about others."""
    later = Commit(VIEW.lineage, 22, Proposal((A, C), "without d", causes=(lost(D),)))
    error = ending(VIEW, [later], B)
    assert type(error) is LeftOut
    assert error.cause == "the others could not reach it (this process missed views 4 to 21)"


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
    """No commit says so: it is not a member's loss."""
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


# --------------------------------------------------------------------------------------------------
# What people read without asking for more.


class Town:
    """A process in its views, and the lines that it writes."""

    def __init__(self, log: pytest.LogCaptureFixture, *, has_launcher: bool = False) -> None:
        self.log = log
        self.announcer = Announcer(A, has_launcher=has_launcher)
        self.view: View | None = None

    def install(self, *members: ProcessId, causes: tuple[Cause, ...] = ()) -> list[str]:
        """Another view holds; what is said of it."""
        after = commit(*members, causes=causes, epoch=self.view.epoch + 1 if self.view else 1)
        change = ViewChange(after.view, self.view, "because")
        cards = [
            ProcessInfo(node=each.node, incarnation=each.incarnation, name=f"host-{each.node[0]}")
            for each in members
        ]
        self.view = after.view
        with self.log.at_level("WARNING", "potluck.cluster"):
            self.announcer.installed(change, cards, [after])
        return self.said()

    def note(self, change: MembershipChange, text: str, **facts: Any) -> list[str]:
        """Something happened; what is said of it."""
        event = MembershipEvent(change, text)
        with self.log.at_level("WARNING", "potluck.cluster"):
            self.announcer.noted(event, **{"missing": [], "has_network": True, **facts})
        return self.said()

    def said(self) -> list[str]:
        """The lines since the last look."""
        lines = [each.getMessage() for each in self.log.records]
        self.log.clear()
        return lines


def test_a_machine_that_leaves_and_comes_back_is_one_line_each(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its next process too; those who come for the first time are no news."""
    town = Town(caplog)
    assert town.install(A) == town.install(A, B, C) == []
    silent = lost(B, CauseCode.SILENT)
    assert town.install(A, C, causes=(silent,)) == ["host-b left: it did not respond for 0.5 s"]
    assert town.install(A, B, C) == ["host-b came back"]
    again = ProcessId(B.node, 2)
    assert town.install(A, again, C, causes=(lost(B),)) == ["host-b came back"]


def test_a_script_that_ended_is_mentioned_once_it_is_clear_that_this_one_stays(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of a run all leave, one after the other, and nobody needs to hear that."""
    town = Town(caplog)
    town.install(A, B)
    assert town.install(A, causes=(lost(B, CauseCode.LEFT),)) == []
    town.announcer.look()
    assert town.said() == []
    monkeypatch.setattr(events, "STAYS_AFTER", 0.0)
    town.announcer.look()
    assert town.said() == ["host-b left: its script ended"]


def test_under_a_launcher_that_one_says_how_scripts_have_ended(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Not what only the members see."""
    town = Town(caplog, has_launcher=True)
    town.install(A, B, C, D)
    assert town.install(A, C, D, causes=(lost(B),)) == []
    assert town.install(A, D, causes=(lost(C, CauseCode.UNREACHABLE),)) == [
        "host-c left: some members could not reach it"
    ]


def test_one_that_waits_says_for_whom_once_and_when_it_continues(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Or that its cable is out, which it can know."""
    town = Town(caplog)
    town.install(A, B, C)
    paused, resumed = MembershipChange.PAUSED, MembershipChange.RESUMED
    (line,) = town.note(paused, "paused: no quorum", missing=["host-b", "host-c"])
    assert line == (
        "Paused: this machine cannot reach host-b and host-c, and they may be at work without it. "
        "It continues when one of them is back."
    )
    assert town.note(MembershipChange.REMOVED, "left out") == []
    assert town.note(resumed, "resumed") == ["This machine continues with host-b and host-c"]
    assert town.note(paused, "paused", has_network=False) == [
        "Paused: this machine is not connected to a network. It continues when it is."
    ]
    assert town.install(A, B, C) == ["This machine continues with host-b and host-c"]


def test_while_one_waits_for_the_first_view_it_hears_that_another_has_stopped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Later the views tell of it; a launcher knows more."""
    told = MembershipChange.LOST, "host-b left while this machine waits: it closed the connection"
    town = Town(caplog)
    assert town.note(*told) == [told[1]]
    assert Town(caplog, has_launcher=True).note(*told) == []
    town.install(A, B)
    assert town.note(*told) == []

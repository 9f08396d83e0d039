"""Members that are removed for what they sent: at once, by all, with one reason."""

from __future__ import annotations

import pytest

from potluck.core.cluster_config import ClusterConfig
from potluck.core.cluster_effects import Abort, Disconnect, Installed, Send
from potluck.core.cluster_messages import Cause, CauseCode, Commit, Lost, Proposal
from potluck.vocabulary import NodeId, ProcessId
from support.cluster_net import ClusterNet

WHY = "Rank 2 sent its report in a form that is not valid: a step of -1"


def causes(net: ClusterNet, process: ProcessId) -> tuple[Cause, ...]:
    """Why members are not in the last view of a process, from the commit that it has."""
    commits = [e.commits for _, who, e in net.effects if who == process and type(e) is Installed]
    return commits[-1][0].proposal.causes


def expel(net: ClusterNet, accuser: ProcessId, process: ProcessId) -> None:
    """One member has seen what another one sent."""
    net.do(accuser, net.cores[accuser].expel(process, WHY, net.now))


@pytest.mark.parametrize("accuser", [0, 1, 3])
@pytest.mark.parametrize("culprit", [0, 2])
def test_one_member_that_saw_it_is_enough(accuser: int, culprit: int) -> None:
    """All others remove it, also if it is the leader, and all get the same reason."""
    if accuser == culprit:
        return
    net = ClusterNet()
    members = net.form("abcd")
    expel(net, members[accuser], members[culprit])
    net.run(6.0)
    others = [each for each in members if each is not members[culprit]]
    assert net.agreed_by(others) == "abcd".replace("abcd"[culprit], "")
    for each in others:
        (cause,) = causes(net, each)
        assert (cause.who, cause.code, cause.reason) == (
            members[culprit],
            CauseCode.MISBEHAVED,
            WHY,
        )
        assert any(
            who == each and isinstance(e, Disconnect) and e.peer == members[culprit]
            for _, who, e in net.effects
        )


def test_it_does_not_come_back_before_it_starts_again() -> None:
    """Whatever it tries; a later start of it is another process."""
    net = ClusterNet()
    members = net.form("abc")
    expel(net, members[0], members[2])
    for _ in range(10):
        net.run(1.0)
        net.mesh()
    assert net.agreed_by(members[:2]) == "ab"
    net.kill(members[2])
    net.add("c", 2)
    net.mesh()
    net.run(20.0)
    assert net.agreed() == "abc"


def test_the_second_of_two_continues_as_a_child() -> None:
    """It has no quorum of the view, and the first may be at work: so its lineage is another."""
    net = ClusterNet()
    first, second = net.form("ab")
    before = net.view_of(second)
    expel(net, second, first)
    net.run(30.0)
    assert net.agreed_by([second]) == "b"
    after = net.view_of(second)
    assert after.lineage != before.lineage
    assert [lineage for lineage, _ in after.ancestry] == [before.lineage]
    (cause,) = causes(net, second)
    assert (cause.who, cause.code, cause.reason) == (first, CauseCode.MISBEHAVED, WHY)


def test_one_member_cannot_have_all_others_removed() -> None:
    """Its word counts for fewer than half of the view, and not against the one it was about."""
    net = ClusterNet()
    members = net.form("abcde")
    liar = members[0]
    view = net.view_of(liar)
    for to in members[1:]:
        for who in members[1:]:
            message = Lost(view.lineage, view.epoch, who, "a lie", is_expelled=True)
            net.do(to, net.cores[to].receive(liar, message, net.now))
    net.run(5.0)
    removed = {e.peer for _, who, e in net.effects if isinstance(e, Disconnect) and who != liar}
    assert removed == set(members[1:3])


def test_what_a_removed_member_says_of_others_does_not_count() -> None:
    """It accuses the one that removed it, and is not believed."""
    net = ClusterNet()
    members = net.form("abc")
    view = net.view_of(members[0])
    expel(net, members[0], members[2])
    lie = Lost(view.lineage, view.epoch, members[0], "a lie", is_expelled=True)
    net.run(0.01)
    net.do(members[1], net.cores[members[1]].receive(members[2], lie, net.now))
    net.run(6.0)
    assert net.agreed_by(members[:2]) == "ab"


def test_a_stranger_that_is_removed_is_cut_off_and_is_not_let_in() -> None:
    """It is in no view of ours: no member is told, and no operation stops."""
    net = ClusterNet()
    a, _ = net.form("ab", config=ClusterConfig(min_nodes=2))
    stranger = net.add("c", config=ClusterConfig(min_nodes=9))
    net.link(a, stranger)
    net.run(0.05)
    view = net.view_of(a)
    effects = net.cores[a].expel(stranger, WHY, net.now)
    assert [e.peer for e in effects if isinstance(e, Disconnect)] == [stranger]
    assert not [e for e in effects if isinstance(e, Abort)]
    assert not [e for e in effects if isinstance(e, Send) and isinstance(e.message, Lost)]
    net.do(a, effects)
    net.mesh()
    net.run(5.0)
    assert net.view_of(a) == view
    assert net.cores[a].expel(stranger, WHY, net.now) == []  # once is enough


def test_only_so_many_removed_processes_are_remembered() -> None:
    """The first of 257 is forgotten, and can be removed again; the others stay out."""
    net = ClusterNet()
    core = net.cores[net.form("a")[0]]
    strangers = [ProcessId(NodeId("e" * 32), number) for number in range(257)]
    for stranger in strangers:
        assert Disconnect in {type(e) for e in core.expel(stranger, WHY, net.now)}
    assert core.expel(strangers[1], WHY, net.now) == []
    assert Disconnect in {type(e) for e in core.expel(strangers[0], WHY, net.now)}


def test_a_process_that_waits_removes_a_member_of_the_view_it_waits_for() -> None:
    """It has no operations to stop, and no members to tell; it does not wait for that one."""
    net = ClusterNet()
    a, b, c, d = net.form("abcd")
    net.cut_off([b], [a, c, d])
    net.run(3)
    net.heal()
    net.dropped = lambda *_: True
    commit = net.cores[a].bound
    assert commit is not None
    net.do(b, net.cores[b].receive(a, commit, net.now))
    assert net.cores[b].view is None
    effects = net.cores[b].expel(a, WHY, net.now)
    assert [e.peer for e in effects if isinstance(e, Disconnect)] == [a]
    assert not [e for e in effects if isinstance(e, Abort)]
    net.run(3)
    assert "a (aaaaaaaa/1)" not in net.cores[b].reason
    assert "c (cccccccc/1)" in net.cores[b].reason


def test_a_view_with_a_removed_process_is_left_with_the_reason() -> None:
    """Those who agreed on it had not heard: the member stops operations and tells them."""
    net = ClusterNet()
    a, b = net.form("ab", config=ClusterConfig(min_nodes=2))
    late = net.add("c", config=ClusterConfig(min_nodes=9))
    net.mesh()
    net.dropped = lambda *_: True
    net.do(b, net.cores[b].expel(late, WHY, net.now))
    view = net.view_of(b)
    next_view = Commit(view.lineage, view.epoch + 1, Proposal((a, b, late)))
    effects = net.cores[b].receive(a, next_view, net.now)
    assert net.view_of(b).members == (a, b, late)
    (abort,) = [e for e in effects if isinstance(e, Abort)]
    assert abort.lost == late
    told = [e for e in effects if isinstance(e, Send) and isinstance(e.message, Lost)]
    assert [(e.to, e.message) for e in told] == [
        (a, Lost(view.lineage, view.epoch + 1, late, WHY, is_expelled=True))
    ]

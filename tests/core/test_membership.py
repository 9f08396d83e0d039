"""Whom a leader proposes: who stays, in which order, who comes in, and when it waits."""

from __future__ import annotations

import msgspec

from potluck.core.cluster_cards import mark
from potluck.core.cluster_messages import Heartbeat
from potluck.vocabulary import ProcessId
from support.cluster_net import ClusterNet


def last_beat(net: ClusterNet, me: ProcessId, of: ProcessId) -> Heartbeat:
    """The newest heartbeat of one process at another."""
    beat = net.cores[me]._situation.contacts.of(of).beat
    assert beat is not None
    return beat


def test_nothing_is_proposed_while_nothing_changes() -> None:
    """A healthy view stays as it is."""
    net = ClusterNet()
    a, _ = net.form("ab")
    planner = net.cores[a]._planner
    assert planner.plan(net.view_of(a), must_change=False) is None
    assert planner.next_look is None


def test_a_fresh_start_keeps_members_and_order() -> None:
    """What was aborted goes on with the same members in a new epoch."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    plan = net.cores[a]._planner.plan(net.view_of(a), must_change=True)
    assert plan is not None
    assert plan.members == (a, b, c)
    assert plan.reason == "a fresh start with the same members"


def test_after_a_loss_nobody_is_counted_on_who_was_not_heard_since() -> None:
    """It may stand still: what is proposed now would wait for it, and nothing else could be."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    core, succession = net.cores[a], net.cores[a]._succession
    core.disconnected(c, "it crashed", net.now)
    core.refused(c, net.now)
    core.tick(net.now + 0.1)
    assert c in core._situation.proofs
    assert not succession.is_busy
    beat = msgspec.structs.replace(last_beat(net, a, b), sequence=1000, aborted=True)
    core.receive(b, beat, net.now + 0.15)
    assert succession.is_busy


def test_a_newcomer_waits_while_a_member_is_late() -> None:
    """By less than makes it suspect: it is heard again in a moment, or missed."""
    net = ClusterNet()
    a, b = net.form("ab")
    planner, situation = net.cores[a]._planner, net.cores[a]._situation
    silence = situation.health.silence(b, situation.now)
    assert planner._is_fresh(b)
    situation.now += 2 * situation.interval - silence
    assert not planner._is_fresh(b)
    assert situation.contacts.is_heard(b)


def test_newcomers_follow_in_the_order_of_their_ids() -> None:
    """Several that are ready come in together, whoever came first."""
    net = ClusterNet()
    net.form("b")
    net.run(1)
    for letter in "dca":
        net.add(letter)
    net.mesh()
    net.run(0.5)
    assert net.agreed() == "bacd"
    assert {view.epoch for views in net.views().values() for view in views} == {1, 2}


def test_a_newcomer_that_not_all_hear_waits_and_people_know_whom_it_lacks() -> None:
    """Until the missing link is there."""
    net = ClusterNet()
    a, b = net.form("ab")
    c = net.add("c")
    net.cut_off([b], [c])
    net.mesh()
    net.run(1)
    assert net.view_of(a).members == (a, b)
    assert "c (cccccccc/1) cannot come in yet: it and b (bbbbbbbb/1)" in net.told(a)
    net.heal()
    net.run(0.5)
    assert net.agreed() == "abc"


def test_a_short_gap_between_two_members_is_waited_for() -> None:
    """Nobody is excluded for a link that is missing for less than the pause."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    net.cut_off([b], [c])
    net.sever(b, c)
    net.run(0.5)
    assert net.view_of(a).epoch == 1
    assert "until all members hear each other again" in net.told(a)
    net.heal()
    net.run(0.5)
    assert net.agreed() == "abc"
    assert net.view_of(a).epoch == 2


def test_a_leader_does_not_propose_a_stranger_s_view() -> None:
    """One other member that does not hear us is no cluster without us."""
    net = ClusterNet()
    a, b = net.form("ab")
    core = net.cores[b]
    situation = core._situation
    for step in range(1, 16):
        now = net.now + 0.1 * step
        core.tick(now)
        contact = situation.contacts.of(a)
        deaf = msgspec.structs.replace(
            last_beat(net, b, a),
            sequence=contact.newest + 1,
            echo=situation.contacts.sequence,
            hears=(),
        )
        core.receive(a, deaf, now)
        assert core._planner.plan(net.view_of(b), must_change=True) is None
    assert mark(b) not in situation.contacts.of(a).hears

"""Calm under load: the pace of views, leases of announced length, batches, and bounded messages."""

from __future__ import annotations

import string

import msgspec
import pytest

from potluck.core.cluster import ClusterConfig
from potluck.core.cluster_effects import Probe, Send
from potluck.core.cluster_events import ClusterState
from potluck.core.cluster_messages import Heartbeat, Lost, Proposal
from potluck.core.health_config import HealthConfig
from potluck.core.pace import LENGTHENED, pace
from potluck.vocabulary import ProcessId
from support.cluster_net import ClusterNet

CROWD = string.ascii_lowercase[:16]


def lost_told(net: ClusterNet, sender: ProcessId, since: float) -> list[ProcessId]:
    """Whom a process told of a loss since a moment, in order."""
    return [
        effect.to
        for at, who, effect in net.effects
        if at >= since and who == sender and isinstance(effect, Send)
        if isinstance(effect.message, Lost)
    ]


def test_the_view_fixes_interval_and_pause_for_all() -> None:
    """They follow from its size, and everybody computes with the same numbers."""
    net = ClusterNet()
    members = net.form(CROWD)
    net.run(8)
    assert net.agreed() == CROWD
    wanted = pace(16, HealthConfig.wired())
    for process in members:
        s = net.cores[process]._situation
        assert (s.interval, s.pause_after) == wanted
        assert s.health.config.pause_after == wanted[1]


def test_one_member_on_wifi_makes_the_view_patient() -> None:
    """The proposer takes the longest pause that a member's card asks for."""
    net = ClusterNet()
    net.form("ab")
    wifi = ClusterConfig(health=HealthConfig.wifi())
    net.add("c", config=wifi, pause_after=4.0)
    net.mesh()
    net.run(3)
    assert net.agreed() == "abc"
    assert {core._situation.pause_after for core in net.cores.values()} == {4.0}


def test_without_a_view_the_pace_follows_the_processes_around() -> None:
    """Those that wait for others do not beat faster than the group they wait for would."""
    net = ClusterNet()
    config = ClusterConfig(min_nodes=34)
    a, b = net.add("a", config=config), net.add("b", config=config)
    net.mesh()
    net.run(2)
    for process in (a, b):
        assert net.cores[process]._situation.interval == pytest.approx(1.0)


def test_a_proposal_without_a_pace_means_the_preset() -> None:
    """So an earlier proposal still has a meaning."""
    net = ClusterNet()
    (a,) = net.form("a")
    s = net.cores[a]._situation
    s.keep_pace(Proposal((a,)))
    assert (s.interval, s.pause_after) == (0.2, 1.0)


def test_a_lease_lasts_as_long_as_the_confirmed_beat_announced() -> None:
    """Whoever ran late announces a longer pause; it holds only once it is confirmed."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    s = net.cores[a]._situation
    contact = s.contacts.of(b)
    assert contact.leased_for == 1.0
    s.health._clock.lateness = 1.0
    s.beat()
    assert contact.leased_for == 1.0  # nobody has answered yet
    s.clock.advance(contact.leased_at + 1.5)
    assert not s.has_lease(contact)
    s.clock.advance(net.now)
    core = net.cores[a]
    heard = contact.beat
    assert heard is not None
    echo = msgspec.structs.replace(heard, sequence=10**6, echo=s.contacts.sequence)
    core.receive(b, echo, net.now)
    assert 1.0 < contact.leased_for <= LENGTHENED
    assert s.contacts.of(c).leased_for == 1.0  # it has not heard of it


def test_others_wait_for_twice_the_pause_of_every_beat_that_they_confirmed() -> None:
    """A longer pause counts as long as its beat may be relied on, and no longer."""
    net = ClusterNet()
    a, b = net.form("ab")
    core = net.cores[a]
    s, contact = core._situation, core._situation.contacts.of(b)
    beat = contact.beat
    assert beat is not None
    for number, pause in enumerate((3.0, 1.0)):
        said = msgspec.structs.replace(beat, sequence=10**6 + number, pause_after=pause)
        core.receive(b, said, net.now)
        s.beat()
    assert s.pause_of(contact) == 1.0
    assert contact.relied_until == pytest.approx(s.time + 6)
    net.cut_off([a], [b])
    net.now += 5
    core.tick(net.now)
    assert not s.is_silent(b)


def test_a_member_that_reports_lateness_is_doubted_later() -> None:
    """Busy is not lost."""
    net = ClusterNet()
    a, b = net.form("ab")
    core = net.cores[a]
    s, contact = core._situation, core._situation.contacts.of(b)
    beat = contact.beat
    assert beat is not None
    core.receive(b, msgspec.structs.replace(beat, sequence=10**6, lateness=1.0), net.now)
    s.clock.advance(contact.echoed_at + 1.5)
    assert not s.is_doubtful(b)
    assert s.lateness == 1.0
    s.clock.advance(contact.echoed_at + 2.5)
    assert s.is_doubtful(b)


def test_a_loss_is_told_to_the_leader_and_the_next_two() -> None:
    """Not by everybody to everybody."""
    net = ClusterNet()
    members = net.form("abcdef")
    since = net.now
    net.kill(members[5])
    net.run(0.5)
    assert net.agreed() == "abcde"
    assert set(lost_told(net, members[4], since)) == set(members[:3])
    assert set(lost_told(net, members[0], since)) == set(members[1:4])


def test_the_loss_of_all_who_are_told_reaches_the_successor() -> None:
    """The leader and the next three die at once: the fifth leads."""
    net = ClusterNet()
    members = net.form("abcdefghi")
    net.run(2)
    for victim in members[:4]:
        net.kill(victim)
    net.run(3)
    assert net.agreed() == "efghi"


def test_what_is_told_in_a_batch_is_decided_once() -> None:
    """And what a decision would have accused is heard first."""
    net = ClusterNet()
    a, b = net.form("ab")
    core = net.cores[b]
    beat = core._situation.contacts.of(a).beat
    assert beat is not None
    late = net.now + 1.3
    core.begin_batch()
    core.tick(late)
    assert core.state is ClusterState.ACTIVE
    echo = core._situation.contacts.sequence
    core.receive(a, msgspec.structs.replace(beat, sequence=10**6, echo=echo), late)
    core.end_batch(late)
    assert core.state.value == "active"
    core.begin_batch()
    core.tick(late + 9)
    core.end_batch(late + 9)
    assert core.state.value == "paused"


def test_a_count_of_samples_is_no_reason_to_decide() -> None:
    """It changes with every step."""
    net = ClusterNet()
    a, b = net.form("ab")
    core = net.cores[a]
    s, beat = core._situation, core._situation.contacts.of(b).beat
    assert beat is not None
    decided: list[bool] = []
    core._decide = lambda: decided.append(True)  # type: ignore[method-assign]
    core.receive(b, msgspec.structs.replace(beat, sequence=10**6, samples=99), net.now)
    assert not decided
    s.is_dirty = False
    elsewhere = msgspec.structs.replace(
        beat, sequence=10**6 + 1, samples=99, lineage="e" * 32, size=0
    )
    core.receive(b, elsewhere, net.now)
    assert decided
    decided.clear()
    s.is_dirty = False
    core.receive(b, msgspec.structs.replace(elsewhere, sequence=10**6 + 2, samples=100), net.now)
    assert decided


def test_beats_out_of_turn_are_bounded() -> None:
    """However much happens."""
    net = ClusterNet()
    a, _ = net.form("ab")
    net.run(10)
    core, sent = net.cores[a], 0
    for step in range(1000):
        now = net.now + step / 100
        core._situation.beat_soon()
        effects = core.tick(now)
        sent += any(isinstance(e, Send) and isinstance(e.message, Heartbeat) for e in effects)
    assert sent <= 10 + 4 * 10 + 10 / 0.2 + 1


def test_views_that_repeat_come_ever_more_slowly() -> None:
    """But a death is not waited for."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    planner, s = net.cores[a]._planner, net.cores[a]._situation
    planner._in_a_row, planner._begun_at = 6, s.time
    assert planner.plan(net.view_of(a), must_change=True) is None
    assert planner.next_look == pytest.approx(s.time + 4 * s.pause_after)
    planner._begun_at = s.time - 4.1
    assert planner.plan(net.view_of(a), must_change=True) is not None
    planner._begun_at = s.time
    s.proofs[c] = "it is dead"
    plan = planner.plan(net.view_of(a), must_change=True)
    assert plan is not None
    assert plan.members == (a, b)


def test_a_newcomer_waits_for_the_turn_of_the_next_view() -> None:
    """It comes in when the time has come, without another cause."""
    net = ClusterNet()
    net.form("a")
    for letter in "bcd":
        net.add(letter)
        net.mesh()
        net.run(0.4)
    net.run(3)
    assert net.agreed() == "abcd"


def test_only_members_that_lead_plan() -> None:
    """The others do not search the mesh."""
    net = ClusterNet()
    members = net.form("abc")
    for process in members[1:]:
        planner = net.cores[process]._planner
        planner.plan = lambda *_, **__: pytest.fail("it plans")  # type: ignore[method-assign]
    net.kill(members[2])
    net.run(0.5)
    assert net.cores[members[0]].view == net.cores[members[1]].view


def test_failed_campaigns_follow_ever_more_slowly() -> None:
    """A member that finds no quorum does not ask all the time."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    election = net.cores[b]._situation.election
    first = election._timeout
    election._attempts = 7
    assert election._timeout == 4 * first
    election.slack = 1.0
    assert election._timeout == pytest.approx(4 * (first + 1.0))
    assert a != c


def test_nothing_is_probed_twice_for_one_loss() -> None:
    """A probe that is refused proves the death, and that is that."""
    net = ClusterNet()
    a, _, c = net.form("abc")
    since = net.now
    net.kill(c)
    net.run(1)
    probes = [e for at, who, e in net.effects if at >= since and who == a and isinstance(e, Probe)]
    assert len(probes) == 1

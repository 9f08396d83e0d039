"""A process belongs to its lineage: what it may enter, what it refuses, and how it is freed."""

from __future__ import annotations

import string
from collections import Counter
from itertools import pairwise

import msgspec
import pytest

from potluck._types import Branch, NodeId, ProcessId, View
from potluck.membership import core as membership_core
from potluck.membership import state
from potluck.membership.core import ClusterCore
from potluck.membership.events import (
    Abort,
    ClusterConfig,
    ClusterState,
    ConnectTo,
    Disconnect,
    Effect,
    ElectionEvent,
    ElectionKind,
    Note,
    ProbePort,
    SendMessage,
)
from potluck.membership.health import LENGTHENED, HealthConfig, pace
from potluck.membership.messages import (
    MAX_BRANCHES,
    MAX_CONTACTS,
    Cause,
    CauseCode,
    Charter,
    Commit,
    Departed,
    Found,
    Founded,
    Heartbeat,
    KnownProcesses,
    Lost,
    Phase,
    PreVote,
    ProcessInfo,
    ProcessRole,
    Proposal,
    Propose,
    mark,
)
from support.cluster_net import ClusterNet, card

OTHER = "0" * 32


def excluded(*, told: bool = True) -> tuple[ClusterNet, list[ProcessId]]:
    """Three of four have excluded the second; it has learned that, and is cut off again."""
    net = ClusterNet()
    a, b, c, d = net.form("abcd", config=ClusterConfig(min_nodes=4))
    net.cut_off([b], [a, c, d])
    net.run(3)
    assert net.view_of(a).members == (a, c, d)
    if told:
        net.heal()
        net.run(0.1)
        assert net.cores[b].view is None
        net.cut_off([b], [a, c, d])
        for other in (a, c, d):
            net.sever(b, other)
    return net, [a, b, c, d]


def test_an_excluded_process_never_begins_alone() -> None:
    """Cut off, told of its exclusion in a short reconnection, cut off again for long."""
    net, (a, b, c, d) = excluded()
    net.run(60)
    core = net.cores[b]
    assert core.state is ClusterState.JOINING
    assert core.bound is not None
    assert core.bound.view == net.view_of(a)
    assert core.reason.startswith("waiting for a, c, d: they were in view ")
    assert "To continue without them: potluck continue" in core.reason
    assert [each.who for each in core.missing(net.now)] == [a, c, d]
    assert min(each.silent_for for each in core.missing(net.now)) > 50
    net.heal()
    net.run(12)
    assert net.agreed() == "acdb"
    assert net.cores[b].missing(net.now) == ()


def test_a_member_that_missed_a_view_has_not_been_there_from_the_beginning() -> None:
    """Those who stayed have; they also have when they begin a child together."""
    net, (a, b, c, d) = excluded()
    assert [net.cores[who].is_constant for who in (a, b, c, d)] == [True, False, True, True]
    net.heal()
    net.run(12)
    assert sorted(net.agreed()) == list("abcd")
    assert [net.cores[who].is_constant for who in (a, b, c, d)] == [True, False, True, True]
    net.cut_off([a], [b, c, d])
    net.cut_off([b], [c, d])
    net.cut_off([c], [d])
    net.run(3)
    for who in (b, c):
        net.do(who, net.cores[who].continue_without_missing(net.now))
    net.run(3)
    assert [net.agreed_by([who]) for who in (b, c)] == ["b", "c"]
    assert [net.cores[who].is_constant for who in (b, c)] == [False, True]


def test_it_probes_those_it_waits_for() -> None:
    """It keeps their cards, so it can learn that they have ended."""
    net, (a, b, c, d) = excluded()
    net.run(5)
    probed = {e.peer for when, who, e in net.effects if who == b and isinstance(e, ProbePort)}
    assert probed >= {a, c, d}
    last = net.view_of(a)
    for other in (a, c, d):
        net.kill(other)
    net.cut.clear()
    net.run(8)
    view = net.view_of(b)
    assert view.members == (b,)
    assert view.ancestry == (Branch(last.lineage, last.epoch),)
    bound = net.cores[b].bound
    assert bound is not None
    assert [cause.who for cause in bound.proposal.causes] == [a, c, d]
    for cause in bound.proposal.causes:
        assert cause.code is CauseCode.ENDED
        assert cause.reason.startswith("its process has ended (")
        assert "refuse" in cause.reason


def test_a_bound_process_refuses_other_foundings_and_views() -> None:
    """The founder may not know better: each process checks for itself."""
    net, (a, b, _, _) = excluded()
    net.run(5)
    core = net.cores[b]
    z = card("z")
    core.connected(z, net.now)
    proposal = Proposal((z.process, b))
    for charter in (Charter(), Charter(ancestry=(Branch("e" * 32, 9),))):
        effects = core.receive(z.process, Found(OTHER, proposal, charter), net.now)
        answers = [e.message for e in effects if isinstance(e, SendMessage)]
        assert not any(isinstance(m, Founded) and m.is_agreed for m in answers)
        effects = core.receive(z.process, Commit(OTHER, 1, proposal, charter), net.now)
        assert core.view is None
        assert any(isinstance(e.message, Departed) for e in effects if isinstance(e, SendMessage))
    assert core.bound is not None
    assert core.bound.lineage == net.view_of(a).lineage


def test_it_can_be_let_in_while_it_hears_a_member_at_work() -> None:
    """Then it waits for that; without one it misses those of the last view."""
    net, (a, b, _, d) = excluded()
    net.run(5)
    assert not net.cores[b].can_be_let_in
    net.heal()
    net.cut_off([b], [a])
    net.link(b, d)
    net.run(3)
    assert net.cores[b].view is None
    assert net.cores[b].can_be_let_in


def test_free_processes_do_not_count_it() -> None:
    """Two that are free, and a bound one: the two do not make three."""
    net, (a, b, c, d) = excluded()
    free = [net.add(letter, config=ClusterConfig(min_nodes=2)) for letter in "yz"]
    net.cut_off(free, [a, c, d])
    net.mesh()
    net.run(10)
    y = card("y").process
    assert net.cores[y].view is None  # it waits for the bound one, which it hears
    assert "cannot continue yet" in net.cores[y].reason
    assert net.cores[b].view is None


def test_a_person_may_free_it() -> None:
    """Then it continues as a child, which loses against the lineage itself."""
    net, (a, b, c, d) = excluded()
    net.run(5)
    net.cores[b].samples = 1000
    net.do(b, net.cores[b].continue_without_missing(net.now))
    net.run(2)
    assert net.agreed_by([b]) == "b"
    assert net.view_of(b).ancestry == (Branch(net.view_of(a).lineage, net.view_of(a).epoch),)
    before = net.view_of(a).lineage
    net.heal()
    net.run(6)
    assert sorted(net.agreed()) == list("abcd")
    assert {net.view_of(who).lineage for who in (a, b, c, d)} == {before}


@pytest.mark.parametrize("told", ["b", "d", "e", "bde"])
def test_a_person_may_tell_any_of_those_who_wait(told: str) -> None:
    """All who wait together continue, whichever of them was told; it need not come first."""
    net = ClusterNet()
    a, b, c, d, e, f = net.form("abcdef")
    net.cut_off([a, c, f], [b, d, e])
    net.run(5)
    assert {net.cores[who].state for who in (b, d, e)} == {ClusterState.PAUSED}
    for letter in told:
        who = card(letter).process
        net.do(who, net.cores[who].continue_without_missing(net.now))
    net.run(4)
    assert net.agreed_by([b, d, e]) == "bde"


def test_whoever_was_told_begins_in_its_turn_and_not_before() -> None:
    """Those that come before it may have been told too: each of them has its time to begin."""
    net = ClusterNet()
    a, b, c, d, e, f = net.form("abcdef")
    net.cut_off([a, c, f], [b, d, e])
    net.run(5)
    told = net.now
    net.do(e, net.cores[e].continue_without_missing(told))
    net.run(3)
    begun = [
        time
        for time, who, effect in net.effects
        if isinstance(effect, SendMessage) and isinstance(effect.message, Found)
        if who == e and time >= told
    ]
    timeout = net.cores[e].config.election.election_timeout
    assert min(begun) - told == pytest.approx(2 * 2 * timeout, abs=0.01)


def test_what_a_person_asks_for_is_done_at_once() -> None:
    """One that waits alone continues in the same call, not with the next beat."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    net.cut_off([c], [a, b])
    net.run(10)
    core = net.cores[c]
    states = [core.state]
    core.continue_without_missing(net.now)
    states.append(core.state)
    assert states == [ClusterState.PAUSED, ClusterState.ACTIVE]
    assert net.view_of(c).members == (c,)


def test_a_person_who_asks_again_and_again_waits_no_longer() -> None:
    """The turn of a process that does not come first counts from the first request."""
    net = ClusterNet()
    a, b, c, d, e, f = net.form("abcdef")
    net.cut_off([a, c, f], [b, d, e])
    net.run(5)
    for _ in range(20):
        net.do(e, net.cores[e].continue_without_missing(net.now))
        net.run(0.2)
    assert net.agreed_by([b, d, e]) == "bde"


def test_what_a_person_said_ends_when_those_who_were_missing_are_back() -> None:
    """The next time that they are missing the process waits again."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    core, view = net.cores[c], net.view_of(c)
    core._state.state = ClusterState.PAUSED
    core.continue_without_missing(net.now)
    net.run(1)
    assert (core.state, core.view) == (ClusterState.ACTIVE, view)
    net.cut_off([c], [a, b])
    net.run(10)
    assert (core.state, core.view) == (ClusterState.PAUSED, view)


def test_a_person_changes_nothing_while_it_works() -> None:
    """An active process has nothing to be freed from."""
    net = ClusterNet()
    a, _ = net.form("ab")
    view = net.view_of(a)
    net.do(a, net.cores[a].continue_without_missing(net.now))
    net.run(5)
    assert net.view_of(a) == view


def test_a_person_changes_nothing_for_a_process_that_belongs_nowhere() -> None:
    """It misses nobody: it waits until enough are here, as before."""
    net = ClusterNet()
    (a,) = net.form("a", config=ClusterConfig(min_nodes=2))
    net.do(a, net.cores[a].continue_without_missing(net.now))
    net.run(5)
    assert net.cores[a].state is ClusterState.JOINING
    b = net.add("b", config=ClusterConfig(min_nodes=2))
    net.mesh()
    net.run(2)
    assert net.agreed_by([a, b]) == "ab"
    assert not net.cores[a].is_insisting


def test_those_left_continue_together_and_others_follow() -> None:
    """A member that was away follows into the child that the others began."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    net.cut_off([c], [a, b])
    net.run(3)
    assert net.view_of(a).members == (a, b)
    net.cut_off([a], [b])
    net.run(3)
    net.kill(a)  # the second learns it only later, so it is no proof
    net.cut -= {(a, b), (b, a)}
    net.run(6)
    assert net.agreed_by([b]) == "b"
    child = net.view_of(b)
    assert child.ancestry
    net.heal()
    net.run(6)
    assert net.agreed() == "bc"
    assert net.view_of(c).lineage == child.lineage


def left_for_a_child() -> tuple[ClusterNet, list[ProcessId]]:
    """Three that are apart; the first one continues alone, because a person said so."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    for one, other in ((a, b), (a, c), (b, c)):
        net.cut_off([one], [other])
        net.sever(one, other)
    net.run(3)
    net.do(a, net.cores[a].continue_without_missing(net.now))
    net.run(2)
    assert net.agreed_by([a]) == "a"
    return net, [a, b, c]


def test_a_member_is_no_quorum_because_all_others_went_to_a_child() -> None:
    """One of them lets it in; until then it waits, though each has said its last word."""
    net, (a, b, c) = left_for_a_child()
    view = net.view_of(c)
    word = Departed(view.lineage, view.epoch, 0, -1, None, "it went on", is_followed=True)
    for other in (a, b):
        net.do(c, net.cores[c].connected(net.cores[other].me, net.now))
        net.do(c, net.cores[c].receive(other, word, net.now))
    assert net.cores[c].state is ClusterState.PAUSED
    assert net.cores[c]._state.elsewhere == {a, b}
    net.cores[c].receive(a, msgspec.structs.replace(word, is_followed=False), net.now)
    net.cores[c].receive(b, msgspec.structs.replace(word, is_followed=False), net.now)
    assert net.cores[c].state is ClusterState.ACTIVE


def test_a_process_that_left_a_view_for_a_child_gives_no_lease_to_those_in_it() -> None:
    """It would keep them at work in a view that it does not come back to."""
    net, (a, b, c) = left_for_a_child()
    net.cut -= {(a, b), (b, a), (b, c), (c, b)}
    net.link(a, b)
    net.run(0.01)
    assert net.cores[b].view is None  # it waits to be let in
    net.effects.clear()
    net.link(b, c)
    net.run(0.01)
    beats = [
        effect.message
        for _, sender, effect in net.effects
        if sender == b
        and isinstance(effect, SendMessage)
        and effect.to == c
        and isinstance(effect.message, Heartbeat)
    ]
    assert beats[-1].withholds
    net.heal()
    net.run(6)
    assert net.agreed() == "abc"


def test_what_one_knows_of_the_dead_all_who_wait_learn() -> None:
    """Two wait; each knows the end of another member: together they can continue."""
    net = ClusterNet()
    a, b, c, d, e = net.form("abcde")
    net.cut_off([d, e], [a, b, c])
    for one in (d, e):
        for other in (a, b, c):
            net.sever(one, other)
    net.run(3)
    net.dead |= {a, b, c}
    net.cut.clear()
    net.cut_off([d], [b, c])
    net.cut_off([e], [a])
    net.run(10)
    assert net.agreed_by([d, e]) == "de"
    assert net.view_of(d).ancestry


def test_another_quorum_setting_is_refused_with_the_reason() -> None:
    """Both sides say which setting differs."""
    net = ClusterNet()
    a, _ = net.form("ab")
    z = net.add("z", config=ClusterConfig(quorum="any"))
    net.mesh()
    net.run(5)
    assert net.view_of(a).members == (a, card("b").process)
    assert net.cores[z].view is None
    words = "quorum='any', a with quorum='majority'"
    assert words in net.cores[z].reason
    assert "all processes of a job need the same setting" in net.told(a)


def hears_stranger(net: ClusterNet, process: ProcessId) -> ProcessId:
    """Connect a process with a stranger that hears it."""
    z = card("z")
    net.cores[process].connected(z, net.now)
    beat = Heartbeat(1, 1, 0.0, Phase.JOINING, (mark(process),))
    net.cores[process].receive(z.process, beat, net.now)
    return z.process


def answer_to(
    net: ClusterNet, process: ProcessId, sender: ProcessId, message: Found
) -> list[object]:
    """What a process answers to a founding: whether it agrees, and views that it tells of."""
    sent = [
        e
        for e in net.cores[process].receive(sender, message, net.now)
        if isinstance(e, SendMessage)
    ]
    return [e.message for e in sent if e.to == sender and isinstance(e.message, Founded | Commit)]


def test_a_bound_process_checks_every_rule_of_a_founding() -> None:
    """The same lineage, the newest view, nobody unaccounted for; a person may say otherwise."""
    net, (_, b, _, _) = excluded()
    net.run(5)
    z = hears_stranger(net, b)
    bound = net.cores[b].bound
    assert bound is not None

    def ask(lineage: str, epoch: int, *, is_forced: bool = False) -> list[object]:
        charter = Charter(ancestry=(Branch(lineage, epoch),))
        return answer_to(net, b, z, Found(OTHER, Proposal((z, b)), charter, is_forced))

    assert ask("e" * 32, bound.epoch) == [Founded(OTHER, False, "it belongs to another lineage")]
    old = Founded(OTHER, False, f"the newest view it knows is {bound.epoch}")
    assert ask(bound.lineage, bound.epoch - 1) == [bound, old]  # the founder learns what is newer
    assert ask(bound.lineage, bound.epoch + 1) == [old]
    (refused,) = ask(bound.lineage, bound.epoch)
    assert isinstance(refused, Founded)
    assert not refused.is_agreed
    assert refused.reason.startswith("it does not know whether a")
    assert ask(bound.lineage, bound.epoch, is_forced=True) == [Founded(OTHER, True, "")]


def test_a_process_at_work_or_with_a_quorum_founds_no_child() -> None:
    """Its view decides, and nothing may begin beside it."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    view = net.view_of(c)
    charter = Charter(ancestry=(Branch(view.lineage, view.epoch),))
    child = Found(OTHER, Proposal((a, b, c)), charter)
    why = "it is active, or was a moment ago"
    assert answer_to(net, c, a, child) == [Founded(OTHER, False, why)]
    leave_out = Propose(view.lineage, view.epoch, 0, Proposal((a, b), "without c"))
    net.cores[c].receive(a, leave_out, net.now)
    assert net.cores[c].state is ClusterState.PAUSED
    why = "the view it is in has a quorum"
    assert answer_to(net, c, a, child) == [Founded(OTHER, False, why)]


def test_the_origin_of_a_checkpoint_is_kept_within_bounds() -> None:
    """Of a long one the newest branches."""
    net = ClusterNet()
    (a,) = net.form("a")
    core = net.cores[a]
    core.origin = tuple(Branch(f"{number:032}", number) for number in range(40))
    assert [branch.epoch for branch in core.origin] == list(range(40 - MAX_BRANCHES, 40))


def test_a_last_word_in_its_lineage_frees_it_from_its_sender_and_no_other_word_does() -> None:
    """A process that works in another lineage is not to be waited for in this one."""
    net, (a, b, c, d) = excluded()
    net.run(5)
    core = net.cores[b]
    assert core.bound is not None
    for who in (a, c, d):
        core.connected(net.cores[who].me, net.now)

    word = Departed(core.bound.lineage, core.bound.epoch, 0, -1, None, "elsewhere")
    for other in (
        msgspec.structs.replace(word, lineage=OTHER),
        msgspec.structs.replace(word, epoch=word.epoch - 1),
    ):
        core.receive(a, other, net.now)
        assert a not in core._state.departed
    core.receive(a, word, net.now)
    assert core._state.departed == {a}


def paused() -> tuple[ClusterNet, ProcessId, View]:
    """A member that has been cut off from the two others for long; with its view."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    net.cut_off([c], [a, b])
    for other in (a, b):
        net.sever(c, other)
    net.run(5)
    assert net.cores[c].state is ClusterState.PAUSED
    return net, c, net.view_of(c)


def test_a_paused_member_leaves_for_a_child_of_its_lineage_that_is_at_work() -> None:
    """It cannot decide any more in its view, and waits for the child to let it in."""
    net, c, view = paused()
    z = hears_stranger(net, c)
    charter = Charter(ancestry=(Branch(view.lineage, view.epoch),))
    core = net.cores[c]
    facts = {"phase": Phase.ACTIVE, "epoch": 2, "size": 1, "leader": z}
    beat = Heartbeat(2, 1, 0.0, hears=(mark(c),), lineage=OTHER, **facts)  # type: ignore[arg-type]
    core.receive(z, beat, net.now)
    assert core.view == view  # it does not know where that lineage comes from
    core.receive(z, Commit(OTHER, 2, Proposal((z,)), charter), net.now)
    core.receive(z, msgspec.structs.replace(beat, sequence=3), net.now)
    assert core.view is None
    assert core.state is ClusterState.JOINING
    assert "to let us into a cluster of 1" in core.reason
    assert core.bound is not None
    assert core.bound.lineage == view.lineage


def test_nothing_is_begun_while_a_fellow_knows_a_later_view() -> None:
    """What it knows decides who has to be accounted for."""
    net, c, view = paused()
    z = hears_stranger(net, c)
    core = net.cores[c]
    facts = {"bound": view.lineage, "bound_epoch": view.epoch + 1}
    net.do(c, core.tick(net.now + 0.5))
    echo = core._state.contacts.sequence
    beat = Heartbeat(2, echo, 0.0, Phase.JOINING, (mark(c),), **facts)  # type: ignore[arg-type]
    net.now += 0.5
    core.receive(z, beat, net.now)
    assert core.reason == f"waiting to learn of a later view than {view.epoch}"
    net.do(c, core.continue_without_missing(net.now))
    net.run(0.1)
    assert core.view == view


# --------------------------------------------------------------------------------------------------
# Calm under load: the pace of views, leases of announced length, batches, and bounded messages.

CROWD = string.ascii_lowercase[:16]


def lost_told(net: ClusterNet, sender: ProcessId, since: float) -> list[ProcessId]:
    """Whom a process told of a loss since a moment, in order."""
    return [
        effect.to
        for at, who, effect in net.effects
        if at >= since and who == sender and isinstance(effect, SendMessage)
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
        s = net.cores[process]._state
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
    assert {core._state.pause_after for core in net.cores.values()} == {4.0}


def test_without_a_view_the_pace_follows_the_processes_around() -> None:
    """Those that wait for others do not beat faster than the group they wait for would."""
    net = ClusterNet()
    config = ClusterConfig(min_nodes=34)
    a, b = net.add("a", config=config), net.add("b", config=config)
    net.mesh()
    net.run(2)
    for process in (a, b):
        assert net.cores[process]._state.interval == pytest.approx(1.0)


def test_a_proposal_without_a_pace_means_the_preset() -> None:
    """So an earlier proposal still has a meaning."""
    net = ClusterNet()
    (a,) = net.form("a")
    s = net.cores[a]._state
    s.keep_pace(Proposal((a,)))
    assert (s.interval, s.pause_after) == (0.2, 1.0)


def test_a_lease_lasts_as_long_as_the_confirmed_beat_announced() -> None:
    """Whoever ran late announces a longer pause; it holds only once it is confirmed."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    s = net.cores[a]._state
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
    s, contact = core._state, core._state.contacts.of(b)
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
    s, contact = core._state, core._state.contacts.of(b)
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
    beat = core._state.contacts.of(a).beat
    assert beat is not None
    late = net.now + 1.3
    core.begin_batch()
    core.tick(late)
    assert core.state is ClusterState.ACTIVE
    echo = core._state.contacts.sequence
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
    s, beat = core._state, core._state.contacts.of(b).beat
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
        core._state.beat_soon()
        effects = core.tick(now)
        sent += any(
            isinstance(e, SendMessage) and isinstance(e.message, Heartbeat) for e in effects
        )
    assert sent <= 10 + 4 * 10 + 10 / 0.2 + 1


def test_views_that_repeat_come_ever_more_slowly() -> None:
    """But a death is not waited for."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    planner, s = net.cores[a]._planner, net.cores[a]._state
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
    election = net.cores[b]._state.election
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
    probes = [
        e for at, who, e in net.effects if at >= since and who == a and isinstance(e, ProbePort)
    ]
    assert len(probes) == 1


# --------------------------------------------------------------------------------------------------
# Who is there, who is dead, and what counts as a proof of it.


def refusal(effects: list[Effect]) -> str:
    """Why a process was sent away."""
    (reason,) = [effect.reason for effect in effects if isinstance(effect, Disconnect)]
    return reason


def sentences(effects: list[Effect]) -> str:
    """What people are told."""
    return "\n".join(str(effect.event) for effect in effects if isinstance(effect, Note))


@pytest.mark.parametrize(
    ("newcomer", "words"),
    [
        (card("a", 1), "identity of this machine"),
        (card("a", 9, machine="elsewhere"), "identity of this machine"),
        (card("b", 9, machine="elsewhere"), "shows up on another machine"),
        (card("b", 1), "started later in its place"),
    ],
)
def test_copied_keys_and_ghosts_are_refused(newcomer: ProcessInfo, words: str) -> None:
    """A clone, or a predecessor that comes late, is disconnected, and people are told."""
    core = ClusterCore(card("a"), ClusterConfig(), 0.0)
    core.connected(card("b", 5), 0.0)
    effects = core.connected(newcomer, 0.1)
    assert words in refusal(effects)
    assert "is refused" in sentences(effects)


def test_neighbours_on_one_machine_are_welcome() -> None:
    """Another slot is another process, whichever started first."""
    core = ClusterCore(card("a", 5, slot=1), ClusterConfig(), 0.0)
    for neighbour in (card("a", 3, slot=0), card("a", 7, slot=2)):
        effects = core.connected(neighbour, 0.0)
        assert not any(isinstance(effect, Disconnect) for effect in effects)


def test_too_many_are_refused() -> None:
    """The table has an end; whoever is in it may connect again."""
    core = ClusterCore(card("a"), ClusterConfig(), 0.0)
    cards = [
        ProcessInfo(node=NodeId("b" * 32), incarnation=number, slot=number, machine="b")
        for number in range(MAX_CONTACTS + 1)
    ]
    for each in cards[:-1]:
        core.connected(each, 0.0)
    assert "too many" in refusal(core.connected(cards[-1], 0.0))
    assert not any(isinstance(e, Disconnect) for e in core.connected(cards[0], 0.0))
    assert core.receive(cards[0].process, KnownProcesses((card("z"),)), 0.0) == []


def test_connecting_again_is_no_news() -> None:
    """A second lane to the same process changes nothing but its card."""
    core = ClusterCore(card("a"), ClusterConfig(), 0.0)
    assert "is connected" in sentences(core.connected(card("b"), 0.0))
    assert "is connected" not in sentences(core.connected(card("b", port=7), 0.0))


def test_what_nobody_knows_cannot_end() -> None:
    """Reports about strangers, and about the connected, prove nothing."""
    net = ClusterNet()
    a, b = net.form("ab")
    stranger = ProcessId(NodeId("z" * 32), 1)
    core = net.cores[a]
    for effects in (
        core.disconnected(stranger, "gone", net.now),
        core.ended(stranger, "its port refuses connections", net.now),
        core.ended(b, "its port refuses connections", net.now),
        core.unreachable(stranger, "no answer", net.now),
    ):
        assert not any(isinstance(effect, Note) for effect in effects)
    assert core.view == net.cores[b].view


def test_a_silent_loss_is_no_proof() -> None:
    """A refusal long after the last contact does not let the survivor go on in the lineage."""
    net = ClusterNet()
    a, b = net.form("ab")
    net.cut_off([a], [b])
    net.run(2.2)
    net.dead.add(a)
    core = net.cores[b]
    net.do(b, core.disconnected(a, "timed out", net.now))
    effects = core.ended(a, "its port refuses connections", net.now)
    assert "is dead" not in sentences(effects)
    assert core.state is ClusterState.PAUSED


def test_a_probe_that_proves_nothing_is_told_once() -> None:
    """The reason is repeated only when it changes."""
    net = ClusterNet()
    a, b = net.form("ab")
    net.cut_off([a], [b])
    net.sever(a, b)
    core = net.cores[a]
    assert "is not known whether b ended: no answer" in sentences(
        core.unreachable(b, "no answer", net.now)
    )
    assert sentences(core.unreachable(b, "no answer", net.now)) == ""
    assert "no route" in sentences(core.unreachable(b, "no route", net.now))


def test_a_lost_member_is_probed_until_it_is_clear() -> None:
    """At once, and again with every beat."""
    net = ClusterNet()
    a, b = net.form("ab")
    net.cut_off([a], [b])
    net.sever(a, b)
    net.run(0.9)
    probes = [t for t, who, e in net.effects if who == b and e == ProbePort(a)]
    assert len(probes) >= 4


def leaving_out(letters: str, *, how_many: int = 1) -> tuple[ClusterNet, list[ProcessId]]:
    """A cluster whose last members went silent and were left out; the lanes to them have ended."""
    net = ClusterNet()
    members = net.form(letters)
    here, away = members[:-how_many], members[-how_many:]
    net.cut_off(here, away)
    net.run(4.0 if how_many == 1 else 20.0)  # the pause grows with the number of members
    for one in here:
        for other in away:
            net.sever(one, other)
    assert sorted(net.agreed_by(here)) == list(letters[:-how_many])
    return net, members


def test_one_that_was_left_out_is_probed_until_it_is_known_to_have_ended() -> None:
    """Once in a pause.  A refusal says it; no answer says nothing, however long that lasts."""
    net, (a, b, c) = leaving_out("abc")
    net.effects.clear()
    net.run(10.0)
    probes = [t for t, who, e in net.effects if who == a and e == ProbePort(c)]
    pause = net.cores[a].config.health.pause_after
    assert 10.0 / pause * 0.6 <= len(probes) <= 10.0 / pause + 1
    assert net.cores[a].left_out({}) == ({c: "c"}, ())
    net.dead.add(c)
    net.cut.clear()
    net.run(2 * pause)
    net.effects.clear()
    net.run(5.0)
    assert all(net.cores[each].left_out({}) == ({}, (c,)) for each in (a, b))
    assert not any(isinstance(effect, ProbePort) for _, _, effect in net.effects)


def test_of_many_that_were_left_out_a_few_are_probed_at_a_time() -> None:
    """All of them, in turn."""
    net, members = leaving_out("abcdefghijklmnopqrstuvwx", how_many=11)
    net.effects.clear()
    net.run(10.0)
    asked = [
        (t, e.peer) for t, who, e in net.effects if who == members[0] and isinstance(e, ProbePort)
    ]
    assert {peer for _, peer in asked} == set(members[-11:])
    assert max(Counter(t for t, _ in asked).values()) == 8


def test_those_that_were_left_out_are_probed_in_turn_however_many_they_are() -> None:
    """Eight in a pause: sixteen in two."""
    net = ClusterNet()
    a, _ = net.form("ab")
    away = {card("z", number).process: "z" for number in range(16)}
    net.cores[a]._state.left_out = dict(away)
    net.cut |= {(a, who) for who in away}
    net.effects.clear()
    net.run(2.3)
    asked = [e.peer for _, who, e in net.effects if who == a and isinstance(e, ProbePort)]
    assert set(asked) == set(away)


def test_a_later_start_in_its_place_ends_one_that_was_left_out() -> None:
    """Another slot, or another machine, says nothing."""
    net, (a, b, c) = leaving_out("abc")
    assert net.cores[a].left_out({}) == ({c: "c"}, ())
    for other in (card("c", 2, slot=1), card("d", 3)):
        net.cores[a].connected(other, net.now)
    assert net.cores[a].left_out({}) == ({c: "c"}, ())
    net.cores[a].connected(card("c", 3), net.now)
    assert net.cores[a].left_out({}) == ({}, (c,))
    assert net.cores[b].left_out({c: "c"}) == ({c: "c"}, ())


def test_one_that_others_await_may_be_one_that_we_know_to_have_ended() -> None:
    """What we are told of is answered like what we know ourselves."""
    net, (a, _, c) = leaving_out("abc")
    stranger = ProcessId(NodeId("z" * 32), 1)
    net.cores[a].ended(c, "its port refuses connections", net.now)
    assert net.cores[a].left_out({c: "c", stranger: "z"}) == ({stranger: "z"}, (c,))


def test_a_proof_that_was_wrong_is_taken_back() -> None:
    """Whoever shows up after all is not dead, and people are told."""
    net = ClusterNet()
    _, b, c, d = net.form("abcd")
    for victim in (c, d):
        net.sever(b, victim)
    net.dropped = lambda *_: True  # so that nothing is agreed meanwhile
    net.do(b, net.cores[b].ended(c, "its port refuses connections", net.now))
    assert "is dead" in net.told(b)
    effects = net.cores[b].connected(net.cores[c].me, net.now)
    assert "considered dead but is alive" in sentences(effects)


def test_a_reboot_is_believed_when_the_old_process_is_heard_no_more() -> None:
    """The same machine with another boot tag may be a cloned disk while the old one speaks."""
    net = ClusterNet()
    _, b = net.form("ab", boot="first")
    core = net.cores[b]
    rebooted = card("a", 2, boot="second")
    effects = core.connected(rebooted, net.now)
    assert not any(isinstance(effect, Disconnect) for effect in effects)
    assert "is dead" not in sentences(effects)
    ended = core.disconnected(ProcessId(rebooted.node, 1), "reset", net.now)
    assert "has started in its place" in sentences(ended)
    assert "is dead" in sentences(ended)


def test_a_reboot_is_believed_at_once_when_the_lane_had_ended() -> None:
    """Then nobody else can be speaking for the old one."""
    net = ClusterNet()
    a, b = net.form("ab", boot="first")
    net.cut_off([a], [b])
    net.sever(a, b)
    effects = net.cores[b].connected(card("a", 2, boot="second"), net.now)
    assert "is dead" in sentences(effects)


def test_an_acquaintance_that_restarted_is_no_member_s_death() -> None:
    """A predecessor that was in no view of ours is simply forgotten."""
    core = ClusterCore(card("a"), ClusterConfig(), 0.0)
    core.connected(card("b", 1), 0.0)
    effects = core.connected(card("b", 2), 0.1)
    assert refusal(effects).endswith("has started in its place")
    assert core.health.peers == (card("b", 2).process,)


def test_only_so_many_deaths_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest is forgotten: by then its card is not passed on by anybody."""
    monkeypatch.setattr(membership_core, "_ENDED_KEPT", 2)
    core = ClusterCore(card("a"), ClusterConfig(), 0.0)
    for start in range(1, 6):
        core.connected(card("b", start), 0.0)
    met = core.receive(
        card("b", 5).process, KnownProcesses((card("b", 1, slot=9), card("b", 4, slot=9))), 0.1
    )
    assert [effect.card.incarnation for effect in met if isinstance(effect, ConnectTo)] == [1]


def test_ghosts_do_not_come_back_by_gossip() -> None:
    """Ended processes, predecessors, acquaintances and we ourselves are not met again."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    net.kill(c)
    net.run(0.1)
    cards = (card("c"), card("a"), card("b"), card("b", 0), card("d"))
    effects = net.cores[a].receive(b, KnownProcesses(cards), net.now)
    assert [effect.card for effect in effects if isinstance(effect, ConnectTo)] == [card("d")]


def test_a_proved_death_is_reported_to_the_members() -> None:
    """The leader may not have been in contact itself."""
    net = ClusterNet()
    _, b, c = net.form("abc")
    net.kill(c)
    net.run(0.05)
    sent = [e.message for _, who, e in net.effects if who == b and isinstance(e, SendMessage)]
    assert [m.is_proved for m in sent if isinstance(m, Lost) and m.who == c] == [False, True]


def test_a_member_that_died_before_the_view_came_is_lost_at_once() -> None:
    """A new view with a member whose connection has ended is aborted when it is installed."""
    net = ClusterNet()
    _, _, c, d = net.form("abcd")
    net.kill(d)
    net.run(0.0035)  # the view without d is proposed, and not agreed yet
    net.kill(c)
    net.run(0.2)
    assert net.agreed() == "ab"
    assert all(len(views) == 1 for views in net.views().values())


def test_a_departed_member_s_lane_may_end() -> None:
    """That is no loss, and no reason to probe."""
    net = ClusterNet()
    _, b, c = net.form("abc")
    view = net.view_of(b)
    word = Departed(view.lineage, view.epoch, 0, -1, None, "bye", is_leaving=True)
    net.cores[b].receive(c, word, net.now)
    effects = net.cores[b].disconnected(c, "closed", net.now)
    assert ProbePort(c) not in effects
    assert "ended" not in sentences(effects)


def test_a_view_with_a_member_that_is_not_connected_is_aborted_at_once() -> None:
    """It is installed, its operations are aborted, and the member is looked for."""
    core = ClusterCore(card("a"), ClusterConfig(), 0.0)
    core.connected(card("b"), 0.0)
    a, b, c = (card(letter).process for letter in "abc")
    effects = core.receive(b, Commit("f" * 32, 1, Proposal((b, a, c))), 0.1)
    assert ProbePort(c) in effects
    assert "no connection to cccccccc/1" in sentences(effects)
    assert any(isinstance(effect, Abort) and effect.lost == c for effect in effects)


def test_a_possible_clone_is_watched_as_long_as_the_old_one_speaks() -> None:
    """Nothing is concluded while both are heard."""
    net = ClusterNet()
    a, b = net.form("ab", boot="first")
    core = net.cores[b]
    core.connected(card("a", 2, boot="second"), net.now)
    assert "is dead" not in sentences(core.tick(net.now + 0.1))
    assert net.view_of(b).members == (a, b)


def test_a_member_whose_heir_is_here_has_ended() -> None:
    """Its card is remembered when its lane ends, also by those who enter the view only later."""
    core = ClusterCore(card("a"), ClusterConfig(), 0.0)
    a, b, c = (card(letter).process for letter in "abc")
    for letter in "bc":
        core.connected(card(letter), 0.0)
    core.disconnected(c, "reset", 0.1)
    core.connected(card("c", 2), 0.2)
    effects = core.receive(b, Commit("f" * 32, 1, Proposal((b, a, c))), 0.3)
    assert "there is no connection to c" in sentences(effects)  # no proof: we never had a lease
    assert core._state.ended[c][0] == "c has started in its place"


def test_only_so_many_cards_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest is forgotten."""
    monkeypatch.setattr(state, "_CARDS_KEPT", 2)
    core = ClusterCore(card("a"), ClusterConfig(), 0.0)
    for letter in "bcd":
        core.connected(card(letter), 0.0)
        core.disconnected(card(letter).process, "reset", 0.0)
    contacts = core._state.contacts
    assert contacts.last_card(card("b").process).machine == ""
    assert contacts.last_card(card("d").process) == card("d")
    contacts.forget(card("z").process)  # nothing was known of it


# --- the edges of what is believed ---


def test_a_refused_process_is_not_in_the_table() -> None:
    """Nothing else is done with it."""
    core = ClusterCore(card("a"), ClusterConfig(), 0.0)
    effects = core.connected(card("a", 9, machine="elsewhere"), 0.0)
    assert not any(isinstance(effect, SendMessage) for effect in effects)
    assert core.health.peers == ()


def test_only_a_death_that_was_proved_is_taken_back_in_words() -> None:
    """One that was only known to have ended is simply here again."""
    net = ClusterNet()
    a, b = net.form("ab")
    net.dropped = lambda *_: True
    net.cut_off([a], [b])
    net.sever(a, b)
    net.run(2.5)
    core = net.cores[b]
    core.ended(a, "its port refuses connections", net.now)
    assert a in core._state.ended
    effects = core.connected(net.cores[a].me, net.now)
    assert "considered dead" not in sentences(effects)
    assert a not in core._state.ended


@pytest.mark.parametrize(
    ("age", "leased_for", "is_proof"),
    [
        (1.79, 1.0, True),
        (1.81, 1.0, False),
        (1.0, 0.5, False),
        (0.89, 0.5, True),
        (1.9, 3.0, False),
    ],
)
def test_a_proof_must_come_within_nine_tenths_of_two_pauses(
    age: float, leased_for: float, is_proof: bool
) -> None:
    """Of the shorter of two: that of the view, and the one that the dead one had confirmed."""
    net = ClusterNet()
    a, b = net.form("ab")
    core = net.cores[b]
    net.dropped = lambda *_: True
    core.disconnected(a, "reset", net.now)
    contact = core._state.contacts.of(a)
    contact.leased_at, contact.leased_for = core._state.time - age, leased_for
    effects = core.ended(a, "its port refuses connections", net.now)
    assert ("is dead" in sentences(effects)) is is_proof
    assert any(isinstance(effect, Abort) for effect in effects) is False  # aborted before


def test_a_proof_of_death_stops_operations() -> None:
    """Also of a member whose connection was never noticed to end."""
    net = ClusterNet()
    a, b = net.form("ab")
    core = net.cores[b]
    s = core._state
    s.contacts.of(a).is_connected = False
    effects = core.ended(a, "its port refuses connections", net.now)
    assert [e.lost for e in effects if isinstance(e, Abort)] == [a]


def test_a_later_start_ends_the_lane_of_the_earlier_one() -> None:
    """As if it had ended by itself: it is lost, and the others hear of it."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    core = net.cores[c]
    effects = core.connected(card("b", 2), net.now)
    assert Disconnect(b, "b has started in its place") in effects
    assert not core._state.contacts.of(b).is_connected
    told = sentences(effects)
    assert "the connection to b ended" in told
    assert "b is dead" in told
    lost = [
        e.message for e in effects if isinstance(e, SendMessage) and isinstance(e.message, Lost)
    ]
    assert {message.who for message in lost} == {b}
    assert a in {
        e.to for e in effects if isinstance(e, SendMessage) and isinstance(e.message, Lost)
    }


def test_newcomers_are_introduced_to_all_in_messages_of_eight() -> None:
    """Each once."""
    core = ClusterCore(card("a"), ClusterConfig(), 0.0)
    letters = "bcdefghijklmnopqrs"
    for letter in letters:
        core.connected(card(letter), 0.0)
        core.receive(card(letter).process, Heartbeat(1, 0, 0.0, Phase.JOINING, ()), 0.0)
    effects = core.connected(card("z"), 0.1)
    told = [
        e.message.cards
        for e in effects
        if isinstance(e, SendMessage)
        and e.to == card("z").process
        and isinstance(e.message, KnownProcesses)
    ]
    assert [len(cards) for cards in told] == [8, 8, 2]
    assert [each.name for cards in told for each in cards] == list(letters)


def test_a_member_that_falls_silent_is_lost_without_a_broken_connection() -> None:
    """Operations stop, and the reason is told."""
    net = ClusterNet()
    a, _, c = net.form("abc")
    net.stopped.add(c)
    net.run(1.9)
    assert "c is lost: no heartbeat for" in net.told(a)
    assert [abort.lost for abort in net.aborts(a)][:1] == [c]


def test_members_are_probed_once_in_a_beat_at_work_and_once_in_a_pause_otherwise() -> None:
    """Those that are gone are not probed."""
    net = ClusterNet()
    a, _, _, d, e = net.form("abcde")
    core = net.cores[a]
    s = core._state
    net.dropped = lambda *_: True
    core.disconnected(e, "reset", net.now)
    s.proofs[e] = "it is dead"
    core.disconnected(d, "reset", net.now)
    s.is_dirty = False
    times = []
    for step in range(1, 200):
        now = net.now + step * 0.01
        core._evidence._state.now = now
        s.clock.advance(now)
        s.out = []
        core._evidence.review()
        times += [s.time for effect in s.out if effect == ProbePort(d)]
        assert ProbePort(e) not in s.out
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert min(gaps) >= s.interval - 0.001
    assert max(gaps) <= s.interval + 0.02
    s.state = ClusterState.PAUSED
    core._evidence._probe_at = s.time
    s.out = []
    core._evidence.review()
    assert core._evidence._probe_at == pytest.approx(s.time + s.pause_after)


def test_a_reboot_is_believed_when_the_old_process_falls_silent() -> None:
    """Its connection may stay open for long: time is enough, and it is concluded once."""
    net = ClusterNet()
    a, b = net.form("ab", boot="first")
    core = net.cores[b]
    net.stopped.add(a)
    core.connected(card("a", 2, boot="second"), net.now)
    assert core._evidence._successors
    net.run(1.2)
    assert core._state.ended[a][0] == "a has started in its place"
    assert core._evidence._successors == {}


def test_what_was_known_of_an_end_is_said_with_it_in_the_next_view() -> None:
    """The words that it was learnt by, not the time."""
    net = ClusterNet()
    _, b, c = net.form("abc")
    core = net.cores[b]
    s = core._state
    s.contacts.of(c).is_connected = False
    s.ended[c] = "its port refuses connections", s.time
    assert core._evidence._how_ended(s.contacts.of(c)) == "its port refuses connections"


def test_a_decision_follows_from_a_new_connection() -> None:
    """Not only with the next beat."""
    net = ClusterNet()
    a, _ = net.form("ab")
    net.run(3)
    core = net.cores[a]
    decided: list[str] = []
    core._decide = lambda: decided.append("now")  # type: ignore[method-assign]
    core._state.is_dirty = False
    core.connected(card("z"), net.now)
    assert decided


def test_a_decision_follows_from_the_end_of_a_connection() -> None:
    """People read at once that a start waits again; the others hear of the end before the beat."""
    core = ClusterCore(card("a"), ClusterConfig(min_nodes=2), 0.0)
    core.tick(0.0)
    regular = core.next_deadline
    b = card("b")
    core.connected(b, 0.0)
    beat = Heartbeat(1, 1, 0.0, Phase.JOINING, hears=(mark(core.me.process),))
    core.receive(b.process, beat, 0.01)
    assert core.reason == "2 here; looking for more before starting"
    core.disconnected(b.process, "reset", 0.02)
    assert core.reason == "1 of at least 2 processes are here; waiting for the others"
    assert regular is not None
    assert core.next_deadline is not None
    assert core.next_deadline < regular


def test_an_acquaintance_that_rebooted_is_forgotten_when_it_falls_silent() -> None:
    """Its connection may still be open."""
    core = ClusterCore(card("a"), ClusterConfig(min_nodes=9), 0.0)
    old, new = card("b", 1, boot="first"), card("b", 2, boot="second")
    core.connected(old, 0.0)
    core.receive(old.process, Heartbeat(1, 0, 0.0, Phase.JOINING, ()), 0.0)
    core.connected(new, 0.1)
    assert old.process in core.health
    now = 0.1
    while now < 9:
        now += 0.1
        core.tick(now)
    assert core.health.peers == (new.process,)


# --------------------------------------------------------------------------------------------------
# What a core promises to the one that drives it.


def test_a_beat_that_withholds_gives_no_lease() -> None:
    """Its sender may have found us silent, or agreed to go on without us."""
    net = ClusterNet()
    a, b = net.form("ab")
    core = net.cores[a]
    s = core._state
    contact = s.contacts.of(b)
    for withholds in (True, False):
        net.run(0.2)
        assert contact.beat is not None
        before = contact.leased_at
        echo = s.contacts.number_beat(s.time, 1.0)
        beat = msgspec.structs.replace(
            contact.beat, sequence=contact.newest + 1, echo=echo, held=0.0, withholds=withholds
        )
        core.receive(b, beat, net.now)
        assert (contact.leased_at == before) is withholds


def test_what_was_told_in_a_batch_is_not_told_again_at_its_end() -> None:
    """Each call has its own effects; the last one decides, at its own time."""
    core = ClusterCore(card("a"), ClusterConfig(solo_delay=0.5), 0.0)
    core.begin_batch()
    told = core.connected(card("o", role=ProcessRole.OBSERVER), 0.1)
    assert told
    assert core.view is None
    last = core.end_batch(0.7)
    assert not [effect for effect in last if effect in told]
    assert core.view is not None


def test_a_decision_is_made_when_it_is_due_whatever_comes_in_at_that_moment() -> None:
    """Not only with the next tick."""
    core = ClusterCore(card("a"), ClusterConfig(solo_delay=0.5), 0.0)
    watcher = card("o", role=ProcessRole.OBSERVER)
    core.connected(watcher, 0.0)
    for sequence in (1, 2):
        beat = Heartbeat(sequence, 0, 0.0, Phase.OBSERVING, ())
        core.receive(watcher.process, beat, 0.1 * sequence)
    assert core.view is None
    core.receive(watcher.process, Heartbeat(3, 0, 0.0, Phase.OBSERVING, ()), 0.55)
    assert core.view is not None


def test_a_process_that_slept_doubts_nobody_for_it() -> None:
    """While it did not run, no other could have confirmed anything."""
    net = ClusterNet()
    a, b = net.form("ab")
    core = net.cores[a]
    core.receive(b, PreVote("f" * 32, 1, 1), net.now + 30)
    assert not core._state.is_doubtful(b)


def test_silence_is_told_to_people() -> None:
    """What health finds is among the effects."""
    net = ClusterNet()
    a, b = net.form("ab")
    net.stopped.add(b)
    net.run(3)
    assert "b is suspect: no heartbeat for" in net.told(a).replace(" (bbbbbbbb/1)", "")


def test_the_missing_are_told_with_their_silence_at_the_moment_of_the_question() -> None:
    """Of a view that is over: those who have not ended or left, and are not here."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    net.stopped |= {a, b}
    net.run(3)
    core = net.cores[c]
    now, later = core.missing(net.now), core.missing(net.now + 2)
    assert {cause.who for cause in now} == {a, b}
    assert later[0].silent_for - now[0].silent_for == pytest.approx(2)
    s = core._state
    s.view = None
    assert {cause.who for cause in core.missing(net.now)} == {a, b}
    s.ended[a] = "its port refuses connections", net.now
    assert {cause.who for cause in core.missing(net.now)} == {b}
    s.departed.add(b)
    assert core.missing(net.now) == ()


def test_the_first_of_two_can_hand_over_and_one_alone_cannot() -> None:
    """People hear of both."""
    net = ClusterNet()
    a, b = net.form("ab")
    net.do(a, net.cores[a].step_down(net.now))
    net.run(1)
    assert net.agreed() == "ba"
    kinds = [
        e.event.kind
        for _, _, e in net.effects
        if isinstance(e, Note) and isinstance(e.event, ElectionEvent)
    ]
    assert ElectionKind.STEPPED_DOWN in kinds
    net.do(a, net.cores[a].leave(net.now))
    net.run(1)
    net.do(b, net.cores[b].step_down(net.now))
    assert "only the leader can hand over, and only to another member" in net.told(b)


def test_what_a_person_asks_of_a_group_at_work_holds_for_one_view_and_frees_no_process() -> None:
    """Where any quorum will do, no person need ask."""
    net = ClusterNet()
    a, b = net.form("ab")
    assert not net.cores[a].is_insisting
    net.cores[a].continue_without_missing(net.now)
    assert net.cores[a].is_insisting
    net.kill(b)
    net.run(2)
    assert net.agreed() == "a"
    assert not net.cores[a].is_insisting
    assert ClusterCore(card("c"), ClusterConfig(quorum="any"), 0.0).is_insisting
    free = ClusterCore(card("d"), ClusterConfig(min_nodes=2), 0.0)
    free.continue_without_missing(0.0)
    assert not free._state.is_released


def test_of_those_that_have_ended_the_last_thousand_are_known() -> None:
    """One thousand and twenty-four of them."""
    core = ClusterCore(card("a"), ClusterConfig(min_nodes=2), 0.0)
    for incarnation in range(1, 1027):
        core.connected(card("b", incarnation), 0.0)
    ended = [core.has_ended(card("b", incarnation).process) for incarnation in (1, 2, 1025, 1026)]
    assert ended == [False, True, True, False]


def test_the_reason_of_a_removal_is_clipped_and_told_whenever_it_comes_back() -> None:
    """It is not met, greeted or introduced to anybody."""
    core = ClusterCore(card("a"), ClusterConfig(min_nodes=2), 0.0)
    core.connected(card("b"), 0.0)
    core.expel(card("b").process, "x" * 300, 0.1)
    (refusal,) = core.connected(card("b"), 0.2)
    assert isinstance(refusal, Disconnect)
    assert refusal.reason == "x" * 199 + "…"


@pytest.mark.parametrize("but", ["", "it has not come back", "another", "in a view", "no word"])
def test_one_that_left_for_a_child_which_came_back_says_so_to_those_who_count_on_it(
    but: str,
) -> None:
    """In any other case the one that counts on us is told what followed its view."""
    net = ClusterNet()
    a, b = net.form("ab")
    core, view = net.cores[a], net.view_of(a)
    s = core._state
    word = Departed(view.lineage, view.epoch, 5, -1, None, "it continues in another lineage")
    later = Commit(view.lineage, view.epoch + 1, Proposal((b,)))
    s.history.record(later)
    if but != "no word":
        s.history.depart(word)
    if but != "it has not come back":
        end = Proposal((a,), into=view.lineage, into_epoch=view.epoch + 1)
        s.history.record(Commit(OTHER, 2, end))
    s.bound = Commit("c" * 32, 1, Proposal((a,))) if but == "another" else later
    s.view = View(view.lineage, view.epoch + 1, (a, b)) if but == "in a view" else None
    effects = core.receive(b, PreVote(view.lineage, view.epoch, 1), net.now)
    told = [e.message for e in effects if isinstance(e, SendMessage) and e.to == b]
    assert [each for each in told if not isinstance(each, Heartbeat)] == (
        [later] if but else [word]
    )


def test_a_heartbeat_that_was_taken_already_changes_nothing() -> None:
    """Whatever it says this time."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    core = net.cores[a]
    beat = core._state.contacts.of(b).beat
    assert beat is not None
    again = msgspec.structs.replace(beat, aborted=True, lost=c)
    assert not [e for e in core.receive(b, again, net.now) if isinstance(e, Abort)]
    newer = msgspec.structs.replace(again, sequence=beat.sequence + 1)
    assert [e for e in core.receive(b, newer, net.now) if isinstance(e, Abort)]


def test_one_that_is_left_out_has_ended_if_a_later_start_in_its_place_is_here_already() -> None:
    """The heir came before the view that left it out was known."""
    net = ClusterNet()
    a, b = net.form("ab")
    core, view = net.cores[a], net.view_of(a)
    core._state.contacts.remember(card("c"))
    core.connected(card("c", 2), net.now)
    gone = Cause(card("c").process, CauseCode.SILENT, "c")
    commit = Commit(view.lineage, view.epoch + 1, Proposal((a, b), causes=(gone,)))
    core.receive(b, commit, net.now)
    assert core.left_out({}) == ({}, (card("c").process,))


def test_an_accusation_of_one_that_is_no_member_stops_nothing() -> None:
    """Operations of the view do not need it."""
    net = ClusterNet()
    a, b = net.form("ab")
    view = net.view_of(a)
    lie = Lost(view.lineage, view.epoch, card("z").process, "a lie", is_expelled=True)
    effects = net.cores[a].receive(b, lie, net.now)
    assert not [effect for effect in effects if isinstance(effect, Abort)]


def test_those_who_wait_together_are_let_in_by_nobody() -> None:
    """They hear each other, but none of them is at work."""
    net = ClusterNet()
    a, b, c, d, e = net.form("abcde")
    net.cut_off([a, b, c], [d, e])
    net.run(6)
    core = net.cores[d]
    assert core.state is ClusterState.PAUSED
    assert core._state.contacts.is_heard(e)
    assert not core.can_be_let_in

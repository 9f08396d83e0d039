"""Who is there, who is dead, and what counts as a proof of it."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from potluck.core import cluster_contacts, cluster_evidence
from potluck.core.cluster import ClusterConfig, ClusterCore, ClusterState
from potluck.core.cluster_bounds import MAX_CONTACTS
from potluck.core.cluster_cards import ProcessCard
from potluck.core.cluster_effects import Abort, Disconnect, Effect, Meet, Note, Probe, Send
from potluck.core.cluster_messages import (
    Acquaintances,
    Commit,
    Departed,
    Heartbeat,
    Lost,
    Phase,
    Proposal,
)
from potluck.vocabulary import NodeId, ProcessId
from support.cluster_net import ClusterNet, card


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
def test_copied_keys_and_ghosts_are_refused(newcomer: ProcessCard, words: str) -> None:
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
        ProcessCard(node=NodeId("b" * 32), incarnation=number, slot=number, machine="b")
        for number in range(MAX_CONTACTS + 1)
    ]
    for each in cards[:-1]:
        core.connected(each, 0.0)
    assert "too many" in refusal(core.connected(cards[-1], 0.0))
    assert not any(isinstance(e, Disconnect) for e in core.connected(cards[0], 0.0))
    assert core.receive(cards[0].process, Acquaintances((card("z"),)), 0.0) == []


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
    assert "is not known: no answer" in sentences(core.unreachable(b, "no answer", net.now))
    assert sentences(core.unreachable(b, "no answer", net.now)) == ""
    assert "no route" in sentences(core.unreachable(b, "no route", net.now))


def test_a_lost_member_is_probed_until_it_is_clear() -> None:
    """At once, and again with every beat."""
    net = ClusterNet()
    a, b = net.form("ab")
    net.cut_off([a], [b])
    net.sever(a, b)
    net.run(0.9)
    probes = [t for t, who, e in net.effects if who == b and e == Probe(a)]
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
    probes = [t for t, who, e in net.effects if who == a and e == Probe(c)]
    pause = net.cores[a].config.health.pause_after
    assert 10.0 / pause * 0.6 <= len(probes) <= 10.0 / pause + 1
    assert net.cores[a].left_out({}) == ({c: "c"}, ())
    net.dead.add(c)
    net.cut.clear()
    net.run(2 * pause)
    net.effects.clear()
    net.run(5.0)
    assert all(net.cores[each].left_out({}) == ({}, (c,)) for each in (a, b))
    assert not any(isinstance(effect, Probe) for _, _, effect in net.effects)


def test_of_many_that_were_left_out_a_few_are_probed_at_a_time() -> None:
    """All of them, in turn."""
    net, members = leaving_out("abcdefghijklmnopqrstuvwx", how_many=11)
    net.effects.clear()
    net.run(10.0)
    asked = [(t, e.peer) for t, who, e in net.effects if who == members[0] and isinstance(e, Probe)]
    assert {peer for _, peer in asked} == set(members[-11:])
    assert max(Counter(t for t, _ in asked).values()) == 8


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
    assert "taken for dead, but it is there" in sentences(effects)


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
    monkeypatch.setattr(cluster_evidence, "_ENDED_KEPT", 2)
    core = ClusterCore(card("a"), ClusterConfig(), 0.0)
    for start in range(1, 6):
        core.connected(card("b", start), 0.0)
    met = core.receive(
        card("b", 5).process, Acquaintances((card("b", 1, slot=9), card("b", 4, slot=9))), 0.1
    )
    assert [effect.card.incarnation for effect in met if isinstance(effect, Meet)] == [1]


def test_ghosts_do_not_come_back_by_gossip() -> None:
    """Ended processes, predecessors, acquaintances and we ourselves are not met again."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    net.kill(c)
    net.run(0.1)
    cards = (card("c"), card("a"), card("b"), card("b", 0), card("d"))
    effects = net.cores[a].receive(b, Acquaintances(cards), net.now)
    assert [effect.card for effect in effects if isinstance(effect, Meet)] == [card("d")]


def test_a_proved_death_is_reported_to_the_members() -> None:
    """The leader may not have been in contact itself."""
    net = ClusterNet()
    _, b, c = net.form("abc")
    net.kill(c)
    net.run(0.05)
    sent = [e.message for _, who, e in net.effects if who == b and isinstance(e, Send)]
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
    assert Probe(c) not in effects
    assert "ended" not in sentences(effects)


def test_a_view_with_a_member_that_is_not_connected_is_aborted_at_once() -> None:
    """It is installed, its operations are aborted, and the member is looked for."""
    core = ClusterCore(card("a"), ClusterConfig(), 0.0)
    core.connected(card("b"), 0.0)
    a, b, c = (card(letter).process for letter in "abc")
    effects = core.receive(b, Commit("f" * 32, 1, Proposal((b, a, c))), 0.1)
    assert Probe(c) in effects
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
    assert core._situation.ended[c][0] == "c (cccccccc/2) has started in its place"


def test_only_so_many_cards_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest is forgotten."""
    monkeypatch.setattr(cluster_contacts, "_CARDS_KEPT", 2)
    core = ClusterCore(card("a"), ClusterConfig(), 0.0)
    for letter in "bcd":
        core.connected(card(letter), 0.0)
        core.disconnected(card(letter).process, "reset", 0.0)
    contacts = core._situation.contacts
    assert contacts.last_card(card("b").process).machine == ""
    assert contacts.last_card(card("d").process) == card("d")
    contacts.forget(card("z").process)  # nothing was known of it


# --- the edges of what is believed ---


def test_a_refused_process_is_not_in_the_table() -> None:
    """Nothing else is done with it."""
    core = ClusterCore(card("a"), ClusterConfig(), 0.0)
    effects = core.connected(card("a", 9, machine="elsewhere"), 0.0)
    assert not any(isinstance(effect, Send) for effect in effects)
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
    assert a in core._situation.ended
    effects = core.connected(net.cores[a].me, net.now)
    assert "taken for dead" not in sentences(effects)
    assert a not in core._situation.ended


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
    contact = core._situation.contacts.of(a)
    contact.leased_at, contact.leased_for = core._situation.time - age, leased_for
    effects = core.ended(a, "its port refuses connections", net.now)
    assert ("is dead" in sentences(effects)) is is_proof
    assert any(isinstance(effect, Abort) for effect in effects) is False  # aborted before


def test_a_proof_of_death_stops_operations() -> None:
    """Also of a member whose connection was never noticed to end."""
    net = ClusterNet()
    a, b = net.form("ab")
    core = net.cores[b]
    s = core._situation
    s.contacts.of(a).is_connected = False
    effects = core.ended(a, "its port refuses connections", net.now)
    assert [e.lost for e in effects if isinstance(e, Abort)] == [a]


def test_a_later_start_ends_the_lane_of_the_earlier_one() -> None:
    """As if it had ended by itself: it is lost, and the others hear of it."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    core = net.cores[c]
    effects = core.connected(card("b", 2), net.now)
    assert Disconnect(b, "b (bbbbbbbb/2) has started in its place") in effects
    assert not core._situation.contacts.of(b).is_connected
    told = sentences(effects)
    assert "the connection to b (bbbbbbbb/1) ended" in told
    assert "b (bbbbbbbb/1) is dead" in told
    lost = [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, Lost)]
    assert {message.who for message in lost} == {b}
    assert a in {e.to for e in effects if isinstance(e, Send) and isinstance(e.message, Lost)}


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
        if isinstance(e, Send)
        and e.to == card("z").process
        and isinstance(e.message, Acquaintances)
    ]
    assert [len(cards) for cards in told] == [8, 8, 2]
    assert [each.name for cards in told for each in cards] == list(letters)


def test_a_member_that_falls_silent_is_lost_without_a_broken_connection() -> None:
    """Operations stop, and the reason is told."""
    net = ClusterNet()
    a, _, c = net.form("abc")
    net.stopped.add(c)
    net.run(1.9)
    assert "c (cccccccc/1) is lost: nothing was heard for" in net.told(a)
    assert [abort.lost for abort in net.aborts(a)][:1] == [c]


def test_members_are_probed_once_in_a_beat_at_work_and_once_in_a_pause_otherwise() -> None:
    """Those that are gone are not probed."""
    net = ClusterNet()
    a, _, _, d, e = net.form("abcde")
    core = net.cores[a]
    s = core._situation
    net.dropped = lambda *_: True
    core.disconnected(e, "reset", net.now)
    s.proofs[e] = "it is dead"
    core.disconnected(d, "reset", net.now)
    s.is_dirty = False
    times = []
    for step in range(1, 200):
        now = net.now + step * 0.01
        core._evidence._situation.now = now
        s.clock.advance(now)
        s.out = []
        core._evidence.review()
        times += [s.time for effect in s.out if effect == Probe(d)]
        assert Probe(e) not in s.out
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
    assert core._situation.ended[a][0] == "a (aaaaaaaa/2) has started in its place"
    assert core._evidence._successors == {}


def test_what_was_known_of_an_end_is_said_with_it_in_the_next_view() -> None:
    """The words that it was learnt by, not the time."""
    net = ClusterNet()
    _, b, c = net.form("abc")
    core = net.cores[b]
    s = core._situation
    s.contacts.of(c).is_connected = False
    s.ended[c] = "its port refuses connections", s.time
    assert core._evidence._how_ended(s.contacts.of(c)) == "its port refuses connections"


def test_a_decision_follows_from_a_new_connection_and_from_its_end() -> None:
    """Not only with the next beat; and the others hear of the end before it."""
    net = ClusterNet()
    a, b = net.form("ab")
    net.run(3)
    core = net.cores[a]
    s = core._situation
    decided: list[str] = []
    core._decide = lambda: decided.append("now")  # type: ignore[method-assign]
    s.is_dirty = False
    core.connected(card("z"), net.now)
    assert decided
    for number, process in enumerate((card("z").process, b), 2):
        s.next_beat = s.time + 9
        core.disconnected(process, "reset", net.now)
        assert len(decided) == number
        assert s.next_beat < s.time + 1


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

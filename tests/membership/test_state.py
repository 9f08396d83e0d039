"""What was said on leaving a lineage stays said, as long as anybody may ask."""

from __future__ import annotations

import msgspec
import pytest

from potluck._types import Branch, NodeId, ProcessId, View
from potluck.membership.core import ClusterCore
from potluck.membership.events import ClusterConfig, ClusterState, Effect, ElectionEvent, Note, Send
from potluck.membership.messages import (
    Canvass,
    CauseCode,
    Charter,
    Commit,
    Departed,
    Heartbeat,
    Phase,
    Proposal,
    Relayed,
    mark,
)
from potluck.membership.state import Archive, Situation, view_mark
from support.cluster_net import ClusterNet, card

A = ProcessId(NodeId("a" * 32), 1)


def commit(lineage: str, epoch: int) -> Commit:
    """A view that was agreed."""
    return Commit(lineage, epoch, Proposal((A,)))


def test_the_newest_view_is_kept() -> None:
    """An older one does not replace it."""
    archive = Archive()
    archive.record(commit("x", 3))
    archive.record(commit("x", 2))
    assert archive.newest("x") == commit("x", 3)
    assert archive.newest("y") is None


def test_views_up_to_the_last_word_are_closed() -> None:
    """A later view may be entered again, as a newcomer."""
    archive = Archive()
    word = Departed("x", 3, 0, -1, None, "we left")
    archive.depart(word)
    assert archive.last_word("x") == word
    assert archive.is_closed("x", 3)
    assert not archive.is_closed("x", 4)
    assert not archive.is_closed("y", 1)


def test_views_before_one_that_is_known_are_closed() -> None:
    """Whoever tells of them is behind, and may be alone with them."""
    archive = Archive()
    archive.record(commit("x", 3))
    assert archive.is_closed("x", 2)
    assert not archive.is_closed("x", 3)


def test_only_so_many_are_kept() -> None:
    """The oldest are forgotten."""
    archive = Archive()
    for number in range(100):
        archive.record(commit(str(number), 1))
    assert archive.newest("0") is None
    assert archive.newest("99") is not None


def test_what_followed_a_view_is_known_whatever_came_first() -> None:
    """Sixteen views of a lineage at most, oldest first."""
    archive = Archive()
    for epoch in (6, 2, 4):
        archive.record(commit("x", epoch))
    assert [each.epoch for each in archive.following("x", 2)] == [4, 6]
    assert archive.following("y", 0) == ()
    for epoch in range(7, 40):
        archive.record(commit("x", epoch))
    assert [each.epoch for each in archive.following("x", 0)] == list(range(24, 40))


def test_lineages_that_dissolve_into_each_other_are_followed_to_an_end() -> None:
    """A circle must not exist; if it does, nobody waits for ever."""
    archive = Archive()
    one = Commit("x", 2, Proposal((A,), into="y", into_epoch=2))
    other = Commit("y", 2, Proposal((A,), into="x", into_epoch=2))
    archive.record(one)
    archive.record(other)
    assert archive.followed(one).lineage in {"x", "y"}


def test_a_lineage_is_followed_over_several_ends_to_the_newest_view_there() -> None:
    """What we know ourselves counts if it is newer than what was told."""
    archive = Archive()
    first = Commit("x", 2, Proposal((A,), into="y", into_epoch=3))
    assert archive.followed(first).view.lineage == "y"
    assert archive.followed(first).epoch == 3
    archive.record(commit("y", 2))
    assert archive.followed(first).epoch == 3
    archive.record(commit("y", 5))
    assert archive.followed(first) == commit("y", 5)
    archive.record(Commit("y", 6, Proposal((A,), into="z", into_epoch=1)))
    assert archive.followed(first).lineage == "z"


def test_the_successor_of_a_view_is_later_or_of_a_child_that_branched_off_no_earlier() -> None:
    """The lineage itself counts before its children."""
    archive = Archive()
    child = Commit("y", 4, Proposal((A,)), Charter(ancestry=(Branch("x", 3),)))
    archive.record(child)
    assert archive.successor("x", 3) == child
    assert archive.successor("x", 2) == child
    assert archive.successor("x", 4) is None
    assert archive.successor("z", 1) is None
    archive.record(commit("x", 4))
    assert archive.successor("x", 3) == commit("x", 4)
    assert archive.successor("x", 4) is None


def test_the_newest_lineages_and_words_are_kept() -> None:
    """Sixty-four of each; what is recorded again counts as new."""
    archive = Archive()
    archive.record(commit("first", 1))
    for number in range(63):
        archive.record(commit(str(number), 1))
    assert archive.newest("first") is not None
    archive.record(commit("first", 2))
    archive.record(commit("63", 1))
    assert archive.newest("first") is not None
    assert archive.newest("0") is None
    assert archive.newest("1") is not None


# --------------------------------------------------------------------------------------------------
# What heartbeats say, who is told of what, and when a beat may be sent out of turn.

Z = card("z").process


def beats(effects: list[Effect]) -> dict[ProcessId, Heartbeat]:
    """Heartbeats, by who gets them."""
    sent = [effect for effect in effects if isinstance(effect, Send)]
    return {each.to: each.message for each in sent if isinstance(each.message, Heartbeat)}


def sent_by(s: Situation) -> list[Effect]:
    """What is on its way out, which it forgets."""
    out, s.out = s.out, []
    return out


def test_a_heartbeat_says_how_long_ago_the_confirmed_one_came() -> None:
    """So a round trip is measured without the time in between; nothing heard, nothing said."""
    core = ClusterCore(card("a"), ClusterConfig(min_nodes=2), 0.0)
    first = beats(core.connected(card("b"), 0.0))[card("b").process]
    assert (first.echo, first.held, first.bound, first.bound_epoch) == (0, 0.0, "", 0)
    core.receive(card("b").process, Heartbeat(7, 0, 0.0, Phase.JOINING, ()), 0.1)
    core._situation.clock.advance(0.25)
    core._situation.out = []
    core._situation.beat()
    later = beats(core._situation.out)[card("b").process]
    assert later.echo == 7
    assert later.held == pytest.approx(0.15)


def test_round_trips_are_measured_without_the_time_at_the_other_end() -> None:
    """What was sent 0.1 s ago and held for 0.06 s there took 0.04 s; never less than nothing."""
    for held, took in ((0.06, 0.04), (0.9, 0.0)):
        core = ClusterCore(card("a"), ClusterConfig(min_nodes=2), 1.0)
        b = card("b").process
        core.connected(card("b"), 1.0)
        echo = core._situation.contacts.sequence
        core.receive(b, Heartbeat(1, echo, held, Phase.JOINING, ()), 1.1)
        (peer,) = core.health.summary(1.1).peers
        assert peer.round_trip == pytest.approx(took)


def test_lateness_lengthens_elections_once_it_is_a_quarter_of_an_interval() -> None:
    """Answers of a process that runs late take longer."""
    net = ClusterNet()
    a, b = net.form("ab")
    s = net.cores[a]._situation
    contact = s.contacts.of(b)
    assert contact.beat is not None
    for lateness, slack in ((0.045, 0.0), (0.055, 0.055), (0.9, 0.9)):
        contact.beat = msgspec.structs.replace(contact.beat, lateness=lateness)
        s.beat()
        assert s.election.slack == slack


def test_one_member_lost_or_several_are_waited_for_in_the_right_words() -> None:
    """With the number of the view they were in."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    s = net.cores[c]._situation
    one, two = s.why_waiting([a]), s.why_waiting([a, b])
    assert one.startswith("waiting for a (aaaaaaaa/1): it was in view 1 and may")
    assert one.endswith("To continue without it: potluck continue")
    assert "they were in view 1" in two
    assert two.endswith("To continue without them: potluck continue")


def test_a_cause_names_the_best_address_and_how_long_it_was_silent() -> None:
    """Up to sixteen in full; of more only names."""
    net = ClusterNet()
    a, b, c = net.form("abc", hosts=("10.0.0.1", "10.0.0.2"))
    s = net.cores[a]._situation
    cause = s.cause(c, CauseCode.SILENT, "it is quiet")
    assert cause.host == "10.0.0.1"
    assert cause.silent_for == s.health.silence(c, s.now) < 0.3
    s.now -= 50
    assert s.cause(b, CauseCode.SILENT, "").silent_for == 0.0
    for count, is_full in ((16, True), (17, False)):
        causes = s.causes([(c, CauseCode.SILENT, "it is quiet")] * count)
        assert all(bool(each.reason) is is_full for each in causes)


def test_a_lineage_is_a_descendant_only_by_a_branch_of_ours_that_is_late_enough() -> None:
    """One such branch is enough, among others; a free process has no descendants."""
    net = ClusterNet()
    a, _ = net.form("ab")
    s = net.cores[a]._situation
    view = net.view_of(a)
    ours, older = Branch(view.lineage, view.epoch), Branch(view.lineage, view.epoch - 1)
    other = Branch("e" * 32, 9)
    cases = [((ours,), True), ((other, ours), True), ((ours, other), True), ((older,), False)]
    for ancestry, is_one in [*cases, ((other,), False), ((), False)]:
        assert s.is_descendant(Charter(ancestry=ancestry)) is is_one
    s.bound = None
    assert not s.is_descendant(Charter(ancestry=(ours,)))


def test_the_ancestry_begins_with_the_origin_of_the_checkpoint() -> None:
    """Our own if we loaded one, otherwise that of the lineage; the newest branches count."""
    net = ClusterNet()
    (a,) = [net.add("a")]
    s = net.cores[a]._situation
    mine, founders, branch = (Branch(letter * 32, 1) for letter in "cde")
    s.origin = (mine,)
    assert list(s.ancestry) == [mine]
    charter = Charter(ancestry=(branch,), origin=(founders,))
    s.bound = Commit("f" * 32, 1, Proposal((a,)), charter)
    assert list(s.ancestry) == [mine, branch]
    s.origin = ()
    assert list(s.ancestry) == [founders, branch]


def test_the_mark_of_an_accepted_view_is_that_of_the_view_it_becomes() -> None:
    """Two that have accepted the same see it, and no other view has that mark."""
    net = ClusterNet()
    a, b = net.form("ab")
    s, view = net.cores[a]._situation, net.view_of(a)
    assert s.accepted_mark == 0
    s.election.ballot.accepted = Proposal((a, b))
    assert s.accepted_mark == view_mark(View(view.lineage, view.epoch + 1, (a, b)))
    assert 0 <= view_mark(view) < 1 << 63
    assert view_mark(view) == int.from_bytes(view.session[:8], "big") // 2


def test_a_message_is_relayed_by_a_member_that_hears_both_and_by_no_other() -> None:
    """Not by one that does not hear us, nor by one that does not hear the other."""
    net = ClusterNet()
    a, b, c, d = net.form("abcd")
    s, view = net.cores[a]._situation, net.view_of(a)
    s.contacts.disconnect(s.contacts.of(d), "reset", net.now)
    message = Canvass(view.lineage, view.epoch, 1)
    sent_by(s)
    s.send(d, message)
    assert [e.to for e in sent_by(s) if isinstance(e, Send)] == [b]
    s.contacts.unhear(b, a)  # it hears d, but not us
    s.send(d, message)
    assert [e.to for e in sent_by(s) if isinstance(e, Send)] == [c]
    s.contacts.unhear(c, d)  # it hears us, but not d
    s.send(d, message)
    assert sent_by(s) == []
    s.send(a, message)
    assert sent_by(s) == []  # nothing is sent to ourselves
    s.send(Z, message)
    assert sent_by(s) == []
    s.send(c, message)
    (direct,) = sent_by(s)
    assert isinstance(direct, Send)
    assert not isinstance(direct.message, Relayed)


def test_what_an_election_has_to_tell_comes_before_what_follows_from_it() -> None:
    """People read it in the order in which it happened."""
    net = ClusterNet()
    a, _ = net.form("ab")
    s = net.cores[a]._situation
    sent_by(s)
    s.election.split_brain("something odd")
    s.note_once("topic", "it waits")
    events = [effect.event for effect in s.out if isinstance(effect, Note)]
    assert isinstance(events[0], ElectionEvent)
    assert str(events[1]) == "it waits"


def test_a_beat_out_of_turn_follows_a_tenth_of_an_interval_after_the_last() -> None:
    """Of the shorter one, that of the view or that of the preset; and costs a token."""
    net = ClusterNet()
    a, _ = net.form("ab")
    net.run(10)
    s = net.cores[a]._situation
    s.beat()
    s.interval = 5.0
    s.next_beat = s.time + 5
    s.beat_soon()
    assert s.next_beat == pytest.approx(s.time + 0.02)
    tokens = s._eager._tokens
    s._regular_beat = s.time
    s.beat()
    assert s._eager._tokens == tokens  # it was due
    s._regular_beat = s.time + 1
    s.beat()
    assert s._eager._tokens == tokens - 1


def test_an_abort_is_heard_by_the_others_before_the_next_beat() -> None:
    """And only the first of a view counts."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    net.run(5)
    s = net.cores[a]._situation
    s.next_beat = s.time + 9
    s.abort(b, "it crashed")
    assert s.next_beat < s.time + 1
    s.abort(c, "it crashed too")
    assert (s.lost, s.aborted_at) == (b, s.time)


def test_evidence_belongs_to_one_view() -> None:
    """The next one begins without it."""
    net = ClusterNet()
    a, b = net.form("ab")
    s = net.cores[a]._situation
    s.proofs[b], s.reported = "it is dead", {b}
    s.abort(b, "it left", orderly=True, by=b)
    s.forget_evidence()
    assert (s.proofs, s.reported, s.is_aborted, s.lost) == ({}, set(), False, None)
    assert (s.is_loss_orderly, s.lost_by, s.stopped_because) == (False, None, "")


def test_a_loss_is_told_to_no_one_that_is_lost_as_well() -> None:
    """Nor to a process that is not heard: it could not lead."""
    net = ClusterNet()
    a, b, c, d, e = net.form("abcde")
    s = net.cores[e]._situation
    s.proofs[a] = "it is dead"
    s.contacts.disconnect(s.contacts.of(b), "reset", net.now)
    sent_by(s)
    s.report_loss(c, "it crashed")
    assert {effect.to for effect in s.out if isinstance(effect, Send)} == {d}


def test_a_departed_member_is_absent_and_so_is_a_dead_one() -> None:
    """Each by itself."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    s = net.cores[a]._situation
    s.proofs[b] = "it is dead"
    assert s.absent == {b}
    s.election.departed[c] = net.cores[c]._tenure.last_word("bye")
    assert s.absent == {b, c}


# --- contacts ---


def test_links_are_what_both_ends_say() -> None:
    """For every pattern of four, as a plain comparison of all pairs finds them."""
    net = ClusterNet()
    members = net.form("abcd")
    contacts = net.cores[members[0]]._situation.contacts
    others = members[1:]
    for pattern in range(1 << 9):
        for row, one in enumerate(others):
            heard = [m for m in members if m != one]
            chosen = [m for i, m in enumerate(heard) if pattern >> (3 * row + i) & 1]
            contacts.of(one).hears = frozenset(map(mark, [*chosen, one]))  # itself as well
        links = contacts.links(members)
        for i, one in enumerate(members):
            for j, other in enumerate(members):
                both = i != j and contacts.hears(one, other) and contacts.hears(other, one)
                assert bool(links[i] >> j & 1) is both
    unknown = contacts.links([*members, Z])
    assert unknown[4] == 0


def test_a_disconnected_process_hears_nobody_and_says_nothing() -> None:
    """Until it is connected again and speaks; its new card counts from then on."""
    net = ClusterNet()
    a, b = net.form("ab")
    s = net.cores[a]._situation
    contact = s.contacts.of(b)
    s.contacts.disconnect(contact, "reset", net.now)
    assert (contact.beat, contact.hears) == (None, frozenset())
    assert s.health.reason(b) == "its connection ended: reset"
    assert not s.contacts.is_heard(b)
    s.contacts.connect(card("b", port=7), net.now)
    assert contact.card.port == 7


def test_an_echo_of_a_beat_that_is_too_old_counts_for_nothing() -> None:
    """Only the last 256 beats are remembered; and the same beat is taken once."""
    net = ClusterNet()
    a, b = net.form("ab")
    s = net.cores[a]._situation
    contacts, contact = s.contacts, s.contacts.of(b)
    first = contacts.number_beat(50.0, 1.0)
    for number in range(255):
        contacts.number_beat(51.0 + number, 1.0)
    assert first in contacts._sent
    contacts.number_beat(999.0, 1.0)
    assert first not in contacts._sent
    assert len(contacts._sent) == 256
    assert contact.beat is not None
    same = msgspec.structs.replace(contact.beat, hears=())
    assert not contacts.heard(contact, same, net.now, s.time, counts=True)
    assert contact.hears


def test_a_fresh_process_is_free_and_has_announced_nothing() -> None:
    """It is at work nowhere, and nothing has been aborted."""
    core = ClusterCore(card("a"), ClusterConfig(), 5.0)
    s = core._situation
    assert (s.agreed, s.is_released, s.announced_samples, s.samples) == ("", False, 0, 0)
    assert (s.is_aborted, s.is_loss_orderly, s.stopped_because) == (False, False, "")
    assert (s.state, s.phase, s.view, s.bound) == (
        ClusterState.JOINING,
        Phase.JOINING,
        None,
        None,
    )
    assert (s.aborted_at, s.ready_at, s.next_beat) == (5.0, 5.0, 5.0)

"""What was said on leaving a lineage stays said, as long as anybody may ask."""

from __future__ import annotations

import msgspec
import pytest

from potluck._types import Branch, NodeId, ProcessId, View
from potluck.membership.core import ClusterCore
from potluck.membership.events import (
    ClusterConfig,
    ClusterState,
    Effect,
    ElectionEvent,
    Note,
    SendMessage,
)
from potluck.membership.health import HealthStatus
from potluck.membership.messages import (
    CauseCode,
    Charter,
    Commit,
    Departed,
    Heartbeat,
    Phase,
    PreVote,
    ProcessRole,
    Proposal,
    Relayed,
    mark,
)
from potluck.membership.state import LineageHistory, MembershipState, SteadyTime, view_mark
from support.cluster_net import ClusterNet, card

A = ProcessId(NodeId("a" * 32), 1)


def commit(lineage: str, epoch: int) -> Commit:
    """A view that was agreed."""
    return Commit(lineage, epoch, Proposal((A,)))


def test_the_newest_view_is_kept() -> None:
    """An older one does not replace it."""
    history = LineageHistory()
    history.record(commit("x", 3))
    history.record(commit("x", 2))
    assert history.newest("x") == commit("x", 3)
    assert history.newest("y") is None


def test_views_up_to_the_last_word_are_closed() -> None:
    """A later view may be entered again, as a newcomer."""
    history = LineageHistory()
    word = Departed("x", 3, 0, -1, None, "we left")
    history.depart(word)
    assert history.last_word("x") == word
    assert history.is_closed("x", 3)
    assert not history.is_closed("x", 4)
    assert not history.is_closed("y", 1)


def test_views_before_one_that_is_known_are_closed() -> None:
    """Whoever tells of them is behind, and may be alone with them."""
    history = LineageHistory()
    history.record(commit("x", 3))
    assert history.is_closed("x", 2)
    assert not history.is_closed("x", 3)


def test_only_so_many_are_kept() -> None:
    """The oldest are forgotten."""
    history = LineageHistory()
    for number in range(100):
        history.record(commit(str(number), 1))
    assert history.newest("0") is None
    assert history.newest("99") is not None


def test_what_followed_a_view_is_known_whatever_came_first() -> None:
    """Sixteen views of a lineage at most, oldest first."""
    history = LineageHistory()
    for epoch in (6, 2, 4):
        history.record(commit("x", epoch))
    assert [each.epoch for each in history.following("x", 2)] == [4, 6]
    assert history.following("y", 0) == ()
    for epoch in range(7, 40):
        history.record(commit("x", epoch))
    assert [each.epoch for each in history.following("x", 0)] == list(range(24, 40))


def test_lineages_that_dissolve_into_each_other_are_followed_to_an_end() -> None:
    """A circle must not exist; if it does, nobody waits for ever."""
    history = LineageHistory()
    one = Commit("x", 2, Proposal((A,), into="y", into_epoch=2))
    other = Commit("y", 2, Proposal((A,), into="x", into_epoch=2))
    history.record(one)
    history.record(other)
    assert history.followed(one).lineage in {"x", "y"}


def test_a_lineage_is_followed_over_several_ends_to_the_newest_view_there() -> None:
    """What we know ourselves counts if it is newer than what was told."""
    history = LineageHistory()
    first = Commit("x", 2, Proposal((A,), into="y", into_epoch=3))
    assert history.followed(first).view.lineage == "y"
    assert history.followed(first).epoch == 3
    history.record(commit("y", 2))
    assert history.followed(first).epoch == 3
    history.record(commit("y", 3))
    assert history.followed(first) == commit("y", 3)
    history.record(commit("y", 5))
    assert history.followed(first) == commit("y", 5)
    history.record(Commit("y", 6, Proposal((A,), into="z", into_epoch=1)))
    assert history.followed(first).lineage == "z"


def test_the_successor_of_a_view_is_later_or_of_a_child_that_branched_off_no_earlier() -> None:
    """The lineage itself counts before its children."""
    history = LineageHistory()
    child = Commit("y", 4, Proposal((A,)), Charter(ancestry=(Branch("x", 3),)))
    history.record(child)
    assert history.successor("x", 3) == child
    assert history.successor("x", 2) == child
    assert history.successor("x", 4) is None
    assert history.successor("z", 1) is None
    history.record(commit("x", 4))
    assert history.successor("x", 3) == commit("x", 4)
    assert history.successor("x", 4) is None


def test_the_newest_view_of_a_child_is_where_to_go_unless_the_child_has_come_back() -> None:
    """A child that dissolved into its parent leads nowhere else."""
    history = LineageHistory()
    charter = Charter(ancestry=(Branch("x", 3),))
    for epoch in (1, 2):
        history.record(Commit("y", epoch, Proposal((A,)), charter))
    successor = history.successor("x", 3)
    assert successor is not None
    assert (successor.lineage, successor.epoch) == ("y", 2)
    history.record(Commit("y", 3, Proposal((A,), into="x", into_epoch=4), charter))
    assert history.successor("x", 3) is None


def test_a_view_that_we_left_for_a_child_that_has_come_back_is_known() -> None:
    """Only that very view, and only once the child has dissolved into its lineage."""
    history = LineageHistory()
    history.record(commit("another", 1))
    history.record(commit("y", 1))
    assert not history.has_come_back("x", 3)
    history.depart(Departed("x", 3, 0, -1, None, "it continues in another lineage"))
    assert not history.has_come_back("x", 3)
    history.record(Commit("y", 2, Proposal((A,), into="x", into_epoch=4)))
    assert history.has_come_back("x", 3)
    assert not history.has_come_back("x", 2)
    assert not history.has_come_back("z", 3)


def test_the_newest_lineages_and_words_are_kept() -> None:
    """Sixty-four of each; what is recorded again counts as new."""
    history = LineageHistory()
    history.record(commit("first", 1))
    for number in range(63):
        history.record(commit(str(number), 1))
    assert history.newest("first") is not None
    history.record(commit("first", 2))
    history.record(commit("63", 1))
    assert history.newest("first") is not None
    assert history.newest("0") is None
    assert history.newest("1") is not None


# --------------------------------------------------------------------------------------------------
# What heartbeats say, who is told of what, and when a beat may be sent out of turn.

Z = card("z").process


def beats(effects: list[Effect]) -> dict[ProcessId, Heartbeat]:
    """Heartbeats, by who gets them."""
    sent = [effect for effect in effects if isinstance(effect, SendMessage)]
    return {each.to: each.message for each in sent if isinstance(each.message, Heartbeat)}


def sent_by(s: MembershipState) -> list[Effect]:
    """What is on its way out, which it forgets."""
    out, s.out = s.out, []
    return out


def test_a_heartbeat_says_how_long_ago_the_confirmed_one_came() -> None:
    """So a round trip is measured without the time in between; nothing heard, nothing said."""
    core = ClusterCore(card("a"), ClusterConfig(min_nodes=2), 0.0)
    first = beats(core.connected(card("b"), 0.0))[card("b").process]
    assert first.sequence == 1
    assert (first.echo, first.held, first.bound, first.bound_epoch) == (0, 0.0, "", 0)
    core.receive(card("b").process, Heartbeat(7, 0, 0.0, Phase.JOINING, ()), 0.1)
    core._state.clock.advance(0.25)
    core._state.out = []
    core._state.beat()
    later = beats(core._state.out)[card("b").process]
    assert later.echo == 7
    assert later.held == pytest.approx(0.15)


def test_round_trips_are_measured_without_the_time_at_the_other_end() -> None:
    """What was sent 0.1 s ago and held for 0.06 s there took 0.04 s; never less than nothing."""
    for held, took in ((0.06, 0.04), (0.9, 0.0)):
        core = ClusterCore(card("a"), ClusterConfig(min_nodes=2), 1.0)
        b = card("b").process
        core.connected(card("b"), 1.0)
        echo = core._state.contacts.sequence
        core.receive(b, Heartbeat(1, echo, held, Phase.JOINING, ()), 1.1)
        (peer,) = core.health.summary(1.1).peers
        assert peer.round_trip == pytest.approx(took)


def test_lateness_lengthens_elections_once_it_is_a_quarter_of_an_interval() -> None:
    """Answers of a process that runs late take longer."""
    net = ClusterNet()
    a, b = net.form("ab")
    s = net.cores[a]._state
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
    s = net.cores[c]._state
    one, two = s.why_waiting([a]), s.why_waiting([a, b])
    assert one.startswith("waiting for a: it was in view 1 and may")
    assert one.endswith("To continue without it: potluck continue")
    assert "they were in view 1" in two
    assert two.endswith("To continue without them: potluck continue")


def test_a_cause_names_the_best_address_and_how_long_it_was_silent() -> None:
    """Up to sixteen in full; of more only names."""
    net = ClusterNet()
    a, b, c = net.form("abc", hosts=("10.0.0.1", "10.0.0.2"))
    s = net.cores[a]._state
    cause = s.cause(c, CauseCode.SILENT, "it is quiet")
    assert cause.host == "10.0.0.1"
    assert cause.silent_for == s.health.silence(c, s.now) < 0.3
    assert s.cause(a, CauseCode.UNREACHABLE, "").silent_for == 0.0
    assert len(s.cause(b, CauseCode.SILENT, "x" * 300).reason) == 200
    for count, is_full in ((16, True), (17, False)):
        causes = s.causes([(c, CauseCode.SILENT, "it is quiet")] * count)
        assert all(bool(each.reason) is is_full for each in causes)


def test_a_lineage_is_a_descendant_only_by_a_branch_of_ours_that_is_late_enough() -> None:
    """One such branch is enough, among others; a free process has no descendants."""
    net = ClusterNet()
    a, _ = net.form("ab")
    s = net.cores[a]._state
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
    s = net.cores[a]._state
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
    s, view = net.cores[a]._state, net.view_of(a)
    assert s.accepted_mark == 0
    s.election.ballot.accepted = Proposal((a, b))
    assert s.accepted_mark == view_mark(View(view.lineage, view.epoch + 1, (a, b)))
    assert 0 <= view_mark(view) < 1 << 63
    assert view_mark(view) == int.from_bytes(view.session[:8], "big") // 2


def test_a_message_is_relayed_by_a_member_that_hears_both_and_by_no_other() -> None:
    """Not by one that does not hear us, nor by one that does not hear the other."""
    net = ClusterNet()
    a, b, c, d = net.form("abcd")
    s, view = net.cores[a]._state, net.view_of(a)
    s.contacts.disconnect(s.contacts.of(d), "reset", net.now)
    message = PreVote(view.lineage, view.epoch, 1)
    sent_by(s)
    s.send(d, message)
    assert [e.to for e in sent_by(s) if isinstance(e, SendMessage)] == [b]
    s.contacts.unhear(b, a)  # it hears d, but not us
    s.send(d, message)
    assert [e.to for e in sent_by(s) if isinstance(e, SendMessage)] == [c]
    s.contacts.unhear(c, d)  # it hears us, but not d
    s.send(d, message)
    assert sent_by(s) == []
    s.send(a, message)
    assert sent_by(s) == []  # nothing is sent to ourselves
    s.send(Z, message)
    assert sent_by(s) == []
    s.send(c, message)
    (direct,) = sent_by(s)
    assert isinstance(direct, SendMessage)
    assert not isinstance(direct.message, Relayed)


def test_what_an_election_has_to_tell_comes_before_what_follows_from_it() -> None:
    """People read it in the order in which it happened."""
    net = ClusterNet()
    a, _ = net.form("ab")
    s = net.cores[a]._state
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
    s = net.cores[a]._state
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
    s = net.cores[a]._state
    s.next_beat = s.time + 9
    s.abort(b, "it crashed")
    assert s.next_beat < s.time + 1
    s.abort(c, "it crashed too")
    assert (s.lost, s.aborted_at) == (b, s.time)


def test_evidence_belongs_to_one_view() -> None:
    """The next one begins without it."""
    net = ClusterNet()
    a, b = net.form("ab")
    s = net.cores[a]._state
    s.proofs[b], s.reported = "it is dead", {b}
    s.abort(b, "it left", orderly=True, by=b)
    s.forget_evidence()
    assert (s.proofs, s.reported, s.is_aborted, s.lost) == ({}, set(), False, None)
    assert (s.is_loss_orderly, s.lost_by, s.stopped_because) == (False, None, "")


def test_a_loss_is_told_to_no_one_that_is_lost_as_well() -> None:
    """Nor to a process that is not heard: it could not lead."""
    net = ClusterNet()
    a, b, c, d, e = net.form("abcde")
    s = net.cores[e]._state
    s.proofs[a] = "it is dead"
    s.contacts.disconnect(s.contacts.of(b), "reset", net.now)
    sent_by(s)
    s.report_loss(c, "it crashed")
    assert {effect.to for effect in sent_by(s) if isinstance(effect, SendMessage)} == {d}
    s.health.lost(d, net.now, "it is late")  # connected, but not heard
    s.report_loss(c, "it crashed")
    assert sent_by(s) == []


def test_a_departed_member_is_absent_and_so_is_a_dead_one() -> None:
    """Each by itself."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    s = net.cores[a]._state
    assert s.absent == set()
    s.proofs[b] = "it is dead"
    assert s.absent == {b}
    s.election.departed[c] = net.cores[c]._installer.last_word("bye")
    assert s.absent == {b, c}
    del s.proofs[b]
    assert s.absent == {c}


def test_those_left_out_belong_to_a_lineage() -> None:
    """A later view of it keeps them; another lineage does not."""
    net = ClusterNet()
    a, b = net.form("ab")
    s, view = net.cores[a]._state, net.view_of(a)
    s.left_out = {Z: "z"}
    s.bind(Commit(view.lineage, view.epoch + 1, Proposal((a, b))))
    assert s.left_out == {Z: "z"}
    s.bind(Commit("e" * 32, 1, Proposal((a, b))))
    assert s.left_out == {}


def test_a_beat_gives_no_lease_once_its_sender_has_accepted_a_next_view() -> None:
    """Unless the other one has accepted the same, and both are in it."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    newcomer = net.add("d", config=ClusterConfig(min_nodes=9))
    net.link(a, newcomer)
    net.run(0.05)
    s = net.cores[a]._state

    def withheld() -> set[ProcessId]:
        s.beat()
        return {who for who, each in beats(sent_by(s)).items() if each.withholds}

    def accepts(who: ProcessId, accepted: int) -> None:
        contact = s.contacts.of(who)
        assert contact.beat is not None
        contact.beat = msgspec.structs.replace(contact.beat, accepted=accepted)

    assert withheld() == set()
    s.election.ballot.accepted = Proposal((a, b))
    assert withheld() == {b, c}
    accepts(b, s.accepted_mark)
    accepts(c, s.accepted_mark)
    assert withheld() == {c}
    s.election.ballot.accepted = Proposal((b, c))
    accepts(b, s.accepted_mark)
    assert withheld() == {b, c}
    s.election.ballot.accepted = Proposal((a, b, c), into="e" * 32)
    accepts(b, 0)
    assert withheld() == {b, c}


def test_a_greeting_gives_no_lease_before_the_other_has_said_where_it_is() -> None:
    """Though what it said on the last connection is not old."""
    net = ClusterNet()
    a, b = net.form("ab")
    core = net.cores[a]
    core.disconnected(b, "reset by peer", net.now)
    assert beats(core.connected(card("b"), net.now))[b].withholds


def beats_out_of_turn(s: MembershipState) -> int:
    """How many heartbeats may follow each other at this moment."""
    for number in range(99):
        s.next_beat = s._regular_beat = s.time + 9
        s.beat_soon()
        if s.next_beat == s.time + 9:
            return number
        s.beat()
    return 99


def test_ten_beats_out_of_turn_are_sent_at_once_and_then_four_in_a_second() -> None:
    """However much there is to tell."""
    net = ClusterNet()
    a, _ = net.form("ab")
    net.run(10)
    s = net.cores[a]._state
    assert beats_out_of_turn(s) == 10
    s.clock.advance(s.time + 1)
    assert beats_out_of_turn(s) == 4


def test_in_a_crowd_a_beat_out_of_turn_costs_more() -> None:
    """One for each eight contacts: eighty use up all at once."""
    core = ClusterCore(card("a"), ClusterConfig(min_nodes=99), 0.0)
    s = core._state
    for number in range(80):
        core.connected(card("b", number, slot=number), 0.0)
    s.clock.advance(9.0)
    assert beats_out_of_turn(s) == 1
    s.clock.advance(9.26)
    assert beats_out_of_turn(s) == 1


# --- pace ---


@pytest.mark.parametrize(("others", "min_nodes"), [(33, 1), (2, 34)])
def test_without_a_view_the_beat_follows_the_number_of_processes_around(
    others: int, min_nodes: int
) -> None:
    """Those that are here, or those that are asked for: thirty-four beat once in a second."""
    core = ClusterCore(card("a"), ClusterConfig(min_nodes=min_nodes, solo_delay=99), 0.0)
    cards = [card("b", number, slot=number) for number in range(others)]
    greetings = [beats(core.connected(each, 0.0)) for each in cards]
    beat = greetings[-1][cards[-1].process]
    assert beat.pause_after == pytest.approx(5.0)
    assert core.health.config.interval == pytest.approx(1.0)
    assert core.health.config.pause_after == pytest.approx(5.0)


def test_a_view_that_does_not_fix_both_numbers_is_paced_by_its_size() -> None:
    """The preset holds for all of it."""
    net = ClusterNet()
    a, b = net.form("ab")
    s = net.cores[a]._state
    for interval, pause in ((5.0, 0.0), (0.0, 5.0), (0.0, 0.0)):
        s.keep_pace(Proposal((a, b), interval=1.0, pause_after=5.0))
        assert (s.interval, s.pause_after) == (1.0, 5.0)
        s.keep_pace(Proposal((a, b), interval=interval, pause_after=pause))
        assert (s.interval, s.pause_after) == (0.2, 1.0)


def test_a_lease_may_last_for_four_pauses_of_this_view_or_of_the_one_before() -> None:
    """The longer one counts: a member that has not entered yet may still use it."""
    net = ClusterNet()
    a, b = net.form("ab")
    s = net.cores[a]._state
    s.keep_pace(Proposal((a, b), interval=0.2, pause_after=3.0))
    assert s.longest_lease == 12.0
    s.keep_pace(Proposal((a, b), interval=0.2, pause_after=1.0))
    assert s.longest_lease == 12.0
    s.keep_pace(Proposal((a, b), interval=0.2, pause_after=2.0))
    assert s.longest_lease == 8.0


def test_a_lease_ends_with_the_pause_it_was_given_for_and_after_four_of_the_view() -> None:
    """Whichever is sooner."""
    net = ClusterNet()
    a, b = net.form("ab")
    s = net.cores[a]._state
    contact = s.contacts.of(b)
    for leased_for, pause, age, holds in [
        (1.0, 1.0, 1.0, True),
        (1.0, 1.0, 1.01, False),
        (9.0, 2.0, 7.9, True),
        (9.0, 2.0, 8.1, False),
    ]:
        contact.leased_for, contact.leased_at, s.pause_after = leased_for, 50.0, pause
        s.clock.current = 50.0 + age
        assert s.has_lease(contact) is holds


def test_a_member_is_silent_after_twice_the_pause_that_it_announced() -> None:
    """Not heard for that long; without a confirmation for three times that."""
    net = ClusterNet()
    a, _, c = net.form("abc")
    s = net.cores[a]._state
    net.cut_off([c], [a])
    net.run(1.7)
    assert not s.is_silent(c)
    net.run(0.6)
    assert s.health.status(c) is HealthStatus.DEAD
    assert s.is_silent(c)
    s.contacts.of(c).announced = 1.5
    assert not s.is_silent(c)
    net.run(0.8)
    assert s.is_silent(c)


def test_a_member_that_is_heard_but_confirms_nothing_is_silent_after_three_pauses() -> None:
    """It may have found us silent long ago."""
    net = ClusterNet()
    a, _, c = net.form("abc")
    s = net.cores[a]._state
    net.cut.add((a, c))
    net.run(2.8)
    assert s.contacts.is_heard(c)
    assert not s.is_silent(c)
    net.run(0.5)
    assert s.contacts.is_heard(c)
    assert s.is_silent(c)


def test_a_member_that_is_heard_but_confirms_nothing_is_lost_after_one_and_a_half_pauses() -> None:
    """Then operations stop; a little deafness stops nothing."""
    net = ClusterNet()
    a, _, c = net.form("abc")
    s = net.cores[a]._state
    net.cut.add((a, c))
    net.run(1.25)
    assert not s.is_lost(c)
    net.run(0.45)
    assert s.contacts.is_heard(c)
    assert s.is_lost(c)


def test_a_process_relies_on_the_pause_of_its_card_until_it_announces_one() -> None:
    """And on an hour at most."""
    core = ClusterCore(card("a"), ClusterConfig(min_nodes=9), 0.0)
    b = card("b").process
    core.connected(card("b", pause_after=4.0), 0.0)
    s = core._state
    contact = s.contacts.of(b)
    assert s.pause_of(contact) == 4.0
    core.receive(b, Heartbeat(1, 0, 0.0, Phase.JOINING, (), pause_after=2.0), 0.1)
    assert s.pause_of(contact) == 2.0
    core.receive(b, Heartbeat(2, 0, 0.0, Phase.JOINING, (), pause_after=9999.0), 0.2)
    assert s.pause_of(contact) == 3600.0


def test_the_time_to_wait_is_never_so_short_that_the_driver_spins() -> None:
    """At least a fifth of a millisecond, however the sums are rounded."""
    time = SteadyTime(1e9)
    assert time.on_the_wall(1e9 + 1e-6) == 1e9 + 0.0002
    assert time.on_the_wall(1e9 + 0.5) == 1e9 + 0.5


# --- contacts ---


def test_links_are_what_both_ends_say() -> None:
    """For every pattern of four, as a plain comparison of all pairs finds them."""
    net = ClusterNet()
    members = net.form("abcd")
    contacts = net.cores[members[0]]._state.contacts
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


def test_a_process_that_fell_silent_is_linked_to_nobody_whatever_it_said_before() -> None:
    """Its last heartbeat still says that it hears all; we do not hear it any more."""
    for letters, lone in (("ab", "b"), ("abcd", "c")):
        net = ClusterNet()
        members = net.form(letters)
        a, silent = members[0], card(lone).process
        net.cut |= {(silent, a)}
        net.run(1.1)
        contacts = net.cores[a]._state.contacts
        assert contacts.hears(silent, a)
        links = contacts.links(members)
        assert not links[0] >> members.index(silent) & 1
        assert not links[members.index(silent)] & 1


def test_a_process_that_is_not_known_is_heard_by_nobody() -> None:
    """Least of all because we are."""
    net = ClusterNet()
    a, b = net.form("ab")
    contacts = net.cores[a]._state.contacts
    assert contacts.hears(b, a)
    assert not contacts.hears(b, Z)
    assert not contacts.hears(Z, a)


def test_heartbeats_name_the_members_that_are_heard_and_confirm_it() -> None:
    """No observer, and no member that has not confirmed hearing us for a pause."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    net.add("o", role=ProcessRole.OBSERVER)
    net.mesh()
    net.run(0.5)
    s = net.cores[a]._state

    def named() -> set[int]:
        s.beat()
        return set(beats(sent_by(s))[b].hears)

    assert named() == {mark(b), mark(c)}
    net.cut |= {(a, c)}
    net.run(1.2)
    assert s.contacts.is_heard(c)
    assert s.is_member(c)
    assert named() == {mark(b)}


def test_the_card_of_a_process_that_was_here_last_is_kept_longest() -> None:
    """A thousand and twenty-four cards; one that came back counts as new."""
    net = ClusterNet()
    a = net.add("a")
    contacts = net.cores[a]._state.contacts
    cards = [card("b", number, name=f"visit {number}") for number in range(1, 1026)]
    for each in cards[:1024]:
        contacts.remember(each)
    assert contacts.last_card(cards[0].process).name == "visit 1"
    contacts.remember(cards[0])
    contacts.remember(cards[1024])
    assert contacts.last_card(cards[0].process).name == "visit 1"
    assert contacts.last_card(cards[1].process).name == ""
    assert contacts.last_card(cards[2].process).name == "visit 3"


def test_a_disconnected_process_hears_nobody_and_says_nothing() -> None:
    """Until it is connected again and speaks; its new card counts from then on."""
    net = ClusterNet()
    a, b = net.form("ab")
    s = net.cores[a]._state
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
    s = net.cores[a]._state
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
    s = core._state
    assert (s.pledge, s.is_released, s.announced_samples, s.samples) == (None, False, 0, 0)
    assert (core.reason, core.is_insisting) == ("no other machine has joined yet", False)
    assert (s.is_aborted, s.is_loss_orderly, s.stopped_because) == (False, False, "")
    assert (s.state, s.phase, s.view, s.bound) == (
        ClusterState.JOINING,
        Phase.JOINING,
        None,
        None,
    )
    assert (s.aborted_at, s.ready_at, s.next_beat) == (5.0, 5.0, 5.0)


def test_a_fresh_process_has_lost_nobody() -> None:
    """Nobody has died, departed or been reported, before there was anybody."""
    s = ClusterCore(card("a"), ClusterConfig(), 5.0)._state
    assert (s.lost, s.lost_by, s.reported, s.departed) == (None, None, set(), set())
    assert (s.proofs, s.ended, s.expelled) == ({}, {}, {})


def test_that_a_connection_ended_is_told_before_the_next_beat() -> None:
    """Others count on what we hear: also where the one that went was in no view with us."""
    core = ClusterCore(card("a"), ClusterConfig(min_nodes=3), 0.0)
    for other in "bc":
        core.connected(card(other), 0.0)
    core.tick(1.0)
    s = core._state
    s.next_beat = 1.2
    core.disconnected(card("b").process, "reset by peer", 1.05)
    assert s.next_beat == 1.05


def test_a_process_wishes_for_no_place_unless_a_launcher_says_one() -> None:
    """So it comes after all that have one, in the order of the ids."""
    assert card("a").place == -1

"""The beginning of a lineage: all agree, or nobody is bound for long."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from potluck._types import Branch, ProcessId, View
from potluck.membership.core import ClusterCore
from potluck.membership.events import (
    ClusterConfig,
    ClusterState,
    Effect,
    ElectionConfig,
    Installed,
    MembershipChange,
    MembershipEvent,
    Note,
    SendMessage,
)
from potluck.membership.messages import (
    CauseCode,
    Charter,
    ClusterMessage,
    Commit,
    Found,
    Founded,
    Heartbeat,
    MergeAnswer,
    MergeRequest,
    Phase,
    ProcessRole,
    Proposal,
    Propose,
    mark,
)
from potluck.membership.state import Pledge
from support.cluster_net import ClusterNet, card

A, B, C = (card(letter).process for letter in "abc")
TIMEOUT = ElectionConfig().election_timeout


def answers(effects: list[Effect]) -> list[Founded]:
    """What was answered to foundings."""
    sent = [effect.message for effect in effects if isinstance(effect, SendMessage)]
    return [message for message in sent if isinstance(message, Founded)]


def beat(number: int, *hears: ProcessId, **facts: Any) -> Heartbeat:
    """A heartbeat of a process without a view that hears some others."""
    facts = {"phase": Phase.JOINING, **facts}
    marks = tuple(mark(process) for process in hears)
    return Heartbeat(number, 1, 0.0, hears=marks, **facts)


def joiner(me: str, *others: str, now: float = 0.0, **facts: Any) -> ClusterCore:
    """A process that hears others, and they it and each other."""
    core = ClusterCore(card(me), ClusterConfig(), now)
    for other in others:
        core.connected(card(other), now)
    for other in others:
        heard = [card(letter).process for letter in (me, *others) if letter != other]
        core.receive(card(other).process, beat(1, *heard, **facts), now)
    return core


def found(*members: ProcessId, lineage: str = "f" * 32) -> Found:
    """A proposal to begin together."""
    return Found(lineage, Proposal(members, "let us begin"))


def test_whoever_agreed_agrees_to_nothing_else_for_a_moment() -> None:
    """A second founder is refused until the first has had its time."""
    core = joiner("c", "a", "b")
    assert answers(core.receive(A, found(A, B, C), 0.01))[0].is_agreed
    (refused,) = answers(core.receive(B, found(B, C, lineage="e" * 32), 0.02))
    assert refused.reason == "it has agreed to another start"
    assert answers(core.receive(A, found(A, C, lineage="d" * 32), 0.03))[0].is_agreed
    later = 0.05 + 2 * TIMEOUT
    core.tick(later)
    for sender in (A, B):
        core.receive(sender, beat(2, A, B, C), later)
    assert answers(core.receive(B, found(B, C, lineage="e" * 32), later))[0].is_agreed


@pytest.mark.parametrize(("early", "is_agreed"), [(0.001, False), (0.0, True)])
def test_a_pledge_is_over_at_its_end(early: float, *, is_agreed: bool) -> None:
    """The founder has stopped waiting long before, so that others need not wait either."""
    core = joiner("c", "a", "b", now=64.0)
    (first,) = answers(core.receive(A, found(A, C), 64.0))
    assert first.is_agreed
    moment = 64.0 + 2 * TIMEOUT - early
    (second,) = answers(core.receive(B, found(B, C, lineage="e" * 32), moment))
    assert second.is_agreed is is_agreed


def test_a_pledge_outlasts_the_connection_to_its_founder() -> None:
    """The founder may have our answer, and begin; only its end, or time, frees us."""
    core = joiner("c", "a", "b")
    core.receive(A, found(A, B, C), 0.01)
    core.disconnected(A, "reset", 0.02)
    (refused,) = answers(core.receive(B, found(B, C, lineage="e" * 32), 0.03))
    assert refused.reason == "it has agreed to another start"
    core = joiner("c", "a", "b")
    core.receive(A, found(A, B, C), 0.01)
    core.connected(card("a", incarnation=2), 0.02)  # the slot has another process by now
    core.tick(0.03)
    assert answers(core.receive(B, found(B, C, lineage="e" * 32), 0.04))[0].is_agreed


def test_a_process_that_agreed_to_begin_enters_no_other_view_meanwhile() -> None:
    """A cluster that counts on it is answered when the founding is over, one way or the other."""
    elsewhere = Commit("e" * 32, 2, Proposal((B, C)))
    core = joiner("c", "a", "b")
    core.receive(A, found(A, C), 0.01)
    assert not [e for e in core.receive(B, elsewhere, 0.02) if isinstance(e, SendMessage)]
    assert core.view is None
    core.receive(A, Commit("f" * 32, 1, Proposal((A, C))), 0.03)
    assert core.view is not None
    assert core.view.members == (A, C)
    core = joiner("c", "a", "b")
    core.receive(A, found(A, C), 0.01)
    core.receive(B, elsewhere, 0.02)
    core.receive(B, elsewhere, 0.02 + 2 * TIMEOUT)
    assert core.view is not None
    assert core.view.members == (B, C)


def test_a_leader_that_agreed_to_begin_elsewhere_commits_nothing_meanwhile() -> None:
    """The founder may begin at any moment, and two views would be at work."""
    net = ClusterNet()
    a, b = net.form("ab")
    until = net.now + 2 * TIMEOUT
    net.cores[a]._state.pledge = Pledge(C, "e" * 32, until)
    net.kill(b)
    net.run(1.9 * TIMEOUT)
    assert net.view_of(a).members == (a, b)
    net.run(0.5)
    assert net.view_of(a).members == (a,)


def test_a_leader_that_may_not_commit_yet_goes_on_asking() -> None:
    """A question that was lost is asked again, so that the view follows as soon as it may."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    until = net.now + 3 * TIMEOUT
    net.cores[a]._state.pledge = Pledge(card("z").process, "e" * 32, until)
    net.kill(c)
    asked: list[float] = []

    def is_first(_sender: ProcessId, to: ProcessId, message: ClusterMessage) -> bool:
        if isinstance(message, Propose) and to == b:
            asked.append(net.now)
            return len(asked) == 1
        return False

    net.dropped = is_first
    net.run(until - net.now - 0.01)
    assert net.view_of(a).members == (a, b, c)
    assert len(asked) > 1
    net.run(0.5)
    assert net.agreed() == "ab"


def test_a_founder_that_was_held_up_does_not_begin_with_answers_that_are_old() -> None:
    """Those who gave them are free by now, and may be elsewhere."""
    core = joiner("a", "b")
    mine = founding(core)
    core.receive(B, Founded(mine.lineage, is_agreed=True), 0.17 + TIMEOUT)
    assert core.view is None


def test_an_answer_that_comes_when_the_attempt_is_over_begins_nothing() -> None:
    """At that very moment the attempt is begun anew; just before it the answer counts."""
    for early, begins in ((0.001, True), (0.0, False)):
        core = joiner("a", "b")
        mine = founding(core)
        attempt = core._founding._attempt
        assert attempt is not None
        core.receive(B, Founded(mine.lineage, is_agreed=True), attempt.until - early)
        assert (core.view is not None) is begins


def test_a_founder_does_not_begin_beside_a_cluster_that_it_has_met_meanwhile() -> None:
    """Nor does a process agree to that: both may be let in there."""
    at_work: dict[str, Any] = {"phase": Phase.ACTIVE, "lineage": "e" * 32, "epoch": 1, "size": 1}
    at_work |= {"bound": "e" * 32, "bound_epoch": 1, "leader": C}
    words = "waiting for c to let us into a cluster of 1"
    founder = joiner("a", "b")
    mine = founding(founder)
    invited = joiner("b", "a")
    for core in (founder, invited):
        core.connected(card("c"), 0.17)
        core.receive(C, beat(1, A, B, **at_work), 0.17)
    founder.receive(B, Founded(mine.lineage, is_agreed=True), 0.18)
    assert founder.view is None
    assert founder.reason == words
    (refused,) = answers(invited.receive(A, found(A, B), 0.18))
    assert refused.reason == words


def test_foundings_that_cannot_be_are_refused_in_words() -> None:
    """Not in it, not hearing somebody, or already in a view."""
    core = joiner("b", "a")
    (refused,) = answers(core.receive(A, found(A), 0.01))
    assert refused.reason == "one of the two processes is not a member of it"
    (refused,) = answers(core.receive(A, found(A, B, C), 0.01))
    assert "does not hear cccccccc" in refused.reason
    (refused,) = answers(core.receive(A, Found("f" * 32, Proposal((A, B)), Charter("any")), 0.01))
    assert refused.reason == "it uses quorum='majority'"
    child = Charter(ancestry=(Branch("e" * 32, 3),))
    (refused,) = answers(core.receive(A, Found("f" * 32, Proposal((A, B)), child), 0.01))
    assert refused.reason == "it does not belong to the lineage that is to be continued"
    core.receive(A, Commit("f" * 32, 1, Proposal((A, B))), 0.02)
    (refused,) = answers(core.receive(A, found(A, B), 0.03))
    assert refused.reason == "it belongs to another lineage"
    early = ClusterCore(card("b"), ClusterConfig(min_nodes=3), 0.0)
    early.connected(card("a"), 0.0)
    early.receive(A, beat(1, B), 0.0)
    (refused,) = answers(early.receive(A, found(A, B), 0.01))
    assert refused.reason == "it waits for 3 processes"


def test_a_free_process_in_a_cluster_of_observers_founds_nothing() -> None:
    """A process that just left the joining phase is asked in vain."""
    core = joiner("b", "a")
    core._state.ready_at = 5.0
    (refused,) = answers(core.receive(A, found(A, B), 0.01))
    assert refused.reason == "it is not looking for a cluster now"


def founding(core: ClusterCore) -> Found:
    """Let a process that is first begin; what it proposed."""
    for now in (0.05, 0.11, 0.16):
        for effect in core.tick(now):
            if isinstance(effect, SendMessage) and isinstance(effect.message, Found):
                return effect.message
    raise AssertionError


def test_of_two_founders_the_one_that_comes_first_wins() -> None:
    """A founder gives way to the one that comes first, and to no other."""
    core = joiner("a", "b")
    founding(core)
    (refused,) = answers(core.receive(B, found(A, B), 0.17))
    assert refused.reason == "it is starting the cluster itself"
    late = joiner("b", "c")
    mine = founding(late)
    late.connected(card("a"), 0.17)
    late.receive(A, beat(1, B, C), 0.17)
    assert answers(late.receive(A, found(A, B, C), 0.18))[0].is_agreed
    assert late.receive(C, Founded(mine.lineage, is_agreed=True), 0.19) is not None
    assert late.view is None  # our own attempt is over


def test_ranks_that_a_launcher_wishes_hold_in_the_first_view() -> None:
    """A process without a wish comes after all that have one."""
    net = ClusterNet()
    config = ClusterConfig(min_nodes=4)
    a, b, c, d = (
        net.add(letter, config=config, place=place)
        for letter, place in {"a": 2, "b": -1, "c": 0, "d": 1}.items()
    )
    net.mesh()
    net.run(3)
    assert {net.view_of(each).members for each in (a, b, c, d)} == {(c, d, a, b)}


def test_one_that_is_connected_to_some_is_waited_for_for_five_delays() -> None:
    """It may hear all of them soon; the lineage has a name of thirty-two digits."""
    net = ClusterNet()
    a, b, c = (net.add(letter, config=ClusterConfig(min_nodes=2)) for letter in "abc")
    net.cut_off([b], [c])
    net.mesh()
    begun = net.now
    net.run(1)
    assert len(net.view_of(a).lineage) == 32
    first = next(time for time, _, effect in net.effects if isinstance(effect, Installed))
    assert first - begun == pytest.approx(0.5, abs=0.05)


def test_an_unanswered_founding_is_begun_anew() -> None:
    """Under another name, so that late answers count for nothing."""
    core = joiner("a", "b")
    mine = founding(core)
    now = 0.17
    again = None
    for step in range(12):
        now = 0.2 + 0.05 * step
        effects = core.receive(B, beat(2 + step, A), now) + core.tick(now)
        found_again = [e.message for e in effects if isinstance(e, SendMessage)]
        again = next((m for m in found_again if isinstance(m, Found)), again)
    assert again is not None
    assert again.lineage != mine.lineage
    core.receive(B, Founded(mine.lineage, is_agreed=True), now)
    assert core.view is None


def test_a_refused_founding_waits_and_says_why() -> None:
    """The founder tries again after a moment."""
    core = joiner("a", "b")
    mine = founding(core)
    effects = core.receive(B, Founded(mine.lineage, is_agreed=False, reason="not now"), 0.17)
    assert any("not now" in str(getattr(effect, "event", "")) for effect in effects)
    assert core.view is None


def test_a_cluster_that_cannot_continue_is_waited_for_without_end() -> None:
    """It may still be the one that is at work; only a person can say that it is not."""
    other = "f" * 32
    facts: dict[str, Any] = {"phase": Phase.PAUSED, "lineage": other, "epoch": 1, "size": 2}
    facts["bound"] = other
    core = joiner("a", "b", **facts)
    core.tick(1.5)
    for number in range(2, 40):
        core.receive(B, beat(number, A, **facts), 0.8 * number)
        core.tick(0.8 * number + 0.1)
    assert core.reason == "waiting for b, which cannot continue yet"
    assert core.state is ClusterState.JOINING


def test_a_stranger_without_links_to_all_is_waited_for_a_little() -> None:
    """Half a second is enough for slow connections; then those who are complete begin."""
    net = ClusterNet()
    a, b, c = (net.add(letter) for letter in "abc")
    net.cut |= {(b, c), (c, b)}
    net.mesh()
    net.run(0.4)
    assert net.cores[a].view is None
    net.run(0.5)
    assert net.view_of(a).members == (a, b)
    assert net.cores[c].view is None
    assert "waiting for" in net.cores[c].reason


# --- when, by whom, and with which words ---


def keep(core: ClusterCore, number: int, now: float, *others: str, **facts: Any) -> list[Effect]:
    """Let a process hear others that all hear each other, and look at the time."""
    me = core.me.process
    everybody = [me, *(card(other).process for other in others)]
    effects: list[Effect] = []
    for other in others:
        said = beat(number, *(who for who in everybody if who.node[0] != other), **facts)
        effects += core.receive(card(other).process, said, now)
    return effects + core.tick(now)


def foundings(effects: list[Effect]) -> list[Found]:
    """What is proposed as a beginning."""
    sent = [effect.message for effect in effects if isinstance(effect, SendMessage)]
    return [message for message in sent if isinstance(message, Found)]


def test_a_founding_that_failed_is_tried_again_after_the_delay_of_a_new_group() -> None:
    """Unanswered or refused: not at once, under a new name, and what it waits for is known."""
    delay = ElectionConfig().connection_delay
    for refused in (True, False):
        core = joiner("a", "b")
        first = founding(core)
        now = 0.17
        attempt = core._founding._attempt
        assert attempt is not None
        assert attempt.until in core._founding.deadlines
        if refused:
            core.receive(B, Founded(first.lineage, is_agreed=False, reason="not now"), now)
        else:
            now = attempt.until
            keep(core, 2, now - 0.05, "b")
            core.tick(now)
        assert core._founding._attempt is None
        core.receive(B, Founded(first.lineage, is_agreed=True), now)
        assert core.view is None
        assert not foundings(keep(core, 3, now + 0.9 * delay, "b"))
        (again,) = foundings(keep(core, 4, now + 1.1 * delay, "b"))
        assert again.lineage != first.lineage


def test_whoever_has_agreed_founds_nothing_itself_meanwhile() -> None:
    """For two election timeouts; then it may."""
    core = joiner("a", "b")
    core.receive(B, found(A, B), 0.01)
    assert core._state.has_agreed_to("f" * 32)
    assert core._founding.deadlines == (0.01 + 2 * TIMEOUT, None)
    number = 2
    now = 0.05
    while now < 2 * TIMEOUT:
        assert not foundings(keep(core, number, now, "b"))
        now, number = now + 0.05, number + 1
    assert any(foundings(keep(core, number + step, now + 0.1 * step, "b")) for step in range(4))


def test_a_view_ends_every_attempt_and_pledge() -> None:
    """What was begun before belongs to the past."""
    core = joiner("a", "b")
    first = founding(core)
    core.receive(B, Commit("e" * 32, 1, Proposal((B, A))), 0.17)
    view = core.view
    assert view is not None
    assert core._founding.deadlines == (None, None)
    core.receive(B, Founded(first.lineage, is_agreed=True), 0.18)
    assert core.view == view
    core = joiner("a", "b")
    core.receive(B, found(A, B), 0.01)
    core.receive(B, Commit("f" * 32, 1, Proposal((B, A))), 0.02)
    assert core._state.pledge is None
    assert core._founding._group == {A}
    assert core._founding._group_since == 0.02


def test_an_observer_and_a_member_at_work_found_nothing() -> None:
    """However long they look on."""
    watcher = ClusterCore(card("o", role=ProcessRole.OBSERVER), ClusterConfig(), 0.0)
    watcher.connected(card("b"), 0.0)
    for step in range(1, 30):
        watcher.receive(B, beat(step, watcher.me.process), 0.1 * step)
        assert not foundings(watcher.tick(0.1 * step))
    assert watcher.view is None
    net = ClusterNet()
    a, b = net.form("ab")
    since = net.now
    net.run(4)
    assert not any(foundings([effect]) for at, _, effect in net.effects if at > since)
    assert net.cores[a].view == net.cores[b].view


def test_a_process_that_is_not_first_says_who_is_to_begin() -> None:
    """And one that waits for more says how many are here."""
    core = joiner("b", "a")
    core.tick(0.05)
    assert core.reason == "a starts a cluster of 2"
    core = joiner("a", "b")
    core.tick(0.05)
    assert core.reason == "2 here; looking for more before starting"


def test_what_a_process_waits_for_is_told_to_people() -> None:
    """Once, as an event, and for as long as it lasts as its reason."""
    core = ClusterCore(card("a"), ClusterConfig(min_nodes=3), 0.0)
    core.connected(card("b"), 0.0)
    effects = keep(core, 1, 0.1, "b") + keep(core, 2, 0.3, "b")
    told = [str(e.event) for e in effects if isinstance(e, Note)]
    words = "2 of at least 3 processes are here; waiting for the others"
    assert told.count(words) == 1
    assert core.reason == words
    facts: dict[str, Any] = {"phase": Phase.ACTIVE, "lineage": "f" * 32, "epoch": 2, "size": 4}
    for leader, name in ((None, "its leader"), (C, "cccccccc/1")):
        core = ClusterCore(card("a"), ClusterConfig(), 0.0)
        core.connected(card("b"), 0.0)
        effects = core.receive(B, beat(1, A, leader=leader, **facts), 0.1)
        words = f"waiting for {name} to let us into a cluster of 4"
        assert core.reason == words
        assert words in [str(e.event) for e in effects if isinstance(e, Note)]


def test_the_largest_wish_in_the_group_counts_and_no_other() -> None:
    """A process that not all hear is not asked how many it wants."""
    core = joiner("a", "b", wants=2)
    core.connected(card("c"), 0.0)
    core.receive(C, beat(1, A, wants=9), 0.0)  # it does not hear b
    core.tick(0.05)
    assert core._founding._group == {A, B}
    assert core._founding._wanted(core._state.joiners()) == 2


def test_a_crowd_is_searched_once_in_a_beat() -> None:
    """While more than eight gather; the group of the last search holds meanwhile."""
    letters = "bcdefghij"
    core = joiner("a", *letters)
    f, s = core._founding, core._state
    f._searched_at = float("-inf")
    f._mutual(s.joiners())
    assert len(f._group) == 10
    contacts = s.contacts
    core.tick(0.05)
    f._searched_at = s.time
    for other in letters:
        contacts.unhear(card(other).process, A)
    order = [A, *(card(letter).process for letter in letters)]
    f._look_at = None
    assert len(f._largest(order)) == 10
    assert f._look_at == f._searched_at + s.interval
    assert len(f._largest(order[:8])) == 1  # few are searched each time
    s.clock.advance(s.time + s.interval)
    f._known_group = tuple(order)
    assert f._largest(order) == (A,)
    assert f._searched_at == s.time


def test_a_process_with_another_setting_that_begins_alone_is_waited_for() -> None:
    """Only if it comes first and wants no more than itself; both say what differs."""
    cases = (("a", 1, True), ("a", 2, False), ("c", 1, False))
    for letter, wants, waits in cases:
        core = ClusterCore(card("b"), ClusterConfig(solo_delay=0.2), 0.0)
        core.connected(card(letter, quorum="any"), 0.0)
        other = card(letter).process
        effects: list[Effect] = []
        for step in range(1, 8):
            effects += core.receive(other, beat(step, B, wants=wants), 0.1 * step)
            effects += core.tick(0.1 * step)
        assert (core.view is None) is waits
        if waits:
            assert core.reason.startswith("waiting: this process was started with quorum=")
            assert core.reason in [str(e.event) for e in effects if isinstance(e, Note)]


# --- children of a lineage ---


def test_the_reason_of_a_child_names_who_ended_and_who_is_not_waited_for() -> None:
    """Each founder checked the same; people read why it continues without them."""
    net = ClusterNet()
    a, b, c, d = net.form("abcd")
    f, s = net.cores[d]._founding, net.cores[d]._state
    bound = s.bound
    assert bound is not None
    assert f._why_branch(bound, (a, b, c, d)) == "all members of the last view are here again"
    s.ended[a] = "its port refuses connections", s.time
    assert f._why_branch(bound, (b, c, d)) == "a ended"
    apart = "without waiting for b"
    assert f._why_branch(bound, (c, d)) == f"a ended; {apart}"
    s.released_at = s.time
    assert f._why_branch(bound, (c, d)) == f"a ended; as asked, {apart}"
    s.departed.add(b)
    codes = [cause.code for cause in f._causes(bound, (d,))]
    assert codes == [CauseCode.ENDED, CauseCode.LEFT, CauseCode.SILENT]


def test_a_child_keeps_the_origin_of_the_checkpoint() -> None:
    """That of its first ancestor, unless its founders loaded another one."""
    for mine in ((), (Branch("d" * 32, 7),)):
        net = ClusterNet()
        a, b = net.form("ab")
        origin = (Branch("c" * 32, 3),)
        s = net.cores[b]._state
        assert s.bound is not None
        s.bound = msgspec.structs.replace(s.bound, charter=Charter(origin=origin))
        s.origin = mine
        net.cut_off([a], [b])
        net.run(3)
        net.kill(a)
        net.cut.clear()
        net.run(6)
        bound = net.cores[b].bound
        assert bound is not None
        assert bound.charter.ancestry
        assert bound.charter.origin == (mine or origin)


def test_the_first_in_rank_founds_the_child_and_the_others_name_it() -> None:
    """Not the first by id: ranks of the last view come before."""
    net = ClusterNet()
    a, b, c, d = net.form("abcd")
    net.do(a, net.cores[a].step_down(net.now))
    net.run(2)
    assert net.agreed() == "bcda"
    net.cut_off([a, c], [b, d])
    net.cut_off([a], [c])
    net.run(3)
    net.kill(b)
    net.kill(d)
    net.cut.clear()
    net.mesh()
    healed = net.now
    net.run(8)
    view = net.view_of(a)
    assert view.members == (c, a)
    assert view.ancestry
    said = [
        e.message
        for at, who, e in net.effects
        if at > healed and who == a and isinstance(e, SendMessage)
    ]
    assert not any(isinstance(message, Found) for message in said)


def test_under_any_quorum_too_only_the_first_of_those_who_go_on_founds_the_child() -> None:
    """Two foundings at once could refuse each other; the others need nobody's leave, but wait."""
    net = ClusterNet()
    a, b, c, d, e = net.form("abcde", config=ClusterConfig(quorum="any"))
    parted = net.now
    net.cut_off([a, b, c], [d, e])
    net.run(5)
    assert net.view_of(e).members == (d, e)
    founders = {
        who
        for at, who, effect in net.effects
        if at > parted and isinstance(effect, SendMessage) and isinstance(effect.message, Found)
    }
    assert founders == {d}


def test_a_founder_that_comes_later_in_rank_is_refused_while_we_found() -> None:
    """The same process is not before itself."""
    core = joiner("a", "b")
    assert not core._founding._comes_first(A)
    assert not core._founding._comes_first(B)
    assert joiner("b", "a")._founding._comes_first(A)


def test_the_parent_of_a_child_is_its_last_ancestor() -> None:
    """An older one is not enough, and without any it is no child of ours."""
    core = joiner("b", "a")
    core.receive(A, Commit("e" * 32, 3, Proposal((A, B))), 0.01)
    for ancestry, reason in (
        ((Branch("e" * 32, 3), Branch("d" * 32, 1)), "it belongs to another lineage"),
        ((Branch("d" * 32, 1), Branch("e" * 32, 3)), "it is active, or was a moment ago"),
        ((), "it belongs to another lineage"),
    ):
        message = Found("c" * 32, Proposal((A, B)), Charter(ancestry=ancestry))
        (refused,) = answers(core.receive(A, message, 0.02))
        assert refused.reason == reason


def test_only_those_who_could_be_founders_are_waited_for() -> None:
    """A connected process of our lineage that waits too, or has not spoken yet; no other."""
    core = joiner("a", "b")
    core.connected(card("c"), 0.0)
    f = core._founding
    assert f._strangers((A, B))  # it has not spoken yet
    cases: list[tuple[dict[str, Any], bool]] = [
        ({"phase": Phase.JOINING}, True),
        ({"phase": Phase.ACTIVE, "lineage": "f" * 32, "size": 1}, False),
        ({"phase": Phase.JOINING, "bound": "f" * 32}, False),
        ({"phase": Phase.WAITING}, True),
    ]
    for number, (facts, waits) in enumerate(cases, 1):
        core.receive(C, beat(number, A, **facts), 0.01)
        assert f._strangers((A, B)) is waits
    assert not f._strangers((A, B, C))


def test_a_view_that_may_still_decide_has_twice_the_pause_to_do_so() -> None:
    """Then its members may found a child; a person need not wait."""
    net = ClusterNet()
    _, b = net.form("ab")
    f, s = net.cores[b]._founding, net.cores[b]._state
    s.state, s.pause_after = ClusterState.PAUSED, 2.0
    f._installer.paused_at = s.time - 3.9
    assert not f._is_ready()
    assert f._look_at == f._installer.paused_at + 4.0
    f._installer.paused_at = s.time - 4.1
    assert f._is_ready()
    f._installer.paused_at = s.time
    s.released_at = s.time
    assert f._is_ready()


# --------------------------------------------------------------------------------------------------
# Two clusters that meet: who gives way, and when not.

OTHER = "0" * 32  # a lineage whose id is lower than any hash is likely to be
Z = card("z").process


def messages(effects: list[Effect]) -> list[object]:
    """What is sent."""
    return [effect.message for effect in effects if isinstance(effect, SendMessage)]


def greater(net: ClusterNet, me: ProcessId, number: int = 1, **facts: Any) -> Heartbeat:
    """A heartbeat of the leader of a greater cluster, which hears us."""
    facts = {"samples": 9, "size": 5, "phase": Phase.ACTIVE, "lineage": OTHER, **facts}
    echo = net.cores[me]._state.contacts.sequence
    return Heartbeat(number, echo, 0.0, hears=(mark(me),), epoch=4, leader=Z, **facts)


def meeting(letters: str = "a") -> tuple[ClusterNet, ClusterCore, View, list[object]]:
    """A cluster whose leader meets a greater one; what it says then."""
    net = ClusterNet()
    me, *_ = net.form(letters)
    net.run(1)
    core = net.cores[me]
    core.connected(card("z"), net.now)
    said = messages(core.receive(Z, greater(net, me), net.now))
    return net, core, net.view_of(me), said


def reserved(view: View, *, epoch: int | None = None, yes: bool = True) -> MergeAnswer:
    """The other leader's answer."""
    at = view.epoch if epoch is None else epoch
    return MergeAnswer(view.lineage, at, OTHER, yes, (Z,) if yes else (), into_epoch=4)


def test_the_lesser_asks_and_dissolves() -> None:
    """After the reservation it commits a terminal view and looks for the other."""
    net, core, view, said = meeting()
    assert MergeRequest(view.lineage, view.epoch, OTHER, members=1) in said
    effects = core.receive(Z, reserved(view), net.now)
    assert core.view is None
    assert core.bound is not None
    assert core.bound.view == View(OTHER, 4, (Z,))
    assert any("merges into the one of z" in str(e.event) for e in effects if isinstance(e, Note))


def test_an_answer_that_does_not_fit_changes_nothing() -> None:
    """Refused, late, or of an epoch that is over."""
    for answer in ({"yes": False}, {"epoch": 7}):
        net, core, view, _ = meeting()
        core.receive(Z, reserved(view, **answer), net.now)
        assert core.view == view
    net, core, view, _ = meeting()
    core.receive(Z, reserved(view, yes=False), net.now)
    core.receive(Z, reserved(view), net.now)  # was not asked for any more
    assert core.view == view


def test_it_asks_again_after_a_while() -> None:
    """An answer that never comes is not waited for."""
    net, core, view, _ = meeting()
    later: list[object] = []
    for step in range(1, 10):
        now = net.now + 0.1 * step
        core.receive(Z, greater(net, core.me.process, number=1 + step), now)
        later += messages(core.tick(now))
    assert MergeRequest(view.lineage, view.epoch, OTHER, members=1) in later


def test_one_that_has_asked_reserves_nothing() -> None:
    """So two never dissolve into each other."""
    net, core, view, _ = meeting()
    said = messages(core.receive(Z, MergeRequest(OTHER, 4, view.lineage), net.now))
    (answer,) = [m for m in said if isinstance(m, MergeAnswer)]
    assert not answer.is_reserved
    assert answer.reason


def test_one_that_has_reserved_does_not_ask() -> None:
    """Until the reservation ends."""
    net = ClusterNet()
    (me,) = [net.add("a")]
    net.run(2)
    core, view = net.cores[me], net.view_of(me)
    core.connected(card("z"), net.now)
    said = messages(core.receive(Z, MergeRequest(OTHER, 4, view.lineage), net.now))
    (answer,) = [m for m in said if isinstance(m, MergeAnswer)]
    assert answer.is_reserved
    assert answer.members == (me,)
    said = messages(core.receive(Z, greater(net, me), net.now))
    assert not any(isinstance(m, MergeRequest) for m in said)


def test_all_must_hear_all_before_a_merge() -> None:
    """Otherwise somebody would be left outside; people are told who."""
    net, core, view, _ = meeting("ab")
    effects = core.receive(Z, reserved(view), net.now)
    assert core.view == view
    assert not any(isinstance(m, Propose) for m in messages(effects))
    told = [str(effect.event) for effect in effects if isinstance(effect, Note)]
    assert any(text.startswith("cannot merge yet") for text in told)


def test_the_greatest_of_several_is_asked() -> None:
    """Steps count before members, members before the id."""
    net = ClusterNet()
    me = net.add("a")
    net.run(2)
    core, view = net.cores[me], net.view_of(me)
    y = card("y").process
    for other in ("z", "y"):
        core.connected(card(other), net.now)
    busy = greater(net, me, samples=0, size=1, lineage="f" * 32)  # not greater than ours
    core.receive(y, busy, net.now)
    said = messages(core.receive(Z, greater(net, me), net.now))
    assert [m.into for m in said if isinstance(m, MergeRequest)] == [OTHER]
    assert core.view == view


def lone(samples: int = 0) -> tuple[ClusterNet, ClusterCore, View]:
    """A cluster of one that is connected with a stranger."""
    net = ClusterNet()
    me = net.add("a")
    net.run(2)
    core = net.cores[me]
    core.samples = samples
    net.run(0.5)
    core.connected(card("z"), net.now)
    return net, core, net.view_of(me)


def test_an_answer_that_never_comes_frees_the_leader_to_take_others_in() -> None:
    """After two election timeouts; before that it keeps its word."""
    for wait, reserves in ((0.5, False), (0.6, True)):
        net, core, view, _ = meeting()
        assert core._merging._asked is not None
        core._state.samples = 99
        net.now += wait
        core.tick(net.now)
        core._merging.review()
        request = MergeRequest("f" * 32, 4, view.lineage)
        core._state.announced_samples = 99
        said = messages(core.receive(Z, request, net.now))
        (answer,) = [m for m in said if isinstance(m, MergeAnswer)]
        assert answer.is_reserved is reserves


def test_a_question_that_was_asked_ends_with_the_view() -> None:
    """An answer to it would be about a cluster that is no more."""
    _, core, _, _ = meeting()
    assert core._merging._asked is not None
    core._merging.begin()
    assert core._merging._asked is None


def test_a_reservation_lasts_for_five_election_timeouts() -> None:
    """As long does the greater cluster dissolve into no other."""
    net, core, view = lone(samples=5)
    core.receive(Z, MergeRequest(OTHER, 4, view.lineage), net.now)
    timeout = core.config.election.election_timeout
    assert core._merging._reserved_until == net.now + 5 * timeout
    assert not core._merging._is_free()
    core._state.clock.advance(net.now + 5 * timeout)
    assert core._merging._is_free()


def test_the_answer_names_the_members_the_epoch_and_the_charter() -> None:
    """Those who dissolve are bound to exactly that."""
    net, core, view = lone(samples=5)
    said = messages(core.receive(Z, MergeRequest(OTHER, 4, view.lineage), net.now))
    (answer,) = [m for m in said if isinstance(m, MergeAnswer)]
    assert core.bound is not None
    assert (answer.into_epoch, answer.members) == (view.epoch, view.members)
    assert answer.charter == core.bound.charter
    nobody = ClusterCore(card("b"), ClusterConfig(quorum="any"), 0.0)
    nobody.connected(card("z"), 0.0)
    said = messages(nobody.receive(Z, MergeRequest(OTHER, 4, view.lineage), 0.1))
    (answer,) = [m for m in said if isinstance(m, MergeAnswer)]
    assert (answer.is_reserved, answer.charter.quorum) == (False, "any")


def test_links_in_one_direction_are_not_enough_for_a_merge() -> None:
    """Whoever is not heard could not be in one view."""
    _, core, view, _ = meeting("ab")
    _, b = view.members
    contacts = core._state.contacts
    assert core._merging._apart((Z,))
    contacts.of(b).hears |= {mark(Z)}
    assert core._merging._apart((Z,)) == "b, z"
    contacts.of(Z).hears |= {mark(b)}
    assert core._merging._apart((Z,)) == ""
    contacts.of(b).hears -= {mark(Z)}
    assert core._merging._apart((Z,))


def test_a_merge_is_told_as_one() -> None:
    """The event names the other leader."""
    net, core, view, _ = meeting()
    effects = core.receive(Z, reserved(view), net.now)
    events = [effect.event for effect in effects if isinstance(effect, Note)]
    merging = [e for e in events if getattr(e, "change", None) is MembershipChange.MERGING]
    assert [event.process for event in merging if isinstance(event, MembershipEvent)] == [Z]

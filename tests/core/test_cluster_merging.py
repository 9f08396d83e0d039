"""Two clusters that meet: who gives way, and when not."""

from __future__ import annotations

from typing import Any

from potluck.core.cluster import ClusterConfig, ClusterCore
from potluck.core.cluster_cards import mark
from potluck.core.cluster_effects import Effect, Note, Send
from potluck.core.cluster_events import MembershipChange, MembershipEvent
from potluck.core.cluster_messages import (
    Heartbeat,
    MergeAnswer,
    MergeRequest,
    Phase,
    Propose,
)
from potluck.vocabulary import ProcessId, View
from support.cluster_net import ClusterNet, card

OTHER = "0" * 32  # a lineage whose id is lower than any hash is likely to be
Z = card("z").process


def messages(effects: list[Effect]) -> list[object]:
    """What is sent."""
    return [effect.message for effect in effects if isinstance(effect, Send)]


def greater(net: ClusterNet, me: ProcessId, number: int = 1, **facts: Any) -> Heartbeat:
    """A heartbeat of the leader of a greater cluster, which hears us."""
    facts = {"samples": 9, "size": 5, "phase": Phase.ACTIVE, "lineage": OTHER, **facts}
    echo = net.cores[me]._situation.contacts.sequence
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
        core._situation.samples = 99
        net.now += wait
        core.tick(net.now)
        core._merging.review()
        request = MergeRequest("f" * 32, 4, view.lineage)
        core._situation.announced_samples = 99
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
    core._situation.clock.advance(net.now + 5 * timeout)
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
    contacts = core._situation.contacts
    assert core._merging._apart((Z,))
    contacts.of(b).hears |= {mark(Z)}
    assert core._merging._apart((Z,)) == "b (bbbbbbbb/1), z (zzzzzzzz/1)"
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

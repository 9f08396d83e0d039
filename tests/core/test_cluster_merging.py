"""Two clusters that meet: who gives way, and when not."""

from __future__ import annotations

from typing import Any

from potluck.core.cluster import ClusterCore
from potluck.core.cluster_cards import mark
from potluck.core.cluster_effects import Effect, Note, Send
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

"""The beginning of a lineage: all agree, or nobody is bound for long."""

from __future__ import annotations

from typing import Any

from potluck.core.ancestry import Branch
from potluck.core.cluster import ClusterConfig, ClusterCore, ClusterState
from potluck.core.cluster_cards import mark
from potluck.core.cluster_effects import Effect, Send
from potluck.core.cluster_messages import (
    Charter,
    Commit,
    Found,
    Founded,
    Heartbeat,
    Phase,
    Proposal,
)
from potluck.core.election_events import ElectionConfig
from potluck.vocabulary import ProcessId
from support.cluster_net import ClusterNet, card

A, B, C = (card(letter).process for letter in "abc")
TIMEOUT = ElectionConfig().election_timeout


def answers(effects: list[Effect]) -> list[Founded]:
    """What was answered to foundings."""
    sent = [effect.message for effect in effects if isinstance(effect, Send)]
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
    assert refused.reason == "it has agreed to another founding"
    assert answers(core.receive(A, found(A, C, lineage="d" * 32), 0.03))[0].is_agreed
    later = 0.05 + 2 * TIMEOUT
    core.tick(later)
    for sender in (A, B):
        core.receive(sender, beat(2, A, B, C), later)
    assert answers(core.receive(B, found(B, C, lineage="e" * 32), later))[0].is_agreed


def test_a_pledge_ends_with_its_founder() -> None:
    """A founder whose connection ends binds nobody."""
    core = joiner("c", "a", "b")
    core.receive(A, found(A, B, C), 0.01)
    core.disconnected(A, "reset", 0.02)
    assert answers(core.receive(B, found(B, C, lineage="e" * 32), 0.03))[0].is_agreed


def test_foundings_that_cannot_be_are_refused_in_words() -> None:
    """Not in it, not hearing somebody, or already in a view."""
    core = joiner("b", "a")
    (refused,) = answers(core.receive(A, found(A), 0.01))
    assert refused.reason == "one of us is not in it"
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
    core._situation.ready_at = 5.0
    (refused,) = answers(core.receive(A, found(A, B), 0.01))
    assert refused.reason == "it is not looking for a cluster now"


def founding(core: ClusterCore) -> Found:
    """Let a process that is first begin; what it proposed."""
    for now in (0.05, 0.11, 0.16):
        for effect in core.tick(now):
            if isinstance(effect, Send) and isinstance(effect.message, Found):
                return effect.message
    raise AssertionError


def test_of_two_founders_the_one_that_comes_first_wins() -> None:
    """A founder gives way to the one that comes first, and to no other."""
    core = joiner("a", "b")
    founding(core)
    (refused,) = answers(core.receive(B, found(A, B), 0.17))
    assert refused.reason == "it is founding itself"
    late = joiner("b", "c")
    mine = founding(late)
    late.connected(card("a"), 0.17)
    late.receive(A, beat(1, B, C), 0.17)
    assert answers(late.receive(A, found(A, B, C), 0.18))[0].is_agreed
    assert late.receive(C, Founded(mine.lineage, is_agreed=True), 0.19) is not None
    assert late.view is None  # our own attempt is over


def test_an_unanswered_founding_is_begun_anew() -> None:
    """Under another name, so that late answers count for nothing."""
    core = joiner("a", "b")
    mine = founding(core)
    now = 0.17
    again = None
    for step in range(12):
        now = 0.2 + 0.05 * step
        effects = core.receive(B, beat(2 + step, A), now) + core.tick(now)
        found_again = [e.message for e in effects if isinstance(e, Send)]
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
    assert core.reason == "waiting for b (bbbbbbbb/1), which cannot continue yet"
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

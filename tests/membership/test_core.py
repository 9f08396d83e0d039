"""Stories of whole clusters: forming, losing, pausing, healing, merging, leaving."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from potluck._types import Branch, NodeId, ProcessId, View
from potluck.membership import core as membership_core
from potluck.membership.core import ClusterCore
from potluck.membership.events import (
    Abort,
    ClusterConfig,
    ClusterState,
    ConnectTo,
    Effect,
    ElectionConfig,
    ElectionEvent,
    ElectionKind,
    ElectionRole,
    Installed,
    Note,
    Paused,
    Removed,
    SendMessage,
    ViewResumed,
)
from potluck.membership.messages import (
    Accepted,
    Charter,
    ClusterMessage,
    Commit,
    Departed,
    Found,
    Heartbeat,
    KnownProcesses,
    Lost,
    MergeRequest,
    Phase,
    PreVote,
    PreVoteReply,
    ProcessRole,
    Proposal,
    Propose,
    Relayed,
    Vote,
    VoteRequest,
    encode,
    mark,
)
from potluck.membership.state import view_mark
from support.cluster_net import ClusterNet, card


@pytest.mark.parametrize("letters", ["ab", "abc", "abcdefgh"])
def test_a_cold_start_ends_in_one_view_at_once(letters: str) -> None:
    """Whoever meets at the same time forms one view, within a fraction of a second."""
    net = ClusterNet()
    processes = [net.add(letter) for letter in reversed(letters)]
    net.mesh()
    net.run(0.2)
    assert net.agreed() == letters
    assert {net.view_of(process).epoch for process in processes} == {1}
    assert all(core.state is ClusterState.ACTIVE for core in net.cores.values())
    assert net.cores[processes[0]].leader == net.view_of(processes[0]).members[0]


def test_nothing_is_founded_below_the_number_asked_for() -> None:
    """With min_nodes=3 two wait and say so; the third completes them."""
    net = ClusterNet()
    config = ClusterConfig(min_nodes=3)
    first = net.add("a", config=config)
    net.add("b")
    net.mesh()
    net.run(3)
    assert net.cores[first].view is None
    assert "2 of at least 3" in net.cores[first].reason
    net.add("c")
    net.mesh()
    net.run(0.2)
    assert net.agreed() == "abc"


def test_a_later_process_is_let_in() -> None:
    """A newcomer gets the last rank, and nobody founds a second cluster."""
    net = ClusterNet()
    net.form("bc")
    net.add("a")
    net.mesh()
    net.run(0.3)
    assert net.agreed() == "bca"


def test_acquaintances_make_everybody_meet() -> None:
    """Who knows one address meets all: the others are introduced."""
    net = ClusterNet()
    a, b, c = (net.add(letter) for letter in "abc")
    net.link(a, b)
    net.run(0.05)
    net.link(a, c)
    net.run(0.5)
    assert net.agreed() == "abc"
    assert any(isinstance(effect, ConnectTo) for _, _, effect in net.effects)


def test_a_killed_member_is_replaced_by_a_view_without_it() -> None:
    """All survivors abort at once and go on within milliseconds."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    net.kill(c)
    net.run(0.05)
    assert net.agreed() == "ab"
    assert [abort.lost for abort in net.aborts(a) + net.aborts(b)] == [c, c]
    assert "its port refuses connections" in net.cores[a].reason


def test_a_killed_leader_is_replaced_by_the_next_in_rank() -> None:
    """The second member is elected, in a term of its own, and leads the next view."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    net.kill(a)
    net.run(0.05)
    assert net.agreed() == "bc"
    assert net.cores[b].election.state.role is ElectionRole.LEADING
    assert net.cores[c].election.state.leader == b


def test_the_last_one_goes_on_when_all_others_crash() -> None:
    """Proofs of death leave a quorum of one."""
    net = ClusterNet()
    processes = net.form("abc")
    for victim in processes[:2]:
        net.kill(victim)
    net.run(0.1)
    assert net.agreed() == "c"
    for letter in "ab":
        net.add(letter, incarnation=2)
    net.mesh()
    net.run(0.5)
    assert net.agreed() == "cab"


def test_a_restart_proves_the_death_of_its_predecessor() -> None:
    """A later incarnation in the same slot is as good as a refused port, and comes in as new."""
    net = ClusterNet()
    a, _ = net.form("ab")
    net.dead.add(a)  # nobody notices: no lane is closed, nothing is refused
    net.add("a", incarnation=2)
    net.mesh()
    net.run(0.5)
    assert net.agreed() == "ba"


def test_silence_pauses_the_side_without_quorum_and_heals() -> None:
    """Of two cut apart, the first goes on after twice the pause; the other comes back as new."""
    net = ClusterNet()
    a, b = net.form("ab")
    net.cut_off([a], [b])
    net.run(1.3)
    assert net.cores[a].state is ClusterState.ACTIVE
    assert net.cores[b].state is ClusterState.PAUSED
    assert "1 of 2 members" in net.cores[b].reason
    assert net.view_of(a).members == (a, b)  # nobody is excluded yet
    net.run(1.5)
    assert net.view_of(a).members == (a,)
    net.heal()
    net.run(1.5)
    assert net.agreed() == "ab"
    assert any(isinstance(e, Removed) for _, who, e in net.effects if who == b)


def test_a_short_cut_only_pauses() -> None:
    """Contact before anybody was excluded resumes the members of the view, in a fresh epoch."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    net.cut_off([c], [a, b])
    net.run(1.3)
    net.heal()
    net.run(1)
    assert net.agreed() == "abc"
    kinds = [type(e) for _, who, e in net.effects if who == c]
    assert kinds.index(Paused) < kinds.index(ViewResumed)
    assert Removed not in kinds


def test_a_minority_with_the_leader_pauses() -> None:
    """The majority elects, excludes and goes on; all end in one view."""
    net = ClusterNet()
    a, b, c, d, e = net.form("abcde")
    net.cut_off([a, b], [c, d, e])
    net.run(3)
    assert net.view_of(c).members == (c, d, e)
    assert {net.cores[p].state for p in (a, b)} == {ClusterState.PAUSED}
    net.heal()
    net.run(2)
    assert net.agreed() == "cdeab"


def test_a_stopped_leader_learns_that_it_was_removed() -> None:
    """It wakes up in a view that is over, and comes back by itself."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    net.stopped.add(a)
    net.run(3)
    assert net.view_of(b).members == (b, c)
    net.wake(a)
    net.run(1.5)
    assert net.agreed() == "bca"


@pytest.mark.parametrize(("one", "other"), [("a", "b"), ("b", "c"), ("a", "c")])
def test_in_a_cut_triangle_two_go_on(one: str, other: str) -> None:
    """The largest mutually connected set stays; the third agrees, by way of a common friend."""
    net = ClusterNet()
    processes = dict(zip("abc", net.form("abc"), strict=True))
    net.cut_off([processes[one]], [processes[other]])
    net.run(4)
    states = [net.cores[process].state for process in processes.values()]
    assert sorted(state.value for state in states) == ["active", "active", "joining"]
    assert len({core.view for core in net.cores.values() if core.view}) == 1
    net.heal()
    net.run(2)
    assert sorted(net.agreed()) == ["a", "b", "c"]


def test_a_one_way_cut_is_a_cut() -> None:
    """Whoever is heard but hears nobody is excluded; it has paused itself."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    net.cut |= {(a, c), (b, c)}
    net.run(3)
    assert net.view_of(a).members == (a, b)
    assert net.cores[c].state is ClusterState.PAUSED


def test_a_reset_lane_brings_a_fresh_epoch_with_the_same_members() -> None:
    """What was aborted cannot go on in its epoch, though nobody is lost."""
    net = ClusterNet()
    a, b = net.form("ab")
    net.sever(a, b)
    net.run(0.5)
    assert net.agreed() == "ab"
    assert net.view_of(a).epoch == 2
    assert net.cores[a].reason.endswith("broke and is back")


def test_a_goodbye_is_acted_upon_at_once() -> None:
    """A leader that leaves is replaced; whoever left does nothing more."""
    net = ClusterNet()
    a, b, _ = net.form("abc")
    net.do(a, net.cores[a].leave(net.now))
    assert net.cores[a].state is ClusterState.LEFT
    assert net.cores[a].next_deadline is None
    assert net.cores[a].tick(net.now) == []
    net.dead.add(a)
    net.run(0.05)
    assert net.agreed() == "bc"
    assert "left the job" in net.cores[b].reason


def test_a_process_without_a_view_leaves_too() -> None:
    """Its acquaintances are told, and do not look for it."""
    net = ClusterNet()
    a, b = net.add("a"), net.add("b")
    net.mesh()
    net.run(0.01)
    net.do(b, net.cores[b].leave(net.now))
    net.dead.add(b)
    net.run(3)
    assert net.agreed() == "a"
    assert net.cores[a].state is ClusterState.ACTIVE


def test_stepping_down_moves_the_leader_to_the_end() -> None:
    """The next member leads; only a leader of several can hand over."""
    net = ClusterNet()
    a, _, c = net.form("abc")
    net.do(a, net.cores[a].step_down(net.now))
    net.run(0.05)
    assert net.agreed() == "bca"
    net.do(c, net.cores[c].step_down(net.now))
    net.run(0.05)
    assert net.agreed() == "bca"
    assert "only the leader can hand over" in net.told(c)
    assert "hands over" in net.told(a)


def test_an_election_that_was_called_is_called_for_one_view() -> None:
    """The next leader is lost without being replaced, where that is not done unasked."""
    net = ClusterNet()
    config = ClusterConfig(election=ElectionConfig(auto_elect_on_peer_loss=False))
    a, b, c = net.form("abc", config=config)
    net.kill(a)
    net.run(0.5)
    for process in (b, c):
        net.do(process, net.cores[process].call_election(net.now))
    net.run(1)
    assert net.agreed() == "bc"
    net.kill(b)
    net.run(3)
    assert net.view_of(c).members == (b, c)


def test_without_being_asked_nobody_replaces_a_leader_where_that_is_off() -> None:
    """auto_elect_on_peer_loss=False waits for call_election()."""
    net = ClusterNet()
    config = ClusterConfig(election=ElectionConfig(auto_elect_on_peer_loss=False))
    a, b, _ = net.form("abc", config=config)
    net.kill(a)
    net.run(0.5)
    assert net.view_of(b).epoch == 1
    net.do(b, net.cores[b].call_election(net.now))
    net.run(0.05)
    assert net.agreed() == "bc"


def test_two_clusters_that_meet_become_one() -> None:
    """The one with fewer committed steps dissolves into the other."""
    net = ClusterNet()
    small = net.form("ab")
    large = [net.add(letter) for letter in "cde"]
    for one in large:
        for other in large:
            if one < other:
                net.link(one, other)
    net.run(0.5)
    for process in small:
        net.cores[process].samples = 7
    net.heal()
    net.run(2)
    assert net.agreed() == "abcde"
    lineage = net.view_of(small[0]).lineage
    assert all(v.lineage == lineage for v in [net.view_of(p) for p in large])
    assert "merges into" in net.told(large[0])


def test_with_any_quorum_a_minority_goes_on_as_a_new_lineage() -> None:
    """Both sides work; when they meet again they merge."""
    net = ClusterNet()
    a, b, c, d, e = net.form("abcde", config=ClusterConfig(quorum="any"))
    before = net.view_of(a).lineage
    net.cut_off([a, b], [c, d, e])
    net.run(5)
    assert net.view_of(a).members == (a, b)
    assert net.view_of(a).lineage != before
    assert net.view_of(c).members == (c, d, e)
    assert net.view_of(c).lineage == before
    net.heal()
    net.run(4)
    assert sorted(net.agreed()) == list("abcde")


def test_an_orphan_goes_on_when_all_it_misses_have_ended() -> None:
    """Nobody can prove what the dead did meanwhile, so it is a new lineage."""
    net = ClusterNet()
    a, b = net.form("ab")
    before = net.view_of(a).lineage
    net.cut_off([a], [b])
    net.run(3)
    net.kill(a)
    net.cut.clear()
    net.run(6)
    assert net.agreed() == "b"
    assert net.view_of(b).lineage != before


def test_a_leader_cut_off_between_accept_and_commit_loses_nothing() -> None:
    """What a quorum has accepted is proposed again by the next leader."""
    net = ClusterNet()
    a, _, _, d = net.form("abcd")
    net.kill(d)
    cut: list[float] = []

    def once_accepted(sender: object, to: object, message: object) -> bool:
        if isinstance(message, Propose) and not cut:
            cut.append(net.now)
        return bool(cut) and sender == a and not isinstance(message, Propose)

    net.dropped = once_accepted
    net.run(0.01)
    net.kill(a)
    net.run(1)
    assert net.agreed() == "bc"
    assert all(len(views) == 1 for views in net.views().values())


def test_observers_look_on_and_are_never_members() -> None:
    """An observer learns the view; nobody counts it."""
    net = ClusterNet()
    a, _ = net.form("ab")
    watcher = net.add("z", role=ProcessRole.OBSERVER)
    net.mesh()
    net.run(1)
    core = net.cores[watcher]
    assert core.view is None
    assert core.state is ClusterState.JOINING
    assert set(core.observed.values()) == {net.view_of(a)}
    assert len(net.view_of(a).members) == 2
    net.add("c")
    net.mesh()
    net.run(0.5)
    assert [len(view.members) for view in core.observed.values()] == [3]


def test_different_schemas_do_not_mix() -> None:
    """A process with another shape of state is left alone, and leaves others alone."""
    net = ClusterNet()
    a, b = net.form("ab")
    other = net.add("c", schema="another")
    net.mesh()
    net.run(2)
    assert net.view_of(a).members == (a, b)
    assert net.view_of(other).members == (other,)


def test_a_clock_that_is_set_back_or_forward_excludes_nobody() -> None:
    """Deadlines move along; a core's own time never goes back."""
    core = ClusterCore(card("a"), ClusterConfig(solo_delay=0.5), now=100.0)
    core.tick(100.2)
    core.tick(40.0)
    assert core.view is None
    assert core.next_deadline is not None
    assert 40.0 <= core.next_deadline < 40.5
    effects = core.tick(40.4)
    assert any(isinstance(effect, Installed) for effect in effects)


def test_after_everything_only_one_successor_of_each_view_was_installed() -> None:
    """Kills in quick succession never lead to two views of one number."""
    net = ClusterNet()
    processes = net.form("abcdef")
    for victim, pause in zip(processes[:5], (0.002, 0.001, 0.004, 0.003, 0.0), strict=True):
        net.kill(victim)
        net.run(pause)
    net.run(5)
    assert net.agreed() == "f"
    assert all(len(views) == 1 for views in net.views().values())


def test_links_are_of_those_who_hear_each_other() -> None:
    """One bit for each of the others, in both rows or in none."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    contacts = net.cores[a]._state.contacts
    assert contacts.links([a, b, c]) == [0b110, 0b101, 0b011]
    contacts.unhear(b, c)
    assert contacts.links([a, b, c]) == [0b110, 0b001, 0b001]
    contacts.unhear(c, a)
    assert contacts.links([c, b, a]) == [0b000, 0b100, 0b010]


# --------------------------------------------------------------------------------------------------
# What strangers, latecomers and the confused get for an answer; and how views end and change.

Z = card("z").process


def sent(effects: list[Effect], kind: type) -> list[ClusterMessage]:
    """Messages of one kind that are to be sent."""
    messages = [effect.message for effect in effects if isinstance(effect, SendMessage)]
    return [message for message in messages if isinstance(message, kind)]


def kinds(effects: list[Effect]) -> list[ElectionKind]:
    """What happened in elections."""
    events = [effect.event for effect in effects if isinstance(effect, Note)]
    return [event.kind for event in events if isinstance(event, ElectionEvent)]


def beat_in(view: View, number: int = 1000, **facts: Any) -> Heartbeat:
    """A heartbeat of somebody in a view."""
    said = {
        "phase": Phase.ACTIVE,
        "hears": tuple(mark(member) for member in view.members),
        "lineage": view.lineage,
        "epoch": view.epoch,
        "view": view_mark(view),
        "size": len(view.members),
        "leader": view.leader,
        **facts,
    }
    return Heartbeat(number, 1, 0.0, **said)


def test_nothing_is_taken_from_somebody_who_is_not_connected() -> None:
    """Nor from a process that we hold for dead."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    view = net.view_of(a)
    pre_vote = PreVote(view.lineage, view.epoch, 1)
    assert net.cores[a].receive(Z, pre_vote, net.now) == []
    net.sever(b, c)
    net.cores[b]._state.proofs[c] = "it is dead"
    net.cores[b]._state.contacts.of(c).is_connected = True
    assert sent(net.cores[b].receive(c, pre_vote, net.now), PreVoteReply) == []


def test_strangers_and_other_views_get_no_vote() -> None:
    """Whoever is behind is told the newest view instead, once in a while."""
    net = ClusterNet()
    a, b = net.form("ab")
    core, view = net.cores[a], net.view_of(a)
    core.connected(card("z"), net.now)
    for sender, epoch in ((Z, view.epoch), (b, view.epoch + 5), (b, view.epoch - 1)):
        effects = core.receive(sender, VoteRequest(view.lineage, epoch, 9), net.now)
        assert sent(effects, Vote) == []
    net.run(0.3)
    old = VoteRequest(view.lineage, view.epoch - 1, 9)
    assert len(sent(core.receive(b, old, net.now), Commit)) == 1
    assert sent(core.receive(b, old, net.now), Commit) == []
    assert core.view == view


def test_an_old_heartbeat_changes_nothing() -> None:
    """Only the newest counts, in whatever order they come."""
    net = ClusterNet()
    a, b = net.form("ab")
    late = beat_in(net.view_of(a), number=1, aborted=True)
    assert net.cores[a].receive(b, late, net.now) == []


def test_all_members_learn_of_the_same_loss() -> None:
    """Whoever hears of it by a heartbeat first names the same one, who left or was lost."""
    for orderly in (True, False):
        net = ClusterNet()
        a, b, c = net.form("abc")
        if orderly:
            told = net.cores[a].receive(c, core_departure(net.view_of(a), leaving=True), net.now)
        else:
            told = net.cores[a].disconnected(c, "it crashed", net.now)
        (abort,) = [effect for effect in told if isinstance(effect, Abort)]
        assert (abort.lost, abort.orderly) == (c, orderly)
        beats = sent(net.cores[a].tick(net.now + 0.3), Heartbeat)
        told = net.cores[b].receive(a, beats[0], net.now + 0.3)
        (abort,) = [effect for effect in told if isinstance(effect, Abort)]
        assert (abort.lost, abort.orderly) == (c, orderly)
        assert str(net.cores[c].me) in abort.reason  # and not only who says so


def test_a_loss_of_somebody_unknown_is_no_loss_of_a_member() -> None:
    """Operations end all the same, for the sender's have."""
    net = ClusterNet()
    a, b = net.form("ab")
    odd = beat_in(net.view_of(a), number=1000, aborted=True, lost=Z)
    told = net.cores[a].receive(b, odd, net.now)
    assert [effect.lost for effect in told if isinstance(effect, Abort)] == [None]


def test_a_member_elsewhere_is_reminded() -> None:
    """A member of our view whose heartbeats name no view, or another, is told of ours."""
    net = ClusterNet()
    _, b, c = net.form("abc")
    core = net.cores[b]
    joining = Heartbeat(1000, 1, 0.0, Phase.JOINING, (mark(b),))
    assert len(sent(core.receive(c, joining, net.now), Commit)) == 1
    core.receive(c, core_departure(net.view_of(b)), net.now)
    later = msgspec.structs.replace(joining, sequence=1001)
    assert sent(core.receive(c, later, net.now + 0.2), Commit) == []  # it has said where it is


def core_departure(view: View, *, epoch: int | None = None, leaving: bool = False) -> Departed:
    """Somebody's last word."""
    at = view.epoch if epoch is None else epoch
    return Departed(view.lineage, at, 0, -1, None, "elsewhere", is_leaving=leaving)


def test_departures_from_other_epochs_are_no_departures_from_ours() -> None:
    """An older one is answered with our view, a later one says that we are behind."""
    net = ClusterNet()
    a, b = net.form("ab")
    net.do(a, net.cores[a].step_down(net.now))
    net.run(0.5)
    core, view = net.cores[b], net.view_of(b)
    effects = core.receive(a, core_departure(view, epoch=view.epoch - 1), net.now)
    assert len(sent(effects, Commit)) == 1
    effects = core.receive(a, core_departure(view, epoch=view.epoch + 1), net.now)
    assert any(isinstance(effect, Paused) for effect in effects) or core.leader == b
    assert core.view == view
    core.receive(a, core_departure(view, epoch=view.epoch - 1, leaving=True), net.now)
    assert core.view is not None
    assert core.view.members == (b,)


def test_a_last_word_about_an_earlier_view_binds_nobody_in_ours() -> None:
    """What was promised and accepted there is ours: it says nothing about the next one."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    net.do(a, net.cores[a].step_down(net.now))
    net.run(0.5)
    core, view = net.cores[b], net.view_of(b)
    assert core.leader == b
    word = Departed(view.lineage, view.epoch - 1, 7, 7, Proposal(view.members), "bye", True)
    core.receive(c, word, net.now)
    assert core.election.is_leading  # nobody has voted in a later term of this epoch
    assert c in core.election.gone
    assert core.election.departed[c].accepted is None


def test_a_relayed_message_is_taken_as_its_origin_s() -> None:
    """Among members only, one hop, and only what members may relay."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    core, view = net.cores[c], net.view_of(c)
    request = encode(VoteRequest(view.lineage, view.epoch, 1))
    net.cut_off([a], [c])
    net.sever(a, c)
    votes = core.receive(b, Relayed(a, c, request), net.now)
    (answer,) = sent(votes, Relayed)
    assert isinstance(answer, Relayed)
    assert (answer.origin, answer.to) == (c, a)
    for odd in (
        Relayed(Z, c, request),
        Relayed(c, c, request),
        Relayed(a, c, b"garbage"),
        Relayed(a, c, encode(Found(view.lineage, Proposal(view.members)))),
    ):
        assert sent(core.receive(b, odd, net.now), Relayed) == []


def test_what_a_removed_member_says_by_way_of_another_is_ignored() -> None:
    """As what it says itself."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    core, view = net.cores[c], net.view_of(c)
    request = Relayed(a, c, encode(VoteRequest(view.lineage, view.epoch, 1)))
    core.expel(a, "what it sent", net.now)
    assert core.receive(b, request, net.now) == []


@pytest.mark.parametrize(
    "content",
    [
        lambda _: KnownProcesses((card("y"),)),
        lambda view: Found("0" * 32, Proposal(view.members)),
        lambda view: MergeRequest("0" * 32, 1, view.lineage),
        lambda view: beat_in(view, aborted=True),
        lambda view: Relayed(view.members[0], view.members[2], b"x"),
    ],
    ids=["KnownProcesses", "Found", "MergeRequest", "Heartbeat", "Relayed"],
)
def test_a_relayed_message_of_another_kind_is_ignored(
    content: Callable[[View], ClusterMessage],
) -> None:
    """Only what members say about their view may come by way of a third."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    core, view = net.cores[c], net.view_of(c)
    message = encode(content(view))
    assert core.receive(b, Relayed(a, c, message), net.now) == []


def test_a_late_vote_does_not_win_a_later_term() -> None:
    """A vote of term 1 that arrives in term 2 leaves the campaign open."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    core, view = net.cores[b], net.view_of(b)
    net.dropped = lambda *_: True
    net.kill(a)
    net.run(0.01)
    dead = (a,)
    core.receive(c, PreVoteReply(view.lineage, view.epoch, 1, True, 0, ()), net.now)
    while core.election.asked == 1:
        net.run(0.05)
        core.receive(c, beat_in(view, number=round(1000 * net.now), leader=None), net.now)
    core.receive(c, PreVoteReply(view.lineage, view.epoch, 2, True, 0, ()), net.now)
    assert core.election.state.role is ElectionRole.CAMPAIGNING
    core.receive(c, Vote(view.lineage, view.epoch, 1, True, 1, -1, None, dead), net.now)
    assert core.election.state.role is ElectionRole.CAMPAIGNING
    core.receive(c, Vote(view.lineage, view.epoch, 2, True, 2, -1, None, dead), net.now)
    assert core.election.is_leading


def test_a_relay_passes_on_for_the_sender_only() -> None:
    """And only to somebody it hears."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    core = net.cores[b]
    for_c = Relayed(a, c, b"whatever")
    assert sent(core.receive(a, for_c, net.now), Relayed) == [for_c]
    assert sent(core.receive(c, Relayed(a, Z, b"x"), net.now), Relayed) == []
    assert sent(core.receive(a, Relayed(a, Z, b"x"), net.now), Relayed) == []


def test_nothing_is_sent_by_way_of_somebody_who_has_departed() -> None:
    """It passes nothing on any more, though it is connected: another one does."""
    net = ClusterNet()
    a, b, c, d = net.form("abcd")
    core, view = net.cores[d], net.view_of(d)
    net.cut_off([a], [d])
    net.sever(a, d)
    core.receive(b, core_departure(view, epoch=view.epoch), net.now)
    request = Relayed(a, d, encode(VoteRequest(view.lineage, view.epoch, 1)))
    answers = [e for e in core.receive(c, request, net.now) if isinstance(e, SendMessage)]
    assert [answer.to for answer in answers if isinstance(answer.message, Relayed)] == [c]


def test_who_accepts_names_those_who_departed_among_the_silent() -> None:
    """The leader may not have heard of it, and would wait for them."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    core, view = net.cores[b], net.view_of(b)
    core.receive(c, core_departure(view, epoch=view.epoch), net.now)
    propose = Propose(view.lineage, view.epoch, 0, Proposal((a, b)))
    (word,) = sent(core.receive(a, propose, net.now), Accepted)
    assert isinstance(word, Accepted)
    assert word.silent == (c,)


def test_two_views_of_one_number_are_reported_and_the_lesser_gives_way() -> None:
    """It must not happen; if it does, people know, and one remains."""
    net = ClusterNet()
    a, b = net.form("ab")
    core, view = net.cores[a], net.view_of(a)
    other = View(view.lineage, view.epoch, (b, a))
    effects = core.receive(b, beat_in(other, samples=0, size=1), net.now)
    assert ElectionKind.SPLIT_BRAIN in kinds(effects)
    assert core.view == view
    effects = core.receive(b, beat_in(other, number=1001, samples=5), net.now)
    assert any(isinstance(effect, Removed) for effect in effects)
    assert core.view is None


def test_another_commit_of_our_number_is_a_split_brain() -> None:
    """Reported; by itself it does not move us."""
    net = ClusterNet()
    a, b = net.form("ab")
    core, view = net.cores[a], net.view_of(a)
    effects = core.receive(b, Commit(view.lineage, view.epoch, Proposal((b, a))), net.now)
    assert ElectionKind.SPLIT_BRAIN in kinds(effects)
    assert core.view == view
    assert core.receive(b, Commit(view.lineage, view.epoch, Proposal(view.members)), net.now) == []
    core.connected(card("z"), net.now)  # of whom no heartbeat has come yet
    effects = core.receive(Z, Commit(view.lineage, view.epoch, Proposal((b, a))), net.now)
    assert ElectionKind.SPLIT_BRAIN in kinds(effects)
    assert core.view == view


def test_a_view_that_we_cannot_enter_is_declined_for_ever() -> None:
    """Others who count on us are told so, each time with the same word."""
    net = ClusterNet()
    a, _ = net.form("ab")
    core = net.cores[a]
    core.connected(card("z"), net.now)
    strange = Commit("0" * 32, 4, Proposal((Z, a)))
    words = [sent(core.receive(Z, strange, net.now), Departed) for _ in range(2)]
    assert words[0] == words[1]
    (word,) = words[0]
    assert isinstance(word, Departed)
    assert (word.lineage, word.epoch, word.promised) == ("0" * 32, 4, -1)
    assert sent(core.receive(Z, Commit("0" * 32, 4, Proposal((Z,))), net.now), Departed) == []


def test_a_stale_view_is_installed_paused() -> None:
    """Whoever hears that others are ahead has no quorum in it."""
    core = ClusterCore(card("a"), ClusterConfig(), 0.0)
    b = card("b").process
    a = core.me.process
    core.connected(card("b"), 0.0)
    ahead = View("f" * 32, 9, (b,))
    core.receive(b, beat_in(ahead, number=1, hears=(mark(a),)), 0.01)
    effects = core.receive(b, Commit("f" * 32, 4, Proposal((b, a))), 0.02)
    assert any(isinstance(effect, Installed) for effect in effects)
    assert core.state is ClusterState.PAUSED


def test_unsound_proposals_are_ignored() -> None:
    """Nobody, somebody twice, or term 0 from somebody else."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    core, view = net.cores[c], net.view_of(c)
    for sender, members in ((a, ()), (a, (a, a)), (b, (b, c))):
        message = Propose(view.lineage, view.epoch, 0, Proposal(members))
        assert sent(core.receive(sender, message, net.now), Accepted) == []


def test_proposals_of_the_past_are_refused_and_contradictions_reported() -> None:
    """After a vote in term 2 nothing of term 1 is accepted; one term, one proposal."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    core, view = net.cores[c], net.view_of(c)
    core.receive(b, VoteRequest(view.lineage, view.epoch, 2), net.now)
    first = Propose(view.lineage, view.epoch, 1, Proposal((a, b, c)))
    (refusal,) = sent(core.receive(a, first, net.now), Accepted)
    assert isinstance(refusal, Accepted)
    assert (refusal.is_accepted, refusal.promised) == (False, 2)
    core.receive(b, msgspec.structs.replace(first, term=2), net.now)
    other = Propose(view.lineage, view.epoch, 2, Proposal((b, c)))
    assert ElectionKind.SPLIT_BRAIN in kinds(core.receive(a, other, net.now))


def test_a_leader_whose_proposal_is_refused_steps_back() -> None:
    """Somebody has promised a later term; late answers do not matter."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    core, view = net.cores[a], net.view_of(a)
    net.dropped = lambda *_: True
    net.do(a, core.step_down(net.now))
    refusal = Accepted(view.lineage, view.epoch, 0, False, 0, (), ())
    core.receive(b, refusal, net.now)
    assert core.election.is_leading
    core.receive(b, msgspec.structs.replace(refusal, promised=3), net.now)
    assert not core.election.is_leading
    assert core.receive(c, refusal, net.now) is not None
    assert core.election.state.role is ElectionRole.CANVASSING
    assert core.election.asked == 4


def test_a_candidate_learns_of_a_later_term() -> None:
    """A refused vote ends its campaign."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    core, view = net.cores[b], net.view_of(b)
    net.dropped = lambda *_: True
    net.kill(a)
    net.run(0.01)
    proofs = tuple(core._state.proofs)
    core.receive(c, PreVoteReply(view.lineage, view.epoch, 1, True, 0, proofs), net.now)
    assert core.election.state.role is ElectionRole.CAMPAIGNING
    core.receive(c, Vote(view.lineage, view.epoch, 1, False, 5, -1, None, ()), net.now)
    assert core.election.state.role is not ElectionRole.CAMPAIGNING


@pytest.mark.parametrize(
    ("facts", "granted"),
    [({}, False), ({"term": 1}, True), ({"lineage": "0" * 32}, True)],
)
def test_a_canvass_is_granted_only_without_a_leader(facts: dict[str, Any], granted: bool) -> None:
    """One that votes for others, or has gone to another lineage, is no leader any more."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    core, view = net.cores[c], net.view_of(c)
    core.receive(a, beat_in(view, **facts), net.now)
    (answer,) = sent(core.receive(b, PreVote(view.lineage, view.epoch, 1), net.now), PreVoteReply)
    assert isinstance(answer, PreVoteReply)
    assert answer.is_granted is granted


def test_observers_keep_what_they_are_told_within_bounds() -> None:
    """Terminal views end a lineage; old lineages are forgotten."""
    core = ClusterCore(card("o", role=ProcessRole.OBSERVER), ClusterConfig(), 0.0)
    core.connected(card("z"), 0.0)
    assert core.receive(Z, PreVote("f" * 32, 1, 1), 0.0) == []
    for number in range(70):
        core.receive(Z, Commit(str(number), 2, Proposal((Z,))), 0.0)
    assert len(core.observed) == 64
    core.receive(Z, Commit("69", 1, Proposal((Z,))), 0.0)
    assert core.observed["69"].epoch == 2
    core.receive(Z, Commit("69", 3, Proposal((Z,), into="68")), 0.0)
    assert "69" not in core.observed


def test_after_leaving_nothing_matters() -> None:
    """Every input is answered with nothing."""
    net = ClusterNet()
    a, b = net.form("ab")
    core = net.cores[a]
    core.leave(net.now)
    now = net.now
    assert core.connected(card("z"), now) == []
    assert core.disconnected(b, "reset", now) == []
    assert core.ended(b, "its port refuses connections", now) == []
    assert core.unreachable(b, "no answer", now) == []
    assert core.receive(b, PreVote("f" * 32, 1, 1), now) == []
    assert core.tick(now) == core.leave(now) == core.step_down(now) == []
    assert core.call_election(now) == []
    assert core.expel(b, "what it sent", now) == []
    assert core.continue_without_missing(now) == []
    assert core.leader is None


def test_decisions_that_follow_from_each_other_may_take_another_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The number of rounds in one call is bounded; the next call goes on."""
    monkeypatch.setattr(membership_core, "_ROUNDS", 1)
    core = ClusterCore(card("a"), ClusterConfig(solo_delay=0.5, min_nodes=1), 0.0)
    core.step_down(0.1)
    core.tick(0.5)
    core.tick(0.6)
    assert core.state is ClusterState.ACTIVE
    assert core.samples == 0


def test_a_member_that_agreed_to_be_left_out_pauses_until_it_is_told() -> None:
    """Time alone does not free it: the view without it may have been agreed."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    core, view = net.cores[c], net.view_of(c)
    proposal = Proposal((a, b), "without c")
    core.receive(a, Propose(view.lineage, view.epoch, 0, proposal), net.now)
    assert core.reason == "we have agreed to be left out of the next view"
    for _ in range(30):
        net.now += 0.1
        for sender in (a, b):
            number = core._state.contacts.of(sender).newest + 1
            echo = core._state.contacts.sequence
            beat = msgspec.structs.replace(beat_in(view, number=number), echo=echo)
            core.receive(sender, beat, net.now)
        core.tick(net.now)
    assert core.view == view
    assert core.state is ClusterState.PAUSED


def test_another_member_s_proof_is_good_enough_for_the_leader() -> None:
    """Whoever holds the proof accepts, and with it the proof counts."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    net.cut.add((a, c))  # so that the leader's probes prove nothing
    net.kill(c)
    net.run(0.1)
    assert net.view_of(b).members == (a, b)
    assert "another member has proved" in net.cores[a].reason


def test_a_member_known_to_have_died_is_dead_in_the_next_view_too() -> None:
    """A proof does not get lost when a view with the dead member is agreed meanwhile."""
    net = ClusterNet()
    a, b, c, d = net.form("abcd")
    net.dropped = lambda _sender, _to, message: isinstance(message, Accepted)
    net.kill(d)
    net.run(0.01)
    net.kill(c)
    net.run(0.1)
    assert net.view_of(a).epoch == 1
    net.dropped = lambda *_: False
    net.run(0.6)
    assert net.agreed() == "ab"
    assert net.view_of(a).epoch == 3
    assert ProcessId(NodeId("c" * 32), 1) in net.views()[net.view_of(a).lineage, 2].pop().members
    del b


# --- who is behind, and what it is told ---


def commit_of(view: View, epoch: int, *members: ProcessId) -> Commit:
    """A view of the same lineage."""
    return Commit(view.lineage, epoch, Proposal(members, f"view {epoch}"))


def test_a_process_that_is_behind_is_told_the_next_view_and_the_newest() -> None:
    """Once in half a beat; one view alone is told once."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    core, view = net.cores[c], net.view_of(c)
    for epoch in (2, 3, 4):
        core.receive(a, commit_of(view, epoch, a, b, c), net.now)
    net.now += 1
    core._state.interval = 0.2

    def told(after: float) -> list[int]:
        net.now += after
        late = PreVote(view.lineage, view.epoch, 1)
        said = sent(core.receive(b, late, net.now), Commit)
        return [message.epoch for message in said if isinstance(message, Commit)]

    assert told(0.0) == [2, 4]
    assert told(0.09) == []
    assert told(0.02) == [2, 4]
    late = PreVote(view.lineage, 3, 1)
    said = sent(core.receive(b, late, net.now + 0.15), Commit)
    assert [message.epoch for message in said if isinstance(message, Commit)] == [4]


def test_one_whose_next_view_we_do_not_know_waits_for_others_to_tell_it() -> None:
    """Half a beat later it is told the newest that we know."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    core, view = net.cores[c], net.view_of(c)
    core._state.history._commits.clear()
    core._state.history.record(commit_of(view, 5, a, b, c))
    core._state.interval = 0.2
    late = PreVote(view.lineage, 2, 1)
    waits = {0.0: 0, 0.05: 0, 0.11: 1, 0.3: 0, 0.45: 1}
    for after, count in waits.items():
        assert len(sent(core.receive(b, late, net.now + after), Commit)) == count, after


def test_an_idle_process_is_told_of_a_child_of_its_lineage_and_one_at_work_is_not() -> None:
    """One at work may be right; a process of which nothing is known is not told."""
    net = ClusterNet()
    a, b = net.form("ab")
    core = net.cores[a]
    parent = "e" * 32
    child = Commit("d" * 32, 3, Proposal((Z,)), Charter(ancestry=(Branch(parent, 4),)))
    core._state.history.record(child)
    core.connected(card("z"), net.now)
    late = PreVote(parent, 4, 1)
    assert sent(core.receive(Z, late, net.now), Commit) == []
    for number, phase in enumerate((Phase.ACTIVE, Phase.JOINING), 1):
        core._state.contacts.of(Z).helped_at = float("-inf")
        beat = Heartbeat(number, 1, 0.0, phase, (), lineage="c" * 32, epoch=1, size=1)
        core.receive(Z, beat, net.now)
        said = sent(core.receive(Z, late, net.now), Commit)
        assert said == ([child] if phase is Phase.JOINING else [])
    assert net.view_of(b).members == (a, b)


def test_a_newcomer_of_another_lineage_is_told_where_ours_is_with_its_first_beat() -> None:
    """Not with its second, and not one of our own lineage."""
    net = ClusterNet()
    a, _ = net.form("ab")
    core, view = net.cores[a], net.view_of(a)
    core.connected(card("z"), net.now)
    free = Heartbeat(1, 1, 0.0, Phase.JOINING, ())
    assert sent(core.receive(Z, free, net.now), Commit) == [core.bound]
    again = msgspec.structs.replace(free, sequence=2)
    assert sent(core.receive(Z, again, net.now), Commit) == []
    core.connected(card("y"), net.now)
    ours = msgspec.structs.replace(free, bound=view.lineage, bound_epoch=view.epoch)
    assert sent(core.receive(card("y").process, ours, net.now), Commit) == []


def test_a_waiting_process_reminds_members_of_its_view_that_are_elsewhere() -> None:
    """So they say whether they have left; not those that said so, and not strangers."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    core, view = net.cores[c], net.view_of(c)
    core.receive(a, commit_of(view, 2, a, b), net.now)
    assert core.view is None
    elsewhere = beat_in(View("d" * 32, 1, (a,)), bound="d" * 32, bound_epoch=1)
    contact = core._state.contacts.of(a)

    def told(sender: ProcessId, number: int) -> int:
        net.now += 1
        said = msgspec.structs.replace(elsewhere, sequence=number)
        return len(sent(core.receive(sender, said, net.now), Commit))

    assert told(a, 1001) == 2  # the view right after the first, and the newest: one of two
    del contact
    core._state.departed.add(a)
    assert told(a, 1002) == 0
    core.connected(card("z"), net.now)
    assert told(Z, 1) == 1  # only where ours is, with its first beat
    assert told(Z, 2) == 0


def test_strangers_and_ourselves_relay_nothing() -> None:
    """Both the sender and the origin must be members."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    core, view = net.cores[c], net.view_of(c)
    core.connected(card("z"), net.now)
    request = encode(VoteRequest(view.lineage, view.epoch, 1))
    for sender, origin in ((Z, a), (b, Z), (b, c)):
        effects = core.receive(sender, Relayed(origin, c, request), net.now)
        assert not any(isinstance(e, SendMessage) and isinstance(e.message, Vote) for e in effects)
        assert core.election.ballot.promised == 0
    for origin, to in ((Z, a), (c, a)):
        assert sent(core.receive(b, Relayed(origin, to, request), net.now), Relayed) == []


def test_every_message_is_a_sign_of_life() -> None:
    """Not only heartbeats."""
    net = ClusterNet()
    a, b = net.form("ab")
    core, view = net.cores[a], net.view_of(a)
    core.receive(b, PreVote(view.lineage, view.epoch, 1), net.now + 0.19)
    assert core.health.silence(b, net.now + 0.19) == 0.0


def test_the_cards_of_acquaintances_are_remembered() -> None:
    """For when they are members of a view that we wait for."""
    core = ClusterCore(card("a"), ClusterConfig(), 0.0)
    core.connected(card("b"), 0.0)
    core.connected(card("c", 5), 0.0)
    cards = (card("d", port=7), card("c", 2))
    met = core.receive(card("b").process, KnownProcesses(cards), 0.0)
    assert [e.card for e in met if isinstance(e, ConnectTo)] == [cards[0]]  # c has started again
    assert core._state.contacts.last_card(card("d").process).port == 7


def test_a_reported_loss_stops_operations_and_asks_a_voter_again() -> None:
    """It may have refused because it still heard the leader."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    core, view = net.cores[b], net.view_of(b)
    told = core.receive(c, Lost(view.lineage, view.epoch, a, "reset"), net.now)
    (abort,) = [effect for effect in told if isinstance(effect, Abort)]
    assert abort.lost == a
    assert abort.reason == "c reports: reset"
    core.election.pre_vote(net.now, "a is lost")
    again = core.receive(c, Lost(view.lineage, view.epoch, a, "reset"), net.now)
    assert len(sent(again, PreVote)) >= 1


def test_whoever_leaves_for_good_has_ended_and_whoever_goes_elsewhere_has_not() -> None:
    """Only the first one's process is over."""
    for leaving in (True, False):
        net = ClusterNet()
        a, b, c = net.form("abc")
        core = net.cores[b]
        core.receive(c, core_departure(net.view_of(b), leaving=leaving), net.now)
        assert (c in core._state.ended) is leaving
        assert core._state.ended.get(c, ("it left", 0.0))[0] == "it left"
        assert a in net.view_of(b).members


def test_one_that_went_to_another_lineage_was_left_out_and_one_that_left_for_good_was_not() -> None:
    """The first one is alive, and may have a state that no member has."""
    for leaving in (True, False):
        net = ClusterNet()
        a, b, c = net.form("abc")
        for who in (a, b):
            departure = core_departure(net.view_of(who), leaving=leaving)
            net.do(who, net.cores[who].receive(c, departure, net.now))
            assert net.cores[who].has_ended(c) is leaving
        net.cut_off([c], [a, b])
        net.run(4)
        assert net.agreed_by([a, b]) == "ab"
        expected: dict[ProcessId, str] = {} if leaving else {c: "c"}
        assert [net.cores[who].left_out({}) for who in (a, b)] == [(expected, ())] * 2
        assert net.cores[a].has_ended(c) is leaving


def test_one_that_is_proved_dead_was_not_left_out() -> None:
    """Nobody waits for the state that it had."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    net.kill(c)
    net.run(4)
    assert net.agreed_by([a, b]) == "ab"
    assert [net.cores[who].left_out({}) for who in (a, b)] == [({}, ())] * 2


def test_one_that_was_in_a_later_view_than_ours_gives_us_no_lease() -> None:
    """Its last word there shows that it has gone on without us."""
    net = ClusterNet()
    a, b = net.form("ab")
    core, view = net.cores[b], net.view_of(b)
    core.receive(a, core_departure(view, epoch=view.epoch + 1), net.now)
    assert not core._state.has_lease(core._state.contacts.of(a))
    assert a not in core.election.departed
    same = net.cores[a]
    same.receive(b, core_departure(view), net.now)
    assert b in same.election.departed or same.view != view


def test_a_goodbye_says_so_stops_operations_and_is_told() -> None:
    """The others need not look for us."""
    net = ClusterNet()
    a, b = net.form("ab")
    effects = net.cores[a].leave(net.now)
    (word,) = sent(effects, Departed)
    assert isinstance(word, Departed)
    assert word.is_leaving
    assert [effect.reason for effect in effects if isinstance(effect, Abort)] == ["we left"]
    told = [str(effect.event) for effect in effects if isinstance(effect, Note)]
    assert "a left" in told
    assert net.cores[a].election.state.role is ElectionRole.IDLE
    assert b in net.cores


def test_an_observer_tells_of_each_new_view_once() -> None:
    """The lineage that changed last is kept longest."""
    core = ClusterCore(card("o", role=ProcessRole.OBSERVER), ClusterConfig(), 0.0)
    core.connected(card("z"), 0.0)
    view = Commit("1", 2, Proposal((Z,), "begun"))
    told = core.receive(Z, view, 0.0)
    assert [str(e.event) for e in told if isinstance(e, Note)] == ["view 2: begun"]
    assert core.receive(Z, view, 0.0) == []
    core.receive(Z, Commit("2", 1, Proposal((Z,))), 0.0)
    core.receive(Z, Commit("1", 3, Proposal((Z,))), 0.0)
    assert list(core.observed) == ["2", "1"]


# --- a proposal, from the first question to the commit ---


def test_a_leader_repeats_its_question_every_two_beats() -> None:
    """To all who are not gone, until it is answered."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    core = net.cores[a]
    net.dropped = lambda *_: True
    effects = core.step_down(net.now)
    assert {
        e.to for e in effects if isinstance(e, SendMessage) and isinstance(e.message, Propose)
    } == {
        b,
        c,
    }
    times = []
    for step in range(1, 100):
        now = net.now + 0.01 * step
        if sent(core.tick(now), Propose):
            times.append(now - net.now)
    assert times == pytest.approx([0.4, 0.8], abs=0.011)


def test_a_new_view_begins_without_an_oath_or_acceptors_of_the_last() -> None:
    """And the planner forgets what was of the view before."""
    net = ClusterNet()
    a, b = net.form("ab")
    proposer = net.cores[b]._proposer
    view = net.view_of(b)
    propose = Propose(view.lineage, view.epoch, 0, Proposal((a, b)))
    net.cores[b].receive(a, propose, net.now)
    assert proposer._sworn is not None
    proposer._acceptors[a] = proposer._sworn
    net.cores[b]._planner.is_stepping_down = True
    net.cores[b].receive(a, commit_of(view, view.epoch + 1, a, b), net.now)
    assert [proposer._sworn] == [None]
    assert not proposer._acceptors
    assert not net.cores[b]._planner.is_stepping_down


def test_only_so_many_that_are_behind_are_remembered() -> None:
    """Each waits half a beat at most; a flood of strangers takes no memory."""
    net = ClusterNet()
    a, _ = net.form("ab")
    dispatch, s = net.cores[a]._dispatch, net.cores[a]._state
    dispatch._behind = {ProcessId(NodeId("f" * 32), number): 0.0 for number in range(513)}
    assert not dispatch._has_waited(Z)
    assert dispatch._behind == {Z: s.time}
    s.clock.advance(s.time + 0.09)
    assert not dispatch._has_waited(Z)
    s.clock.advance(s.time + 0.02)
    assert dispatch._has_waited(Z)

"""Being in a view: when it holds, when it pauses, and when one goes."""

from __future__ import annotations

import msgspec

from potluck.core.cluster import ClusterState
from potluck.core.cluster_effects import Send
from potluck.core.cluster_messages import Commit, Proposal, Propose
from potluck.vocabulary import ProcessId
from support.cluster_net import ClusterNet, card


def keep_in_touch(net: ClusterNet, me: ProcessId, other: ProcessId, seconds: float) -> None:
    """Let one process hear another that hears it, and nobody else."""
    core = net.cores[me]
    contacts = core._situation.contacts
    beat = contacts.of(other).beat
    assert beat is not None
    for _ in range(int(seconds * 10)):
        net.now += 0.1
        core.tick(net.now)
        number, echo = contacts.of(other).newest + 1, contacts.sequence
        beat = msgspec.structs.replace(beat, sequence=number, echo=echo)
        core.receive(other, beat, net.now)


def test_whoever_accepted_a_next_view_needs_a_quorum_of_it_too() -> None:
    """It may have been agreed already, and its members may be going on without us."""
    net = ClusterNet()
    a, b = net.form("ab")
    core, view = net.cores[b], net.view_of(b)
    strangers = [card(letter).process for letter in "xyz"]
    proposal = Proposal((a, b, *strangers), "with three more")
    core.receive(a, Propose(view.lineage, view.epoch, 0, proposal), net.now)
    assert core.state is ClusterState.PAUSED
    assert "no quorum of it in contact" in core.reason
    keep_in_touch(net, b, a, seconds=4)
    assert core.view == view  # whoever leads is there, and will come to a decision


def test_beats_of_somebody_who_accepted_the_next_view_give_no_lease() -> None:
    """Its word for the old view is worth nothing any more."""
    net = ClusterNet()
    a, b = net.form("ab")
    core = net.cores[b]
    beat = core._situation.contacts.of(a).beat
    assert beat is not None
    core._situation.contacts.of(a).beat = msgspec.structs.replace(beat, withholds=True)
    keep_in_touch(net, b, a, seconds=1.5)
    assert core.state is ClusterState.PAUSED
    assert "does not confirm" in core.reason


def test_those_who_accepted_the_same_next_view_still_rely_on_each_other() -> None:
    """The others, and those who are not in it, are given no lease from then on."""
    net = ClusterNet()
    a, b, c, d = net.form("abcd")
    core, view = net.cores[b], net.view_of(b)
    situation = core._situation
    assert not any(situation._withholds(who) for who in (a, c, d))
    proposal = Proposal((a, b, c), "without d")
    core.receive(a, Propose(view.lineage, view.epoch, 0, proposal), net.now)
    assert all(situation._withholds(who) for who in (a, c, d))
    for who in (a, d):
        beat = situation.contacts.of(who).beat
        assert beat is not None
        said = msgspec.structs.replace(beat, accepted=situation.accepted_mark)
        situation.contacts.of(who).beat = said
    assert [situation._withholds(who) for who in (a, c, d)] == [False, True, True]


def test_whoever_is_left_out_gives_no_lease_and_an_end_of_all_has_no_mark() -> None:
    """One that agreed to go counts for nothing more; nobody goes on from a terminal view."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    for proposal in (Proposal((a, c), "without b"), Proposal((a, b, c), "over", into="e" * 32)):
        situation = net.cores[b]._situation
        situation.election.ballot.accepted = proposal
        beat = situation.contacts.of(a).beat
        assert beat is not None
        said = msgspec.structs.replace(beat, accepted=situation.accepted_mark)
        situation.contacts.of(a).beat = said
        assert situation._withholds(a)
        assert bool(situation.accepted_mark) is not bool(proposal.into)


def test_a_newcomer_does_not_enter_a_view_of_which_it_knows_a_later_one() -> None:
    """It was let in, never heard of it, and was given up; somebody who is behind tells it now."""
    net = ClusterNet()
    a, b = net.form("ab")
    view = net.view_of(a)
    newcomer = net.add("c")
    net.mesh()
    core = net.cores[newcomer]
    core.receive(a, Commit(view.lineage, view.epoch + 2, Proposal((a,))), net.now)
    late = Commit(view.lineage, view.epoch + 1, Proposal((a, b, newcomer)))
    effects = core.receive(b, late, net.now)
    assert core.view is None
    answers = [e.message for e in effects if isinstance(e, Send) and e.to == b]
    assert any(isinstance(each, Commit) and each.epoch == view.epoch + 2 for each in answers)


def test_whoever_is_behind_gets_no_lease_from_those_who_know_it() -> None:
    """Also when they are in no view, and when it has not said yet where it is."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    core, view = net.cores[b], net.view_of(b)
    situation = core._situation
    core.receive(a, Commit(view.lineage, view.epoch + 1, Proposal((a, c))), net.now)
    assert core.view is None
    assert situation._withholds(c)  # it is in the view before
    contact = situation.contacts.of(c)
    assert contact.beat is not None
    contact.beat = msgspec.structs.replace(contact.beat, epoch=view.epoch + 1)
    assert not situation._withholds(c)
    contact.beat = None
    assert situation._withholds(c)

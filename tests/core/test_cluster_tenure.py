"""Being in a view: when it holds, when it pauses, and when one goes."""

from __future__ import annotations

import msgspec

from potluck.core.cluster import ClusterState
from potluck.core.cluster_messages import Proposal, Propose
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

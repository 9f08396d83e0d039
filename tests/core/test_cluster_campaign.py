"""Finding a leader: who gets our vote, and for how long we believe in whom we voted for."""

from __future__ import annotations

import msgspec

from potluck.core.cluster_campaign import LONGEST_CAMPAIGN
from potluck.core.cluster_effects import Send
from potluck.core.cluster_messages import Canvass, Leaning, Vote, VoteRequest
from potluck.vocabulary import ProcessId
from support.cluster_net import ClusterNet

NOT_ELECTED = "had our vote and was not elected"


def answers(
    net: ClusterNet, me: ProcessId, sender: ProcessId, message: msgspec.Struct
) -> list[object]:
    """What a process answers to somebody."""
    effects = net.cores[me].receive(sender, message, net.now)  # type: ignore[arg-type]
    said = [effect.message for effect in effects if isinstance(effect, Send)]
    return [each for each in said if isinstance(each, Vote | Leaning)]


def test_a_vote_is_given_once_and_the_loser_believed_in_for_the_time_of_a_campaign() -> None:
    """While it may still count, nobody else gets our word; then we would vote for another."""
    net = ClusterNet()
    a, b, c, d = net.form("abcd")
    core, view = net.cores[d], net.view_of(d)
    campaign = core._campaign
    (given,) = answers(net, d, c, VoteRequest(view.lineage, view.epoch, 1))
    (refused,) = answers(net, d, b, VoteRequest(view.lineage, view.epoch, 1))
    assert isinstance(given, Vote)
    assert isinstance(refused, Vote)
    assert (given.is_granted, refused.is_granted) == (True, False)
    contact = core._situation.contacts.of(c)
    assert contact.beat is not None
    contact.beat = msgspec.structs.replace(contact.beat, term=1, leader=None)
    assert campaign.why_leaderless() == ""
    (leaning,) = answers(net, d, b, Canvass(view.lineage, view.epoch, 2))
    assert isinstance(leaning, Leaning)
    assert leaning.reason == "the leader is heard"
    campaign._hopes_until -= LONGEST_CAMPAIGN * core._situation.config.election.election_timeout
    assert NOT_ELECTED in campaign.why_leaderless()
    contact.beat = msgspec.structs.replace(contact.beat, leader=c)
    assert campaign.why_leaderless() == ""
    contact.beat = msgspec.structs.replace(contact.beat, term=0, leader=a)  # an old one
    assert campaign.why_leaderless() == ""

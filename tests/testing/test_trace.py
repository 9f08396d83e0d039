"""Messages in few words: names instead of ids, nothing that is empty."""

from potluck.core.cluster_cards import ProcessCard, Role
from potluck.core.cluster_messages import Acquaintances, Commit, Proposal
from potluck.testing.trace import in_short
from potluck.testing.violation import Names
from potluck.vocabulary import NodeId, ProcessId

ANNA = ProcessId(NodeId("a" * 32), 7)


def who(process: ProcessId) -> str:
    """Its first letter."""
    return process.node[0]


def test_a_message_is_told_in_one_line() -> None:
    """The lineage in its first digits, empty fields not at all."""
    told = in_short(Commit("f" * 32, 3, Proposal((ANNA,), "with anna")), who)
    assert told.startswith(
        "Commit(lineage=ffffffff, epoch=3, proposal=Proposal(members={a}, reason=with anna"
    )
    assert "into=" not in told


def test_cards_and_words_are_names() -> None:
    """Whatever a message carries."""
    card = ProcessCard(node=ANNA.node, incarnation=7)
    assert in_short(Acquaintances((card,)), who) == "Acquaintances(cards={a})"
    assert in_short(Role.OBSERVER, who) == "observer"


def test_who_is_unknown_keeps_its_id() -> None:
    """A name is better, but the id is something too."""
    assert Names({}).who(ANNA) == "aaaaaaaa/7"
    assert Names({}).view(None) == "no view"

"""auto: proposed by each rank, agreed among all, kept for a while."""

import numpy as np
import pytest

from potluck import MalformedFrame
from potluck.collective.compression.choice import CANDIDATES, Choice
from potluck.collective.compression.strategy import CompressionStrategy
from potluck.runtime.call import Call
from potluck.runtime.choices import LASTING, Choices
from potluck.runtime.compressed import Exchange
from potluck.runtime.encoder_speed import encoder_speeds

NONE, INT8, TOPK = CANDIDATES[0], CANDIDATES[2], CANDIDATES[3]
KEY = (1 << 20, 4, True, False)


class Others:
    """A group in which the other rank proposes something."""

    def __init__(self, proposal: int) -> None:
        self.proposal = proposal
        self.asked = 0

    def run(self, call: Call) -> None:
        """Gather both proposals."""
        self.asked += 1
        call.target[:] = [call.source[0], self.proposal]


def settle(choices: Choices, others: Others, mine: Choice) -> CompressionStrategy:
    """What comes of a proposal."""
    return choices.agreed(Exchange(2, others.run), KEY, lambda: mine)


def test_the_gentlest_proposal_is_taken() -> None:
    """A machine with a slow encoder slows nobody down by it."""
    assert settle(Choices(), Others(0), Choice(INT8, "")) == NONE
    assert settle(Choices(), Others(3), Choice(INT8, "")) == INT8
    assert settle(Choices(), Others(3), Choice(TOPK, "")) == TOPK


def test_an_agreement_says_why() -> None:
    """In words, on every rank; and where another rank decided, that too."""
    choices = Choices()
    settle(choices, Others(3), Choice(INT8, "int8, because it pays"))
    assert [str(choice.reason) for choice in choices.made] == ["int8, because it pays"]
    choices.agreed(
        Exchange(2, Others(0).run), (9, 4, True, False), lambda: Choice(INT8, "int8 pays")
    )
    assert choices.made[-1].strategy == NONE
    assert choices.made[-1].reason == "none, because another rank prefers it; here: int8 pays"


def test_a_choice_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Not for every size of arrays; and again when it changes."""
    choices, others = Choices(), Others(3)
    with caplog.at_level("INFO", "potluck.runtime.choices"):
        for size in (1 << 20, 1 << 21, 1 << 22):
            key = (size, 4, True, False)
            choices.agreed(Exchange(2, others.run), key, lambda: Choice(INT8, "int8 pays"))
        assert [record.getMessage() for record in caplog.records] == ["Compression: int8 pays"]
        for _ in range(LASTING + 1):
            settle(choices, others, Choice(NONE, "none pays"))
    assert [record.getMessage() for record in caplog.records[1:]] == ["Compression: none pays"]


@pytest.mark.parametrize("number", [-2, 4, 1 << 40])
def test_a_proposal_that_does_not_exist_is_refused(number: int) -> None:
    """With the rank that made it."""
    with pytest.raises(MalformedFrame, match="Rank 1 proposes a compression that does not exist"):
        settle(Choices(), Others(number), Choice(INT8, ""))


def test_an_agreement_lasts_for_a_while() -> None:
    """The ranks ask each other at the same call, and seldom."""
    choices, others = Choices(), Others(2)
    for _ in range(2 * LASTING + 2):
        assert settle(choices, others, Choice(INT8, "")) == INT8
    assert others.asked == 2


def test_until_the_links_are_known_nothing_is_compressed() -> None:
    """And nothing is agreed on: the next call asks again."""
    choices, others = Choices(), Others(-1)
    assert settle(choices, others, Choice(INT8, "")) == NONE
    others.proposal = 2
    assert settle(choices, others, Choice(NONE, "", is_known=False)) == NONE
    assert settle(choices, others, Choice(INT8, "")) == INT8


def test_speeds_are_measured_for_all_that_can_be_chosen() -> None:
    """Once; in bytes per second of a machine that is not from another world."""
    speeds = encoder_speeds()
    assert set(speeds) == set(CANDIDATES[1:])
    assert all(1_000_000 < each.encode < 10**12 for each in speeds.values())
    assert encoder_speeds() is speeds
    assert np.all([each.decode > 0 for each in speeds.values()])

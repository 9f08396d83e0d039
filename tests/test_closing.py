"""Closing: the end of a block closes, however it comes."""

import pytest

from potluck.closing import Closing


class Door(Closing):
    """Counts how often it was closed."""

    closed = 0

    def close(self) -> None:
        """Count."""
        self.closed += 1


def test_the_end_of_a_block_closes() -> None:
    """What is entered is the thing itself."""
    door = Door()
    with door as entered:
        assert entered is door
        assert door.closed == 0
    assert door.closed == 1


def test_an_error_closes_too_and_is_not_swallowed() -> None:
    """The caller hears of it."""
    door = Door()
    with pytest.raises(ZeroDivisionError), door:
        raise ZeroDivisionError
    assert door.closed == 1


def test_what_cannot_be_closed_says_so() -> None:
    """A class that forgot its ``close`` is found at its first use."""
    with pytest.raises(NotImplementedError), Closing():
        pass

"""Spinning: worth it while answers come at once, given up while they do not."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from potluck.net import transport as spin_module
from potluck.net.transport import MOST, RETRY_EVERY, Event, Spin

READABLE: list[Event] = [(1, True, False)]


class Poller:
    """Answers after so many looks, or never."""

    def __init__(self, answers_after: int | None = None) -> None:
        self.looks = 0
        self.answers_after = answers_after

    def wait(self, timeout: float | None) -> list[Event]:
        """One look, without waiting."""
        assert timeout == 0
        self.looks += 1
        late = self.answers_after is None or self.looks < self.answers_after
        return [] if late else READABLE


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes with every look, not with the load of the machine: ten looks fit."""
    ticks = itertools.count()
    tenth = spin_module.LOOK_FOR / 10
    clock = SimpleNamespace(perf_counter=lambda: next(ticks) * tenth)
    monkeypatch.setattr(spin_module, "time", clock)


def look(spin: Spin, poller: Poller) -> list[Event]:
    """Look through this poller."""
    return spin.look(poller)  # type: ignore[arg-type]


def test_an_answer_that_comes_at_once_is_seen() -> None:
    """Without going to sleep, at the first look or a few later."""
    for looks in (1, 5):
        assert look(Spin(), Poller(answers_after=looks)) == READABLE


def test_looking_ends_when_nothing_comes() -> None:
    """It takes a moment only, whatever the poller does."""
    poller = Poller()
    assert look(Spin(), poller) == []
    assert poller.looks == 10


def test_looking_is_given_up_where_it_never_pays() -> None:
    """After some failures the processor is left to others, but for a rare attempt."""
    spin = Spin()
    for _ in range(MOST):
        look(spin, Poller())
    tried = []
    for _ in range(4 * RETRY_EVERY):
        poller = Poller()
        look(spin, poller)
        tried.append(poller.looks > 0)
    assert tried.count(True) == 4
    assert not any(tried[: RETRY_EVERY - 1])


def test_asking_says_whether_it_came() -> None:
    """Not when time is up, nor when it is not worth asking."""
    assert Spin().until(lambda: True)
    spin = Spin()
    answers = [spin.until(lambda: False) for _ in range(MOST)]
    assert answers == [False] * MOST
    assert not spin.until(lambda: True)


def test_failures_in_a_row_are_bounded_after_many_successes() -> None:
    """What was earned long ago does not keep a thread awake."""
    spin = Spin()
    for _ in range(5 * MOST):
        look(spin, Poller(answers_after=1))
    pollers = [Poller() for _ in range(2 * MOST)]
    for poller in pollers:
        look(spin, poller)
    assert [poller.looks > 0 for poller in pollers] == [True] * MOST + [False] * MOST


def test_looking_is_taken_up_again_when_it_pays() -> None:
    """One success after a rare attempt earns further ones."""
    spin = Spin()
    for _ in range(MOST):
        look(spin, Poller())
    found = [look(spin, Poller(answers_after=1)) for _ in range(RETRY_EVERY + 5)]
    assert found[: RETRY_EVERY - 1] == [[]] * (RETRY_EVERY - 1)
    assert found[RETRY_EVERY - 1 :] == [READABLE] * 6

"""Links that are measured without being asked: when it is quiet, once, and never for long."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from potluck import SimulatedBackend
from potluck._types import ProcessId, View
from potluck.cluster import bandwidth
from potluck.cluster.bandwidth import Bandwidth, ProbeBudget, ProbeLimits, Prober
from potluck.cluster.views import ViewSession
from potluck.membership.topology import LinkSource
from support.clusters import clusters
from support.health import process
from support.threads import Background, eventually

MEMBERS = tuple(map(process, "ab"))


class Notebook:
    """Where rates are written down."""

    def __init__(self) -> None:
        self.known: dict[ProcessId, Bandwidth] = {}
        self.asked = 0

    def is_rated(self, process: ProcessId) -> bool:
        """Whether there is a rate."""
        self.asked += 1
        return process in self.known

    def rate(self, process: ProcessId, found: Bandwidth) -> None:
        """There is one."""
        self.known[process] = found


class Counting(ViewSession):
    """A session that counts the looks at it."""

    looks = 0

    def is_quiet(self, seconds: float) -> bool:
        """Whether it is quiet."""
        self.looks += 1
        return super().is_quiet(seconds)


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "QUIET", 0.0)
    monkeypatch.setattr(bandwidth, "LOOK_EVERY", 0.01)
    monkeypatch.setattr(bandwidth, "AGAIN", 0.01)
    limits = ProbeLimits(seconds=0.02, max_bytes=1 << 20, patience=0.2)
    monkeypatch.setattr(bandwidth, "LIMITS", limits)


@pytest.fixture
def sessions() -> Iterator[list[Counting]]:
    """Both ends of a view of two members."""
    view = View("f" * 32, 1, MEMBERS)
    made = [Counting(view, rank) for rank in range(2)]
    for session, backend in zip(made, SimulatedBackend.create_group(2), strict=True):
        session.backend = backend
    yield made
    for session in made:
        session.over.set()
        assert session.backend is not None
        session.backend.close()


def test_both_ends_of_a_link_learn_its_rate(sessions: list[Counting]) -> None:
    """And that is the end of it; the same, for both measured together."""
    books = [Notebook(), Notebook()]
    probers = [
        Prober(session, book.is_rated, book.rate)
        for session, book in zip(sessions, books, strict=True)
    ]
    running = [Background(prober.run) for prober in probers]
    eventually(lambda: MEMBERS[1] in books[0].known and MEMBERS[0] in books[1].known)
    there, here = books[0].known[MEMBERS[1]], books[1].known[MEMBERS[0]]
    assert (there.up, there.down, there.latency) == (here.down, here.up, here.latency)
    assert min(there.up, there.down, there.latency) > 0
    for session, thread in zip(sessions, running, strict=True):
        session.stopped.set()
        thread.result()


def test_a_busy_view_is_left_alone(sessions: list[Counting]) -> None:
    """As long as a call runs nobody dials."""
    book, session = Notebook(), sessions[1]
    session.begin_use()
    running = Background(Prober(session, book.is_rated, book.rate).run)
    eventually(lambda: session.looks > 3)
    assert book.asked == 0
    session.end_use()
    eventually(lambda: book.asked > 0)
    session.stopped.set()
    running.result()


def test_a_known_link_is_not_measured_again(sessions: list[Counting]) -> None:
    """Views follow each other quickly at times."""
    book = Notebook()
    book.known[MEMBERS[0]] = Bandwidth(1, 1)
    running = Background(Prober(sessions[1], book.is_rated, book.rate).run)
    eventually(lambda: book.asked > 3)
    sessions[1].stopped.set()
    running.result()
    assert book.known[MEMBERS[0]] == Bandwidth(1, 1)


def test_whoever_takes_no_part_is_asked_less_and_less_often(sessions: list[Counting]) -> None:
    """Each try has an end, and each pause is twice as long as the one before."""
    book, began = Notebook(), time.monotonic()
    running = Background(Prober(sessions[1], book.is_rated, book.rate).run)
    eventually(lambda: book.asked >= 4)
    assert time.monotonic() - began > 3 * bandwidth.LIMITS.patience + 0.01 + 0.02 + 0.04
    assert book.known == {}
    sessions[1].stopped.set()
    running.result()


def test_probing_takes_a_hundredth_of_the_time(sessions: list[Counting]) -> None:
    """After a probe this process begins none, and takes part in none, until 99 times its length."""
    budget, books = ProbeBudget(), [Notebook(), Notebook()]
    probers = [
        Prober(session, lambda _: False, book.rate, own)
        for session, book, own in zip(sessions, books, (ProbeBudget(), budget), strict=True)
    ]
    running = [Background(prober.run) for prober in probers]
    eventually(lambda: bool(books[1].known))
    now, looks = time.monotonic(), sessions[1].looks
    assert not budget.allows(now + 99 * 2 * 0.02 * 0.9)  # it sends and receives for 0.02 s each
    books[1].known.clear()
    eventually(lambda: sessions[1].looks > looks + 20)
    assert books[1].known == {}
    for session, thread in zip(sessions, running, strict=True):
        session.stopped.set()
        thread.result()


def test_a_cluster_measures_its_links_by_itself() -> None:
    """Nobody asks for it, and both ends know."""
    with clusters(2) as nodes:
        for here, there in (nodes, reversed(nodes)):

            def is_rated(one: ProcessId = here.process, other: ProcessId = there.process) -> bool:
                found = here.topology.snapshot().connection(one, other)  # noqa: B023
                return found is not None and found.rated_by is LinkSource.PROBE

            eventually(is_rated)

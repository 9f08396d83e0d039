"""Links that are measured without being asked: when it is quiet, once, and never for long."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from potluck import SimulatedBackend
from potluck._types import ProcessId, View
from potluck.cluster import bandwidth
from potluck.cluster.bandwidth import TRIES, Bandwidth, ProbeLimits, Prober
from potluck.cluster.views import ViewSession
from potluck.membership.topology import RateSource
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
    for running in [Background(prober.run) for prober in probers]:
        running.result()
    there, here = books[0].known[MEMBERS[1]], books[1].known[MEMBERS[0]]
    assert (there.up, there.down) == (here.down, here.up)
    assert min(there.up, there.down) > 0


def test_a_busy_view_is_left_alone(sessions: list[Counting]) -> None:
    """As long as a call runs nobody dials."""
    book, session = Notebook(), sessions[1]
    session.begin_use()
    running = Background(Prober(session, book.is_rated, book.rate).run)
    eventually(lambda: session.looks > 3)
    assert book.asked == 0
    session.end_use()
    eventually(lambda: book.asked > 0)
    session.over.set()
    running.result()


def test_a_known_link_is_not_measured_again(sessions: list[Counting]) -> None:
    """Views follow each other quickly at times."""
    book = Notebook()
    book.known[MEMBERS[0]] = Bandwidth(1, 1)
    Background(Prober(sessions[1], book.is_rated, book.rate).run).result()
    assert book.known[MEMBERS[0]] == Bandwidth(1, 1)


def test_whoever_takes_no_part_is_given_up(sessions: list[Counting]) -> None:
    """After a few tries, each of which has an end."""
    book = Notebook()
    Background(Prober(sessions[1], book.is_rated, book.rate).run).result()
    assert book.asked == TRIES
    assert book.known == {}


def test_a_cluster_measures_its_links_by_itself() -> None:
    """Nobody asks for it, and both ends know."""
    with clusters(2) as nodes:
        for here, there in (nodes, reversed(nodes)):

            def is_rated(one: ProcessId = here.process, other: ProcessId = there.process) -> bool:
                found = here.topology.snapshot().connection(one, other)  # noqa: B023
                return found is not None and found.rated_by is RateSource.PROBE

            eventually(is_rated)

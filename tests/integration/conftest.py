"""Real processes for every test in this folder."""

from collections.abc import Iterator

import pytest

from support.ranks import Rank, Ranks


@pytest.fixture(scope="session")
def idle_ranks() -> Iterator[list[Rank]]:
    """Interpreters that have everything imported and wait for a program."""
    idle: list[Rank] = []
    yield idle
    for rank in idle:
        rank.clean_up()


@pytest.fixture
def ranks(idle_ranks: list[Rank]) -> Iterator[Ranks]:
    """Processes to run as ranks; none of them outlives the test in the middle of a program."""
    crowd = Ranks(idle_ranks)
    yield crowd
    crowd.clean_up()

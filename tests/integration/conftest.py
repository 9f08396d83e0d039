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


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whoever may take long, and says so, begins first: nobody shall wait for it at the end."""

    def seconds(item: pytest.Item) -> float:
        mark = item.get_closest_marker("timeout")
        return float(mark.args[0]) if mark is not None and mark.args else 0.0

    items.sort(key=seconds, reverse=True)

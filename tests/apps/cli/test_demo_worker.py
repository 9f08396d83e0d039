"""A rank of the demo on its own: takes orders, tells news, and ends when it should."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from potluck.apps.cli.demo_messages import (
    Failed,
    Finished,
    Form,
    Leave,
    Meeting,
    News,
    Order,
    Progress,
    decode_news,
    encode_line,
)


class Rank:
    """The process."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "potluck.apps.cli.demo_worker", "7"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def order(self, order: Order) -> None:
        """Tell it what to do."""
        assert self.process.stdin is not None
        self.process.stdin.write(encode_line(order))
        self.process.stdin.flush()

    def news(self) -> News:
        """The next line it writes."""
        assert self.process.stdout is not None
        return decode_news(self.process.stdout.readline())

    def end(self) -> tuple[int, bytes]:
        """Its exit code and what it wrote to stderr."""
        assert self.process.stderr is not None
        words = self.process.stderr.read()
        return self.process.wait(20), words


@pytest.fixture
def rank() -> Iterator[Rank]:
    """A rank that has just been started."""
    rank = Rank()
    with rank.process:
        try:
            yield rank
        finally:
            rank.process.kill()


def test_it_trains_alone_and_leaves_when_told(rank: Rank) -> None:
    """A group of one needs no network; the end is clean."""
    rank.order(Form(rank=0, world_size=1, seconds=0.1))
    told = [rank.news()]
    while isinstance(told[-1], Progress):
        told.append(rank.news())
    *steps, finished = told
    assert isinstance(steps[0], Progress)
    assert steps[0].step == 1
    assert isinstance(steps[-1], Progress)
    assert isinstance(finished, Finished)
    assert (finished.step, finished.loss) == (steps[-1].step, steps[-1].loss)
    rank.order(Leave())
    assert rank.end() == (0, b"")


def test_it_ends_when_its_orders_end(rank: Rank) -> None:
    """Whatever it does at the moment: the demo that started it is gone."""
    rank.order(Form(rank=0, world_size=1))
    assert isinstance(rank.news(), Progress)
    assert rank.process.stdin is not None
    rank.process.stdin.close()
    assert rank.end() == (1, b"")


def test_it_tells_what_failed(rank: Rank) -> None:
    """A group that cannot be is reported in words, not by a traceback."""
    rank.order(Form(rank=5, world_size=2, master="127.0.0.1:1"))
    assert rank.news() == Failed("Rank 5 does not exist in a group of 2 (ranks 0 to 1)")
    assert rank.end() == (1, b"")


def test_the_first_rank_says_where_to_meet(rank: Rank) -> None:
    """It chooses a free port, and the others are told."""
    rank.order(Form(rank=0, world_size=2))
    news = rank.news()
    assert isinstance(news, Meeting)
    assert news.master.startswith("127.0.0.1:")

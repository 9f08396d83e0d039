"""The demo's processes, seen from the demo: how they end and what is said about it."""

import os
import queue
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from potluck.apps.cli.demo_members import Event, Member, explain_end
from potluck.apps.cli.demo_messages import Failed, Finished, Form, Leave
from support.command import is_gone
from support.threads import PATIENCE


@pytest.fixture
def events() -> queue.SimpleQueue[Event]:
    """Where news arrive."""
    return queue.SimpleQueue()


@pytest.fixture
def member(tmp_path: Path, events: queue.SimpleQueue[Event]) -> Iterator[Member]:
    """A rank's process."""
    member = Member(2, 0, str(tmp_path), events)
    yield member
    member.close()
    assert is_gone(member.pid)


def await_end(events: queue.SimpleQueue[Event]) -> list[object]:
    """All news of a process, the last of which is None."""
    news: list[object] = [events.get(timeout=PATIENCE)[1]]
    while news[-1] is not None:
        news.append(events.get(timeout=PATIENCE)[1])
    return news


def test_news_arrive_in_order_and_end_with_none(
    member: Member, events: queue.SimpleQueue[Event]
) -> None:
    """Orders go out, news come in, the end is news too."""
    member.order(Form(rank=0, world_size=1, seconds=0))
    member.order(Leave())
    *_, finished, end = await_end(events)
    assert isinstance(finished, Finished)
    assert end is None
    assert member.wait(PATIENCE) == 0


def test_a_killed_process_is_explained_by_its_signal(
    member: Member, events: queue.SimpleQueue[Event]
) -> None:
    """The error names rank, process and signal."""
    os.kill(member.pid, signal.SIGKILL)
    assert await_end(events) == [None]
    error = explain_end(member)
    assert error.rank == 2
    assert f"(pid {member.pid}) is gone: it was ended by the signal SIGKILL" in str(error)


def test_a_process_that_fails_is_explained_by_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: queue.SimpleQueue[Event]
) -> None:
    """What it wrote last is usually the reason."""
    (tmp_path / "numpy.py").write_text("raise ImportError('this numpy is broken')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    member = Member(0, 0, str(tmp_path), events)
    try:
        assert await_end(events) == [None]
        error = explain_end(member)
    finally:
        member.close()
    assert "exit code 1 and wrote: ImportError: this numpy is broken" in str(error)


def test_a_process_that_still_runs_is_not_called_dead(member: Member) -> None:
    """Only its connection can have broken."""
    assert "still runs" in str(explain_end(member))


def test_an_order_to_a_process_that_is_gone_is_harmless(
    member: Member, events: queue.SimpleQueue[Event]
) -> None:
    """It is noticed by its end, not by the order."""
    member.kill()
    assert await_end(events) == [None]
    member.order(Leave())


def test_a_line_that_is_no_news_is_a_failure(
    member: Member, events: queue.SimpleQueue[Event]
) -> None:
    """Nothing that a process writes by mistake is taken for news."""
    read, write = os.pipe()
    os.write(write, b"hello\n")
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        member._read_news(pipe, events)
    sender, news = events.get(timeout=PATIENCE)
    assert sender is member
    assert news == Failed(r"it wrote b'hello\n', which is no news")

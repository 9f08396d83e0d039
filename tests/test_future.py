"""Futures end once, and whoever waits for one, in whatever way, learns of it."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from potluck import SimulatedBackend
from potluck._future import Future
from potluck.errors import PeerLost, Timeout
from support.threads import Background

PATIENCE = 30.0
ROUNDS = 300


def test_the_first_end_counts() -> None:
    """Neither a later result nor a later error changes it."""
    future: Future[int] = Future()
    future.finish(value=1)
    future.finish(PeerLost("too late"))
    future.finish_first(PeerLost("too late"), None)
    assert future.wait() == future.result() == 1
    assert future.exception() is None


def test_of_threads_that_end_it_at_once_one_wins() -> None:
    """Its callback runs once, and everybody sees the winner's result."""
    for _ in range(ROUNDS):
        future: Future[int] = Future()
        called: list[int] = []
        future.add_done_callback(lambda f=future, c=called: c.append(f.result()))  # type: ignore[misc]
        start = threading.Barrier(3)

        def end(value: int, future: Future[int] = future, start: threading.Barrier = start) -> None:
            start.wait(PATIENCE)
            future.finish_first(None, value)

        threads = [Background(lambda value=value: end(value)) for value in range(3)]  # type: ignore[misc]
        for thread in threads:
            thread.result()
        assert called == [future.wait(PATIENCE)]


def test_nobody_who_comes_at_the_moment_of_its_end_is_forgotten() -> None:
    """Neither a sleeper nor a callback, and the callback is called once."""
    for _ in range(ROUNDS):
        future: Future[str] = Future()
        called: list[str] = []
        start = threading.Barrier(3)

        def sleep(future: Future[str] = future, start: threading.Barrier = start) -> bool:
            start.wait(PATIENCE)
            return future.sleep_until(time.monotonic() + PATIENCE)

        def ask(
            future: Future[str] = future,
            start: threading.Barrier = start,
            called: list[str] = called,
        ) -> None:
            start.wait(PATIENCE)
            future.add_done_callback(lambda: called.append("called"))

        sleeping, asking = Background(sleep), Background(ask)
        start.wait(PATIENCE)
        future.finish(value="done")
        assert sleeping.result()
        asking.result()
        assert called == ["called"]


def test_a_sleeper_wakes_before_callbacks_run() -> None:
    """A callback may wait for what the sleeper does next."""
    future: Future[None] = Future()
    woken = threading.Event()
    was_woken: list[bool] = []
    future.add_done_callback(lambda: was_woken.append(woken.wait(PATIENCE)))

    def sleep() -> None:
        future.wait(PATIENCE)
        woken.set()

    sleeping = Background(sleep)
    future.finish()
    sleeping.result()
    assert was_woken == [True]


def test_asking_for_the_result_may_take_a_while() -> None:
    """Unless told otherwise it takes no time at all."""
    future: Future[int] = Future()
    with pytest.raises(Timeout, match="The operation is not done yet"):
        future.result()
    with pytest.raises(Timeout, match="not done yet"):
        future.exception(0.001)
    asking = Background(lambda: future.result(PATIENCE))
    future.finish(value=7)
    assert asking.result() == 7


def test_in_a_forked_child_it_has_ended_and_calls_nobody() -> None:
    """What its callbacks would touch belongs to the parent."""
    future: Future[None] = Future()
    called: list[str] = []
    future.add_done_callback(lambda: called.append("called"))
    future.become_forked(PeerLost("of the parent"))
    with pytest.raises(PeerLost, match="of the parent"):
        future.wait()
    assert called == []


def test_a_message_can_be_awaited() -> None:
    """A thread moves it meanwhile: a backend has none of its own."""
    left, right = SimulatedBackend.create_group(2)
    inbox = bytearray(2)

    async def exchange() -> None:
        receive = right.post_recv_into(inbox, src=0)
        await left.post_send(b"hi", dst=1)
        await asyncio.wait_for(_awaited(receive), PATIENCE)

    with left, right:
        asyncio.run(exchange())
    assert bytes(inbox) == b"hi"


async def _awaited(future: Future[None]) -> None:
    await future

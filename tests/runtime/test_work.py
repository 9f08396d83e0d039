"""Work: waiting for something that another thread does."""

from __future__ import annotations

import asyncio
import threading

import pytest

from potluck.errors import PeerLost, Timeout
from potluck.runtime.work import Work
from support.threads import Background


def test_waiting_returns_the_result() -> None:
    """On any number of threads."""
    work: Work[int] = Work()
    waiting = [Background(lambda: work.wait(10)) for _ in range(3)]
    assert not work.done
    work.succeed(7)
    assert [one.result() for one in waiting] == [7, 7, 7]
    assert work.done
    assert work.result() == 7
    assert work.exception() is None


def test_waiting_raises_what_went_wrong() -> None:
    """Each who asks gets an error of its own: tracebacks do not pile up."""
    work: Work[int] = Work()
    work.fail(PeerLost("Rank 1 is gone", rank=1))
    caught = []
    for _ in range(2):
        with pytest.raises(PeerLost, match="Rank 1 is gone") as found:
            work.wait()
        caught.append(found.value)
    assert caught[0] is not caught[1]
    assert isinstance(work.exception(), PeerLost)


def test_errors_of_others_are_raised_as_they_are() -> None:
    """Also those that are not ours."""
    work: Work[int] = Work()
    error = KeyError("x")
    work.fail(error)
    with pytest.raises(KeyError) as found:
        work.result()
    assert found.value is error


def test_what_is_not_done_yet_says_so() -> None:
    """It goes on, and can be waited for again."""
    work: Work[str] = Work(lambda: "The sum")
    with pytest.raises(Timeout, match=r"The sum was not done within 0\.01 s"):
        work.wait(0.01)
    with pytest.raises(Timeout, match="The sum is not done yet"):
        work.result()
    with pytest.raises(Timeout, match="not done yet"):
        work.exception()
    work.succeed("done")
    assert work.wait(0) == "done"


def test_callbacks_are_called_once() -> None:
    """Those that come late, at once."""
    work: Work[None] = Work()
    called: list[str] = []
    work.add_done_callback(lambda: called.append("early"))
    work.succeed(None)
    work.add_done_callback(lambda: called.append("late"))
    assert called == ["early", "late"]


def test_coroutines_await_it_without_blocking() -> None:
    """The loop goes on meanwhile."""
    work: Work[int] = Work()
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while not work.done:
            ticks += 1
            if ticks == 3:
                threading.Thread(target=work.succeed, args=(5,)).start()
            await asyncio.sleep(0.001)

    async def both() -> int:
        ticking = asyncio.create_task(tick())
        result = await work
        await ticking
        return result

    assert asyncio.run(both()) == 5
    assert ticks >= 3


def test_a_cancelled_coroutine_does_not_disturb_the_work() -> None:
    """It ends well although nobody awaits it any more."""
    work: Work[int] = Work()

    async def give_up() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(_awaiting(work), 0.01)
        work.succeed(1)
        await asyncio.sleep(0.01)

    asyncio.run(give_up())
    assert work.result() == 1


async def _awaiting(work: Work[int]) -> int:
    return await work


def test_a_callback_that_fails_disturbs_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """The others are called, and whoever ended the work goes on."""
    work: Work[None] = Work(lambda: "The sum")
    called: list[str] = []

    def fail() -> None:
        raise KeyError("a fault of its owner")

    work.add_done_callback(fail)
    work.add_done_callback(lambda: called.append("next"))
    work.succeed(None)
    assert called == ["next"]
    assert "A callback of The sum failed" in caplog.text

"""Operations: something that was started, and the ways to wait for it or give it up."""

from __future__ import annotations

import math
from functools import partial

import pytest

from potluck import PeerLost, Timeout
from potluck.backend.operation import Cancelled, Operation, deadline_after
from support.pump import Pump, pumping_thread
from support.threads import Background, eventually


def test_a_finished_operation_needs_no_pump() -> None:
    """Waiting for it returns at once, however often."""
    pump = Pump()
    operation = Operation(pump)
    operation.finish()
    for timeout in (None, 0, 5.0):
        operation.wait(timeout)
        operation.finish_within(timeout)
    assert pump.calls == 0


def test_the_waiting_thread_pumps_until_done() -> None:
    """It runs whatever comes until its own operation is among it."""
    pump = Pump()
    operation = Operation(pump)
    ran: list[int] = []
    for index in range(3):
        pump.work.put(partial(ran.append, index))
    pump.work.put(operation.finish)
    operation.wait()
    assert ran == [0, 1, 2]


def test_what_went_wrong_is_raised_each_time() -> None:
    """With every field, and as an error of the caller's own: its traceback does not grow."""
    operation = Operation(Pump())
    operation.finish(PeerLost("gone", rank=3, cause="why"))
    for wait in (operation.wait, operation.finish_within):
        for _ in range(3):
            with pytest.raises(PeerLost, match="gone: why") as caught:
                wait(1)
            assert caught.value.rank == 3
            assert len(caught.traceback) <= 3


def test_only_the_first_end_counts() -> None:
    """A late error does not undo a success."""
    operation = Operation(Pump())
    operation.finish()
    operation.finish(PeerLost("too late"))
    operation.wait()
    assert operation.error is None


@pytest.mark.parametrize("timeout", [-1, -1e-9, -math.inf, math.nan])
def test_an_impossible_timeout_is_refused(timeout: float) -> None:
    """Instead of waiting for ever or not at all."""
    with pytest.raises(ValueError, match="zero or more seconds"):
        deadline_after(timeout)
    with pytest.raises(ValueError, match="zero or more seconds"):
        Operation(Pump()).wait(timeout)


def test_no_timeout_is_no_deadline() -> None:
    """None means for ever, infinity is another word for it, and a century is not too long."""
    assert deadline_after(None) is deadline_after(math.inf) is None
    pump = Pump()
    for timeout in (None, math.inf, 1e12):
        operation = Operation(pump)
        pump.work.put(operation.finish)
        operation.wait(timeout)
        with pumping_thread(pump):
            asleep = Operation(pump)
            thread = Background(partial(asleep.wait, timeout))
            eventually(lambda: pump.sleepers == 1)
            pump.work.put(asleep.finish)
            thread.result()


def test_a_timeout_of_zero_looks_once() -> None:
    """What has arrived counts, although there is no time to wait for more."""
    pump = Pump()
    operation = Operation(pump)
    with pytest.raises(Timeout) as caught:
        operation.wait(0)
    assert caught.value.seconds == 0
    pump.work.put(operation.finish)
    operation.wait(0)


def test_wait_keeps_the_operation_alive() -> None:
    """After a time-out it still owns its buffer, and may be waited for again."""
    pump = Pump()
    operation = Operation(pump)
    with pytest.raises(Timeout, match=r"within 0\.01 s"):
        operation.wait(0.01)
    assert not operation.done
    assert pump.given_up == []
    pump.work.put(operation.finish)
    operation.wait()


def test_finish_within_gives_the_buffer_back() -> None:
    """The blocking calls leave nothing under way when they time out."""
    pump = Pump()
    operation = Operation(pump)
    with pytest.raises(Timeout, match="The operation was not done within"):
        operation.finish_within(0.01)
    assert pump.given_up == [operation]
    assert operation.done


def test_an_operation_done_while_giving_up_counts_as_done() -> None:
    """The message that came in the last moment is received, not reported as a time-out."""
    pump = Pump()
    operation = Operation(pump)
    pump.give_up = Operation.finish  # type: ignore[assignment, method-assign]
    operation.finish_within(0.01)


def test_cancel_tells_whether_it_was_in_time() -> None:
    """False for what is done already; afterwards a wait says that it was cancelled."""
    pump = Pump()
    done, under_way = Operation(pump), Operation(pump)
    done.finish()
    assert not done.cancel()
    done.wait()
    assert under_way.cancel()
    assert under_way.cancel()
    with pytest.raises(Cancelled):
        under_way.wait()

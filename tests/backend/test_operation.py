"""Operations: something that was started, and the ways to wait for it or give it up."""

from __future__ import annotations

import math
import time
from functools import partial

import pytest

from potluck import PeerLost, Timeout
from potluck._future import deadline_after
from potluck.backend.operation import Cancelled, Operation
from support.pump import Pump, pumping_thread
from support.threads import Background, eventually, interrupted_when, together


def test_a_finished_operation_needs_no_pump() -> None:
    """Waiting for it returns at once, however often."""
    pump = Pump()
    operation = Operation(pump.turns)
    operation.finish()
    for timeout in (None, 0, 5.0):
        operation.wait(timeout)
        operation.finish_within(timeout)
    assert pump.calls == 0


def test_the_waiting_thread_pumps_until_done() -> None:
    """It runs whatever comes until its own operation is among it."""
    pump = Pump()
    operation = Operation(pump.turns)
    ran: list[int] = []
    for index in range(3):
        pump.work.put(partial(ran.append, index))
    pump.work.put(operation.finish)
    operation.wait()
    assert ran == [0, 1, 2]


def test_what_went_wrong_is_raised_each_time() -> None:
    """With every field, and as an error of the caller's own: its traceback does not grow."""
    operation = Operation(Pump().turns)
    operation.finish(PeerLost("gone", rank=3, cause="why"))
    for wait in (operation.wait, operation.finish_within):
        for _ in range(3):
            with pytest.raises(PeerLost, match="gone: why") as caught:
                wait(1)
            assert caught.value.rank == 3
            assert len(caught.traceback) <= 3


def test_only_the_first_end_counts() -> None:
    """A late error does not undo a success."""
    operation = Operation(Pump().turns)
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
        Operation(Pump().turns).wait(timeout)


def test_no_timeout_is_no_deadline() -> None:
    """None means for ever, infinity is another word for it, and a century is not too long."""
    assert deadline_after(None) is deadline_after(math.inf) is None
    pump = Pump()
    for timeout in (None, math.inf, 1e12):
        operation = Operation(pump.turns)
        pump.work.put(operation.finish)
        operation.wait(timeout)
        with pumping_thread(pump):
            asleep = Operation(pump.turns)
            thread = Background(partial(asleep.wait, timeout))
            eventually(lambda: pump.sleepers == 1)
            pump.work.put(asleep.finish)
            thread.result()


def test_a_timeout_of_zero_looks_once() -> None:
    """What has arrived counts, although there is no time to wait for more."""
    pump = Pump()
    operation = Operation(pump.turns)
    with pytest.raises(Timeout) as caught:
        operation.wait(0)
    assert caught.value.seconds == 0
    pump.work.put(operation.finish)
    operation.wait(0)


def test_wait_keeps_the_operation_alive() -> None:
    """After a time-out it still owns its buffer, and may be waited for again."""
    pump = Pump()
    operation = Operation(pump.turns)
    with pytest.raises(Timeout, match=r"timed out after 0\.01 s"):
        operation.wait(0.01)
    assert not operation.done
    pump.work.put(operation.finish)
    operation.wait()


def test_finish_within_gives_the_buffer_back() -> None:
    """The blocking calls leave nothing under way when they time out."""
    pump = Pump()
    operation = Operation(pump.turns)
    with pytest.raises(Timeout, match="The operation timed out after"):
        operation.finish_within(0.01)
    assert isinstance(operation.exception(), Cancelled)


def test_an_operation_done_while_giving_up_counts_as_done() -> None:
    """The message that came in the last moment is received, not reported as a time-out."""

    class LastMoment(Operation):
        def _give_up(self) -> None:
            self.finish()

    LastMoment(Pump().turns).finish_within(0.01)


def test_cancel_tells_whether_it_was_in_time() -> None:
    """False for what is done already; afterwards a wait says that it was cancelled."""
    pump = Pump()
    done, under_way = Operation(pump.turns), Operation(pump.turns)
    done.finish()
    assert not done.cancel()
    done.wait()
    assert under_way.cancel()
    assert under_way.cancel()
    with pytest.raises(Cancelled):
        under_way.wait()


# --------------------------------------------------------------------------------------------------
# Turns: one of the waiting threads pumps, the others sleep, and none is forgotten.


def test_the_pump_is_handed_over() -> None:
    """The thread whose operation is done leaves; another goes on pumping for itself."""
    pump = Pump()
    operations = [Operation(pump.turns) for _ in range(4)]
    threads = [Background(operation.wait) for operation in operations]
    eventually(lambda: pump.inside == 1 and pump.sleepers == 3)
    for operation, thread in zip(operations, threads, strict=True):
        pump.work.put(operation.finish)
        thread.result()
    assert pump.sleepers == 0


def test_several_threads_may_wait_for_one_operation() -> None:
    """All of them return when it is done, those that sleep included."""
    pump = Pump()
    shared = Operation(pump.turns)
    with pumping_thread(pump):
        threads = [Background(shared.wait) for _ in range(3)]
        eventually(lambda: pump.sleepers == 3)
        pump.work.put(shared.finish)
        for thread in threads:
            thread.result()


def test_a_sleeper_whose_time_is_up_leaves() -> None:
    """While another thread pumps; and it is not woken for the pump afterwards."""
    pump = Pump()
    with pumping_thread(pump):
        with pytest.raises(Timeout):
            Operation(pump.turns).wait(0.02)
        assert pump.sleepers == 0


def test_an_error_in_the_pump_hands_it_on() -> None:
    """The thread that pumped gets the error; the one that slept pumps from then on."""
    pump = Pump()

    def fail() -> None:
        raise KeyboardInterrupt

    first, second = Operation(pump.turns), Operation(pump.turns)
    pumping = Background(first.wait)
    eventually(lambda: pump.inside == 1)
    sleeping = Background(second.wait)
    eventually(lambda: pump.sleepers == 1)
    pump.work.put(fail)
    with pytest.raises(KeyboardInterrupt):
        pumping.result()
    pump.work.put(second.finish)
    sleeping.result()
    pump.work.put(first.finish)
    first.wait()


def test_interrupted_sleepers_are_not_handed_the_pump() -> None:
    """Ctrl-C in a thread that only slept: the pump goes to one that still waits."""
    pump = Pump()
    other = Operation(pump.turns)

    with pumping_thread(pump):
        for _ in range(3):
            with interrupted_when(lambda: pump.sleepers == 1), pytest.raises(KeyboardInterrupt):
                Operation(pump.turns).wait()
            assert pump.sleepers == 0
        sleeping = Background(other.wait)
        eventually(lambda: pump.sleepers == 1)
    pump.work.put(other.finish)
    sleeping.result()


def test_a_hand_over_to_one_that_is_done_is_passed_on() -> None:
    """The one that pumps and the first that sleeps end together: the second sleeper pumps."""
    pump = Pump()
    operations = [Operation(pump.turns) for _ in range(3)]
    threads = []
    for place, operation in enumerate(operations):
        threads.append(Background(operation.wait))
        eventually(lambda n=place: pump.inside == 1 and pump.sleepers == n)  # type: ignore[misc]

    def finish_both() -> None:
        operations[1].finish()
        operations[0].finish()

    pump.work.put(finish_both)
    for thread in threads[:2]:
        thread.result()
    pump.work.put(operations[2].finish)
    threads[2].result()


# -- standing still ----------------------------------------------------------------------------


def test_nobody_pumps_during_a_standstill() -> None:
    """The pump leaves its sleep, and returns to it afterwards."""
    pump = Pump()
    with pumping_thread(pump) as own:
        for _ in range(50):
            with pump.turns.standstill():
                assert pump.inside == 0
                calls = pump.calls
                assert pump.calls == calls
        eventually(lambda: pump.inside == 1)
        assert not own.done


def test_the_pump_runs_again_after_a_standstill() -> None:
    """Those who fell asleep during it are woken at its end."""
    pump = Pump()
    with pumping_thread(pump):
        with pump.turns.standstill():
            eventually(lambda: pump.sleepers == 1)
        eventually(lambda: pump.inside == 1)


def test_a_standstill_that_was_interrupted_is_over() -> None:
    """Ctrl-C while it is asked for: the others pump as if nobody had wanted it."""
    pump = Pump()

    def interrupt() -> None:
        raise KeyboardInterrupt

    pump.turns._wake_pump = interrupt
    with pytest.raises(KeyboardInterrupt), pump.turns.standstill():
        pytest.fail("it stands still")
    assert not pump.turns.is_called
    operation = Operation(pump.turns)
    pump.work.put(operation.finish)
    operation.wait(20)


def test_step_stands_back_for_a_standstill() -> None:
    """It must not sleep in the pump when somebody has asked for it to stand still."""
    pump = Pump()
    pump.turns._wanted = 1
    pump.turns.step(None)
    assert pump.calls == 0


def test_step_leaves_the_pump_to_who_has_it() -> None:
    """And returns at once."""
    pump = Pump()
    with pumping_thread(pump):
        calls = pump.calls
        pump.turns.step(None)
        assert pump.calls == calls


def test_no_wake_up_is_lost() -> None:
    """Many threads, short operations, cancels and standstills: everybody always gets on."""
    pump = Pump()
    deadline = time.monotonic() + 1.5
    laps = [0] * 8

    def work(place: int) -> None:
        while time.monotonic() < deadline:
            operation = Operation(pump.turns)
            pump.work.put(operation.finish)
            operation.wait(20)
            laps[place] += 1

    def hurry(place: int) -> None:
        while time.monotonic() < deadline:
            operation = Operation(pump.turns)
            with pytest.raises(Timeout):
                operation.finish_within(0.0005)
            laps[place] += 1

    together(*[partial(work, place) for place in range(6)], partial(hurry, 6), partial(hurry, 7))
    assert min(laps) > 0

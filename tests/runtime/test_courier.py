"""The courier moves what nobody waits for, and steps aside for those who do."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from potluck import DistributedContext, SimulatedBackend
from potluck.runtime import courier as module
from potluck.runtime.courier import Courier
from support.threads import eventually


@pytest.fixture
def pair() -> Iterator[list[DistributedContext]]:
    """Two ranks in this process."""
    made = [DistributedContext(backend) for backend in SimulatedBackend.create_group(2)]
    yield made
    for each in made:
        each.close()


def couriers() -> int:
    """How many threads of this kind there are."""
    return sum(thread.name == "potluck-courier" for thread in threading.enumerate())


def test_a_message_arrives_though_nobody_waits(pair: list[DistributedContext]) -> None:
    """Its receive comes true by itself, more than once."""
    left, right = pair
    courier = Courier(right.progress)
    for number in (1, 2):
        into = np.zeros(3)
        receive = right.irecv(into, 0)
        come = threading.Event()
        receive.add_done_callback(come.set)
        courier.carry(receive)
        left.send(np.full(3, float(number)), 1)
        assert come.wait(20)
        assert into.tolist() == [number] * 3
    courier.close()
    courier.carry(right.irecv(np.zeros(3), 0))  # nothing happens any more
    assert couriers() == 0


def test_the_thread_ends_when_there_is_nothing_to_do(
    pair: list[DistributedContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And begins again when there is."""
    monkeypatch.setattr(module, "IDLE", 0.01)
    left, right = pair
    courier = Courier(right.progress)
    for _ in range(2):
        receive = right.irecv(np.zeros(1), 0)
        courier.carry(receive)
        left.send(np.ones(1), 1)
        receive.wait(20)
        eventually(lambda: couriers() == 0)
    courier.close()


def test_a_backend_that_closes_ends_the_errands(pair: list[DistributedContext]) -> None:
    """What was awaited has failed, and the courier is idle again."""
    _, right = pair
    courier = Courier(right.progress)
    receive = right.irecv(np.zeros(1), 0)
    courier.carry(receive)
    right.close()
    eventually(lambda: not courier._errands)
    courier.close()
    assert receive.exception() is not None

"""The switch interval is short while somebody needs it so, and as it was afterwards."""

from __future__ import annotations

import sys
import threading

import pytest

from potluck.runtime.switching import INTERVAL, Brisk


def test_the_last_one_out_restores_the_interval() -> None:
    """Whatever the order in which threads come and go."""
    usual, brisk = sys.getswitchinterval(), Brisk()
    inside, leave = threading.Event(), threading.Event()

    def stay() -> None:
        with brisk:
            inside.set()
            leave.wait(10)

    other = threading.Thread(target=stay)
    with brisk:
        other.start()
        inside.wait(10)
        assert sys.getswitchinterval() == pytest.approx(INTERVAL)
    assert sys.getswitchinterval() == pytest.approx(INTERVAL)
    leave.set()
    other.join()
    assert sys.getswitchinterval() == pytest.approx(usual)


def test_an_interval_that_is_shorter_already_stays() -> None:
    """Somebody wanted it so."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(INTERVAL / 10)
    try:
        with Brisk():
            assert sys.getswitchinterval() == pytest.approx(INTERVAL / 10)
    finally:
        sys.setswitchinterval(usual)

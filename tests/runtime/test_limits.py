"""Time limits: what is no length of time is refused in words."""

from typing import Any

import numpy as np
import pytest

from potluck.runtime.limits import Countdown, read_timeout
from support.contexts import in_group


def test_seconds_are_a_number_or_none() -> None:
    """Of any kind that numbers have; infinity is no limit."""
    assert read_timeout(None) is None
    assert read_timeout(float("inf")) is None
    assert read_timeout(0) == 0
    assert read_timeout(np.float32(2.5)) == 2.5  # type: ignore[arg-type]


def test_a_countdown_is_shared() -> None:
    """What one thing has used, the next does not have; no limit stays none."""
    countdown = Countdown(50)
    first, second = countdown.left, countdown.left
    assert first is not None
    assert second is not None
    assert 0 < second <= first <= 50
    assert Countdown(0).left == 0
    assert Countdown(None).left is None
    assert Countdown(float("inf")).left == float("inf")


@pytest.mark.parametrize(
    ("timeout", "error", "words"),
    [
        ("5", TypeError, "A timeout is a number of seconds, or None for no limit, not '5'"),
        (True, TypeError, "not True"),
        (float("nan"), ValueError, "zero or more seconds, not nan"),
        (-1, ValueError, "zero or more seconds, not -1"),
    ],
)
def test_everything_else_is_refused_before_anything_moves(
    timeout: Any, error: type[Exception], words: str
) -> None:
    """By calls and by waits; the group goes on."""

    def act(context: Any) -> int:
        with pytest.raises(error, match=words):
            context.all_reduce(1, timeout=timeout)
        work = context.all_reduce(1, async_op=True)
        with pytest.raises(error, match=words):
            work.wait(timeout)
        assert work.wait(10) == 2
        return int(context.all_reduce(1))

    assert in_group(2, act) == [2, 2]

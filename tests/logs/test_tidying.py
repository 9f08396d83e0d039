"""Tidying: no kind of line floods the others, and none is lost without a word."""

import logging

import pytest

from potluck.logs import get_logger, tidying
from potluck.logs.tidying import BURST, MAX_KINDS, PERIOD, tidy
from support.threads import together


class Clock:
    """Stands until it is pushed."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        """Seconds."""
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """In place of the machine's."""
    found = Clock()
    monkeypatch.setattr(tidying, "time", found)
    return found


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What came through so far."""
    found = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return found


def test_a_thousand_refusals_are_a_few_lines(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """The rest is counted, and told with the next one after a while."""
    logger = get_logger("potluck.door")
    for number in range(1000):
        logger.warning("refused %s: too many callers at once", number)
    assert len(messages(caplog)) == BURST
    clock.now += PERIOD
    logger.warning("refused %s: too many callers at once", "another")
    (line,) = messages(caplog)
    assert line == (
        f"refused another: too many callers at once (and {1000 - BURST} more like this before)"
    )
    clock.now += PERIOD
    logger.warning("refused %s: too many callers at once", "one")
    assert messages(caplog) == ["refused one: too many callers at once"]


def test_other_lines_come_through(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """Of another kind, of another module, or sentences that differ."""
    for number in range(3 * BURST):
        get_logger("potluck.door").warning("refused %s", number)
        get_logger("potluck.cluster").warning("%s", f"node {number} is lost")
    get_logger("potluck.door").warning("closed")
    found = messages(caplog)
    assert sum(line.startswith("refused") for line in found) == BURST
    assert sum(line.startswith("node") for line in found) == 3 * BURST
    assert found[-1] == "closed"


def test_names_from_the_network_stay_on_their_line(caplog: pytest.LogCaptureFixture) -> None:
    """Also for those who write logs in their own way."""
    get_logger("potluck.door").warning("met %s", "attic\nERROR root: all is lost\x1b[2J")
    (record,) = caplog.records
    assert record.getMessage() == r"met attic\nERROR root: all is lost\x1b[2J"


def test_few_kinds_are_remembered(clock: Clock) -> None:
    """However many sentences there are."""
    logger = get_logger("potluck.cluster")
    logger.setLevel(logging.INFO)
    for number in range(2 * MAX_KINDS):
        logger.info("%s", f"sentence {number}")
    assert len(tidy._kinds) == MAX_KINDS
    logger.setLevel(logging.NOTSET)


def test_threads_share_the_allowance(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """Four that complain at once are not four times as loud."""
    logger = get_logger("potluck.door")

    def complain() -> None:
        for _ in range(100):
            logger.warning("the bell is broken")

    together(complain, complain, complain, complain)
    assert len(messages(caplog)) == BURST


def test_a_line_that_cannot_be_made_is_shown_by_logging(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A fault of ours must not vanish, nor raise where it was written."""
    record = logging.LogRecord("potluck", logging.INFO, __file__, 1, "%d", ("x",), None)
    assert tidy.filter(record)

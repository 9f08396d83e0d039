"""Lines: one event is one, whatever is in it."""

import io
import json
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck import logs
from potluck.errors import BackendUnavailable
from potluck.logs import (
    BURST,
    MAX_KINDS,
    PERIOD,
    HumanFormatter,
    JsonFormatter,
    escaped,
    get_logger,
    tidy,
)
from support.threads import PATIENCE, together


def record(message: str, **fields: object) -> logging.LogRecord:
    """As a logger makes it."""
    made = logging.LogRecord("potluck.kitchen", logging.ERROR, __file__, 1, message, None, None)
    vars(made).update(fields)
    return made


def failed() -> logging.LogRecord:
    """With an error that has two lines."""
    made = record("it boiled over")
    try:
        msg = "too\nhot"
        raise ValueError(msg)
    except ValueError:
        made.exc_info = sys.exc_info()
    return made


@given(st.text())
def test_nothing_steers_a_terminal_or_begins_a_line(text: str) -> None:
    """Neither line breaks of any kind, nor escapes, nor marks that turn the way of writing."""
    line = HumanFormatter().format(record(text))
    assert line.isprintable()
    assert escaped(text).isprintable()
    assert JsonFormatter().format(record(text)).isprintable()


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_json_says_exactly_what_was_said(text: str) -> None:
    """It has escapes of its own."""
    assert json.loads(JsonFormatter().format(record(text)))["message"] == text


@pytest.mark.parametrize("text", ["plain", "übermäßig", "5 ± 1 µs …", "日本"])
def test_what_can_be_read_stays(text: str) -> None:
    """Letters of all languages."""
    assert escaped(text) == text


def test_an_error_is_part_of_its_line() -> None:
    """For people what it says and where; for programs the whole traceback."""
    line = HumanFormatter().format(failed())
    assert re.search(r": ValueError: too\\nhot \(test_logs\.py:\d+ in failed\)$", line)
    facts = json.loads(JsonFormatter().format(failed()))
    assert "Traceback" in facts["exception"]
    assert "too\nhot" in facts["exception"]


def test_fields_are_numbers_or_short_texts() -> None:
    """Whatever somebody passes as extra."""
    facts = json.loads(JsonFormatter().format(record("x", rank=1, who=object, lost=None, rate=0.5)))
    assert (facts["rank"], facts["lost"], facts["rate"]) == (1, None, 0.5)
    assert facts["who"] == "<class 'object'>"


# --------------------------------------------------------------------------------------------------
# Logs: silent until somebody listens, then as they were wished for.

NAME = "potluck.kitchen"


class Terminal(io.StringIO):
    """A stream with a person behind it."""

    def isatty(self) -> bool:
        """Yes."""
        return True


def written(wish: str, stream: io.StringIO | None = None) -> str:
    """What a warning and a detail become."""
    stream = stream or io.StringIO()
    logs.configure(wish, stream)
    logger = logs.get_logger(NAME)
    logger.warning("the %s is hot", "soup", extra={"rank": 3})
    logger.debug("stirring")
    return stream.getvalue()


@pytest.mark.parametrize(
    ("text", "wish"),
    [
        ("", ("human", logging.INFO)),
        ("json", ("json", logging.INFO)),
        ("DEBUG", ("human", logging.DEBUG)),
        ("json, error", ("json", logging.ERROR)),
        ("off", ("off", logging.INFO)),
    ],
)
def test_a_wish_is_a_form_and_a_level(text: str, wish: tuple[str, int]) -> None:
    """In any order and case; what is not said is as usual."""
    assert logs.read_setting(text) == wish


def test_a_wish_that_makes_no_sense_says_what_would() -> None:
    """Whoever mistypes it is told the words that there are."""
    with pytest.raises(BackendUnavailable, match=r"'xml'.*json, human or off.*debug"):
        logs.read_setting("xml")


def test_people_get_a_line_with_time_level_and_subject() -> None:
    """Without colours where nobody looks, and nothing below the level."""
    line = written("human")
    assert line[8:] == " warning kitchen: the soup is hot\n"
    assert line.count("\n") == 1


def test_colours_are_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless somebody does not want any."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert written("human", Terminal()).startswith("\x1b[33m")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in written("human", Terminal())


def test_programs_get_an_object_on_a_line() -> None:
    """With what was said beside the sentence."""
    first, second = (json.loads(line) for line in written("json,debug").splitlines())
    assert first["message"] == "the soup is hot"
    assert (first["level"], first["logger"], first["rank"]) == ("warning", NAME, 3)
    assert first["time"].endswith("Z")
    assert second["message"] == "stirring"


def test_off_is_silence() -> None:
    """Also where the root logger would speak."""
    assert written("off,debug") == ""


def test_the_environment_says_it_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """POTLUCK_LOG holds for programs that join, to standard error as it is at the moment."""
    monkeypatch.setenv("POTLUCK_LOG", "json")
    logs.speak_up()
    logs.get_logger(NAME).info("simmering")
    assert json.loads(capsys.readouterr().err)["message"] == "simmering"


PROGRAM = """
import logging, sys
{setup}
from potluck import logs
logs.speak_up()
logs.speak_up()
logs.get_logger("potluck.kitchen").info("a detail")
logs.get_logger("potluck.kitchen").warning("the soup is hot")
print(len(logging.getLogger().handlers))
"""


@pytest.mark.parametrize(
    ("setup", "shown", "handlers"),
    [
        ("", "warning kitchen: the soup is hot\n", "0"),
        ("logging.basicConfig(format='mine %(message)s')", "mine the soup is hot\n", "1"),
    ],
)
def test_a_program_hears_warnings_once_in_its_own_way(
    setup: str, shown: str, handlers: str, tmp_path: Path
) -> None:
    """Who has set up logging is not talked over; the root logger is never touched."""
    command = [sys.executable, "-c", PROGRAM.format(setup=setup)]
    result = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=PATIENCE, cwd=tmp_path
    )
    assert result.stderr.endswith(shown)
    assert result.stderr.count("\n") == 1
    assert result.stdout == f"{handlers}\n"


def test_a_library_that_nobody_listens_to_is_silent(tmp_path: Path) -> None:
    """Python would write warnings of loggers without a handler to standard error."""
    source = "from potluck import logs; logs.get_logger('potluck.x').warning('hot')"
    command = [sys.executable, "-c", source]
    result = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=PATIENCE, cwd=tmp_path
    )
    assert result.stderr == ""


def test_every_logger_of_the_library_is_made_here() -> None:
    """So that each has what keeps its lines tidy."""
    source = Path(logs.__file__).parent
    own = [
        str(file.relative_to(source))
        for file in source.rglob("*.py")
        if "logging.getLogger(" in file.read_text(encoding="utf-8") and file.name != "logs.py"
    ]
    assert own == []


def test_a_log_that_cannot_be_written_disturbs_nobody(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A closed terminal is no reason to stop training, nor to fill the log with tracebacks."""
    monkeypatch.setattr(logging, "raiseExceptions", True)  # as in a program; pytest may differ
    stream = io.StringIO()
    logs.configure("info", stream)
    logs.get_logger(NAME).error("the kitchen burns")
    assert "the kitchen burns" in stream.getvalue()
    stream.close()
    logs.get_logger(NAME).error("the kitchen burns down")
    assert capfd.readouterr() == ("", "")


def test_configuring_twice_writes_once() -> None:
    """The later one holds."""
    first, second = io.StringIO(), io.StringIO()
    logs.configure("info", first)
    logs.configure("info", second)
    logs.get_logger(NAME).info("tasting")
    assert first.getvalue() == ""
    assert second.getvalue().count("tasting") == 1


# --------------------------------------------------------------------------------------------------
# Tidying: no kind of line floods the others, and none is lost without a word.


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
    monkeypatch.setattr(logs, "time", found)
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

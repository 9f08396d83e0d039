"""Logs: silent until somebody listens, then as they were wished for."""

import io
import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from potluck import logs
from potluck.errors import BackendUnavailable
from support.threads import PATIENCE

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
    assert logs.read_wish(text) == wish


def test_a_wish_that_makes_no_sense_says_what_would() -> None:
    """Whoever mistypes it is told the words that there are."""
    with pytest.raises(BackendUnavailable, match=r"'xml'.*json, human or off.*debug"):
        logs.read_wish("xml")


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
    source = Path(logs.__file__).parents[1]
    own = [
        str(file.relative_to(source))
        for file in source.rglob("*.py")
        if "logging.getLogger(" in file.read_text(encoding="utf-8") and file.parent.name != "logs"
    ]
    assert own == []


def test_a_log_that_cannot_be_written_disturbs_nobody() -> None:
    """A closed terminal is no reason to stop training, nor to fill it with tracebacks."""
    stream = io.StringIO()
    logs.configure("info", stream)
    stream.close()
    logs.get_logger(NAME).error("the kitchen burns")


def test_configuring_twice_writes_once() -> None:
    """The later one holds."""
    first, second = io.StringIO(), io.StringIO()
    logs.configure("info", first)
    logs.configure("info", second)
    logs.get_logger(NAME).info("tasting")
    assert first.getvalue() == ""
    assert second.getvalue().count("tasting") == 1

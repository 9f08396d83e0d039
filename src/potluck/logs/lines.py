"""Lines of a log: for people, and as JSON for programs; one event is one line."""

from __future__ import annotations

import logging
import os
import time

__all__ = ["HumanFormatter", "JsonFormatter", "escaped"]

_USUAL = frozenset({*vars(logging.makeLogRecord({})), "message", "asctime"})
_COLOURS = {"warning": "\x1b[33m", "error": "\x1b[31m", "critical": "\x1b[31m", "debug": "\x1b[2m"}
_ROOT = "potluck."


def escaped(text: str) -> str:
    r"""A text in which nothing steers a terminal or begins another line.

    >>> escaped("attic\nroot logged in\x1b[2J")
    'attic\\nroot logged in\\x1b[2J'
    """
    if text.isprintable():
        return text
    letters = (
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )
    return "".join(letters)


def _fields_of(record: logging.LogRecord) -> dict[str, object]:
    """What was said in ``extra=``."""
    return {
        key: value if isinstance(value, int | float | bool | None) else escaped(str(value))
        for key, value in vars(record).items()
        if key not in _USUAL
    }


class HumanFormatter(logging.Formatter):
    """A line such as ``05:12:31 warning cluster: attic is suspect: …``."""

    def __init__(self, *, colours: bool = False) -> None:
        super().__init__()
        self._colours = colours

    def format(self, record: logging.LogRecord) -> str:
        """One line; of an error, what it says and where it was raised."""
        level = record.levelname.lower()
        subject = record.name.removeprefix(_ROOT).rpartition(".")[2]
        line = f"{self.formatTime(record, '%H:%M:%S')} {level} {subject}: {record.getMessage()}"
        if record.exc_info and record.exc_info[1] is not None:
            line += f": {_in_words(record.exc_info[1])}"
        line = escaped(line)
        colour = _COLOURS.get(level, "") if self._colours else ""
        return f"{colour}{line}\x1b[0m" if colour else line


class JsonFormatter(logging.Formatter):
    """One object on a line: time, level, logger, message, and whatever else is known."""

    def format(self, record: logging.LogRecord) -> str:
        """One line; an error with its whole traceback."""
        import msgspec

        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        facts: dict[str, object] = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields_of(record),
        }
        if record.exc_info:
            facts["exception"] = self.formatException(record.exc_info)
        line = msgspec.json.encode(_sendable(facts)).decode()
        if line.isprintable():
            return line
        return "".join(each if each.isprintable() else _in_json(each) for each in line)


def _in_json(letter: str) -> str:
    """A letter that some take for the end of a line, or obey."""
    units = letter.encode("utf-16-be")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))


def _sendable(facts: dict[str, object]) -> dict[str, object]:
    """Without halves of letters, which no encoding has."""
    return {
        key: value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value
        for key, value in facts.items()
    }


def _in_words(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return f"{type(error).__name__}: {error}"
    code = trace.tb_frame.f_code
    place = f"{os.path.basename(code.co_filename)}:{trace.tb_lineno} in {code.co_name}"  # noqa: PTH119
    return f"{type(error).__name__}: {error} ({place})"

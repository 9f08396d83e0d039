"""Logs: one event is one line, whatever comes from the network, and repeated lines are counted.

All loggers of the library are made here, below ``potluck``.  The library is silent by default: a
program that has set up :mod:`logging` gets everything in its own way; ``POTLUCK_LOG`` or
:func:`configure` shows it for people, or as JSON for programs.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Iterable
from typing import TextIO

from potluck._platform import call_in_children
from potluck.errors import BackendUnavailable

# --------------------------------------------------------------------------------------------------
# Lines of a log: for people, and as JSON for programs; one event is one line.

_USUAL = frozenset({*vars(logging.makeLogRecord({})), "message", "asctime", "notice"})
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


NOTICE: dict[str, object] = {"notice": True}
"""For ``extra=`` of a warning: people are shown it without asking, and nothing is wrong."""


def _level_of(record: logging.LogRecord) -> str:
    return "notice" if vars(record).get("notice") else record.levelname.lower()


class HumanFormatter(logging.Formatter):
    """A line such as ``05:12:31 warning cluster: attic left: …``; ids only with ``has_ids``."""

    def __init__(self, *, colours: bool = False, has_ids: bool = False) -> None:
        super().__init__()
        self._colours = colours
        self._has_ids = has_ids

    def format(self, record: logging.LogRecord) -> str:
        """One line; of an error, what it says and where it was raised."""
        level = _level_of(record)
        subject = record.name.removeprefix(_ROOT).rpartition(".")[2]
        line = f"{self.formatTime(record, '%H:%M:%S')} {level} {subject}: {record.getMessage()}"
        if self._has_ids and (member := _fields_of(record).get("member")):
            line += f" [{member}]"
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
            "level": _level_of(record),
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


# --------------------------------------------------------------------------------------------------
# Tidying: a logger's lines are lines, and no kind of them floods the others.

BURST = 10
"""Lines of one kind that are written within :data:`PERIOD`; more are counted."""

PERIOD = 10.0
"""Seconds."""

MAX_KINDS = 256
"""Kinds of lines that are told apart at once."""


class _Kind:
    """How often lines of one kind came lately."""

    __slots__ = ("count", "dropped", "since")

    def __init__(self, now: float) -> None:
        self.since = now
        self.count = 0
        self.dropped = 0


class RateLimitFilter(logging.Filter):
    """Makes a line of every event, and lets no kind of line flood the others."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._kinds: dict[tuple[str, str], _Kind] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is written; what stands in for those that were not is added."""
        try:
            message = record.getMessage()
        except (TypeError, ValueError):  # a fault of ours, which logging shows in its own way
            return True
        # Where the text is all that a caller gives, equal texts are of one kind.
        template = message if record.msg == "%s" else str(record.msg)
        dropped = self._admit((record.name, template))
        if dropped is None:
            return False
        if dropped:
            message = f"{message} (and {dropped} more like this before)"
        if dropped or not message.isprintable():
            record.msg, record.args = escaped(message), None
        return True

    def _admit(self, key: tuple[str, str]) -> int | None:
        """How many of its kind were left out before it; None if it is left out as well."""
        now = time.monotonic()
        with self._lock:
            kind = self._kinds.get(key)
            dropped = 0
            if kind is None or now - kind.since >= PERIOD:
                dropped = 0 if kind is None else kind.dropped
                self._kinds.pop(key, None)
                kind = self._kinds[key] = _Kind(now)
                if len(self._kinds) > MAX_KINDS:
                    del self._kinds[next(iter(self._kinds))]  # the one that began first
            kind.count += 1
            if kind.count > BURST:
                kind.dropped += 1
                return None
            return dropped

    def forget(self) -> None:
        """Begin anew; in a forked child another thread may have held the lock."""
        self._lock = threading.Lock()
        self._kinds = {}


tidy = RateLimitFilter()
call_in_children(tidy.forget)


# --------------------------------------------------------------------------------------------------

ROOT = "potluck"

LEVELS = ("debug", "info", "warning", "error")
FORMS = ("human", "json", "off")
HELP = "json, human or off, and debug, info, warning or error, with a comma between them"
"""The possible settings."""


def get_logger(name: str) -> logging.Logger:
    """The logger of a module, or of a subject: ``potluck.cluster``."""
    whole = logging.getLogger(ROOT)
    if not whole.handlers:
        whole.addHandler(logging.NullHandler())  # else Python writes warnings to stderr, bare
    logger = logging.getLogger(name)
    logger.addFilter(tidy)
    return logger


class _Handler(logging.StreamHandler[TextIO]):
    """Writes to what is standard error at the moment, unless told where."""

    def __init__(self, stream: TextIO | None, *, is_default: bool = False) -> None:
        super().__init__(stream or sys.stderr)
        self._fixed = stream is not None
        self._is_default = is_default

    def emit(self, record: logging.LogRecord) -> None:
        """Write, unless the program has set up logging itself meanwhile."""
        if self._is_default and logging.getLogger().handlers:
            return
        if not self._fixed:
            self.stream = sys.stderr
        super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - as logging calls it
        """A log that cannot be written, to a closed terminal for instance, is not an error."""


# -- configuration ---------------------------------------------------------------------------------


def read_setting(text: str) -> tuple[str, int]:
    """The form and the level that a setting names.

    >>> read_setting("json,debug"), read_setting("warning")
    (('json', 10), ('human', 30))
    """
    form, level = "human", "info"
    for word in filter(None, (each.strip().lower() for each in text.split(","))):
        if word in FORMS:
            form = word
        elif word in LEVELS:
            level = word
        else:
            raise BackendUnavailable(f"Unknown log setting {escaped(word)!r}", hint=f"Use {HELP}.")
    return form, getattr(logging, level.upper())


def configure(setting: str | None = None, stream: TextIO | None = None) -> None:
    """Show the logs of the library: as ``setting`` says, or ``POTLUCK_LOG``, or for people.

    To ``stream``, or standard error.  Other libraries' logs, and the root logger, stay as they are.
    """
    form, level = read_setting(os.environ.get("POTLUCK_LOG", "") if setting is None else setting)
    handler = _Handler(stream)
    if form == "json":
        handler.setFormatter(JsonFormatter())
    else:
        colours = _has_colours(handler.stream)
        handler.setFormatter(HumanFormatter(colours=colours, has_ids=level <= logging.DEBUG))
    _replace(logging.NullHandler() if form == "off" else handler)
    whole = logging.getLogger(ROOT)
    whole.setLevel(level)
    whole.propagate = False  # or a program that has set up logging would write everything twice


def speak_up() -> None:
    """For programs that join a cluster: as ``POTLUCK_LOG`` says, otherwise warnings.

    Warnings only where the program has not set up logging: then they come out that way.
    """
    if os.environ.get("POTLUCK_LOG", "").strip():
        configure()
        return
    whole = logging.getLogger(ROOT)
    if all(isinstance(each, logging.NullHandler) for each in whole.handlers):
        handler = _Handler(None, is_default=True)
        handler.setLevel(logging.WARNING)
        handler.setFormatter(HumanFormatter(colours=_has_colours(sys.stderr)))
        _replace(handler)


def begin_anew() -> None:
    """As if nothing had been configured or written yet; for tests."""
    _replace(logging.NullHandler())
    whole = logging.getLogger(ROOT)
    whole.propagate = True
    whole.setLevel(logging.NOTSET)
    tidy.forget()


def _replace(handler: logging.Handler) -> None:
    whole = logging.getLogger(ROOT)
    for each in _ours(whole.handlers):
        whole.removeHandler(each)
    whole.addHandler(handler)


def _ours(handlers: Iterable[logging.Handler]) -> list[logging.Handler]:
    return [each for each in handlers if isinstance(each, _Handler | logging.NullHandler)]


def _has_colours(stream: TextIO) -> bool:
    try:
        is_terminal = stream.isatty()
    except AttributeError:  # there is no stderr, or an object without that method stands in for it
        return False
    return is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

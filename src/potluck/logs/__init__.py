"""Logs: one event is one line, whatever comes from the network, and no line a thousand times.

All loggers of the library are made here, below ``potluck``.  The library is silent until somebody
listens: a program that has set up :mod:`logging` gets everything in its own way; ``POTLUCK_LOG`` or
:func:`configure` shows it for people, or as JSON for programs.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable
from typing import TextIO

from potluck.errors import BackendUnavailable
from potluck.logs.lines import HumanFormatter, JsonFormatter, escaped
from potluck.logs.tidying import tidy

__all__ = [
    "HELP",
    "ROOT",
    "begin_anew",
    "configure",
    "escaped",
    "get_logger",
    "read_wish",
    "speak_up",
]

ROOT = "potluck"

LEVELS = ("debug", "info", "warning", "error")
FORMS = ("human", "json", "off")
HELP = "json, human or off, and debug, info, warning or error, with a comma between them"
"""What can be wished for."""


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
        """Write, unless a program that was silent before has begun to listen by itself."""
        if self._is_default and logging.getLogger().handlers:
            return
        if not self._fixed:
            self.stream = sys.stderr
        super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - as logging calls it
        """A log that cannot be written, to a closed terminal for instance, disturbs nobody."""


# -- who listens -----------------------------------------------------------------------------------


def read_wish(text: str) -> tuple[str, int]:
    """The form and the level that somebody wishes for.

    >>> read_wish("json,debug"), read_wish("warning")
    (('json', 10), ('human', 30))
    """
    form, level = "human", "info"
    for word in filter(None, (each.strip().lower() for each in text.split(","))):
        if word in FORMS:
            form = word
        elif word in LEVELS:
            level = word
        else:
            raise BackendUnavailable(
                f"{escaped(word)!r} is nothing that logs can be", hint=f"There is {HELP}."
            )
    return form, getattr(logging, level.upper())


def configure(wish: str | None = None, stream: TextIO | None = None) -> None:
    """Show the logs of the library: as ``wish`` says, or ``POTLUCK_LOG``, or for people.

    To ``stream``, or standard error.  Other libraries' logs, and the root logger, stay as they are.
    """
    form, level = read_wish(os.environ.get("POTLUCK_LOG", "") if wish is None else wish)
    handler = _Handler(stream)
    if form == "json":
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(HumanFormatter(colours=_has_colours(handler.stream)))
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
    is_terminal = getattr(stream, "isatty", bool)
    return is_terminal() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

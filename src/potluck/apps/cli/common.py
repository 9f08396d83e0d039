"""Options that several commands share."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import shutil
import signal
import sys
import textwrap
import threading
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Annotated, Any, NoReturn, TypeAlias

import typer
import typer.core

from potluck import logs
from potluck._platform import signals
from potluck.errors import DistributedError

Json: TypeAlias = Annotated[bool, typer.Option("--json", help="One JSON object on stdout instead.")]

Namespace: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--namespace",
        envvar="POTLUCK_NAMESPACE",
        help="Name of the group.",
        show_default="the one this machine uses",
    ),
]

Member: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--host",
        metavar="ADDRESS:PORT",
        help="Address of a running member to sync the member list with.",
        show_default=False,
    ),
]

Peer: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(metavar="ADDRESS", help="Try this address too; may be given several times."),
]

Wait: TypeAlias = Annotated[
    float, typer.Option(min=0.1, max=60, help="Search for at most N seconds.")
]

OneJob: TypeAlias = Annotated[
    str | None, typer.Option(help="Look at this job alone.", show_default="every job")
]

Yes: TypeAlias = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]

Debug: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--debug", envvar="POTLUCK_DEBUG", help="Show where an error comes from (a traceback)."
    ),
]

ALL_EXIT_CODES = (
    "Exit codes: 0 done, 1 failed (the reason is on stderr), 2 wrong usage, 3 it worked, and found "
    "something wrong or nothing running (the help of each command says what), 130 interrupted; "
    "`run` ends with the exit code of the script."
)

EXIT_CODES = (
    "Exit codes: 0 done, 1 failed (the reason is on stderr), 2 wrong usage, 130 interrupted."
)


# --------------------------------------------------------------------------------------------------
# Plain words on the screen: types in help as people know them, sentences that break at words.

WORDS = {
    "bool": "",
    "str": "TEXT",
    "path": "PATH",
    "int": "NUMBER",
    "int range": "NUMBER",
    "float": "NUMBER",
    "float range": "NUMBER",
}
"""What a value is called in help, by what typer calls it; a flag takes none."""


def _in_plain_words(params: list[Any], context: Any) -> list[Any]:
    """The same parameters, without types of Python in what is shown of them."""
    for param in params:
        if not hasattr(param, "display_type"):
            continue  # a typer before 0.29 has other words, which are plain
        if param.param_type_name == "argument":
            param.metavar = param.metavar or str(param.name).upper()
            param.display_type_rich = lambda ctx: None  # noqa: ARG005 - its name says it
        elif param.metavar is None:
            param.metavar = WORDS.get(str(param.display_type(context)).strip("<>"))
    return params


class PlainCommand(typer.core.TyperCommand):
    """A command whose help people can read."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Its arguments and options."""
        return _in_plain_words(super().get_params(ctx), ctx)


class PlainGroup(typer.core.TyperGroup):
    """The same for the command of commands."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Its options."""
        return _in_plain_words(super().get_params(ctx), ctx)


def wrapped(text: str) -> str:
    """A text for stderr: in a terminal its lines end between words.

    Anywhere else it stays one line, for programs that read it.
    """
    if not sys.stderr.isatty():
        return text
    width = shutil.get_terminal_size().columns
    return "\n".join(
        textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False)
        for line in text.split("\n")
    )


# --------------------------------------------------------------------------------------------------
# What a person sees when a command fails: one paragraph, not a traceback.
#
# The paragraph says what happened, why, and what to do.  ``--debug`` or ``POTLUCK_DEBUG=1`` shows
# the traceback as well; every command has that option from here.

FAILED, INTERRUPTED = 1, 130


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """The command, with its errors told in words and an option to see more."""

    @functools.wraps(command)
    def run(*arguments: Any, debug: bool, **options: Any) -> None:
        try:
            _choose_logs(debug=debug)
            command(*arguments, **options)
        except (typer.Exit, typer.Abort, typer.BadParameter, BrokenPipeError):
            raise  # the framework knows what to do with these
        except KeyboardInterrupt:
            typer.echo("Interrupted.", err=True)
            raise typer.Exit(INTERRUPTED) from None
        except Exception as error:  # noqa: BLE001 - nothing but words may reach the user
            if debug:
                traceback.print_exc()
            typer.echo(wrapped(f"potluck: {_in_words(error)}"), err=True)
            raise typer.Exit(FAILED) from None

    run.__signature__ = _with_debug(command)  # type: ignore[attr-defined]
    return run


def _choose_logs(*, debug: bool) -> None:
    """As the user asked; otherwise silent, since errors are shown anyway."""
    if debug or os.environ.get("POTLUCK_LOG", "").strip():
        logs.configure(os.environ.get("POTLUCK_LOG") or "debug")
    else:
        logs.get_logger(logs.ROOT)  # which is silent


def _with_debug(command: Callable[..., None]) -> inspect.Signature:
    signature = inspect.signature(command, eval_str=True)
    debug = inspect.Parameter(
        "debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Debug
    )
    return signature.replace(parameters=[*signature.parameters.values(), debug])


def _in_words(error: Exception) -> str:
    if isinstance(error, DistributedError):
        return str(error)
    return (
        f"{type(error).__name__}: {error}. This is a fault in Potluck, not in what you did; "
        "run it again with --debug and report what it shows."
    )


# --------------------------------------------------------------------------------------------------
# Commands that start processes: a signal ends them too.

ENDINGS = ("SIGINT", "SIGTERM", "SIGHUP")
"""Signals that end a command; the last one comes when an SSH connection is lost."""


def end_by_signals() -> None:
    """Let signals that end the command unwind the stack, so that no process is left."""
    for number in signals(*ENDINGS[1:]):  # Python itself turns Ctrl-C into an exception
        signal.signal(number, _end)


def _end(number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Delay signals that end the command until the end of a block, in the main thread.

    Otherwise a process that is just being started could be left behind.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    numbers = signals(*ENDINGS)
    before = {each: signal.signal(each, lambda number, _: came.append(number)) for each in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for number in came[:1]:
            signal.raise_signal(number)

"""Options that several commands share."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import shutil
import sys
import textwrap
import traceback
from collections.abc import Callable
from typing import Annotated, Any, TypeAlias

import typer
import typer.core

from potluck import logs
from potluck.errors import DistributedError

Json: TypeAlias = Annotated[bool, typer.Option("--json", help="One JSON object on stdout instead.")]

Namespace: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--namespace",
        envvar="POTLUCK_NAMESPACE",
        help="Which namespace is meant.",
        show_default="the one this machine uses",
    ),
]

Member: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--host",
        metavar="ADDRESS:PORT",
        help="Where a member's program runs: agree with it on who belongs.",
        show_default=False,
    ),
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
    "something wrong or nobody there (the help of each command says what), 130 interrupted; `run` "
    "ends with the exit code of the script."
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
    """As somebody wishes; unless, none: what matters is told as an error, not twice."""
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
# A sign that something happens, for a person at a terminal; everybody else sees nothing.


def working(words: str, *, silent: bool = False) -> contextlib.AbstractContextManager[object]:
    """Show these words and a moving sign on stderr while a block runs."""
    from rich.console import Console

    console = Console(stderr=True)
    if silent or not console.is_terminal or console.is_dumb_terminal:
        return contextlib.nullcontext()
    return console.status(words)

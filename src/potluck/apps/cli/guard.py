"""What a person sees when a command fails: one paragraph, not a traceback.

The paragraph says what happened, why, and what to do.  ``--debug`` or ``POTLUCK_DEBUG=1`` shows
the traceback as well; every command has that option from here.
"""

from __future__ import annotations

import functools
import inspect
import os
import traceback
from collections.abc import Callable
from typing import Any

import typer

from potluck import logs
from potluck.apps.cli.options import Debug
from potluck.apps.cli.plain import wrapped
from potluck.errors import DistributedError

__all__ = ["guarded"]

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

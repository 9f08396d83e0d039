"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import typer

__all__ = ["ALL_EXIT_CODES", "EXIT_CODES", "Debug", "Json", "Member", "Namespace", "Yes"]

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

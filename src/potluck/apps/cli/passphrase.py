"""``potluck passphrase``: machines whose people agreed on a passphrase become one group."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from potluck.apps.cli.options import Json, Yes

__all__ = ["EXAMPLES", "passphrase"]

EXAMPLES = """\
potluck passphrase lab                    asks for the passphrase, without showing it
potluck passphrase lab --stdin <words.txt    reads it from a file or a password manager
"""

VARIABLE = "POTLUCK_PASSPHRASE"

LONGEST = 4096
"""Characters that are read from stdin at most."""


def passphrase(
    name: Annotated[
        str,
        typer.Argument(metavar="NAMESPACE", help="What the group is called; the same everywhere."),
    ],
    *,
    stdin: Annotated[
        bool, typer.Option("--stdin", help="Read the passphrase from the first line of stdin.")
    ] = False,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Make this machine a member of the group of all who give this name and this passphrase.

    Do the same on every machine: the first one makes the group, the others are in it.  Without a
    passphrase, `potluck pair` joins two machines by a one-time code; only such a group can remove
    a machine.

    The passphrase is asked for, or read from stdin, or from POTLUCK_PASSPHRASE.  It is never an
    argument: those are visible to every user of the machine.  What is kept is a key made from it.
    """
    from potluck.apps.cli.circle import confirm, print_json
    from potluck.apps.cli.progress import working
    from potluck.net.namespace import NetworkNamespace
    from potluck.net.namespace_files import NamespaceFiles, checked_name
    from potluck.net.private_files import potluck_home

    home = potluck_home()
    checked = checked_name(name)
    given = _read(stdin=stdin)
    with working("Making the key"):
        namespace = NetworkNamespace.from_passphrase(checked, given, home=home)
    files = NamespaceFiles(home, checked)
    kept = files.maybe_read()
    is_member = kept is not None and kept.is_passphrase and namespace.has_secret(kept.current)
    if not is_member:
        if kept is not None and files.is_used:
            confirm(f'Leave the present "{checked}" for the one with this passphrase?', yes=yes)
        namespace.save(replace=True)
        namespace.mark_used()
    if json:
        print_json({"namespace": checked, "tag": namespace.discovery_tag, "new": not is_member})
        return
    state = "was already in" if is_member else "is now in"
    typer.echo(f'This machine {state} "{checked}", with all machines that have this passphrase.')
    typer.echo(f"Start programs there with POTLUCK_NAMESPACE={checked} or --namespace {checked}.")


def _read(*, stdin: bool) -> str:
    """The passphrase, from where it is safe to read."""
    from potluck.apps.cli.circle import CannotAsk, can_ask

    variable = os.environ.get(VARIABLE, "")
    if stdin and variable:
        raise typer.BadParameter(f"{VARIABLE} is set as well: use one", param_hint="--stdin")
    if stdin:
        found = sys.stdin.readline(LONGEST).strip("\r\n")
    elif variable:
        found = variable
    elif can_ask():
        found = typer.prompt("Passphrase", hide_input=True, confirmation_prompt=True, err=True)
    else:
        raise CannotAsk(
            "The passphrase cannot be asked for: this is not a terminal",
            hint=f"Pass it on stdin with --stdin, or in {VARIABLE}.",
        )
    if not found.strip():
        raise typer.BadParameter("the passphrase is empty", param_hint="--stdin" if stdin else None)
    return found

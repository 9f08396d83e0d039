"""``potluck unpair``: this machine leaves a namespace."""

from __future__ import annotations

from typing import Annotated

import typer

from potluck.apps.cli.options import Json, Namespace, Yes

__all__ = ["EXAMPLES", "unpair"]

EXAMPLES = """\
potluck unpair        leaves the namespace this machine uses
potluck unpair lab    leaves the one named lab
"""


def unpair(
    name: Annotated[
        str | None, typer.Argument(metavar="NAMESPACE", show_default=False, help="Which one.")
    ] = None,
    *,
    namespace: Namespace = None,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Leave a namespace: forget its secret and its members on this machine.

    The others are not told.  They list this machine as a member until one of them revokes it.
    """
    from potluck.apps.cli.circle import confirm, print_json
    from potluck.net.namespace_files import (
        NamespaceFiles,
        UnknownNamespace,
        stored_names,
        usual_name,
    )
    from potluck.net.private_files import potluck_home

    home = potluck_home()
    # Not NetworkNamespace: what is damaged must be possible to leave.
    files = NamespaceFiles(home, name or namespace or usual_name(home))
    if files.name not in stored_names(home):
        names = ", ".join(stored_names(home)) or "none"
        raise UnknownNamespace(
            f"This machine is in no namespace {files.name!r}",
            got=files.name,
            hint=f"Those it is in: {names}.",
        )
    was_used = files.is_used
    confirm(f'Leave "{files.name}"? Coming back needs pairing again.', yes=yes)
    files.delete()
    if json:
        print_json({"left": files.name})
        return
    typer.echo(f'This machine has left "{files.name}": its secret and its roster are deleted here.')
    if was_used:
        typer.echo(
            "The others still list it as a member. If it is lost or in other hands, or was copied "
            "before, run `potluck revoke` on one of them: only that changes the secret."
        )

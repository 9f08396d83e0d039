"""``potluck pair``: two machines that share nothing but a short code become one circle."""

from __future__ import annotations

from typing import Annotated

import typer

from potluck.apps.cli.options import Namespace, Yes

__all__ = ["EXAMPLES", "pair"]

EXAMPLES = """\
potluck pair                                first machine: shows a code such as 7-guitar-harbor
potluck pair 7-guitar-harbor                second machine: types it and joins the first
potluck pair 7-guitar-harbor --host desk    where machines cannot find each other
potluck pair 7-guitar-harbor --keep         joins, and stays in the namespace it is in
"""


def pair(
    code: Annotated[
        list[str] | None,
        typer.Argument(metavar="CODE", show_default=False, help="What the other machine shows."),
    ] = None,
    *,
    host: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS[:PORT]", help="Where the machine is that shows the code."),
    ] = None,
    namespace: Namespace = None,
    yes: Yes = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="Join beside the namespace this machine is in.")
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="JSON objects on stdout instead, one for each event.")
    ] = False,
) -> None:
    """Bring two machines together: show a one-time code, or type the one that another shows.

    Without CODE this machine shows one and waits, for five minutes or three wrong tries; whoever
    types it on another machine lets that machine into this one's namespace.  A machine that is in
    a namespace with others asks before it leaves that.
    """
    if code:
        if yes and keep:
            raise typer.BadParameter("it leaves or it keeps the other one", param_hint="--keep")
        from potluck.apps.cli.pair_guest import Wishes, join

        join(" ".join(code), Wishes(host, namespace, leave=yes, keep=keep, json=json))
        return
    for given, option in ((host, "--host"), (yes, "--yes"), (keep, "--keep")):
        if given:
            raise typer.BadParameter("it goes with a CODE", param_hint=option)
    from potluck.apps.cli.pair_host import invite

    invite(namespace, json=json)

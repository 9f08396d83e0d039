"""``potluck dashboard``: a page that shows what the cluster does, live."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from potluck.apps.cli.common import Json, Namespace, OneJob, Peer
from potluck.apps.cli.output import print_json

if TYPE_CHECKING:
    from potluck.apps.dashboard.server import Dashboard
    from potluck.cluster.config import AutoDiscoveryConfig


EXAMPLES = """\
potluck dashboard                  on this machine, at http://127.0.0.1:8585/
potluck dashboard --open           and in the browser at once
potluck dashboard --host 0.0.0.0   for the phone on the sofa too; prints an address with a token
"""

EXIT_CODES = (
    "Exit codes: 0 ended by Ctrl-C, 1 failed (the reason is on stderr), 2 wrong usage. "
    "POTLUCK_DASHBOARD_TOKEN sets the token; otherwise one is made where it is needed."
)


def dashboard(
    *,
    job: OneJob = None,
    namespace: Namespace = None,
    peer: Peer = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; other machines need a token.")
    ] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Port to listen on.", show_default="from 8585 on"),
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Extra host name to accept from browsers."),
    ] = None,
    open_browser: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
    json: Json = False,
) -> None:
    """Show the jobs in a browser, live: who works together, how fast, and what goes wrong.

    Looks on without taking part, like potluck status.  The page is read-only.
    """
    from potluck.apps.cli.membership import known_name
    from potluck.apps.dashboard.server import DashboardConfig, open_dashboard
    from potluck.cluster.config import AutoDiscoveryConfig

    observing = AutoDiscoveryConfig(
        job=job or "dashboard", namespace=known_name(namespace), peers=tuple(peer or ())
    )
    config = DashboardConfig(host=host, port=port, names=tuple(name or ()))
    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: over.set())
    with open_dashboard(observing, config, job=job) as served:
        _announce(served, json=json)
        if open_browser:
            import webbrowser

            webbrowser.open(served.url)
        while not over.wait(1.0):
            pass


def _announce(served: Dashboard, *, json: bool) -> None:
    """Say where it is; for programs in one line."""
    if json:
        print_json({"namespace": served.namespace, "url": served.url, "urls": served.urls})
        return
    typer.echo(f'Dashboard of "{served.namespace}":')
    for url in served.urls:
        typer.echo(f"  {url}")
    if "?token=" in served.url:
        typer.echo(
            "Anyone with this address can see the dashboard; the connection is not encrypted."
        )
    typer.echo("Ctrl-C ends it; nothing else depends on it.")


# --------------------------------------------------------------------------------------------------
# ``potluck run --serve``: the dashboard beside a script, for as long as that runs.


@contextlib.contextmanager
def serving(
    config: AutoDiscoveryConfig, job: str, place: str | None, *, json: bool = False
) -> Iterator[None]:
    """Serve the dashboard of a job, in this process and not in the script's; or nothing.

    Says on stderr where it is, with ``json`` as one of the lines for programs.
    """
    if place is None:
        yield
        return
    from potluck.apps.dashboard.server import DashboardConfig, open_dashboard
    from potluck.cluster.observer import place_of

    host, port = place_of(place)
    with open_dashboard(config, DashboardConfig(host=host, port=port), job=job) as served:
        if json:
            print_json({"dashboard": served.url}, stderr=True)
        else:
            typer.echo(f"The dashboard is at {served.url}", err=True)
        yield

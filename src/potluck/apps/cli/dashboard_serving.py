"""``potluck run --serve``: the dashboard beside a script, for as long as that runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from potluck.runtime.auto_config import AutoDiscoveryConfig

__all__ = ["serving"]


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
    from potluck.apps.dashboard.config import DashboardConfig
    from potluck.apps.dashboard.opening import open_dashboard
    from potluck.runtime.observing_window import place_of

    host, port = place_of(place)
    with open_dashboard(config, DashboardConfig(host=host, port=port), job=job) as served:
        words = f"The dashboard is at {served.url}"
        if json:
            import msgspec

            words = msgspec.json.encode({"dashboard": served.url}).decode()
        typer.echo(words, err=True)
        yield

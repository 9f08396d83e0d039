"""Opening a dashboard; says what to install where its web server is missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from potluck.apps.dashboard.config import DashboardConfig
from potluck.runtime.observing_window import find_web_server

if TYPE_CHECKING:
    from potluck.apps.dashboard.server import Dashboard
    from potluck.runtime.auto_config import AutoDiscoveryConfig

__all__ = ["open_dashboard"]


def open_dashboard(
    observing: AutoDiscoveryConfig, config: DashboardConfig, *, job: str | None = None
) -> Dashboard:
    """Serve the dashboard of a namespace, or of one job of it."""
    find_web_server()
    from potluck.apps.dashboard.server import Dashboard

    return Dashboard(observing, config, job=job)

"""DashboardConfig: where the dashboard is served, and to whom; needs no web server to be read."""

from __future__ import annotations

import ipaddress
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from potluck.errors import BackendUnavailable

__all__ = ["DEFAULT_PORT", "USUAL_PORTS", "DashboardConfig"]

DEFAULT_PORT = 8585
USUAL_PORTS = 10
"""Ports that are tried from the default one on, unless one is asked for."""

SHORTEST_TOKEN = 16
"""Characters of a token that somebody chose."""


@dataclass(frozen=True, kw_only=True)
class DashboardConfig:
    """Where the dashboard is served, and to whom."""

    host: str = "127.0.0.1"
    """The address to listen on; anything but this machine's own needs a token."""
    port: int | None = None
    """Unless given, the first free one from 8585 on; 0 for any."""
    token: str | None = None
    """What who looks must bring; ``POTLUCK_DASHBOARD_TOKEN``, or one is made where it is needed."""
    names: Sequence[str] = ()
    """Further names by which browsers may call this machine."""

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def chosen_token(self) -> str | None:
        """The token that is asked for; None where everybody may look."""
        token = self.token or os.environ.get("POTLUCK_DASHBOARD_TOKEN", "")
        if token and len(token) < SHORTEST_TOKEN:
            raise BackendUnavailable(
                f"A dashboard's token has at least {SHORTEST_TOKEN} characters",
                hint="Without POTLUCK_DASHBOARD_TOKEN one is made where it is needed.",
            )
        if token:
            return token
        return None if self.is_local else secrets.token_urlsafe(24)

"""DashboardConfig: this machine alone by default, and never further without a token."""

from __future__ import annotations

import pytest

from potluck.apps.dashboard.config import DashboardConfig
from potluck.errors import BackendUnavailable, IoError
from support.web import dashboard


@pytest.mark.parametrize(
    ("host", "is_local"),
    [
        ("127.0.0.1", True),
        ("127.3.2.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.0.2.2", False),
        ("desk.local", False),
        ("", False),
    ],
)
def test_whoever_can_reach_it_from_elsewhere_needs_a_token(host: str, is_local: bool) -> None:
    """It is made unless one is given, long enough and never the same."""
    config = DashboardConfig(host=host)
    assert config.is_local is is_local
    tokens = {config.chosen_token(), config.chosen_token()}
    if is_local:
        assert tokens == {None}
    else:
        assert len(tokens) == 2
        assert all(token is not None and len(token) >= 32 for token in tokens)


def test_a_token_can_be_set_and_is_then_asked_for_everywhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that can be guessed is refused with words."""
    monkeypatch.setenv("POTLUCK_DASHBOARD_TOKEN", "sixteen-and-more-characters")
    assert DashboardConfig().chosen_token() == "sixteen-and-more-characters"
    monkeypatch.setenv("POTLUCK_DASHBOARD_TOKEN", "short")
    with pytest.raises(BackendUnavailable, match="at least 16 characters"):
        DashboardConfig().chosen_token()


def test_a_port_in_use_is_named() -> None:
    """With what to do; unless a port was asked for, another one is taken."""
    with dashboard() as first:
        with pytest.raises(IoError, match=f"port {first.port}.*--port"):
            dashboard(port=first.port)
        with pytest.raises(IoError, match=r"cannot listen on 192\.0\.2\.77: .*--host"):
            dashboard(port=None, host="192.0.2.77")
        with dashboard(port=None) as second, dashboard(port=None) as third:
            assert second.port != third.port

"""What a node is told, by arguments or by the environment."""

import socket

import pytest

from potluck import AutoDiscoveryConfig


def test_a_node_is_called_as_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the argument, else by the environment, else by the name of its machine."""
    assert AutoDiscoveryConfig().node_name == socket.gethostname()[:64]
    monkeypatch.setenv("POTLUCK_NAME", "cellar")
    assert AutoDiscoveryConfig().node_name == "cellar"
    assert AutoDiscoveryConfig(name="attic").node_name == "attic"


@pytest.mark.parametrize("name", ["a" * 65, "at\ntic", "\x1b[2J"])
def test_a_name_fits_into_a_line(name: str) -> None:
    """It is shown to people and told to others: no control characters, and not too long."""
    with pytest.raises(ValueError, match="at most 64 printable characters"):
        _ = AutoDiscoveryConfig(name=name).node_name

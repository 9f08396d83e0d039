"""What a node is told, by arguments or by the environment."""

import socket
from typing import Any

import pytest

from potluck import AutoDiscoveryConfig, HealthConfig, NodeProfile
from potluck.membership.topology import Medium


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


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"job": 5}, "job must be a string, got 5"),
        ({"peers": "desk:4711"}, r"peers must be a list; write peers=\['desk:4711'\]"),
        ({"peers": None}, "peers must be a list of strings, got None"),
        ({"peers": [5]}, "peers must be a list of strings"),
        ({"interfaces": "eth0"}, r"interfaces must be a list; write interfaces=\['eth0'\]"),
        ({"port": 99999}, r"port must be an integer from 0 \(any free port\) to 65535, got 99999"),
        ({"port": "80"}, r"port must be an integer from 0 \(any free port\) to 65535, got '80'"),
        ({"metrics_port": -1}, "metrics_port must be an integer from 0"),
        ({"facts": 5}, "facts must map"),
        ({"health": "wifi"}, "health must be of type HealthConfig, got 'wifi'"),
        ({"election": 3}, "election must be of type ElectionConfig, got 3"),
        ({"namespace": 7}, "namespace must be a string, got 7"),
    ],
)
def test_nonsense_is_refused_before_anything_is_opened(
    options: dict[str, Any], complaint: str
) -> None:
    """With the name of the option: it would fail deep inside, or be read letter by letter."""
    with pytest.raises((TypeError, ValueError), match=complaint):
        AutoDiscoveryConfig(**options)


def test_machines_that_begin_together_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that comes later waits for as many nodes as its script says."""
    monkeypatch.setenv("POTLUCK_MIN_NODES", "3")
    assert AutoDiscoveryConfig(min_nodes=2).wanted_nodes == 2
    monkeypatch.setenv("POTLUCK_RUN", "1")
    assert AutoDiscoveryConfig(min_nodes=2).wanted_nodes == 2
    monkeypatch.setenv("RANK", "0")
    assert AutoDiscoveryConfig(min_nodes=2).wanted_nodes == 3
    assert AutoDiscoveryConfig(min_nodes=4).wanted_nodes == 4
    assert AutoDiscoveryConfig().wanted_nodes == 3


def test_deadlines_follow_the_medium_unless_given() -> None:
    """On Wi-Fi a healthy laptop is silent for a second or two."""
    wireless, wired = (NodeProfile(medium=Medium(kind)) for kind in ("wireless", "wired"))
    config = AutoDiscoveryConfig()
    assert config.cluster(wireless).health == HealthConfig.wifi()
    assert config.cluster(wired).health == config.cluster().health == HealthConfig.wired()
    given = AutoDiscoveryConfig(health=HealthConfig.loopback())
    assert given.cluster(wireless).health == HealthConfig.loopback()


@pytest.mark.parametrize(
    ("given", "variable", "probes"),
    [
        (None, "", True),
        (None, "0", False),
        (None, "Off", False),
        (True, "0", True),
        (False, "1", False),
    ],
)
def test_one_setting_switches_probes_off(
    monkeypatch: pytest.MonkeyPatch, given: bool | None, variable: str, probes: bool
) -> None:
    """What the program says goes before the environment."""
    monkeypatch.setenv("POTLUCK_PROBES", variable)
    assert AutoDiscoveryConfig(probes=given).probes_links is probes

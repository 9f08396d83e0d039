"""DistributedConfig: who takes part."""

from typing import Any

import pytest

from potluck import DistributedConfig, InvalidRank, InvalidWorldSize
from potluck.runtime.config import DEFAULT_PORT


def test_a_configuration_knows_its_ranks() -> None:
    """Addresses without a port get the one that everybody expects."""
    config = DistributedConfig(["desk", "10.0.0.2:7000", "[::1]:8"], rank=2).validate()
    assert config.world_size == 3
    assert [str(each) for each in config.addresses] == ["desk:52416", "10.0.0.2:7000", "[::1]:8"]
    assert DEFAULT_PORT == 52416


def test_a_rank_alone_is_possible() -> None:
    """A group of one is a group."""
    assert DistributedConfig(["localhost"], 0).validate().world_size == 1


@pytest.mark.parametrize(
    ("peers", "rank", "options", "kind", "reason"),
    [
        ([], 0, {}, InvalidWorldSize, "ours included"),
        (["a", "b"], 2, {}, InvalidRank, "Rank 2"),
        (["a", "b"], -1, {}, InvalidRank, "Rank -1"),
        (["a", "b", "a"], 0, {}, ValueError, r"peers\[0\] and peers\[2\] cannot both be a:52416"),
        (["a", "a:52416"], 0, {}, ValueError, "cannot both"),
        (["a:0"], 0, {}, ValueError, "port that the others know"),
        (["a", "a b"], 0, {}, ValueError, r"peers\[1\]: 'a b' is no address"),
        (["a", ("b", 70000)], 0, {}, ValueError, r"peers\[1\] is \('b', 70000\)"),
        (["a", ("b", "x")], 0, {}, TypeError, r"peers\[1\]: A port is a whole number"),
        (["a", ("b", 1, 2)], 0, {}, ValueError, r"peers\[1\]"),
        (["a", 7], 0, {}, TypeError, r"peers\[1\] is 7"),
        (["a", None], 0, {}, TypeError, r"peers\[1\] is None"),
        (["a"], "0", {}, TypeError, "A rank is a whole number, not '0'"),
        (["a", "b"], True, {}, TypeError, "A rank is a whole number, not True"),
        ("desk:1", 0, {}, TypeError, "list of addresses"),
        (7, 0, {}, TypeError, "list of addresses"),
        (["a"], 0, {"timeout": 0}, ValueError, "more than zero"),
        (["a"], 0, {"timeout": float("nan")}, ValueError, "more than zero"),
    ],
)
def test_what_makes_no_sense_is_refused(
    peers: Any, rank: int, options: dict[str, Any], kind: type[Exception], reason: str
) -> None:
    """At once, with a sentence that names the fault."""
    with pytest.raises(kind, match=reason):
        DistributedConfig(peers, rank, **options)


def test_a_host_and_its_port_may_be_a_pair() -> None:
    """As sockets have them; also of IPv6."""
    config = DistributedConfig([("desk", 7000), ("::1", 8), "10.0.0.2"], 0)
    assert [str(each) for each in config.addresses] == ["desk:7000", "[::1]:8", "10.0.0.2:52416"]

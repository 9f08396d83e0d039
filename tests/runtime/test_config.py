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
        (["a", "b", "a"], 0, {}, ValueError, "Ranks 0 and 2 cannot both be at a:52416"),
        (["a", "a:52416"], 0, {}, ValueError, "cannot both"),
        (["a:0"], 0, {}, ValueError, "port that the others know"),
        (["a b"], 0, {}, ValueError, "is no address"),
        ("desk:1", 0, {}, TypeError, "list of addresses"),
        (["a"], 0, {"timeout": 0}, ValueError, "more than zero"),
        (["a"], 0, {"timeout": float("nan")}, ValueError, "more than zero"),
    ],
)
def test_what_makes_no_sense_is_refused(
    peers: Any, rank: int, options: dict[str, Any], kind: type[Exception], reason: str
) -> None:
    """With a sentence that names the fault."""
    with pytest.raises(kind, match=reason):
        DistributedConfig(peers, rank, **options).validate()

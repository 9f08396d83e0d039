"""Node profiles: they travel, they are bounded, and nothing odd gets in."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck import MalformedFrame, NodeProfile
from potluck.core.topology_nodes import PROFILE_LIMIT, Accelerator, Battery

FULL = NodeProfile(
    host="attic",
    system="Linux 6.8",
    machine="x86_64",
    processor="Some Chip 9000",
    python="3.11.7",
    cores=16,
    physical_cores=8,
    memory=32 << 30,
    available_memory=20 << 30,
    accelerators=(Accelerator("cuda", "GeForce", 8 << 30), Accelerator("mps")),
    battery=Battery(80, plugged=True),
)


@pytest.mark.parametrize("profile", [NodeProfile(), FULL])
def test_a_profile_survives_the_journey(profile: NodeProfile) -> None:
    """Nothing is lost, and what is not known takes no room."""
    assert NodeProfile.from_bytes(profile.to_bytes()) == profile
    assert NodeProfile().to_bytes() == b"\x80"


def test_a_profile_is_one_line_for_people() -> None:
    """With what is known, and without what is not."""
    assert str(FULL) == (
        "attic: 16 cores, 32.0 GiB, GeForce, mps, battery 80 % (plugged in), Linux 6.8, "
        "Python 3.11.7"
    )
    assert str(NodeProfile(cores=1, battery=Battery(7))) == "a machine: 1 core, battery 7 %"
    assert str(NodeProfile(host="attic")) == "attic: nothing known"


@pytest.mark.parametrize(
    "told",
    [
        {"cores": -1},
        {"cores": 1 << 40},
        {"memory": 1 << 62},
        {"cores": "many"},
        {"host": "x" * 129},
        {"host": "\x1b[31mred"},
        {"accelerators": [{"kind": "cuda"}] * 17},
        {"accelerators": [{"kind": "cu\nda"}]},
        {"battery": {"percent": 101}},
        [1, 2, 3],
    ],
)
def test_what_makes_no_sense_is_refused(told: object) -> None:
    """Numbers out of bounds, text with control characters, the wrong shape."""
    with pytest.raises(MalformedFrame, match="makes no sense"):
        NodeProfile.from_bytes(msgspec.msgpack.encode(told))


def test_what_is_too_long_is_refused_unread() -> None:
    """Its size is looked at before anything else."""
    with pytest.raises(MalformedFrame, match="8193 bytes; 8192 are allowed"):
        NodeProfile.from_bytes(bytes(PROFILE_LIMIT + 1))


def test_the_longest_profile_is_within_the_limit() -> None:
    """Whatever a machine can tell about itself arrives."""
    text = "x" * 128
    longest = NodeProfile(
        host=text,
        system=text,
        machine=text,
        processor=text,
        python=text,
        accelerators=(Accelerator(text, text, 1 << 61),) * 16,
    )
    assert NodeProfile.from_bytes(longest.to_bytes()) == longest


@given(st.binary(max_size=200))
def test_random_bytes_do_no_harm(data: bytes) -> None:
    """They are a profile or a clean refusal."""
    try:
        profile = NodeProfile.from_bytes(data)
    except MalformedFrame:
        return
    assert isinstance(profile, NodeProfile)

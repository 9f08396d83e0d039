"""Pace: interval and pause by the size of a group, and pauses lengthened by lateness."""

from __future__ import annotations

from dataclasses import replace

import pytest

from potluck.core.health_config import HealthConfig
from potluck.core.pace import BEATS_PER_SECOND, LENGTHENED, lengthened, pace

WIRED, WIFI = HealthConfig.wired(), HealthConfig.wifi()


@pytest.mark.parametrize("members", range(1, 8))
def test_small_groups_keep_the_preset(members: int) -> None:
    """Up to seven members nothing changes."""
    assert pace(members, WIRED) == (0.2, 1.0)
    assert pace(members, WIFI) == (0.5, 4.0)


@pytest.mark.parametrize("members", [8, 16, 32, 64, 256])
def test_larger_groups_beat_more_slowly(members: int) -> None:
    """No member sends more beats in a second than it can afford; five fit into a pause."""
    interval, pause = pace(members, WIRED)
    assert (members - 1) / interval == pytest.approx(BEATS_PER_SECOND)
    assert pause == pytest.approx(5 * interval)


def test_the_slowest_member_sets_the_pause() -> None:
    """One member on Wi-Fi makes the whole view patient; it cannot make it impatient."""
    assert pace(3, WIRED, [1.0, 4.0, 1.0]) == (0.2, 4.0)
    assert pace(3, WIRED, [0.5]) == (0.2, 1.0)


def test_a_pause_is_lengthened_by_lateness_within_bounds() -> None:
    """Small lateness changes nothing, and none lengthens it beyond a bound."""
    assert lengthened(1.0, 0.1) == 1.0
    assert lengthened(1.0, 0.2) == pytest.approx(1.4)
    assert lengthened(5.0, 1e6) == LENGTHENED * 5.0


@pytest.mark.parametrize("members", [2, 8, 33, 256])
@pytest.mark.parametrize("preset", [WIRED, WIFI, HealthConfig.loopback()])
def test_every_pace_makes_a_valid_config(members: int, preset: HealthConfig) -> None:
    """Patience fits between two intervals and the pause."""
    config = preset.paced(*pace(members, preset))
    assert 2 * config.interval <= config.least_patience <= config.pause_after
    assert config.slow_round_trip == preset.slow_round_trip


def test_a_preset_with_a_short_pause_beats_often_enough() -> None:
    """Five beats fit into a pause whatever the preset's interval is."""
    short = replace(WIRED, interval=0.3, least_patience=0.8)
    assert pace(2, short) == (0.2, 1.0)


def test_negligible_lateness_is_a_tenth_of_the_pause() -> None:
    """Of a long pause more is negligible."""
    assert lengthened(4.0, 0.39) == 4.0
    assert lengthened(4.0, 0.41) == pytest.approx(4.82)

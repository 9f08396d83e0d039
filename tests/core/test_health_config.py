"""What may be configured about health, and that the presets keep the promises made for them."""

import math

import pytest

from potluck import HealthConfig

PRESETS = [HealthConfig.loopback(), HealthConfig.wired(), HealthConfig.wifi()]


def test_wired_leaves_a_second_to_agree_on_who_remains() -> None:
    """Whoever falls silent is given up after two seconds of the three that are promised."""
    assert HealthConfig.wired() == HealthConfig()
    assert HealthConfig() == HealthConfig(0.2, 0.6, 1.0, 0.1, 0.05, 0.2)
    assert HealthConfig.wired().dead_after <= 2.0


@pytest.mark.parametrize("preset", PRESETS)
def test_whoever_is_given_up_has_paused_long_before(preset: HealthConfig) -> None:
    """In every preset the one bound is twice the other, and several heartbeats fit in between."""
    assert preset.dead_after == 2 * preset.pause_after
    assert preset.pause_after >= 5 * preset.interval
    assert preset.least_patience > 2.5 * preset.interval


@pytest.mark.parametrize(
    "wrong",
    [
        {"interval": 0.0},
        {"interval": -1.0},
        {"interval": math.nan},
        {"interval": 0.4},
        {"least_patience": 1.5},
        {"pause_after": 0.5},
        {"pause_after": math.inf},
    ],
)
def test_times_that_could_not_work_are_refused(wrong: dict[str, float]) -> None:
    """A single late heartbeat must never accuse anybody."""
    with pytest.raises(ValueError, match="2 × interval ≤ least_patience ≤ pause_after"):
        HealthConfig(**wrong)


@pytest.mark.parametrize(
    "wrong", [{"slow_round_trip": 0.0}, {"high_jitter": -1.0}, {"high_loss": 0.0}, {"high_loss": 1}]
)
def test_bounds_of_a_link_that_could_not_work_are_refused(wrong: dict[str, float]) -> None:
    """No link would ever be good, or none ever bad."""
    with pytest.raises(ValueError, match="high_loss between 0 and 1"):
        HealthConfig(**wrong)

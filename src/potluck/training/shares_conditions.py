"""How this machine is: what may make it slower than it could be."""

from __future__ import annotations

import functools
import os
from typing import Any

from potluck.net.names import machine_name
from potluck.training.shares import Condition

__all__ = ["measure_condition"]


def measure_condition(link: int = 0) -> Condition:
    """Load by others, battery and heat, as far as this machine tells; ``link`` in bytes per second.

    >>> measure_condition(link=125_000_000).link
    125000000
    """
    import psutil

    return Condition(
        load=_foreign_load(psutil),
        on_battery=_on_battery(psutil),
        heat=_heat(psutil),
        link=link,
        name=machine_name(),
    )


def _foreign_load(psutil: Any) -> int:
    """Percent of the processors that others than this process have used since the last look."""
    own = float(_this_process(os.getpid()).cpu_percent(None)) / (psutil.cpu_count() or 1)
    return round(min(100.0, max(0.0, float(psutil.cpu_percent(None)) - own)))


@functools.cache
def _this_process(pid: int) -> Any:
    """The same object every time: it remembers what it saw last."""
    import psutil

    return psutil.Process(pid)


def _on_battery(psutil: Any) -> bool:
    battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    return battery is not None and battery.power_plugged is False


def _heat(psutil: Any) -> int:
    """Of the hottest sensor; 0 where there is none, as on macOS and in virtual machines."""
    sensors = psutil.sensors_temperatures() if hasattr(psutil, "sensors_temperatures") else {}
    found = [float(each.current) for row in sensors.values() for each in row if each.current]
    return round(max(found, default=0.0))

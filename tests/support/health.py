"""A node whose peers beat as told, by a clock that the test pushes."""

from __future__ import annotations

from potluck import HealthConfig, HealthEvent, HealthMonitor
from potluck._types import NodeId, ProcessId

__all__ = ["Ward", "process"]


def process(letter: str) -> ProcessId:
    """Somebody."""
    return ProcessId(NodeId(letter * 32), 1)


class Ward:
    """A monitor, driven as its users drive it: whenever it wants to be called."""

    def __init__(self, config: HealthConfig | None = None, peers: str = "a") -> None:
        self.config = config or HealthConfig.wired()
        self.monitor = HealthMonitor(self.config)
        self.now = 1000.0
        self.events: list[HealthEvent] = []
        for letter in peers:
            self.monitor.watch(process(letter), self.now, name=letter.upper())

    @property
    def told(self) -> list[str]:
        """What was said so far, in order."""
        return [str(event) for event in self.events]

    def until(self, end: float) -> None:
        """Let time pass, ticking whenever the monitor wants it."""
        while (due := self.monitor.next_deadline) is not None and due <= end:
            self.now = max(self.now, due)
            self.events += self.monitor.tick(self.now)
        self.now = end

    def rest(self, seconds: float) -> None:
        """Let some time pass without a word of anybody."""
        self.until(self.now + seconds)

    def beat(
        self, peer: str = "a", *, times: int = 1, every: float = 0, trip: float | None = None
    ) -> None:
        """Hear a peer regularly."""
        for _ in range(times):
            self.rest(every or self.config.interval)
            self.monitor.heard(process(peer), self.now, round_trip=trip)

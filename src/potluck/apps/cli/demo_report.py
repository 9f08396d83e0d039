"""What the demo found out, for machines and for people."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

__all__ = ["Killed", "Noticed", "Report"]


class Killed(msgspec.Struct, frozen=True):
    """The rank that was killed."""

    rank: int
    pid: int
    step: int
    """How far training had come."""


class Noticed(msgspec.Struct, frozen=True):
    """How a survivor learned of it."""

    rank: int
    milliseconds: float
    """From the kill to the error in its hands."""
    text: str
    """The error as a user sees it."""


class Report(msgspec.Struct, frozen=True):
    """Everything, in the order in which it happened."""

    ranks: int
    seed: int
    pids: list[int]
    killed: Killed
    noticed: list[Noticed]
    resumed_milliseconds: float
    """From the kill to the first step without the killed rank."""
    resumed_step: int
    """The step the survivors went on from."""
    steps: int
    losses: list[tuple[int, float]]
    """(step, mean loss over all points), some ten for each second."""
    accuracy: float
    """On points that were not trained on."""
    fingerprints: dict[str, str]
    """Rank -> hash of its parameters at the end."""
    messages: int
    bytes_sent: int
    seconds: float

    @property
    def is_identical(self) -> bool:
        """Whether all survivors ended with the same parameters, bit for bit."""
        return len(set(self.fingerprints.values())) == 1

    def to_json(self) -> bytes:
        """For machines; the verdict is in it too."""
        fields = {**msgspec.to_builtins(self), "identical": self.is_identical}
        return msgspec.json.format(msgspec.json.encode(fields))

    def sentences(self) -> Iterator[str]:
        """For people."""
        first, last = self.losses[0][1], self.losses[-1][1]
        yield (
            f"{self.steps:,} steps in {self.seconds:.1f} s: loss {first:.3f} → {last:.3f}, "
            f"{self.accuracy:.1%} of unseen points on the right spiral."
        )
        yield (
            f"{self.messages:,} messages, {self.bytes_sent / 1e6:,.0f} MB between "
            f"{self.ranks} processes."
        )
        slowest = max(notice.milliseconds for notice in self.noticed)
        yield (
            f"All others noticed the end of rank {self.killed.rank} within {slowest:.1f} ms; "
            f"training went on after {self.resumed_milliseconds:.0f} ms."
        )
        if self.is_identical:
            (fingerprint,) = set(self.fingerprints.values())
            yield f"All survivors hold the same parameters, bit for bit ({fingerprint})."
        else:
            yield f"The survivors' parameters differ: {self.fingerprints}."

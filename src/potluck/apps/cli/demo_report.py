"""What the demo found out, for machines and for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from potluck.apps.cli.demo_messages import Finished

__all__ = ["Agreed", "Killed", "Noticed", "Report", "Resumed", "Returned", "Run"]


class Killed(msgspec.Struct, frozen=True):
    """The node that was killed."""

    name: str
    rank: int
    pid: int
    step: int
    """How far training had come."""


class Noticed(msgspec.Struct, frozen=True):
    """How a survivor learned of it."""

    name: str
    milliseconds: float
    """From the kill to the moment it knew."""
    sentence: str
    """In the words of the log."""


class Agreed(msgspec.Struct, frozen=True):
    """The view without the killed node."""

    epoch: int
    milliseconds: float
    """From the kill to the moment the last survivor was in it."""
    sentence: str


class Resumed(msgspec.Struct, frozen=True):
    """The first step without it."""

    step: int
    milliseconds: float


class Returned(msgspec.Struct, frozen=True):
    """How the killed node came back."""

    name: str
    pid: int
    epoch: int
    step: int
    """From which it went on."""
    seconds: float
    """From the start of its process to its readiness."""
    state_bytes: int
    state_seconds: float


class Run(msgspec.Struct, frozen=True):
    """How one of the two trainings ended."""

    steps: int
    loss: float
    """Over all points."""
    noise: float
    """How far apart the losses of the last batches were."""
    accuracy: float
    """On points that were not trained on."""
    fingerprints: dict[str, str]
    """Of the parameters, for each node."""
    samples: float
    missing_samples: float
    """Between what the sampler says has counted, and what went into steps: 0 if all is well."""
    seconds: float

    @classmethod
    def of(cls, ends: dict[str, Finished]) -> Run:
        """From what every node told at the end."""
        first = next(iter(ends.values()))
        counted = [end.weight for end in ends.values() if end.weight]
        return cls(
            steps=first.step,
            loss=first.loss,
            noise=max(end.wobble for end in ends.values()),
            accuracy=first.accuracy,
            fingerprints={name: end.fingerprint for name, end in ends.items()},
            samples=first.samples,
            missing_samples=max((abs(first.samples - each) for each in counted), default=0.0),
            seconds=max(end.seconds for end in ends.values()),
        )

    @property
    def is_identical(self) -> bool:
        """Whether all nodes ended with the same parameters, bit for bit."""
        return len(set(self.fingerprints.values())) == 1


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything, in the order in which it happened."""

    nodes: list[str]
    seed: int
    found_by: str
    meeting_seconds: float
    killed: Killed | None = None
    noticed: list[Noticed] = []
    agreed: Agreed | None = None
    resumed: Resumed | None = None
    returned: Returned | None = None
    story: Run
    undisturbed: Run
    losses: dict[str, list[tuple[int, float]]]
    """(step, mean loss over the batch) of both runs, some ten for each second."""
    averaged_bytes: int
    """Bytes of arrays that went through the collectives of one node."""
    view: int
    """The number of the last one."""
    events: list[tuple[float, str]]
    """Seconds since the beginning, and a sentence."""
    pids: list[int]
    """Of all processes that were started."""
    seconds: float

    @property
    def difference(self) -> float:
        """Between the losses at the end of the two runs."""
        return abs(self.story.loss - self.undisturbed.loss)

    @property
    def noise(self) -> float:
        """What such a difference may be by chance: as much as the last batches differed."""
        return max(self.story.noise, self.undisturbed.noise)

    @property
    def problems(self) -> list[str]:
        """Why the story did not hold; empty if it did."""
        found = []
        for what, run in (("the story", self.story), ("the undisturbed run", self.undisturbed)):
            if not run.is_identical:
                found.append(f"the parameters after {what} differ: {run.fingerprints}")
            if run.missing_samples:
                found.append(
                    f"{run.missing_samples:,.0f} samples of {what} were lost or counted twice"
                )
        if self.difference > self.noise:
            found.append(
                f"the losses differ by {self.difference:.4f}, which is more than "
                f"the {self.noise:.4f} between single batches"
            )
        return found

    def to_json(self) -> bytes:
        """For machines; the verdict is in it too."""
        fields: dict[str, Any] = {
            **msgspec.to_builtins(self),
            "identical": self.story.is_identical and self.undisturbed.is_identical,
            "difference": self.difference,
            "noise": self.noise,
            "problems": self.problems,
            "held": not self.problems,
        }
        return msgspec.json.format(msgspec.json.encode(fields))

    def sentences(self) -> Iterator[str]:
        """For people."""
        story, plain = self.story, self.undisturbed
        yield from self._disturbance()
        yield (
            f"Loss after {story.steps:,} steps: {story.loss:.4f}; undisturbed {plain.loss:.4f}. "
            f"They differ by {self.difference:.4f}, single batches by up to {self.noise:.4f}."
        )
        yield (
            f"{story.samples:,.0f} samples counted, each once per epoch; "
            f"{story.accuracy:.1%} of unseen points are put on the right spiral."
        )
        yield (
            f"{self.averaged_bytes / 1e6:,.0f} MB went through the collectives of each node; "
            f"undisturbed and at full speed it was {plain.steps / plain.seconds:,.0f} steps/s."
        )
        if story.is_identical and plain.is_identical:
            print_of = next(iter(story.fingerprints.values()))
            count = len(self.nodes)
            who = f"All {count} nodes" if count > 2 else "Both nodes"  # noqa: PLR2004 - there are two
            yield f"{who} hold the same parameters, bit for bit ({print_of})."
        for problem in self.problems:
            yield f"The story did not hold: {problem}."

    def _disturbance(self) -> Iterator[str]:
        killed, agreed, resumed, back = self.killed, self.agreed, self.resumed, self.returned
        if killed is None or agreed is None or resumed is None or back is None:
            return
        slowest = max(each.milliseconds for each in self.noticed)
        yield (
            f"{killed.name} was killed at step {killed.step:,}. All others knew within "
            f"{slowest:.1f} ms, agreed on view {agreed.epoch} after {agreed.milliseconds:.0f} ms "
            f"and committed the next step after {resumed.milliseconds:.0f} ms."
        )
        yield (
            f"{back.name} came back {back.seconds:.1f} s after its start, got "
            f"{back.state_bytes / 1e6:.1f} MB of state in {back.state_seconds:.2f} s "
            f"and went on from step {back.step:,}."
        )

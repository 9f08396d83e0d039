"""What is known while the demo runs: its nodes, what they told, and what happened when."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from potluck.apps.cli.demo_messages import (
    Begun,
    Committed,
    Finished,
    Happened,
    LinkLine,
    Listening,
    News,
    Progress,
    Unfound,
)
from potluck.apps.cli.demo_process import NodeProcess

__all__ = ["STORY", "UNDISTURBED", "Actor", "Link", "Scene", "words"]

STORY, UNDISTURBED = "story", "undisturbed"
"""The two runs of a demo."""

GOING = {"training", "done"}
"""States in which a node takes part."""


@dataclass(eq=False)
class Actor:
    """One node in its present start."""

    name: str
    process: NodeProcess
    """Its present start."""
    state: str = "starting"
    started_at: float = 0.0
    reason: str = ""
    """Why it is as it is, in the words of the others."""
    place: Listening | None = None
    unfound: Unfound | None = None
    begun: Begun | None = None
    progress: Progress | None = None
    happened: list[Happened] = field(default_factory=list)
    committed: list[Committed] = field(default_factory=list)
    finished: dict[str, Finished] = field(default_factory=dict)

    def first(self, kind: str, fits: Callable[[Happened], bool]) -> Happened | None:
        """The first event of a kind that fits."""
        return next((each for each in self.happened if each.kind == kind and fits(each)), None)


@dataclass(frozen=True)
class Link:
    """A pair of nodes and what is between them."""

    ends: tuple[str, str]
    round_trip: float | None
    rate: int
    """Bytes per second that can go from one to the other; 0 where nobody has measured."""
    is_limit: bool = True
    """Whether it allows no more; within one machine nothing is a limit."""


@dataclass
class Scene:
    """Everything the audience may see."""

    actors: list[Actor]
    steps: int
    began: float = field(default_factory=time.monotonic)
    found_by: str = ""
    run: str = STORY
    losses: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    marks: list[tuple[int, str]] = field(default_factory=list)
    """Steps of the story at which something happened, each with a sign."""
    events: list[tuple[float, str]] = field(default_factory=list)
    """Seconds since the beginning, and a sentence."""
    names: dict[str, str] = field(default_factory=dict)
    """Of processes."""

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self.began

    @property
    def progress(self) -> Progress | None:
        """The latest of all nodes that take part."""
        told = [each.progress for each in self.actors if each.progress and each.state in GOING]
        return max(told, key=lambda each: (each.run == self.run, each.step), default=None)

    @property
    def speed(self) -> float:
        """Steps per second, as all nodes of the run see it together."""
        told = [each.progress for each in self.actors if each.progress and each.state in GOING]
        speeds = [each.speed for each in told if each.run == self.run]
        return sum(speeds) / max(1, len(speeds))

    @property
    def averaged(self) -> int:
        """Bytes that went through the collectives of a node that was there all the time."""
        return max((each.progress.averaged for each in self.actors if each.progress), default=0)

    def recast(self, actor: Actor, process: NodeProcess) -> Actor:
        """Another start of the same node: nothing of the last one holds any more."""
        place = self.actors.index(actor)
        self.actors[place] = Actor(
            actor.name, process, "starting again", time.monotonic(), actor.reason
        )
        return self.actors[place]

    def receive(self, actor: Actor, news: News) -> None:
        """Take note of what a node tells."""
        match news:
            case Listening():
                actor.place = news
                self.names[news.process] = actor.name
                actor.state = "looking around"
            case Unfound():
                actor.unfound = news
            case Begun():
                actor.begun, actor.state, actor.reason = news, "training", ""
            case Progress():
                actor.progress = news
                self._note_loss(news)
            case Happened():
                actor.happened.append(news)
            case Committed():
                actor.committed.append(news)
            case Finished():
                actor.finished[news.run] = news
                if news.run == UNDISTURBED:
                    actor.state = "done"

    def _note_loss(self, news: Progress) -> None:
        curve = self.losses.setdefault(news.run, [])
        if not curve or news.step > curve[-1][0]:
            curve.append((news.step, news.loss))

    def links(self) -> Iterator[Link]:
        """Every pair of nodes that take part, with the longest round trip either has measured."""
        going = [each for each in self.actors if each.progress and each.state in GOING]
        for place, one in enumerate(going):
            for other in going[place + 1 :]:
                seen = [*self._seen(one, other), *self._seen(other, one)]
                trips = [line.round_trip for line in seen if line.round_trip is not None]
                assert one.progress is not None
                assert other.progress is not None
                pair = one.progress, other.progress
                rate = min(min(each.up, each.down) for each in pair)
                is_limit = any(each.is_limit for each in pair)
                yield Link((one.name, other.name), max(trips, default=None), rate, is_limit)

    def _seen(self, actor: Actor, other: Actor) -> Iterator[LinkLine]:
        assert actor.progress is not None
        for line in actor.progress.links:
            if other.place is not None and line.process == other.place.process:
                yield line

    def health(self, actor: Actor) -> LinkLine | None:
        """The worst that any other says of a node, as ``potluck status`` shows it."""
        order = ("healthy", "degraded", "suspect", "dead")
        lines = [
            line
            for other in self.actors
            if other is not actor and other.progress is not None and other.state in GOING
            for line in self._seen(other, actor)
        ]
        return max(
            lines,
            key=lambda line: order.index(line.status) if line.status in order else 0,
            default=None,
        )


def words(names: list[str]) -> str:
    """A list as people say it.

    >>> words(["basil", "thyme", "sage"])
    'basil, thyme and sage'
    """
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))

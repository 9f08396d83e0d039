"""A machine for schedules: all ranks of a group in one place, on plain numpy, without a network.

It does what an executor does, with the least room that the contract allows.  What moves next, and
how far, is decided by dice that the caller passes in; so any interleaving can be played, and
replayed. An actor that can do nothing sleeps until something changes that it may have waited for.
When all sleep the run is over; if not all is done by then, it was a deadlock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from potluck.collective.actors import (
    Actor,
    Combiner,
    Dice,
    Memory,
    Rank,
    Receiver,
    Sender,
    Stream,
)
from potluck.collective.reduce import Array, Reducer, quiet
from potluck.collective.schedule import Schedule

__all__ = ["Deadlock", "Limits", "Machine", "straight"]


def straight(sides: int) -> int:
    """Dice for the quickest run: whoever woke last goes on, as far as it can."""
    return sides - 1


class Deadlock(Exception):
    """Every rank that is not done waits for another."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The room that ranks have; unless told otherwise, the least there can be."""

    piece: int = 1
    capacity: int = 1
    """Elements that a stream holds."""


class Machine:
    """One run of one schedule."""

    def __init__(
        self,
        schedule: Schedule,
        inputs: Sequence[Array],
        reducer: Reducer,
        *,
        limits: Limits,
        in_place: bool,
    ) -> None:
        self._capacity = limits.capacity
        self._streams: dict[tuple[int, int], Stream] = {}
        self._actors: list[Actor] = []
        self.ranks: list[Rank] = []
        for program, given in zip(schedule.programs, inputs, strict=True):
            size = schedule.task.world_size
            memory = Memory(program, given, reducer, world_size=size, in_place=in_place)
            rank = Rank(program, memory, reducer, limits.piece)
            self.ranks.append(rank)
            self._connect(rank)

    def run(self, dice: Dice = straight) -> None:
        """Let everybody act, in the order that the dice decide, until nobody can."""
        awake = self._actors.copy()
        for actor in awake:
            actor.awake = True
        with quiet():
            while awake:
                place = dice(len(awake))
                awake[place], awake[-1] = awake[-1], awake[place]
                actor = awake.pop()
                helped = actor.act(dice)
                actor.awake = helped is not None
                if helped is None:
                    continue
                awake.append(actor)
                for other in helped:
                    if not other.awake:
                        other.awake = True
                        awake.append(other)
        stuck = [
            f"rank {rank.program.rank} in step {index} at {stage.done} of {stage.step}"
            for rank in self.ranks
            for index, stage in enumerate(rank.stages)
            if stage.done < stage.step.stop
        ]
        if stuck:
            raise Deadlock("; ".join(stuck))

    def _stream(self, source: int, target: int) -> Stream:
        return self._streams.setdefault((source, target), Stream(self._capacity))

    def _connect(self, rank: Rank) -> None:
        """Make a rank's actors, and let each stage know whom its progress helps."""
        me = rank.program.rank
        senders = {
            peer: Sender(rank, peer, self._stream(me, peer)) for peer in rank.program.outgoing
        }
        receivers = {
            peer: Receiver(rank, peer, self._stream(peer, me)) for peer in rank.program.incoming
        }
        combiners: list[Combiner] = []
        for sender in senders.values():
            sender.stream.ends.append(sender)
        for receiver in receivers.values():
            receiver.stream.ends.append(receiver)
        for stage in rank.stages:
            step = stage.step
            sources = [receivers[peer] for peer in step.sources]
            stage.on_value.extend(senders[peer] for peer in step.to)
            movers: list[Actor] = list(stage.on_value if step.only_sends else sources)
            if not step.only_sends and not step.moves:
                combiner = Combiner(rank, stage)
                combiners.append(combiner)
                freed = stage.on_sent if step.into is None else stage.on_value
                freed.extend(sources)
                movers = [combiner]
                for receiver in sources:
                    receiver.combiners[stage] = combiner
            for index in {*step.reads, *step.overwrites}:
                rank.stages[index].on_value.extend(movers)
                rank.stages[index].on_sent.extend(movers)
        self._actors += [*senders.values(), *receivers.values(), *combiners]

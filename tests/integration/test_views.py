"""Views of real processes, one after the other on the ports they have: deaths, joins, no traces."""

from __future__ import annotations

import gc
import json
import random
import threading
from typing import Any

import numpy as np

from potluck import DistributedContext
from potluck._types import NodeId, ProcessId, View
from potluck.backend.port import NodePort
from potluck.backend.stream_backend import ViewBackend
from potluck.errors import Aborted, DistributedError
from potluck.wire_messages import RankEndpoint
from support.doors import LOOPBACKS
from support.forks import open_files
from support.place import Place
from support.ranks import Rank, Ranks
from support.threads import PATIENCE, eventually
from support.views import LINEAGE, soon

Card = dict[str, Any]


class Member:
    """A process that is in one view at a time, as it is told; it adds up numbers all the while."""

    def __init__(self, place: Place, port: NodePort) -> None:
        self._place = place
        self._port = port
        self._word: str | None = None

    def run(self) -> None:
        """Go from view to view until told to end."""
        word = self._next_word()
        while word != "end":
            word = self._live_in(json.loads(word))

    def _next_word(self) -> str:
        eventually(self._has_word)
        assert self._word is not None
        word, self._word = self._word, None
        return word

    def _has_word(self) -> bool:
        self._word = self._word or self._place.next_word()
        return self._word is not None

    def _live_in(self, told: Card) -> str:
        members = told["members"]
        names = tuple(ProcessId(NodeId(card["node"]), card["start"]) for card in members)
        peers = [
            RankEndpoint(LOOPBACKS, card["port"], f"process-{card['pid']}") for card in members
        ]
        view = View(LINEAGE, told["epoch"], names)
        me = self._port.process
        with ViewBackend(self._port, view, me, peers, deadline=soon()) as backend:
            is_told = threading.Event()
            work = threading.Thread(target=self._work, args=(backend, is_told))
            work.start()
            word = self._next_word()
            is_told.set()
            backend.abort(Aborted("another view"))
            work.join()
        return word

    def _work(self, backend: ViewBackend, is_told: threading.Event) -> None:
        context = DistributedContext.with_metrics(backend)
        ones = np.ones(200_000, np.float32)
        is_first = True
        while True:
            values = ones * (backend.rank + 1)
            try:
                context.all_reduce(values, timeout=PATIENCE)
            except DistributedError as error:
                if not is_told.is_set():
                    self._place.say("broken", recoverable=error.recoverable, text=str(error))
                return
            assert (values == values[0]).all()
            if is_first:
                self._place.say("sum", value=float(values[0]), rank=backend.rank)
                is_first = False


def take_part(place: Place) -> None:
    """A process with one port; it says what it has open in the end that it had not before."""
    with NodePort() as first:  # whatever stays open for good is open from now on
        ViewBackend(
            first,
            View(LINEAGE, 1, (first.process,)),
            first.process,
            [RankEndpoint([], 1, "me")],
            deadline=soon(),
        ).close()
    before = open_files()
    with NodePort() as port:
        process = port.process
        place.say("here", node=process.node, start=process.incarnation, port=port.port)
        Member(place, port).run()
    gc.collect()
    place.say("left", open=sorted(open_files() - before))


class Cast:
    """The processes of a test, and the views they are told."""

    def __init__(self, ranks: Ranks, count: int) -> None:
        self._ranks = ranks
        self._epoch = 0
        self.cards: dict[int, Card] = {}
        self.processes: dict[int, Rank] = {}
        for _ in range(count):
            self.add()

    def add(self) -> int:
        """One more process; its number."""
        number = len(self.cards)
        (process,) = self._ranks.start(take_part, 2, ranks=[0])
        self.processes[number] = process
        self.cards[number] = process.expect("here") | {"pid": process.pid}
        return number

    def form(self, *numbers: int) -> None:
        """A view of these, which adds up."""
        self._epoch += 1
        told = {"epoch": self._epoch, "members": [self.cards[number] for number in numbers]}
        for number in numbers:
            self.processes[number].tell(json.dumps(told))
        for rank, number in enumerate(numbers):
            said = _hear(self.processes[number], "sum")
            assert (said["rank"], said["value"]) == (rank, len(numbers) * (len(numbers) + 1) / 2)

    def end(self) -> None:
        """All leave; none has anything open."""
        for process in self.processes.values():
            process.tell("end")
        for process in self.processes.values():
            assert _hear(process, "left")["open"] == []
            process.value()


def _hear(process: Rank, word: str) -> Card:
    """What a process says; before that it may have lost somebody who was told earlier."""
    while (said := process.expect_any(word, "broken"))["word"] != word:
        assert said["recoverable"]
    return said


def test_survivors_form_the_next_view_with_a_newcomer(ranks: Ranks) -> None:
    """A member is killed in the middle of its work: the others break off, and go on in a view."""
    cast = Cast(ranks, 4)
    cast.form(0, 1, 2, 3)
    victim = cast.processes.pop(2)
    victim.kill()
    for process in cast.processes.values():
        said = process.expect("broken")
        assert said["recoverable"]
        assert "Rank 2" in said["text"] or "rank 2" in said["text"]
    newcomer = cast.add()
    cast.form(3, newcomer, 0, 1)
    cast.end()


def test_views_that_follow_each_other_leave_nothing_behind(ranks: Ranks) -> None:
    """Five views of changing members in changing order, each ended in the middle of its work."""
    cast = Cast(ranks, 4)
    choice = random.Random(5)
    numbers = list(cast.processes)
    for _ in range(5):
        cast.form(*choice.sample(numbers, choice.randint(1, 4)))
    cast.end()

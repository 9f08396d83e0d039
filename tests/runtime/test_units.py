"""Units: programs cut into pieces, with everything they wait for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.collective import registry
from potluck.collective.schedule import Draft, Form, Place, Step
from potluck.collective.task import Collective, Layout, Span
from potluck.runtime.units import STAGED, Arrival, Kind, Units, compile_program
from support.collectives import OFFERS, layouts, task


def test_a_span_is_cut_every_piece() -> None:
    """The last piece is shorter; the streams carry all of them in order."""
    draft = Draft(rank=0, brings=Span(0, 10), gets=Span(0, 10))
    draft.send(Span(0, 10), to=(1,))
    units = compile_program(draft.finish(), piece=4)
    assert [(unit.start, unit.stop) for unit in units.units] == [(0, 4), (4, 8), (8, 10)]
    assert units.outgoing == {1: (0, 1, 2)}
    assert all(unit.kind is Kind.SEND for unit in units.units)
    assert units.waits == (0, 0, 0)


def test_what_is_received_waits_for_what_it_overwrites() -> None:
    """Piece by piece: a cell is free once it was handed on."""
    draft = Draft(rank=0, brings=Span(0, 8), gets=Span(0, 8))
    draft.send(Span(0, 8), to=(1,))
    draft.store(Span(0, 8), source=1)
    units = compile_program(draft.finish(), piece=4)
    assert units.on_done == ((2,), (3,), (), ())
    assert units.waits == (0, 0, 1, 1)
    assert [arrival.unit for arrival in units.incoming[1]] == [2, 3]


def test_what_is_combined_waits_for_its_operands() -> None:
    """One arrival for each source; staging is used again after a few pieces."""
    draft = Draft(rank=0, brings=Span(0, 5), gets=Span(0, 5))

    draft.add(Step(0, 5, (1, 2), (Form.DATA, Form.DATA), Place.INPUT, 0, Place.OUTPUT))
    units = compile_program(draft.finish(), piece=1)
    assert units.waits == (2,) * 5
    for peer in (1, 2):
        rooms = [arrival.after_value for arrival in units.incoming[peer]]
        assert rooms == [-1] * STAGED + list(range(5 - STAGED))


def test_a_relay_holds_its_place_until_it_is_handed_on() -> None:
    """What is not stored stays in its slot until every stream has it."""
    draft = Draft(rank=0, brings=Span(0, 4), gets=Span(0, 0))
    draft.add(Step(0, 4, (1,), (Form.DATA,), Place.INPUT, 0, None, (2,), Form.PARTIAL))
    units = compile_program(draft.finish(), piece=1)
    assert [arrival.after_done for arrival in units.incoming[1]] == [-1, -1, 0, 1]
    assert {arrival.after_value for arrival in units.incoming[1]} == {-1}


def test_memory_is_filled_from_the_front() -> None:
    """Own copies go piece after piece, so that whoever waits for one may rely on those before."""
    draft = Draft(rank=0, brings=Span(0, 3), gets=Span(0, 3), in_place=False)
    draft.keep(Span(0, 3))
    units = compile_program(draft.finish(), piece=1)
    assert units.on_value == ((1,), (2,), ())
    assert units.waits == (0, 1, 1)


class Dry:
    """Lets everything happen that can, as if all streams were endless."""

    def __init__(self, units: Units) -> None:
        self._units = units
        self._waits = list(units.waits)
        self._known: set[int] = set()
        self.done: set[int] = set()
        self._arrived = [0] * len(units.units)
        self._handed = [0] * len(units.units)
        self._places = dict.fromkeys(units.incoming, 0)
        self._sent = dict.fromkeys(units.outgoing, 0)

    def run(self) -> int:
        """How many units come to their end."""
        before = -1
        while (now := self._progress()) != before:
            before = now
            self._receive()
            self._compute()
            self._send()
            self._end()
        return len(self.done)

    def _progress(self) -> int:
        counts = [*self._places.values(), *self._sent.values()]
        return sum(counts) + len(self._known) + len(self.done)

    def _has_room(self, arrival: Arrival) -> bool:
        moves = self._units.units[arrival.unit].kind is Kind.MOVE
        return (
            (arrival.after_value < 0 or arrival.after_value in self._known)
            and (arrival.after_done < 0 or arrival.after_done in self.done)
            and not (moves and self._waits[arrival.unit])
        )

    def _receive(self) -> None:
        for peer, arrivals in self._units.incoming.items():
            while self._places[peer] < len(arrivals):
                arrival = arrivals[self._places[peer]]
                if not self._has_room(arrival):
                    break
                self._places[peer] += 1
                self._arrived[arrival.unit] += 1
                if self._units.units[arrival.unit].kind is not Kind.MOVE:
                    self._waits[arrival.unit] -= 1

    def _compute(self) -> None:
        for index, unit in enumerate(self._units.units):
            has_come = self._arrived[index] == len(unit.step.sources)
            if index not in self._known and not self._waits[index] and has_come:
                self._known.add(index)
                for other in self._units.on_value[index]:
                    self._waits[other] -= 1

    def _send(self) -> None:
        for peer, queue in self._units.outgoing.items():
            while self._sent[peer] < len(queue) and queue[self._sent[peer]] in self._known:
                self._handed[queue[self._sent[peer]]] += 1
                self._sent[peer] += 1

    def _end(self) -> None:
        for index in self._known - self.done:
            if self._handed[index] == len(self._units.units[index].step.to):
                self.done.add(index)
                for other in self._units.on_done[index]:
                    self._waits[other] -= 1


@pytest.mark.parametrize(("algorithm", "collective"), OFFERS)
@given(st.data())
def test_every_program_comes_to_its_end(
    algorithm: str, collective: Collective, data: st.DataObject
) -> None:
    """Whatever the layout: nothing waits for what never happens."""
    size = data.draw(st.integers(1, 6))
    layout: Layout = data.draw(layouts(size))
    work = task(collective, size, data.draw(st.integers(0, 20)), root=size - 1)
    schedule = registry.schedule(algorithm, work, layout)
    for program in schedule.programs:
        units = compile_program(program, layout.piece)
        assert Dry(units).run() == len(units.units)

"""Recursive doubling: with every exchange twice as much is known, so ⌈log₂ N⌉ exchanges do.

For short vectors, where only the number of hops counts.  To reduce, a rank exchanges the whole
vector with partners at distance 1, 2, 4 …; both add in the order of their places, so both get the
same bits. If the number of ranks is not a power of two, the rest hand their vector to a partner
first and get the result from it last.  Gathering and the barrier need no such detour: they pass
what they know to the rank 1, 2, 4 … places further.
"""

from __future__ import annotations

from collections.abc import Iterable

from potluck.schedule.schedule import Algorithm, Draft, Form, Maker, Operand, Program, ScheduleStep
from potluck.schedule.task import AlgorithmSettings, Collective, Span, Task


def all_reduce(task: Task, layout: AlgorithmSettings) -> Maker:
    """Exchange and add with partners at doubling distances."""
    order, size = layout.order, task.world_size
    core = 1 << (size.bit_length() - 1)  # the largest power of two that fits
    guests = size - core  # of the places from ``core`` on, each has a host ``core`` before it
    span = Span(0, task.total)

    def beyond(draft: Draft, place: int) -> None:
        host = order[place - core]
        draft.send(span, to=(host,))
        draft.store(span, source=host)

    def within(draft: Draft, place: int) -> None:
        hosts = place < guests
        if hosts:
            guest = (order[place + core],)
            draft.add(ScheduleStep(*span, guest, (Form.DATA,), own=Operand.INPUT, into=Operand.SUM))
        distance = 1
        while distance < core:
            partner = place ^ distance
            summed = hosts if distance == 1 else True
            takes = Form.PARTIAL if distance > 1 or partner < guests else Form.DATA
            own, gives = (Operand.SUM, Form.PARTIAL) if summed else (Operand.INPUT, Form.DATA)
            draft.send(span, to=(order[partner],), own=own, gives=gives)
            step = ScheduleStep(*span, (order[partner],), (takes,), own, int(partner < place))
            distance *= 2
            if distance < core:
                draft.add(step._replace(into=Operand.SUM, gives=Form.PARTIAL))
            else:
                to = (order[place + core],) if hosts else ()
                draft.add(step._replace(into=Operand.OUTPUT, to=to, final=True))

    def program(rank: int) -> Program:
        draft = Draft.of(task, rank)
        place = order.index(rank)
        if size == 1:
            draft.keep(span, final=True)
        elif place >= core:
            beyond(draft, place)
        else:
            within(draft, place)
        return draft.finish()

    return program


def barrier(task: Task, layout: AlgorithmSettings) -> Maker:
    """Tell the one 1, 2, 4 … places further whom you have heard of.

    One who is heard of twice counts once: this serves only reductions for which that is so.
    """
    order, size = layout.order, task.world_size
    span = Span(0, task.total)

    def program(rank: int) -> Program:
        draft = Draft.of(task, rank)
        place = order.index(rank)
        if size == 1:
            draft.keep(span, final=True)
        distance = 1
        while distance < size:
            own, form = (Operand.SUM, Form.PARTIAL) if distance > 1 else (Operand.INPUT, Form.DATA)
            last = 2 * distance >= size
            draft.send(span, to=(order[(place + distance) % size],), own=own, gives=form)
            source = order[(place - distance) % size]
            into = Operand.OUTPUT if last else Operand.SUM
            gives = Form.DATA if last else Form.PARTIAL
            step = ScheduleStep(*span, (source,), (form,), own, into=into, gives=gives, final=last)
            draft.add(step)
            distance *= 2
        return draft.finish()

    return program


def all_gather(task: Task, layout: AlgorithmSettings) -> Maker:
    """Pass every block you have to the one 1, 2, 4 … places further."""
    order, size = layout.order, task.world_size
    spans = task.spans()

    def program(rank: int) -> Program:
        draft = Draft.of(task, rank)
        place = order.index(rank)
        draft.keep(spans[rank])
        distance = 1
        while distance < size:
            known = min(distance, size - distance)  # the last time not all of it is news
            right, left = order[(place + distance) % size], order[(place - distance) % size]
            for span in _joined(spans[order[place - back]] for back in range(known)):
                draft.send(span, to=(right,), own=Operand.OUTPUT)
            news = range(distance, distance + known)
            for span in _joined(spans[order[place - back]] for back in news):
                draft.store(span, source=left)
            distance *= 2
        return draft.finish()

    return program


def _joined(backwards: Iterable[Span]) -> list[Span]:
    """Neighbouring spans as one, so that they travel in one message."""
    joined: list[Span] = []
    for span in backwards:
        if joined and span.stop == joined[-1].start:
            joined[-1] = Span(span.start, joined[-1].stop)
        else:
            joined.append(span)
    return joined


DOUBLING = Algorithm(
    "doubling",
    "with every exchange each rank knows twice as much",
    {
        Collective.ALL_REDUCE: all_reduce,
        Collective.ALL_GATHER: all_gather,
        Collective.BARRIER: barrier,
    },
)

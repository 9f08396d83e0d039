"""Pictures of schedules: as text for a terminal, and as SVG.

The text lists what each rank does, in its own order.  The SVG has one line for each rank and one
stroke for each transfer, from the moment its first piece leaves to the moment its last has arrived,
as the cost model sees it; unfinished sums are drawn in another colour than data.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from potluck import _time
from potluck.schedule.cost import Costs, SpanTransfer, timeline
from potluck.schedule.schedule import Form, Schedule, ScheduleStep

COLOURS = {Form.DATA: "#2563eb", Form.PARTIAL: "#d97706"}
WIDTH, MARGIN, LANE = 960, 72, 56


def text(schedule: Schedule, *, most: int = 12) -> str:
    """What each rank does; of long lists the first ``most`` steps.

    >>> from potluck.schedule import planner as registry
    >>> from potluck.schedule.cost import Network
    >>> from potluck.schedule.task import Collective, Task
    >>> task = Task.whole(Collective.BROADCAST, world_size=3, count=5)
    >>> print(text(registry.schedule("tree", task)))
    broadcast by tree, 3 ranks, 5 elements
    rank 0
       0  [0, 5)  input → output, 1, 2
    rank 1
       0  [0, 5)  0 → output
    rank 2
       0  [0, 5)  0 → output
    """
    return "\n".join(_lines(schedule, most))


def _lines(schedule: Schedule, most: int) -> Iterator[str]:
    yield _title(schedule)
    for program in schedule.programs:
        yield f"rank {program.rank}"
        for index, step in enumerate(program.steps[:most]):
            yield f"{index:4}  [{step.start}, {step.stop})  {_sentence(step)}"
        if len(program.steps) > most:
            yield f"      … and {len(program.steps) - most} more"


def _title(schedule: Schedule) -> str:
    task = schedule.task
    return (
        f"{task.collective.value} by {schedule.algorithm}, "
        f"{task.world_size} ranks, {task.total} elements"
    )


def _sentence(step: ScheduleStep) -> str:
    operands = [str(peer) for peer in step.sources]
    if step.own is not None:
        operands.insert(step.own_at, step.own.name.lower())
    targets = [str(peer) for peer in step.to]
    if step.into is not None:
        targets.insert(0, step.into.name.lower())
    waits = sorted({*step.reads, *step.overwrites})
    after = f"  after {', '.join(map(str, waits))}" if waits else ""
    done = " done" if step.final else ""
    return f"{' + '.join(operands)}{done} → {', '.join(targets)}{after}"


def svg(schedule: Schedule, costs: Costs) -> str:
    """A picture in time.

    >>> from potluck.schedule import planner as registry
    >>> from potluck.schedule.cost import Network
    >>> from potluck.schedule.task import Collective, Task
    >>> from potluck._types import LinkMatrix
    >>> task = Task.whole(Collective.ALL_REDUCE, world_size=2, count=8)
    >>> links = LinkMatrix.uniform(2, rate=1000, latency=1000)
    >>> svg(registry.schedule("ring", task), Costs(Network(links))).count("<line class='transfer'")
    4
    """
    plan = timeline(schedule, costs)
    size = schedule.task.world_size
    height = MARGIN + LANE * size
    scale = (WIDTH - 2 * MARGIN) / max(1, plan.duration)
    title = f"{escape(_title(schedule))}, about {_time.duration(plan.duration)}"
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height}'>",
        "<style>text { font: 12px sans-serif }</style>",
        f"<text x='{MARGIN}' y='24'>{title}</text>",
    ]
    for rank in range(size):
        y = _lane(rank)
        parts.append(f"<text x='8' y='{y + 4}'>rank {rank}</text>")
        parts.append(f"<line x1='{MARGIN}' y1='{y}' x2='{WIDTH - MARGIN}' y2='{y}' stroke='#ccc'/>")
    parts += [_stroke(transfer, scale) for transfer in plan.transfers]
    return "\n".join([*parts, "</svg>"])


def _lane(rank: int) -> int:
    return MARGIN + LANE * rank


def _stroke(transfer: SpanTransfer, scale: float) -> str:
    begin, end = (MARGIN + moment * scale for moment in (transfer.leaves, transfer.arrives))
    label = (
        f"{transfer.source} → {transfer.target}: [{transfer.start}, {transfer.stop}) "
        f"{_time.duration(transfer.leaves)} to {_time.duration(transfer.arrives)}"
    )
    return (
        f"<line class='transfer' x1='{begin:.1f}' y1='{_lane(transfer.source)}' x2='{end:.1f}' "
        f"y2='{_lane(transfer.target)}' stroke='{COLOURS[transfer.form]}' stroke-opacity='0.7'>"
        f"<title>{label}</title></line>"
    )

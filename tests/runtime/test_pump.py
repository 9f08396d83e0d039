"""The pump, and the straight way, with the least room that streams can have."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.backend import simulated
from potluck.collective import planner, registry, verify
from potluck.collective.task import Collective, Layout, Task
from potluck.runtime import session
from potluck.runtime.group import Group
from support.collectives import OFFERS, layouts, task
from support.groups import LIMIT, Array, call_of, in_world

NEVER, ALWAYS = -1, 1 << 40
"""How many bytes count as short: none, or any number."""


@pytest.fixture(params=[NEVER, ALWAYS], ids=["pumped", "straight"])
def narrow(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams that hold a few bytes, all operations done in one way, and no surveys."""
    monkeypatch.setattr(simulated, "STREAM_CAPACITY", 96)
    monkeypatch.setattr(session, "SHORT", request.param)
    monkeypatch.setattr("potluck.runtime.executor.LARGE", ALWAYS)


def run(work: Task, algorithm: str) -> None:
    """Do a task on every rank and compare what comes out with what should."""
    reducer, inputs = verify.exact(work), verify.distinct(work)

    def action(group: Group) -> Array:
        call = call_of(work, inputs[group.rank], reducer, group.rank, algorithm)
        group.run(call, LIMIT)
        return call.target

    got = in_world(work.world_size, action)
    for one in got:
        if isinstance(one, BaseException):
            raise one
    verify.compare(work, got, reducer)  # type: ignore[arg-type] # no errors are left


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize(("algorithm", "collective"), OFFERS)
def test_nothing_gets_stuck_in_narrow_streams(
    algorithm: str, collective: Collective, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With pieces of a few elements, many times what a stream holds."""
    monkeypatch.setattr(planner, "piece_for", lambda *_: 40)
    run(task(collective, 4, count=150, root=2), algorithm)


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize(("algorithm", "collective"), OFFERS)
@settings(max_examples=6)
@given(data=st.data())
def test_any_layout_can_be_run(algorithm: str, collective: Collective, data: st.DataObject) -> None:
    """Any order, any shares, any arity, any length of a piece."""
    size = data.draw(st.integers(2, 4))
    layout: Layout = data.draw(layouts(size))
    work = task(collective, size, data.draw(st.integers(0, 40)), root=size - 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            planner.Plan,
            "layout",
            lambda *_: layout,
        )
        registry.schedule(algorithm, work, layout)
        run(work, algorithm)

"""The pump, and the straight way, with the least room that streams can have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.backend import simulated
from potluck.collective import executor
from potluck.collective.channel import PlainChannel
from potluck.collective.group import Group
from potluck.collective.pump import StreamPoller
from potluck.net.memory import MemoryPoller, MemoryStream, pipe
from potluck.net.transport import Spin
from potluck.schedule import planner, verify
from potluck.schedule.task import AlgorithmSettings, Collective, Task
from support.collectives import OFFERS, layouts, task
from support.groups import LIMIT, Array, call_of, in_world

NEVER, ALWAYS = -1, 1 << 40
"""How many bytes count as short: none, or any number."""


@pytest.fixture(params=[NEVER, ALWAYS], ids=["pumped", "straight"])
def narrow(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams that hold a few bytes, all operations done in one way, and no surveys."""
    monkeypatch.setattr(simulated, "STREAM_CAPACITY", 96)
    monkeypatch.setattr(executor, "SHORT", request.param)
    monkeypatch.setattr("potluck.collective.executor.LARGE", ALWAYS)


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
    monkeypatch.setattr(planner, "piece_for", lambda *_, **__: 40)
    run(task(collective, 4, count=150, root=2), algorithm)


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize(("algorithm", "collective"), OFFERS)
@settings(max_examples=6)
@given(data=st.data())
def test_any_layout_can_be_run(algorithm: str, collective: Collective, data: st.DataObject) -> None:
    """Any order, any shares, any arity, any length of a piece."""
    size = data.draw(st.integers(2, 4))
    layout: AlgorithmSettings = data.draw(layouts(size))
    work = task(collective, size, data.draw(st.integers(0, 40)), root=size - 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            planner.Plan,
            "layout",
            lambda *_: layout,
        )
        planner.schedule(algorithm, work, layout)
        run(work, algorithm)


# --------------------------------------------------------------------------------------------------
# Watching streams: what is not wanted yet stays where it is, and waiting has a sense.


class Patrol:
    """Counts how often it was asked, and gives up in the end."""

    def __init__(self) -> None:
        self.looks: list[tuple[int, ...]] = []
        self.checks = 0

    def look(self, awaited: Sequence[int]) -> None:
        """Remember who was awaited."""
        self.looks.append(tuple(awaited))
        if len(self.looks) > 100:
            raise TimeoutError

    def check(self, awaited: Sequence[int]) -> None:
        """Count."""
        self.checks += 1


class Scene:
    """A watch over two streams."""

    def __init__(self) -> None:
        self.patrol = Patrol()
        self.poller = MemoryPoller()
        self.watch = StreamPoller(self.poller, Spin(), self.patrol)
        self.far: dict[int, MemoryStream] = {}
        self.channels: dict[int, PlainChannel] = {}
        for peer in (1, 2):
            near, self.far[peer] = pipe(("near", "far"), capacity=100)
            self.channels[peer] = PlainChannel(peer, near)
            self.watch.add(self.channels[peer])


@pytest.fixture
def scene() -> Iterator[Scene]:
    """One."""
    scene = Scene()
    yield scene
    scene.poller.close()


def test_what_comes_from_those_awaited_is_told(scene: Scene) -> None:
    """At once."""
    scene.far[1].sendmsg([b"x"])
    assert scene.watch.events((1, 2)) == [(1, True, False)]
    assert scene.patrol.looks == []
    assert scene.patrol.checks == 1


def test_what_comes_from_others_stays_unread_and_wakes_nobody(scene: Scene) -> None:
    """Until it is wanted."""
    scene.far[2].sendmsg([b"for later"])
    assert scene.watch.events((1,)) == []  # it is muted now
    assert scene.watch.events((1,)) == []
    assert scene.patrol.looks == [(1,)]
    assert scene.watch.events((1, 2)) == [(2, True, False)]


def test_a_wait_without_an_event_asks_what_is_wrong(scene: Scene) -> None:
    """And goes on if nothing is; unless there is something else to do."""
    assert scene.watch.events((1,), at_once=True) == []
    assert scene.patrol.looks == []
    scene.watch.wait_to_read(scene.channels[1], [])
    assert scene.patrol.looks == [(1,)]


def test_room_to_write_ends_a_wait(scene: Scene) -> None:
    """For whoever has something unsent; afterwards nobody is woken for it."""
    near = scene.channels[1].stream
    near.sendmsg([bytes(100)])
    scene.watch.wait_to_write([scene.channels[1]])
    assert len(scene.patrol.looks) == 1
    scene.far[1].recv_into(memoryview(bytearray(50)))
    scene.watch.wait_to_write([scene.channels[1]])
    scene.watch.wait_to_read(scene.channels[2], [scene.channels[1]])
    assert len(scene.patrol.looks) == 1
    assert scene.watch.events((2,), at_once=True) == []


def test_a_muted_stream_that_breaks_is_left_to_its_reader(scene: Scene) -> None:
    """It does not keep those awake who wait for others."""
    scene.far[2].sendmsg([b"x"])
    scene.watch.events((1,))
    scene.far[2].close()
    for _ in range(3):
        assert scene.watch.events((1,)) == []
    assert len(scene.patrol.looks) >= 2


def test_sleep_is_counted_for_everybody_who_is_awaited(scene: Scene) -> None:
    """If somebody wants to know; what is there already costs no sleep."""
    scene.watch.events((1, 2))
    assert scene.watch.slept is None
    scene.watch.slept = {}
    scene.watch.events((1, 2))
    assert scene.watch.slept == {}  # it is counted when there is time for it
    scene.watch.events((2,))
    slept = dict(scene.watch.slept)
    assert slept[1] == slept[2] >= 0.015
    scene.far[1].sendmsg([b"x"])
    scene.watch.events((1,), at_once=True)
    assert scene.watch.slept == slept
    scene.watch.events((1,))
    assert scene.watch.slept[2] >= slept[2] + 0.015

"""Several ranks on each of several machines: they find out, and machines add up first."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from potluck import AllReduceStrategy, CollectiveConfig, DistributedContext, ReduceOp
from support.hosts import INTERFACE, Host, Hosts
from support.place import Place
from support.ranks import Ranks, Wrap, start_together

pytestmark = pytest.mark.netns

COUNT = (1 << 20) + 3  # elements of float32; an odd number
FLAT, BOTH, LEADERS = "ring", "direct/ring", "centralized/doubling"


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """Three machines on one switch."""
    with Hosts("desk laptop mac") as hosts:
        yield hosts


def run(ranks: Ranks, program: Any, places: list[Host]) -> list[Any]:
    """What a program says on each rank, with rank i on the i-th of these hosts."""

    def on_its_host(rank: int) -> Wrap:
        return places[rank].command

    started = ranks.start(program, len(places), master=f"{places[0].ipv4}:29500", wrap=on_its_host)
    start_together(started)
    return [process.value() for process in started]


def sent() -> int:
    """Bytes that this machine has put on its cable."""
    return int(Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes").read_text())


def numbers(rank: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Numbers whose sum depends on the order in which they are added."""
    return (np.sin(np.arange(COUNT) * 7 + rank * 13) * 10.0 ** (rank % 4)).astype(np.float32)


def digest(context: DistributedContext, strategy: str | None) -> str:
    """What an all-reduce gives, to the last bit."""
    array = numbers(context.rank)
    context.all_reduce(array, ReduceOp.MEAN, strategy=strategy)
    return hashlib.sha256(array.tobytes()).hexdigest()


def add_up(place: Place) -> dict[str, Any]:
    """The machines that were found, results by strategy, and what each put on this cable."""
    place.wait_for_start()
    with place.join() as backend, DistributedContext(backend) as context:
        first = digest(context, None)
        found: dict[str, Any] = {
            "machines": context.group.links.machines,
            "chosen": str(
                CollectiveConfig().select_all_reduce(
                    4 * COUNT, context.world_size, context.group.links
                )
            ),
            "first": first,
        }
        for strategy in (FLAT, BOTH, LEADERS):
            context.all_reduce(numbers(context.rank), strategy=strategy)  # opens its connections
            context.barrier()
            before = sent()
            results = [digest(context, strategy) for _ in range(2)]
            context.barrier()
            found[strategy] = {"results": results, "sent": (sent() - before) / 2 / (4 * COUNT)}
            context.barrier()
        total = context.all_reduce(np.full(5, context.rank + 1), strategy=BOTH)
        found["sum"] = total.tolist()
        root = context.world_size - 1
        reduced = context.reduce(np.full(COUNT, context.rank), root, strategy="tree/ring")
        found["reduced"] = None if reduced is None else [int(reduced.min()), int(reduced.max())]
        told = np.full(COUNT, context.rank)
        context.broadcast(told, 1, strategy="ring/direct")
        found["told"] = [int(told.min()), int(told.max())]
        return found


@pytest.mark.parametrize(
    ("ranks_of", "machines", "flat", "least"),
    [
        ("desk desk desk laptop laptop laptop", [0, 0, 0, 3, 3, 3], 5 / 3, 1.0),
        ("desk laptop mac desk laptop desk", [0, 1, 2, 0, 1, 0], 5 / 3, 4 / 3),
    ],
)
def test_machines_add_up_first(
    ranks: Ranks, hosts: Hosts, ranks_of: str, machines: list[int], flat: float, least: float
) -> None:
    """Wherever the ranks are: the same bits everywhere and every time, and fewer on the cable."""
    places = [hosts[name] for name in ranks_of.split()]
    told = run(ranks, add_up, places)
    size = len(places)
    for found in told:
        assert list(found["machines"]) == machines
        assert found["sum"] == [size * (size + 1) // 2] * 5
        assert found["told"] == [1, 1]
    assert [found["reduced"] for found in told] == [None] * (size - 1) + [[15, 15]]
    assert len({found["chosen"] for found in told}) == 1
    assert len({found["first"] for found in told}) == 1
    for strategy in (FLAT, BOTH, LEADERS):
        assert len({each for found in told for each in found[strategy]["results"]}) == 1
    # Headers and acknowledgements come on top; bursts of the kernel make few of them.
    assert all(flat <= found[FLAT]["sent"] <= flat * 1.1 for found in told)
    assert all(least <= found[BOTH]["sent"] <= least * 1.1 for found in told)
    if least == 1.0:
        assert all(least <= found[LEADERS]["sent"] <= least * 1.1 for found in told)


def configured(place: Place) -> list[Any]:
    """What a group does whose configuration says what machines do."""
    place.wait_for_start()
    config = CollectiveConfig(
        local_all_reduce=AllReduceStrategy.TREE,
        global_all_reduce=AllReduceStrategy.RING,
        tree_arity=1,
    )
    with place.join() as backend, DistributedContext(backend, config) as context:
        array = np.ones(1 << 18, np.float32)
        context.all_reduce(array)
        context.barrier()
        before = sent()
        context.all_reduce(array)
        context.barrier()
        crossed = (sent() - before) / array.nbytes
        chosen = config.select_all_reduce(array.nbytes, context.world_size, context.group.links)
        return [float(array.min()), float(array.max()), str(chosen), crossed]


def test_local_and_global_strategies_are_those_of_the_machines(ranks: Ranks, hosts: Hosts) -> None:
    """A chain on each machine and a ring among the three: as asked for, and as it crosses."""
    names = "desk desk laptop mac mac"
    told = run(ranks, configured, [hosts[name] for name in names.split()])
    for least, most, chosen, crossed in told:
        assert least == most == 25
        assert chosen == "tree:1/ring"
        assert 4 / 3 <= crossed <= 4 / 3 * 1.15


def unmeasured(place: Place) -> list[Any]:
    """Machines that are written down serve a group that measures nothing."""
    place.wait_for_start()
    config = CollectiveConfig(
        num_nodes=2, num_devices=2, global_all_reduce=AllReduceStrategy.RING, measure_links=False
    )
    with place.join() as backend, DistributedContext(backend, config) as context:
        array = np.ones(1 << 18, np.float32)
        context.all_reduce(array)
        context.barrier()
        before = sent()
        context.all_reduce(array)
        context.barrier()
        links = context.group.links
        return [float(array.max()), sum(links.up), (sent() - before) / array.nbytes]


def test_machines_can_be_written_down(ranks: Ranks, hosts: Hosts) -> None:
    """Then two levels need no survey."""
    told = run(ranks, unmeasured, [hosts[name] for name in "desk desk laptop laptop".split()])
    for total, measured, crossed in told:
        assert (total, measured) == (16, 0)
        assert 1 <= crossed <= 1.15

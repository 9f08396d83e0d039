"""What compression would give, from what was measured: more on slow links, nothing on fast ones."""

import msgspec
import pytest

from potluck._types import LinkMatrix
from potluck.apps.cli.bench_measure import (
    Case,
    LinkMeasurements,
    MethodMeasurement,
    Results,
    matrix_of,
    measure_method,
    methods,
    prospects,
    slowest,
    speeds,
)
from potluck.schedule.planner import Planner
from potluck.schedule.task import Collective, Task

NONE = MethodMeasurement("none", 1.0, 10**10, 10**10, 0.0)
INT8 = MethodMeasurement("int8", 0.281, 3 * 10**9, 8 * 10**9, 0.007)


def gains(rate: int) -> dict[str, float]:
    """How much faster each method is at a rate in bytes per second."""
    links = LinkMatrix.uniform(4, rate=rate, latency=100_000)
    topk = MethodMeasurement("topk:0.01", 0.0127, 10**9, 10**10, 0.95)
    random = MethodMeasurement("random:0.01", 0.01, 10**9, 10**10, 0.99)
    plain, *rest = prospects(links, [NONE, INT8, topk, random], 16 << 20)
    return {each.name: plain.predicted / each.predicted for each in rest}


def test_the_slower_the_links_the_more_compression_gives() -> None:
    """Up to nearly the ratio of the bytes; on links faster than the encoder it costs."""
    slow, fast = gains(10_000_000), gains(10_000_000_000)
    assert 3 < slow["int8"] < 4
    assert slow["topk:0.01"] > slow["int8"]
    assert slow["random:0.01"] > slow["topk:0.01"]  # whose choice differs on every rank
    assert all(gain < 1 for gain in fast.values())


def test_auto_is_shown_with_its_reason_and_loses_little() -> None:
    """At 1 Gbit/s int8; what top-k would take is named, with the word that asks for it."""
    names = ("desk", "attic", "lab", "shed")
    found = [
        LinkMeasurements(
            name,
            up={other: 125_000_000 for other in range(4) if other != rank},
            down={other: 125_000_000 for other in range(4) if other != rank},
            latency={other: 100_000 for other in range(4) if other != rank},
        )
        for rank, name in enumerate(names)
    ]
    topk = MethodMeasurement("topk:0.01", 0.0127, 4 * 10**9, 10**10, 0.95)
    choice = Results(found, [], [NONE, INT8, topk]).facts()["compression"]["choice"]
    assert choice.startswith("int8, because 16.8 MB take about ")
    assert "topk:0.01 would take" in choice
    assert choice.endswith("only auto:aggressive takes it")


@pytest.mark.parametrize("strategy", methods(), ids=str)
def test_every_method_is_measured(strategy: object) -> None:
    """On this machine, with values that really went through it."""
    found = measure_method(strategy, quick=True)  # type: ignore[arg-type]
    assert found.name == str(strategy)
    assert 0 < found.ratio <= 1
    assert min(found.encode, found.decode) > 0
    assert (found.error == 0) is (found.name == "none")
    assert found.error <= 1.01


def test_the_slowest_machine_counts() -> None:
    """The others wait for it."""
    weak = MethodMeasurement("int8", 0.281, 10**8, 9 * 10**9, 0.008)
    (found,) = slowest([[msgspec.to_builtins(INT8)], [msgspec.to_builtins(weak)]])
    assert found == MethodMeasurement("int8", 0.281, 10**8, 8 * 10**9, 0.008)
    assert {str(each) for each in speeds([NONE, found])} == {"int8"}


def test_a_rank_sends_as_fast_as_its_best_link() -> None:
    """A late or slow peer does not make it slow."""
    links = [
        LinkMeasurements("a", up={1: 100, 2: 50}, down={1: 10, 2: 90}, latency={1: 5, 2: 6}),
        LinkMeasurements("b", up={0: 1}, down={0: 1}, latency={0: 5}),
        LinkMeasurements("c"),
    ]
    matrix = matrix_of(links)
    assert matrix.machines == ()
    assert (matrix.up, matrix.down) == ((100, 1, 0), (90, 1, 0))
    assert matrix.latency == ((0, 5, 6), (5, 0, 0), (0, 0, 0))


def test_what_would_take_too_long_is_left_out_and_said() -> None:
    """Its prediction is there all the same."""
    links = [
        LinkMeasurements("a", {1: 10**6}, {1: 10**6}, {1: 10**5}),
        LinkMeasurements("b", {0: 10**6}, {0: 10**6}),
    ]
    cases = [Case(4096, "ring", 10**6, 900_000), Case(1 << 24, "ring", 10**10, None)]
    small, large = Results(links, cases, [NONE, INT8]).facts()["all_reduce"]
    assert small["fastest"] == "ring"
    assert (large["fastest"], large["algorithms"][0]["measured_ns"]) == (None, None)
    assert Results(links, cases, [NONE, INT8]).facts()["compression"]["choice"].startswith("int8,")


def by_machines() -> list[LinkMeasurements]:
    """Two machines with two ranks each: fast among themselves, 1 Gbit/s between them."""
    near, far = 3 * 10**9, 125_000_000
    return [
        LinkMeasurements(
            f"rank {rank}",
            *({other: near if other // 2 == rank // 2 else far for other in range(4)},) * 2,
            {other: 20_000 if other // 2 == rank // 2 else 90_000 for other in range(4)},
            machine=rank - rank % 2,
        )
        for rank in range(4)
    ]


def test_what_is_near_says_nothing_of_the_cable() -> None:
    """A machine is as fast as its ranks are towards others; alone, as they are to each other."""
    matrix = matrix_of(by_machines())
    assert matrix.machines == (0, 0, 2, 2)
    assert set(matrix.up) == set(matrix.down) == {125_000_000}
    alone = [msgspec.structs.replace(each, machine=0) for each in by_machines()]
    assert set(matrix_of(alone).up) == {3 * 10**9}


def test_an_explanation_names_the_plan_the_reason_and_the_rest() -> None:
    """For each size; with what switches off two levels and what pins a plan."""
    cases = [Case(nbytes, "ring", 1, 1) for nbytes in (4096, 16 << 20)]
    lines = list(Results(by_machines(), cases, [NONE]).explain())
    planned = Planner(matrix_of(by_machines()))
    for nbytes in (4096, 16 << 20):
        plan = planned.plan(Task.whole(Collective.ALL_REDUCE, 4, nbytes // 4))
        assert f"  because {plan.reason}" in lines
        assert any(line.endswith(f": {plan.strategy}") for line in lines)
    assert "on 2 machines" in lines[0]
    compared = [line for line in lines if line.startswith("  compared: ")]
    assert all("ring " in line and "direct/doubling " in line for line in compared)
    assert "two_levels=False" in lines[-1]
    assert "strategy=" in lines[-1]

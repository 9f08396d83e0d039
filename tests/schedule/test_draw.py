"""Pictures show every step and every transfer."""

from xml.etree import ElementTree as ET

from potluck._types import LinkMatrix
from potluck.schedule import draw, planner
from potluck.schedule.cost import Costs, Network
from potluck.schedule.task import AlgorithmSettings, Collective, Task

COSTS = Costs(Network(LinkMatrix.uniform(3, rate=1_000_000, latency=1000)))


def test_text_says_what_each_rank_does() -> None:
    """Operands, the end of a reduction, targets, and what a step waits for."""
    task = Task.whole(Collective.ALL_REDUCE, 3, 6)
    assert draw.text(planner.schedule("ring", task)).splitlines()[:8] == [
        "all_reduce by ring, 3 ranks, 6 elements",
        "rank 0",
        "   0  [4, 6)  input → 1",
        "   1  [2, 4)  2 + input → 1",
        "   2  [0, 2)  2 + input done → output, 1",
        "   3  [4, 6)  2 → output, 1  after 0",
        "   4  [2, 4)  2 → output  after 1",
        "rank 1",
    ]


def test_long_lists_are_cut() -> None:
    """A picture of a large schedule stays a picture."""
    task = Task.whole(Collective.ALL_REDUCE, 2, 1000)
    lines = draw.text(planner.schedule("ring", task, AlgorithmSettings.plain(2, piece=10)), most=3)
    assert lines.count("… and 147 more") == 2


def test_a_step_without_own_memory_or_target_is_shown() -> None:
    """What comes from others goes to others."""
    task = Task.whole(Collective.REDUCE, 3, 4, root=2)
    text = draw.text(planner.schedule("tree", task))
    assert "input → 2" in text
    assert "input + 0 + 1 done → output" in text


def test_svg_has_a_line_for_each_transfer() -> None:
    """It is well-formed, has a lane for each rank, and colours sums apart from data."""
    task = Task.whole(Collective.ALL_REDUCE, 3, 300)
    picture = draw.svg(planner.schedule("ring", task), COSTS)
    root = ET.fromstring(picture)  # noqa: S314 - our own text
    space = "{http://www.w3.org/2000/svg}"
    strokes = [line for line in root.iter(f"{space}line") if line.get("class") == "transfer"]
    assert len(strokes) == 12
    assert {line.get("stroke") for line in strokes} == set(draw.COLOURS.values())
    assert all(float(line.get("x1", "")) < float(line.get("x2", "")) for line in strokes)
    words = [text.text for text in root.iter(f"{space}text")]
    assert words[1:] == ["rank 0", "rank 1", "rank 2"]
    assert words[0] is not None
    assert words[0].startswith("all_reduce by ring, 3 ranks, 300 elements, about")


def test_nothing_can_be_drawn_too() -> None:
    """A barrier of one takes no time."""
    alone = Costs(Network(LinkMatrix.uniform(1, rate=1, latency=0)))
    task = Task.whole(Collective.BARRIER, 1, 1)
    assert "about 0 ns" in draw.svg(planner.schedule("tree", task), alone)

"""Clocks of several machines, put side by side by what they did together."""

import random

import pytest

from potluck.apps.cli.trace_clocks import align
from support.traces import collective, dump_of, header_of, message

AHEAD = 321.5  # seconds by which the second machine's clock is ahead


def test_one_machine_has_one_clock() -> None:
    """Processes of one machine need no correction, whatever they did."""
    dumps = [dump_of(header_of(rank, machine="desk"), []) for rank in range(3)]
    found = align(dumps)
    assert (found.offsets, found.notes) == ((0.0, 0.0, 0.0), ())


@pytest.mark.parametrize("late", [0.0, 0.05])
def test_the_ends_of_common_operations_set_the_clock(late: float) -> None:
    """To a fraction of a millisecond, also if one rank is always late: that must stay visible."""
    chance = random.Random(5)
    here, there = [], []
    for number in range(1, 50):
        moment = number / 10
        end = moment + late + 0.001
        jitter = chance.uniform(-2e-4, 2e-4)
        here.append(collective(0, number, moment, end))
        there.append(collective(1, number, AHEAD + moment + late, AHEAD + end + jitter))
    found = align([dump_of(header_of(0), here), dump_of(header_of(1, AHEAD), there)])
    assert found.offsets[1] == pytest.approx(-AHEAD, abs=2e-4)
    assert found.uncertainty < 2e-4
    (note,) = found.notes
    assert note.startswith("The clock of host1 was set by 49 operations in common, to about 0.")


def test_no_message_arrives_before_it_was_sent() -> None:
    """Where the ends mislead, as on a slow way back, the bounds put the clock right."""
    here = [collective(0, 1, 0.0, 1.0), message(0, "send", 1, (2.0, 2.1))]
    # The receiver left the operation 0.5 s later; by the median its receive would end at 1.9.
    there = [collective(1, 1, 0.4, 1.5), message(1, "recv", 0, (2.2, 2.4))]
    found = align([dump_of(header_of(0), here), dump_of(header_of(1), there)])
    assert 2.4 + found.offsets[1] >= 2.0
    assert 0.4 + found.offsets[1] <= 1.0


def test_machines_that_never_met_are_compared_by_way_of_others() -> None:
    """A chain of three, of which the ends share nothing."""
    ends = [
        [collective(0, 1, 1.0, 1.1, group="left")],
        [
            collective(1, 1, 11.0, 11.1, group="left"),
            collective(1, 1, 12.0, 12.1, group="right"),
        ],
        [collective(2, 1, 52.0, 52.1, group="right")],
    ]
    found = align([dump_of(header_of(rank), each) for rank, each in enumerate(ends)])
    assert found.offsets == pytest.approx((0.0, -10.0, -50.0))


def test_without_anything_in_common_the_clocks_on_the_wall_have_to_do() -> None:
    """And it is said."""
    found = align([dump_of(header_of(0), []), dump_of(header_of(1, AHEAD), [])])
    assert found.offsets[1] == pytest.approx(-AHEAD + 0.5)
    assert "taken from the wall" in found.notes[0]


def test_clocks_that_contradict_themselves_are_put_in_the_middle() -> None:
    """Drift over a long time, or a dump that lies: a timeline all the same."""
    here = [collective(0, 1, 0.0, 0.1), collective(0, 2, 100.0, 100.1)]
    there = [collective(1, 1, 0.0, 0.1), collective(1, 2, 101.0, 101.1)]
    found = align([dump_of(header_of(0), here), dump_of(header_of(1), there)])
    assert -1.1 <= found.offsets[1] <= 0.1


def test_many_machines_take_no_time() -> None:
    """A thousand dumps of a thousand machines are aligned in passing."""
    dumps = [dump_of(header_of(rank), [collective(rank, 1, 1.0, 1.1)]) for rank in range(300)]
    assert len(align(dumps).offsets) == 300

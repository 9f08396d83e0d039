"""Ranks of a run: everybody finds the same ones, or nobody is given any."""

from __future__ import annotations

import msgspec

from potluck.apps.cli.run_gathering import Gathering
from potluck.apps.cli.run_places import LAUNCHER, Crew, Rolls, environments, waited_of, workers_of
from potluck.runtime.control_reports import Report


def launcher(name: str, workers: str = "1", state: str = "ready", **facts: str) -> Report:
    """What the launcher on a machine says."""
    return Report(
        node=name,
        incarnation=1,
        name=name,
        host=f"{name}.local",
        port=52416,
        role="launcher",
        state=state,
        facts={"per_node": workers, "meeting_port": "20001", **facts},
    )


DESK, LAPTOP, ATTIC = launcher("desk", "2"), launcher("laptop"), launcher("attic", "3")


def with_roll(report: Report, roll: str, state: str = "ready") -> Report:
    """The same, after it has called the roll."""
    return msgspec.structs.replace(report, state=state, facts={**report.facts, "roll": roll})


def test_ranks_follow_the_machines_in_one_order_for_all() -> None:
    """Whoever looks, in whatever order: attic has 0 to 2, desk 3 and 4, laptop 5."""
    crew = Crew.of([LAPTOP, DESK, ATTIC])
    assert crew == Crew.of([ATTIC, LAPTOP, DESK])
    assert crew.world_size == 6
    assert [crew.first_rank(each.key) for each in (ATTIC, DESK, LAPTOP)] == [(0, 0), (1, 3), (2, 5)]
    assert crew.roll != Crew.of([LAPTOP, DESK]).roll
    assert crew.roll != Crew.of([launcher("laptop", "2"), DESK, ATTIC]).roll


def test_rank_0_is_where_the_command_was_typed_first() -> None:
    """By how long each had waited when all were there; the rest follow likewise."""
    waited = {"attic": "400", "desk": "12000", "laptop": "7100"}
    crew = Crew.of([launcher(name, waited=text) for name, text in waited.items()])
    assert [each.name for each in crew.launchers] == ["desk", "laptop", "attic"]
    assert crew.roll != Crew.of([LAPTOP, DESK, ATTIC]).roll
    odd = [launcher("desk", waited="-1"), launcher("laptop", waited="9" * 40), LAPTOP]
    assert {waited_of(each) for each in odd} == {0}


def test_how_long_one_has_waited_is_said_once_all_are_there() -> None:
    """It stays the same from then on, or the launchers would never agree."""
    one = Gathering(DESK, 2, {})
    assert one.say(3.0) == ("waiting", {"waited": "", "roll": ""})
    one.look([LAPTOP])
    state, facts = one.say(5.0)
    assert (state, facts["waited"]) == ("ready", "5000")
    assert one.say(6.0) == (state, facts)
    one.look([])
    assert one.say(7.0)[1]["waited"] == ""


def test_workers_know_their_places_in_the_words_of_torchrun() -> None:
    """The second of two on the desk, when rank 0 is in the attic."""
    crew = Crew.of([LAPTOP, DESK, ATTIC])
    common = {"HOME": "/home/me", "RANK": "77"}
    first, second = environments(common, DESK, crew, "10.0.0.3", [52416, 52417])
    expected = {
        "HOME": "/home/me",
        "RANK": "4",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "6",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "3",
        "MASTER_ADDR": "10.0.0.3",
        "MASTER_PORT": "20001",
        "POTLUCK_PORT": "52417",
        "PYTHONUNBUFFERED": "1",
    }
    assert second.items() >= expected.items()
    assert int(second["OMP_NUM_THREADS"]) >= 1
    assert (first["RANK"], first["LOCAL_RANK"], first["POTLUCK_PORT"]) == ("3", "0", "52416")
    mine = environments({"OMP_NUM_THREADS": "8"}, DESK, crew, "10.0.0.3", [52416, 52417])
    assert mine[0]["OMP_NUM_THREADS"] == "8"


def test_who_comes_to_scripts_that_run_is_given_no_rank() -> None:
    """Not even one that was left in the environment: ranks change as machines come and go."""
    rolls = Rolls()
    assert rolls.call([DESK, msgspec.structs.replace(LAPTOP, role="member")]) == ""
    assert rolls.agreed([LAPTOP]) is None
    (alone,) = environments({"RANK": "3", "WORLD_SIZE": "4"}, DESK, None, "", [52416])
    assert "RANK" not in alone
    assert "WORLD_SIZE" not in alone
    assert (alone["LOCAL_RANK"], alone["LOCAL_WORLD_SIZE"]) == ("0", "1")


def test_all_must_have_called_the_same_roll() -> None:
    """One that has seen somebody else does not begin with us, and we not without it."""
    rolls = Rolls()
    roll = rolls.call([DESK, LAPTOP])
    assert rolls.agreed([with_roll(LAPTOP, "another")]) is None
    assert rolls.agreed([with_roll(LAPTOP, roll)]) == Crew.of([DESK, LAPTOP])


def test_whoever_hears_that_one_has_begun_follows_it() -> None:
    """Even if a third has come meanwhile: the first has seen that both had agreed."""
    rolls = Rolls()
    roll = rolls.call([DESK, LAPTOP])
    rolls.call([DESK, LAPTOP, ATTIC])
    gone = with_roll(LAPTOP, roll, "starting")
    assert rolls.agreed([gone, ATTIC]) == Crew.of([DESK, LAPTOP])
    assert Rolls().agreed([gone]) is None  # a stranger's roll says nothing to us


def test_numbers_of_others_are_read_with_care() -> None:
    """What is no number of workers counts as one, and nobody has a million."""
    found = [workers_of(launcher("desk", text)) for text in ("", "-3", "x", "0", "9999", "1" * 99)]
    assert found == [1, 1, 1, 1, 1024, 1]


def test_workers_of_one_launcher_count_as_one_machine() -> None:
    """A machine that was restarted waits for the others, not for so many processes."""
    one = Gathering(DESK, 3, {})
    running = [
        msgspec.structs.replace(
            LAPTOP, incarnation=number, role="member", facts={LAUNCHER: "laptop:1"}
        )
        for number in (7, 8)
    ]
    one.look(running)
    assert one.count == 2
    assert not one.is_complete
    assert one.status_line().startswith("2 of 3 are here")

"""How a script has ended, in words; and what is believed of what was written about it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import BinaryIO, cast

import msgspec
import pytest

from potluck.apps.cli.launcher import LauncherWait
from potluck.apps.cli.run_places import (
    BEGINNING,
    LAUNCHER,
    LONGEST,
    Output,
    OutputReader,
    ParticipantLists,
    RankAssignment,
    ScriptError,
    ScriptExit,
    environments,
    last_traceback,
    memory_words,
    waited_of,
    workers_of,
)
from potluck.cluster.reports import StatusReport
from potluck.launch_env import is_second_hand
from support.threads import PATIENCE

GB = 10**9
WORDS = {
    "kind": "ValueError",
    "message": "bad batch",
    "where": "train.py:40",
    "is_second_hand": False,
    "traceback": "Traceback\n  x\nValueError: bad batch\n",
}


def read(folder: Path, text: str | bytes) -> ScriptError | None:
    """What is read from a file."""
    file = folder / "words.json"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return ScriptError.read(file)


def test_an_error_is_one_line_with_its_place(tmp_path: Path) -> None:
    """As far as there is a message, and a place."""
    assert str(read(tmp_path, json.dumps(WORDS))) == "ValueError: bad batch, train.py:40"
    bare = {**WORDS, "message": "", "where": ""}
    assert str(read(tmp_path, json.dumps(bare))) == "ValueError"
    ended = {**WORDS, "kind": "KeyboardInterrupt", "message": ""}
    assert str(read(tmp_path, json.dumps(ended))) == "interrupted by Ctrl-C, train.py:40"


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\xff",
        b"[]",
        json.dumps({**WORDS, "message": "x" * 10_000}),
        json.dumps({**WORDS, "traceback": "x" * 100_000}),
        json.dumps({**WORDS, "is_second_hand": "yes"}),
    ],
)
def test_what_is_not_in_order_counts_for_nothing(tmp_path: Path, text: str | bytes) -> None:
    """A script may write what it likes into that file."""
    assert read(tmp_path, text) is None
    assert ScriptError.read(tmp_path / "nothing") is None


def test_what_steers_a_terminal_is_taken_out(tmp_path: Path) -> None:
    """Lines of the traceback stay lines."""
    evil = read(tmp_path, json.dumps({**WORDS, "message": "a\x1b[2Jb", "traceback": "a\n\x1bb"}))
    assert evil is not None
    assert evil.message == "a [2Jb"
    assert evil.traceback == "a\n b"


@pytest.mark.parametrize(
    ("used", "free", "is_certain", "expected"),
    [
        (12 * GB, GB, False, True),
        (GB, GB // 4, False, True),
        (GB, 8 * GB, True, True),
        (GB, 8 * GB, False, False),
    ],
    ids=["used most of it", "little was free", "the system says so", "neither"],
)
def test_whether_memory_was_the_reason(
    used: int, free: int, is_certain: bool, expected: bool
) -> None:
    """Of 16 GB."""
    words = memory_words(used, free, 16 * GB, is_certain=is_certain)
    assert words.endswith(": probably out of memory") is expected


def test_what_another_launcher_tells_is_read_with_care() -> None:
    """Numbers that are none count as nothing; nothing at all is no ending."""
    told = ScriptExit("failed", "ValueError: x", 12.34)
    assert ScriptExit.of(told.facts()) == ScriptExit("failed", "ValueError: x", 12.3)
    assert ScriptExit.of({"outcome": "ok", "after": "soon"}) == ScriptExit("ok")
    assert ScriptExit.of({"outcome": "ok", "after": "-1e400"}).seconds == 0.0
    assert ScriptExit.of({"outcome": "failed", "after": "nan"}).seconds == 0.0
    assert str(ScriptExit.of({})) == "not heard from"


# --------------------------------------------------------------------------------------------------
# What workers print: whose line it is, and which traceback tells the reason.


def recorded(data: bytes) -> tuple[str, OutputReader]:
    """What is shown of a worker's output, and who has read it."""
    shown = io.StringIO()
    source = cast("BinaryIO", io.BufferedReader(io.BytesIO(data)))
    recorder = OutputReader(source, Output(shown), "3", 1)
    recorder.finish(PATIENCE)
    return shown.getvalue(), recorder


def test_a_line_that_never_ends_is_cut() -> None:
    """A worker that prints without an end of line cannot fill the memory."""
    shown, _ = recorded(b"x" * (3 * LONGEST))
    assert len(shown.splitlines()) >= 3
    assert shown.count("x") == 3 * LONGEST


def test_what_pytorch_writes_before_a_traceback_is_left_out_of_it() -> None:
    """`[rank3]: ` stands before every line there."""
    lines = [BEGINNING, '  File "train.py", line 3, in <module>', "ValueError: no"]
    shown, recorder = recorded("".join(f"[rank3]: {line}\n" for line in lines).encode())
    assert shown.startswith(f"[3] [rank3]: {BEGINNING}\n")
    assert recorder.last_words == "\n".join(lines)


def test_without_a_traceback_the_last_lines_count() -> None:
    """Such as those of a syntax error, or of a library in another language."""
    _, recorder = recorded("".join(f"line {n}\n" for n in range(30)).encode())
    assert recorder.last_words.splitlines() == [f"line {n}" for n in range(20, 30)]


def test_a_traceback_comes_with_all_that_led_to_it() -> None:
    """But not with one that was printed before and has nothing to do with it."""
    handled = [BEGINNING, '  File "x.py"', "OSError: handled", "went on"]
    cause = [BEGINNING, '  File "y.py"', "KeyError: 'a'", ""]
    link = ["During handling of the above exception, another exception occurred:", ""]
    reason = [BEGINNING, '  File "z.py"', "ValueError: b"]
    found = last_traceback([*handled, *cause, *link, *reason, "bye"])
    assert found.splitlines() == [*cause, *link, *reason]
    assert last_traceback(["all is well"]) == ""


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        ("potluck.errors.PeerLost: Rank 2 (desk at 10.0.0.5) is gone: it was killed.", True),
        ("potluck.errors.Aborted: Rank 1 ended the operation: it left the group", True),
        ("RuntimeError: Got the following error when running the callback: Aborted: Rank 1", True),
        ("RuntimeError: Aborted by the user", False),
        ("RuntimeError: PeerLost: Rank 2 (desk at 10.0.0.5:4711) is gone: killed", True),
        ("RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer", True),
        ("ValueError: the file is gone", False),
        ("potluck.errors.CollectiveMismatch: Ranks disagree about an operation", False),
        ("", False),
    ],
)
def test_whether_it_was_somebody_elses_failure(last: str, expected: bool) -> None:
    """By the last line, which says what went wrong."""
    assert is_second_hand(f"{BEGINNING}\n  File 'x'\n{last}") is expected


# --------------------------------------------------------------------------------------------------
# Ranks of a run: everybody finds the same ones, or nobody is given any.


def launcher(name: str, workers: str = "1", state: str = "ready", **facts: str) -> StatusReport:
    """What the launcher on a machine says."""
    return StatusReport(
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


def with_roll(report: StatusReport, roll: str, state: str = "ready") -> StatusReport:
    """The same, after it has called the roll."""
    return msgspec.structs.replace(report, state=state, facts={**report.facts, "roll": roll})


def test_ranks_follow_the_machines_in_one_order_for_all() -> None:
    """Whoever looks, in whatever order: attic has 0 to 2, desk 3 and 4, laptop 5."""
    crew = RankAssignment.of([LAPTOP, DESK, ATTIC])
    assert crew == RankAssignment.of([ATTIC, LAPTOP, DESK])
    assert crew.world_size == 6
    assert [crew.first_rank(each.key) for each in (ATTIC, DESK, LAPTOP)] == [(0, 0), (1, 3), (2, 5)]
    assert crew.roll != RankAssignment.of([LAPTOP, DESK]).roll
    assert crew.roll != RankAssignment.of([launcher("laptop", "2"), DESK, ATTIC]).roll


def test_rank_0_is_where_the_command_was_typed_first() -> None:
    """By how long each had waited when all were there; the rest follow likewise."""
    waited = {"attic": "400", "desk": "12000", "laptop": "7100"}
    crew = RankAssignment.of([launcher(name, waited=text) for name, text in waited.items()])
    assert [each.name for each in crew.launchers] == ["desk", "laptop", "attic"]
    assert crew.roll != RankAssignment.of([LAPTOP, DESK, ATTIC]).roll
    odd = [launcher("desk", waited="-1"), launcher("laptop", waited="9" * 40), LAPTOP]
    assert {waited_of(each) for each in odd} == {0}


def test_how_long_one_has_waited_is_said_once_all_are_there() -> None:
    """It stays the same from then on, or the launchers would never agree."""
    one = LauncherWait(DESK, 2, {})
    assert one.say(3.0) == ("waiting", {"waited": "", "roll": ""})
    one.look([LAPTOP])
    state, facts = one.say(5.0)
    assert (state, facts["waited"]) == ("ready", "5000")
    assert one.say(6.0) == (state, facts)
    one.look([])
    assert one.say(7.0)[1]["waited"] == ""


def test_workers_know_their_places_in_the_words_of_torchrun() -> None:
    """The second of two on the desk, when rank 0 is in the attic."""
    crew = RankAssignment.of([LAPTOP, DESK, ATTIC])
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
    rolls = ParticipantLists()
    assert rolls.call([DESK, msgspec.structs.replace(LAPTOP, role="member")]) == ""
    assert rolls.agreed([LAPTOP]) is None
    (alone,) = environments({"RANK": "3", "WORLD_SIZE": "4"}, DESK, None, "", [52416])
    assert "RANK" not in alone
    assert "WORLD_SIZE" not in alone
    assert (alone["LOCAL_RANK"], alone["LOCAL_WORLD_SIZE"]) == ("0", "1")


def test_all_must_have_called_the_same_roll() -> None:
    """One that has seen somebody else does not begin with us, and we not without it."""
    rolls = ParticipantLists()
    roll = rolls.call([DESK, LAPTOP])
    assert rolls.agreed([with_roll(LAPTOP, "another")]) is None
    assert rolls.agreed([with_roll(LAPTOP, roll)]) == RankAssignment.of([DESK, LAPTOP])


def test_whoever_hears_that_one_has_begun_follows_it() -> None:
    """Even if a third has come meanwhile: the first has seen that both had agreed."""
    rolls = ParticipantLists()
    roll = rolls.call([DESK, LAPTOP])
    rolls.call([DESK, LAPTOP, ATTIC])
    gone = with_roll(LAPTOP, roll, "starting")
    assert rolls.agreed([gone, ATTIC]) == RankAssignment.of([DESK, LAPTOP])
    assert ParticipantLists().agreed([gone]) is None  # a stranger's roll says nothing to us


def test_numbers_of_others_are_read_with_care() -> None:
    """What is no number of workers counts as one, and nobody has a million."""
    found = [workers_of(launcher("desk", text)) for text in ("", "-3", "x", "0", "9999", "1" * 99)]
    assert found == [1, 1, 1, 1, 1024, 1]


def test_workers_of_one_launcher_count_as_one_machine() -> None:
    """A machine that was restarted waits for the others, not for so many processes."""
    one = LauncherWait(DESK, 3, {})
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

"""``potluck bench`` as a person runs it on one machine."""

import json

from typer.testing import CliRunner

from potluck.apps.cli.main import app
from support.command import on_screen, potluck

ALGORITHMS = {"direct", "doubling", "ring", "tree", "central"}


def test_a_machine_alone_measures_processes_of_its_own() -> None:
    """Links, algorithms with prediction, and every compression, as one JSON object."""
    ended = potluck("bench", "--quick", "--json")
    assert ended.returncode == 0, ended.stderr
    assert "No other machine is paired" in ended.stderr
    assert "potluck: the algorithms" in ended.stderr
    facts = json.loads(ended.stdout)
    assert len(facts["nodes"]) == 2
    assert {(each["from"], each["to"]) for each in facts["links"]} == {(0, 1), (1, 0)}
    assert all(each["bytes_per_second"] > 1e6 for each in facts["links"])
    assert all(0 < each["latency_ns"] < 1e9 for each in facts["links"])
    for size in facts["all_reduce"]:
        assert {each["name"] for each in size["algorithms"]} == ALGORITHMS
        measured = {each["name"]: each["measured_ns"] for each in size["algorithms"]}
        assert measured[size["fastest"]] == min(measured.values())
        assert all(each["predicted_ns"] > 0 for each in size["algorithms"])
        assert size["planned"] in size["reason"]
    methods = {each["name"]: each for each in facts["compression"]["methods"]}
    assert methods.keys() >= {"none", "bfloat16", "int8", "onebit", "topk:0.01", "powersgd:4"}
    assert methods["int8"]["nbytes"] < methods["none"]["nbytes"] / 3
    assert methods["none"]["error"] == 0 < methods["int8"]["error"] < 0.05
    assert all(each["predicted"] > 0 for each in methods.values())


def test_in_a_terminal_there_is_progress_and_then_tables() -> None:
    """The progress goes; what is left is the result, and without colours if the user wants none."""
    with on_screen(
        "bench", "--quick", "--local", "2", size=(140, 50), variables={"NO_COLOR": "1"}
    ) as screen:
        assert screen.read_to_end() == 0, screen.text
    assert "the links" in screen.text
    titles = ["All-reduce, measured", "All-reduce, estimated from the links", "~ all-reduce"]
    assert [screen.text.count(each) for each in titles] == [1, 1, 1]
    assert 'compression="auto" takes ' in screen.text
    assert "\x1b[3" not in screen.raw


def test_who_waits_in_vain_is_told_so() -> None:
    """Within the time given, with a code of its own, and with who came."""
    ended = potluck("bench", "--nodes", "2", "--timeout", "1", "--json")
    assert ended.returncode == 3
    assert "potluck: Gave up after 1 s: 1 of 2 came (" in ended.stderr
    assert ended.stderr.endswith("Run `potluck bench` on the other machines as well.\n")
    assert ended.stdout == ""


def test_machines_or_processes_are_measured_not_both() -> None:
    """A contradiction is wrong usage, said before anything starts."""
    ended = CliRunner().invoke(app, ["bench", "--nodes", "2", "--local", "2"])
    assert ended.exit_code == 2
    assert "either --nodes or --local" in ended.stderr

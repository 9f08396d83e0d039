"""The explorer plays everything up to its bound, and finds a rule that was taken out."""

from __future__ import annotations

import subprocess
import sys

from potluck.testing.cluster import SimulatedCluster
from potluck.testing.explore import actions, begin, state_of

REPORTED = "cut b; time passes; time passes; time passes; time passes; heal; cut b"


def run(*arguments: str, mutant: str = "") -> subprocess.CompletedProcess[str]:
    """The command, in a process without threads; it forks."""
    plant = f"next(m for m in MUTANTS if m.name == {mutant!r}).plant(_Planting())" if mutant else ""
    program = (
        "import sys\n"
        "from potluck.testing.explore import main\n"
        "from potluck.testing.mutants import MUTANTS, _Planting\n"
        f"{plant}\n"
        f"sys.exit(main({list(arguments)!r}))"
    )
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False
    )


def test_all_sequences_of_a_depth_are_played() -> None:
    """And no rule is broken."""
    ended = run("--depth", "1", "--seconds", "20")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "sequences of up to 1 (all of them)" in ended.stdout
    assert "clocks of different speed" in ended.stdout


def test_a_budget_ends_it() -> None:
    """It says that there was more."""
    ended = run("--depth", "5", "--states", "5", "--after", "cut b; heal")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "5 states" in ended.stdout
    assert "as many as the budget allows" in ended.stdout


def test_a_process_that_founds_alone_is_found() -> None:
    """After the short reconnection, with the rule taken out; with it nothing is found."""
    arguments = "--depth", "4", "--states", "8", "--min-nodes", "1", "--after", REPORTED
    ended = run(*arguments, mutant="founds alone")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "time passes; time passes" in ended.stdout
    assert "Violation" in ended.stdout
    assert run(*arguments).returncode == 0


def test_the_same_state_has_the_same_number() -> None:
    """However it was reached; a crash makes another one."""
    one, two = begin((1.0, 1.0, 1.0), 2), begin((1.0, 1.0, 1.0), 2)
    assert state_of(one) == state_of(two)
    two.kill("a")
    assert state_of(one) != state_of(two)


def test_what_can_happen_depends_on_what_has() -> None:
    """Only the dead start again, only cuts are mended, and there is one newcomer."""
    cluster: SimulatedCluster = begin((1.0, 1.0, 1.0), 2)
    first = dict(actions(cluster))
    assert {"time passes", "crash a", "kill b", "cut c", "newcomer"} <= set(first)
    assert "heal" not in first
    first["kill b"]()
    first["cut c"]()
    first["newcomer"]()
    first["crash a at Commit"]()
    later = set(dict(actions(cluster)))
    assert {"restart b", "heal", "crash d"} <= later
    assert {"kill b", "newcomer", "drop a from Found"}.isdisjoint(later)

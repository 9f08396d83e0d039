"""Stories drawn by lot: all kinds of them, each complete, none the same."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter

import pytest

from potluck.membership.core import ClusterCore
from potluck.testing import seeds
from potluck.testing.process import Violation
from potluck.testing.scenario import Scenario, Timing, play
from potluck.testing.seeds import (
    SeedFailure,
    SeedReport,
    check_seed,
    check_seeds,
    main,
    random_story,
    shorten,
)

STORIES = [random_story(seed) for seed in range(400)]


def test_every_story_begins_and_ends() -> None:
    """It has nodes, and calm at the end before all must find together."""
    for story in STORIES:
        verbs = [step.action.verb for step in story.steps]
        assert verbs.count("nodes") >= 1
        assert verbs[-1] == "settle"
        assert "calm" in verbs[-3:]


def test_every_kind_of_fault_happens() -> None:
    """Cuts of both kinds, crashes with and without a word, sleep, wrong clocks, goodbyes."""
    verbs = Counter(step.action.verb for story in STORIES for step in story.steps)
    wanted = (
        "cut heal kill unplug restart pause wake jump drift leave abdicate loss delay lag slow "
        "flap firewall continue trainers node"
    )
    assert [verb for verb in wanted.split() if verbs[verb] < 5] == []
    cuts = [s.action.parts for story in STORIES for s in story.steps if s.action.verb == "cut"]
    assert {way for _, way, _, _ in cuts} == {"|", ">"}
    assert {losing for *_, losing in cuts} == {"", " losing"}


def _kinds(story: Scenario) -> set[str]:
    """Which of the faults that membership is promised to survive are in a story."""
    kinds, before = set(), ""
    for step in story.steps:
        verb, parts = step.action.verb, step.action.parts
        if verb in {"flap", "lag", "restart", "slow"}:
            kinds.add(verb)
        elif verb == "cut":
            left, way, right, losing = parts
            kinds |= {"one-way loss"} if way == ">" and losing else set()
            kinds |= {"cut pair"} if len(left.split()) == len(right.split()) == 1 else set()
        elif verb == "wait" and before == "heal":
            kinds.add("short reconnection")
        before = verb
    return kinds


def test_no_kind_of_fault_is_rare() -> None:
    """Each is in one of twenty stories at least, and several together are common."""
    kinds = [_kinds(story) for story in STORIES]
    counted = Counter(kind for each in kinds for kind in each)
    wanted = "flap", "lag", "restart", "slow", "one-way loss", "cut pair", "short reconnection"
    assert [kind for kind in wanted if counted[kind] < len(STORIES) / 20] == []
    assert sum(len(each) > 1 for each in kinds) > len(STORIES) / 4


def test_many_faults_wait_for_a_message() -> None:
    """Where protocols break: about the next view, about elections, about merges."""
    moments = Counter(
        step.message for story in STORIES for step in story.steps if step.timing is Timing.WHEN
    )
    assert {"Propose", "Accepted", "Commit", "VoteRequest", "Vote", "Found"} <= set(moments)


def test_no_two_stories_are_the_same() -> None:
    """But for their seeds."""
    assert len({str(story.without(0)) for story in STORIES}) == len(STORIES)


# --------------------------------------------------------------------------------------------------
# Two thousand stories drawn by lot keep every rule, and one that does not can be repeated.

SEEDS = 2000
SHARE = 125  # of one test, so that several processes can share them
QUICK = 250  # of which the first tier plays so many
FIRST = [
    pytest.param(first, marks=[pytest.mark.slow] if first >= QUICK else [])
    for first in range(0, SEEDS, SHARE)
]


@pytest.mark.parametrize("first", FIRST)
def test_the_rules_hold_in_every_story(first: int) -> None:
    """A seed that fails is named with its reason and the command that repeats it."""
    report = check_seeds(range(first, first + SHARE))
    assert report.seeds == SHARE
    assert not report.failures, "\n".join(f"{f.reason}\n  {f.command}" for f in report.failures)


class Forgetful(ClusterCore):
    """A core that never sends heartbeats, nor anything else, when time has passed."""

    def tick(self, now: float) -> list[object]:  # type: ignore[override]
        """Whatever is due is dropped."""
        return [effect for effect in super().tick(now) if not hasattr(effect, "to")]


def test_a_core_that_breaks_a_rule_is_reported() -> None:
    """With the seed, and the command that tells it with every event."""
    report = check_seeds(range(3), core=Forgetful)
    assert report.failures
    failure = report.failures[0]
    assert failure.reason.startswith("Violation: ")
    assert failure.command == f"python -m potluck.testing.seeds --seed {failure.seed} --trace"


def test_a_core_that_raises_is_a_finding_too() -> None:
    """Whatever it raises is reported with its seed."""

    class Broken(ClusterCore):
        def tick(self, now: float) -> list[object]:  # type: ignore[override]
            raise ZeroDivisionError(now)

    (failure,) = check_seeds([5], core=Broken).failures
    assert failure.seed == 5
    assert failure.reason.startswith("ZeroDivisionError")


def test_a_failing_story_is_shortened() -> None:
    """What is left still fails in the same way, and every line of it is needed or frames it."""
    story = random_story(1)
    short, reason = shorten(story, core=Forgetful)
    assert len(short.steps) < len(story.steps)
    with pytest.raises(Violation) as caught:
        play(short, core=Forgetful)
    assert reason == f"Violation: {caught.value}"


def test_the_command_counts_and_reports(capsys: pytest.CaptureFixture[str]) -> None:
    """As JSON for programs; the sentence for people goes to the other stream."""
    assert main(["--seeds", "4", "--first", "7", "--jobs", "1", "--json"]) == 0
    captured = capsys.readouterr()
    facts = json.loads(captured.out)
    assert facts["seeds"] == 4
    assert facts["failures"] == []
    assert set(facts["settled_in_seconds"]) == {"median", "p99", "max"}
    assert "4 seeds, 0 failed" in captured.err


def test_the_command_shares_the_work() -> None:
    """Several processes play them, each its part."""
    ended = subprocess.run(
        [sys.executable, "-m", "potluck.testing.seeds", "--seeds", "10", "--jobs", "2"],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "10 seeds, 0 failed" in ended.stdout


def test_the_command_tells_one_seed(capsys: pytest.CaptureFixture[str]) -> None:
    """The story first, then every event with its time."""
    assert main(["--seed", "3", "--trace"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("# The story of seed 3.")
    assert "Installed" in told
    assert "all rules kept" in told


def test_the_command_fails_with_its_seeds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a continuous integration goes red and says how to repeat it."""
    monkeypatch.setattr(seeds, "check_seeds", lambda batch: SeedReport(len(batch), [_FAILURE]))
    assert main(["--seeds", "1", "--jobs", "1"]) == 1
    told = capsys.readouterr().out
    assert "seed 7: it broke" in told
    assert "python -m potluck.testing.seeds --seed 7 --trace" in told


_FAILURE = SeedFailure(7, "it broke")


def test_the_command_shortens_and_shows_a_violation(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shorter story is printed with what it breaks."""

    def fail(*_: object, **__: object) -> None:
        raise Violation("two of something")

    monkeypatch.setattr(seeds, "play", fail)
    assert main(["--seed", "3", "--shorten"]) == 1
    told = capsys.readouterr().out
    assert "seed 3: two of something" in told
    assert "settle" in told
    assert "wait" not in told


def test_a_report_without_seeds_is_empty() -> None:
    """No division by nothing."""
    facts = SeedReport().as_dict()
    assert facts["seeds_per_second"] is None
    assert facts["settled_in_seconds"] is None


def test_a_seed_says_how_long_it_took_to_settle() -> None:
    """In simulated seconds, within the bound."""
    settled = check_seed(3)
    assert settled is not None
    assert 0 <= settled < 20

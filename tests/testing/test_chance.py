"""Stories drawn by lot: all kinds of them, each complete, none the same."""

from collections import Counter

from potluck.testing.chance import random_story
from potluck.testing.scenario import Scenario, Timing

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

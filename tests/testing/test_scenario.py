"""The language of stories: what is read, what is refused, and that it can be written again."""

from pathlib import Path

import pytest

from potluck.membership.events import ClusterState
from potluck.testing.scenario import VERBS, Scenario, ScenarioError, Timing, play
from potluck.testing.seeds import random_story


def test_a_story_is_read_line_by_line() -> None:
    """Comments and empty lines say nothing; the first comment is the title."""
    story = Scenario.parse("# A title.\n\nnodes a b   # two\nat 1.5 kill b\n")
    assert story.title == "A title."
    assert [step.line for step in story.steps] == [3, 4]
    first, second = story.steps
    assert (first.timing, first.action.parts) == (Timing.NOW, ("a b",))
    assert (second.timing, second.seconds, second.action.verb) == (Timing.AT, 1.5, "kill")


def test_a_trigger_names_sender_and_message() -> None:
    """What happens at a message is a step like others."""
    (step,) = Scenario.parse("when a sends Commit cut a | b c losing").steps
    assert (step.timing, step.sender, step.message) == (Timing.WHEN, "a", "Commit")
    assert step.action.parts == ("a", "|", "b c", " losing")


@pytest.mark.parametrize("verb", VERBS)
def test_the_example_of_every_verb_is_understood(verb: str) -> None:
    """What an error message recommends can be written."""
    (step,) = Scenario.parse(VERBS[verb].example).steps
    assert step.action.verb == verb


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("kil a", "Line 1: unknown action 'kil'; did you mean 'kill'?"),
        ("zzz", "known are: seed, "),
        ("cut a b", "example: cut a b | c"),
        ("within 3 kill a", "goes with an expectation"),
        ("for 3 kill a", "Write 'at' or 'after'"),
        ("at soon kill a", "unknown action 'at'"),
    ],
)
def test_what_is_not_understood_is_explained(line: str, complaint: str) -> None:
    """The error names the line and what to write instead."""
    with pytest.raises(ScenarioError) as caught:
        Scenario.parse(line)
    assert complaint in str(caught.value)


@pytest.mark.parametrize("seed", range(50))
def test_stories_by_lot_can_be_written_down(seed: int) -> None:
    """The text of a random story is a story, the same one."""
    story = random_story(seed)
    again = Scenario.parse(str(story))
    assert [str(step) for step in again.steps] == [str(step) for step in story.steps]
    assert again.title == story.title
    assert random_story(seed) == story


def test_a_step_can_be_left_out() -> None:
    """For finding out what matters in a story that fails."""
    story = Scenario.parse("nodes a\nwait 1\nkill a")
    assert [step.action.verb for step in story.without(1).steps] == ["nodes", "kill"]


# --------------------------------------------------------------------------------------------------
# Playing stories: expectations that hold, fail or are not understood, and what a line can do.


def test_a_story_that_comes_true_gives_its_cluster() -> None:
    """As it is at the end, with the trace told line by line."""
    lines: list[str] = []
    story = Scenario.parse("nodes a b\nwithin 3 expect a b in one view\nfor 1 expect a b active")
    cluster = play(story, tell=lines.append)
    assert cluster.state_of("a") is ClusterState.ACTIVE
    assert any("within 3 expect a b in one view: yes" in line for line in lines)


@pytest.mark.parametrize(
    "expectation",
    [
        "expect a b in one view",
        "within 0.01 expect a b together",
        "for 3 expect a joining",
        "after 1 expect a gone",
        "expect a was removed",
        'expect a says "nonsense"',
        "expect a leads b",
        "expect not a joining",
    ],
)
def test_an_expectation_that_fails_says_what_is_instead(expectation: str) -> None:
    """With the line, the time, and where everybody stands."""
    with pytest.raises(ScenarioError, match=r"Line 2: .* is not so .* instead: a "):
        play(Scenario.parse(f"nodes a b\n{expectation}"))


def test_an_unknown_expectation_is_explained() -> None:
    """With the ones that exist."""
    with pytest.raises(ScenarioError, match="Unknown expectation 'a is happy'"):
        play(Scenario.parse("nodes a\nexpect a is happy"))


def test_all_in_one_view_asks_for_the_living() -> None:
    """Whoever they are."""
    play(Scenario.parse("nodes a b c\nwithin 3 expect all in one view\nkill a\nsettle"))


def test_settings_hold_wherever_they_are_written() -> None:
    """They are about the whole story."""
    story = Scenario.parse("nodes a b\nquorum any\nfounders 2\nbeat 0.1 pausing after 2\nseed 9")
    config = play(story).config
    assert (config.quorum, config.min_nodes) == ("any", 2)
    assert (config.health.interval, config.health.pause_after) == (0.1, 2.0)


def test_an_expectation_cannot_happen_at_a_message() -> None:
    """It is said when the moment comes."""
    with pytest.raises(ScenarioError, match="'expect a active' cannot happen at a message"):
        play(Scenario.parse("nodes a b\nwhen a sends Commit expect a active\nwait 3"))


def test_every_line_has_its_effect() -> None:
    """What happens to links, clocks and training steps arrives where it belongs."""
    cluster = play(
        Scenario.parse(
            "nodes a b\nlinks routed\nmessages bytes\ndelay 0.01 to 0.02\nloss 0.5\n"
            "steps a 12\ncut a > b losing\ndrift a to 1.1\njump b by 3\nobservers o"
        )
    )
    assert cluster.dialling.is_routed
    assert cluster.place("a").writes_bytes
    assert cluster.network.quality.loss == 0.5
    assert cluster.network.cuts == (("a", "b"),)
    core = cluster.place("a").core
    assert core is not None
    assert core.samples == 12
    assert cluster.place("o").card.role.value == "observer"


def test_messages_survive_being_written_as_bytes() -> None:
    """A story with elections and merges takes the same course as without."""
    text = "nodes a b c d\nwithin 3 expect all in one view\nunplug a\nsettle"
    courses: list[list[str]] = [[], []]
    for course, how in zip(courses, ("messages objects", "messages bytes"), strict=True):
        play(Scenario.parse(text.replace("\n", f"\n{how}\n", 1)), tell=course.append)
    assert courses[0] == courses[1]


# --------------------------------------------------------------------------------------------------
# The cluster stories of tests/scenarios: each is played to its end with the real cores.

STORIES = sorted((Path(__file__).parent.parent / "scenarios").glob("*.txt"))


@pytest.mark.parametrize("path", STORIES, ids=lambda path: str(path.stem))
def test_the_story_ends_as_expected(path: Path) -> None:
    """All expectations come true, and no invariant is broken on the way."""
    story = Scenario.load(path)
    assert story.title
    assert any(step.action.verb == "expect" for step in story.steps)
    play(story)


@pytest.mark.parametrize("path", STORIES, ids=lambda path: str(path.stem))
def test_the_story_does_not_hang_on_the_lot(path: Path) -> None:
    """Other delays and another order of messages lead to the same end."""
    text = path.read_text(encoding="utf-8")
    for seed in range(1, 3):
        play(Scenario.parse(f"seed {seed}\n{text}"))

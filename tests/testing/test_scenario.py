"""The language of stories: what is read, what is refused, and that it can be written again."""

import pytest

from potluck.testing.chance import random_story
from potluck.testing.scenario import VERBS, Scenario, ScenarioError, Timing


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
        ("kil a", "Line 1: nobody knows how to 'kil'; did you mean 'kill'?"),
        ("zzz", "known are: seed, "),
        ("cut a b", "used like this: cut a b | c"),
        ("within 3 kill a", "goes with an expectation"),
        ("for 3 kill a", "Write 'at' or 'after'"),
        ("at soon kill a", "nobody knows how to 'at'"),
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

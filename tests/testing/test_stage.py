"""Playing stories: expectations that hold, fail or are not understood, and what a line can do."""

import pytest

from potluck.core.cluster import ClusterState
from potluck.testing import Scenario, ScenarioError, play


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
    with pytest.raises(ScenarioError, match="'a is happy' is no expectation"):
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

"""The cluster stories of tests/scenarios: each is played to its end with the real cores."""

from pathlib import Path

import pytest

from potluck.testing.scenario import Scenario
from potluck.testing.stage import play

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

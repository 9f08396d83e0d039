"""The catalogue: what is shown has a name, a unit and a meaning, and is written up."""

import re
from pathlib import Path

import pytest

from potluck.metrics import DistributedMetrics
from potluck.metrics.catalogue import CATALOGUE, SECTIONS
from potluck.metrics.families import Family

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def table(families: tuple[Family, ...]) -> str:
    """As the page has it."""
    rows = [
        f"| `{each.name}` | {each.kind} | {', '.join(f'`{name}`' for name in each.labels)} "
        f"| {each.meaning} |"
        for each in families
    ]
    return "\n".join(["| metric | kind | labels | meaning |", "|---|---|---|---|", *rows])


@pytest.mark.parametrize("section", SECTIONS)
def test_the_page_lists_exactly_what_there_is(section: str) -> None:
    """With its labels and its meaning; the failure shows the table that belongs there."""
    text = PAGE.read_text(encoding="utf-8")
    part = text.partition(f"### {section}\n")[2].partition("\n#")[0]
    found = "\n".join(line for line in part.splitlines() if line.startswith("|"))
    assert found == table(SECTIONS[section])


@pytest.mark.parametrize("family", CATALOGUE, ids=lambda family: family.name)
def test_names_say_kind_and_unit(family: Family) -> None:
    """Counters end in _total, durations are in seconds, sizes in bytes; a meaning is a sentence."""
    assert re.fullmatch(r"potluck_[a-z_]+", family.name)
    assert family.name.endswith("_total") == (family.kind == "counter")
    if family.kind == "histogram":
        assert family.name.endswith("_seconds")
    assert not re.search(r"_(ms|milliseconds|kb|percent)\b", family.name)
    assert family.meaning.endswith(".")
    assert len({each.name for each in CATALOGUE}) == len(CATALOGUE)


def test_what_is_not_used_is_not_shown() -> None:
    """A context that has done nothing has an uptime, and no hundred zeros."""
    snapshot = DistributedMetrics().snapshot()
    shown = [family.name for family in CATALOGUE if list(family.read(snapshot))]
    assert shown == ["potluck_uptime_seconds"]

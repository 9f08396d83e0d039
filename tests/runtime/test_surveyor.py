"""The surveyor: large operations run by plans that fit the links, agreed among all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from potluck.runtime import survey
from potluck.runtime.group import Group
from potluck.runtime.survey import Experience
from potluck.runtime.surveyor import LARGE
from support.groups import LIMIT, in_world, sum_call


def test_the_first_large_operation_is_preceded_by_a_survey() -> None:
    """All ranks then go by the same links; small operations do without."""

    def action(group: Group) -> list[Any]:
        plans = group._plans
        group.run(sum_call(np.ones(10, "f4"), 3), LIMIT)
        before = plans.is_surveyed
        group.run(sum_call(np.ones(LARGE, "f4"), 3), LIMIT)
        return [before, plans.is_surveyed, plans.links]

    first, *others = in_world(3, action)
    assert isinstance(first, list)
    assert first[:2] == [False, True]
    assert min(first[2].up) > 0
    assert others == [first, first]


def test_after_a_failure_the_links_are_surveyed_anew() -> None:
    """Somebody may not have learned what others have."""

    def action(group: Group) -> bool:
        call = sum_call(np.ones(LARGE, "f4"), 2)
        group.run(call, LIMIT)
        group.abort("try")
        return group._plans.is_surveyed

    assert False in in_world(2, action)


def test_operations_that_become_slow_lead_to_another_survey(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At fixed numbers of operations, and only if the ranks agree that something has changed."""
    monkeypatch.setattr(survey, "EVERY", 4)
    surveys: list[int] = []
    measure = survey.measure
    monkeypatch.setattr(
        "potluck.runtime.session.measure",
        lambda *args: surveys.append(args[1]) or measure(*args),  # type: ignore[func-returns-value]
    )
    monkeypatch.setattr(Experience, "change", lambda *_: 300)

    def action(group: Group) -> None:
        for _ in range(9):
            group.run(sum_call(np.ones(LARGE, "f4"), 2), LIMIT)

    assert in_world(2, action) == [None, None]
    assert sorted(surveys) == [0, 0, 0, 1, 1, 1]

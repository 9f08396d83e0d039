"""An algorithm is a name and a builder for each collective it offers."""

import pytest

from potluck.collective.registry import find
from potluck.collective.task import Collective, Layout, Task
from potluck.errors import UnsupportedOperation


def test_what_it_does_not_offer_is_refused() -> None:
    """The error says what it does offer."""
    task = Task.whole(Collective.REDUCE, world_size=2, count=1)
    with pytest.raises(UnsupportedOperation, match=r"doubling offers no reduce.*barrier"):
        find("doubling").schedule(task)


def test_a_layout_for_another_group_is_refused() -> None:
    """Before any program is made."""
    task = Task.whole(Collective.ALL_REDUCE, world_size=3, count=1)
    with pytest.raises(ValueError, match="layout is for 2 ranks, the task for 3"):
        find("ring").schedule(task, Layout.plain(2))


def test_without_a_layout_the_plain_one_is_used() -> None:
    """Ranks in their own order with equal shares."""
    task = Task.whole(Collective.ALL_REDUCE, world_size=3, count=1)
    assert find("ring").schedule(task).layout == Layout.plain(3)

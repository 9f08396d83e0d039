"""What was said on leaving a lineage stays said, as long as anybody may ask."""

from __future__ import annotations

from potluck.core.ancestry import Branch
from potluck.core.cluster_archive import Archive
from potluck.core.cluster_messages import Charter, Commit, Departed, Proposal
from potluck.vocabulary import NodeId, ProcessId

A = ProcessId(NodeId("a" * 32), 1)


def commit(lineage: str, epoch: int) -> Commit:
    """A view that was agreed."""
    return Commit(lineage, epoch, Proposal((A,)))


def test_the_newest_view_is_kept() -> None:
    """An older one does not replace it."""
    archive = Archive()
    archive.record(commit("x", 3))
    archive.record(commit("x", 2))
    assert archive.newest("x") == commit("x", 3)
    assert archive.newest("y") is None


def test_views_up_to_the_last_word_are_closed() -> None:
    """A later view may be entered again, as a newcomer."""
    archive = Archive()
    word = Departed("x", 3, 0, -1, None, "we left")
    archive.depart(word)
    assert archive.last_word("x") == word
    assert archive.is_closed("x", 3)
    assert not archive.is_closed("x", 4)
    assert not archive.is_closed("y", 1)


def test_views_before_one_that_is_known_are_closed() -> None:
    """Whoever tells of them is behind, and may be alone with them."""
    archive = Archive()
    archive.record(commit("x", 3))
    assert archive.is_closed("x", 2)
    assert not archive.is_closed("x", 3)


def test_only_so_many_are_kept() -> None:
    """The oldest are forgotten."""
    archive = Archive()
    for number in range(100):
        archive.record(commit(str(number), 1))
    assert archive.newest("0") is None
    assert archive.newest("99") is not None


def test_what_followed_a_view_is_known_whatever_came_first() -> None:
    """Sixteen views of a lineage at most, oldest first."""
    archive = Archive()
    for epoch in (6, 2, 4):
        archive.record(commit("x", epoch))
    assert [each.epoch for each in archive.following("x", 2)] == [4, 6]
    assert archive.following("y", 0) == ()
    for epoch in range(7, 40):
        archive.record(commit("x", epoch))
    assert [each.epoch for each in archive.following("x", 0)] == list(range(24, 40))


def test_lineages_that_dissolve_into_each_other_are_followed_to_an_end() -> None:
    """A circle must not exist; if it does, nobody waits for ever."""
    archive = Archive()
    one = Commit("x", 2, Proposal((A,), into="y", into_epoch=2))
    other = Commit("y", 2, Proposal((A,), into="x", into_epoch=2))
    archive.record(one)
    archive.record(other)
    assert archive.followed(one).lineage in {"x", "y"}


def test_a_lineage_is_followed_over_several_ends_to_the_newest_view_there() -> None:
    """What we know ourselves counts if it is newer than what was told."""
    archive = Archive()
    first = Commit("x", 2, Proposal((A,), into="y", into_epoch=3))
    assert archive.followed(first).view.lineage == "y"
    assert archive.followed(first).epoch == 3
    archive.record(commit("y", 2))
    assert archive.followed(first).epoch == 3
    archive.record(commit("y", 5))
    assert archive.followed(first) == commit("y", 5)
    archive.record(Commit("y", 6, Proposal((A,), into="z", into_epoch=1)))
    assert archive.followed(first).lineage == "z"


def test_the_successor_of_a_view_is_later_or_of_a_child_that_branched_off_no_earlier() -> None:
    """The lineage itself counts before its children."""
    archive = Archive()
    child = Commit("y", 4, Proposal((A,)), Charter(ancestry=(Branch("x", 3),)))
    archive.record(child)
    assert archive.successor("x", 3) == child
    assert archive.successor("x", 2) == child
    assert archive.successor("x", 4) is None
    assert archive.successor("z", 1) is None
    archive.record(commit("x", 4))
    assert archive.successor("x", 3) == commit("x", 4)
    assert archive.successor("x", 4) is None


def test_the_newest_lineages_and_words_are_kept() -> None:
    """Sixty-four of each; what is recorded again counts as new."""
    archive = Archive()
    archive.record(commit("first", 1))
    for number in range(63):
        archive.record(commit(str(number), 1))
    assert archive.newest("first") is not None
    archive.record(commit("first", 2))
    archive.record(commit("63", 1))
    assert archive.newest("first") is not None
    assert archive.newest("0") is None
    assert archive.newest("1") is not None

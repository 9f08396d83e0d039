"""Everybody gets a turn."""

from hypothesis import given
from hypothesis import strategies as st

from potluck.core.calls_fair import FairQueue


def test_a_peer_with_many_calls_does_not_hold_up_one_with_few() -> None:
    """They alternate."""
    queue: FairQueue[str] = FairQueue()
    for number in range(5):
        queue.add(1, f"a{number}")
    queue.add(2, "b0")
    assert [queue.take() for _ in range(7)] == ["a0", "b0", "a1", "a2", "a3", "a4", None]


def test_whoever_may_not_keeps_its_place() -> None:
    """The others go on, and it is not forgotten."""
    queue: FairQueue[str] = FairQueue()
    queue.add(1, "a")
    queue.add(2, "b")
    assert queue.take(lambda peer: peer == 2) == "b"
    assert queue.take(lambda peer: peer == 2) is None
    assert len(queue) == 1
    assert queue.take() == "a"


def test_items_can_be_taken_out_wherever_they_stand() -> None:
    """The order of the rest stays."""
    queue: FairQueue[int] = FairQueue()
    for item in range(10):
        queue.add(item % 3, item)
    assert sorted(queue.take_out(lambda item: item % 3 == 0 or item == 4)) == [0, 3, 4, 6, 9]
    assert [queue.take() for _ in range(6)] == [1, 2, 7, 5, 8, None]
    assert len(queue) == 0


@given(st.lists(st.tuples(st.integers(0, 3), st.integers())))
def test_nothing_is_lost_and_each_peer_keeps_its_order(items: list[tuple[int, int]]) -> None:
    """Whatever is put in comes out once, a peer's items in their order."""
    queue: FairQueue[tuple[int, int]] = FairQueue()
    for item in items:
        queue.add(item[0], item)
    out = [queue.take() for _ in items]
    for peer in range(4):
        of_peer = [item for item in items if item[0] == peer]
        assert [item for item in out if item is not None and item[0] == peer] == of_peer

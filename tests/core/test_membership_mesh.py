"""The largest mutually connected set: mutual always, largest for what real networks look like."""

from __future__ import annotations

import random
import time
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from potluck.core.membership_mesh import largest_mutual


@given(st.integers(0, 7), st.data())
def test_it_is_mutual_and_largest(size: int, data: st.DataObject) -> None:
    """Compared with trying all sets; a link counts only if both sides have it."""
    people = list(range(size))
    pairs = [(one, other) for one in people for other in people if one != other]
    links = data.draw(st.sets(st.sampled_from(pairs))) if pairs else set()
    found = largest_mutual(people, lambda one, other: (one, other) in links)

    def is_mutual(some: tuple[int, ...]) -> bool:
        return all((a, b) in links and (b, a) in links for a, b in combinations(some, 2))

    sets = [some for n in range(size + 1) for some in combinations(people, n) if is_mutual(some)]
    best = max((len(some) for some in sets), default=0)
    assert is_mutual(found)
    assert len(found) == best
    assert found == min(some for some in sets if len(some) == best)


def test_who_must_be_in_is_in() -> None:
    """A smaller set that contains somebody is preferred when it has to."""
    links = {frozenset("ab"), frozenset("bc"), frozenset("ac"), frozenset("cd")}
    assert largest_mutual("abcd", lambda x, y: frozenset((x, y)) in links) == ("a", "b", "c")
    found = largest_mutual("abcd", lambda x, y: frozenset((x, y)) in links, must="d")
    assert found == ("c", "d")


def test_a_hopeless_mesh_ends_in_time() -> None:
    """With a third of all links missing among 64 the search gives up, with a mutual set."""
    chance = random.Random(5)
    missing = {pair for pair in combinations(range(64), 2) if chance.random() < 0.3}

    def is_linked(one: int, other: int) -> bool:
        return (min(one, other), max(one, other)) not in missing

    start = time.monotonic()
    found = largest_mutual(list(range(64)), is_linked)
    assert time.monotonic() - start < 10  # measured: 0.05 s
    assert len(found) >= 5
    assert all(is_linked(one, other) for one, other in combinations(found, 2))

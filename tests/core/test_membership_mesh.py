"""The largest mutually connected set: mutual always, largest for what real networks look like."""

from __future__ import annotations

import random
import time
from collections.abc import Collection
from itertools import combinations
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from potluck.core.membership_mesh import largest_linked, largest_mutual


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


class Looked(list[int]):
    """Links that count how often the search looks at them: once for each set that it extends."""

    times = 0

    def __getitem__(self, index: Any) -> Any:
        self.times += 1
        return super().__getitem__(index)


def linked(size: int, missing: Collection[tuple[int, int]] = ()) -> Looked:
    """The links of a mesh in which these are missing."""
    pairs = [pair for pair in combinations(range(size), 2) if pair not in missing]
    return Looked(
        sum(1 << one + other - each for one, other in pairs if each in (one, other))
        for each in range(size)
    )


def test_a_whole_mesh_is_found_at_once() -> None:
    """It looks at each once; nothing larger can be found afterwards."""
    links = linked(8)
    assert largest_linked("abcdefgh", links) == tuple("abcdefgh")
    assert links.times == 8
    assert largest_linked("", []) == ()


def test_a_search_ends_after_5000_sets() -> None:
    """With the best that it has found by then."""
    chance = random.Random(5)
    missing = {pair for pair in combinations(range(64), 2) if chance.random() < 0.3}
    links = linked(64, missing)
    found = largest_linked(range(64), links)
    assert links.times == 5000
    assert not set(combinations(found, 2)) & missing


def test_who_must_be_in_may_be_alone() -> None:
    """Those who come before it do not count."""
    assert largest_linked("abc", linked(3, {(0, 1), (0, 2), (1, 2)}), must="b") == ("b",)

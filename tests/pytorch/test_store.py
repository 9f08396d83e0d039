"""What the store keeps: the calls that others make, and their bounds."""

from __future__ import annotations

import pytest

from potluck.torch import store
from potluck.torch.store import StoreServer


def test_values_are_kept_counted_swapped_and_forgotten() -> None:
    """As PyTorch's own stores do it."""
    kept = StoreServer()
    kept.shelf_set("a", b"1")
    assert kept.shelf_add("a", 4) == 5
    assert kept.shelf_missing(["a", "b"]) == ["b"]
    assert kept.shelf_swap("a", b"no", b"2") == b"5"
    assert kept.shelf_swap("a", b"5", b"2") == b"2"
    assert kept.shelf_swap("new", b"", b"3") == b"3"
    assert kept.shelf_swap("other", b"x", b"3") == b"x"
    assert kept.shelf_count() == 2
    assert (kept.shelf_delete("a"), kept.shelf_delete("a")) == (True, False)
    assert kept._size == 1
    with pytest.raises(KeyError):
        kept.shelf_get("a")
    assert {each.__name__ for each in kept.functions()} == {
        name for name in vars(StoreServer) if name.startswith("shelf_")
    }


def test_nobody_fills_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither with one value nor with many, nor with keys."""
    kept = StoreServer()
    with pytest.raises(ValueError, match="not more"):
        kept.shelf_set("a", bytes(store.LARGEST + 1))
    with pytest.raises(ValueError, match="characters at most"):
        kept.shelf_set("k" * (store.LONGEST_KEY + 1), b"")
    monkeypatch.setattr(store, "MOST", 10)
    kept.shelf_set("a", bytes(6))
    kept.shelf_set("a", bytes(10))
    with pytest.raises(ValueError, match="not more"):
        kept.shelf_set("b", b"x")
    monkeypatch.setattr(store, "MOST_KEYS", 1)
    with pytest.raises(ValueError, match="at most"):
        kept.shelf_set("b", b"")

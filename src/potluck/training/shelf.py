"""What the store keeps on rank 0, and the calls that reach it; bounded, whoever calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["Shelf"]

MOST_KEYS = 1 << 16
LONGEST_KEY = 4096
LARGEST = 1 << 20
"""Bytes of one value."""

MOST = 64 << 20
"""Bytes of all values together."""


class Shelf:
    """Keys and values.  One call is carried out after the other.

    >>> shelf = Shelf()
    >>> shelf.shelf_add("ranks", 2), shelf.shelf_get("ranks"), shelf.shelf_missing(["a"])
    (2, b'2', ['a'])
    """

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._size = 0

    def functions(self) -> list[Callable[..., Any]]:
        """What others may call."""
        return [
            self.shelf_set,
            self.shelf_get,
            self.shelf_add,
            self.shelf_missing,
            self.shelf_swap,
            self.shelf_delete,
            self.shelf_count,
        ]

    def shelf_set(self, key: str, value: bytes) -> None:
        """Keep a value."""
        before = self._values.get(key)
        size = self._size + len(value) - len(before or b"")
        if len(value) > LARGEST or size > MOST:
            msg = f"The store keeps {LARGEST} bytes under one key and {MOST} in all, not more"
            raise ValueError(msg)
        if before is None and (len(key) > LONGEST_KEY or len(self._values) >= MOST_KEYS):
            msg = f"The store has {MOST_KEYS} keys of {LONGEST_KEY} characters at most"
            raise ValueError(msg)
        self._size = size
        self._values[key] = bytes(value)

    def shelf_get(self, key: str) -> bytes:
        """A value; raises if there is none."""
        return self._values[key]

    def shelf_add(self, key: str, amount: int) -> int:
        """Count up; what has not been counted begins at zero."""
        total = int(self._values.get(key, b"0")) + amount
        self.shelf_set(key, str(total).encode())
        return total

    def shelf_missing(self, keys: list[str]) -> list[str]:
        """Which of them are not there."""
        return [key for key in keys if key not in self._values]

    def shelf_swap(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Replace the expected value, or the absent one where none is expected; what is there."""
        present = self._values.get(key)
        if present == expected or (present is None and not expected):
            self.shelf_set(key, desired)
            return desired
        return expected if present is None else present

    def shelf_delete(self, key: str) -> bool:
        """Forget a value; False if there was none."""
        value = self._values.pop(key, None)
        self._size -= len(value or b"")
        return value is not None

    def shelf_count(self) -> int:
        """How many keys there are."""
        return len(self._values)

"""Trees: dicts, lists and tuples with arrays at their ends, of any library.

Gradients are such a tree, and so is what ``state_dict()`` returns.  A tree can be taken apart into
its arrays and put together again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np

from potluck.arrays.numpy import SCALAR

__all__ = ["is_array", "is_number_or_array", "is_tree", "leaves_of", "replaced"]


def is_array(thing: Any) -> bool:
    """Whether this is the end of a branch that holds numbers in an array."""
    return isinstance(thing, np.ndarray | np.generic) or (
        hasattr(thing, "dtype") and hasattr(thing, "shape")
    )


def is_number_or_array(thing: Any) -> bool:
    """The same, where single numbers count too."""
    return SCALAR.knows(thing) or is_array(thing)


def is_tree(thing: Any) -> bool:
    """Whether this is no array but may have some in it."""
    return isinstance(thing, Mapping | list | tuple) and not is_array(thing)


Test = Callable[[Any], bool]


def leaves_of(tree: Any, is_leaf: Test = is_array) -> list[tuple[str, Any]]:
    """All arrays of a tree, each with the path to it, in the order of the tree.

    >>> [path for path, _ in leaves_of({"layer": [np.zeros(1), {"bias": np.ones(2)}]})]
    ['layer.0', 'layer.1.bias']
    """
    return list(_walk(tree, "", is_leaf))


def _walk(tree: Any, path: str, is_leaf: Test) -> Iterator[tuple[str, Any]]:
    if is_leaf(tree):
        yield path, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _walk(value, f"{path}.{key}" if path else str(key), is_leaf)
    elif isinstance(tree, list | tuple):
        for place, value in enumerate(tree):
            yield from _walk(value, f"{path}.{place}" if path else str(place), is_leaf)


def replaced(tree: Any, arrays: Iterator[Any], is_leaf: Test = is_array) -> Any:
    """The same tree with other arrays, taken in the order of :func:`leaves_of`."""
    if is_leaf(tree):
        return next(arrays)
    if isinstance(tree, Mapping):
        made = {key: replaced(value, arrays, is_leaf) for key, value in tree.items()}
        return made if type(tree) is dict else _of_its_kind(tree, made)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(replaced(value, arrays, is_leaf) for value in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(replaced(value, arrays, is_leaf) for value in tree)
    return tree


def _of_its_kind(tree: Mapping[Any, Any], made: dict[Any, Any]) -> Any:
    if not isinstance(tree, MutableMapping):
        return type(tree)(made)  # type: ignore[call-arg]
    twin = copy.copy(tree)  # what else it knows, such as a default, comes along
    twin.update(made)
    return twin

"""Trees: dicts, lists and tuples with arrays at their ends, of any library.

Gradients are such a tree, and so is what ``state_dict()`` returns.  A tree can be taken apart into
its arrays and put together again.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np

from potluck._decode import KeyCheck, reason_of
from potluck._values import decode, encode
from potluck.arrays.adapters import SCALAR, allocate, as_buffer
from potluck.arrays.base import Access, Array
from potluck.errors import MalformedFrame


def is_array(thing: Any) -> bool:
    """Whether this is the end of a branch that holds numbers in an array."""
    return isinstance(thing, np.ndarray | np.generic) or (
        hasattr(thing, "dtype") and hasattr(thing, "shape")
    )


def is_number_or_array(thing: Any) -> bool:
    """The same, where single numbers count too."""
    return SCALAR.knows(thing) or is_array(thing)


def is_tree(thing: Any) -> bool:
    """Whether this is a container that may hold arrays."""
    if isinstance(thing, np.ndarray):  # at once: this is asked for every array of a collective
        return False
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


# --------------------------------------------------------------------------------------------------
# Trees of arrays, written down: their shape without the arrays, and never by pickle.
#
# What ``state_dict()`` returns is such a tree; :mod:`potluck.arrays.trees` takes them apart.

_KINDS = ("torch", "jax", "mlx")
_ALIASES = {"jaxlib": "jax"}  # where the class of its arrays lives


def flat_array(thing: Any) -> Array:
    """The elements of an array as flat memory of numpy; its own where that is possible."""
    return as_buffer(thing, Access.READ).flat


# -- the shape of a tree, written down ------------------------------------------------------------

_ARRAY, _MAPPING, _LIST, _TUPLE, _VALUE = range(5)


def written(tree: Any) -> tuple[bytes, dict[str, Any]]:
    """The shape of a tree as bytes, and its arrays by name.

    >>> shape, arrays = written({"weight": np.ones(2), "steps": 3, "betas": (0.9, 0.99)})
    >>> list(arrays), read(shape, arrays)["betas"]
    (['weight'], (0.9, 0.99))
    """
    arrays: dict[str, Any] = {}
    return encode(_outline(tree, "", arrays)), arrays


def _outline(tree: Any, path: str, arrays: dict[str, Any]) -> list[Any]:
    if is_array(tree):
        name = path or "array"
        while name in arrays:  # {"a.b": x, "a": {"b": y}}
            name += "'"
        arrays[name] = tree
        module = type(tree).__module__.partition(".")[0]
        return [_ARRAY, name, _ALIASES.get(module, module)]
    if isinstance(tree, Mapping):
        items = [
            [key, _outline(value, f"{path}.{key}" if path else str(key), arrays)]
            for key, value in tree.items()
        ]
        return [_MAPPING, items]
    if isinstance(tree, list | tuple):
        parts = [
            _outline(value, f"{path}.{place}" if path else str(place), arrays)
            for place, value in enumerate(tree)
        ]
        return [_LIST if isinstance(tree, list) else _TUPLE, parts]
    return [_VALUE, tree]


def read(shape: bytes, arrays: Mapping[str, Array]) -> Any:
    """The tree for which bytes stand, with these arrays of numpy as the kinds they were.

    Raises :class:`~potluck.MalformedFrame` unless the bytes stand for a tree of just these arrays.
    """
    return _built(_checked(shape, arrays), arrays)


def check(shape: bytes, names: Iterable[str]) -> None:
    """Raise :class:`~potluck.MalformedFrame` unless the bytes stand for a tree of these arrays.

    >>> check(written({"weight": np.ones(2)})[0], ["weight"])
    """
    _checked(shape, names)


def _checked(shape: bytes, names: Iterable[str]) -> Any:
    outline, missing = decode(shape), set(names)
    try:
        _check(outline, missing, KeyCheck())
    except MalformedFrame:
        raise
    except (ValueError, TypeError, LookupError, RecursionError, ArithmeticError) as error:
        raise MalformedFrame("A tree cannot be understood", cause=reason_of(error)) from None
    if missing:
        raise MalformedFrame(f"A tree does not have the array {min(missing)[:100]!r}")
    return outline


def _check(outline: Any, missing: set[str], keys: KeyCheck) -> None:
    """Look at a part of an outline; the arrays in it are not missing any more."""
    match outline:
        case [int(kind), str(name), str()] if kind == _ARRAY:
            if name not in missing:
                raise MalformedFrame(f"A tree has the array {name[:100]!r}, which is not there")
            missing.discard(name)
        case [int(kind), list(items)] if kind == _MAPPING:
            _check_items(items, missing, keys)
        case [int(kind), list(parts)] if kind in {_LIST, _TUPLE}:
            for part in parts:
                _check(part, missing, keys)
        case [int(kind), _] if kind == _VALUE:
            return
        case _:
            raise MalformedFrame("A tree has a part that no sender writes")


def _check_items(items: list[Any], missing: set[str], keys: KeyCheck) -> None:
    for item in items:
        if type(item) is not list or len(item) != 2 or not _is_key(item[0]):  # noqa: PLR2004
            raise MalformedFrame("A mapping in a tree has an entry that is not a key and a value")
    keys.check(item[0] for item in items)
    if len(dict.fromkeys(item[0] for item in items)) < len(items):
        raise MalformedFrame("A tree has a mapping with one key twice")
    for _, value in items:
        _check(value, missing, keys)


def _is_key(key: Any) -> bool:
    if type(key) is tuple:
        return all(map(_is_key, key))
    return key is None or isinstance(key, str | int | float | bytes)


def _built(outline: Any, arrays: Mapping[str, Array]) -> Any:
    kind, content, *rest = outline
    if kind == _ARRAY:
        return _as_kind(arrays[content], rest[0])
    if kind == _MAPPING:
        return {key: _built(value, arrays) for key, value in content}
    if kind in (_LIST, _TUPLE):
        parts = [_built(value, arrays) for value in content]
        return parts if kind == _LIST else tuple(parts)
    return content


def _as_kind(array: Array, library: str) -> Any:
    """An array of another library, if that is in use here."""
    module = sys.modules.get(library) if library in _KINDS else None
    if module is None:
        return array
    if library == "torch":
        import torch

        tensor = torch.empty(array.shape, dtype=getattr(torch, str(array.dtype)))
        buffer = as_buffer(tensor, Access.WRITE)
        np.copyto(buffer.flat, array.reshape(-1))
        return buffer.commit()
    return _elsewhere(array, library)


def _elsewhere(array: Array, library: str) -> Any:
    numpy_like = sys.modules.get({"jax": "jax.numpy", "mlx": "mlx.core"}[library])
    if numpy_like is None:
        return array
    if library == "mlx" and str(array.dtype) == "bfloat16":  # has no name in the buffer protocol
        buffer = allocate(numpy_like.zeros((1,), dtype=numpy_like.bfloat16), array.shape)
        np.copyto(buffer.flat, array.reshape(-1))
        return buffer.commit()
    return numpy_like.array(array)

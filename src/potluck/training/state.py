"""TrainingState: everything that has to follow a member, declared once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np

from potluck.arrays.base import Access
from potluck.arrays.lending import lend
from potluck.training import trees

__all__ = ["Stateful", "TrainingState"]


@runtime_checkable
class Stateful(Protocol):
    """Models and optimisers of PyTorch, samplers, schedulers."""

    def state_dict(self) -> Any: ...  # noqa: D102
    def load_state_dict(self, state: Any, /) -> Any: ...  # noqa: D102


class TrainingState:
    """The named parts of a training's state.

    A part is an object with ``state_dict()`` and ``load_state_dict()``, a pair of functions that
    get and set it, a random generator of numpy, or a tree of arrays that are changed in place.

    >>> weights = {"w": np.zeros(2)}
    >>> state = TrainingState(model=weights)
    >>> saved = state.capture()
    >>> weights["w"][:] = 7
    >>> state.restore({"model": {"w": np.ones(2)}})
    >>> weights["w"].tolist()
    [1.0, 1.0]
    """

    def __init__(self, **parts: Any) -> None:
        if not parts:
            msg = "A state has at least one part, such as model=..."
            raise ValueError(msg)
        self._parts = {name: _part(name, part) for name, part in parts.items()}

    def with_part(self, name: str, part: Any) -> TrainingState:
        """This state and one more part; itself if it has a part of that name."""
        if name in self._parts:
            return self
        made = TrainingState(**{name: part})
        made._parts = {**self._parts, **made._parts}
        return made

    @property
    def names(self) -> list[str]:
        """What the parts are called."""
        return list(self._parts)

    def capture(self) -> dict[str, Any]:
        """A tree of all parts, which shows their own memory where that is possible."""
        return {name: get() for name, (get, _) in self._parts.items()}

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Put other values into all parts."""
        if set(tree) != set(self._parts):
            msg = (
                f"This state has the parts {', '.join(sorted(self._parts))}, "
                f"but what came has {', '.join(sorted(map(str, tree)))}"
            )
            raise ValueError(msg)
        for name, (_, put) in self._parts.items():
            put(tree[name])


_Access = tuple[Callable[[], Any], Callable[[Any], Any]]


def _part(name: str, part: Any) -> _Access:
    if isinstance(part, np.random.Generator):
        generator = part.bit_generator

        def put(state: Any) -> None:
            generator.state = state

        return lambda: generator.state, put
    if isinstance(part, Stateful):
        return part.state_dict, part.load_state_dict
    if isinstance(part, tuple) and len(part) == 2 and all(map(_is_function, part)):  # noqa: PLR2004
        return part
    if trees.leaves_of(part):
        _check_writable(name, part)
        return lambda: part, lambda tree: _fill(name, part, tree)
    msg = (
        f"{name}: a {type(part).__name__} is no part of a state: pass something with "
        "state_dict() and load_state_dict(), a pair (get, set), or a tree of arrays"
    )
    raise TypeError(msg)


def _is_function(thing: Any) -> bool:
    return callable(thing) and not isinstance(thing, Stateful)  # modules of PyTorch can be called


def _check_writable(name: str, part: Any) -> None:
    for path, array in trees.leaves_of(part):
        try:
            lend(array, Access.WRITE)
        except (TypeError, ValueError) as error:
            msg = (
                f"{name}.{path} cannot be changed in place: pass a pair (get, set) of functions "
                f"instead of the arrays. {error}"
            )
            raise TypeError(msg) from error


def _fill(name: str, part: Any, tree: Any) -> None:
    """Write into the arrays that the user holds."""
    mine, theirs = trees.leaves_of(part), dict(trees.leaves_of(tree))
    if {path for path, _ in mine} != set(theirs):
        msg = f"{name}: what came has other arrays than this part"
        raise ValueError(msg)
    for path, array in mine:
        lease = lend(array, Access.WRITE)
        new = trees.flat_array(theirs[path])
        if new.dtype != lease.flat.dtype or new.size != lease.flat.size:
            msg = (
                f"{name}.{path}: {lease.flat.size} values of {lease.flat.dtype} are here, "
                f"{new.size} of {new.dtype} came"
            )
            raise ValueError(msg)
        np.copyto(lease.flat, new)
        lease.give_back()

"""Arrays of MLX are copied, and assigned to afterwards.

Where MLX is not installed a stand-in of the few names that the adapter uses takes its place.
"""

import importlib.util
import sys
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from potluck.arrays.adapters import allocate, as_buffer
from potluck.arrays.base import Access


class StandIn:
    """An array that can be assigned to, and shows bfloat16 to numpy only as integers."""

    def __init__(self, values: Any, dtype: Any = None) -> None:
        self.values = np.array(values, dtype)

    @property
    def dtype(self) -> Any:
        """The type of its numbers."""
        return self.values.dtype

    def view(self, dtype: Any) -> "StandIn":
        """The same bytes as another type."""
        return StandIn(self.values.view(dtype))

    def reshape(self, *shape: int) -> "StandIn":
        """Another shape."""
        return StandIn(self.values.reshape(*shape))

    def __getitem__(self, key: Any) -> "StandIn":
        """A part."""
        return StandIn(self.values[key])

    def __setitem__(self, key: Any, value: "StandIn") -> None:
        """Assign."""
        self.values[key] = value.values

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        """A copy, if numpy knows the type."""
        if self.values.dtype == ml_dtypes.bfloat16:
            msg = "no such type in the buffer protocol"
            raise TypeError(msg)
        return self.values.copy()

    def tolist(self) -> Any:
        """As lists."""
        return self.values.tolist()


@pytest.fixture
def mx(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module."""
    if importlib.util.find_spec("mlx") is not None:
        return importlib.import_module("mlx.core")
    module: Any = ModuleType("mlx.core")
    module.array = StandIn
    module.bfloat16, module.uint16 = np.dtype(ml_dtypes.bfloat16), np.dtype("u2")
    module.float32, module.int32 = np.dtype("f4"), np.dtype("i4")
    monkeypatch.setitem(sys.modules, "mlx.core", module)
    return module


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int32"])
def test_an_array_is_assigned_to(mx: Any, name: str) -> None:
    """The same object has the result; a new one is of the same type."""
    given = mx.array([[0, 1], [2, 3]], getattr(mx, name))
    buffer = as_buffer(given, Access.UPDATE)
    assert buffer.flat.dtype == name
    assert buffer.flat.astype("f4").tolist() == [0, 1, 2, 3]
    buffer.flat[3] = 7
    assert buffer.commit() is given
    assert given.tolist() == [[0, 1], [2, 7]]
    made = allocate(given, (1, 2))
    made.flat[...] = [5, 6]
    assert made.commit().tolist() == [[5, 6]]
    assert made.commit().dtype == given.dtype


def test_reading_changes_nothing(mx: Any) -> None:
    """What is done to the copy stays there."""
    given = mx.array([1, 2], mx.int32)
    buffer = as_buffer(given, Access.READ)
    buffer.flat[...] = 0
    assert buffer.commit().tolist() == [1, 2]

"""Arrays of JAX cannot be changed: results are new ones.

Where JAX is not installed a stand-in of the few names that the adapter uses takes its place.
"""

import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from potluck.arrays.adapters import allocate, as_buffer
from potluck.arrays.base import Access


class StandIn:
    """An array that cannot be changed and knows where it is."""

    def __init__(self, values: Any, dtype: Any = None) -> None:
        self._values = np.array(values, dtype)
        self._values.flags.writeable = False
        self.dtype, self.shape, self.sharding = self._values.dtype, self._values.shape, "here"

    def devices(self) -> list[Any]:
        """The one there is."""
        return [SimpleNamespace(id=0)]

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        """What is in it, or nothing while it is being compiled."""
        if self.sharding == "compiling":
            msg = "a tracer has no value"
            raise RuntimeError(msg)
        return self._values

    @property
    def T(self) -> "StandIn":  # noqa: N802 - the name that all array libraries have
        """The same, transposed."""
        return StandIn(self._values.T)


@pytest.fixture
def array(monkeypatch: pytest.MonkeyPatch) -> Any:
    """How arrays are made."""
    if importlib.util.find_spec("jax") is not None:
        return importlib.import_module("jax.numpy").array
    module = ModuleType("jax")
    module.Array = StandIn  # type: ignore[attr-defined]
    module.device_put = lambda values, where: StandIn(values)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jax", module)
    return StandIn


@pytest.mark.parametrize("dtype", ["float32", ml_dtypes.bfloat16, "int32", "bool"])
def test_the_result_is_a_new_array(array: Any, dtype: Any) -> None:
    """Of the same kind, type and shape; the one given stays as it was."""
    given = array([[0, 1], [1, 0]], dtype)
    buffer = as_buffer(given, Access.UPDATE)
    buffer.flat[0] = 1
    result = buffer.commit()
    assert type(result) is type(given)
    assert result.dtype == given.dtype
    assert np.asarray(result).tolist() == [[1, 1], [1, 0]]
    assert np.asarray(given).tolist() == [[0, 1], [1, 0]]


def test_reading_needs_no_copy_of_ours(array: Any) -> None:
    """Transposed ones are read in their own order."""
    assert as_buffer(array([[0, 1], [2, 3]]).T, Access.READ).flat.tolist() == [0, 2, 1, 3]


def test_there_is_no_place_for_a_result(array: Any) -> None:
    """As out= such an array is refused."""
    with pytest.raises(TypeError, match="omit out="):
        as_buffer(array([1]), Access.WRITE)


def test_a_new_array_has_the_type_of_another(array: Any) -> None:
    """Results of another shape are of the same kind."""
    given = array([1], "float32")
    buffer = allocate(given, (2, 1))
    buffer.flat[...] = [3, 4]
    result = buffer.commit()
    assert type(result) is type(given)
    assert np.asarray(result).tolist() == [[3], [4]]


def test_what_is_being_compiled_is_refused() -> None:
    """The sentence says where collectives may be called."""
    if importlib.util.find_spec("jax") is not None:
        jax = importlib.import_module("jax")
        with pytest.raises(TypeError, match="outside of jit"):
            jax.jit(lambda traced: as_buffer(traced, Access.READ).flat.sum())(jax.numpy.ones(2))
        return
    from potluck.arrays.jax import JAX

    traced = StandIn([1])
    traced.sharding = "compiling"
    with pytest.raises(TypeError, match="outside of jit"):
        JAX.as_buffer(traced, Access.READ)

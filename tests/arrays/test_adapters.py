"""Any array becomes flat memory: whose memory it is, and what comes back."""

import array
import ctypes
import mmap
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from potluck.arrays.adapters import adapter_of, allocate, as_buffer
from potluck.arrays.base import Access
from potluck.schedule.reduce import DTYPES
from support.interpreter import ask


def plus_one(thing: Any, dtype: Any = None) -> Any:
    """Add one to every element, by way of flat memory."""
    buffer = as_buffer(thing, Access.UPDATE, dtype)
    assert buffer.flat.ndim == 1
    assert buffer.flat.flags.c_contiguous
    assert buffer.flat.dtype.isnative
    buffer.flat[...] = buffer.flat.astype(buffer.flat.dtype) + np.ones(1, buffer.flat.dtype)
    return buffer.commit()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_contiguous_array_is_lent_without_a_copy(dtype: Any) -> None:
    """What is written to the flat memory is in the array at once, whatever its type."""
    given = np.zeros((2, 3), dtype)
    buffer = as_buffer(given, Access.UPDATE)
    assert np.shares_memory(buffer.flat, given)
    assert buffer.flat.dtype == given.dtype
    assert buffer.shape == (2, 3)
    buffer.flat[4] = 1
    assert given[1, 1] == 1
    assert buffer.commit() is given


@pytest.mark.parametrize(
    "cut",
    [
        lambda whole: whole[::2],
        lambda whole: whole[:, ::3],
        lambda whole: whole.T,
        lambda whole: whole[::-1, ::-1],
        lambda whole: whole[1:3, 2:4],
        lambda whole: whole[:, 1],
        np.asfortranarray,
    ],
)
def test_a_strided_array_is_changed_where_it_lies(cut: Any) -> None:
    """A temporary array stands in, and its elements come home; the others stay as they were."""
    whole = np.arange(24.0).reshape(4, 6)
    part = cut(whole)
    expected = whole.copy()
    if np.shares_memory(part, whole):
        cut(expected)[...] += 1
    wanted = part + 1
    assert plus_one(part) is part
    assert np.array_equal(part, wanted)
    assert np.array_equal(whole, expected)


def test_a_reader_does_not_write_a_strided_array() -> None:
    """Giving back what was only read touches nothing, so read-only arrays may be read."""
    whole = np.arange(6)
    whole.flags.writeable = False
    buffer = as_buffer(whole[::2], Access.READ)
    assert buffer.flat.tolist() == [0, 2, 4]
    buffer.commit()


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,)])
def test_any_shape_has_a_flat_form(shape: tuple[int, ...]) -> None:
    """No dimension at all, or no element, is a shape like any other."""
    given = np.zeros(shape)
    assert as_buffer(given, Access.UPDATE).flat.size == given.size
    assert plus_one(given) is given
    assert (given == 1).all()


def test_the_other_byte_order_is_converted() -> None:
    """On the way the numbers are in this machine's order, at home in their own."""
    given = np.arange(3, dtype=">i4")
    assert plus_one(given) is given
    assert given.dtype == np.dtype(">i4")
    assert given.tolist() == [1, 2, 3]


def test_a_read_only_array_is_refused_for_writing() -> None:
    """The sentence says what to do instead."""
    given = np.zeros(3)
    given.flags.writeable = False
    with pytest.raises(ValueError, match=r"read-only.*out="):
        as_buffer(given, Access.UPDATE)
    with pytest.raises(ValueError, match="bytes is read-only"):
        as_buffer(b"1234", Access.WRITE)


def test_elements_that_share_memory_are_refused_for_writing() -> None:
    """Which of them would win is chance; reading them is harmless."""
    once = np.lib.stride_tricks.as_strided(np.zeros(1), (4,), (0,))
    with pytest.raises(ValueError, match="same memory"):
        as_buffer(once, Access.UPDATE)
    as_buffer(np.zeros((0, 3)).T, Access.UPDATE)  # nothing to share
    sliding = np.lib.stride_tricks.as_strided(np.zeros(6), (3, 4), (8, 8))
    with pytest.raises(ValueError, match="same memory"):
        as_buffer(sliding, Access.WRITE)
    assert as_buffer(sliding, Access.READ).flat.size == 12


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (np.array([object()]), "Python objects"),
        (np.zeros(2, "O,f4"), "Python objects"),
        (np.empty(2, "V0"), "without any content"),
        (np.ma.masked_array([1.0], [True]), "mask"),
        ([1.0, 2.0], "list is not an array"),
        (None, "NoneType is not an array"),
        ("text", "str is not an array"),
        ((ctypes.POINTER(ctypes.c_int) * 2)(), "holds no numbers"),
    ],
)
def test_what_cannot_travel_is_refused_in_words(given: Any, reason: str) -> None:
    """Nothing is guessed: objects, text and lists are named."""
    with pytest.raises(TypeError, match=reason):
        as_buffer(given, Access.READ)


def test_what_is_no_number_travels_too() -> None:
    """Dates, text of one length and records move like numbers, though they cannot be added."""
    assert plus_one(np.zeros(3).view(np.recarray)).tolist() == [1, 1, 1]
    days = np.array(["2026-01-01"], "M8[D]")
    for array_ in (days, np.array(["text"]), np.zeros(2, "i4,f4")):
        buffer = as_buffer(array_, Access.UPDATE)
        assert buffer.flat.dtype == array_.dtype
        assert buffer.flat.view("u1").size == array_.nbytes


@pytest.mark.parametrize(
    ("number", "dtype"),
    [(True, "bool"), (3, "int64"), (2.5, "float64"), (1j, "complex128"), (np.int8(3), "int8")],
)
def test_a_single_number_comes_back_as_a_new_one(number: Any, dtype: str) -> None:
    """Numbers cannot be changed: the result has the type that was given."""
    buffer = as_buffer(number, Access.UPDATE)
    assert buffer.flat.dtype == dtype
    assert buffer.shape == ()
    back = buffer.commit()
    assert type(back) is type(number)
    assert back == number
    with pytest.raises(TypeError, match="is immutable"):
        as_buffer(number, Access.WRITE)


def test_an_integer_beyond_64_bits_is_refused() -> None:
    """It would lose its upper part; objects have integers of any size."""
    with pytest.raises(ValueError, match="64 bits"):
        as_buffer(1 << 70, Access.READ)


@pytest.mark.parametrize(
    "buffer",
    [
        bytearray(8),
        memoryview(bytearray(8)),
        mmap.mmap(-1, 8),
        (ctypes.c_ubyte * 8)(),
        np.zeros(8, "u1"),
    ],
    ids=lambda buffer: type(buffer).__name__,
)
def test_raw_bytes_are_what_the_caller_says(buffer: Any) -> None:
    """With an explicit type any buffer of bytes is an array, in place."""
    assert plus_one(buffer, "float32") is buffer
    assert np.frombuffer(memoryview(buffer), "f4").tolist() == [1, 1]


@pytest.mark.parametrize("buffer", [b"", bytearray(), memoryview(b"")])
def test_an_empty_buffer_has_no_elements(buffer: Any) -> None:
    """Nothing to move is no error."""
    assert as_buffer(buffer, Access.READ, "float64").flat.size == 0


def test_only_raw_bytes_are_marked_as_such() -> None:
    """An array module's array, a typed view and a numpy array of bytes know what they hold."""
    assert as_buffer(bytearray(2), Access.READ).is_raw
    assert as_buffer(b"ab", Access.READ).is_raw
    assert not as_buffer(bytearray(4), Access.READ, "uint8").is_raw
    assert not as_buffer(array.array("d", [1]), Access.READ).is_raw
    assert not as_buffer(memoryview(bytearray(8)).cast("d"), Access.READ).is_raw
    assert not as_buffer(np.zeros(2, "u1"), Access.READ).is_raw


def test_a_buffer_that_starts_at_an_odd_address_works() -> None:
    """Numbers need not lie where the processor likes them."""
    memory = bytearray(9)
    plus_one(memoryview(memory)[1:], "float64")
    assert np.frombuffer(memory, "f8", offset=1).tolist() == [1]


@pytest.mark.parametrize(
    ("buffer", "dtype", "kind", "reason"),
    [
        (bytearray(7), "float32", ValueError, "whole number of float32"),
        (np.zeros(2, "f8"), "float32", TypeError, "says itself that it holds float64"),
        (bytearray(8), "words", TypeError, "not a numeric type"),
        (bytearray(8), object, TypeError, "Python objects"),
        (bytearray(8), ">f4", ValueError, "this machine's order"),
    ],
)
def test_a_type_that_does_not_fit_is_refused(
    buffer: Any, dtype: Any, kind: type[Exception], reason: str
) -> None:
    """A type is for raw bytes, and they must be a whole number of it."""
    with pytest.raises(kind, match=reason):
        as_buffer(buffer, Access.READ, dtype)


class Interfaced:
    """An object that shows its memory as numpy's array interface."""

    def __init__(self) -> None:
        self.memory = np.zeros(3)
        self.__array_interface__ = self.memory.__array_interface__


class Packed:
    """An object that shows its memory by DLPack, and says where it is."""

    def __init__(self, device: int = 1) -> None:
        self.memory = np.zeros(3)
        self.device = device

    def __dlpack__(self, **options: Any) -> Any:
        """The capsule."""
        return self.memory.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Which memory it is in."""
        return (self.device, 0)


class Converted:
    """An object that numpy can only convert."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        """A copy."""
        return np.arange(3.0)


@pytest.mark.parametrize("kind", [Interfaced, Packed])
def test_the_protocols_of_arrays_are_spoken(kind: type[Interfaced | Packed]) -> None:
    """Whatever shows its memory is used in place; before numpy 2.3 that of DLPack is read-only."""
    thing = kind()
    if kind is Packed and np.lib.NumpyVersion(np.__version__) < "2.3.0":
        with pytest.raises(ValueError, match="read-only"):
            plus_one(thing)
        return
    assert plus_one(thing) is thing
    assert thing.memory.tolist() == [1, 1, 1]


def test_what_is_on_a_device_is_refused() -> None:
    """The host cannot reach into it; the sentence says to copy it."""
    with pytest.raises(TypeError, match="not in the memory of the host"):
        as_buffer(Packed(device=2), Access.READ)


def test_a_package_that_cannot_be_opened_is_refused() -> None:
    """The other library's words are passed on."""

    class Sealed(Packed):
        def __dlpack__(self, **options: Any) -> Any:
            msg = "not today"
            raise BufferError(msg)

    with pytest.raises(TypeError, match="numpy cannot see into this Sealed: not today"):
        as_buffer(Sealed(), Access.READ)


def test_what_can_only_be_converted_is_for_reading() -> None:
    """A copy may be read; a result in a copy would be lost."""
    assert as_buffer(Converted(), Access.READ).flat.tolist() == [0, 1, 2]
    with pytest.raises(TypeError, match="is not an array"):
        as_buffer(Converted(), Access.UPDATE)


@pytest.mark.parametrize("like", [np.zeros(2, "f4"), np.float32(1), array.array("f", [1])])
def test_a_new_array_has_the_type_of_another(like: Any) -> None:
    """Results of another shape are of the kind that was given, or numpy arrays."""
    buffer = allocate(like, (2, 3))
    buffer.flat[...] = np.arange(6)
    assert buffer.commit().tolist() == [[0, 1, 2], [3, 4, 5]]
    assert buffer.commit().dtype == "float32"


def test_libraries_are_not_imported_first(tmp_path: Path) -> None:
    """Lending a numpy array loads none of them."""
    source = (
        "import json, sys, numpy\n"
        "from potluck.arrays.base import Access; from potluck.arrays.adapters import as_buffer\n"
        "as_buffer(numpy.zeros(3), Access.READ); as_buffer(bytearray(3), Access.READ)\n"
        "print(json.dumps(sorted({'torch', 'jax', 'mlx', 'asyncio'} & set(sys.modules))))"
    )
    assert ask(source, cwd=tmp_path) == []


def test_a_library_that_is_just_being_imported_is_no_obstacle() -> None:
    """Its module may exist before its names do."""
    source = (
        "import sys, types, numpy\n"
        "sys.modules['torch'] = types.ModuleType('torch')\n"
        "from potluck.arrays.base import Access; from potluck.arrays.adapters import as_buffer\n"
        "assert as_buffer(3.5, Access.READ).flat.tolist() == [3.5]"
    )
    subprocess.run([sys.executable, "-c", source], check=True)
    assert adapter_of(3.5) is adapter_of(4)

"""Tensors of PyTorch travel as their users expect."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from potluck.arrays.adapters import allocate, as_buffer
from potluck.arrays.base import Access

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_contiguous_tensor_is_lent_without_a_copy(dtype: torch.dtype) -> None:
    """What is written to the flat memory is in the tensor at once, whatever its type."""
    tensor = torch.zeros((2, 2), dtype=dtype)
    buffer = as_buffer(tensor, Access.UPDATE)
    assert buffer.flat.ctypes.data == tensor.data_ptr()
    assert str(dtype) == f"torch.{buffer.flat.dtype.name}"
    buffer.flat[3] = 1
    assert tensor[1, 1] == torch.ones((), dtype=dtype)
    assert buffer.commit() is tensor


def test_bfloat16_keeps_its_values() -> None:
    """The numbers are those of ml_dtypes, bit by bit."""
    tensor = torch.tensor([1.5, -2.0, 3.140625], dtype=torch.bfloat16)
    flat = as_buffer(tensor, Access.READ).flat
    assert flat.dtype == ml_dtypes.bfloat16
    assert flat.astype("f4").tolist() == tensor.float().tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "cut",
    [
        lambda whole: whole[:, ::2],
        lambda whole: whole.t(),
        lambda whole: whole[1:, 1:],
        lambda whole: whole.reshape(1, 1, 4, 6).to(memory_format=torch.channels_last),
    ],
)
def test_a_strided_tensor_is_changed_where_it_lies(cut: Any, dtype: torch.dtype) -> None:
    """A temporary tensor stands in, and its elements come home."""
    part = cut(torch.arange(24, dtype=dtype).reshape(4, 6))
    wanted = part + 1
    buffer = as_buffer(part, Access.UPDATE)
    assert buffer.flat.tolist() == part.reshape(-1).tolist()
    buffer.flat[...] = wanted.reshape(-1).float().numpy()
    assert buffer.commit() is part
    assert torch.equal(part, wanted)


@pytest.mark.parametrize("shape", [(), (0,), (2, 0)])
def test_any_shape_has_a_flat_form(shape: tuple[int, ...]) -> None:
    """No dimension at all, or no element, is a shape like any other."""
    for dtype in (torch.float32, torch.bfloat16):
        tensor = torch.zeros(shape, dtype=dtype)
        assert as_buffer(tensor, Access.UPDATE).flat.size == tensor.numel()


def test_a_parameter_is_changed_and_stays_one() -> None:
    """A leaf that requires grad is written to like with torch.distributed."""
    parameter = torch.nn.Parameter(torch.zeros(2))
    buffer = as_buffer(parameter, Access.UPDATE)
    buffer.flat[...] = 5
    assert buffer.commit() is parameter
    assert parameter.requires_grad
    assert parameter.is_leaf
    assert parameter.tolist() == [5, 5]


@pytest.mark.parametrize("strided", [False, True])
def test_autograd_notices_what_was_changed_behind_it(strided: bool) -> None:
    """A tensor saved for the way back and then overwritten is an error, not a wrong gradient."""
    weight = torch.ones(4, requires_grad=True)
    saved = torch.ones(8)[::2] if strided else torch.ones(4)
    loss = (weight * saved).sum()
    buffer = as_buffer(saved, Access.UPDATE)
    buffer.flat[...] = 7
    buffer.commit()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # type: ignore[no-untyped-call]


def test_reading_leaves_the_version_alone() -> None:
    """Whoever only reads disturbs no gradient."""
    tensor = torch.ones(4)
    before = tensor._version
    as_buffer(tensor, Access.READ).commit()
    assert tensor._version == before


@pytest.mark.parametrize("strided", [False, True])
def test_tensors_of_inference_mode_can_be_changed(strided: bool) -> None:
    """They have no version to count, and may be written from outside."""
    with torch.inference_mode():
        tensor = torch.zeros(4)[::2] if strided else torch.zeros(2)
    buffer = as_buffer(tensor, Access.UPDATE)
    buffer.flat[...] = 3
    buffer.commit()
    assert tensor.tolist() == [3, 3]


def test_conjugate_views_are_resolved() -> None:
    """A lazily conjugated or negated tensor travels as the numbers it shows."""
    tensor = torch.tensor([1 + 2j]).conj()
    buffer = as_buffer(tensor, Access.UPDATE)
    assert buffer.flat.tolist() == [1 - 2j]
    buffer.flat[...] = 3 + 4j
    assert buffer.commit().tolist() == [3 + 4j]
    assert as_buffer(torch.tensor([1 + 2j]).conj().imag, Access.READ).flat.tolist() == [-2]


@pytest.mark.parametrize(
    ("tensor", "kind", "reason"),
    [
        (torch.zeros(2).to_sparse(), TypeError, "to_dense"),
        (torch.zeros(2, device="meta"), TypeError, "no elements"),
        (torch.empty(2, dtype=torch.bits16), TypeError, "cannot travel"),
        (torch.zeros(1).expand(3), ValueError, "same memory"),
    ],
)
def test_what_cannot_travel_is_refused_in_words(
    tensor: torch.Tensor, kind: type[Exception], reason: str
) -> None:
    """Nothing is converted behind the user's back."""
    with pytest.raises(kind, match=reason):
        as_buffer(tensor, Access.UPDATE)


class Part(torch.Tensor):
    """A tensor that is one rank's part of a larger one."""

    def to_local(self) -> torch.Tensor:
        """The part as such."""
        return self.as_subclass(torch.Tensor)


def test_a_part_of_a_distributed_tensor_is_refused() -> None:
    """Its elements are not the whole: the user says which he means."""
    part = torch.zeros(2).as_subclass(Part)
    with pytest.raises(TypeError, match="to_local"):
        as_buffer(part, Access.READ)
    assert as_buffer(part.to_local(), Access.READ).flat.size == 2


def test_an_expanded_tensor_may_be_read() -> None:
    """Its elements are one place in memory, which only a writer minds."""
    assert as_buffer(torch.ones(1).expand(3), Access.READ).flat.tolist() == [1, 1, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_new_tensor_has_the_type_of_another(dtype: torch.dtype) -> None:
    """Results of another shape are tensors."""
    buffer = allocate(torch.zeros(1, dtype=dtype), (2, 2))
    buffer.flat[...] = np.arange(4)
    made = buffer.commit()
    assert isinstance(made, torch.Tensor)
    assert made.dtype is dtype
    assert made.tolist() == [[0, 1], [2, 3]]

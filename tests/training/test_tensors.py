"""Several tensors as one vector: in place where they lie side by side, through a copy elsewhere."""

from __future__ import annotations

import pytest
import torch

from potluck.arrays.base import Access
from potluck.training.tensors import Bundle


def test_neighbours_are_one_vector_without_a_copy() -> None:
    """Parts of one tensor, as sharded models have them, are used where they are."""
    whole = torch.arange(12.0)
    bundle = Bundle(whole.split([5, 0, 7]), Access.UPDATE)  # type: ignore[no-untyped-call]
    assert not bundle.is_copy
    assert bundle.vector.data_ptr() == whole.data_ptr()
    before = whole._version
    bundle.give_back()
    assert whole._version > before


@pytest.mark.parametrize(
    "tensors",
    [
        [torch.arange(3.0), torch.arange(4.0)],
        [torch.arange(8.0)[::2]],
        [torch.arange(6.0).reshape(2, 3).t()],
        [torch.arange(6.0)[3:], torch.arange(6.0)[:3]],
        [torch.tensor([1 + 2j]).conj()],
    ],
    ids=["apart", "strided", "turned", "swapped", "conjugated"],
)
def test_others_are_copied_there_and_back(tensors: list[torch.Tensor]) -> None:
    """What was in them is in the vector, and what was done to that is in them."""
    expected = [tensor.clone() * 2 for tensor in tensors]
    bundle = Bundle(tensors, Access.UPDATE)
    assert bundle.is_copy
    bundle.vector *= 2
    bundle.give_back()
    assert all(map(torch.equal, tensors, expected))


def test_what_is_only_read_stays_as_it_is() -> None:
    """A copy that was scribbled on does not come home."""
    tensors = [torch.ones(2), torch.ones(3)]
    bundle = Bundle(tensors, Access.READ)
    bundle.vector.zero_()
    bundle.give_back()
    assert all(bool((tensor == 1).all()) for tensor in tensors)


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ([], "at least one"),
        ([torch.ones(1), torch.ones(1, dtype=torch.int32)], "one type"),
        ([torch.ones(2, 2).to_sparse()], "Sparse"),
    ],
)
def test_what_cannot_be_one_vector_is_refused(tensors: list[torch.Tensor], reason: str) -> None:
    """Before anything has moved."""
    with pytest.raises((ValueError, TypeError), match=reason):
        Bundle(tensors, Access.READ)

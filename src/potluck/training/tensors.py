"""Several tensors as one vector: collectives know vectors, PyTorch knows lists of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

from potluck.arrays.base import Access

__all__ = [
    "Bundle",
    "Named",
    "check_pairs",
    "check_some",
    "counts_of",
    "even_counts",
    "is_dense",
    "is_uniform",
]

Named: TypeAlias = tuple[str, torch.Tensor]
"""A tensor, and what its caller calls it."""


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements lie one after the other in the host's memory."""
    return (
        tensor.layout is torch.strided
        and tensor.is_cpu
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def counts_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """How many elements each has."""
    return [tensor.numel() for tensor in tensors]


def even_counts(whole: Named, part: Named, size: int) -> list[int]:
    """How many elements each of ``size`` ranks has in a tensor that holds a part of each."""
    (whole_name, all_parts), (part_name, one) = whole, part
    if all_parts.numel() != one.numel() * size:
        msg = (
            f"The {whole_name} of {all_parts.numel()} elements must be {size} times as large as "
            f"the {part_name} of {one.numel()}: one part for each rank"
        )
        raise ValueError(msg)
    return [one.numel()] * size


def check_some(tensors: Sequence[torch.Tensor]) -> None:
    """Refuse an operation on nothing."""
    if not tensors:
        msg = "An operation on tensors needs at least one"
        raise ValueError(msg)


def check_pairs(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
    """Refuse lists of which one has more than the other, or nothing."""
    check_some(inputs)
    if len(outputs) != len(inputs):
        msg = f"Each input needs an output: there are {len(inputs)} and {len(outputs)}"
        raise ValueError(msg)


def is_uniform(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all are of one type."""
    return all(tensor.dtype is tensors[0].dtype for tensor in tensors)


MOVED = (
    "The storage of a tensor was moved while an operation used it, so the result is lost: "
    "call wait() on the work before you resize or share the storage"
)


def _memory_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a tensor's storage lies, and how large it is."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


class Bundle:
    """Tensors of one type as one vector: their own memory where they lie side by side.

    Otherwise a temporary vector stands in for them, and :meth:`give_back` copies it to them.

    >>> parts = [torch.ones(2), torch.zeros(1, 2)]
    >>> bundle = Bundle(parts, Access.UPDATE)
    >>> bundle.vector += 1
    >>> bundle.give_back(); parts
    [tensor([2., 2.]), tensor([[1., 1.]])]
    """

    def __init__(self, tensors: Sequence[torch.Tensor], access: Access) -> None:
        self._tensors = [tensor.detach() for tensor in tensors]
        self._access = access
        _check(tensors)
        whole = _side_by_side(self._tensors)
        self.is_copy = whole is None
        if whole is None:
            first = tensors[0]
            count = sum(counts_of(tensors))
            whole = torch.empty(count, dtype=first.dtype, device="cpu")
            if access.reads:
                for part, tensor in zip(self._parts(whole), self._tensors, strict=True):
                    part.copy_(tensor)
        self.vector = whole
        self._memory = _memory_of(whole)

    def _parts(self, whole: torch.Tensor) -> list[torch.Tensor]:
        parts = whole.split(counts_of(self._tensors))  # type: ignore[no-untyped-call]
        return [part.view(tensor.shape) for part, tensor in zip(parts, self._tensors, strict=True)]

    def give_back(self) -> None:
        """Bring the result to where it belongs."""
        if _memory_of(self.vector) != self._memory:
            raise RuntimeError(MOVED)
        if not self._access.writes:
            return
        if self.is_copy:
            for part, tensor in zip(self._parts(self.vector), self._tensors, strict=True):
                with torch.inference_mode(tensor.is_inference()):
                    tensor.copy_(part)
        else:
            for tensor in self._tensors:
                if not tensor.is_inference():
                    torch.autograd.graph.increment_version(tensor)


def _check(tensors: Sequence[torch.Tensor]) -> None:
    check_some(tensors)
    kinds = {tensor.dtype for tensor in tensors}
    if len(kinds) > 1:
        names = ", ".join(sorted(map(str, kinds)))
        msg = f"Tensors of one operation must be of one type, not of {names}"
        raise TypeError(msg)
    if any(tensor.layout is not torch.strided for tensor in tensors):
        msg = "Sparse tensors can only be summed by all_reduce: pass tensor.to_dense()"
        raise TypeError(msg)


def _side_by_side(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """One vector over the memory of all, where that is one piece."""
    filled = [tensor for tensor in tensors if tensor.numel()]  # the others have no address
    first = (filled or tensors)[0]
    if not is_dense(first):
        return None
    if len(filled) <= 1:
        return first.view(-1)
    storage = first.untyped_storage().data_ptr()
    place = first.data_ptr()
    for tensor in filled:
        if (
            not is_dense(tensor)
            or tensor.data_ptr() != place
            or tensor.untyped_storage().data_ptr() != storage
        ):
            return None
        place += tensor.numel() * tensor.element_size()
    return first.as_strided((sum(counts_of(tensors)),), (1,))

"""Tensors of PyTorch.

Contiguous tensors in the host's memory are used as they are; others, and those on a device, go
through a temporary tensor.  Autograd does not see what is written, as with ``torch.distributed``;
but a tensor that it has saved for the way back is marked as changed.

Memory is shown to numpy by its address, not by ``tensor.numpy()``: that forbids for ever to resize
the tensor's storage, which FullyShardedDataParallel does in every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch

from potluck.arrays.base import Access, Array, BufferView, Dtype, check_no_overlap

_DTYPES: dict[torch.dtype, Dtype] = {
    **{
        getattr(torch, name): np.dtype(name)
        for name in (
            *("bool", "int8", "int16", "int32", "int64"),
            *("uint8", "uint16", "uint32", "uint64"),
            *("float16", "float32", "float64", "complex64", "complex128"),
        )
    },
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
    torch.float8_e4m3fn: np.dtype(ml_dtypes.float8_e4m3fn),
    torch.float8_e4m3fnuz: np.dtype(ml_dtypes.float8_e4m3fnuz),
    torch.float8_e5m2: np.dtype(ml_dtypes.float8_e5m2),
    torch.float8_e5m2fnuz: np.dtype(ml_dtypes.float8_e5m2fnuz),
}


class TensorMemory:
    """The memory of a contiguous tensor, as numpy's array interface describes it.

    An array made of it keeps the tensor.  A storage that is resized meanwhile has other memory:
    the array must be gone by then.
    """

    __slots__ = ("__array_interface__", "__weakref__", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.__array_interface__ = {
            "data": (tensor.data_ptr(), False),  # and not only for reading
            "shape": (tensor.numel() * tensor.element_size(),),
            "typestr": "|u1",
            "version": 3,
        }


class TorchAdapter:
    """Tensors, parameters included."""

    def as_buffer(self, thing: torch.Tensor, access: Access) -> BufferView:
        """The tensor's own memory, where it is contiguous and in the host's memory."""
        plain = thing.detach()  # shares memory and version
        _check(plain)
        if access.writes and not plain.is_contiguous():
            check_no_overlap(plain.shape, plain.stride())
        if _is_direct(plain):
            return BufferView(_flat(plain), tuple(plain.shape), _returning(thing, access))
        host = torch.empty(plain.shape, dtype=plain.dtype, device="cpu")
        if access.reads:
            host.copy_(plain)

        def commit() -> torch.Tensor:
            if access.writes:
                with torch.inference_mode(plain.is_inference()):
                    plain.copy_(host)
            return thing

        return BufferView(_flat(host), tuple(plain.shape), commit)

    def allocate(self, like: torch.Tensor, shape: Sequence[int]) -> BufferView:
        """A tensor of the same type, on the same device in the end."""
        host = torch.empty(tuple(shape), dtype=like.dtype, device="cpu")
        return BufferView(_flat(host), tuple(shape), lambda: host.to(like.device))


def _returning(thing: torch.Tensor, access: Access) -> Any:
    def commit() -> torch.Tensor:
        if access.writes and not thing.is_inference():
            torch.autograd.graph.increment_version(thing)
        return thing

    return commit


def _is_direct(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _check(tensor: torch.Tensor) -> None:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        msg = "Sparse, quantised and nested tensors cannot travel: pass tensor.to_dense()"
        raise TypeError(msg)
    if tensor.is_meta:
        msg = "A tensor on the device meta has no elements to move"
        raise TypeError(msg)
    if hasattr(tensor, "to_local"):
        msg = "A distributed tensor is a part of a whole: pass tensor.to_local()"
        raise TypeError(msg)


def _flat(tensor: torch.Tensor) -> Array:
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        msg = f"A tensor of type {tensor.dtype} cannot travel: convert it to another type"
        raise TypeError(msg)
    if not tensor.numel():  # it may have no address
        return np.empty(0, dtype)
    seen: Array = np.asarray(TensorMemory(tensor))
    return seen.view(dtype)


TORCH = TorchAdapter()

"""Tensors of PyTorch.

Contiguous tensors in the host's memory are used as they are; others, and those on a device, go
through a temporary tensor.  Autograd does not see what is written, as with ``torch.distributed``;
but a tensor that it has saved for the way back is marked as changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch

from potluck.arrays.base import Access, Array, Dtype, Lease
from potluck.arrays.memory import check_no_overlap

__all__ = ["TORCH", "TorchAdapter"]

# Types that numpy knows through ml_dtypes only: seen as integers on the way there.
_EXTENDED: dict[torch.dtype, tuple[torch.dtype, Dtype]] = {
    torch.bfloat16: (torch.int16, np.dtype(ml_dtypes.bfloat16)),
    torch.float8_e4m3fn: (torch.uint8, np.dtype(ml_dtypes.float8_e4m3fn)),
    torch.float8_e4m3fnuz: (torch.uint8, np.dtype(ml_dtypes.float8_e4m3fnuz)),
    torch.float8_e5m2: (torch.uint8, np.dtype(ml_dtypes.float8_e5m2)),
    torch.float8_e5m2fnuz: (torch.uint8, np.dtype(ml_dtypes.float8_e5m2fnuz)),
}


class TorchAdapter:
    """Tensors, parameters included."""

    def lend(self, thing: torch.Tensor, access: Access) -> Lease:
        """The tensor's own memory, where it is contiguous and in the host's memory."""
        plain = thing.detach()  # shares memory and version
        _check(plain)
        if access.writes and not plain.is_contiguous():
            check_no_overlap(plain.shape, plain.stride())
        if _is_direct(plain):
            return Lease(_flat(plain), tuple(plain.shape), _returning(thing, access))
        host = torch.empty(plain.shape, dtype=plain.dtype, device="cpu")
        if access.reads:
            host.copy_(plain)

        def give_back() -> torch.Tensor:
            if access.writes:
                with torch.inference_mode(plain.is_inference()):
                    plain.copy_(host)
            return thing

        return Lease(_flat(host), tuple(plain.shape), give_back)

    def allocate(self, like: torch.Tensor, shape: Sequence[int]) -> Lease:
        """A tensor of the same type, on the same device in the end."""
        host = torch.empty(tuple(shape), dtype=like.dtype, device="cpu")
        return Lease(_flat(host), tuple(shape), lambda: host.to(like.device))


def _returning(thing: torch.Tensor, access: Access) -> Any:
    def give_back() -> torch.Tensor:
        if access.writes and not thing.is_inference():
            torch.autograd.graph.increment_version(thing)
        return thing

    return give_back


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
    try:
        if tensor.dtype in _EXTENDED:
            through, dtype = _EXTENDED[tensor.dtype]
            seen: Array = tensor.view(through).numpy().view(dtype)
            return seen.reshape(-1)
        plain: Array = tensor.numpy()
    except (TypeError, RuntimeError) as error:
        msg = f"A tensor of type {tensor.dtype} cannot travel: {error}"
        raise TypeError(msg) from None
    return plain.reshape(-1)


TORCH = TorchAdapter()

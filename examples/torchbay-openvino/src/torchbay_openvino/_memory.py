"""OpenVINO's tensors over PyTorch's memory: borrowed, never owned."""

from __future__ import annotations

import ctypes

import numpy as np
import openvino as ov
import torch

__all__ = ["borrowed"]

_NUMPY = {
    torch.float32: np.float32,
    torch.bool: np.bool_,
    torch.int64: np.int64,
    torch.int32: np.int32,
}


def borrowed(tensor: torch.Tensor) -> ov.Tensor:
    """Return the memory of a contiguous tensor without keeping it alive.

    Whoever runs a request must hold the tensors themselves until it is done.
    """
    sizes, dtype = tuple(tensor.shape), _NUMPY[tensor.dtype]
    span = (ctypes.c_byte * tensor.nbytes).from_address(tensor.data_ptr())
    return ov.Tensor(np.frombuffer(memoryview(span), dtype).reshape(sizes), shared_memory=True)

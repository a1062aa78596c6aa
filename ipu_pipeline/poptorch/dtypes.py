"""Converts torch's dtypes and tensors to JAX's and NumPy's, and back.

Without `jax_enable_x64`, JAX computes 64-bit numbers in 32 bits. Integers are then checked to fit.
"""

from __future__ import annotations

from typing import Any

import jax
import ml_dtypes
import numpy as np
import torch

_DTYPES: dict[torch.dtype, Any] = {
    torch.float64: np.float64,
    torch.float32: np.float32,
    torch.float16: np.float16,
    torch.bfloat16: ml_dtypes.bfloat16,
    torch.complex128: np.complex128,
    torch.complex64: np.complex64,
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.int16: np.int16,
    torch.int8: np.int8,
    torch.uint8: np.uint8,
    torch.bool: np.bool_,
}


def jax_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """Returns the dtype that JAX computes in for one of torch's dtypes."""
    if dtype not in _DTYPES:
        raise TypeError(
            f"Tensors of {dtype} are not supported. Supported are {', '.join(map(str, _DTYPES))}."
        )
    return np.dtype(jax.dtypes.canonicalize_dtype(_DTYPES[dtype]))


def to_numpy(tensor: torch.Tensor, name: str = "a tensor") -> np.ndarray[Any, Any]:
    """Converts a tensor to an array of JAX's dtype, which shares the tensor's memory if it can."""
    dtype = jax_dtype(tensor.dtype)
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    array = tensor.resolve_conj().resolve_neg().numpy()
    if array.dtype == dtype:
        return array
    if array.dtype.kind == "i" and array.size:
        limits = np.iinfo(dtype)
        low, high = array.min(), array.max()
        if low < limits.min or high > limits.max:
            raise ValueError(
                f"{name} has integers from {low} to {high}, which do not fit {dtype.name}, in which JAX "
                "computes 64-bit integers. Set the environment variable JAX_ENABLE_X64=1 to compute in 64 "
                "bits."
            )
    return array.astype(dtype)


def to_torch(array: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Converts an array to a tensor with memory of its own."""
    copy = np.array(array)
    if copy.dtype == ml_dtypes.bfloat16:
        tensor = torch.from_numpy(copy.view(np.int16)).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(copy)
    return tensor if dtype is None else tensor.to(dtype)

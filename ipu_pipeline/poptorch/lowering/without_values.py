"""Replaces functions of torch that read values of tensors, though their results do not need this.

Covariances warn of too few observations, least squares determine whether the matrix has full rank, slices
read a place from a tensor, and combinations count the true elements of a mask. In a captured model,
functions of ours that compute the same replace them. The device "ipu", where PopTorch has a model's
tensors, stands for the captured tensors' own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["WithoutValues"]


def _cov(
    input: torch.Tensor,
    *,
    correction: int = 1,
    fweights: torch.Tensor | None = None,
    aweights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes covariances as in torch.cov's documentation. The weights are not checked."""
    x = input.reshape(1, -1) if input.dim() < 2 else input
    weights = fweights
    if aweights is not None:
        weights = aweights if fweights is None else fweights * aweights
    if weights is None:
        weights = torch.ones(x.shape[1], dtype=x.dtype)
    total = weights.sum()
    divisor = total - correction
    if aweights is not None and correction != 0:
        divisor = total - correction * (weights * aweights).sum() / total
    deviation = x - ((x * weights).sum(1) / total).unsqueeze(1)
    made = (deviation * weights) @ deviation.mH / divisor.clamp(min=0)
    return made.squeeze()


def _corrcoef(input: torch.Tensor) -> torch.Tensor:
    covariance = _cov(input)
    if covariance.numel() == 1:
        return covariance.reshape(()) / covariance.reshape(())
    root = covariance.diagonal().sqrt().real
    made = covariance / root.unsqueeze(1) / root
    if made.is_complex():
        return torch.complex(made.real.clamp(-1, 1), made.imag.clamp(-1, 1))
    return made.clamp(-1, 1)


def _narrow(input: torch.Tensor, dim: int, start: Any, length: int) -> torch.Tensor:
    if not isinstance(start, torch.Tensor):
        return torch.Tensor.narrow(input, dim, start, length)
    start = torch.where(start < 0, start + input.shape[dim], start)
    return input.index_select(dim, start.reshape(1) + torch.arange(length))


def _combinations(input: torch.Tensor, r: int = 2, with_replacement: bool = False) -> torch.Tensor:
    choose = itertools.combinations_with_replacement if with_replacement else itertools.combinations
    places = torch.tensor([*choose(range(input.shape[0]), r)], dtype=torch.int64).reshape(-1, r)
    return input[places] if r else input.new_empty((0,))


def _lstsq(
    input: torch.Tensor, b: torch.Tensor, rcond: float | None = None, *, driver: str | None = None
) -> Any:
    """Finds the solution of least norm by the pseudo-inverse. Residuals are as for full rank."""
    is_vector = b.dim() == 1 or (b.dim() == input.dim() - 1 and b.shape == input.shape[:-1])
    wide = b.unsqueeze(-1) if is_vector else b
    rows, columns = input.shape[-2:]
    floor = torch.finfo(input.dtype).eps * max(rows, columns) if rcond is None else rcond
    solution = torch.linalg.pinv(input, rtol=floor) @ wide
    with torch.no_grad():
        values = torch.linalg.svdvals(input)
        rank = (values > floor * values[..., :1]).sum(-1)
    residuals = input.real.new_zeros((0,))
    if rows > columns and driver != "gelsy":
        residuals = (input @ solution - wide).abs().square().sum(-2)
    kind: Any = vars(torch.return_types)["linalg_lstsq"]
    return kind(
        (
            solution.squeeze(-1) if is_vector else solution,
            residuals,
            rank if driver != "gels" else rank.new_zeros((0,)),
            values if driver in ("gelss", "gelsd") else values.new_zeros((0,)),
        )
    )


_SUBSTITUTES: dict[Any, Callable[..., Any]] = {
    torch.cov: _cov,
    torch.Tensor.cov: _cov,
    torch.corrcoef: _corrcoef,
    torch.Tensor.corrcoef: _corrcoef,
    torch.narrow: _narrow,
    torch.Tensor.narrow: _narrow,
    torch.combinations: _combinations,
    torch.linalg.lstsq: _lstsq,
    getattr(torch.Tensor, "ipu"): lambda tensor, *_where, **_how: tensor,  # noqa: B009  # torch declares it not
}


def _without_ipu(device: Any) -> Any:
    """Returns the CPU for the device "ipu", and any other value unchanged."""
    is_ipu = (isinstance(device, torch.device) and device.type == "ipu") or (
        isinstance(device, str) and device.partition(":")[0] == "ipu"
    )
    return torch.device("cpu") if is_ipu else device


class WithoutValues(TorchFunctionMode):
    """Uses our functions in the `with` block."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _without_ipu(kwargs["device"])}
        if func is torch.Tensor.to:
            args = tuple(map(_without_ipu, args))
        return _SUBSTITUTES.get(func, func)(*args, **kwargs)

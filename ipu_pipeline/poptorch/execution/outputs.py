"""Makes a call's results from its micro-batches' outputs: joined, summed, or only some of them."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ipu_pipeline.engine.fronts import Collected
from ipu_pipeline.poptorch.dtypes import jax_dtype, to_numpy, to_torch
from ipu_pipeline.poptorch.enums import OutputMode
from ipu_pipeline.poptorch.errors import Error
from ipu_pipeline.poptorch.execution.arguments import Arguments, Batching

__all__ = ["join_outputs", "write_inputs"]


def join_outputs(
    collected: Sequence[Collected],
    dtypes: Sequence[torch.dtype],
    mode: OutputMode,
    period: int,
    first: int = 0,
    has_replicas: bool = False,
) -> list[torch.Tensor]:
    """Makes the tensors that a call returns."""
    joined = []
    for place, dtype in enumerate(dtypes, first):
        if mode is OutputMode.Final:
            last = collected[-1]
            leaf = last.outputs[place]
            value = np.asarray(leaf if last.size is None else leaf[last.size - 1])
        elif mode is OutputMode.Sum:
            dtype = torch.int32 if dtype is torch.bool else dtype
            value = _stack(collected, place).sum(0, dtype=jax_dtype(dtype))
        else:
            value = _stack(collected, place)
            if mode is OutputMode.EveryN:
                value = value[period - 1 :: period]
            value = value.reshape(()) if value.shape == (1,) else _join_first_axes(value)
        if has_replicas:
            value = _join_first_axes(value)
        tensor = to_torch(value, dtype)
        vars(tensor)["backward"] = _NO_BACKWARD
        joined.append(tensor)
    return joined


def write_inputs(
    arguments: Arguments,
    numbers: Sequence[int],
    collected: Sequence[Collected],
    first: int,
    batching: Batching,
) -> None:
    """Gives a call's tensors the values that forward has written to them, as in torch."""
    has_replicas = len(batching.input_groups) > 1
    replicas = [batching.input_groups.index(group) for group in range(batching.num_groups)]
    for place, number in enumerate(numbers, first):
        tensor = arguments.tensors[number]
        (value,) = join_outputs(collected, [tensor.dtype], OutputMode.All, 1, place, has_replicas)
        one = [len(tensor) // batching.num_micro_batches, *tensor.shape[1:]] if tensor.dim() else []
        rows = value.reshape(batching.num_rounds, len(batching.input_groups), *one)
        written = rows[:, replicas].reshape(tensor.shape)
        if jax_dtype(tensor.dtype).itemsize < tensor.dtype.itemsize:
            # What forward does not change is not rounded.
            written = torch.where(written == to_torch(to_numpy(tensor), tensor.dtype), tensor, written)
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            tensor.copy_(written)


def _stack(collected: Sequence[Collected], place: int) -> np.ndarray[Any, Any]:
    """Stacks an output of all micro-batches along a new first axis."""
    parts = []
    for part in collected:
        leaf = np.asarray(part.outputs[place])
        parts.append(leaf[None] if part.size is None else leaf[: part.size])
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _join_first_axes(value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Joins the first two axes. Scalars have only the first one."""
    if value.ndim < 2:
        return value
    first, second, *others = value.shape
    return value.reshape(first * second, *others)  # not -1, which fails without elements


class _NoBackward:
    """Replaces `backward` of a returned tensor, which has no graph of torch."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002  # torch's arguments
        raise Error(
            "backward() cannot be called explicitly on outputs of a PopTorch model. If you're using a "
            "trainingModel, the backwards pass is performed automatically when invoking the model. If "
            "you're using an inferenceModel, you should use a trainingModel instead."
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return collections.OrderedDict, ()  # torch.load must know the classes that are saved with a tensor

    def __deepcopy__(self, memo: Any) -> _NoBackward:
        return self


_NO_BACKWARD = _NoBackward()

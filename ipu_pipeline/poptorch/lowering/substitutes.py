"""What torch's own functions must be replaced by, so that models that call them can be exported.

- `torch.ctc_loss` has no shape inference: an operation of ours stands for it.
- `multilabel_margin_loss` of one row, not reduced, is a scalar; by torch's shape inference it is a vector.
- `gaussian_nll_loss` looks for negative variances, and raises an error; here they give NaN.
- Batch normalization with momentum None divides by a count that it reads from a tensor.
- Two losses are written as other operations, which nobody would take for losses.
- Layers of float32 take inputs of float16 and bfloat16, as on IPUs: their weights are cast. Layers of
  float16 and bfloat16 take inputs of float32: these are cast. Normalizations of float32 take them as they
  are in torch.
- `torch.autocast` for any kind of device is for the devices that there are.
- Random numbers come from the options' seed: a seed or a generator within forward would be without effect.
- Packed sequences have shapes that depend on values: see `packed_sequences`.
- Encoder and decoder layers compare the mask with a causal one, as a hint for faster code; here the mask
  is used as it is, which computes the same.
"""

from __future__ import annotations

import contextlib
import functools
import math
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.modules import batchnorm, transformer
from torch.utils._pytree import tree_leaves, tree_map_only

from ipu_pipeline.poptorch import markers
from ipu_pipeline.poptorch.logs import warn_once
from ipu_pipeline.poptorch.lowering import packed_sequences

__all__ = ["exportable"]

_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}

_library = torch.library.Library("ipu_poptorch", "FRAGMENT")
_library.define(
    "ctc_loss(Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank, "
    "int reduction, bool zero_infinity) -> Tensor"
)


def _ctc_loss_shape(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int,
    reduction: int,
    zero_infinity: bool,
) -> torch.Tensor:
    del targets, input_lengths, target_lengths, blank, zero_infinity
    return log_probs.new_empty(log_probs.shape[1:-1] if reduction == 0 else ())


_library.impl("ctc_loss", _ctc_loss_shape, "Meta")
_library.impl("ctc_loss", torch.ctc_loss, "CPU")


def _ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor | Sequence[int],
    target_lengths: torch.Tensor | Sequence[int],
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> torch.Tensor:
    lengths = [torch.as_tensor(values, dtype=torch.int64) for values in (input_lengths, target_lengths)]
    operation = torch.ops.ipu_poptorch.ctc_loss
    made: torch.Tensor = operation(log_probs, targets, *lengths, blank, reduction, zero_infinity)
    return made


def _gaussian_nll_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    var: torch.Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> torch.Tensor:
    if reduction not in _REDUCTIONS:
        raise ValueError(f"{reduction} is not valid")
    if isinstance(var, float):
        if var < 0:
            raise ValueError("var has negative entry/entries")
        var = var * torch.ones_like(input)
    if var.shape != input.shape:
        if input.shape[:-1] == var.shape:
            var = var.unsqueeze(-1)
        elif input.dim() != var.dim() or [
            length for length, wanted in zip(var.shape, input.shape, strict=True) if length != wanted
        ] != [1]:
            raise ValueError("var is of incorrect size")
    # As torch: where the variance is raised to eps, the gradient passes.
    raised = var + (var.clamp(min=eps) - var).detach()
    raised = torch.where(var < 0, math.nan, raised)
    loss = 0.5 * (torch.log(raised) + (input - target) ** 2 / raised)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss


_functions: Any = torch._C._nn  # noqa: SLF001  # what torch.nn.functional calls
_margin_loss = _functions.multilabel_margin_loss


def _multilabel_margin_loss(input: torch.Tensor, target: torch.Tensor, reduction: int) -> torch.Tensor:
    loss: torch.Tensor = _margin_loss(input, target, reduction)
    return loss.reshape(input.shape[:-1]) if reduction == 0 else loss


# What all batch normalizations derive from.
_BatchNorm: type[torch.nn.Module] = vars(batchnorm)["_BatchNorm"]
_normalize = _BatchNorm.forward


def _batch_norm(self: Any, input: torch.Tensor) -> torch.Tensor:
    mean, var, count = self.running_mean, self.running_var, self.num_batches_tracked
    if self.momentum is not None or not self.training or mean is None or var is None or count is None:
        return _normalize(self, input)
    self._check_input_dim(input)
    # With the momentum 1 the running statistics become the batch's. Then they move by one part of all.
    of_batch = mean.clone(), var.clone()
    result = torch.nn.functional.batch_norm(input, *of_batch, self.weight, self.bias, True, 1.0, self.eps)
    count.add_(1)
    for running, new in zip((mean, var), of_batch, strict=True):
        running.add_((new - running) / count.to(running.dtype))
    return result


def _as_loss(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A loss of torch's that is made of other operations, marked as a loss."""

    @functools.wraps(function)
    def marked(*args: Any, **kwargs: Any) -> torch.Tensor:
        return markers.reduce_loss(function(*args, **kwargs), "none")

    return marked


_NARROW = (torch.float16, torch.bfloat16)


def _in_dtype_of_input(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A layer's function whose weights are cast to a narrower input."""

    @functools.wraps(function)
    def call(
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        if input.dtype in _NARROW and weight.dtype is torch.float32:
            weight = weight.to(input.dtype)
            bias = None if bias is None else bias.to(input.dtype)
        elif weight.dtype in _NARROW and input.dtype is torch.float32:
            input = input.to(weight.dtype)
        return function(input, weight, bias, *args, **kwargs)

    return call


def _recurrent_in_dtype_of_input(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The same of a recurrent layer, whose weights are a list among its arguments, and its input packed."""

    @functools.wraps(function)
    def call(input: Any, *args: Any) -> Any:
        lengths = None
        if isinstance(input, packed_sequences.Steps):
            input, lengths, args = input.tensor, args[0].tensor, args[1:]
        weights = [t for value in args if isinstance(value, (list, tuple)) for t in value]
        dtypes = {input.dtype, *(t.dtype for t in weights)}
        narrow = next((dtype for dtype in _NARROW if dtypes == {torch.float32, dtype}), None)
        if narrow is not None:
            input, args = tree_map_only(torch.Tensor, _narrowing(narrow), (input, args))
        if lengths is not None:
            return packed_sequences.call_recurrent(name, input, lengths, *args)
        return function(input, *args)

    return call


def _all_narrow(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of tensors of which some are narrow: all floating ones are cast to that."""

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        dtypes = {t.dtype for t in tree_leaves(args) if isinstance(t, torch.Tensor)}
        narrow = next((dtype for dtype in _NARROW if dtypes == {torch.float32, dtype}), None)
        return function(*args if narrow is None else tree_map_only(torch.Tensor, _narrowing(narrow), args))

    return call


def _in_dtype_of_weight(function: Callable[..., torch.Tensor], place: int) -> Callable[..., torch.Tensor]:
    """A normalization whose input is cast to a narrower weight, the argument at some place."""

    @functools.wraps(function)
    def call(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        weight = kwargs.get("weight", args[place - 1] if len(args) >= place else None)
        if weight is not None and weight.dtype in _NARROW and input.dtype is torch.float32:
            input = input.to(weight.dtype)
        return function(input, *args, **kwargs)

    return call


def _narrowing(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor.to(dtype) if tensor.dtype is torch.float32 else tensor


def _check_input(self: Any, input: Any, batch_sizes: Any) -> None:
    if isinstance(input, packed_sequences.Steps):
        input, batch_sizes = input.tensor, None
    weight = self._flat_weights[0]
    is_cast = {input.dtype, weight.dtype} in ({torch.float32, narrow} for narrow in _NARROW)
    _check_recurrent(self, input.to(weight.dtype) if is_cast else input, batch_sizes)


_check_recurrent = torch.nn.RNNBase.check_input


_init_autocast = torch.autocast.__init__


def _make_autocast(
    self: torch.autocast,
    device_type: str,
    dtype: torch.dtype | None = None,
    enabled: bool = True,
    cache_enabled: bool | None = None,
) -> None:
    if isinstance(device_type, str) and device_type != "cpu":
        dtype = torch.get_autocast_dtype(device_type) if dtype is None else dtype
        device_type = "cpu"
    _init_autocast(self, device_type, dtype, enabled, cache_enabled)


def _telling_autocast(enter: Callable[[torch.autocast], Any]) -> Callable[[torch.autocast], Any]:
    """`torch.autocast.__enter__`, which warns of what is for no device that there is."""

    def begin(self: torch.autocast) -> Any:
        if self.device != "cpu":
            warn_once(
                f"torch.autocast({self.device!r}) has no effect on the model where it was made outside of "
                "its forward, as a decorator is. Make it in forward; or for the device 'cpu', which stands "
                "for any here."
            )
        return enter(self)

    return begin


def _seed(seed: Any) -> Any:
    del seed
    warn_once(
        "The model's forward sets a random seed, which has no effect: numbers are drawn on the devices, "
        "from Options.randomSeed."
    )
    return torch.default_generator


def _is_causal(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
    del mask, size
    return is_causal is True


def _replaced(owner: Any, name: str, substitute: Callable[..., Any]) -> Any:
    """A patch that counts where a model is being captured, and not in other threads."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def choose(*args: Any, **kwargs: Any) -> Any:
        chosen = original if markers.current_capture() is None else substitute
        return chosen(*args, **kwargs)

    return unittest.mock.patch.object(owner, name, choose)


_NORMALIZATIONS = {"layer_norm": 2, "group_norm": 2, "rms_norm": 2, "batch_norm": 3, "instance_norm": 3}
_WITH_WEIGHTS = (
    "linear",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
)


@contextlib.contextmanager
def exportable() -> Iterator[None]:
    """In the `with` block the functions are replaced, where a model is being captured."""
    functional, recurrent = torch.nn.functional, getattr(torch, "_VF")  # noqa: B009
    with contextlib.ExitStack() as stack:
        for name in ("multilabel_soft_margin_loss", "triplet_margin_with_distance_loss"):
            stack.enter_context(_replaced(functional, name, _as_loss(getattr(functional, name))))
        # These are so for all threads: they differ from torch's only where torch refuses. What torch.cond
        # traces may call them, and could not ask whether a model is being captured.
        patch = unittest.mock.patch.object
        for name in _WITH_WEIGHTS:
            cast = _in_dtype_of_input(getattr(functional, name))
            stack.enter_context(patch(functional, name, cast))
        for name in ("gru", "lstm", "rnn_relu", "rnn_tanh"):
            cast = _recurrent_in_dtype_of_input(name, getattr(recurrent, name))
            stack.enter_context(patch(recurrent, name, cast))
        stack.enter_context(_replaced(recurrent, "_pack_padded_sequence", packed_sequences.pack))
        pad = packed_sequences.padder(getattr(recurrent, "_pad_packed_sequence"))  # noqa: B009
        stack.enter_context(_replaced(recurrent, "_pad_packed_sequence", pad))
        for name, place in _NORMALIZATIONS.items():
            cast = _in_dtype_of_weight(getattr(functional, name), place)
            stack.enter_context(patch(functional, name, cast))
        for name in ("prelu", "bilinear"):
            stack.enter_context(patch(functional, name, _all_narrow(getattr(functional, name))))
        for name in ("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"):
            stack.enter_context(patch(recurrent, name, _all_narrow(getattr(recurrent, name))))
        stack.enter_context(_replaced(torch.autocast, "__init__", _make_autocast))
        stack.enter_context(
            _replaced(torch.autocast, "__enter__", _telling_autocast(torch.autocast.__enter__))
        )
        stack.enter_context(patch(torch.nn.RNNBase, "check_input", _check_input))
        stack.enter_context(_replaced(torch, "manual_seed", _seed))
        stack.enter_context(_replaced(torch, "ctc_loss", _ctc_loss))
        stack.enter_context(_replaced(functional, "gaussian_nll_loss", _as_loss(_gaussian_nll_loss)))
        stack.enter_context(_replaced(_functions, "multilabel_margin_loss", _multilabel_margin_loss))
        stack.enter_context(_replaced(_BatchNorm, "forward", _batch_norm))
        stack.enter_context(_replaced(transformer, "_detect_is_causal_mask", _is_causal))
        yield

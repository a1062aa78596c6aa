"""Replaces torch's own functions while a model is captured, so that models with them can be exported."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import math
import traceback
import unittest.mock
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._higher_order_ops.map import map_impl
from torch._higher_order_ops.scan import scan_op
from torch.nn.modules import batchnorm, transformer
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from ipu_pipeline.poptorch import markers
from ipu_pipeline.poptorch.logs import warn_once
from ipu_pipeline.poptorch.lowering import recurrent_layers
from ipu_pipeline.poptorch.lowering.interpreter import is_users

# Functions that read values of tensors, though their results do not need this: covariances warn of too few
# observations, least squares determine whether the matrix has full rank, slices read a place from a tensor,
# and combinations count the true elements of a mask.


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
    covariances = (deviation * weights) @ deviation.mH / divisor.clamp(min=0)
    return covariances.squeeze()


def _corrcoef(input: torch.Tensor) -> torch.Tensor:
    covariance = _cov(input)
    if covariance.numel() == 1:
        return covariance.reshape(()) / covariance.reshape(())
    root = covariance.diagonal().sqrt().real
    coefficients = covariance / root.unsqueeze(1) / root
    if coefficients.is_complex():
        return torch.complex(coefficients.real.clamp(-1, 1), coefficients.imag.clamp(-1, 1))
    return coefficients.clamp(-1, 1)


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
    """Returns the CPU for "ipu", where PopTorch has a model's tensors; any other value unchanged."""
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


# Losses.

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
    """Computes `torch.ctc_loss`, which has no shape inference, by an operation of ours."""
    lengths = [torch.as_tensor(values, dtype=torch.int64) for values in (input_lengths, target_lengths)]
    operation = torch.ops.ipu_poptorch.ctc_loss
    loss: torch.Tensor = operation(log_probs, targets, *lengths, blank, reduction, zero_infinity)
    return loss


def _gaussian_nll_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    var: torch.Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> torch.Tensor:
    """Computes the loss without reading variances: negative ones give NaN, where torch raises."""
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
            length for length, size in zip(var.shape, input.shape, strict=True) if length != size
        ] != [1]:
            raise ValueError("var is of incorrect size")
    # As in torch, the gradient passes where the variance is raised to eps.
    raised = var + (var.clamp(min=eps) - var).detach()
    raised = torch.where(var < 0, math.nan, raised)
    loss = 0.5 * (torch.log(raised) + (input - target) ** 2 / raised)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss


_functions: Any = torch._C._nn  # noqa: SLF001  # torch.nn.functional calls these
_margin_loss = _functions.multilabel_margin_loss


def _multilabel_margin_loss(input: torch.Tensor, target: torch.Tensor, reduction: int) -> torch.Tensor:
    """Makes the losses of one row a scalar, as they are in torch, but not by its shape inference."""
    loss: torch.Tensor = _margin_loss(input, target, reduction)
    return loss.reshape(input.shape[:-1]) if reduction == 0 else loss


def _as_loss(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Marks a loss of torch that is made of other operations as a loss."""

    @functools.wraps(function)
    def marked(*args: Any, **kwargs: Any) -> torch.Tensor:
        return markers.reduce_loss(function(*args, **kwargs), "none")

    return marked


# Layers. They compute in the dtype of their input, and change nothing that is not a buffer.

# The base class of all batch normalizations.
_BatchNorm: type[torch.nn.Module] = vars(batchnorm)["_BatchNorm"]
_normalize = _BatchNorm.forward


def _batch_norm(self: Any, input: torch.Tensor) -> torch.Tensor:
    """Normalizes without the count that momentum None divides by, which torch reads from a tensor."""
    mean, var, count = self.running_mean, self.running_var, self.num_batches_tracked
    if self.momentum is not None or not self.training or mean is None or var is None or count is None:
        return _normalize(self, input)
    self._check_input_dim(input)
    # With momentum 1 the running statistics become the batch's. Then they move by 1 / count.
    of_batch = mean.clone(), var.clone()
    result = torch.nn.functional.batch_norm(input, *of_batch, self.weight, self.bias, True, 1.0, self.eps)
    count.add_(1)
    for running, new in zip((mean, var), of_batch, strict=True):
        running.add_((new - running) / count.to(running.dtype))
    return result


_NARROW = (torch.float16, torch.bfloat16)


def _are_mixed(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Whether one of two dtypes is float32, and the other a narrow one or float64."""
    mixable = (*_NARROW, torch.float64)
    return (dtype is torch.float32 and other in mixable) or (other is torch.float32 and dtype in mixable)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Casts a weight to the dtype of an input, if they are mixed. Other values are returned unchanged."""
    return value.to(dtype) if isinstance(value, torch.Tensor) and _are_mixed(value.dtype, dtype) else value


def _in_dtype_of_input(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a layer's function cast its other arguments to the dtype of its first one."""

    @functools.wraps(function)
    def call(input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        weights = [_cast(value, input.dtype) for value in args]
        return function(input, *weights, **{k: _cast(value, input.dtype) for k, value in kwargs.items()})

    return call


def _recurrent_in_dtype_of_input(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Does the same for a recurrent layer, which also has lists as arguments, and maybe packed input."""

    @functools.wraps(function)
    def call(input: Any, *args: Any) -> Any:
        lengths = None
        if isinstance(input, recurrent_layers.Steps):
            input, lengths, args = input.tensor, args[0].tensor, args[1:]
        args = tree_map_only(torch.Tensor, functools.partial(_cast, dtype=input.dtype), args)
        if lengths is not None:
            return recurrent_layers.call_recurrent(name, input, lengths, *args)
        return function(input, *args)

    return call


def _normalizing_in_dtype_of_input(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Makes a normalization cast its weights to an input of float32 or float64.

    torch itself accepts a narrow input with weights of float32. Running statistics keep their dtype.
    """
    names = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> torch.Tensor:
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        dtype = arguments[names[0]].dtype
        if dtype in _NARROW:
            return function(**arguments)
        wide = {name: _cast(value, dtype) for name, value in arguments.items()}
        result = function(**wide)
        if arguments.get("training") or arguments.get("use_input_stats"):
            for name in ("running_mean", "running_var"):
                if arguments.get(name) is not wide.get(name):
                    arguments[name].copy_(wide[name].to(arguments[name].dtype))
        return result

    return call


def _check_input(self: Any, input: Any, batch_sizes: Any) -> None:
    if isinstance(input, recurrent_layers.Steps):
        input, batch_sizes = input.tensor, None
    weight = self._flat_weights[0]
    _check_recurrent(self, _cast(input, weight.dtype), batch_sizes)


_check_recurrent = torch.nn.RNNBase.check_input


def _flat_weights(self: Any) -> list[torch.Tensor]:
    """Reads the weights anew: torch renews a list of them in forward, but a loop's body changes nothing."""
    return [getattr(self, name) for name in self._flat_weights_names]


def _set_flat_weights(self: Any, weights: Any) -> None:
    vars(self)["_flat_weights"] = weights


def _keep_flat_weights(self: Any) -> None:
    del self


# Contexts: dtypes, random numbers, lines of code, distributions.

_init_autocast = torch.autocast.__init__


def _make_autocast(
    self: torch.autocast,
    device_type: str,
    dtype: torch.dtype | None = None,
    enabled: bool = True,
    cache_enabled: bool | None = None,
) -> None:
    """Makes `torch.autocast` for any kind of device apply to the devices that are used."""
    if isinstance(device_type, str) and device_type != "cpu":
        dtype = torch.get_autocast_dtype(device_type) if dtype is None else dtype
        device_type = "cpu"
    _init_autocast(self, device_type, dtype, enabled, cache_enabled)


def _warning_autocast(enter: Callable[[torch.autocast], Any]) -> Callable[[torch.autocast], Any]:
    """Makes `torch.autocast.__enter__` warn if it is for a device that is not used."""

    def begin(self: torch.autocast) -> Any:
        if self.device != "cpu":
            warn_once(
                f"torch.autocast({self.device!r}) has no effect on the model if it was made outside of "
                "its forward, as a decorator is. Make it in forward, or for the device 'cpu', which stands "
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


def _keep_users_frames(tracer: Any, frames: traceback.StackSummary) -> traceback.StackSummary:
    """Keeps all of the user's lines that an operation comes from; torch those in functions "forward"."""
    del tracer
    within = itertools.dropwhile(lambda frame: frame.name != "forward", frames)
    return traceback.StackSummary.from_list(frame for frame in within if is_users(frame.filename))


_make_distribution = torch.distributions.Distribution.__init__


def _make_unvalidated(
    self: torch.distributions.Distribution,
    batch_shape: torch.Size = torch.Size(),  # noqa: B008  # as torch has it
    event_shape: torch.Size = torch.Size(),  # noqa: B008
    validate_args: bool | None = None,
) -> None:
    """Leaves out checks of values, unless the model asks for them (`validate_args=True`)."""
    _make_distribution(self, batch_shape, event_shape, bool(validate_args))


def _validate_nothing(self: torch.distributions.Distribution, value: torch.Tensor) -> None:
    del self, value


def _is_causal(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
    """Uses the mask as it is. torch compares it with a causal one, only as a hint for faster code."""
    del mask, size
    return is_causal is True


# Questions whether a model is compiled or exported.
#
# torch's functions have their code while a model is captured, and stay the same objects: models may have
# imported them, and code that torch.cond traces may call them. The code runs in the module torch.compiler.


def _is_compiling() -> bool:
    from ipu_pipeline.poptorch.lowering import askers

    return torch.compiler._is_compiling_flag and askers.is_told_of_compiling()  # noqa: SLF001


def _is_exporting() -> bool:
    from ipu_pipeline.poptorch.lowering import askers

    return torch.compiler._is_exporting_flag and askers.is_told_of_exporting()  # noqa: SLF001


_CODES: Mapping[Any, Any] = {
    torch.compiler.is_compiling: _is_compiling,
    torch.compiler.is_exporting: _is_exporting,
}

# Patches.

_AUTOGRAD = torch._C.DispatchKey.Autograd  # noqa: SLF001  # torch gives it no other name


@contextlib.contextmanager
def _without_backward(operation: Any) -> Iterator[None]:
    """Stops torch's scan and map from building a backward while a model is captured.

    JAX differentiates them. torch's own backward has none for integers in the state or among the results.
    """
    differentiate = operation.py_kernels[_AUTOGRAD]

    def call(*operands: Any, **options: Any) -> Any:  # torch 2.14 gives options
        if not markers.is_captured():
            return differentiate(*operands, **options)
        with torch._C._AutoDispatchBelowAutograd():  # noqa: SLF001
            return operation(*operands, **options)

    def use(kernel: Any) -> None:
        operation.py_kernels[_AUTOGRAD] = kernel
        operation._dispatch_cache.clear()  # noqa: SLF001

    use(call)
    try:
        yield
    finally:
        use(differentiate)


def _replaced(owner: Any, name: str, substitute: Callable[..., Any]) -> Any:
    """Makes a patch that acts where a model is being captured, and not in other threads."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def choose(*args: Any, **kwargs: Any) -> Any:
        chosen = substitute if markers.is_captured() else original
        return chosen(*args, **kwargs)

    return unittest.mock.patch.object(owner, name, choose)


_NORMALIZATIONS = ("layer_norm", "group_norm", "rms_norm", "batch_norm", "instance_norm")
_WITH_WEIGHTS = (
    "bilinear",
    "linear",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "prelu",
)

_RECURRENT = [
    f"{name}{suffix}" for name in ("gru", "lstm", "rnn_relu", "rnn_tanh") for suffix in ("", "_cell")
]


@contextlib.contextmanager
def exportable() -> Iterator[None]:
    """Replaces the functions in the `with` block, where a model is being captured."""
    functional, recurrent = torch.nn.functional, getattr(torch, "_VF")  # noqa: B009
    with contextlib.ExitStack() as stack:
        for name in ("multilabel_soft_margin_loss", "triplet_margin_with_distance_loss"):
            stack.enter_context(_replaced(functional, name, _as_loss(getattr(functional, name))))
        # These apply to all threads: they differ from torch's only where torch refuses. Code that
        # torch.cond traces may call them, and could not ask whether a model is being captured.
        patch = unittest.mock.patch.object
        for name in _WITH_WEIGHTS:
            cast = _in_dtype_of_input(getattr(functional, name))
            stack.enter_context(patch(functional, name, cast))
        for name in _RECURRENT:
            cast = _recurrent_in_dtype_of_input(name, getattr(recurrent, name))
            stack.enter_context(patch(recurrent, name, cast))
        stack.enter_context(_replaced(recurrent, "_pack_padded_sequence", recurrent_layers.pack))
        pad = recurrent_layers.padder(getattr(recurrent, "_pad_packed_sequence"))  # noqa: B009
        stack.enter_context(_replaced(recurrent, "_pad_packed_sequence", pad))
        for name in _NORMALIZATIONS:
            cast = _normalizing_in_dtype_of_input(getattr(functional, name))
            stack.enter_context(patch(functional, name, cast))
        stack.enter_context(_replaced(torch.autocast, "__init__", _make_autocast))
        stack.enter_context(
            _replaced(torch.autocast, "__enter__", _warning_autocast(torch.autocast.__enter__))
        )
        recurrent_layer = torch.nn.RNNBase
        stack.enter_context(patch(recurrent_layer, "check_input", _check_input))
        flat = property(_flat_weights, _set_flat_weights)
        stack.enter_context(patch(recurrent_layer, "_flat_weights", flat, create=True))
        stack.enter_context(patch(recurrent_layer, "_update_flat_weights", _keep_flat_weights))
        stack.enter_context(_replaced(torch, "manual_seed", _seed))
        stack.enter_context(_replaced(torch, "ctc_loss", _ctc_loss))
        stack.enter_context(_replaced(functional, "gaussian_nll_loss", _as_loss(_gaussian_nll_loss)))
        stack.enter_context(_replaced(_functions, "multilabel_margin_loss", _multilabel_margin_loss))
        stack.enter_context(_replaced(_BatchNorm, "forward", _batch_norm))
        for operation in (scan_op, map_impl):
            stack.enter_context(_without_backward(operation))
        stack.enter_context(
            _replaced(torch.fx.proxy.TracerBase, "_filter_traceback_frames", _keep_users_frames)
        )
        distribution = torch.distributions.Distribution
        stack.enter_context(_replaced(distribution, "__init__", _make_unvalidated))
        stack.enter_context(_replaced(distribution, "_validate_sample", _validate_nothing))
        stack.enter_context(_replaced(transformer, "_detect_is_causal_mask", _is_causal))
        for function, substitute in _CODES.items():
            stack.callback(setattr, function, "__code__", function.__code__)
            function.__code__ = substitute.__code__
        yield

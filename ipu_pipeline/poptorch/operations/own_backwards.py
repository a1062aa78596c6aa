"""Puts a `torch.autograd.Function` into a graph: its forward's operations, then one with its backward.

That operation returns the forward's results. Its gradients by the function's arguments are computed by
`backward`, which is a graph of its own. It has no other gradients.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ipu_pipeline.poptorch import markers
from ipu_pipeline.poptorch.errors import Error
from ipu_pipeline.poptorch.structures import Structure, flatten

WITH_BACKWARD = f"{markers.NAMESPACE}::with_backward"

# `setup_context` of a function that does not define it: its forward takes the context.
_LEFT_OUT = torch.autograd.Function.setup_context


class Context:
    """The context of a function's `forward` and `backward`, with torch's attributes and the user's.

    Attributes:
      needs_input_grad: for each argument, whether it is a tensor that has a gradient.
      saved_tensors: the arguments of `save_for_backward`.
    """

    def __init__(self, name: str, needs_input_grad: tuple[bool, ...]) -> None:
        """Takes the function's name, and which of its arguments have gradients."""
        self._name = name
        self._constant_results: tuple[Any, ...] = ()
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        """Keeps tensors, and None, as `saved_tensors`."""
        self.saved_tensors = tensors

    def save_for_forward(self, *tensors: Any) -> None:
        """Does nothing: gradients are computed backwards."""

    def mark_non_differentiable(self, *results: torch.Tensor) -> None:
        """Marks results without a gradient: `backward` gets zeros for them."""
        self._constant_results = results

    def set_materialize_grads(self, value: bool) -> None:
        """Does nothing: `backward` always gets zeros where there is no gradient, as in JAX."""

    def mark_dirty(self, *_args: torch.Tensor) -> None:
        """Raises an Error, because functions may not write to arguments."""
        raise Error(
            f"{self._name} is a torch.autograd.Function that changes its arguments (mark_dirty). Compute "
            "on a copy (argument.clone()), and return that."
        )

    def has_gradient(self, result: torch.Tensor) -> bool:
        """Whether a result has a gradient."""
        return result.is_floating_point() and all(result is not value for value in self._constant_results)

    def take_apart(self) -> tuple[list[torch.Tensor], Structure]:
        """Returns the tensors that are kept, and the rest; see `with_parts`."""
        return flatten({name: value for name, value in vars(self).items() if name != "_constant_results"})

    def with_parts(self, parts: dict[str, Any]) -> Context:
        """Returns a context with other tensors."""
        context = copy.copy(self)
        vars(context).update(parts)
        return context


class OwnBackward(torch.nn.Module):
    """The backward of one call of a function, as a module from tensors to tensors.

    Attributes:
      name: the function's name.
      examples: example arguments of `forward`: the kept tensors, then the gradients by the results.
      differentiable: which of the results have a gradient.
      program: `forward` as a functional graph; None before capture, and for inference.
    """

    def __init__(
        self,
        function: type[torch.autograd.Function],
        context: Context,
        args: Sequence[Any],
        results: Sequence[torch.Tensor],
        num_results: int,
        places: Sequence[int],
    ) -> None:
        """Describes a call."""
        super().__init__()
        self.name = function.__name__
        self._function, self._num_results, self._places = function, num_results, list(places)
        saved, self._structure = context.take_apart()
        self._context = context
        self.num_kept = len(saved)
        self.examples = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in (*saved, *results)]
        self.differentiable = [context.has_gradient(result) for result in results]
        self._inputs = [(tuple(arg.shape), arg.dtype) if _varies(arg) else None for arg in args]
        self.program: torch.export.ExportedProgram | None = None

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Computes the gradients by the arguments that are floating-point tensors."""
        copies = [tensor.clone() for tensor in tensors]  # the backward may write to them
        context = self._context.with_parts(self._structure.unflatten(copies[: self.num_kept]))
        gradients: list[Any] = [None] * self._num_results
        for place, gradient in zip(self._places, copies[self.num_kept :], strict=True):
            gradients[place] = gradient
        cotangents: Any = self._function.backward(context, *gradients)
        cotangents = cotangents if isinstance(cotangents, (tuple, list)) else (cotangents,)
        if len(cotangents) < len(self._inputs) or any(
            extra is not None for extra in cotangents[len(self._inputs) :]
        ):
            raise Error(
                f"The backward of {self.name} returns {len(cotangents)} gradients; its forward takes "
                f"{len(self._inputs)} arguments. Return one for each, None for those without."
            )
        pairs = zip(cotangents, self._inputs, strict=False)
        return tuple(
            self._fit(gradient, number, *kind)
            for number, (gradient, kind) in enumerate(pairs)
            if kind is not None
        )

    def _fit(
        self, gradient: torch.Tensor | None, number: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        if gradient is None:
            return torch.zeros(shape, dtype=dtype)
        try:
            fits = torch.broadcast_shapes(tuple(gradient.shape), shape) == tuple(gradient.shape)
        except RuntimeError:
            fits = False
        if not fits:
            raise Error(
                f"The backward of {self.name} returns a gradient of shape {tuple(gradient.shape)} for "
                f"argument {number}, whose shape is {shape}."
            )
        return gradient.sum_to_size(shape).to(dtype)


def apply(function: type[torch.autograd.Function], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Computes `function.apply(*args, **kwargs)` while a model is captured."""
    has_setup = function.setup_context is not _LEFT_OUT
    leading = () if has_setup else (None,)
    args = inspect.signature(function.forward).bind(*leading, *args, **kwargs).args[len(leading) :]
    context = Context(function.__name__, tuple(torch.is_grad_enabled() and _varies(arg) for arg in args))
    if has_setup:
        returned: Any = function.forward(*args)
        function.setup_context(context, args, returned)
    else:
        returned = function.forward(context, *args)
    values = list(returned) if isinstance(returned, (tuple, list)) else [returned]
    places = [number for number, value in enumerate(values) if isinstance(value, torch.Tensor)]
    results = [values[place] for place in places]
    if not results:
        raise Error(f"The forward of {function.__name__}, a torch.autograd.Function, returns no tensor.")
    backward = OwnBackward(function, context, args, results, len(values), places)
    capture = markers.current_capture()
    assert capture is not None
    capture.held.append(backward)
    key = f"{backward.name}#{id(backward):x}"
    _backwards[key] = backward
    varied = [arg for arg in args if _varies(arg)]
    outputs = _OPERATIONS.with_backward(results, varied, context.take_apart()[0], key)
    for place, result in zip(places, outputs, strict=True):
        values[place] = result
    return tuple(values) if isinstance(returned, (tuple, list)) else values[0]


def find(key: str) -> OwnBackward:
    """Finds the backward of a key, which lives as long as the captured model."""
    return _backwards[key]


def _varies(arg: Any) -> bool:
    return isinstance(arg, torch.Tensor) and (arg.is_floating_point() or arg.is_complex())


def _copy(
    results: list[torch.Tensor], inputs: list[torch.Tensor], saved: list[torch.Tensor], key: str
) -> list[torch.Tensor]:
    del inputs, saved, key
    return [result.clone() for result in results]


def _refuse(context: Any, *gradients: Any) -> Any:
    del gradients
    raise Error(
        f"{context.name} is a torch.autograd.Function, and forward itself computes gradients through it "
        "(torch.autograd.grad). Write it with torch's operations instead."
    )


def _note_name(ctx: Any, inputs: Any, output: Any) -> None:
    del output
    ctx.name = inputs[-1].rpartition("#")[0]


_backwards: weakref.WeakValueDictionary[str, OwnBackward] = weakref.WeakValueDictionary()
_library = torch.library.Library(markers.NAMESPACE, "FRAGMENT")
_library.define("with_backward(Tensor[] results, Tensor[] inputs, Tensor[] kept, str key) -> Tensor[]")
_library.impl("with_backward", _copy, "CompositeExplicitAutograd")
torch.library.register_autograd(WITH_BACKWARD, _refuse, setup_context=_note_name, lib=_library)
_OPERATIONS = getattr(torch.ops, markers.NAMESPACE)

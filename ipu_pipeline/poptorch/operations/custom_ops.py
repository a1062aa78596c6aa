"""Custom operations within models."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
import torch

from ipu_pipeline.poptorch import markers
from ipu_pipeline.poptorch.dtypes import jax_dtype, to_numpy, to_torch
from ipu_pipeline.poptorch.errors import Error
from ipu_pipeline.poptorch.operations.checks import check_outside
from ipu_pipeline.poptorch.operations.custom_registry import CustomOperation, find_custom_op

__all__ = ["CUSTOM", "CustomCall", "custom_op"]

CUSTOM = f"{markers.NAMESPACE}::custom_op"
_KINDS = (int, float, str)
Array = Any


def custom_op(
    inputs: list[torch.Tensor] | tuple[torch.Tensor, ...],
    name: str,
    domain: str,
    domain_version: int,
    example_outputs: Sequence[torch.Tensor],
    attributes: dict[str, Any] | None = None,
) -> list[torch.Tensor]:
    """Computes an operation of `register_custom_op`. In a forward on the CPU, JAX computes it there.

    An operation has no effect but its results, and is left out if nobody reads them, with a warning. One
    that writes to inputs is registered with `writes=`.

    Args:
      inputs: a list of at least one tensor.
      name: the name of the operation.
      domain: the domain of the name.
      domain_version: the version of the domain.
      example_outputs: tensors of the shapes and dtypes of the results; their values do not matter.
      attributes: floats, integers, strings, and lists of one of these, by name. Tuples become lists.

    Returns:
      The results.

    Raises:
      Error: no such operation is registered, or it returns something else.
      ValueError: an argument is not as described, or the operation writes to an input of another shape than
        its result, or to one that is not there.
    """
    check_outside("custom_op")
    whole: dict[str, Any] = {"inputs": inputs, "example_outputs": example_outputs}
    for what, given in whole.items():
        if isinstance(given, torch.Tensor):
            raise ValueError(f"custom_op: {what} must be a list of tensors; got a tensor. Write [tensor].")
    inputs, examples = list(inputs), list(example_outputs)
    for what, tensors in (("inputs", inputs), ("example_outputs", examples)):
        if not tensors or not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
            raise ValueError(f"custom_op: {what} must be a list of tensors, at least one.")
    attributes = _check_attributes({} if attributes is None else attributes)
    operation = find_custom_op(domain, name, domain_version)
    _check_writes(operation, inputs, examples)
    results = [(str(t.dtype).removeprefix("torch."), list(t.shape)) for t in examples]
    key = json.dumps([domain, name, domain_version])
    made: list[torch.Tensor] = _OPERATIONS.custom_op(
        inputs, key, json.dumps(results), json.dumps(attributes)
    )
    for number, result in zip(operation.writes, made, strict=False):
        inputs[number].copy_(result.detach())
    return list(made)


def _check_writes(
    operation: CustomOperation, inputs: Sequence[torch.Tensor], examples: Sequence[torch.Tensor]
) -> None:
    given = [tuple(tensor.shape) for tensor in inputs]
    for number, shape in itertools.zip_longest(operation.writes, (tuple(e.shape) for e in examples)):
        if number is not None and (shape is None or number >= len(given) or given[number] != shape):
            raise ValueError(
                f"custom_op: {operation.label} is registered with writes={list(operation.writes)}: each of "
                "these inputs must have the shape of the result that is written to it. The inputs have the "
                f"shapes {given}, the example_outputs {[tuple(e.shape) for e in examples]}."
            )


def _check_attributes(attributes: Any) -> dict[str, Any]:
    if not isinstance(attributes, dict):
        raise ValueError(f"custom_op: attributes must be a dict; got {type(attributes).__name__}.")
    for key, value in attributes.items():
        if not isinstance(key, str):
            raise ValueError(f"All attribute keys must be strings. One is {key!r}.")
        parts = list(value) if isinstance(value, (list, tuple)) else [value]
        if not all(isinstance(part, _KINDS) for part in parts):
            raise ValueError(
                "Attribute values must be floats, ints, strings or lists/tuples of these. "
                f"{key!r} is {value!r}."
            )
        if len({next(kind for kind in _KINDS if isinstance(part, kind)) for part in parts}) > 1:
            raise ValueError(
                f"The types in a list/tuple attribute must all be the same. {key!r} is {value!r}."
            )
        for text in [key, *(part for part in parts if isinstance(part, str))]:
            if not text.isascii():
                raise ValueError(f"Attribute {key!r}: {text!r} contains non-ASCII characters.")
    return attributes


@dataclass(frozen=True)
class CustomCall:
    """A call of a custom operation, without its inputs.

    Attributes:
      operation: the operation.
      results: the shapes of its results.
      dtypes: the dtypes of its results.
      attributes: the attributes, by name.
    """

    operation: CustomOperation
    results: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    attributes: dict[str, Any]

    @classmethod
    def read(cls, key: str, results: str, attributes: str) -> Self:
        """Reads what `custom_op` wrote."""
        kinds = json.loads(results)
        shapes = tuple(tuple(shape) for _dtype, shape in kinds)
        dtypes = tuple(getattr(torch, dtype) for dtype, _shape in kinds)
        return cls(find_custom_op(*json.loads(key)), shapes, dtypes, json.loads(attributes))

    def compute(self, inputs: Sequence[Array]) -> list[Array]:
        """Computes the results by JAX, with the gradient that was registered."""
        if self.operation.vjp is None and not self.operation.is_foreign:
            return self._compute_plainly(*inputs)

        @jax.custom_vjp
        def computed(*inputs: Array) -> list[Array]:
            return self._compute_plainly(*inputs)

        def forward(*inputs: Array) -> tuple[list[Array], Any]:
            results = self._compute_plainly(*inputs)
            return results, (inputs, tuple(results))

        def backward(saved: Any, gradients: Sequence[Array]) -> tuple[Any, ...]:
            given, results = saved
            return self._differentiate(given, results, tuple(gradients))

        computed.defvjp(forward, backward)
        return computed(*inputs)

    def _compute_plainly(self, *inputs: Array) -> list[Array]:
        kinds = zip(self.results, self.dtypes, strict=True)
        shapes = [jax.ShapeDtypeStruct(shape, jax_dtype(dtype)) for shape, dtype in kinds]
        made = self.operation.compute(inputs, shapes, self.attributes)
        values = list(made) if isinstance(made, (list, tuple)) else [made]
        try:
            arrays = [jnp.asarray(value) for value in values]
        except (TypeError, ValueError) as error:
            raise Error(
                f"Custom operation {self.operation.label} must return a JAX array for each of its "
                f"example_outputs; it returned {[type(value).__name__ for value in values]}."
            ) from error
        if [array.shape for array in arrays] != list(self.results):
            raise Error(
                f"Custom operation {self.operation.label} returned arrays of shapes "
                f"{[array.shape for array in arrays]}; its example_outputs have {list(self.results)}."
            )
        return [array.astype(shape.dtype) for array, shape in zip(arrays, shapes, strict=True)]

    def _differentiate(
        self, inputs: tuple[Array, ...], results: tuple[Array, ...], gradients: tuple[Array, ...]
    ) -> tuple[Any, ...]:
        vjp, label = self.operation.vjp, self.operation.label
        if vjp is None:
            raise Error(
                f"Custom operation {label} is from a library, and has no gradient. Give register_custom_op "
                "vjp=, a function that computes it; or detach the inputs."
            )
        found = vjp(inputs, results, gradients, **self.attributes)
        found = tuple(found) if isinstance(found, (list, tuple)) else (found,)
        shapes = [None if gradient is None else jnp.shape(gradient) for gradient in found]
        if len(found) != len(inputs) or any(
            shape not in (None, array.shape) for shape, array in zip(shapes, inputs, strict=True)
        ):
            raise Error(
                f"The vjp of custom operation {label} returned gradients of shapes {shapes}; the inputs "
                f"have {[array.shape for array in inputs]}."
            )
        return tuple(
            None
            if gradient is None or not jnp.issubdtype(array.dtype, jnp.floating)
            else jnp.asarray(gradient).astype(array.dtype)
            for gradient, array in zip(found, inputs, strict=True)
        )


def _on_cpu() -> Any:
    return jax.default_device(jax.local_devices(backend="cpu")[0])


def _compute_on_cpu(
    inputs: list[torch.Tensor], key: str, results: str, attributes: str
) -> list[torch.Tensor]:
    call = CustomCall.read(key, results, attributes)
    with _on_cpu(), jax.numpy_dtype_promotion("standard"):
        made = call.compute([jnp.asarray(to_numpy(tensor.contiguous())) for tensor in inputs])
        return [to_torch(array, dtype) for array, dtype in zip(made, call.dtypes, strict=True)]


def _shapes(inputs: list[torch.Tensor], key: str, results: str, attributes: str) -> list[torch.Tensor]:
    call = CustomCall.read(key, results, attributes)
    device = inputs[0].device
    kinds = zip(call.results, call.dtypes, strict=True)
    return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in kinds]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    del output
    tensors, *ctx.call = inputs
    ctx.save_for_backward(*tensors)


def _backward_on_cpu(ctx: Any, gradients: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
    call, tensors = CustomCall.read(*ctx.call), ctx.saved_tensors
    varied = [number for number, tensor in enumerate(tensors) if tensor.is_floating_point()]
    with _on_cpu(), jax.numpy_dtype_promotion("standard"):
        arrays = [jnp.asarray(to_numpy(tensor.contiguous())) for tensor in tensors]

        def compute(*floats: Array) -> list[Array]:
            given = dict(zip(varied, floats, strict=True))
            made = call.compute([given.get(number, array) for number, array in enumerate(arrays)])
            kinds = zip(made, call.dtypes, strict=True)
            return [array for array, dtype in kinds if dtype.is_floating_point]

        made, transpose = jax.vjp(compute, *(arrays[number] for number in varied))
        by_results = [g for g, dtype in zip(gradients, call.dtypes, strict=True) if dtype.is_floating_point]
        given = [
            jnp.zeros_like(array) if gradient is None else jnp.asarray(to_numpy(gradient.contiguous()))
            for gradient, array in zip(by_results, made, strict=True)
        ]
        found: list[torch.Tensor | None] = [None] * len(tensors)
        for number, gradient in zip(varied, transpose(given), strict=True):
            found[number] = to_torch(gradient, tensors[number].dtype)
    return found, None, None, None


_library = torch.library.Library(markers.NAMESPACE, "FRAGMENT")
_library.define("custom_op(Tensor[] inputs, str key, str results, str attributes) -> Tensor[]")
_library.impl("custom_op", _compute_on_cpu, "CPU")
_library.impl("custom_op", _shapes, "Meta")
torch.library.register_autograd(CUSTOM, _backward_on_cpu, setup_context=_save, lib=_library)
_OPERATIONS = getattr(torch.ops, markers.NAMESPACE)

"""Operations of the user within models: functions of JAX, or of a shared library that XLA calls."""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import torch

from ipu_pipeline import engine
from ipu_pipeline.ground.checks import is_int
from ipu_pipeline.poptorch import markers
from ipu_pipeline.poptorch.dtypes import to_numpy, to_torch
from ipu_pipeline.poptorch.errors import Error
from ipu_pipeline.poptorch.operations.checks import Check, check_outside, instance
from ipu_pipeline.poptorch.operations.host_calls import Kind

Array = Any  # of JAX
Attributes = Mapping[str, Any]
Compute = Callable[..., Any]


@dataclass(frozen=True)
class CustomOperation:
    """A registered operation.

    Attributes:
      domain: the domain of its name.
      name: the name of the operation.
      version: the version of the domain.
      compute: takes inputs, the results' shapes and dtypes, and attributes; returns one array or several.
      vjp: its gradient, see `register_custom_op`; None for the gradient of `compute`.
      writes: the numbers of the inputs that it writes its first results to.
      is_foreign: whether JAX cannot differentiate `compute`.
    """

    domain: str
    name: str
    version: int
    compute: Callable[[Sequence[Array], Sequence[jax.ShapeDtypeStruct], Attributes], Any]
    vjp: Compute | None
    writes: tuple[int, ...]
    is_foreign: bool

    @property
    def label(self) -> str:
        """Its name in errors."""
        return f"{self.name!r} of domain {self.domain!r}, version {self.version}"


# The registry.

_registered: dict[tuple[str, str, int], CustomOperation] = {}
_libraries: list[ctypes.CDLL] = []  # loaded for as long as the process lives
_targets = itertools.count()


def register_custom_op(
    domain: str,
    name: str,
    version: int,
    function: Compute | None = None,
    *,
    vjp: Compute | None = None,
    writes: Sequence[int] = (),
    library: str | Path | None = None,
    symbol: str | None = None,
    platform: str = "cpu",
) -> Any:
    """Sets what `custom_op` computes for a name: a function of JAX, or one of a shared library.

    It applies to models that are compiled afterwards. The same name again replaces it.

    Args:
      domain: the domain, as in `custom_op`.
      name: the operation's name, as in `custom_op`.
      version: the version of the domain, `domain_version` in `custom_op`.
      function: takes the inputs as JAX arrays, one after another, and the attributes as keywords; returns
        an array or several in a tuple or list, of the shapes of `example_outputs`. They are cast to its
        dtypes. If None without a library, `register_custom_op(domain, name, version)` is a decorator.
      vjp: its gradient: takes a tuple of the inputs, a tuple of the results, a tuple of the gradients by
        the results, and the attributes as keywords; returns a tuple of the gradients by the inputs, None
        for inputs without one. If None, JAX differentiates the function; a library's has no gradient.
      writes: the numbers of the inputs that the operation writes to, as PopART's may: the first result
        becomes the value of the first of these inputs, and so on. They are buffers, inputs of the model,
        parameters that need no gradient, or what forward computed.
      library: a shared library, in place of `function`, with a handler of XLA's foreign function
        interface. Attributes arrive as float, std::int64_t, xla::ffi::Span of these, std::string_view,
        and lists of strings as dictionaries with the keys "0", "1", ...
      symbol: the name of the handler in the library; None for `name`.
      platform: the JAX platform that the handler is for.

    Returns:
      The function, None for a library's, or the decorator.

    Raises:
      TypeError: an argument is of a wrong type.
      ValueError: arguments for both a function and a library are given, or the library has no such symbol.
      OSError: there is no such library.

    Example:
      poptorch.register_custom_op("com.acme", "Cube", 1, lambda x, bias: (x**3, x**3 + bias))
    """
    # Arguments.
    for label, text in (("domain", domain), ("name", name)):
        instance(str, "a string", TypeError)(f"register_custom_op: {label}", text)
    Check("an integer", is_int, error=TypeError)("register_custom_op: version", version)
    for label, callback in (("function", function), ("vjp", vjp)):
        if callback is not None and not callable(callback):
            raise TypeError(f"register_custom_op: {label} must be callable; got {type(callback).__name__}.")
    if not isinstance(writes, Sequence) or not all(is_int(number, 0) for number in writes):
        raise TypeError(f"register_custom_op: writes must be a list of numbers of inputs; got {writes!r}.")
    # A function of a library, or of Python.
    key = domain, name, version
    if library is not None:
        if function is not None:
            raise ValueError("register_custom_op: give a function or a library, not both.")
        target = _load_target(domain, name, Path(library), symbol or name, platform)
        _registered[key] = CustomOperation(*key, _from_library(target), vjp, tuple(writes), is_foreign=True)
        return None
    if symbol is not None:
        raise ValueError("register_custom_op: symbol is a name in a library, and there is no library.")
    if function is None:
        return lambda compute: register_custom_op(domain, name, version, compute, vjp=vjp, writes=writes)
    _registered[key] = CustomOperation(*key, _from_python(function), vjp, tuple(writes), is_foreign=False)
    return function


def find_custom_op(domain: str, name: str, version: int) -> CustomOperation:
    """Finds the operation of a name."""
    operation = _registered.get((domain, name, version))
    if operation is None:
        labels = "; ".join(sorted(f"{n!r} of {d!r}, version {v}" for d, n, v in _registered)) or "none"
        raise Error(
            f"There is no custom operation {name!r} of domain {domain!r}, version {version}. Registered by "
            f"poptorch.register_custom_op are: {labels}."
        )
    return operation


def _load_target(domain: str, name: str, library: Path, symbol: str, platform: str) -> str:
    """Makes an XLA target that calls a function of a library, and returns its name."""
    loaded = ctypes.CDLL(str(library))
    try:
        handler = getattr(loaded, symbol)
    except AttributeError:
        raise ValueError(
            f"register_custom_op: {library} has no symbol {symbol!r}. It must be defined by "
            "XLA_FFI_DEFINE_HANDLER_SYMBOL, and visible."
        ) from None
    _libraries.append(loaded)
    target = f"ipu_pipeline.{domain}.{name}.{next(_targets)}"  # XLA does not allow a target to be replaced
    jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(handler), platform=platform)
    return target


def _from_python(function: Compute) -> Any:
    def compute(
        inputs: Sequence[Array], shapes: Sequence[jax.ShapeDtypeStruct], attributes: Attributes
    ) -> Any:
        del shapes
        return function(*inputs, **attributes)

    return compute


def _from_library(target: str) -> Any:
    def compute(
        inputs: Sequence[Array], shapes: Sequence[jax.ShapeDtypeStruct], attributes: Attributes
    ) -> Any:
        encoded = {name: _encode_attribute(name, value) for name, value in attributes.items()}
        return jax.ffi.ffi_call(target, list(shapes))(*inputs, **encoded)

    return compute


def _encode_attribute(name: str, value: Any) -> Any:
    """Encodes an attribute for XLA's interface. PopTorch's numbers are float32 and int64."""
    if isinstance(value, str):
        return value
    if isinstance(value, (int, float)):
        return np.float32(value) if isinstance(value, float) else np.int64(value)
    if not value:
        raise Error(f"Attribute {name!r} is an empty list, whose type a library cannot know.")
    if isinstance(value[0], str):
        return {str(number): text for number, text in enumerate(value)}
    return np.array(value, np.float32 if isinstance(value[0], float) else np.int64)


# Calls within models.

CUSTOM = f"{markers.NAMESPACE}::custom_op"
_KINDS = (int, float, str)


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
    tensor_lists: dict[str, Any] = {"inputs": inputs, "example_outputs": example_outputs}
    for label, value in tensor_lists.items():
        if isinstance(value, torch.Tensor):
            raise ValueError(f"custom_op: {label} must be a list of tensors; got a tensor. Write [tensor].")
    inputs, examples = list(inputs), list(example_outputs)
    for label, tensors in (("inputs", inputs), ("example_outputs", examples)):
        if not tensors or not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
            raise ValueError(f"custom_op: {label} must be a list of tensors, at least one.")
    attributes = _check_attributes({} if attributes is None else attributes)
    operation = find_custom_op(domain, name, domain_version)
    _check_writes(operation, inputs, examples)
    results = [(str(t.dtype).removeprefix("torch."), list(t.shape)) for t in examples]
    key = json.dumps([domain, name, domain_version])
    outputs: list[torch.Tensor] = _OPERATIONS.custom_op(
        inputs, key, json.dumps(results), json.dumps(attributes)
    )
    for number, result in zip(operation.writes, outputs, strict=False):
        inputs[number].copy_(result.detach())
    return list(outputs)


def _check_writes(
    operation: CustomOperation, inputs: Sequence[torch.Tensor], examples: Sequence[torch.Tensor]
) -> None:
    shapes = [tuple(tensor.shape) for tensor in inputs]
    for number, shape in itertools.zip_longest(operation.writes, (tuple(e.shape) for e in examples)):
        if number is not None and (shape is None or number >= len(shapes) or shapes[number] != shape):
            raise ValueError(
                f"custom_op: {operation.label} is registered with writes={list(operation.writes)}: each of "
                "these inputs must have the shape of the result that is written to it. The inputs have the "
                f"shapes {shapes}, the example_outputs {[tuple(e.shape) for e in examples]}."
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
      results: the kinds of its results.
      attributes: the attributes, by name.
    """

    operation: CustomOperation
    results: tuple[Kind, ...]
    attributes: dict[str, Any]

    @classmethod
    def read(cls, key: str, results: str, attributes: str) -> Self:
        """Reads what `custom_op` wrote."""
        kinds = tuple(Kind(tuple(shape), getattr(torch, dtype)) for dtype, shape in json.loads(results))
        return cls(find_custom_op(*json.loads(key)), kinds, json.loads(attributes))

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
            operands, results = saved
            return self._differentiate(operands, results, tuple(gradients))

        computed.defvjp(forward, backward)
        return computed(*inputs)

    def _compute_plainly(self, *inputs: Array) -> list[Array]:
        shapes = [kind.array for kind in self.results]
        outputs = self.operation.compute(inputs, shapes, self.attributes)
        values = list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
        try:
            arrays = [jnp.asarray(value) for value in values]
        except (TypeError, ValueError) as error:
            raise Error(
                f"Custom operation {self.operation.label} must return a JAX array for each of its "
                f"example_outputs; it returned {[type(value).__name__ for value in values]}."
            ) from error
        expected = [kind.shape for kind in self.results]
        if [array.shape for array in arrays] != expected:
            raise Error(
                f"Custom operation {self.operation.label} returned arrays of shapes "
                f"{[array.shape for array in arrays]}; its example_outputs have {expected}."
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
        cotangents = vjp(inputs, results, gradients, **self.attributes)
        cotangents = tuple(cotangents) if isinstance(cotangents, (list, tuple)) else (cotangents,)
        shapes = [None if gradient is None else jnp.shape(gradient) for gradient in cotangents]
        if len(cotangents) != len(inputs) or any(
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
            for gradient, array in zip(cotangents, inputs, strict=True)
        )


_is_outside: contextvars.ContextVar[bool] = contextvars.ContextVar("is_outside", default=False)


@contextlib.contextmanager
def _on_cpu() -> Iterator[None]:
    """Computes in plain torch, outside of models."""
    token = _is_outside.set(True)
    try:
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            yield
    finally:
        _is_outside.reset(token)


def _compute_on_cpu(
    inputs: list[torch.Tensor], key: str, results: str, attributes: str
) -> list[torch.Tensor]:
    call = CustomCall.read(key, results, attributes)
    with _on_cpu(), jax.numpy_dtype_promotion("standard"):
        outputs = call.compute([jnp.asarray(to_numpy(tensor.contiguous())) for tensor in inputs])
        return [to_torch(array, kind.dtype) for array, kind in zip(outputs, call.results, strict=True)]


def _shapes(inputs: list[torch.Tensor], key: str, results: str, attributes: str) -> list[torch.Tensor]:
    kinds, device = CustomCall.read(key, results, attributes).results, inputs[0].device
    return [torch.empty(kind.shape, dtype=kind.dtype, device=device) for kind in kinds]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    del output
    tensors, *ctx.call = inputs
    ctx.save_for_backward(*tensors)


def _backward_on_cpu(ctx: Any, gradients: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
    call, tensors = CustomCall.read(*ctx.call), ctx.saved_tensors
    varied = [number for number, tensor in enumerate(tensors) if tensor.is_floating_point()]
    are_floats = [kind.dtype.is_floating_point for kind in call.results]
    with _on_cpu(), jax.numpy_dtype_promotion("standard"):
        arrays = [jnp.asarray(to_numpy(tensor.contiguous())) for tensor in tensors]

        def compute(*floats: Array) -> list[Array]:
            replaced = dict(zip(varied, floats, strict=True))
            results = call.compute([replaced.get(number, array) for number, array in enumerate(arrays)])
            return [r for r, is_float in zip(results, are_floats, strict=True) if is_float]

        outputs, transpose = jax.vjp(compute, *(arrays[number] for number in varied))
        float_gradients = [g for g, is_float in zip(gradients, are_floats, strict=True) if is_float]
        result_gradients = [
            jnp.zeros_like(array) if gradient is None else jnp.asarray(to_numpy(gradient.contiguous()))
            for gradient, array in zip(float_gradients, outputs, strict=True)
        ]
        cotangents: list[torch.Tensor | None] = [None] * len(tensors)
        for number, gradient in zip(varied, transpose(result_gradients), strict=True):
            cotangents[number] = to_torch(gradient, tensors[number].dtype)
    return cotangents, None, None, None


_library = torch.library.Library(markers.NAMESPACE, "FRAGMENT")
_library.define("custom_op(Tensor[] inputs, str key, str results, str attributes) -> Tensor[]")
_library.impl("custom_op", _compute_on_cpu, "CPU")
_library.impl("custom_op", _shapes, "Meta")
torch.library.register_autograd(CUSTOM, _backward_on_cpu, setup_context=_save, lib=_library)
_OPERATIONS = getattr(torch.ops, markers.NAMESPACE)


# PopART's operations over the replicas of a model, of the domain "ai.graphcore". ReplicatedAllReduceTP and
# ReplicatedAllToAll are from Graphcore's experimental addons. All are made of sums, which stages have. In
# plain torch there is one replica, and the values of others are zeros.

_COLLECTIVES = ("ReplicatedAllGather", "ReplicatedAllReduce", "ReplicatedAllReduceTP", "ReplicatedAllToAll")
_GROUPING = "__collectiveReplicaGrouping"  # an attribute: the number of replicas, a stride, a group's size


def _sum(x: Array) -> Array:
    return x if _is_outside.get() else engine.cross_replica_sum(x)


def _index() -> Array:
    return jnp.int32(0) if _is_outside.get() else engine.replica_index()


def _spread(x: Array, num_replicas: int) -> Array:
    """All replicas' values, with a new first axis for the replica."""
    is_own = jnp.arange(num_replicas).reshape(-1, *[1] * x.ndim) == _index()
    numbers = x.astype(jnp.uint8) if x.dtype == bool else x  # booleans have no sum
    return _sum(jnp.where(is_own, numbers, jnp.zeros_like(numbers))).astype(x.dtype)


def _all_gather(
    inputs: Sequence[Array], shapes: Sequence[jax.ShapeDtypeStruct], attributes: Attributes
) -> Array:
    """All replicas' values in the shape of the example."""
    del attributes
    (x,), (shape,) = inputs, shapes
    return _spread(x, shape.size // x.size).reshape(shape.shape)


def _own_part(inputs: Any, results: Any, gradients: Any, **attributes: Any) -> tuple[Array, ...]:
    """The part of a gradient that is of this replica's value, as PopART has it: replicas are not summed."""
    del results, attributes
    (x,), (gradient,) = inputs, gradients
    return (gradient.reshape(-1, *x.shape)[_index()],)


def _all_reduce_either_way(x: Array, *, backwards: int = 0, op: str = "sum", **grouping: Any) -> Array:
    """The sum, or with `backwards` the value itself."""
    del op, grouping
    return x if backwards else _sum(x)


def _sum_other_way(
    inputs: Any, results: Any, gradients: Any, *, backwards: int = 0, **others: Any
) -> tuple[Array, ...]:
    """Sums gradients with `backwards` only."""
    del inputs, results, others
    return (_sum(gradients[0]) if backwards else gradients[0],)


def _all_to_all(x: Array, **grouping: Any) -> Array:
    """Row r is what replica r has in the row of this replica."""
    del grouping
    return jnp.take(_spread(x, len(x)), _index(), axis=1)


def check_collectives(graph: torch.fx.Graph, num_replicas: int) -> None:
    """Checks that operations over replicas are over all replicas of a model."""
    for node in graph.nodes:
        if node.target is not _OPERATIONS.custom_op.default:
            continue
        call = CustomCall.read(*node.args[1:])
        name = call.operation.name
        if call.operation.domain != "ai.graphcore" or name not in _COLLECTIVES:
            continue
        size, stride, group = call.attributes.get(_GROUPING, (num_replicas, 1, num_replicas))
        if (size, group) != (num_replicas, num_replicas) or stride != 1:
            raise Error(
                f"custom_op: {name} is over all {num_replicas} replicas; its attribute {_GROUPING!r} is "
                f"{[size, stride, group]}. Groups of some replicas are not there."
            )
        if call.attributes.get("op", "sum") != "sum":
            raise Error(f"custom_op: {name} sums; its attribute 'op' is {call.attributes['op']!r}.")
        value = node.args[0][0].meta["val"]
        if value.dtype == torch.bool and name.startswith("ReplicatedAllReduce"):
            raise Error(f"custom_op: {name} sums numbers; its input has booleans.")
        shape, result = tuple(value.shape), call.results[0].shape
        if name == "ReplicatedAllGather":
            fits = math.prod(result) == num_replicas * math.prod(shape)
        else:
            fits = result == shape and (name != "ReplicatedAllToAll" or shape[:1] == (num_replicas,))
        if not fits:
            raise Error(
                f"custom_op: with {num_replicas} replicas, an input of shape {list(shape)} does not fit "
                f"{name} with an example_output of shape {list(result)}."
            )


for _name, _function, _vjp in (
    ("ReplicatedAllReduce", lambda x, **_attributes: _sum(x), None),
    ("ReplicatedAllReduceTP", _all_reduce_either_way, _sum_other_way),
    ("ReplicatedAllToAll", _all_to_all, None),
):
    register_custom_op("ai.graphcore", _name, 1, _function, vjp=_vjp)
_registered["ai.graphcore", "ReplicatedAllGather", 1] = CustomOperation(
    "ai.graphcore", "ReplicatedAllGather", 1, _all_gather, _own_part, (), is_foreign=False
)

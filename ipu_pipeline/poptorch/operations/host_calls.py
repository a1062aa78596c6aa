"""Functions that run on the host in the middle of a model, with gradients by torch."""

from __future__ import annotations

import concurrent.futures
import copy
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import torch
from torch.fx.experimental.proxy_tensor import _AttrProxy

from ipu_pipeline.poptorch import markers
from ipu_pipeline.poptorch.dtypes import jax_dtype, to_numpy, to_torch
from ipu_pipeline.poptorch.errors import Error
from ipu_pipeline.poptorch.operations.checks import check_outside, instance
from ipu_pipeline.poptorch.structures import Structure, flatten
from ipu_pipeline.poptorch.thread_views import seeing_as_here

# Host functions as devices call them.

Array = Any
Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class Kind:
    """The shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: torch.Tensor) -> Kind:
        """Returns the kind of a tensor."""
        return Kind(tuple(tensor.shape), tensor.dtype)

    @property
    def array(self) -> jax.ShapeDtypeStruct:
        """Returns the shape and dtype of an array on a device."""
        return jax.ShapeDtypeStruct(self.shape, jax_dtype(self.dtype))


class HostFunction:
    """A function from tensors to tensors of known shapes.

    Attributes:
      name: its name in errors.
      inputs: the kinds of its arguments.
      varied: the arguments that it is differentiated by.
      results: the kinds of its results.
      obstacle: why its gradients cannot be computed; None if they can.
    """

    def __init__(
        self,
        name: str,
        function: Callable[[Tensors], Tensors],
        inputs: Sequence[Kind],
        num_buffers: int = 0,
    ) -> None:
        """Calls the function on ones, to learn its results, whether they vary, and its gradients."""
        self.name, self._function, self.inputs = name, function, list(inputs)
        last = len(self.inputs) - num_buffers
        self.varied = [kind.dtype.is_floating_point and n < last for n, kind in enumerate(self.inputs)]
        self._lock = threading.Lock()  # devices call it from several threads
        ones = [torch.ones(kind.shape, dtype=kind.dtype) for kind in self.inputs]
        try:
            outputs = self.call(ones)
            if any(type(tensor) is not torch.Tensor for tensor in outputs):
                raise TypeError("it uses weights of the model, which have no values now")
            self.results = [Kind.of(tensor) for tensor in outputs]
            varies = any(not _are_equal(*pair) for pair in zip(outputs, self.call(ones), strict=True))
            for kind in self.results:
                jax_dtype(kind.dtype)
        except Exception as error:
            raise Error(
                f"poptorch.CPU {name!r} fails on tensors of ones, with which it is called when a model is "
                f"compiled, to learn what it returns: {type(error).__name__}: {error}. It may use its "
                "arguments and, if it is a module, its own weights; others must be arguments."
            ) from error
        self.obstacle: str | None = None
        if varies:
            self.obstacle = "its results differ for equal arguments, as with dropout"
            return
        try:
            self.differentiate(ones, [torch.ones(kind.shape, dtype=kind.dtype) for kind in self.results])
        except Exception as error:
            self.obstacle = f"{type(error).__name__}: {error}"

    def call(self, inputs: Tensors) -> Tensors:
        """Computes the results from plain tensors."""
        # Tensors of a wrapped model would fetch newer weights, and wait for the model that waits for this.
        with self._lock, torch._C.DisableTorchFunctionSubclass(), torch.no_grad():  # noqa: SLF001
            return self._function(inputs)

    def differentiate(self, inputs: Tensors, gradients: Tensors) -> Tensors:
        """Computes the gradients by the inputs that vary."""
        leaves = [t.detach().requires_grad_(v) for t, v in zip(inputs, self.varied, strict=True)]
        with self._lock, torch._C.DisableTorchFunctionSubclass(), torch.enable_grad():  # noqa: SLF001
            outputs = self._function(leaves)
            pairs = [(r, g) for r, g in zip(outputs, gradients, strict=True) if r.requires_grad]
            varied = [leaf for leaf in leaves if leaf.requires_grad]
            cotangents: Sequence[torch.Tensor | None] = [None] * len(varied)
            if pairs and varied:
                results, output_gradients = zip(*pairs, strict=True)
                cotangents = torch.autograd.grad(results, varied, output_gradients, allow_unused=True)
        return [
            torch.zeros_like(leaf) if gradient is None else gradient.detach()
            for leaf, gradient in zip(varied, cotangents, strict=True)
        ]

    def check(self, results: Tensors) -> Tensors:
        """Checks results, and returns them."""
        if [Kind.of(tensor) for tensor in results] != self.results:
            raise Error(
                f"poptorch.CPU {self.name!r} returns tensors of other shapes or dtypes than when the "
                f"model was compiled: {[Kind.of(tensor) for tensor in results]}, not {self.results}."
            )
        return results


_functions: weakref.WeakValueDictionary[str, HostFunction] = weakref.WeakValueDictionary()


def keep_host_function(function: HostFunction) -> str:
    """Returns a key that finds a function for as long as it lives."""
    key = f"{function.name}#{id(function):x}"
    _functions[key] = function
    return key


def find_host_function(key: str) -> HostFunction:
    """Finds the function of a key."""
    function = _functions.get(key)
    if function is None:
        raise Error(f"The function of poptorch.CPU {key.rpartition('#')[0]!r} is not in this process.")
    return function


def call_from_device(key: str, inputs: Sequence[Array]) -> list[Array]:
    """Computes the results of a function in a program of JAX. Gradients are torch's."""
    function = find_host_function(key)
    if not function.results:
        return []
    varied = [kind for kind, is_varied in zip(function.inputs, function.varied, strict=True) if is_varied]

    def on_host(*arrays: Array) -> list[Any]:
        return _to_arrays(function.check(function.call(_to_tensors(function.inputs, arrays))))

    def gradient_on_host(*arrays: Array) -> list[Any]:
        tensors = _to_tensors([*function.inputs, *function.results], arrays)
        number = len(function.inputs)
        return _to_arrays(function.differentiate(tensors[:number], tensors[number:]))

    @jax.custom_vjp  # JAX allows no io_callback in it
    def call(*inputs: Array) -> list[Array]:
        return list(jax.pure_callback(on_host, [kind.array for kind in function.results], *inputs))

    def forward(*inputs: Array) -> tuple[list[Array], tuple[Array, ...]]:
        return call(*inputs), inputs

    def backward(saved: tuple[Array, ...], gradients: Sequence[Array]) -> tuple[Any, ...]:
        if function.obstacle is not None:
            raise Error(
                f"poptorch.CPU {function.name!r} has no gradient, because torch cannot compute it: "
                f"{function.obstacle}. Detach its inputs (tensor.detach()), or use it for inference."
            )
        gradients = [
            jax.numpy.zeros(kind.shape, jax_dtype(kind.dtype))
            if gradient.dtype == jax.dtypes.float0
            else gradient
            for gradient, kind in zip(gradients, function.results, strict=True)
        ]
        kinds = [kind.array for kind in varied]
        cotangents = iter(jax.pure_callback(gradient_on_host, kinds, *saved, *gradients) if kinds else [])
        return tuple(next(cotangents) if is_varied else None for is_varied in function.varied)

    call.defvjp(forward, backward)
    return call(*inputs)


def _are_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), 0, 0, equal_nan=True)


def _to_tensors(kinds: Sequence[Kind], arrays: Sequence[Array]) -> Tensors:
    return [to_torch(array, kind.dtype) for kind, array in zip(kinds, arrays, strict=True)]


def _to_arrays(tensors: Tensors) -> list[Any]:
    return [to_numpy(tensor.contiguous()) for tensor in tensors]


# Calls within models.

HOST_CALL = f"{markers.NAMESPACE}::host_call"


class CPU:
    """A function or module that runs on the host, in plain torch, amid a model that runs on devices.

    It may do what cannot be compiled, such as reading values or using NumPy. Its results must depend only
    on its arguments, and always have the same shapes: it may be called again, or once for two equal calls,
    and it is called on ones when the model is compiled. Gradients are torch's. A module's weights are the
    model's, and are trained if the module is a part of it. Changes that it makes to buffers are lost.

    Example:
      self.sort = poptorch.CPU(lambda x: torch.from_numpy(np.sort(x.numpy())), "sort")
      y = self.sort(x)  # in forward
    """

    def __init__(self, layer_to_call: Callable[..., Any], ID: str) -> None:
        """Takes the function.

        Args:
          layer_to_call: takes a call's arguments; returns tensors, in any structure.
          ID: its name in errors.

        Raises:
          TypeError: it cannot be called, or the ID is not a string.
        """
        if not callable(layer_to_call):
            raise TypeError(f"CPU: layer_to_call must be callable; got {type(layer_to_call).__name__}.")
        instance(str, "a string", TypeError)("CPU: ID", ID)
        self.layer_to_call, self.ID = layer_to_call, ID

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function on the host.

        Raises:
          Error: while a model is compiled, the function fails on ones, or is given no tensor.
        """
        check_outside("CPU")
        capture = markers.current_capture()
        if capture is None:
            return self.layer_to_call(*args, **kwargs)
        tensors, structure = flatten((args, kwargs))
        call = _Call(self.layer_to_call, structure)
        inputs = [*tensors, *call.state.values()]
        if not inputs:
            raise Error(f"poptorch.CPU {self.ID!r} must be given at least one tensor.")
        kinds = [Kind.of(tensor) for tensor in inputs]
        # Tensors have no values in this thread while the model is captured.
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            make = seeing_as_here(HostFunction)
            function = thread.submit(make, self.ID, call, kinds, call.num_buffers).result()
        capture.held.append(function)
        assert call.results is not None
        return call.results.unflatten(_OPERATIONS.host_call(inputs, keep_host_function(function)))


class _Call:
    """A call as a function of a list of tensors: its arguments', then a module's weights and buffers."""

    def __init__(self, function: Any, arguments: Structure) -> None:
        self.state: dict[str, torch.Tensor] = {}
        self.num_buffers = 0  # at the end of `state`
        self.results: Structure | None = None
        self._arguments = arguments
        if isinstance(function, _AttrProxy):
            function = getattr(function, "get_base")()  # noqa: B009  # it stands for a module while torch traces its parent
        self._function = function
        if isinstance(function, torch.nn.Module):
            buffers = dict(function.named_buffers())
            self.state, self.num_buffers = {**dict(function.named_parameters()), **buffers}, len(buffers)
            # A copy, which gets its tensors for each call, because other threads may use the module.
            tensors = [*function.parameters(), *function.buffers()]
            self._function = copy.deepcopy(function, {id(tensor): tensor for tensor in tensors})

    def __call__(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the tensors in the call's result."""
        number = self._arguments.num_tensors
        args, kwargs = self._arguments.unflatten(tensors[:number])
        function = self._function
        if isinstance(function, torch.nn.Module):
            # Arguments, and buffers that it may write to, are copies.
            state = {n: t.clone() for n, t in zip(self.state, tensors[number:], strict=True)}
            outputs = torch.func.functional_call(function, state, args, kwargs)
        else:
            outputs = function(*args, **kwargs)
        results, self.results = flatten(outputs)
        return results


def _call_plainly(inputs: list[torch.Tensor], key: str) -> list[torch.Tensor]:
    return find_host_function(key).call(inputs)


def _shapes(inputs: list[torch.Tensor], key: str) -> list[torch.Tensor]:
    device = inputs[0].device
    return [
        torch.empty(kind.shape, dtype=kind.dtype, device=device) for kind in find_host_function(key).results
    ]


_library = torch.library.Library(markers.NAMESPACE, "FRAGMENT")
_library.define("host_call(Tensor[] inputs, str key) -> Tensor[]")
_library.impl("host_call", _call_plainly, "CPU")
_library.impl("host_call", _shapes, "Meta")
_OPERATIONS = getattr(torch.ops, markers.NAMESPACE)

"""Host functions that devices call in the middle of a model, with gradients by torch."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import torch

from ipu_pipeline.poptorch.dtypes import jax_dtype, to_numpy, to_torch
from ipu_pipeline.poptorch.errors import Error

__all__ = ["HostFunction", "Kind", "call_from_device", "find", "keep"]

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
            made = self.call(ones)
            if any(type(tensor) is not torch.Tensor for tensor in made):
                raise TypeError("it uses weights of the model, which have no values now")
            self.results = [Kind.of(tensor) for tensor in made]
            varies = any(not _are_equal(*pair) for pair in zip(made, self.call(ones), strict=True))
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
            made = self._function(leaves)
            pairs = [(r, g) for r, g in zip(made, gradients, strict=True) if r.requires_grad]
            varied = [leaf for leaf in leaves if leaf.requires_grad]
            found: Sequence[torch.Tensor | None] = [None] * len(varied)
            if pairs and varied:
                results, given = zip(*pairs, strict=True)
                found = torch.autograd.grad(results, varied, given, allow_unused=True)
        return [
            torch.zeros_like(leaf) if gradient is None else gradient.detach()
            for leaf, gradient in zip(varied, found, strict=True)
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


def keep(function: HostFunction) -> str:
    """Returns a key that finds a function for as long as it lives."""
    key = f"{function.name}#{id(function):x}"
    _functions[key] = function
    return key


def find(key: str) -> HostFunction:
    """Finds the function of a key."""
    function = _functions.get(key)
    if function is None:
        raise Error(f"The function of poptorch.CPU {key.rpartition('#')[0]!r} is not in this process.")
    return function


def call_from_device(key: str, inputs: Sequence[Array]) -> list[Array]:
    """Computes the results of a function in a program of JAX. Gradients are torch's."""
    function = find(key)
    if not function.results:
        return []
    varied = [kind for kind, is_one in zip(function.inputs, function.varied, strict=True) if is_one]

    def on_host(*arrays: Array) -> list[Any]:
        return _to_arrays(function.check(function.call(_to_tensors(function.inputs, arrays))))

    def gradient_on_host(*arrays: Array) -> list[Any]:
        tensors = _to_tensors([*function.inputs, *function.results], arrays)
        number = len(function.inputs)
        return _to_arrays(function.differentiate(tensors[:number], tensors[number:]))

    @jax.custom_vjp
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
        given = [
            jax.numpy.zeros(kind.shape, jax_dtype(kind.dtype))
            if gradient.dtype == jax.dtypes.float0
            else gradient
            for gradient, kind in zip(gradients, function.results, strict=True)
        ]
        kinds = [kind.array for kind in varied]
        found = iter(jax.pure_callback(gradient_on_host, kinds, *saved, *given) if kinds else [])
        return tuple(next(found) if is_one else None for is_one in function.varied)

    call.defvjp(forward, backward)
    return call(*inputs)


def _are_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), 0, 0, equal_nan=True)


def _to_tensors(kinds: Sequence[Kind], arrays: Sequence[Array]) -> Tensors:
    return [to_torch(array, kind.dtype) for kind, array in zip(kinds, arrays, strict=True)]


def _to_arrays(tensors: Tensors) -> list[Any]:
    return [to_numpy(tensor.contiguous()) for tensor in tensors]

"""Functions that run on the host in the middle of a model."""

from __future__ import annotations

import concurrent.futures
import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import _AttrProxy

from ipu_pipeline.poptorch import markers
from ipu_pipeline.poptorch.errors import Error
from ipu_pipeline.poptorch.operations.checks import check_outside
from ipu_pipeline.poptorch.operations.host_functions import HostFunction, Kind, find, keep
from ipu_pipeline.poptorch.structures import Structure, flatten
from ipu_pipeline.poptorch.thread_views import seeing_as_here

__all__ = ["CPU", "HOST_CALL"]

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
        if not isinstance(ID, str):
            raise TypeError(f"CPU: ID must be a string; got {ID!r}.")
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
        given, structure = flatten((args, kwargs))
        call = _Call(self.layer_to_call, structure)
        inputs = [*given, *call.state.values()]
        if not inputs:
            raise Error(f"poptorch.CPU {self.ID!r} must be given at least one tensor.")
        kinds = [Kind.of(tensor) for tensor in inputs]
        # Tensors have no values in this thread while the model is captured.
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            make = seeing_as_here(HostFunction)
            function = thread.submit(make, self.ID, call, kinds, call.num_buffers).result()
        capture.held.append(function)
        assert call.results is not None
        return call.results.unflatten(_OPERATIONS.host_call(inputs, keep(function)))


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
            made = torch.func.functional_call(function, state, args, kwargs)
        else:
            made = function(*args, **kwargs)
        results, self.results = flatten(made)
        return results


def _call_plainly(inputs: list[torch.Tensor], key: str) -> list[torch.Tensor]:
    return find(key).call(inputs)


def _shapes(inputs: list[torch.Tensor], key: str) -> list[torch.Tensor]:
    device = inputs[0].device
    return [torch.empty(kind.shape, dtype=kind.dtype, device=device) for kind in find(key).results]


_library = torch.library.Library(markers.NAMESPACE, "FRAGMENT")
_library.define("host_call(Tensor[] inputs, str key) -> Tensor[]")
_library.impl("host_call", _call_plainly, "CPU")
_library.impl("host_call", _shapes, "Meta")
_OPERATIONS = getattr(torch.ops, markers.NAMESPACE)

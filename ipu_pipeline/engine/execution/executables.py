"""Compiled programs, loaded for other devices than they were compiled for.

XLA compiles a program anew for each device, also where stages compute the same, as the blocks of a
transformer do. Here what it made for one device is written out, and read in for another in about a tenth of
the time or less.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import serialize_executable

try:  # not public
    from jax._src.compilation_cache import _get_cache as find_cache
    from jaxlib.xla_client import CompileOptions, DeviceAssignment
except ImportError:  # pragma: no cover  # of another JAX
    find_cache = None  # type: ignore[assignment]

__all__ = ["Executable", "is_portable"]

_LEAST_OPERATIONS = 1000  # XLA's own bound: `cheap_computation` of its CPU client


def is_portable(devices: Sequence[Any]) -> bool:
    """Whether what is compiled for such devices can be loaded for others.

    Not with JAX's persistent compilation cache: what XLA's CPU client has itself loaded from there, and is
    written out again, fails when it is called (jax 0.10.2). The cache spares as much. Other kinds of
    devices than CPUs were not tried.
    """
    if find_cache is None or len(devices) > 1:
        return False
    (device,) = devices
    return device.platform == "cpu" and find_cache(device.client) is None


class Executable:
    """A compiled program, written out."""

    def __init__(self, compiled: jax.stages.Compiled) -> None:
        """Writes it out.

        Args:
          compiled: for one device.

        Raises:
          ValueError: it computes so little that XLA's CPU client runs it within the thread that starts it,
            which it does not do with what it has loaded.
          Exception: it cannot be written, as with callbacks; the types are JAX's.
        """
        costs = compiled.cost_analysis() or {}
        if costs.get("flops", 0) < _LEAST_OPERATIONS:
            raise ValueError("The program is run where it is started, and must be compiled for that.")
        self._written, self._in_tree, self._out_tree = serialize_executable.serialize(compiled)

    def load(self, device: Any) -> jax.stages.Compiled:
        """The program for a device of the same kind, where its arguments must lie.

        Raises:
          Exception: JAX or XLA does not take it; the types are theirs.
        """
        unloaded, leaves, no_kwargs = _Reader(self._written, device).load()
        arguments = self._in_tree.unflatten(leaves)
        return jax.stages.Compiled(unloaded.load(), [], arguments, self._out_tree, no_kwargs=no_kwargs)


class _Reader(pickle.Unpickler):
    """Reads what JAX wrote for one device as for another; its own reader insists on the same device."""

    def __init__(self, written: bytes, device: Any) -> None:
        super().__init__(io.BytesIO(written))
        self._device = device

    def persistent_load(self, known: tuple[Any, ...]) -> Any:
        """Finds what JAX does not write as an object: the device, its client, and XLA's executable."""
        kind, *rest = known
        if kind == "device":
            return self._device
        if kind == "client":
            return self._device.client
        if kind != "exec":
            raise pickle.UnpicklingError(f"JAX wrote something unknown: {kind}.")
        options = CompileOptions()
        options.num_replicas = options.num_partitions = 1
        options.device_assignment = DeviceAssignment.create(np.array([[self._device.id]]))
        return self._device.client.deserialize_executable(rest[0], [self._device], options)

"""What is in other processes: arrays without content, and programs that are not run here.

Every process runs the same Python. What lies only on devices of other processes is a JAX array here, too,
with shape, dtype and sharding, but without a shard. A program whose devices are all elsewhere gives such
arrays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

__all__ = ["NotRun", "absent", "absent_like", "is_here"]


def is_here(device: Any) -> bool:
    """Whether a device belongs to this process."""
    return bool(device.process_index == device.client.process_index())


@functools.lru_cache(maxsize=4096)
def absent(shape: tuple[int, ...], dtype: Any, sharding: Any) -> Any:
    """The array that stands in for one on devices of other processes."""
    return jax.make_array_from_single_device_arrays(shape, sharding, [], dtype=dtype)


class NotRun:
    """Stands in for a function that other processes run: returns stand-ins for its results."""

    def __init__(self, function: Callable[..., Any], sharding: Any, results: Any = None) -> None:
        """Traces nothing yet."""
        self._function = function
        self._sharding = sharding
        self._known: dict[Any, Any] = {}
        self._results = None if results is None else self._make(results)

    def __call__(self, *arguments: Any) -> Any:
        """Returns stand-ins for the results, found from the shapes and dtypes of the arguments."""
        if self._results is not None:
            return self._results
        leaves, tree = jax.tree.flatten(arguments)
        key = (tree, *((leaf.shape, leaf.dtype) for leaf in leaves))
        if key not in self._known:
            self._known[key] = self._make(jax.eval_shape(self._function, *arguments))
        return self._known[key]

    def _make(self, results: Any) -> Any:
        shardings = jax.tree.broadcast(self._sharding, results)
        return jax.tree.map(lambda result, own: absent(result.shape, result.dtype, own), results, shardings)


def absent_like(arrays: Sequence[Any], sharding: Any) -> list[Any]:
    """Stand-ins for arrays, or for structs with shapes and dtypes."""
    return [absent(tuple(array.shape), array.dtype, sharding) for array in arrays]

"""What is in other processes: arrays without content, and programs that are not run here.

Every process runs the same Python. What lies only on devices of other processes is a JAX array all the
same, with shape, dtype and sharding, but without a shard. A program whose devices are all elsewhere gives
such arrays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

__all__ = ["NotRun", "absent", "absent_like", "is_here"]


def is_here(device: Any) -> bool:
    """Whether a device is one of this process."""
    return bool(device.process_index == device.client.process_index())


@functools.lru_cache(maxsize=4096)
def absent(shape: tuple[int, ...], dtype: Any, sharding: Any) -> Any:
    """The array that stands for one on devices of other processes."""
    return jax.make_array_from_single_device_arrays(shape, sharding, [], dtype=dtype)


class NotRun:
    """In place of a function that other processes run: gives what stands for its results."""

    def __init__(self, function: Callable[..., Any], sharding: Any, results: Any = None) -> None:
        """Nothing is traced yet."""
        self._function = function
        self._sharding = sharding
        self._known: dict[Any, Any] = {}
        self._results = None if results is None else self._make(results)

    def __call__(self, *arguments: Any) -> Any:
        """What stands for the results; the shapes and dtypes of the arguments say what that is."""
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
    """What stands for arrays, or for what has their shapes and dtypes."""
    return [absent(tuple(array.shape), array.dtype, sharding) for array in arrays]

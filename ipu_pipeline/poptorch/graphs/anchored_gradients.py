"""Gradients of inner values of a model, by micro-batch: "Gradient___name" in `Options.anchorTensor`.

A backward's only results are gradients of variables, summed over micro-batches. So it passes the wanted
gradients to the host while it runs. The host keeps them by micro-batch until the call ends.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import torch

from ipu_pipeline import engine
from ipu_pipeline.engine.fronts import Collected
from ipu_pipeline.poptorch.dtypes import jax_dtype

__all__ = ["PREFIX", "AnchoredGradients", "is_gradient", "name_gradients"]

PREFIX = "Gradient___"


def is_gradient(name: str) -> bool:
    """Whether a value's name is the name of a gradient."""
    return name.startswith(PREFIX)


def name_gradients(
    names: Mapping[str, torch.fx.Node], reaching: Collection[torch.fx.Node]
) -> dict[str, torch.fx.Node]:
    """Returns the values whose gradients can be looked at, by the gradients' names."""
    return {f"{PREFIX}{name}": node for name, node in names.items() if node in reaching}


class AnchoredGradients:
    """The gradients that are kept from a call: of each micro-batch's loss, before averaging.

    Attributes:
      nodes: the values that they are gradients of.
    """

    def __init__(self, nodes: Sequence[torch.fx.Node]) -> None:
        """Starts without any kept gradient."""
        self.nodes = nodes
        self._lock = threading.Lock()  # devices pass theirs from several threads
        self._found: dict[tuple[torch.fx.Node, int, bytes], np.ndarray[Any, Any]] = {}

    @property
    def dtypes(self) -> list[torch.dtype]:
        """The gradients' dtypes, in the order of `nodes`."""
        return [node.meta["val"].dtype for node in self.nodes]

    def pass_on(self, node: torch.fx.Node, value: Any) -> Any:
        """Returns the same value. Its gradient also goes to the host, if it is wanted."""
        if node not in self.nodes:
            return value
        note = functools.partial(self._note, node)

        @jax.custom_vjp
        def give(value: Any, replica: Any, tag: Any) -> Any:
            del replica, tag
            return value

        def forward(value: Any, replica: Any, tag: Any) -> tuple[Any, Any]:
            return give(value, replica, tag), (replica, tag)

        def backward(place: Any, gradient: Any) -> tuple[Any, None, None]:
            jax.debug.callback(note, *place, gradient)
            return gradient, None, None

        give.defvjp(forward, backward)
        return give(value, engine.replica_index(), engine.micro_batch_tag())

    def _note(self, node: torch.fx.Node, replica: Any, tag: Any, gradient: Any) -> None:
        key = (node, int(replica), np.asarray(tag).tobytes())
        found = np.array(gradient)
        with self._lock:  # a variable in several stages has a gradient in each
            self._found[key] = self._found[key] + found if key in self._found else found

    def forget(self) -> None:
        """Forgets what an interrupted call left."""
        jax.effects_barrier()
        self._found.clear()

    def join(self, collected: Sequence[Collected], has_replicas: bool) -> list[Collected]:
        """Waits for gradients, and puts them in place of the last leaf of the last stage's results."""
        jax.effects_barrier()
        joined = []
        for part in collected:
            *leaves, tags = part.outputs
            tags = np.asarray(tags)
            found = [self._stack(node, tags, has_replicas) for node in self.nodes]
            joined.append(replace(part, outputs=[*leaves, *found]))
        self._found.clear()
        return joined

    def _stack(self, node: torch.fx.Node, tags: Any, has_replicas: bool) -> np.ndarray[Any, Any]:
        """Stacks the gradients of a value, one for each micro-batch and replica in `tags`."""
        value = node.meta["val"]
        zeros = np.zeros(
            tuple(value.shape), jax_dtype(value.dtype)
        )  # where the loss does not depend on the value
        stacked = np.empty((*tags.shape[:-1], *zeros.shape), zeros.dtype)
        for place in np.ndindex(*tags.shape[:-1]):
            replica = place[-1] if has_replicas else 0
            stacked[place] = self._found.get((node, replica, tags[place].tobytes()), zeros)
        return stacked

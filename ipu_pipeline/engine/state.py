"""The state and the outputs of a step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from ipu_pipeline.engine.apart import apart
from ipu_pipeline.ground.values import is_readable

__all__ = [
    "Collected",
    "Handed",
    "OfReplicas",
    "PipelineState",
    "Progress",
    "RunState",
    "StepOutputs",
    "of_replica",
]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class OfReplicas:
    """A value that differs between replicas, as what a replicated loop carries does; a pytree.

    Attributes:
      values: the values, in the order of the replicas.
    """

    values: tuple[Any, ...]


def of_replica(value: Any, replica: int) -> Any:
    """A replica's own value, or the one that is the same for all."""
    return value.values[replica] if isinstance(value, OfReplicas) else value


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PipelineState:
    """Everything that training changes, a pytree.

    Example:
      >>> pipeline = engine.Pipeline([lambda w, x: x @ w], parameters=[np.eye(4)], num_micro_batches=1)
      >>> state = pipeline.init(jax.random.key(0), np.ones([2, 4]))
      >>> list(state.variables), state.update_count
      (['stage0/parameter'], 0)

    Attributes:
      variables: full name -> array.
      optimizer_state: the result of the optimizer's `init` for the trained variables, a flat dict. None
        without training, and until the first step if it depends on the last stage's outputs.
      update_count: an int, the weight updates so far.
      execution_count: an int, the steps so far, including steps without training; it is folded into
        random keys, modulo 2**32.
      key: the random key from which all others are derived.
    """

    variables: dict[str, Any]
    optimizer_state: Any
    update_count: int
    execution_count: int
    key: Any


@dataclass(frozen=True)
class StepOutputs:
    """The outputs of a step: the last stage's results, losses and metrics.

    Example:
      >>> pipeline = engine.Pipeline([lambda x: 2 * x], num_micro_batches=2)
      >>> batches = [np.float32(1), np.float32(2)]
      >>> _, outputs = pipeline.step(pipeline.init(jax.random.key(0), batches[0]), batches)
      >>> [float(output) for output in outputs.outputs]
      [2.0, 4.0]

    Attributes:
      collected: the leaves of the results, stacked if one program handled several micro-batches.
      unflatten: makes an output from its leaves; None if outputs are not collected.
      read_metrics: reads the metrics of stages and the optimizer, by full name, one value each.
    """

    collected: Sequence[Collected]
    unflatten: Callable[[list[Any]], Any] | None
    read_metrics: Callable[[], dict[str, Any]] = dict

    @property
    def is_here(self) -> bool:
        """Whether this process has the collected results, as the last stage's process does."""
        return all(
            map(is_readable, jax.tree.leaves([(part.outputs, part.loss) for part in self.collected]))
        )

    def block_until_ready(self) -> StepOutputs:
        """Waits until the collected results are computed. `jax.block_until_ready` calls it."""
        jax.block_until_ready([(part.outputs, part.loss) for part in self.collected])
        return self

    @functools.cached_property
    def outputs(self) -> list[Any]:
        """The last stage's results, one entry per micro-batch; empty in processes without that stage.

        With several replicas, an entry has a first axis for them.
        """
        if self.unflatten is None or not self.is_here:
            return []
        found: list[Any] = []
        for part in self.collected:
            if part.size is None:
                found.append(self.unflatten(part.outputs))
                continue
            leaves = [_unstack(leaf, part.size) for leaf in part.outputs]
            found += [self.unflatten([leaf[number] for leaf in leaves]) for number in range(part.size)]
        return found

    @functools.cached_property
    def losses(self) -> list[Any]:
        """The loss of each micro-batch, a scalar; empty without training, or without the last stage here.

        With several replicas, an entry is a vector of their losses.
        """
        found: list[Any] = []
        if not self.is_here:
            return found
        for part in self.collected:
            if part.loss is not None:
                found += [part.loss] if part.size is None else _unstack(part.loss, part.size)
        return found

    @functools.cached_property
    def metrics(self) -> dict[str, Any]:
        """The metrics of stages and the optimizer (see `metric`): NumPy scalars by full name."""
        return {name: values[0] for name, values in self.read_metrics().items()}


@dataclass(frozen=True, eq=False)
class Collected:
    """The results of the last stage for one micro-batch, or for several in a row.

    Attributes:
      outputs: the leaves of the stage's outputs.
      loss: the loss; None without training.
      size: None for one micro-batch. For several, their number: outputs and loss are then stacked on a
        first axis, which may be longer; entries beyond `size` are meaningless.
    """

    outputs: list[Any]
    loss: Any
    size: int | None


@dataclass(frozen=True, eq=False)
class Handed:
    """What was enqueued at once, for one micro-batch or weight update or for several in a row.

    Attributes:
      leaves: the values, by the number of the leaf.
      size: as in `Collected`.
    """

    leaves: list[Any]
    size: int | None


@dataclass(frozen=True, eq=False)
class RunState:
    """Everything that running changes, also between two weight updates.

    Attributes:
      pipeline: variables, optimizer state, counts and key.
      accumulators: sums or means of gradients, by key; empty without training.
      num_accumulated: the number of micro-batches in the accumulators.
    """

    pipeline: PipelineState
    accumulators: dict[str, Any]
    num_accumulated: int = 0


@dataclass(frozen=True, eq=False)
class Progress:
    """What some micro-batches leave, still being computed.

    Attributes:
      state: the new state.
      carried: in a loop, the values that the next iteration takes.
      collected: what was to be collected, in the order of the micro-batches.
      count: the number of micro-batches that ran.
      enqueued: what stages enqueued, in the same order.
      updated: what weight updates enqueued, in their order.
      num_ahead: the number of micro-batches that have been taken for the next update already.
    """

    state: RunState
    carried: list[Any]
    collected: list[Collected]
    count: int
    enqueued: list[Handed]
    updated: list[Handed]
    num_ahead: int = 0


@apart
def _unstack(stack: Any, size: int) -> list[Any]:
    # The whole stack, whose length does not depend on the number of micro-batches, so it compiles once.
    return list(stack)[:size]

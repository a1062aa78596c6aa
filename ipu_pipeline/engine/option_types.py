"""Types of options: dispatch plan, sharding, offloading, recomputation, reduction. They need no JAX."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ipu_pipeline.ground.checks import is_int, require


@dataclass(frozen=True)
class Chunking:
    """A dispatch plan. `dataclasses.asdict` and `Chunking(**...)` store and restore it.

    Example:
      >>> plan = engine.Chunking(2)
      >>> pipeline = engine.Pipeline([jnp.sin, jnp.tanh], num_micro_batches=4, dispatch_plan=plan)
      >>> print(plan)
      2 micro-batches per program: given

    Attributes:
      chunk_size: the number of micro-batches that a program handles, one after another; a divisor of a
        step's number. A stage then has `chunk_size` times as many in flight.
      reason: the reason for this size, for people.
    """

    chunk_size: int = 1
    reason: str = "given"

    def __post_init__(self) -> None:
        """Checks the fields."""
        rule = "Chunking: chunk_size must be an integer of at least 1"
        require(is_int(self.chunk_size, 1), rule, self.chunk_size)

    def __str__(self) -> str:
        """Describes the plan in words."""
        chunk = "one micro-batch" if self.chunk_size == 1 else f"{self.chunk_size} micro-batches"
        return f"{chunk} per program: {self.reason}"


ONE_BY_ONE = Chunking(reason="every action is a program of its own")


class Shard(enum.Enum):
    """The arrays of which each replica has a part (Rajbhandari et al., "ZeRO", 2020, sections 5 and 6).

    OPTIMIZER_STATE: the optimizer's state; each replica updates its part. WEIGHTS: the trainable variables
    that only one stage has; they are gathered for each program that reads them, and released afterwards.

    Example:
      >>> pipeline = engine.Pipeline(
      ...     [layers.Dense(4)],
      ...     num_micro_batches=2,
      ...     num_replicas=2,
      ...     loss=jnp.mean,
      ...     optimizer=optax.adam(1e-3),
      ...     shard=[engine.Shard.OPTIMIZER_STATE],  # or "optimizer_state"
      ... )
    """

    OPTIMIZER_STATE = "optimizer_state"
    WEIGHTS = "weights"


ShardName: TypeAlias = Literal["optimizer_state", "weights"]  # their values


class Offload(enum.Enum):
    """The arrays that may be in host memory (memory kind `pinned_host`) while no program uses them.

    WEIGHT_UPDATE_VARIABLES: the optimizer's state, except during the weight update. ACTIVATIONS: the values
    that a stage keeps between its forward and its backward. GRADIENT_ACCUMULATION_BUFFERS: the
    accumulators, except during the backward and the update of their stage. WEIGHTS: the variables, except
    those that stages assign, and except during the programs that use them.

    Example:
      >>> pipeline = engine.Pipeline(
      ...     [layers.Dense(4)],
      ...     num_micro_batches=2,
      ...     loss=jnp.mean,
      ...     optimizer=optax.adam(1e-3),
      ...     offload=[engine.Offload.WEIGHT_UPDATE_VARIABLES],  # or "weight_update_variables"
      ... )
    """

    WEIGHT_UPDATE_VARIABLES = "weight_update_variables"
    ACTIVATIONS = "activations"
    GRADIENT_ACCUMULATION_BUFFERS = "gradient_accumulation_buffers"
    WEIGHTS = "weights"


# Their values.
OffloadName: TypeAlias = Literal[
    "weight_update_variables",
    "activations",
    "gradient_accumulation_buffers",
    "weights",
]


class Recomputation(enum.Enum):
    """The values that a stage keeps of a micro-batch between its forward and its backward.

    RECOMPUTE_THEN_BACKPROPAGATE: the stage's inputs; the backward starts by repeating the whole forward.
    RECOMPUTE_AND_BACKPROPAGATE_INTERLEAVED: the inputs and the values that `recomputation_checkpoint`
    marks; the backward goes from each of these to the previous one. AUTO is the same as INTERLEAVED. In a
    stage without marks there is no difference.

    Example:
      >>> pipeline = engine.Pipeline(
      ...     [layers.Dense(4)],
      ...     num_micro_batches=2,
      ...     loss=jnp.mean,
      ...     optimizer=optax.sgd(0.1),
      ...     recompute=engine.Recomputation.RECOMPUTE_THEN_BACKPROPAGATE,
      ... )
    """

    AUTO = "auto"
    RECOMPUTE_THEN_BACKPROPAGATE = "recompute_then_backpropagate"
    RECOMPUTE_AND_BACKPROPAGATE_INTERLEAVED = "recompute_and_backpropagate_interleaved"


# Their values.
RecomputationName: TypeAlias = Literal[
    "auto",
    "recompute_then_backpropagate",
    "recompute_and_backpropagate_interleaved",
]


class Reduction(enum.Enum):
    """The way in which the gradients of a weight update's micro-batches are combined.

    SUM adds them. MEAN divides the sum by their number at the update. RUNNING_MEAN keeps the mean of the
    gradients so far, `a * n/(n+1) + g * 1/(n+1)` for the n-th from 0, so that no long sum overflows.

    Example:
      >>> pipeline = engine.Pipeline(
      ...     [layers.Dense(4)],
      ...     num_micro_batches=2,
      ...     loss=jnp.mean,
      ...     optimizer=optax.sgd(0.1),
      ...     reduction=engine.Reduction.MEAN,  # or "mean"
      ... )
    """

    SUM = "sum"
    MEAN = "mean"
    RUNNING_MEAN = "running_mean"


ReductionName: TypeAlias = Literal["sum", "mean", "running_mean"]  # their values

"""What a pipeline keeps in the host's memory, and the transfers within compiled programs."""

from __future__ import annotations

import enum
from collections.abc import Collection
from typing import Any, Literal, TypeAlias

import jax

from ipu_pipeline.engine.devices.device_groups import DeviceGroup
from ipu_pipeline.ground.enumerations import parse_member

__all__ = ["Offload", "OffloadName", "load", "parse_offload", "store"]


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


def parse_offload(values: Collection[OffloadName | Offload]) -> frozenset[Offload]:
    """A collection of members or of their values."""
    if isinstance(values, str):
        raise ValueError(f"offload must be a collection of names; got the string {values!r}.")
    return frozenset(parse_member(Offload, value, "offload: each entry") for value in values)


def load(value: Any, group: DeviceGroup) -> Any:
    """A traced value in the memory of the group's device."""
    return jax.device_put(value, group.replicated)


def store(value: Any, group: DeviceGroup) -> Any:
    """A traced value in the host's memory."""
    return jax.device_put(value, group.host)

"""What is known of the memory of stages, devices and values in transit, as data. Imports no JAX.

`memory` and `crossings` fill it in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

__all__ = ["Brought", "Flow", "IpuMemory", "Moments", "StageMemory"]

Moments: TypeAlias = "tuple[tuple[int, int], ...]"  # of a stage, see `StageMemory.fullest`


@dataclass(frozen=True)
class StageMemory:
    """What a stage holds between forwards and backwards. All sizes are in bytes.

    Attributes:
      stage: the stage's number.
      ipu: the device that it runs on.
      in_flight: the largest number of micro-batches that have gone forward and not come back.
      num_residual_bytes: per micro-batch, what the forward returns for the backward. Where several devices
        compute a stage together, each device's part once that has been compiled; before, the whole.
      num_input_bytes: per micro-batch, the inputs that the backward takes. A value that several stages on
        the device take counts in each.
      num_between_bytes: per micro-batch, where the backward is done in halves, what is held between these.
      fullest: the moments at which it may hold most, as the numbers of micro-batches (before the first half
        of the backward, between the halves); empty where there are no halves.
    """

    stage: int
    ipu: int
    in_flight: int
    num_residual_bytes: int
    num_input_bytes: int
    num_between_bytes: int = 0
    fullest: Moments = ()

    @property
    def num_held_bytes(self) -> int:
        """What is held per micro-batch before its backward, or the first half of it."""
        return self.num_residual_bytes + self.num_input_bytes

    @property
    def num_live_bytes(self) -> int:
        """What is held of all micro-batches in flight."""
        held, between = self.num_held_bytes, self.num_between_bytes
        moments = self.fullest or ((self.in_flight, 0),)
        return max(before * held + after * between for before, after in moments)


class Brought(NamedTuple):
    """What execution phases have on a device at the fullest moment, besides what stays there, in bytes."""

    num_variable_bytes: int
    num_optimizer_bytes: int
    num_accumulator_bytes: int
    num_activation_bytes: int


@dataclass(frozen=True)
class IpuMemory:
    """What a device takes while steps run. All sizes are in bytes.

    Example:
      >>> pipeline = engine.Pipeline([layers.Dense(4), layers.Dense(2)], num_micro_batches=2)
      >>> state = pipeline.init(jax.random.key(0), np.ones([2, 8], np.float32))
      >>> pipeline.plan_ipu_memory()[0].num_variable_bytes
      144

    Attributes:
      ipu: its number.
      num_variable_bytes: the variables that live there, and copies of those that stages there share with
        others, which are there during a step.
      num_optimizer_bytes: the leaves of the optimizer's state that live there.
      num_accumulator_bytes: the accumulators of its stages.
      num_activation_bytes: what its stages hold of micro-batches in flight (`StageMemory.num_live_bytes`);
        0 where all stages are on one device, as the program has them among its temporaries. Where execution
        phases bring anything from host memory, what is there of micro-batches at the fullest moment.
      num_feed_bytes: micro-batches that have been placed there and wait, or are stacked for the program.
      num_temporary_bytes: the most that one of its programs takes besides its arguments and results, by
        XLA; None as long as they have not been compiled.
      num_host_bytes: offloaded variables, optimizer state and accumulators, which lie in host memory while
        no program uses them. They are in none of the numbers above.
      num_brought_variable_bytes: variables that execution phases have brought there at the fullest moment,
        for all phases and programs of updates that may be on the device at once.
      num_brought_optimizer_bytes: brought leaves of the optimizer's state, at that moment.
      num_brought_accumulator_bytes: brought accumulators, at that moment.
    """

    ipu: int
    num_variable_bytes: int
    num_optimizer_bytes: int
    num_accumulator_bytes: int
    num_activation_bytes: int
    num_feed_bytes: int
    num_temporary_bytes: int | None
    num_host_bytes: int
    num_brought_variable_bytes: int = 0
    num_brought_optimizer_bytes: int = 0
    num_brought_accumulator_bytes: int = 0

    @property
    def num_brought_bytes(self) -> int:
        """The state that execution phases have brought there; micro-batches count as in flight."""
        return (
            self.num_brought_variable_bytes
            + self.num_brought_optimizer_bytes
            + self.num_brought_accumulator_bytes
        )

    @property
    def num_state_bytes(self) -> tuple[int, int, int]:
        """The bytes of variables, optimizer state and accumulators, including what is brought."""
        return (
            self.num_variable_bytes + self.num_brought_variable_bytes,
            self.num_optimizer_bytes + self.num_brought_optimizer_bytes,
            self.num_accumulator_bytes + self.num_brought_accumulator_bytes,
        )

    @property
    def num_device_bytes(self) -> int:
        """All that is on the device, without temporaries if these are not known."""
        return (
            sum(self.num_state_bytes)
            + self.num_activation_bytes
            + self.num_feed_bytes
            + (self.num_temporary_bytes or 0)
        )


@dataclass(frozen=True)
class Flow:
    """What a stage's forward or backward makes for other stages on a device, once per micro-batch.

    Attributes:
      stage: the stage that makes it.
      is_backward: whether it consists of gradients, on their way back.
      target: the device where it is read, which may be the stage's own.
      readers: the stages there that read it, in the same direction, and do not hold it any longer.
      holders: the stages there that hold it from their forward to their backward: from then on it is
        counted with what they hold (`StageMemory.num_input_bytes`).
      num_bytes: its size.
    """

    stage: int
    is_backward: bool
    target: int
    readers: tuple[int, ...]
    holders: tuple[int, ...]
    num_bytes: int

"""The memory of stages, devices and values in transit, as data. Imports no JAX."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

Moments: TypeAlias = "tuple[tuple[int, int], ...]"  # of a stage, see `StageMemory.fullest`


@dataclass(frozen=True)
class StageMemory:
    """The memory that a stage holds between forwards and backwards. All sizes are in bytes.

    Attributes:
      stage: the stage's number.
      ipu: the device that it runs on.
      in_flight: the most micro-batches between forward and backward at a time.
      num_residual_bytes: per micro-batch, the values that the forward returns for the backward. If several
        devices compute a stage together, each device's part once programs are compiled; the whole before.
      num_input_bytes: per micro-batch, the inputs that the backward takes. A value that several stages on
        the device take counts in each.
      num_between_bytes: per micro-batch, with a split backward, the values held between input and weight
        gradients.
      fullest: with a split backward, the moments at which it may hold most, as pairs of numbers of
        micro-batches: before input gradients, and before weight gradients; otherwise empty.
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
        """The bytes per micro-batch before its backward, or before its input gradients."""
        return self.num_residual_bytes + self.num_input_bytes

    @property
    def num_live_bytes(self) -> int:
        """The bytes for all micro-batches in flight."""
        held_bytes, between = self.num_held_bytes, self.num_between_bytes
        moments = self.fullest or ((self.in_flight, 0),)
        return max(before * held_bytes + after * between for before, after in moments)


class Brought(NamedTuple):
    """The bytes of execution phases on a device at the fullest moment, besides what stays there."""

    num_variable_bytes: int
    num_optimizer_bytes: int
    num_accumulator_bytes: int
    num_activation_bytes: int


@dataclass(frozen=True)
class IpuMemory:
    """The memory of a device while steps run. All sizes are in bytes.

    Example:
      >>> pipeline = engine.Pipeline([layers.Dense(4), layers.Dense(2)], num_micro_batches=2)
      >>> state = pipeline.init(jax.random.key(0), np.ones([2, 8], np.float32))
      >>> engine.planning.plan_ipu_memory(pipeline)[0].num_variable_bytes
      144

    Attributes:
      ipu: its number.
      num_variable_bytes: the variables that are stored there, and copies, during a step, of variables
        shared with stages on other devices.
      num_optimizer_bytes: the leaves of the optimizer's state that are stored there.
      num_accumulator_bytes: the accumulators of its stages.
      num_activation_bytes: the values that its stages hold for micro-batches in flight
        (`StageMemory.num_live_bytes`); 0 if all stages are on one device, where they are among the
        program's temporaries. If execution phases bring anything from host memory, the values of
        micro-batches at the fullest moment.
      num_feed_bytes: micro-batches that are placed there and wait, or are stacked for the program.
      num_temporary_bytes: the most memory of one of its programs besides arguments and results, by XLA;
        None until they are compiled.
      num_host_bytes: offloaded variables, optimizer state and accumulators, which are in host memory while
        no program uses them. The numbers above do not include them.
      num_brought_variable_bytes: variables that execution phases have brought there at the fullest moment,
        for all phases and update programs that may be on the device at the same time.
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
        """The state that execution phases have brought there, without micro-batches."""
        return (
            self.num_brought_variable_bytes
            + self.num_brought_optimizer_bytes
            + self.num_brought_accumulator_bytes
        )

    @property
    def num_state_bytes(self) -> tuple[int, int, int]:
        """The bytes of variables, optimizer state and accumulators, including brought ones."""
        return (
            self.num_variable_bytes + self.num_brought_variable_bytes,
            self.num_optimizer_bytes + self.num_brought_optimizer_bytes,
            self.num_accumulator_bytes + self.num_brought_accumulator_bytes,
        )

    @property
    def num_device_bytes(self) -> int:
        """All bytes on the device, without temporaries if these are not known."""
        return (
            sum(self.num_state_bytes)
            + self.num_activation_bytes
            + self.num_feed_bytes
            + (self.num_temporary_bytes or 0)
        )


@dataclass(frozen=True)
class Flow:
    """The values that a stage's forward or backward sends to stages on a device, once per micro-batch.

    Attributes:
      stage: the stage that computes them.
      is_backward: whether they are gradients, on their way back.
      target: the device that reads them, which may be the stage's own.
      readers: the stages there that read them, in the same direction, and do not hold them afterwards.
      holders: the stages there that hold them from their forward to their backward; they are then counted
        in `StageMemory.num_input_bytes`.
      num_bytes: their size.
    """

    stage: int
    is_backward: bool
    target: int
    readers: tuple[int, ...]
    holders: tuple[int, ...]
    num_bytes: int

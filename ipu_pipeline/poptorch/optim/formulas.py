"""torch's formulas, for one variable.

Sources: the algorithms in the documentation of torch.optim.SGD, Adam, AdamW and RMSprop, and of
tf.keras.optimizers.RMSprop for its variant. LAMB: arXiv:1904.00962, algorithm 2. As in torch, SGD's
dampening does not apply to the first gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ipu_pipeline.poptorch.optim.hyperparameters import STORED_SCALING
from ipu_pipeline.poptorch.optim.specs import GroupStructure, Kind, Structure

__all__ = ["COUNT", "FORMULAS", "STEP", "Case", "Formula", "Slot", "SlotsOf", "Update", "average"]

STEP = "step"  # the number of the variable's updates (for SGD: of those with momentum)


class Slot(NamedTuple):
    """An array that is kept for a variable.

    Attributes:
      name: torch's name for it.
      is_second_order: whether it has the dtype of averages of squares.
      initial: the value it starts at: a number, or the name of a hyperparameter.
      shape: its shape; None for the variable's. Scalars are kept in float32, as in torch.
    """

    name: str
    is_second_order: bool = False
    initial: float | str = 0.0
    shape: tuple[int, ...] | None = None


# Each variable has its own count, as in torch: variables of one group may have begun to train at different
# times.
COUNT = Slot(STEP, shape=())


@dataclass(frozen=True, eq=False)
class Case:
    """The update of one variable. All arrays have one dtype, of 32 bits or more.

    Attributes:
      gradient: the variable's gradient.
      parameter: its value.
      slots: what was kept for it, by name.
      numbers: its group's numbers, by column, and STEP, which counts this update.
      group: what its group is compiled for.
      structure: what the optimizer is compiled for.
      has_rows: whether each of its rows is a separate parameter.
    """

    gradient: jax.Array
    parameter: jax.Array
    slots: Mapping[str, jax.Array]
    numbers: Mapping[str, jax.Array]
    group: GroupStructure
    structure: Structure
    has_rows: bool = False

    @property
    def direction(self) -> jax.Array:
        """The gradient of what is minimized, with weight decay if that is part of it."""
        gradient = -self.gradient if self.group.maximize else self.gradient
        if self.group.decays and not self.group.decouples_decay and self.structure.kind is not Kind.LAMB:
            gradient = gradient + self.numbers["weight_decay"] * self.parameter
        return gradient


Update = tuple[jax.Array, dict[str, jax.Array]]
SlotsOf = Callable[[Structure, GroupStructure, tuple[int, ...]], tuple[Slot, ...]]


class Formula(NamedTuple):
    """A formula for updates.

    Attributes:
      slots: returns what it keeps for a variable of a given shape.
      update: returns what is added to the variable, and the new slots without `COUNT`.
    """

    slots: SlotsOf
    update: Callable[[Case], Update]


def _sgd_slots(structure: Structure, group: GroupStructure, shape: tuple[int, ...]) -> tuple[Slot, ...]:
    del structure, shape
    return (COUNT, Slot("momentum_buffer")) if group.has_momentum else ()


def _sgd(case: Case) -> Update:
    gradient, numbers = case.direction, case.numbers
    if not case.group.has_momentum:
        return -numbers["lr"] * gradient, {}
    scales, nesterov = case.structure.scales_velocity, case.group.nesterov
    momentum, buffer = numbers["momentum"], case.slots["momentum_buffer"]
    if scales:
        buffer = buffer / numbers[STORED_SCALING]
    one, zero = jnp.ones_like(momentum), jnp.zeros_like(momentum)
    # Momentum may be variable, and 0 for a while: then torch leaves the buffer alone. These scalars cover
    # that case and the first update, because selecting among arrays takes almost twice as long.
    is_on, is_first = momentum != 0, numbers[STEP] == 1
    kept = jnp.where(is_on, jnp.where(is_first, zero, momentum), one)
    taken = jnp.where(is_on, jnp.where(is_first, one, numbers["one_minus_dampening"]), zero)
    buffer = kept * buffer + taken * gradient
    direction = gradient + momentum * buffer if nesterov else jnp.where(is_on, buffer, gradient)
    if scales:
        buffer = buffer * numbers["velocity_scaling"]
    return -numbers["lr"] * direction, {"momentum_buffer": buffer}


def _adam_slots(structure: Structure, group: GroupStructure, shape: tuple[int, ...]) -> tuple[Slot, ...]:
    del structure, group, shape
    return (COUNT, Slot("exp_avg"), Slot("exp_avg_sq", is_second_order=True))


def average(case: Case, corrects_mean: bool = True) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """Returns Adam's averages: corrected, with the root of the second one; and uncorrected."""
    gradient, numbers = case.direction, case.numbers
    mean, square = case.slots["exp_avg"], case.slots["exp_avg_sq"]
    mean = mean + numbers["one_minus_beta1"] * (gradient - mean)
    square = numbers["beta2"] * square + numbers["one_minus_beta2"] * gradient * gradient
    root, kept = jnp.sqrt(square), {"exp_avg": mean, "exp_avg_sq": square}
    if case.structure.corrects_bias:
        if corrects_mean:
            mean = mean / -jnp.expm1(numbers[STEP] * numbers["log_beta1"])
        root = root / jnp.sqrt(-jnp.expm1(numbers[STEP] * numbers["log_beta2"]))
    return mean, root, kept


def _adam(case: Case) -> Update:
    mean, root, kept = average(case)
    numbers = case.numbers
    change = -numbers["lr"] * (mean / (root + numbers["eps"]))
    if case.group.decays and case.group.decouples_decay:
        change = change - numbers["lr"] * numbers["weight_decay"] * case.parameter
    return change, kept


def _lamb(case: Case) -> Update:
    mean, root, kept = average(case)
    numbers = case.numbers
    update = mean / (root + numbers["eps"])
    if case.group.decays:
        update = update + numbers["weight_decay"] * case.parameter
    weight_norm = jnp.minimum(_norm(case.parameter, case.has_rows), numbers["max_weight_norm"])
    update_norm = _norm(update, case.has_rows)
    is_usable = (weight_norm > 0) & (update_norm > 0)
    one = jnp.ones_like(update_norm)
    ratio = jnp.where(is_usable, weight_norm / jnp.where(is_usable, update_norm, one), one)
    return -numbers["lr"] * ratio * update, kept


def _norm(value: jax.Array, has_rows: bool) -> jax.Array:
    """Returns the norm as a scalar, or each row's norm with the axes of the value."""
    axes = tuple(range(1, value.ndim)) if has_rows else None
    return jnp.sqrt(jnp.sum(value * value, axes, keepdims=has_rows))


def _rmsprop_slots(structure: Structure, group: GroupStructure, shape: tuple[int, ...]) -> tuple[Slot, ...]:
    del shape
    squares = Slot("square_avg", is_second_order=True, initial=1.0 if structure.uses_tf_variant else 0.0)
    slots = [COUNT, squares]
    if group.centered:
        slots.append(Slot("grad_avg"))
    if group.has_momentum:
        slots.append(Slot("momentum_buffer"))
    return tuple(slots)


def _rmsprop(case: Case) -> Update:
    gradient, numbers = case.direction, case.numbers
    uses_tf_variant = case.structure.uses_tf_variant
    square = numbers["alpha"] * case.slots["square_avg"] + numbers["one_minus_alpha"] * gradient * gradient
    kept = {"square_avg": square}
    if case.group.centered:
        mean = case.slots["grad_avg"]
        mean = mean + numbers["one_minus_alpha"] * (gradient - mean)
        kept["grad_avg"] = mean
        square = square - mean * mean
    if uses_tf_variant:
        direction = gradient / jnp.sqrt(square + numbers["eps"])
    else:
        direction = gradient / (jnp.sqrt(square) + numbers["eps"])
    if not case.group.has_momentum:
        return -numbers["lr"] * direction, kept
    momentum, rate = numbers["momentum"], numbers["lr"]
    one, zero = jnp.ones_like(momentum), jnp.zeros_like(momentum)
    is_on = momentum > 0  # as for SGD
    inner, outer = (rate, one) if uses_tf_variant else (one, rate)
    buffer = jnp.where(is_on, momentum, one) * case.slots["momentum_buffer"]
    buffer = buffer + jnp.where(is_on, inner, zero) * direction
    kept["momentum_buffer"] = buffer
    return -jnp.where(is_on, outer * buffer, rate * direction), kept


FORMULAS: Mapping[Kind, Formula] = {
    Kind.SGD: Formula(_sgd_slots, _sgd),
    Kind.ADAM: Formula(_adam_slots, _adam),
    Kind.RMSPROP: Formula(_rmsprop_slots, _rmsprop),
    Kind.LAMB: Formula(_adam_slots, _lamb),
}

"""Formulas of torch's optimizers, for one variable, and the numbers that they read.

Sources: the algorithms in the documentation of torch.optim.SGD, Adam, AdamW, RMSprop, Adagrad, Adadelta,
Adamax, NAdam, RAdam, ASGD, Rprop, Adafactor and Muon, and of tf.keras.optimizers.RMSprop for its variant.
LAMB: arXiv:1904.00962, algorithm 2. As in torch, SGD's dampening does not apply to the first gradient.
Optax has most of them with other formulas (where epsilon is added, how rates decay), and with rates that
are compiled in.

The numbers are one array, a row per group, and not one per number, because each array that another device
reads is sent there at every update. What a formula derives from a number (1 - beta, the logarithm of beta)
is computed here in 64 bits: in float32, 1 - 0.999 has lost five digits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.poptorch.optim.specs import GroupStructure, Kind, LossScaling, OptimizerSpec, Structure

# The numbers.

STORED_SCALING = "stored_scaling"  # the column that updates write: the factor of momentum buffers


class Hyperparameters:
    """Packs the numbers of specs of one structure.

    Attributes:
      columns: the names of the array's columns.
      keeps_scaling: whether the first of them is `STORED_SCALING`.
    """

    def __init__(self, spec: OptimizerSpec) -> None:
        """Takes one of the specs."""
        self.keeps_scaling = spec.structure.scales_velocity
        stored = (STORED_SCALING,) if self.keeps_scaling else ()
        self.columns = (*stored, *_derive_all(spec)[0])

    def pack(self, spec: OptimizerSpec, before: Any = None) -> np.ndarray[Any, Any]:
        """Makes the array."""
        rows = _derive_all(spec)
        packed = np.zeros((len(rows), len(self.columns)), jax.dtypes.canonicalize_dtype(np.float64))
        for number, row in enumerate(rows):
            packed[number] = [row.get(column, 0) for column in self.columns]
        if self.keeps_scaling:
            column = self.index("velocity_scaling")
            packed[:, 0] = packed[:, column] if before is None else np.asarray(before)[:, 0]
        return packed

    def index(self, column: str) -> int:
        """Returns the position of a column."""
        return self.columns.index(column)


def _derive_all(spec: OptimizerSpec) -> list[dict[str, float]]:
    common: dict[str, float] = {}
    if spec.structure.loss_scaling is LossScaling.MANUAL:
        common["loss_scaling"] = float(np.float32(spec.loss_scaling))  # as the backward has it
    if spec.structure.clips:
        common["max_grad_norm"] = spec.max_grad_norm
    if spec.structure.kind is Kind.RADAM:
        return [_derive(values) | _derive_rectified(values) | common for values in spec.values]
    return [_derive(values) | common for values in spec.values]


def _derive_rectified(values: Mapping[str, Any]) -> dict[str, float]:
    """Returns RAdam's rho for infinitely many updates, and how far it is above -2 / log(beta2)."""
    beta = values["betas"][1]
    limit = 2 / (1 - beta) - 1
    return {"rho_limit": limit, "rho_difference": limit + 2 / math.log(beta) if beta > 0 else limit}


def _derive(values: Mapping[str, Any]) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for name, value in values.items():
        if name == "betas":
            for number, beta in enumerate(value, 1):
                numbers[f"beta{number}"] = beta
                numbers[f"one_minus_beta{number}"] = 1 - beta
                numbers[f"log_beta{number}"] = math.log(beta) if beta > 0 else -math.inf
        elif isinstance(value, tuple):
            numbers |= {f"{name}{number}": part for number, part in enumerate(value, 1)}
        else:
            numbers[name] = value
            if name in ("alpha", "dampening", "momentum", "rho"):
                numbers[f"one_minus_{name}"] = 1 - value
    return numbers


# The formulas.

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


def _with_decay(case: Case, change: jax.Array) -> jax.Array:
    """Adds the decay of weights that decay apart from the gradients to a change."""
    if case.group.decays and case.group.decouples_decay:
        return change - case.numbers["lr"] * case.numbers["weight_decay"] * case.parameter
    return change


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
    buffer_factor = jnp.where(is_on, jnp.where(is_first, zero, momentum), one)
    gradient_factor = jnp.where(is_on, jnp.where(is_first, one, numbers["one_minus_dampening"]), zero)
    buffer = buffer_factor * buffer + gradient_factor * gradient
    direction = gradient + momentum * buffer if nesterov else jnp.where(is_on, buffer, gradient)
    if scales:
        buffer = buffer * numbers["velocity_scaling"]
    return -numbers["lr"] * direction, {"momentum_buffer": buffer}


_MEAN, _SQUARES = Slot("exp_avg"), Slot("exp_avg_sq", is_second_order=True)


def average(case: Case, corrects_mean: bool = True) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """Returns Adam's averages: corrected, with the root of the second one; and uncorrected."""
    gradient, numbers = case.direction, case.numbers
    mean, square = case.slots["exp_avg"], case.slots["exp_avg_sq"]
    mean = mean + numbers["one_minus_beta1"] * (gradient - mean)
    square = numbers["beta2"] * square + numbers["one_minus_beta2"] * gradient * gradient
    root, slots = jnp.sqrt(square), {"exp_avg": mean, "exp_avg_sq": square}
    if case.structure.corrects_bias:
        if corrects_mean:
            mean = mean / -jnp.expm1(numbers[STEP] * numbers["log_beta1"])
        root = root / jnp.sqrt(-jnp.expm1(numbers[STEP] * numbers["log_beta2"]))
    return mean, root, slots


def _adam(case: Case) -> Update:
    mean, root, slots = average(case)
    numbers = case.numbers
    change = -numbers["lr"] * (mean / (root + numbers["eps"]))
    return _with_decay(case, change), slots


def _lamb(case: Case) -> Update:
    mean, root, slots = average(case)
    numbers = case.numbers
    update = mean / (root + numbers["eps"])
    if case.group.decays:
        update = update + numbers["weight_decay"] * case.parameter
    weight_norm = jnp.minimum(_norm(case.parameter, case.has_rows), numbers["max_weight_norm"])
    update_norm = _norm(update, case.has_rows)
    is_usable = (weight_norm > 0) & (update_norm > 0)
    one = jnp.ones_like(update_norm)
    ratio = jnp.where(is_usable, weight_norm / jnp.where(is_usable, update_norm, one), one)
    return -numbers["lr"] * ratio * update, slots


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
    slots = {"square_avg": square}
    if case.group.centered:
        mean = case.slots["grad_avg"]
        mean = mean + numbers["one_minus_alpha"] * (gradient - mean)
        slots["grad_avg"] = mean
        square = square - mean * mean
    if uses_tf_variant:
        direction = gradient / jnp.sqrt(square + numbers["eps"])
    else:
        direction = gradient / (jnp.sqrt(square) + numbers["eps"])
    if not case.group.has_momentum:
        return -numbers["lr"] * direction, slots
    momentum, rate = numbers["momentum"], numbers["lr"]
    one, zero = jnp.ones_like(momentum), jnp.zeros_like(momentum)
    is_on = momentum > 0  # as for SGD
    inner, outer = (rate, one) if uses_tf_variant else (one, rate)
    buffer = jnp.where(is_on, momentum, one) * case.slots["momentum_buffer"]
    buffer = buffer + jnp.where(is_on, inner, zero) * direction
    slots["momentum_buffer"] = buffer
    return -jnp.where(is_on, outer * buffer, rate * direction), slots


# The formulas of torch's optimizers that PopTorch lacks.


def _adagrad(case: Case) -> Update:
    gradient, numbers = case.direction, case.numbers
    total = case.slots["sum"] + gradient * gradient
    rate = numbers["lr"] / (1 + (numbers[STEP] - 1) * numbers["lr_decay"])
    return -rate * gradient / (jnp.sqrt(total) + numbers["eps"]), {"sum": total}


def _adadelta(case: Case) -> Update:
    gradient, numbers = case.direction, case.numbers
    rho, one_minus_rho, eps = numbers["rho"], numbers["one_minus_rho"], numbers["eps"]
    square = rho * case.slots["square_avg"] + one_minus_rho * gradient * gradient
    delta = jnp.sqrt(case.slots["acc_delta"] + eps) / jnp.sqrt(square + eps) * gradient
    acc_delta = rho * case.slots["acc_delta"] + one_minus_rho * delta * delta
    return -numbers["lr"] * delta, {"square_avg": square, "acc_delta": acc_delta}


def _adamax(case: Case) -> Update:
    gradient, numbers = case.direction, case.numbers
    mean = case.slots["exp_avg"] + numbers["one_minus_beta1"] * (gradient - case.slots["exp_avg"])
    largest = jnp.maximum(numbers["beta2"] * case.slots["exp_inf"], jnp.abs(gradient) + numbers["eps"])
    rate = numbers["lr"] / -jnp.expm1(numbers[STEP] * numbers["log_beta1"])
    return -rate * mean / largest, {"exp_avg": mean, "exp_inf": largest}


def _nadam(case: Case) -> Update:
    mean, root, slots = average(case, corrects_mean=False)
    numbers = case.numbers

    def momentum(step: jax.Array) -> jax.Array:
        return numbers["beta1"] * (1 - 0.5 * 0.96 ** (step * numbers["momentum_decay"]))

    now, after = momentum(numbers[STEP]), momentum(numbers[STEP] + 1)
    product = case.slots["mu_product"].astype(jnp.float32) * now.astype(jnp.float32)  # as torch keeps it
    product = product.astype(now.dtype)
    of_gradient = numbers["lr"] * (1 - now) / (1 - product)
    of_mean = numbers["lr"] * after / (1 - product * after)
    change = -(of_gradient * case.direction + of_mean * mean) / (root + numbers["eps"])
    return _with_decay(case, change), slots | {"mu_product": product}


def _radam(case: Case) -> Update:
    mean, root, slots = average(case)
    numbers = case.numbers
    # torch's rho of update t is rho_inf - 2 t beta2^t / (1 - beta2^t), the difference of two large numbers.
    # With x = -t log(beta2) that is rho_inf - 2 t / x + 2 t / x * (1 - x / expm1(x)). Where x is small, the
    # last factor is computed by its series (with Bernoulli's numbers).
    x = -numbers[STEP] * numbers["log_beta2"]
    scale = -2 / numbers["log_beta2"]
    series, square = jnp.full_like(x, 1 / 47900160), x * x
    for divisor in (1209600, 30240, 720, 12):
        series = 1 / divisor - square * series
    series = x * (1 / 2 - x * series)
    is_small = x < 0.25
    safe = jnp.where(is_small, jnp.ones_like(x), x)
    rho = numbers["rho_difference"] + scale * jnp.where(is_small, series, 1 - safe / jnp.expm1(safe))
    is_rectified = rho > 5
    usable_rho, limit = jnp.where(is_rectified, rho, 6 * jnp.ones_like(rho)), numbers["rho_limit"]
    factor = jnp.sqrt(
        (usable_rho - 4) * (usable_rho - 2) * limit / ((limit - 4) * (limit - 2) * usable_rho)
    )
    # The root is corrected here already; torch adds epsilon before the correction.
    correction = jnp.sqrt(-jnp.expm1(-x))
    rectified = factor * mean / (root + numbers["eps"] / correction)
    change = -numbers["lr"] * jnp.where(is_rectified, rectified, mean)
    return _with_decay(case, change), slots


def _asgd(case: Case) -> Update:
    numbers, eta, share = case.numbers, case.slots["eta"], case.slots["mu"]
    change = -eta * (numbers["lambd"] * case.parameter + case.direction)
    parameter, mean = case.parameter + change, case.slots["ax"]
    slots = {
        "eta": numbers["lr"] / (1 + numbers["lambd"] * numbers["lr"] * numbers[STEP]) ** numbers["alpha"],
        "mu": 1 / jnp.maximum(numbers[STEP] - numbers["t0"], jnp.ones_like(share)),
        "ax": jnp.where(share == 1, parameter, mean + share * (parameter - mean)),
    }
    return change, slots


def _rprop(case: Case) -> Update:
    gradient, numbers = case.direction, case.numbers
    sign = jnp.sign(gradient * case.slots["prev"])
    factor = jnp.where(sign > 0, numbers["etas2"], jnp.where(sign < 0, numbers["etas1"], 1.0))
    size = case.slots["step_size"] * factor.astype(gradient.dtype)
    size = jnp.clip(size, numbers["step_sizes1"], numbers["step_sizes2"])
    gradient = jnp.where(sign < 0, jnp.zeros_like(gradient), gradient)
    return -jnp.sign(gradient) * size, {"prev": gradient, "step_size": size}


def _adafactor_slots(
    structure: Structure, group: GroupStructure, shape: tuple[int, ...]
) -> tuple[Slot, ...]:
    del structure, group
    if len(shape) < 2:
        return (COUNT, Slot("variance", is_second_order=True))
    return (
        COUNT,
        Slot("row_var", is_second_order=True, shape=(*shape[:-1], 1)),
        Slot("col_var", is_second_order=True, shape=(*shape[:-2], 1, shape[-1])),
    )


def _adafactor(case: Case) -> Update:
    gradient, numbers = case.direction, case.numbers
    share = numbers[STEP] ** numbers["beta2_decay"]
    # A negative number stands for None: the dtype's epsilon.
    of_dtype = jnp.full_like(share, jnp.finfo(case.parameter.dtype).eps)
    least = jnp.where(numbers["eps1"] < 0, of_dtype, numbers["eps1"])
    squares = gradient * gradient
    if case.parameter.ndim < 2:
        variance = case.slots["variance"]
        slots = {"variance": variance + share * (squares - variance)}
        estimate = slots["variance"]
    else:
        row, column = case.slots["row_var"], case.slots["col_var"]
        row = row + share * (jnp.mean(squares, -1, keepdims=True) - row)
        column = column + share * (jnp.mean(squares, -2, keepdims=True) - column)
        slots = {"row_var": row, "col_var": column}
        estimate = row * column / jnp.maximum(jnp.mean(row, -2, keepdims=True), least)
    update = jax.lax.rsqrt(jnp.maximum(estimate, least * least)) * gradient
    size = _root_mean_square(case.parameter)
    rate = jnp.minimum(numbers["lr"], jax.lax.rsqrt(numbers[STEP])) * jnp.maximum(numbers["eps2"], size)
    rate = rate / jnp.maximum(jnp.ones_like(rate), _root_mean_square(update) / numbers["d"])
    return _with_decay(case, -rate * update), slots


def _root_mean_square(value: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.mean(value * value))


def _muon(case: Case) -> Update:
    gradient, numbers = case.direction, case.numbers
    buffer, momentum = case.slots["momentum_buffer"], numbers["momentum"]
    buffer = buffer + numbers["one_minus_momentum"] * (gradient - buffer)
    update = gradient + momentum * (buffer - gradient) if case.group.nesterov else buffer
    rows, columns = case.parameter.shape
    scale = {
        "original": math.sqrt(max(1, rows / columns)),
        "match_rms_adamw": 0.2 * math.sqrt(max(rows, columns)),
    }.get(case.group.adjustment, 1.0)
    change = -numbers["lr"] * scale * _orthogonalize(update, case)
    return _with_decay(case, change), {"momentum_buffer": buffer}


def _orthogonalize(update: jax.Array, case: Case) -> jax.Array:
    """Runs the Newton-Schulz iteration, rounding each step to bfloat16 as torch does."""
    numbers, rows = case.numbers, update.shape[0]
    matrix = _round(update if rows <= update.shape[1] else update.T)
    norm = _round(jnp.sqrt(jnp.sum(matrix * matrix)))
    matrix = _round(matrix / jnp.maximum(norm, numbers["eps"]))
    first, second, third = (numbers[f"ns_coefficients{number}"] for number in (1, 2, 3))
    for _step in range(case.group.num_iterations):
        gram = _round(_multiply(matrix, matrix.T))
        mixed = _round(second * gram + third * _multiply(gram, gram))
        matrix = _round(first * matrix + _multiply(mixed, matrix))
    return matrix if rows <= update.shape[1] else matrix.T


def _round(value: jax.Array) -> jax.Array:
    return jax.lax.reduce_precision(value, exponent_bits=8, mantissa_bits=7)


def _multiply(left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.matmul(left, right, precision="highest")


def _fixed_slots(*slots: Slot) -> SlotsOf:
    """Returns a function that gives these slots for every structure, group and shape."""
    return lambda _structure, _group, _shape: slots


FORMULAS: Mapping[Kind, Formula] = {
    Kind.SGD: Formula(_sgd_slots, _sgd),
    Kind.ADAM: Formula(_fixed_slots(COUNT, _MEAN, _SQUARES), _adam),
    Kind.RMSPROP: Formula(_rmsprop_slots, _rmsprop),
    Kind.LAMB: Formula(_fixed_slots(COUNT, _MEAN, _SQUARES), _lamb),
    Kind.ADAGRAD: Formula(
        _fixed_slots(COUNT, Slot("sum", is_second_order=True, initial="initial_accumulator_value")),
        _adagrad,
    ),
    Kind.ADADELTA: Formula(
        _fixed_slots(
            COUNT, Slot("square_avg", is_second_order=True), Slot("acc_delta", is_second_order=True)
        ),
        _adadelta,
    ),
    Kind.ADAMAX: Formula(_fixed_slots(COUNT, _MEAN, Slot("exp_inf", is_second_order=True)), _adamax),
    Kind.NADAM: Formula(
        _fixed_slots(COUNT, _MEAN, _SQUARES, Slot("mu_product", initial=1.0, shape=())), _nadam
    ),
    Kind.RADAM: Formula(_fixed_slots(COUNT, _MEAN, _SQUARES), _radam),
    Kind.ASGD: Formula(
        _fixed_slots(
            COUNT, Slot("eta", initial="lr", shape=()), Slot("mu", initial=1.0, shape=()), Slot("ax")
        ),
        _asgd,
    ),
    Kind.RPROP: Formula(_fixed_slots(COUNT, Slot("prev"), Slot("step_size", initial="lr")), _rprop),
    Kind.ADAFACTOR: Formula(_adafactor_slots, _adafactor),
    Kind.MUON: Formula(_fixed_slots(Slot("momentum_buffer")), _muon),
}

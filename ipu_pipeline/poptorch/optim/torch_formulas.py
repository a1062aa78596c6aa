"""The formulas, for one variable, of torch's optimizers that PopTorch lacks.

Source: the algorithms in the documentation of torch.optim.Adagrad, Adadelta, Adamax, NAdam, RAdam, ASGD,
Rprop, Adafactor and Muon. Optax has most of them with other formulas (where epsilon is added, how rates
decay), and with rates that are compiled in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from ipu_pipeline.poptorch.optim.formulas import COUNT, STEP, Case, Formula, Slot, SlotsOf, Update, average
from ipu_pipeline.poptorch.optim.specs import GroupStructure, Kind, Structure

__all__ = ["TORCH_FORMULAS"]

_MEAN, _SQUARES = Slot("exp_avg"), Slot("exp_avg_sq", is_second_order=True)


def _with_decay(case: Case, change: jax.Array) -> jax.Array:
    """Adds the decay of weights that decay apart from the gradients to a change."""
    if case.group.decays and case.group.decouples_decay:
        return change - case.numbers["lr"] * case.numbers["weight_decay"] * case.parameter
    return change


def _adagrad(case: Case) -> Update:
    gradient, numbers = case.direction, case.numbers
    total = case.slots["sum"] + gradient * gradient
    rate = numbers["lr"] / (1 + (numbers[STEP] - 1) * numbers["lr_decay"])
    return -rate * gradient / (jnp.sqrt(total) + numbers["eps"]), {"sum": total}


def _adadelta(case: Case) -> Update:
    gradient, numbers = case.direction, case.numbers
    rho, rest, eps = numbers["rho"], numbers["one_minus_rho"], numbers["eps"]
    square = rho * case.slots["square_avg"] + rest * gradient * gradient
    delta = jnp.sqrt(case.slots["acc_delta"] + eps) / jnp.sqrt(square + eps) * gradient
    kept = rho * case.slots["acc_delta"] + rest * delta * delta
    return -numbers["lr"] * delta, {"square_avg": square, "acc_delta": kept}


def _adamax(case: Case) -> Update:
    gradient, numbers = case.direction, case.numbers
    mean = case.slots["exp_avg"] + numbers["one_minus_beta1"] * (gradient - case.slots["exp_avg"])
    largest = jnp.maximum(numbers["beta2"] * case.slots["exp_inf"], jnp.abs(gradient) + numbers["eps"])
    rate = numbers["lr"] / -jnp.expm1(numbers[STEP] * numbers["log_beta1"])
    return -rate * mean / largest, {"exp_avg": mean, "exp_inf": largest}


def _nadam(case: Case) -> Update:
    mean, root, kept = average(case, corrects_mean=False)
    numbers = case.numbers

    def momentum(step: jax.Array) -> jax.Array:
        return numbers["beta1"] * (1 - 0.5 * 0.96 ** (step * numbers["momentum_decay"]))

    now, after = momentum(numbers[STEP]), momentum(numbers[STEP] + 1)
    product = case.slots["mu_product"].astype(jnp.float32) * now.astype(jnp.float32)  # as torch keeps it
    product = product.astype(now.dtype)
    of_gradient = numbers["lr"] * (1 - now) / (1 - product)
    of_mean = numbers["lr"] * after / (1 - product * after)
    change = -(of_gradient * case.direction + of_mean * mean) / (root + numbers["eps"])
    return _with_decay(case, change), kept | {"mu_product": product}


def _radam(case: Case) -> Update:
    mean, root, kept = average(case)
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
    known, limit = jnp.where(is_rectified, rho, 6 * jnp.ones_like(rho)), numbers["rho_limit"]
    factor = jnp.sqrt((known - 4) * (known - 2) * limit / ((limit - 4) * (limit - 2) * known))
    # The root is corrected here already; torch adds epsilon before the correction.
    correction = jnp.sqrt(-jnp.expm1(-x))
    rectified = factor * mean / (root + numbers["eps"] / correction)
    change = -numbers["lr"] * jnp.where(is_rectified, rectified, mean)
    return _with_decay(case, change), kept


def _asgd(case: Case) -> Update:
    numbers, eta, share = case.numbers, case.slots["eta"], case.slots["mu"]
    change = -eta * (numbers["lambd"] * case.parameter + case.direction)
    parameter, mean = case.parameter + change, case.slots["ax"]
    kept = {
        "eta": numbers["lr"] / (1 + numbers["lambd"] * numbers["lr"] * numbers[STEP]) ** numbers["alpha"],
        "mu": 1 / jnp.maximum(numbers[STEP] - numbers["t0"], jnp.ones_like(share)),
        "ax": jnp.where(share == 1, parameter, mean + share * (parameter - mean)),
    }
    return change, kept


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
        kept = {"variance": variance + share * (squares - variance)}
        estimate = kept["variance"]
    else:
        row, column = case.slots["row_var"], case.slots["col_var"]
        row = row + share * (jnp.mean(squares, -1, keepdims=True) - row)
        column = column + share * (jnp.mean(squares, -2, keepdims=True) - column)
        kept = {"row_var": row, "col_var": column}
        estimate = row * column / jnp.maximum(jnp.mean(row, -2, keepdims=True), least)
    update = jax.lax.rsqrt(jnp.maximum(estimate, least * least)) * gradient
    size = _root_mean_square(case.parameter)
    rate = jnp.minimum(numbers["lr"], jax.lax.rsqrt(numbers[STEP])) * jnp.maximum(numbers["eps2"], size)
    rate = rate / jnp.maximum(jnp.ones_like(rate), _root_mean_square(update) / numbers["d"])
    return _with_decay(case, -rate * update), kept


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
    found = _round(update if rows <= update.shape[1] else update.T)
    norm = _round(jnp.sqrt(jnp.sum(found * found)))
    found = _round(found / jnp.maximum(norm, numbers["eps"]))
    first, second, third = (numbers[f"ns_coefficients{number}"] for number in (1, 2, 3))
    for _step in range(case.group.num_iterations):
        gram = _round(_multiply(found, found.T))
        mixed = _round(second * gram + third * _multiply(gram, gram))
        found = _round(first * found + _multiply(mixed, found))
    return found if rows <= update.shape[1] else found.T


def _round(value: jax.Array) -> jax.Array:
    return jax.lax.reduce_precision(value, exponent_bits=8, mantissa_bits=7)


def _multiply(left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.matmul(left, right, precision="highest")


def _always(*slots: Slot) -> SlotsOf:
    """Returns a function that gives these slots for every structure, group and shape."""

    def find(_structure: Structure, _group: GroupStructure, _shape: tuple[int, ...]) -> tuple[Slot, ...]:
        return slots

    return find


def _counting(*slots: Slot) -> SlotsOf:
    return _always(COUNT, *slots)


TORCH_FORMULAS: Mapping[Kind, Formula] = {
    Kind.ADAGRAD: Formula(
        _counting(Slot("sum", is_second_order=True, initial="initial_accumulator_value")), _adagrad
    ),
    Kind.ADADELTA: Formula(
        _counting(Slot("square_avg", is_second_order=True), Slot("acc_delta", is_second_order=True)),
        _adadelta,
    ),
    Kind.ADAMAX: Formula(_counting(_MEAN, Slot("exp_inf", is_second_order=True)), _adamax),
    Kind.NADAM: Formula(_counting(_MEAN, _SQUARES, Slot("mu_product", initial=1.0, shape=())), _nadam),
    Kind.RADAM: Formula(_counting(_MEAN, _SQUARES), _radam),
    Kind.ASGD: Formula(
        _counting(Slot("eta", initial="lr", shape=()), Slot("mu", initial=1.0, shape=()), Slot("ax")),
        _asgd,
    ),
    Kind.RPROP: Formula(_counting(Slot("prev"), Slot("step_size", initial="lr")), _rprop),
    Kind.ADAFACTOR: Formula(_adafactor_slots, _adafactor),
    Kind.MUON: Formula(_always(Slot("momentum_buffer")), _muon),
}

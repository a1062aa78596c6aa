"""Elementwise arithmetic, of complex numbers too, and activation functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ipu_pipeline.poptorch.lowering.arrays import (
    Array,
    absolute,
    as_axis,
    in_float32,
    is_complex,
    is_float,
    is_inexact,
    operands,
    to_float,
    widen,
    wrap_number,
)
from ipu_pipeline.poptorch.lowering.registry import lowers

# Arithmetic.

_function: Callable[..., Array]


# These round once, even in 16 bits.
for _name, _function in {
    "abs": absolute,
    "atan": jnp.arctan,
    "bitwise_not": jnp.invert,
    "cos": jnp.cos,
    "erf": jax.scipy.special.erf,
    "exp": jnp.exp,
    "isinf": jnp.isinf,
    "isnan": jnp.isnan,
    "log": jnp.log,
    "log1p": jnp.log1p,
    "logical_not": jnp.logical_not,
    "neg": jnp.negative,
    "signbit": jnp.signbit,
    "sin": jnp.sin,
    "sqrt": jnp.sqrt,
    "tanh": jnp.tanh,
}.items():
    lowers(_name)(_function)

# These round several times.
for _name, _function in {
    "acos": jnp.arccos,
    "acosh": jnp.arccosh,
    "asin": jnp.arcsin,
    "asinh": jnp.arcsinh,
    "atanh": jnp.arctanh,
    "cosh": jnp.cosh,
    "erfc": jax.scipy.special.erfc,
    "erfinv": jax.scipy.special.erfinv,
    "exp2": jnp.exp2,
    "expm1": jnp.expm1,
    "lgamma": lambda x: jax.scipy.special.gammaln(to_float(x)),
    "log10": jnp.log10,
    "log2": jnp.log2,
    "reciprocal": lambda x: 1 / x,
    "rsqrt": lambda x: jax.lax.rsqrt(to_float(x)),
    "sigmoid": lambda x: jax.lax.logistic(to_float(x)),
    "sinc": jnp.sinc,
    "sinh": jnp.sinh,
    "tan": jnp.tan,
}.items():
    lowers(_name)(in_float32(_function))


def _rounding(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Makes a rounding function leave integers unchanged."""
    return lambda x: function(x) if is_float(x) else x


lowers("ceil")(_rounding(jnp.ceil))
lowers("floor")(_rounding(jnp.floor))
lowers("trunc")(_rounding(jnp.trunc))
lowers("round.default")(_rounding(jnp.round))


@lowers("round.decimals")
def _round(x: Array, *, decimals: int) -> Array:
    if not is_float(x):
        return x
    scale = 10.0 ** abs(decimals)
    wide = widen(x)
    return jnp.round(wide * scale) / scale if decimals >= 0 else jnp.round(wide / scale) * scale


@lowers("sign", "sgn")
def _sign(x: Array) -> Array:
    if x.dtype == jnp.bool_:
        return x
    if is_complex(x):  # not jnp.sign, whose gradient is 0
        return jnp.where(x == 0, 0, x / jnp.where(x == 0, 1, jnp.abs(x)))
    return jnp.where(jnp.isnan(x), 0, jnp.sign(x)) if is_float(x) else jnp.sign(x)


def _binary(function: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    """Makes a function of two operands, each of which may be a number."""
    return lambda a, b: function(*operands(a, b))


def _nextafter(a: Array, b: Array) -> Array:
    """Computes nextafter, with the gradient of what it nearly is: a, or b where they are equal."""
    near = jnp.where(a == b, b, a)
    fixed = jax.lax.stop_gradient((a, b, near))
    return near - fixed[2] + jnp.nextafter(*fixed[:2])


_BINARY_FUNCTIONS: dict[str, Callable[..., Array]] = {
    "atan2": in_float32(jnp.arctan2),
    "bitwise_and": jnp.bitwise_and,
    "__lshift__": jnp.left_shift,
    "__rshift__": jnp.right_shift,
    "bitwise_left_shift": jnp.left_shift,
    "bitwise_or": jnp.bitwise_or,
    "bitwise_right_shift": jnp.right_shift,
    "bitwise_xor": jnp.bitwise_xor,
    "copysign": jnp.copysign,
    "fmax": jnp.fmax,
    "fmin": jnp.fmin,
    "fmod": jnp.fmod,
    "gcd": jnp.gcd,
    "hypot": in_float32(jnp.hypot),
    "lcm": jnp.lcm,
    "ldexp": lambda x, exponent: to_float(x) * jnp.exp2(to_float(exponent)),
    "logaddexp": in_float32(jnp.logaddexp),
    "logaddexp2": in_float32(jnp.logaddexp2),
    "logical_and": jnp.logical_and,
    "logical_or": jnp.logical_or,
    "logical_xor": jnp.logical_xor,
    "maximum": jnp.maximum,
    "minimum": jnp.minimum,
    "mul": jnp.multiply,
    "nextafter": _nextafter,
    "remainder": jnp.remainder,
}
for _name, _function in _BINARY_FUNCTIONS.items():
    lowers(_name)(_binary(_function))
lowers("xlogy", keep=True)(_binary(in_float32(jax.scipy.special.xlogy)))


def _comparison(function: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    """Makes a comparison that rounds a number to the array's dtype first."""
    return lambda a, b: function(a, b if isinstance(b, jax.Array) else wrap_number(a, b))


for _name, _function in {
    "eq": jnp.equal,
    "ge": jnp.greater_equal,
    "gt": jnp.greater,
    "le": jnp.less_equal,
    "lt": jnp.less,
    "ne": jnp.not_equal,
}.items():
    lowers(_name)(_comparison(_function))


def _scaled(a: Array, b: Array, alpha: Any) -> tuple[Array, Array]:
    """Returns the operands of `a + alpha * b`."""
    a, b = operands(a, b)
    return (a, b) if alpha == 1 else (widen(a), widen(b) * alpha)


@lowers("add")
def _add(a: Array, b: Array, alpha: Any = 1) -> Array:
    return jnp.add(*_scaled(a, b, alpha))


@lowers("sub")
def _sub(a: Array, b: Array, alpha: Any = 1) -> Array:
    return jnp.subtract(*_scaled(a, b, alpha))


@lowers("rsub")
def _rsub(a: Array, b: Array, alpha: Any = 1) -> Array:
    return jnp.subtract(*_scaled(b, a, alpha))


@lowers("div")
def _div(a: Array, b: Array, *, rounding_mode: str | None = None) -> Array:
    narrow = jnp.result_type(a, b)
    a, b = operands(a, b)
    if rounding_mode is None:
        return jnp.true_divide(a, b)
    wide = jnp.result_type(widen(a), widen(b))
    a, b = (jax.lax.stop_gradient(jnp.asarray(value, wide)) for value in (a, b))
    if rounding_mode == "floor":
        return jnp.floor_divide(a, b)
    # torch rounds a quotient to 16 bits before it truncates.
    return jnp.trunc((a / b).astype(narrow)) if is_float(a) else jax.lax.div(*jnp.broadcast_arrays(a, b))


@lowers("pow")
def _pow(base: Array, exponent: Array) -> Array:
    if isinstance(exponent, (int, float)):
        if not is_inexact(base) and isinstance(exponent, float):
            base = to_float(base)
        if float(exponent).is_integer() and abs(exponent) <= 8:
            return jax.lax.integer_pow(base if abs(exponent) <= 2 else widen(base), int(exponent))
    base, exponent = widen(base), widen(exponent)
    if isinstance(base, jax.Array) and is_inexact(base):  # JAX's gradient of 0 ** 0 is NaN
        base = jnp.where(exponent == 0, jax.lax.stop_gradient(base), base)
    return jnp.power(base, exponent)


@lowers("clamp")
def _clamp(x: Array, min: Array = None, max: Array = None) -> Array:
    """Clamps x. At a bound the gradient goes to x. If the bounds cross, the upper one counts."""
    if min is not None:
        x, low = jnp.broadcast_arrays(x, min) if isinstance(min, jax.Array) else (x, min)
        below = (x < low) | (jnp.isnan(low) & ~jnp.isnan(x))
        x = jnp.where(below, low, x)
    if max is not None:
        x, high = jnp.broadcast_arrays(x, max) if isinstance(max, jax.Array) else (x, max)
        above = (x > high) | (jnp.isnan(high) & ~jnp.isnan(x))
        x = jnp.where(above, high, x)
    return x


@lowers("where")
def _where(condition: Array, a: Array, b: Array) -> Array:
    return jnp.where(condition, a, b)


@lowers("masked_fill")
def _masked_fill(x: Array, mask: Array, value: Any) -> Array:
    return jnp.where(mask, value, x)


@lowers("clone", "alias", "_to_copy", "lift_fresh_copy", "lift_fresh", "contiguous")
def _identity(x: Array, *, dtype: Any = None) -> Array:
    del dtype  # the graph's result decides it
    return x


@lowers("detach", keep=True)
def _detach(x: Array) -> Array:
    return jax.lax.stop_gradient(x)


@lowers("copy")
def _copy(x: Array, source: Array) -> Array:
    return jnp.broadcast_to(source, x.shape)


@lowers("_assert_tensor_metadata", "_assert_async")
def _no_check(*args: Any, **kwargs: Any) -> None:
    """Leaves out checks: of facts that were known when the graph was made, and of values.

    A compiled program cannot raise errors: `torch.nn.functional.one_hot`, which checks values, gives
    zeros for a class that is out of range.
    """
    del args, kwargs


@lowers("frexp.Tensor")
def _frexp(x: Array) -> tuple[Array, Array]:
    """Computes frexp, whose mantissa is differentiated as a multiple of x."""
    fixed = jax.lax.stop_gradient(x)
    mantissa, exponent = jnp.frexp(widen(fixed))
    return mantissa + (x - fixed) * jnp.exp2(-exponent.astype(mantissa.dtype)), exponent


# Complex numbers, made, taken apart and conjugated.

lowers("complex")(jax.lax.complex)
lowers("conj", "_conj", "conj_physical", "_conj_physical")(lambda x: jnp.conj(x) if is_complex(x) else x)
lowers("resolve_conj", "resolve_neg", "_conj_copy", "lift")(lambda x: x)
lowers("_neg_view", "_neg_view_copy")(jnp.negative)
lowers("real")(jnp.real)
lowers("imag")(jnp.imag)


@lowers("view_as_real", "view_as_real_copy")
def _view_as_real(x: Array) -> Array:
    return jnp.stack([x.real, x.imag], -1)


@lowers("view_as_complex", "view_as_complex_copy")
def _view_as_complex(x: Array) -> Array:
    return jax.lax.complex(x[..., 0], x[..., 1])


@lowers("polar")
def _polar(length: Array, angle: Array) -> Array:
    return jax.lax.complex(length * jnp.cos(angle), length * jnp.sin(angle))


@lowers("angle")
def _angle(x: Array) -> Array:
    """Computes angles: for reals 0 or pi (NaN for NaN), without a gradient. At 0 the gradient is 0."""
    if is_complex(x):
        safe = jnp.where(x == 0, 1, x)
        return jnp.where(x == 0, jnp.angle(jax.lax.stop_gradient(x)), jnp.arctan2(safe.imag, safe.real))
    angle = jnp.where(x < 0, jnp.pi, 0.0)
    return jnp.where(jnp.isnan(x), x, angle) if is_inexact(x) else angle


# Activation functions, with torch's gradients where the pieces of a function meet.


@lowers("relu")
def _relu(x: Array) -> Array:
    return jnp.where(x <= 0, 0, x)  # the gradient at 0 is 0, and NaN passes


@lowers("leaky_relu")
def _leaky_relu(x: Array, negative_slope: float = 0.01) -> Array:
    return jnp.where(x > 0, x, widen(x) * negative_slope)


@lowers("hardtanh")
def _hardtanh(x: Array, min_val: float = -1, max_val: float = 1) -> Array:
    """Clamps to bounds. Unlike clamp's, the gradient at a bound is 0."""
    low, high = (jnp.asarray(bound, x.dtype) for bound in (min_val, max_val))
    return jnp.where(x <= low, low, jnp.where(x >= high, high, x))


@lowers("hardsigmoid", keep=True)
def _hardsigmoid(x: Array) -> Array:
    x = widen(x)
    return jnp.where(x <= -3, 0, jnp.where(x >= 3, 1, x / 6 + 0.5))


@lowers("hardswish", keep=True)
def _hardswish(x: Array) -> Array:
    x = widen(x)
    return jnp.where(x <= -3, 0, jnp.where(x >= 3, x, x * (x + 3) / 6))


@lowers("celu", keep=True)
def _celu(x: Array, alpha: float = 1) -> Array:
    return _elu(x, alpha, 1, 1 / alpha)


@lowers("elu")
def _elu(x: Array, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Array:
    x = widen(x)
    negative = jnp.where(x > 0, 0, x)
    return jnp.where(x > 0, x * scale, jnp.expm1(negative * input_scale) * (alpha * scale))


@lowers("gelu")
def _gelu(x: Array, *, approximate: str = "none") -> Array:
    return jax.nn.gelu(widen(x), approximate=approximate == "tanh")


@lowers("silu", keep=True)
def _silu(x: Array) -> Array:
    return jax.nn.silu(widen(x))


@lowers("softplus", keep=True)
def _softplus(x: Array, beta: float = 1, threshold: float = 20) -> Array:
    """Computes softplus, x above the threshold. torch's decomposition gives NaN where exp overflows."""
    x = widen(x)
    scaled = x * beta
    is_linear = scaled > threshold
    return jnp.where(is_linear, x, jnp.log1p(jnp.exp(jnp.where(is_linear, 0, scaled))) / beta)


@lowers("mish", keep=True)
def _mish(x: Array) -> Array:
    x = widen(x)
    return x * jnp.tanh(jax.nn.softplus(x))


@lowers("log_sigmoid", keep=True)
def _log_sigmoid(x: Array) -> Array:
    return jax.nn.log_sigmoid(widen(x))


@lowers("_softmax")
def _softmax(x: Array, dim: int, half_to_float: bool = False) -> Array:
    del half_to_float  # the graph's dtype decides it
    return jax.nn.softmax(to_float(x), as_axis(dim, x.ndim)) if x.ndim else jnp.ones_like(x)


@lowers("_log_softmax")
def _log_softmax(x: Array, dim: int, half_to_float: bool = False) -> Array:
    del half_to_float
    return jax.nn.log_softmax(to_float(x), as_axis(dim, x.ndim)) if x.ndim else jnp.zeros_like(x)


@lowers("_safe_softmax", keep=True)
def _safe_softmax(x: Array, dim: int, *, dtype: Any = None) -> Array:
    """Computes a softmax that is 0 where all elements are minus infinity."""
    del dtype
    is_empty = jnp.all(x == -jnp.inf, as_axis(dim, x.ndim), keepdims=True)
    return jnp.where(is_empty, 0, _softmax(jnp.where(is_empty, 0, to_float(x)), dim))

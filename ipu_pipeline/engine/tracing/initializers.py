"""Initializers by their names in Keras, and the values that initializers give on a CPU."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.engine import jaxprs
from ipu_pipeline.engine.jaxprs.cpu_forms import encrypt, threefry_dtype


def glorot_uniform(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """TensorFlow 1's default initializer, for every rank: uniform between -limit and limit.

    The limit is sqrt(6 / (fan_in + fan_out)). For rank 2 and more the fans are JAX's; for rank 1 both are
    the size, and for a scalar both are 1.

    Source: tf.glorot_uniform_initializer of TensorFlow 1.15; Glorot and Bengio (2010).
    """
    if len(shape) >= 2:
        return jax.nn.initializers.glorot_uniform()(key, shape, dtype)
    fan = shape[0] if shape else 1
    scaled = jax.nn.initializers.variance_scaling(1 / fan, "fan_in", "uniform")
    return scaled(key, (1, fan), dtype).reshape(shape)


def _random_uniform(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jax.random.uniform(key, shape, dtype, -0.05, 0.05)


def _orthogonal(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    wide = np.promote_types(dtype, np.float32)  # there is no QR decomposition in 16 bits
    return jax.nn.initializers.orthogonal()(key, shape, wide).astype(dtype)


_INITIALIZERS: dict[str, Callable[[], Any]] = {
    "glorot_normal": jax.nn.initializers.glorot_normal,
    "glorot_uniform": lambda: glorot_uniform,
    "he_normal": jax.nn.initializers.he_normal,
    "he_uniform": jax.nn.initializers.he_uniform,
    "lecun_normal": jax.nn.initializers.lecun_normal,
    "lecun_uniform": jax.nn.initializers.lecun_uniform,
    "normal": lambda: jax.nn.initializers.normal(0.05),
    "ones": lambda: jax.nn.initializers.ones,
    "orthogonal": lambda: _orthogonal,
    "random_normal": lambda: jax.nn.initializers.normal(0.05),
    "random_uniform": lambda: _random_uniform,
    "uniform": lambda: _random_uniform,
    "zeros": lambda: jax.nn.initializers.zeros,
}


def find_initializer(initializer: Any) -> Any:
    """Finds an initializer by its name; anything but a string is left to `get_variable`."""
    if not isinstance(initializer, str):
        return initializer
    if initializer not in _INITIALIZERS:
        raise ValueError(
            f"There is no initializer {initializer!r}; there are {', '.join(_INITIALIZERS)}, or give a "
            "function or an array."
        )
    return _INITIALIZERS[initializer]()


# Initial values on a CPU, without a program for each shape.
#
# An initializer such as Glorot's is a few operations by element on random bits, and JAX compiles them for
# each shape. But the bits of an element depend on the key and on the element's number only. So here the
# same operations are compiled for a number of elements, and fill an array of any shape piece by piece.
# Operations that JAX would do one after another, each as a program of its own, such as a product with a
# scale, NumPy does. The values are those that the initializer gives, to the last bit.

# Of initializers that are called only for their values, so that they may be traced.
_KNOWN_MODULES = frozenset(
    {"jax._src.nn.initializers", "jax.nn.initializers", "ipu_pipeline.engine.tracing.initializers"}
)

_SIZES = (1 << 14, 1 << 20)  # of the pieces: of small arrays, and of others
_MOST_ELEMENTS = 1 << 32  # the numbers of elements have another word from there on
_SAME = ("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "copy", "stop_gradient")
_BY_ELEMENT = frozenset(
    [
        "abs",
        "add",
        "and",
        "bitcast_convert_type",
        "ceil",
        "clamp",
        "convert_element_type",
        "cos",
        "div",
        "eq",
        "erf",
        "erf_inv",
        "exp",
        "exp2",
        "expm1",
        "floor",
        "ge",
        "gt",
        "integer_pow",
        "is_finite",
        "le",
        "log",
        "log1p",
        "lt",
        "max",
        "min",
        "mul",
        "ne",
        "neg",
        "nextafter",
        "not",
        "or",
        "pow",
        "round",
        "rsqrt",
        "select_n",
        "shift_left",
        "shift_right_arithmetic",
        "shift_right_logical",
        "sign",
        "sin",
        "sqrt",
        "square",
        "sub",
        "tan",
        "tanh",
        "xor",
    ]
)
# Rounded to the nearest by NumPy as by XLA, so the same.
_BY_NUMPY: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "mul": np.multiply,
    "neg": np.negative,
    "sub": np.subtract,
}


class _OtherwiseError(Exception):
    """An initializer is not made of operations by element on random bits."""


def draw(initializer: Callable[..., Any], key: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """Makes the value that an initializer of JAX or Keras gives, without a program for each shape.

    Returns:
      An array of NumPy that nobody else has; None if the initializer has to be called: it is another one,
      or values are made on another device than a CPU.
    """
    size = math.prod(shape)
    config = cast(Any, jax.config)
    is_known = getattr(initializer, "__module__", None) in _KNOWN_MODULES and 1 < size < _MOST_ELEMENTS
    if not is_known or key.dtype != threefry_dtype() or not config.jax_threefry_partitionable:
        return None
    if (config.jax_default_device or jax.devices()[0]).platform != "cpu":
        return None
    try:
        closed_jaxpr = jax.make_jaxpr(lambda traced_key: initializer(traced_key, shape, dtype))(key)
    except Exception:  # its arguments are wrong, which shows when it is called
        return None
    (result, *more) = closed_jaxpr.out_avals
    if more or result.shape != shape or result.dtype != dtype:
        return None
    try:
        values = _evaluate(closed_jaxpr, key, size)
    except _OtherwiseError:
        return None
    return values.reshape(shape)


def _evaluate(closed_jaxpr: Any, key: Any, size: int) -> Any:
    """Evaluates a jaxpr equation by equation, as JAX does where nothing is jitted around it."""
    jaxpr = closed_jaxpr.jaxpr
    constants = dict(zip(jaxpr.constvars, closed_jaxpr.consts, strict=True))
    flat = jaxprs.FlatJaxpr(list(jaxpr.invars), list(jaxpr.eqns), list(jaxpr.outvars), constants)
    program = jaxprs.extract(flat, flat.outputs).closed_jaxpr.jaxpr
    env: dict[Any, Any] = {**constants, jaxpr.invars[0]: key}

    def read(atom: Any) -> Any:
        return env[atom] if jaxprs.is_var(atom) else _content(atom)

    if program.effects:
        raise _OtherwiseError
    for equation in program.eqns:
        name, values = equation.primitive.name, [read(atom) for atom in equation.invars]
        sizes = {atom.aval.size for atom in (*equation.invars, *equation.outvars)}
        (*extra, var) = equation.outvars
        if sizes <= {1}:
            env.update(zip(equation.outvars, _run(equation, values), strict=True))
        elif sizes - {1, size} or extra or var.aval.size != size:
            raise _OtherwiseError
        elif name in _SAME:
            env[var] = np.broadcast_to(np.ravel(values[0]), (size,))
        elif name in _BY_NUMPY and {atom.aval.dtype for atom in equation.invars} == {var.aval.dtype}:
            env[var] = _BY_NUMPY[name](*map(np.ravel, values))
        elif jaxprs.is_inlined(equation):
            env[var] = _fill(equation, values, size)
        else:
            raise _OtherwiseError
    (result,) = program.outvars
    return np.array(np.broadcast_to(np.ravel(read(result)), (size,)))


def _content(literal: Any) -> np.ndarray[Any, Any]:
    return np.asarray(literal.val, literal.aval.dtype)


def _run(equation: Any, values: Sequence[Any]) -> list[Any]:
    """Runs an equation by itself."""
    variables = jaxprs.variables_in(equation.invars)
    arguments = [value for value, atom in zip(values, equation.invars, strict=True) if jaxprs.is_var(atom)]
    flat = jaxprs.FlatJaxpr(variables, [equation], list(equation.outvars), {})
    return jaxprs.close(flat)(*arguments)


def _fill(equation: Any, values: Sequence[Any], size: int) -> Any:
    """Fills an array with what a call of a jitted function makes, piece by piece."""
    (name,) = {"jaxpr", "call_jaxpr"} & set(equation.params)
    flat = jaxprs.flatten(equation.params[name])
    if any(np.size(value) != 1 for value in values) or flat.constants:
        raise _OtherwiseError
    steps = _Steps(flat, size)
    length = min((candidate for candidate in _SIZES if candidate >= size), default=_SIZES[-1])
    function = _jit(steps, length)
    scalars = [value if _is_key(value) else np.ravel(value)[0] for value in values]
    elements = np.empty(-(-size // length) * length, equation.outvars[0].aval.dtype)
    for begin in range(0, size, length):
        elements[begin : begin + length] = function(np.uint32(begin), *scalars)
    return elements[:size]


def _is_key(value: Any) -> bool:
    """Whether a value is a random key."""
    return bool(jnp.issubdtype(value.dtype, jax.dtypes.prng_key))


class _Steps:
    """The equations of a function of scalars that makes an array by element.

    The steps of one function for arrays of two sizes are equal, and have the same hash.
    """

    def __init__(self, flat: jaxprs.FlatJaxpr, size: int) -> None:
        """Reads the equations."""
        self._equations = flat.equations
        self._inputs, (self._output, *more) = flat.inputs, flat.outputs
        places = {var: place for place, var in enumerate(flat.inputs)}
        described: list[Any] = [str(var.aval.dtype) for var in flat.inputs]
        self._is_array: dict[Any, bool] = {}
        if more or not jaxprs.is_var(self._output):
            raise _OtherwiseError
        for equation in flat.equations:
            (var, *extra), name = equation.outvars, equation.primitive.name
            sizes = {atom.aval.size for atom in (*equation.invars, var)}
            is_array = var.aval.size == size
            is_drawn = name == "random_bits" and sizes == {1, size}
            if extra or sizes - {1, size} or not (is_drawn or name in _SAME or name in _BY_ELEMENT):
                raise _OtherwiseError
            self._is_array[var] = is_array
            operands = tuple(
                places[atom]
                if jaxprs.is_var(atom)
                else (str(_content(atom).dtype), _content(atom).tobytes())
                for atom in equation.invars
            )
            places[var] = len(places)
            shapes = {
                "shape",
                "broadcast_dimensions",
                "new_sizes",
                "dimensions",
                "sharding",
                "out_sharding",
            }
            options = tuple(
                (key, str(value)) for key, value in equation.params.items() if key not in shapes
            )
            described.append((name, operands, is_array, str(var.aval.dtype), options))
        if not self._is_array.get(self._output, False):
            raise _OtherwiseError
        self._described = (*described, places[self._output])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Steps) and self._described == other._described

    def __hash__(self) -> int:
        return hash(self._described)

    def run(self, length: int, begin: Any, *scalars: Any) -> Any:
        """Makes the `length` elements from number `begin` on."""
        env = dict(zip(self._inputs, scalars, strict=True))
        for equation in self._equations:
            (var,), name = equation.outvars, equation.primitive.name
            values = [env[atom] if jaxprs.is_var(atom) else _content(atom) for atom in equation.invars]
            if self._is_array[var] and name != "random_bits":
                values = [jnp.broadcast_to(value, (length,)) for value in values]
            if name == "random_bits":
                env[var] = _draw_bits(values[0], equation.params["bit_width"], begin, length)
            elif name in _SAME:
                env[var] = values[0]
            else:
                env[var] = equation.primitive.bind(*values, **equation.params)
        return env[self._output]


@functools.lru_cache(maxsize=64)
def _jit(steps: _Steps, length: int) -> Callable[..., Any]:
    return jax.jit(functools.partial(steps.run, length))


def _draw_bits(key: Any, bit_width: int, begin: Any, length: int) -> Any:
    """The random bits of elements; see `jax.random.bits` with `jax_threefry_partitionable`."""
    data = jax.random.key_data(key)
    numbers = begin + jax.lax.iota(np.uint32, length)
    first, second = encrypt(data[0], data[1], jnp.zeros_like(numbers), numbers)
    if bit_width == 64:
        return (first.astype(np.uint64) << np.uint64(32)) | second.astype(np.uint64)
    return (first ^ second).astype(f"uint{bit_width}")

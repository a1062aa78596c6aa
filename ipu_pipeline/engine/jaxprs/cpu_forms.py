"""Forms of programs that are faster on a CPU: products turned, and random bits written out."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.engine.jaxprs.flat import (
    CHECKPOINTS,
    Equation,
    ExtractedJaxpr,
    InlineFunction,
    Var,
    aval_struct,
    close,
    flatten,
    has_primitive,
    is_var,
    rewriting,
)
from ipu_pipeline.ground import jax_compat, jax_core

# Products of matrices, computed the way round in which their results are read.
#
# JAX's rule for the gradient of a kernel computes the transposed gradient, and transposes it. Where inputs
# have more than one axis of samples, as sequences have, XLA's CPU compiler then copies an operand of the
# product: steps of dense layers on (8, 32, 256) to (8, 64, 128) take 1.2 to 1.4 times as long on one core.
# Products of less than 32 bits stay as they are: XLA rounds one that is turned at another place, so that
# training in bfloat16 would differ from the plain loop's by about 0.4% instead of 0.05%.

_LEAST_BYTES = 4  # of an element of a product that is turned
_WITH_BODIES = {"scan", "while", "cond", "jit", "pjit", *CHECKPOINTS}


def turn_products(program: ExtractedJaxpr) -> ExtractedJaxpr:
    """Turns the products of a program whose results are only transposed, also in loops and branches."""
    return dataclasses.replace(program, closed_jaxpr=jax_core.map_jaxprs(_turn, program.closed_jaxpr))


def _turn(jaxpr: Any) -> Any:
    reads = Counter(
        atom
        for atoms in (jaxpr.outvars, *(equation.invars for equation in jaxpr.eqns))
        for atom in atoms
        if is_var(atom)
    )
    products: dict[Var, Equation] = {}
    equations, turned = [], set[Var]()
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general" and reads[equation.outvars[0]] == 1:
            products[equation.outvars[0]] = equation
        elif equation.primitive.name == "transpose" and equation.invars[0] in products:
            product = products[equation.invars[0]]
            if _is_other_way_round(product, equation.params["permutation"]):
                turned.add(equation.invars[0])
                equation = _other_way_round(product, equation.outvars)
        elif equation.primitive.name in _WITH_BODIES:
            equation = equation.replace(
                params={name: jax_core.map_jaxprs(_turn, value) for name, value in equation.params.items()}
            )
        equations.append(equation)
    remaining = [equation for equation in equations if not turned.intersection(equation.outvars)]
    return jaxpr.replace(eqns=remaining)


def _is_other_way_round(product: Equation, permutation: tuple[int, ...]) -> bool:
    """Whether a permutation puts the axes of the right operand of a product before those of the left."""
    if product.outvars[0].aval.dtype.itemsize < _LEAST_BYTES:
        return False
    params = product.params
    (contracted, _right), (batch, _batch) = params["dimension_numbers"]
    num_batch, num_left = len(batch), product.invars[0].aval.ndim - len(contracted) - len(batch)
    axes = range(product.outvars[0].aval.ndim)
    order = (*axes[:num_batch], *axes[num_batch + num_left :], *axes[num_batch : num_batch + num_left])
    precisions = params["precision"] if isinstance(params["precision"], tuple) else (params["precision"],)
    is_even = len(set(precisions)) == 1 and params.get("out_sharding") is None
    return is_even and tuple(permutation) == order


def _other_way_round(product: Equation, outvars: list[Var]) -> Equation:
    (left, right), (left_batch, right_batch) = product.params["dimension_numbers"]
    params = {**product.params, "dimension_numbers": ((right, left), (right_batch, left_batch))}
    return product.replace(invars=product.invars[::-1], outvars=outvars, params=params)


# Random bits for a CPU: the rounds of Threefry written out.
#
# On a CPU, JAX lowers Threefry as a loop over its rounds, of whose body XLA makes several kernels for each
# shape. Written out, all rounds are a part of the kernel that uses the bits. The bits are the same, and the
# program of a stage with dropout takes three quarters of the time to compile. Keys are folded by JAX's
# loop: written out, each fold would be part of every kernel that uses it.
#
# Source: Salmon et al. (2011), "Parallel random numbers: as easy as 1, 2, 3". What the bits of a shape are
# made of is JAX's own definition, in which only the cipher is replaced.

_NAME, _CIPHER = "random_bits", "threefry2x32"
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def draws_bits(jaxpr: Any) -> bool:
    """Whether random bits are drawn in a `Jaxpr`, or in a jaxpr within it."""
    return jax_compat.threefry is not None and any(has_primitive(inner, _NAME) for inner in jaxpr.eqns)


def with_fast_random_bits(function: Callable[..., Any]) -> Callable[..., list[Any]]:
    """Makes a function draw its random bits without loops, also where it has loops and branches."""
    return rewriting(function, _rewrite)


def _rewrite(jaxpr: Any) -> Any:
    return jaxpr.replace(eqns=list(map(_replace, jaxpr.eqns))) if draws_bits(jaxpr) else jaxpr


def _replace(equation: Any) -> Any:
    """Replaces an equation that draws random bits by a call, which XLA inlines."""
    if equation.primitive.name != _NAME or equation.invars[0].aval.dtype != threefry_dtype():
        params = {name: jax_core.map_jaxprs(_rewrite, value) for name, value in equation.params.items()}
        return equation.replace(params=params)
    key = equation.invars[0].aval
    is_partitionable = bool(cast(Any, jax.config).jax_threefry_partitionable)
    width, shape = equation.params["bit_width"], tuple(equation.params["shape"])
    call = _make_call(key.shape, width, shape, is_partitionable)
    (call_equation,) = jax.make_jaxpr(call)(aval_struct(key)).jaxpr.eqns
    return jax_compat.in_place_of(
        equation, call_equation.replace(invars=list(equation.invars), outvars=list(equation.outvars))
    )


@functools.cache
def threefry_dtype() -> Any:
    """The dtype of Threefry's keys."""
    return jax.eval_shape(lambda: jax.random.key(0, impl=_CIPHER)).dtype


@functools.lru_cache(maxsize=256)
def _make_call(
    keys: tuple[int, ...], bit_width: int, shape: tuple[int, ...], is_partitionable: bool
) -> Callable[..., Any]:
    """Jits JAX's definition of random bits, with the cipher written out."""
    del is_partitionable  # it is read where the bits are drawn

    def draw(data: Any) -> Any:
        assert jax_compat.threefry is not None
        return jax_compat.threefry.random_bits(data, bit_width, shape)

    def draw_all(key: Any) -> Any:
        function: Callable[..., Any] = draw
        for _axis in keys:
            function = jax.vmap(function)
        return function(jax.random.key_data(key))

    def rule(equation: Any, atoms: list[Any], inline: InlineFunction) -> list[Any] | None:
        if equation.primitive.name != _CIPHER:
            return None
        return list(inline(jax.make_jaxpr(encrypt)(*(aval_struct(atom.aval) for atom in atoms)), atoms))

    @jax.jit
    def random_bits(key: Any) -> Any:
        return close(flatten(jax.make_jaxpr(draw_all)(key), rule))(key)[0]

    return random_bits


def encrypt(key0: Any, key1: Any, x0: Any, x1: Any) -> list[Any]:
    """Threefry2x32 with 20 rounds: two words of the key, and two arrays of words; uint32."""
    keys = [key0, key1, key0 ^ key1 ^ np.uint32(0x1BD11BDA)]
    x0, x1 = x0 + keys[0], x1 + keys[1]
    for number in range(5):
        for distance in _ROTATIONS[number % 2]:
            x0 = x0 + x1
            x1 = (x1 << np.uint32(distance)) | (x1 >> np.uint32(32 - distance))
            x1 = x0 ^ x1
        x0 = x0 + keys[(number + 1) % 3]
        x1 = x1 + keys[(number + 2) % 3] + np.uint32(number + 1)
    return list(jnp.broadcast_arrays(x0, x1))

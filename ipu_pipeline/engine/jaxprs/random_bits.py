"""Random bits for a CPU: the rounds of Threefry written out.

On a CPU, JAX lowers Threefry as a loop over its rounds, of whose body XLA makes several kernels for each
shape. Written out, all rounds are a part of the kernel that uses the bits. The bits are the same, and the
program of a stage with dropout takes three quarters of the time to compile. Keys are folded by JAX's loop:
written out, each fold would be part of every kernel that uses it.

Source: Salmon et al. (2011), "Parallel random numbers: as easy as 1, 2, 3". What the bits of a shape are
made of is JAX's own definition, in which only the cipher is replaced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.engine.jaxprs.flat import InlineFunction, aval_struct, close, flatten, has_primitive
from ipu_pipeline.ground import jax_compat, jax_core

__all__ = ["draws_bits", "encrypt", "threefry_dtype", "with_fast_random_bits"]

_NAME, _CIPHER = "random_bits", "threefry2x32"
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def draws_bits(jaxpr: Any) -> bool:
    """Whether random bits are drawn in a `Jaxpr`, or in a jaxpr within it."""
    return jax_compat.threefry is not None and any(has_primitive(one, _NAME) for one in jaxpr.eqns)


def with_fast_random_bits(function: Callable[..., Any]) -> Callable[..., list[Any]]:
    """Makes a function draw its random bits without loops, also where it has loops and branches."""

    def called(*arguments: Any) -> list[Any]:
        closed_jaxpr = jax.make_jaxpr(function)(*arguments)
        results: list[Any] = jax_core.jaxpr_as_fun(jax_core.map_jaxprs(_rewrite, closed_jaxpr))(*arguments)
        return results

    return called


def _rewrite(jaxpr: Any) -> Any:
    return jaxpr.replace(eqns=list(map(_replace, jaxpr.eqns))) if draws_bits(jaxpr) else jaxpr


def _replace(equation: Any) -> Any:
    """The equation that takes the place of one: a call, which XLA inlines."""
    if equation.primitive.name != _NAME or equation.invars[0].aval.dtype != threefry_dtype():
        params = {name: jax_core.map_jaxprs(_rewrite, value) for name, value in equation.params.items()}
        return equation.replace(params=params)
    key = equation.invars[0].aval
    is_partitionable = bool(cast(Any, jax.config).jax_threefry_partitionable)
    width, shape = equation.params["bit_width"], tuple(equation.params["shape"])
    call = _make_call(key.shape, width, shape, is_partitionable)
    (made,) = jax.make_jaxpr(call)(aval_struct(key)).jaxpr.eqns
    return jax_compat.in_place_of(
        equation, made.replace(invars=list(equation.invars), outvars=list(equation.outvars))
    )


@functools.cache
def threefry_dtype() -> Any:
    """The dtype of Threefry's keys."""
    return jax.eval_shape(lambda: jax.random.key(0, impl=_CIPHER)).dtype


@functools.lru_cache(maxsize=256)
def _make_call(
    keys: tuple[int, ...], bit_width: int, shape: tuple[int, ...], is_partitionable: bool
) -> Callable[..., Any]:
    """Jits what random bits mean for JAX, with the cipher written out."""
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

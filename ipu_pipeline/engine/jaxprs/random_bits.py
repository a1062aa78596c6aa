"""Random bits for a CPU: the rounds of Threefry written out.

On a CPU, JAX lowers Threefry as a loop over its rounds, whose every turn goes through the arrays several
times. Written out, XLA makes one kernel of all rounds. The bits are the same, they take a third of the time,
and the program of a stage with dropout takes two thirds of the time to compile.

Source: Salmon et al. (2011), "Parallel random numbers: as easy as 1, 2, 3". What the bits of a shape, a
split and a fold are made of is JAX's own definition, in which only the cipher is replaced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.random
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core

from ipu_pipeline.engine.jaxprs.flat import close, flatten, has_primitive
from ipu_pipeline.ground import jax_compat

__all__ = ["draws_random_bits", "with_fast_random_bits"]

_CIPHER = "threefry2x32"
_DRAWS = ("random_bits",)
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def draws_random_bits(jaxpr: Any) -> bool:
    """Whether random bits are drawn in a `Jaxpr`, or in a jaxpr within it."""
    return any(has_primitive(equation, name) for equation in jaxpr.eqns for name in (*_DRAWS, _CIPHER))


def with_fast_random_bits(function: Callable[..., Any]) -> Callable[..., list[Any]]:
    """Makes a function draw its random bits without loops, also within loops and branches."""

    def called(*arguments: Any) -> list[Any]:
        closed_jaxpr = jax.make_jaxpr(function)(*arguments)
        results: list[Any] = jex_core.jaxpr_as_fun(_rewrite(closed_jaxpr))(*arguments)
        return results

    return called


def _rewrite(closed_jaxpr: Any) -> Any:
    return closed_jaxpr.replace(jaxpr=_rewrite_open(closed_jaxpr.jaxpr))


def _rewrite_open(jaxpr: Any) -> Any:
    return jaxpr.replace(eqns=list(map(_replace, jaxpr.eqns)))


def _replace(equation: Any) -> Any:
    """The equation that takes the place of one: a call, which XLA inlines."""
    call = _find_call(equation)
    if call is None:
        params = {name: _rewrite_parameter(value) for name, value in equation.params.items()}
        return equation.replace(params=params)
    avals = [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in equation.invars]
    (made,) = jax.make_jaxpr(call)(*avals).jaxpr.eqns
    return jax_compat.in_place_of(
        equation, made.replace(invars=list(equation.invars), outvars=list(equation.outvars))
    )


def _rewrite_parameter(value: Any) -> Any:
    if type(value) in (tuple, list):
        return type(value)(map(_rewrite_parameter, value))
    if isinstance(value, jex_core.ClosedJaxpr):
        return _rewrite(value) if draws_random_bits(value.jaxpr) else value
    if isinstance(value, jex_core.Jaxpr):
        return _rewrite_open(value) if draws_random_bits(value) else value
    return value


def _find_call(equation: Any) -> Callable[..., Any] | None:
    """The jitted function that computes an equation; None if the equation stays as it is."""
    name = equation.primitive.name
    if name == _CIPHER:
        return _encrypt
    if name not in _DRAWS:
        return None
    avals = [atom.aval for atom in equation.invars]
    key, *rest = avals
    if key.dtype != _key_dtype() or any(aval.shape != key.shape for aval in rest):
        return None
    structs = tuple(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals)
    return _make_call(name, tuple(sorted(equation.params.items())), structs)


@functools.cache
def _key_dtype() -> Any:
    return jax.eval_shape(lambda: jax.random.key(0, impl=_CIPHER)).dtype


@functools.lru_cache(maxsize=256)
def _make_call(
    name: str, params: tuple[tuple[str, Any], ...], structs: Sequence[jax.ShapeDtypeStruct]
) -> Callable[..., Any]:
    """Jits what one of `_DRAWS` means for JAX, with another cipher."""
    options, threefry = dict(params), jax.extend.random.threefry_prng_impl

    def draw(data: Any, *rest: Any) -> Any:
        if name == "random_bits":
            return threefry.random_bits(data, options["bit_width"], options["shape"])
        if name == "random_split":
            return threefry.split(data, options["shape"])
        return threefry.fold_in(data, *rest)

    def call(key: Any, *rest: Any) -> Any:
        function: Callable[..., Any] = draw
        for _axis in key.shape:
            function = jax.vmap(function)
        drawn = function(jax.random.key_data(key), *rest)
        return drawn if name == "random_bits" else jax.random.wrap_key_data(drawn, impl=_CIPHER)

    def rule(equation: Any, atoms: list[Any], inline: Any) -> list[Any] | None:
        if equation.primitive.name != _CIPHER:
            return None
        return list(inline(jax.make_jaxpr(_encrypt)(*(_struct(atom) for atom in atoms)), atoms))

    program = close(flatten(jax.make_jaxpr(call)(*structs), rule))

    @jax.jit
    def threefry_written_out(*arguments: Any) -> Any:
        return program(*arguments)[0]

    return threefry_written_out


def _struct(atom: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype)


@jax.jit
def _encrypt(key0: Any, key1: Any, x0: Any, x1: Any) -> list[Any]:
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
    return jnp.broadcast_arrays(x0, x1)

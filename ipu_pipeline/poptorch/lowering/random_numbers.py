"""Random numbers from `engine.next_rng_key`: new ones in each call, micro-batch, and loop iteration.

They have the distributions of torch's numbers, but are not the same numbers.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ipu_pipeline.engine import next_rng_key
from ipu_pipeline.ground.context_variables import bound
from ipu_pipeline.poptorch.lowering.arrays import Array, to_float, widen
from ipu_pipeline.poptorch.lowering.registry import lowers

# The iteration number of each loop around what is being traced, the outermost first.
_iterations: contextvars.ContextVar[tuple[Array, ...]] = contextvars.ContextVar("iterations", default=())


def loop_iteration(iteration: Array) -> contextlib.AbstractContextManager[None]:
    """Makes a loop's body, traced in the `with` block, draw new numbers in each iteration.

    The body is traced once: with one key, a dropout would drop the same elements in each iteration.
    """
    return bound(_iterations, (*_iterations.get(), iteration))


def draw_key() -> Array:
    """Returns a random key that nothing else gets."""
    key = next_rng_key()
    for iteration in _iterations.get():
        key = jax.random.fold_in(key, iteration)
    return key


def keep_mask(p: float, shape: tuple[int, ...]) -> Array:
    """Draws which elements a dropout keeps, each with the probability 1 - p."""
    return jax.random.bernoulli(draw_key(), 1 - p, shape)


def drop(x: Array, p: float) -> tuple[Array, Array]:
    """Drops elements with the probability p. Returns the result, and which elements are kept."""
    if p == 0:
        return x, jnp.ones(x.shape, bool)
    if p == 1:
        return jnp.zeros_like(x) * x, jnp.zeros(x.shape, bool)
    mask = keep_mask(p, x.shape)
    return jnp.where(mask, widen(x) / (1 - p), 0).astype(x.dtype), mask


@lowers("native_dropout")
def _native_dropout(x: Array, p: float, train: bool | None) -> tuple[Array, Array]:
    return drop(x, p) if train is not False else (x, jnp.ones(x.shape, bool))


def _wide(dtype: Any) -> Any:
    """Returns the dtype to draw in: float32 at least."""
    return jnp.result_type(dtype or jnp.float32, jnp.float32)


@lowers("rand")
def _rand(size: Sequence[int], *, dtype: Any = None) -> Array:
    return jax.random.uniform(draw_key(), tuple(size), _wide(dtype))


@lowers("rand_like")
def _rand_like(x: Array, *, dtype: Any = None) -> Array:
    return jax.random.uniform(draw_key(), x.shape, _wide(dtype or x.dtype))


@lowers("randn")
def _randn(size: Sequence[int], *, dtype: Any = None) -> Array:
    return jax.random.normal(draw_key(), tuple(size), _wide(dtype))


@lowers("randn_like")
def _randn_like(x: Array, *, dtype: Any = None) -> Array:
    return jax.random.normal(draw_key(), x.shape, _wide(dtype or x.dtype))


@lowers("randint", "randint.low")
def _randint(*args: Any, dtype: Any = None) -> Array:
    """Takes (high, size) or (low, high, size)."""
    *bounds, size = args
    low, high = bounds if len(bounds) == 2 else (0, *bounds)
    del dtype  # the graph's result decides it
    return jax.random.randint(draw_key(), tuple(size), low, high)


@lowers("randint_like")
def _randint_like(x: Array, *bounds: int, dtype: Any = None) -> Array:
    """Takes (x, high) or (x, low, high)."""
    del dtype  # the graph's result decides it
    low, high = bounds if len(bounds) == 2 else (0, *bounds)
    return jax.random.randint(draw_key(), x.shape, low, high)


@lowers("randperm")
def _randperm(n: int, *, dtype: Any = None) -> Array:
    del dtype
    return jax.random.permutation(draw_key(), n)


@lowers("bernoulli.default", "bernoulli.Tensor", "bernoulli.p")
def _bernoulli(x: Array, p: Any = None) -> Array:
    """Draws ones with the probability p, or x if p is not given."""
    chance = x if p is None else jnp.broadcast_to(jnp.asarray(p), x.shape)
    return jax.random.bernoulli(draw_key(), jax.lax.stop_gradient(to_float(chance))).astype(x.dtype)


@lowers("uniform", keep=True)
def _uniform(x: Array, low: float = 0, high: float = 1) -> Array:
    return jax.random.uniform(draw_key(), x.shape, _wide(x.dtype), low, high)


@lowers("normal_functional", keep=True)
def _normal_functional(x: Array, mean: float = 0, std: float = 1) -> Array:
    return jax.random.normal(draw_key(), x.shape, _wide(x.dtype)) * std + mean


def _broadcast_shape(mean: Any, std: Any) -> tuple[int, ...]:
    return jnp.broadcast_shapes(jnp.shape(mean), jnp.shape(std))


@lowers("normal.Tensor_float", "normal.float_Tensor", "normal.Tensor_Tensor", keep=True)
def _normal(mean: Any, std: Any = 1) -> Array:
    shape, dtype = _broadcast_shape(mean, std), _wide(jnp.result_type(mean, std))
    return jax.random.normal(draw_key(), shape, dtype) * std + mean


@lowers("exponential", keep=True)
def _exponential(x: Array, lambd: float = 1) -> Array:
    return jax.random.exponential(draw_key(), x.shape, _wide(x.dtype)) / lambd


@lowers("multinomial", keep=True)
def _multinomial(x: Array, num_samples: int, replacement: bool = False) -> Array:
    logits = jnp.log(jax.lax.stop_gradient(to_float(x)))
    key = draw_key()
    if replacement:
        drawn = jax.random.categorical(key, logits, -1, shape=(num_samples, *x.shape[:-1]))
        return jnp.moveaxis(drawn, 0, -1)
    return jax.lax.top_k(logits + jax.random.gumbel(key, x.shape, logits.dtype), num_samples)[1]


@lowers("rrelu_with_noise_functional", keep=True)
def _rrelu(
    x: Array, noise: Array, lower: float = 0.125, upper: float = 1 / 3, training: bool = False
) -> Any:
    """Gives negative elements random slopes in training, also returned second; else the mean slope."""
    if not training:
        result, noise = jnp.where(x > 0, x, widen(x) * ((lower + upper) / 2)), noise
    else:
        slopes = jax.random.uniform(draw_key(), x.shape, _wide(x.dtype), lower, upper)
        noise = jnp.where(x > 0, 1, slopes).astype(noise.dtype)
        result = x * noise
    return result, noise

"""Stages that sleep, and a small GPT, both for one request at a time, as a generator takes them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.emulation import stages
from ipu_pipeline import engine

__all__ = ["WORDS", "make_emulated", "make_gpt"]

WORDS = 64
_SIZE = 2048  # of what emulated stages multiply: then XLA starts their programs asynchronously

Model = tuple[Sequence[Callable[..., Any]], Sequence[Any], dict[str, Any]]


def make_emulated(num_stages: int, milliseconds: float) -> Model:
    """Stages that sleep, their parameters, and the variables of a state."""

    def stage(number: int, w: Any, x: Any, position: Any) -> Any:
        if number == 0:
            x = jnp.full((len(x), _SIZE), 1, jnp.float32) * (x[:, None] + 1)
        seen = engine.get_variable(f"seen{number}", (_SIZE,), initializer="zeros", trainable=False)
        x = stages.sleep(x + seen, milliseconds) * w
        engine.assign(f"seen{number}", jnp.mean(x, axis=0))
        return x[:, :WORDS] if number == num_stages - 1 else (x, position)

    rng = np.random.default_rng(0)
    parameters = [rng.uniform(0.1, 0.9, _SIZE).astype(np.float32) for _stage in range(num_stages)]
    functions = [functools.partial(stage, number) for number in range(num_stages)]
    return functions, parameters, {f"stage{n}/parameter": w for n, w in enumerate(parameters)}


def make_gpt(num_stages: int, width: int, num_layers: int, length: int, num_words: int) -> Model:
    """A GPT whose layers are divided among stages."""
    rng = np.random.default_rng(0)
    heads = width // 32

    def draw(*shape: int) -> Any:
        return (rng.normal(size=shape) / shape[0] ** 0.5).astype(np.float32)

    def keep(name: str, new: Any, position: Any) -> Any:
        # Heads come first: so XLA needs no transposed copy of the cache for products of several slots.
        shape = (heads, length, width // heads)
        old = engine.get_variable(name, shape, initializer="zeros", trainable=False)
        cache = jax.lax.dynamic_update_slice(old, new, (0, position, 0))
        engine.assign(name, cache)
        return cache

    def attend(name: str, p: Any, x: Any, position: Any) -> Any:
        split = [y.reshape(len(y), heads, -1).swapaxes(0, 1) for y in jnp.split(x @ p["qkv"], 3, axis=-1)]
        queries = split[0]
        keys, values = keep(f"{name}/keys", split[1], position), keep(f"{name}/values", split[2], position)
        scores = jnp.einsum("hqd,hkd->hqk", queries, keys) * 32**-0.5
        is_known = jnp.arange(length) <= position + jnp.arange(len(x))[:, None]
        weights = jax.nn.softmax(jnp.where(is_known, scores, -jnp.inf))
        return jnp.einsum("hqk,hkd->hqd", weights, values).swapaxes(0, 1).reshape(x.shape) @ p["out"]

    def normalize(x: Any) -> Any:
        return jax.nn.standardize(x, epsilon=1e-5)

    def stage(number: int, p: Any, x: Any, position: Any) -> Any:
        if number == 0:
            x = p["words"][x] + p["places"][position + jnp.arange(len(x))]
        for index, layer in enumerate(p["layers"]):
            x = x + attend(f"stage{number}/layer{index}", layer, normalize(x), position)
            x = x + jax.nn.gelu(normalize(x) @ layer["up"]) @ layer["down"]
        return normalize(x) @ p["head"] if number == num_stages - 1 else (x, position)

    shapes = {
        "qkv": (width, 3 * width),
        "out": (width, width),
        "up": (width, 4 * width),
        "down": (4 * width, width),
    }
    layers = [{name: draw(*shape) for name, shape in shapes.items()} for _layer in range(num_layers)]
    own = np.array_split(np.arange(num_layers), num_stages)
    parameters: list[Any] = [{"layers": [layers[index] for index in part]} for part in own]
    parameters[0] |= {"words": draw(num_words, width) * 20, "places": draw(length, width) * 20}
    parameters[-1]["head"] = draw(width, num_words)
    functions = [functools.partial(stage, number) for number in range(num_stages)]
    leaves = jax.tree_util.tree_flatten_with_path(list(parameters))[0]
    names = ["/".join(jax.tree_util.keystr((key,), simple=True) for key in path) for path, _leaf in leaves]
    return functions, parameters, {f"stage{n}": x for n, (_path, x) in zip(names, leaves, strict=True)}

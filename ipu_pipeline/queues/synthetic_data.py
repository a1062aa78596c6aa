"""Synthetic data: values that stay on the devices replace an infeed's, and zeros replace results.

On IPUs TF_POPLAR_FLAGS=--use_synthetic_data did this, to see what a program takes without its host, and
--synthetic_data_initializer said which values. IPU_PIPELINE_SYNTHETIC_DATA says both in one word.

Source of the flags: "TF_POPLAR_FLAGS environment variable" in Graphcore's "Targeting the IPU from
TensorFlow 1". We deviate where its values would end a program at once: without an initializer values are 0
(there they are undefined), and `uniform` draws from [0, 1) (there from the whole range of the dtype).
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.engine import Pipeline
from ipu_pipeline.engine.fronts import Take
from ipu_pipeline.ground.checks import require
from ipu_pipeline.ground.user_warnings import warn_once

VARIABLE, FLAGS = "IPU_PIPELINE_SYNTHETIC_DATA", "TF_POPLAR_FLAGS"
_WORDS = ("zeros", "random")
_FLAG, _INITIALIZER = "--use_synthetic_data", "--synthetic_data_initializer"
_DRAWN = ("random", "normal", "uniform")
_NUM_DRAWN = 1 << 16  # values; larger arrays repeat them, because drawing takes the host's time


def uses_synthetic_data() -> bool:
    """Whether the environment asks for synthetic data. Warns, once, of other flags in TF_POPLAR_FLAGS."""
    return _find_initializer() is not None


def make_values(leaf: jax.ShapeDtypeStruct) -> np.ndarray[Any, Any]:
    """The values of a leaf of a micro-batch, by the environment; 0 if that asks for no synthetic data.

    Floating-point numbers are finite. Integers, which may be labels or indices, are 0 unless a number is
    asked for; `normal` makes them 1, as on IPUs.
    """
    initializer, dtype = _find_initializer() or "zeros", np.dtype(leaf.dtype)
    if initializer in _DRAWN and jnp.issubdtype(dtype, jnp.inexact):
        generator = np.random.default_rng(0)
        count = min(_NUM_DRAWN, math.prod(leaf.shape))
        uniform = initializer == "uniform"
        values = generator.random(count) if uniform else generator.standard_normal(count)
        return np.resize(values.astype(dtype), leaf.shape)
    number = int(initializer == "normal") if initializer in (*_WORDS, *_DRAWN) else int(float(initializer))
    if jnp.issubdtype(dtype, jnp.integer):
        limits = jnp.iinfo(dtype)
        if not limits.min <= number <= limits.max:
            raise ValueError(
                f"{FLAGS}: {_INITIALIZER}={initializer} does not fit {dtype.name}, which elements of the "
                f"infeed have. Give a number from {limits.min} to {limits.max}."
            )
    return np.full(leaf.shape, number, dtype)


def make_synthetic(pipeline: Pipeline, leaves: Sequence[jax.ShapeDtypeStruct], count: int) -> Take:
    """Returns a function that takes micro-batches of equal values, which are on the devices from now on."""
    values = list(map(make_values, leaves))
    place = pipeline.place_element
    elements = pipeline.prepare().place_ahead([place(values) for _number in range(count)])

    def take(num_elements: int) -> list[Any]:
        return list(elements[:num_elements])

    return take


def _find_initializer() -> str | None:
    """One of `_WORDS` and `_DRAWN`, or a number as text; None without synthetic data."""
    word = os.environ.get(VARIABLE, "").strip().lower()
    if word:
        if word not in _WORDS:
            raise ValueError(
                f"{VARIABLE} must be {' or '.join(_WORDS)}, or not be set; got {os.environ[VARIABLE]!r}."
            )
        return word
    text = os.environ.get(FLAGS)
    return _read_flags(text) if text else None


def _read_flags(text: str) -> str | None:
    try:
        flags = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"{FLAGS} must be flags such as {_FLAG}; got {text!r} ({error}).") from error
    is_used, initializer = False, "zeros"
    for flag in flags:
        name, _, value = flag.partition("=")
        name = "--" + name.replace("-", "_").lstrip("_")
        if name == _FLAG:
            values = {"": True, "true": True, "1": True, "false": False, "0": False}
            if value.lower() not in values:
                raise ValueError(f"{FLAGS}: {_FLAG} must be true or false; got {value!r}.")
            is_used = values[value.lower()]
        elif name == _INITIALIZER:
            initializer = _check_initializer(value)
        else:
            warn_once(
                flag, f"{FLAGS}: {flag} has no effect here; only {_FLAG} and {_INITIALIZER} have one."
            )
    return initializer if is_used else None


def _check_initializer(value: str) -> str:
    value = value.strip().lower()
    try:
        is_known = value in (*_WORDS, *_DRAWN) or math.isfinite(float(value))
    except ValueError:
        is_known = False
    require(is_known, f"{FLAGS}: {_INITIALIZER} must be zeros, random, normal, uniform or a number", value)
    return value

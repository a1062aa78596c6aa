"""Stages that sleep in a foreign function, so that virtual devices overlap on few cores as real ones do."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["find_compiler", "make_stages", "register"]

_SOURCE = Path(__file__).with_name("sleep.cc")
_TARGET = "ipu_pipeline_sleep"
_WIDTH = 8


def find_compiler() -> str | None:
    """Where g++ is; None without one."""
    return shutil.which("g++")


def register(folder: Path) -> None:
    """Compiles the foreign function into a folder, and makes it known to XLA.

    Raises:
      CalledProcessError: it cannot be compiled.
    """
    compiler = find_compiler()
    assert compiler is not None
    library = folder / "sleep.so"
    command = [compiler, "-std=c++17", "-O1", "-w", "-shared", "-fPIC", f"-I{jax.ffi.include_dir()}"]
    subprocess.run([*command, str(_SOURCE), "-o", str(library)], check=True)
    handler = ctypes.CDLL(str(library)).SleepHandler
    jax.ffi.register_ffi_target(_TARGET, jax.ffi.pycapsule(handler), platform="cpu")


def make_stages(
    num_stages: int, forward_ms: float, backward_ms: float, num_further: int = 40
) -> tuple[list[Callable[..., Any]], list[Any], Any]:
    """Functions of parameters and a value, their parameters, and a micro-batch; the last returns a loss.

    Args:
      num_stages: how many.
      forward_ms: how long each one's forward sleeps.
      backward_ms: how long its backward does.
      num_further: operations of a stage besides; XLA's CPU client runs what has few of them in the thread
        that starts it, and nothing overlaps.
    """

    @jax.custom_vjp
    def sleep(x: jax.Array) -> jax.Array:
        return _sleep(x, forward_ms)

    sleep.defvjp(lambda x: (sleep(x), None), lambda _kept, g: (_sleep(g, backward_ms),))

    def stage(w: jax.Array, x: jax.Array) -> jax.Array:
        x = sleep(x * w)
        for _ in range(num_further):
            x = jnp.abs(x * w - 0.01)
        return x

    def last(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(stage(w, x) ** 2)

    parameters = [np.linspace(0.9, 1.1, _WIDTH, dtype=np.float32) + 0.01 * n for n in range(num_stages)]
    return [stage] * (num_stages - 1) + [last], parameters, np.linspace(0, 1, _WIDTH, dtype=np.float32)


def _sleep(x: jax.Array, milliseconds: float) -> jax.Array:
    called = jax.ffi.ffi_call(_TARGET, jax.ShapeDtypeStruct(x.shape, x.dtype))
    result: jax.Array = called(x, milliseconds=np.float64(milliseconds))
    return result

"""Computation that takes time on a virtual device and no core: a laptop shows what separate devices do.

A foreign function of XLA sleeps in the thread of the virtual device. It is made with ctypes, since XLA runs
a program with a `jax.pure_callback` in the thread that starts it, so that nothing overlaps. The structures
are the first fields of those in jaxlib's xla/ffi/api/c_api.h.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import math
import signal
import sys
import threading
import time
import traceback
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.ground import jax_processes

_METADATA = 1  # XLA_FFI_Extension_Metadata: the call asks for the version of the interface
_VERSION = (0, 1)  # the oldest that has all that is read here
_EXECUTE = 3  # XLA_FFI_ExecutionStage_EXECUTE
_CALL = "_make_target.<locals>.call"
_MOST_SECONDS = 10.0  # for devices at the end: some may wait for a process that has died

_targets: dict[float, Any] = {}  # milliseconds -> the foreign function, which must not be collected
_lock = threading.Lock()
_ends = threading.Event()  # set when the process ends: nothing sleeps any more


class _Metadata(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("version_size", ctypes.c_size_t),
        ("version_extension", ctypes.c_void_p),
        ("version", ctypes.c_int * 2),
        ("traits", ctypes.c_uint32),
    )


class _Extension(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("metadata", ctypes.POINTER(_Metadata)),
    )


class _CallFrame(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("extension", ctypes.POINTER(_Extension)),
        ("api", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
        ("stage", ctypes.c_int),
    )


def emulate(x: jax.Array, forward_ms: float, backward_ms: float | None = None) -> jax.Array:
    """Returns a value unchanged, after a time in which its device is busy and no core is used.

    Virtual devices of a CPU share its cores, so that a pipeline there is no faster than one device. With
    this function in each stage they overlap like separate devices, and speed, bubbles and reports are as on
    separate devices. Values and gradients stay the same. Inside `jax.shard_map` it has no gradient.

    Args:
      x: a floating-point number, or an array of them of any shape, computed in a stage or in any function
        that is compiled.
      forward_ms: the time in milliseconds; 0 for no time.
      backward_ms: the time of its gradient; by default twice as long.

    Returns:
      The array, of the same shape and dtype.

    Raises:
      TypeError: the array's numbers are not floating-point.
      ValueError: a time is not a finite number of at least 0.
      RuntimeError: XLA compiles it for an accelerator, which needs no emulation.

    Example:
      >>> def stage(x):
      ...     return engine.emulate(jnp.tanh(x), 2.0)
      >>> engine.Pipeline([stage], num_micro_batches=1).trace(np.ones(4, np.float32))
    """
    times = forward_ms, 2 * forward_ms if backward_ms is None else backward_ms
    for name, milliseconds in zip(("forward_ms", "backward_ms"), times, strict=True):
        if not 0 <= milliseconds < math.inf:
            raise ValueError(f"emulate: {name} must be a finite number of at least 0; got {milliseconds}.")
    if not jnp.issubdtype(jnp.result_type(x), jnp.floating):
        raise TypeError(f"emulate: x must have floating-point numbers; got {jnp.result_type(x)}.")
    if not any(times):
        return x
    emulated: jax.Array = _emulate(jnp.asarray(x), *map(float, times))
    return emulated


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _emulate(x: Any, forward_ms: float, _backward_ms: float) -> Any:
    return _sleep(x, forward_ms)


def _sleep(x: jax.Array, milliseconds: float, *after: jax.Array) -> jax.Array:
    if not milliseconds:
        return x
    name = f"ipu_pipeline.engine.emulate_{milliseconds}_ms_on_a_cpu"
    with _lock:
        if not _targets:
            atexit.register(_finish)
        if milliseconds not in _targets:
            target = _make_target(milliseconds / 1e3)
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(target), platform="cpu")
            _targets[milliseconds] = target
    struct = jax.ShapeDtypeStruct(x.shape, x.dtype)
    call = jax.ffi.ffi_call(name, struct, input_output_aliases={0: 0}, vmap_method="broadcast_all")
    result: jax.Array = call(x, *after)
    return result


def _finish() -> None:
    """Waits for all devices: a thread that calls Python when the interpreter has ended waits forever."""
    _ends.set()
    if not jax_processes.backends_run():  # it was only traced
        return
    flush = jax.jit(lambda x: x @ x)  # large enough that XLA starts it after what its device has to do
    ones = np.ones((32, 32), np.float32)
    with contextlib.suppress(Exception):  # of programs that failed, or devices that are gone
        last = [flush(jax.device_put(ones, device)) for device in jax.local_devices(backend="cpu")]
        end = time.monotonic() + _MOST_SECONDS
        while not all(array.is_ready() for array in last) and time.monotonic() < end:
            time.sleep(1e-3)


def _make_target(seconds: float) -> Any:
    def call(frame: Any) -> None:
        try:
            extension = frame.contents.extension
            if extension and extension.contents.type == _METADATA:
                metadata = extension.contents.metadata.contents
                metadata.version[:], metadata.traits = _VERSION, 0
            elif frame.contents.stage == _EXECUTE:
                _ends.wait(seconds)
        except KeyboardInterrupt:  # XLA runs small programs in the main thread
            threading.Thread(target=_interrupt_later, daemon=True).start()

    # If a function raises, ctypes returns what is in memory, and XLA takes it for an error. So the
    # outer function runs no Python of its own: it returns NULL, whatever the inner one does.
    frames = ctypes.POINTER(_CallFrame)
    return ctypes.CFUNCTYPE(ctypes.c_void_p, frames)(ctypes.CFUNCTYPE(None, frames)(call))


def _interrupt_later() -> None:
    """Interrupts the main thread again, once it is outside of foreign functions, which cannot raise."""
    main = threading.main_thread().ident
    assert main is not None
    while True:
        frame = sys._current_frames().get(main)  # noqa: SLF001  # public, in spite of its name
        if not any(inner.f_code.co_qualname == _CALL for inner, _line in traceback.walk_stack(frame)):
            break
        time.sleep(1e-4)
    signal.pthread_kill(main, signal.SIGINT)


def _forward(x: jax.Array, forward_ms: float, _backward_ms: float) -> tuple[jax.Array, jax.Array]:
    # The gradient of a loss is constant: without the residual, XLA would sleep once, before a loop.
    return _sleep(x, forward_ms), jnp.ravel(x)[:1]


def _backward(_forward_ms: float, backward_ms: float, after: jax.Array, g: jax.Array) -> tuple[jax.Array]:
    return (_sleep(g, backward_ms, after),)


_emulate.defvjp(_forward, _backward)

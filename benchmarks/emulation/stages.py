"""Emulated devices: stages that sleep (`engine.emulate`).

A virtual device of XLA's CPU client has a thread, not a core. A program that sleeps holds the thread and
takes no core, so eight stages on two cores run at the same time, as on devices of their own. XLA starts a
program asynchronously only if it counts at least 1,000 operations in it; what has fewer runs in the thread
that starts it, and nothing overlaps. Every program here multiplies values of at least 2,048 numbers.

A device does one thing at a time: XLA starts a program when the one before on that device has ended.
A transfer holds neither device, so a sleep in a stage cannot stand for it. Where transfers take time, a
link is one more virtual device, one per pair of stages and direction: what is sent is copied there, sleeps,
and is copied on. The receiver waits for it, both devices go on with other work meanwhile, and a link
carries one thing at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.emulation import values
from ipu_pipeline import engine
from ipu_pipeline.engine.devices.device_groups import DeviceGroup
from ipu_pipeline.ground import jax_compat

__all__ = [
    "LEAST_BYTES",
    "Emulated",
    "emulated_stage",
    "make_pipeline",
    "num_devices",
    "sleep",
]

LEAST_BYTES = 8192  # of what a stage takes and sends: then XLA starts its programs asynchronously


def emulated_stage(
    forward_ms: float, backward_ms: float | tuple[float, float]
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """A function of a parameter and a value, their product, that takes a given time in either direction.

    Args:
      forward_ms: how long its forward sleeps, in milliseconds.
      backward_ms: how long its backward does; or of a backward in two halves, how long it sleeps for the
        gradient of the value, which the stage before waits for, and then for that of the parameter.

    Returns:
      A function of float32[w] and float32[n, w], which returns float32[n, w].
    """
    halves = backward_ms if isinstance(backward_ms, tuple) else None

    @jax.custom_vjp
    def stage(w: jax.Array, x: jax.Array) -> jax.Array:
        return sleep(x, forward_ms) * w

    def backward(kept: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, jax.Array]:
        w, x = kept
        if halves is None:
            g = sleep(g, backward_ms)
            return jnp.sum(g * x, axis=0), g * w
        # The second sleep takes what the first one returns, so that they cannot run at the same time.
        g = sleep(g, halves[0])
        return jnp.sum(sleep(g, halves[1]) * x, axis=0), g * w

    stage.defvjp(lambda w, x: (stage(w, x), (w, x)), backward)
    return stage


class Emulated(NamedTuple):
    """A pipeline of emulated stages, its state and the micro-batches of a step."""

    pipeline: engine.Pipeline
    state: Any
    micro_batches: list[np.ndarray[Any, Any]]


def num_devices(num_stages: int, transfer_ms: float = 0.0) -> int:
    """How many virtual devices `make_pipeline` takes: one per stage, and one per link."""
    return num_stages + (2 * (num_stages - 1) if transfer_ms else 0)


def make_pipeline(
    forward_ms: Sequence[float],
    backward_ms: Sequence[float | tuple[float, float]],
    num_micro_batches: int,
    *,
    num_bytes: int = LEAST_BYTES,
    width: int = values.WIDTH,
    transfer_ms: float = 0.0,
    optimizer: Any = None,
    **options: Any,
) -> Emulated:
    """A pipeline of emulated stages, each on a virtual device of its own, ready for its first step.

    Args:
      forward_ms: how long the forward of each stage takes, in milliseconds.
      backward_ms: likewise its backward, see `emulated_stage`.
      num_micro_batches: of a step.
      num_bytes: of a micro-batch, and of what a stage sends; a multiple of 4 times the width.
      width: the elements of each stage's variable. XLA starts weight updates asynchronously from 1,000 on.
      transfer_ms: how long what is sent is on its way; 0 leaves it at what XLA's copy takes.
      optimizer: an Optax transformation; by default plain SGD.
      **options: more of `engine.Pipeline`, such as `schedule` and `dispatch_plan`.

    Raises:
      ValueError: there are not as many times of either direction, or the bytes are too few.
    """
    import optax

    if len(forward_ms) != len(backward_ms):
        raise ValueError(
            f"make_pipeline: forward_ms and backward_ms must have an entry per stage; they have "
            f"{len(forward_ms)} and {len(backward_ms)}."
        )
    if num_bytes < LEAST_BYTES or num_bytes % (4 * width):
        raise ValueError(
            f"make_pipeline: num_bytes must be a multiple of {4 * width}, and {LEAST_BYTES} at "
            f"least, since XLA does not start smaller programs asynchronously; got {num_bytes}."
        )
    functions = [emulated_stage(*times) for times in zip(forward_ms, backward_ms, strict=True)]
    stages: list[Callable[..., Any]] = [*functions[:-1], _with_loss(functions[-1])]
    pipeline = engine.Pipeline(
        stages,
        parameters=values.make_parameters(len(functions), width),
        num_micro_batches=num_micro_batches,
        optimizer=optax.sgd(values.RATE) if optimizer is None else optimizer,
        **options,
    )
    micro_batches = values.make_micro_batches(num_micro_batches, num_bytes, width)
    state = pipeline.init(jax.random.key(0), micro_batches[0])
    if transfer_ms:
        _add_links(pipeline, transfer_ms)
    return Emulated(pipeline, state, micro_batches)


def _with_loss(stage: Callable[[jax.Array, jax.Array], jax.Array]) -> Callable[..., jax.Array]:
    def last(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(stage(w, x) ** 2)

    return last


def sleep(x: jax.Array, milliseconds: float) -> jax.Array:
    """A value that is there after so many milliseconds, in which the device does nothing else."""
    return engine.emulate(x, milliseconds, 0)


class _Links:
    """What copies arrays to a row, over the links from the others."""

    def __init__(self, row: DeviceGroup, devices: dict[Any, Any], transfer_ms: float) -> None:
        """Notes which link comes from which device.

        Args:
          row: where the arrays go.
          devices: source -> the virtual device that is the link from there.
          transfer_ms: how long an array is on its way.
        """
        assert row.copy is not None
        self._arrive = row.copy
        self._enter: dict[Any, tuple[Callable[..., Any], Any]] = {}
        for source, link in devices.items():
            sharding = jax.sharding.SingleDeviceSharding(link)
            self._enter[source] = (
                jax_compat.make_copy((link,), sharding),
                jax.device_put(np.float32(1), link),
            )

        def carry(one: jax.Array, arrays: list[jax.Array]) -> list[jax.Array]:
            return [sleep(arrays[0], transfer_ms) * one, *arrays[1:]]  # the product makes it asynchronous

        self._carry = jax.jit(carry)

    def __call__(self, arrays: Sequence[Any]) -> list[Any]:
        (source,) = arrays[0].devices()
        if source not in self._enter or not jnp.issubdtype(arrays[0].dtype, jnp.floating):
            return self._arrive(arrays)  # a count of the optimizer, which any stage may get
        enter, one = self._enter[source]
        return self._arrive(self._carry(one, enter(arrays)))


def _add_links(pipeline: engine.Pipeline, transfer_ms: float) -> None:
    rows = pipeline.prepare().placement.groups
    neighbours = list(itertools.pairwise(rows))
    senders: dict[DeviceGroup, dict[DeviceGroup, None]] = {row: {} for row in rows}
    for one, other in [*neighbours, *((b, a) for a, b in neighbours)]:
        if one is not other:
            senders[other][one] = None
    taken = [row.devices[0] for row in senders]
    free = [device for device in jax.devices() if device not in taken]
    needed = sum(map(len, senders.values()))
    if len(free) < needed:
        total = len(taken) + needed
        raise ValueError(
            f"make_pipeline: {len(rows)} stages with transfer_ms need {total} virtual devices, with the "
            f"links; there are {jax.device_count()}. "
            f'jax.config.update("jax_num_cpu_devices", {total}) makes more.'
        )
    links = iter(free)
    for row, others in senders.items():
        carriers = {other.devices[0]: next(links) for other in others}
        vars(row)["copy"] = _Links(row, carriers, transfer_ms)  # in place of the cached property

"""The devices of all processes of a run, and the virtual devices of a CPU.

A process can have any number of virtual devices, until JAX's backend runs. Of several processes, each makes
an equal part of them, after it has joined the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax

from ipu_pipeline.engine import processes
from ipu_pipeline.engine.processes import keep_one_free, num_cpu_devices_set
from ipu_pipeline.processes.joining import join_by_environment

__all__ = ["check_num_cpu_devices", "have_cpu_devices", "spread", "want_cpu_devices"]


def spread(devices: Sequence[Any], number: int) -> list[Any]:
    """Orders devices such that the first `number` are an equal part of each process's."""
    others = processes.current()
    if others is None:
        return list(devices)
    part = _own_part(number)
    taken: Counter[int] = Counter()
    first: list[Any] = []
    rest: list[Any] = []
    for device in devices:
        (first if taken[device.process_index] < part else rest).append(device)
        taken[device.process_index] += 1
    return first + rest


def want_cpu_devices(number: int) -> None:
    """Makes `number` virtual CPU devices, even if more were asked for."""
    join_by_environment()
    try:
        _make(_own_part(number))
    except RuntimeError:
        check_num_cpu_devices(number)


def have_cpu_devices(number: int) -> bool:
    """Makes `number` virtual CPU devices, unless more were asked for; False if the backend runs already."""
    join_by_environment()
    if num_cpu_devices_set() < _own_part(number):
        try:
            _make(_own_part(number))
        except RuntimeError:
            return False
    return True


def _make(number: int) -> None:
    jax.config.update("jax_num_cpu_devices", number)
    if processes.current() is not None:
        keep_one_free()


def _own_part(number: int) -> int:
    """The part of `number` CPU devices that this process makes; all processes make the same number."""
    others = processes.current()
    return number if others is None else -(-number // others.count)


def check_num_cpu_devices(number: int) -> None:
    """Raises a RuntimeError if JAX's CPU backend, which is running, has fewer devices."""
    num_devices = len(jax.devices("cpu"))
    if num_devices < number:
        raise RuntimeError(
            f"{number} devices are needed, but JAX's CPU backend is already running with {num_devices} "
            "device(s), which cannot be changed any more. It started when a JAX array (jnp.float32(2), a "
            "module of Flax) or a random key was made, or with jax.devices(). Call "
            f"ipu.set_num_devices({number}) at the top of the program, or "
            "IPUConfig.configure_ipu_system() before that."
        )

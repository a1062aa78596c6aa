"""The threads of XLA's CPU backend, one of which must be free for what other processes ask for.

A program that joins what several processes have, as an all-reduce does, occupies a thread until all of
them have come to it. What other processes pull meanwhile goes through a thread, too. If all threads were
occupied, two processes could wait for each other for ever: one for what it pulls, the other for the first.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Sequence

import jax

from ipu_pipeline.engine.devices.device_groups import DeviceGroup
from ipu_pipeline.ground.cores import count_cores

__all__ = ["keep_one_free", "num_cpu_devices_set", "warn_unless_one_is_free"]

_VARIABLE = "PJRT_NPROC"


def num_cpu_devices_set() -> int:
    """How many virtual CPU devices this process has or will have; 1 by default."""
    flag = re.search(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    configured = int(jax.config.jax_num_cpu_devices)  # type: ignore[attr-defined]  # made at run time
    return configured if configured >= 1 else int(flag.group(1)) if flag else 1


def keep_one_free() -> None:
    """Makes XLA's CPU backend, which must not have started yet, create more threads than devices."""
    wanted = num_cpu_devices_set() + 1
    if _num_threads() < wanted:
        os.environ[_VARIABLE] = f"{wanted}"


def warn_unless_one_is_free(groups: Sequence[DeviceGroup]) -> None:
    """Warns if programs of groups that are in several processes may keep all threads of this one."""
    joined = [group for group in groups if group.is_joined]
    if not joined or any(device.platform != "cpu" for group in joined for device in group.devices):
        return
    num_devices = len(jax.local_devices(backend="cpu"))
    if _num_threads() <= num_devices:
        warnings.warn(
            f"XLA's CPU backend has {num_devices} devices here and no more threads than that, while the "
            "replicas are in several processes, which may then wait for each other for ever. "
            f"Set the environment variable {_VARIABLE} to {num_devices + 1} or more before JAX starts; "
            "ipu_pipeline.distributed.initialize does that.",
            RuntimeWarning,
            stacklevel=2,
        )


def _num_threads() -> int:
    """The number of threads that XLA makes, unless there are more devices."""
    for name in (_VARIABLE, "NPROC"):
        try:
            return int(os.environ[name])
        except (KeyError, ValueError):
            continue
    return count_cores()

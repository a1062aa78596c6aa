"""The selection of JAX devices as IPUs: virtual ones are made, and all are spread over processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from ipu_pipeline.engine import processes
from ipu_pipeline.engine.processes import keep_one_free, num_cpu_devices_set
from ipu_pipeline.ground.checks import is_int
from ipu_pipeline.processes.rendezvous import join_by_environment

# Virtual devices of CPUs. A process can have any number of them, until JAX's backend runs. Of several
# processes, each makes an equal part, after it has joined the others.


def spread(devices: Sequence[Any], number: int) -> list[Any]:
    """Orders devices such that the first `number` are an equal part of each process's."""
    peers = processes.current()
    if peers is None:
        return list(devices)
    part = _local_part(number)
    counts: Counter[int] = Counter()
    first: list[Any] = []
    remainder: list[Any] = []
    for device in devices:
        (first if counts[device.process_index] < part else remainder).append(device)
        counts[device.process_index] += 1
    return first + remainder


def want_cpu_devices(number: int) -> None:
    """Makes `number` virtual CPU devices, even if more were asked for."""
    join_by_environment()
    try:
        _make_cpu_devices(_local_part(number))
    except RuntimeError:
        check_num_cpu_devices(number)


def have_cpu_devices(number: int) -> bool:
    """Makes `number` virtual CPU devices, unless more were asked for; False if the backend runs already."""
    join_by_environment()
    if num_cpu_devices_set() < _local_part(number):
        try:
            _make_cpu_devices(_local_part(number))
        except RuntimeError:
            return False
    return True


def _make_cpu_devices(number: int) -> None:
    jax.config.update("jax_num_cpu_devices", number)
    if processes.current() is not None:
        keep_one_free()


def _local_part(number: int) -> int:
    """The part of `number` CPU devices that this process makes; all processes make the same number."""
    peers = processes.current()
    return number if peers is None else -(-number // peers.count)


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


# The selection. A configuration makes it; without one, the first run selects as many devices as the
# programs compiled so far need. Devices are those of all processes that run the program.


@dataclass
class System:
    """The selected devices, and a configuration's settings for all programs on them."""

    groups: list[list[Any]]  # per TensorFlow device (`/device:IPU:<n>`), in the order that stages take them
    is_automatic: bool  # no configuration selected them, so their number grows with the programs' needs
    allow_recompute: bool = False  # pipelines that train recompute
    wanted: Sequence[int] = ()  # numbers of IPUs that a configuration asked for, per group; others are idle
    norm_group_size: int = 1  # the number of replicas that share the statistics of batch normalization


_system: System | None = None


def select(system: System) -> None:
    """Selects what a configuration found, replacing the previous selection."""
    global _system
    _system = system


def set_num_devices(number: int) -> None:
    """Makes JAX's CPU `number` devices, each of which can be an IPU. Call it at the top of a program.

    In several processes, the number is that of all processes together: with P processes, each makes
    ceil(number / P). If the environment names them, as `ipu-pipeline launch` sees to, this call joins this
    process with the others and waits for them (`distributed.initialize`).

    JAX fixes the number when it is first used: when an array (`jnp.float32(2)`, a module of Flax) or a
    random key is made, or `jax.devices()` is called. Without this function, and without
    `IPUConfig.configure_ipu_system`, there are as many devices as the programs compiled before then need.
    The number of accelerators is fixed.

    Example:
      >>> ipu.config.set_num_devices(4)
      >>> len(jax.devices("cpu")) >= 4
      True

    Args:
      number: the number of devices of all processes, from 1. Where JAX runs already, at least this many
        must be there.

    Raises:
      RuntimeError: JAX's CPU backend is running already, with fewer devices.
      TimeoutError: other processes did not come.
      ValueError: it is not a number from 1.
    """
    if not is_int(number, 1):
        raise ValueError(f"set_num_devices: number must be an integer from 1; got {number!r}.")
    want_cpu_devices(number)


def select_automatically(needs: Iterable[tuple[int, int]]) -> None:
    """Selects devices for programs, unless a system was configured; those selected before stay."""
    global _system
    if _system is not None and not _system.is_automatic:
        return
    groups = [] if _system is None else [list(group) for group in _system.groups]
    sizes = _group_sizes(groups, needs)
    if sizes == [len(group) for group in groups]:
        return
    selected = [device for group in groups for device in group]
    devices = spread(find_devices(sum(sizes), ipu_model=False), sum(sizes))
    free = [device for device in devices if device not in selected]
    groups += [[] for _ in range(len(sizes) - len(groups))]
    for group, number in zip(groups, sizes, strict=True):
        num_missing = number - len(group)
        group += free[:num_missing]
        free = free[num_missing:]
    _system = System(groups, is_automatic=True)


def reserve(needs: Iterable[tuple[int, int]]) -> None:
    """Ensures that the CPU will have enough devices for programs, unless a system was configured.

    Does not start JAX's backend. Called before stages are traced, as the arrays that they make start it.
    """
    if _system is not None and not _system.is_automatic:
        return
    number = sum(_group_sizes([] if _system is None else _system.groups, needs))
    if not have_cpu_devices(number) and jax.default_backend() == "cpu":
        check_num_cpu_devices(number)


def _group_sizes(groups: Sequence[Sequence[Any]], needs: Iterable[tuple[int, int]]) -> list[int]:
    """The number of IPUs that each `/device:IPU:<n>` is to have."""
    sizes = [len(group) for group in groups]
    for ordinal, number in needs:
        sizes += [1] * (ordinal + 1 - len(sizes))
        sizes[ordinal] = max(sizes[ordinal], number)
    return sizes


def is_selected() -> bool:
    """Whether devices have been selected, in any way."""
    return _system is not None


def allows_recomputation() -> bool:
    """Whether the configured system has `allow_recompute`."""
    return _system is not None and _system.allow_recompute


def num_configured(ordinal: int) -> int | None:
    """The number of IPUs that a configuration wants for `/device:IPU:<ordinal>`; None without one."""
    # An automatic selection has none: what another program needs must not change this one's replicas, and
    # so its batch.
    if _system is None or ordinal >= len(_system.wanted):
        return None
    return _system.wanted[ordinal]


def norm_group_size() -> int:
    """The number of replicas that share statistics of batch normalization, as configured; 1 by default."""
    return 1 if _system is None else _system.norm_group_size


def selected_devices(ordinal: int) -> list[Any]:
    """The JAX devices of `/device:IPU:<ordinal>` selected so far; selects none.

    Example:
      >>> config = ipu.config.IPUConfig()
      >>> config.auto_select_ipus = [1, 2]  # /device:IPU:0 has one, /device:IPU:1 two
      >>> config.configure_ipu_system()
      >>> len(ipu.config.selected_devices(1))
      2
    """
    if _system is None or ordinal >= len(_system.groups):
        return []
    return _system.groups[ordinal]


def devices_for(ordinal: int, number: int) -> list[Any]:
    """The JAX devices of `/device:IPU:<ordinal>`, at least `number` of them."""
    select_automatically([(ordinal, number)])
    assert _system is not None
    if ordinal >= len(_system.groups):
        raise ValueError(
            f"The program is placed on /device:IPU:{ordinal}, but the configured system has only "
            f"{len(_system.groups)} such device(s); give auto_select_ipus a list with a number for each."
        )
    group = _system.groups[ordinal]
    if len(group) < number:
        raise ValueError(
            f"The program needs {number} IPUs, but configure_ipu_system() selected {len(group)} for "
            f"/device:IPU:{ordinal}. Set IPUConfig.auto_select_ipus to at least {number}."
        )
    return group


def reset_ipu_configuration() -> None:
    """Forgets the selected devices, as if nothing had been configured.

    Example:
      >>> config = ipu.config.IPUConfig()
      >>> config.auto_select_ipus = 4
      >>> config.configure_ipu_system()
      >>> ipu.config.reset_ipu_configuration()
      >>> ipu.config.selected_devices(0)
      []
    """
    global _system
    _system = None


def running_on_ipu_model() -> bool:
    """Whether the selected IPUs are virtual: devices of the CPU.

    Example:
      >>> config = ipu.config.IPUConfig()
      >>> config.ipu_model = True
      >>> config.auto_select_ipus = 1
      >>> config.configure_ipu_system()
      >>> ipu.config.running_on_ipu_model()
      True
    """
    return any(device.platform == "cpu" for device in selected_devices(0))


def find_devices(number: int, ipu_model: bool) -> list[Any]:
    """All devices that can be IPUs, at least `number`; makes that many if they are CPU devices."""
    have_cpu_devices(number)
    devices: list[Any] = jax.devices("cpu") if ipu_model else jax.devices()
    if len(devices) >= number:
        return devices
    platform = devices[0].platform
    if platform == "cpu":
        check_num_cpu_devices(number)
    raise ValueError(
        f"{number} IPUs are needed, but there are {len(devices)} {platform} device(s). Set "
        "IPUConfig.ipu_model = True to use CPU devices as IPUs, or use fewer."
    )

"""Which JAX devices are the IPUs.

An IPU is one JAX device. `IPUConfig.configure_ipu_system` selects them; without it the first `run`
selects as many as the programs compiled so far need.
"""

from __future__ import annotations

import os
import re
import tempfile
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from ipu_pipeline.config_categories import (
    CATEGORIES,
    SETTINGS,
    Category,
    DeviceConnectionType,
    ExecutionProfileType,
    IPUModel,
    MergeRemoteBuffersBehaviour,
    SchedulingAlgorithm,
    SelectionOrder,
    StochasticRoundingBehaviour,
    find_near,
)
from ipu_pipeline.engine import jax_compat

__all__ = [
    "CACHE_DIR_VARIABLE",
    "DeviceConnectionType",
    "ExecutionProfileType",
    "IPUConfig",
    "MergeRemoteBuffersBehaviour",
    "SchedulingAlgorithm",
    "SelectionOrder",
    "StochasticRoundingBehaviour",
    "allows_recomputation",
    "devices_for",
    "enable_executable_cache",
    "enable_executable_cache_of_environment",
    "find_devices",
    "have_cpu_devices",
    "is_selected",
    "reserve",
    "reset_ipu_configuration",
    "select_automatically",
    "selected_devices",
    "set_num_devices",
]


@dataclass
class _System:
    """The selected devices.

    Attributes:
      groups: per TensorFlow device (`/device:IPU:<n>`), in the order that stages take them.
      is_automatic: whether nobody configured it, so that it grows with what programs need.
      allow_recompute: whether pipelines that train recompute.
    """

    groups: list[list[Any]]
    is_automatic: bool
    allow_recompute: bool = False


CACHE_DIR_VARIABLE = "IPU_PIPELINE_CACHE_DIR"

_system: _System | None = None
_has_read_environment = False


class IPUConfig:
    """Selects the IPUs, and says how.

    Attributes:
      auto_select_ipus: how many IPUs; a list gives each `/device:IPU:<n>` its number.
      select_ipus: instead of that, which ones: indices of JAX devices, in the order that
        `/device:IPU:0` has them.
      selection_order: a `utils.SelectionOrder`.
      ipu_model: True makes CPU devices the IPUs; it is Graphcore's category of settings as well.
      auto_round_num_ipus: True takes the next power of two where the number is none; the rest is idle.
      require_power_of_two: False allows any number.
      allow_recompute: True lets the stages of pipelines that train compute values again in their backward,
        instead of keeping them; see `pipelining_ops.RecomputationMode`.

    Graphcore's other settings are known by their names (`config.floating_point_behaviour.esr`). They have
    no effect: who sets one to something else than its default is told why, once.

    Example:
      config = IPUConfig()
      config.auto_select_ipus = 2
      config.configure_ipu_system()
    """

    auto_select_ipus: int | list[int] | None
    select_ipus: list[int] | None
    selection_order: SelectionOrder
    ipu_model: IPUModel
    auto_round_num_ipus: bool
    require_power_of_two: bool
    allow_recompute: bool

    def __init__(self) -> None:
        """Starts with nothing selected."""
        for name, value in _DEFAULTS.items():
            object.__setattr__(self, name, value)
        for name in CATEGORIES:
            object.__setattr__(self, name, IPUModel() if name == "ipu_model" else Category(name))
        object.__setattr__(self, "_others", Category(""))

    def __setattr__(self, name: str, value: Any) -> None:
        """Checks the name and the value."""
        if name in SETTINGS:
            setattr(self._others, name, value)
            return
        if name in CATEGORIES and name != "ipu_model":
            raise TypeError(f"IPUConfig.{name} is a category: set what it has. Got {value!r}.")
        if name not in _DEFAULTS:
            raise AttributeError(_describe_unknown(name))
        if name in ("auto_select_ipus", "select_ipus"):
            _check_numbers(name, value)
        elif name == "selection_order":
            if not isinstance(value, SelectionOrder):
                raise TypeError(f"IPUConfig.selection_order must be a utils.SelectionOrder; got {value!r}.")
        elif not isinstance(value, (bool, IPUModel) if name == "ipu_model" else bool):
            raise TypeError(f"IPUConfig.{name} must be True or False; got {value!r}.")
        elif name == "ipu_model":
            value = (value if isinstance(value, IPUModel) else self.ipu_model).with_used(bool(value))
        object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        """Only called for names that are no attributes of its own."""
        if name in SETTINGS and "_others" in vars(self):
            return getattr(self._others, name)
        raise AttributeError(_describe_unknown(name))

    def configure_ipu_system(self, device: str = "cpu") -> None:
        """Selects the devices. It starts JAX's backend, with enough virtual devices if that is a CPU.

        Args:
          device: the host's, in Graphcore's programs; only "cpu" and names of a CPU device.

        Raises:
          ValueError: nothing, or too much, is selected; the number of IPUs is not a power of two; or
            there are fewer accelerators.
          RuntimeError: JAX's CPU backend is running already, with fewer devices.
        """
        global _system
        if "cpu" not in str(device).lower():
            raise ValueError(
                f"configure_ipu_system: device is the host's, a CPU like 'cpu'; got {device!r}."
            )
        if self.select_ipus is not None:
            if self.auto_select_ipus is not None:
                raise ValueError(
                    "IPUConfig: set auto_select_ipus or select_ipus, not both; they are "
                    f"{self.auto_select_ipus} and {self.select_ipus}."
                )
            self._check_power_of_two(len(self.select_ipus))
            available = find_devices(max(self.select_ipus) + 1, bool(self.ipu_model))
            chosen = [[available[index] for index in self.select_ipus]]
        elif self.auto_select_ipus is None:
            raise ValueError("IPUConfig: auto_select_ipus must be set to a number of IPUs; it is None.")
        else:
            wanted = self.group_sizes
            reserved = [self._check_power_of_two(number) for number in wanted]
            available = find_devices(sum(reserved), bool(self.ipu_model))
            starts = [sum(reserved[:index]) for index in range(len(reserved))]
            chosen = [
                available[start : start + number] for start, number in zip(starts, reserved, strict=True)
            ]
        groups = [[group[index] for index in self.selection_order.permute(len(group))] for group in chosen]
        _system = _System(groups, is_automatic=False, allow_recompute=self.allow_recompute)

    @property
    def group_sizes(self) -> list[int]:
        """How many IPUs each `/device:IPU:<n>` is to have; empty if nothing is selected."""
        if self.select_ipus is not None:
            return [len(self.select_ipus)]
        if self.auto_select_ipus is None:
            return []
        return (
            [self.auto_select_ipus] if isinstance(self.auto_select_ipus, int) else [*self.auto_select_ipus]
        )

    def _check_power_of_two(self, number: int) -> int:
        """How many IPUs to take for a wanted number."""
        rounded = 1 << (number - 1).bit_length()
        if number == rounded or not self.require_power_of_two:
            return number
        if self.auto_round_num_ipus:
            return rounded
        raise ValueError(
            "Unsupported number of IPUs requested - could not find an IPU device with "
            f"{number} IPUs: IPU systems come in powers of two. Set IPUConfig.auto_round_num_ipus = True "
            f"to take {rounded} and leave {rounded - number} idle, or "
            "IPUConfig.require_power_of_two = False, which JAX devices do not mind."
        )


_DEFAULTS: dict[str, Any] = {
    "auto_select_ipus": None,
    "select_ipus": None,
    "selection_order": SelectionOrder.AUTO,
    "ipu_model": False,
    "auto_round_num_ipus": False,
    "require_power_of_two": True,
    "allow_recompute": False,
}


def set_num_devices(number: int) -> None:
    """Makes JAX's CPU so many devices, each of which can be an IPU. Call it at the top of a program.

    JAX fixes the number when it is first used: when an array is made (`jnp.float32(2)`, a module of Flax),
    a random key, or when somebody looks at `jax.devices()`. Without this function, and without
    `IPUConfig.configure_ipu_system`, there are as many as the programs need that are compiled before.
    Accelerators are as many as there are.

    Args:
      number: from 1. Where JAX runs already, so many or more must be there.

    Raises:
      RuntimeError: JAX's CPU backend is running already, with fewer devices.
      ValueError: it is no number from 1.
    """
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ValueError(f"set_num_devices: number must be an integer from 1; got {number!r}.")
    try:
        jax.config.update("jax_num_cpu_devices", number)
    except RuntimeError:
        _check_num_cpu_devices(number)


def enable_executable_cache(directory: str | os.PathLike[str]) -> None:
    """Keeps compiled programs in a directory, for later processes: these need not compile them again.

    It is JAX's persistent compilation cache, set up to keep small and quickly compiled programs too.
    Programs are known by what they compute, the versions and the kind of device; nothing is ever deleted.
    Without it, programs that are the same on several CPU devices are compiled once per process; with it,
    once for each device.

    The environment variable IPU_PIPELINE_CACHE_DIR does the same, when the first `Session` is made.

    If the directory cannot be used, there is a warning, and programs are compiled without it.

    Args:
      directory: it is made if it does not exist.
    """
    global _has_read_environment
    _has_read_environment = True
    path = Path(directory).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        warnings.warn(
            f"Compiled programs are not kept: the directory {path} of enable_executable_cache (or "
            f"{CACHE_DIR_VARIABLE}) cannot be used: {error}. Later processes compile them again.",
            stacklevel=2,
        )
        return
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax_compat.reset_persistent_cache()  # JAX looks at the settings once, when it first compiles


def enable_executable_cache_of_environment() -> None:
    """Does what IPU_PIPELINE_CACHE_DIR says, the first time it is called."""
    global _has_read_environment
    if not _has_read_environment and (directory := os.environ.get(CACHE_DIR_VARIABLE)):
        enable_executable_cache(directory)
    _has_read_environment = True


def select_automatically(needs: Iterable[tuple[int, int]]) -> None:
    """Selects devices for programs, unless a system was configured; what is selected already stays.

    Args:
      needs: for each program the n of its `/device:IPU:<n>`, and how many IPUs it needs.

    Raises:
      ValueError: there are fewer accelerators.
      RuntimeError: JAX's CPU backend is running already, with fewer devices.
    """
    global _system
    if _system is not None and not _system.is_automatic:
        return
    groups = [] if _system is None else [list(group) for group in _system.groups]
    wanted = _group_sizes(groups, needs)
    if wanted == [len(group) for group in groups]:
        return
    used = [device for group in groups for device in group]
    free = [device for device in find_devices(sum(wanted), ipu_model=False) if device not in used]
    groups += [[] for _ in range(len(wanted) - len(groups))]
    for group, number in zip(groups, wanted, strict=True):
        num_missing = number - len(group)
        group += free[:num_missing]
        free = free[num_missing:]
    _system = _System(groups, is_automatic=True)


def reserve(needs: Iterable[tuple[int, int]]) -> None:
    """Sees to it that the CPU will have devices enough for programs, unless a system was configured.

    It does not start JAX's backend.

    Args:
      needs: for each program the n of its `/device:IPU:<n>`, and how many IPUs it needs.

    Raises:
      RuntimeError: the CPU backend is running already, with fewer devices.
    """
    if _system is not None and not _system.is_automatic:
        return
    number = sum(_group_sizes([] if _system is None else _system.groups, needs))
    if not have_cpu_devices(number) and jax.default_backend() == "cpu":
        _check_num_cpu_devices(number)


def _group_sizes(groups: Sequence[Sequence[Any]], needs: Iterable[tuple[int, int]]) -> list[int]:
    """How many IPUs each `/device:IPU:<n>` is to have."""
    wanted = [len(group) for group in groups]
    for ordinal, number in needs:
        wanted += [1] * (ordinal + 1 - len(wanted))
        wanted[ordinal] = max(wanted[ordinal], number)
    return wanted


def is_selected() -> bool:
    """Whether devices have been selected, in whatever way."""
    return _system is not None


def allows_recomputation() -> bool:
    """Whether the configured system has `allow_recompute`."""
    return _system is not None and _system.allow_recompute


def selected_devices(ordinal: int) -> list[Any]:
    """The JAX devices of `/device:IPU:<ordinal>` as selected so far; selects none."""
    if _system is None or ordinal >= len(_system.groups):
        return []
    return _system.groups[ordinal]


def devices_for(ordinal: int, number: int) -> list[Any]:
    """The JAX devices of `/device:IPU:<ordinal>`, at least `number` of them.

    Raises:
      ValueError: the configured system has fewer, or there are fewer accelerators.
      RuntimeError: JAX's CPU backend is running already, with fewer devices.
    """
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
    """Forgets the selected devices, as if nothing had been configured."""
    global _system
    _system = None


def find_devices(number: int, ipu_model: bool) -> list[Any]:
    """All devices that can be IPUs, at least `number`; makes that many if they are CPU devices."""
    have_cpu_devices(number)
    devices: list[Any] = jax.devices("cpu") if ipu_model else jax.devices()
    if len(devices) >= number:
        return devices
    platform = devices[0].platform
    if platform == "cpu":
        _check_num_cpu_devices(number)
    raise ValueError(
        f"{number} IPUs are needed, but there are {len(devices)} {platform} device(s). Set "
        "IPUConfig.ipu_model = True to use CPU devices as IPUs, or use fewer."
    )


def have_cpu_devices(number: int) -> bool:
    """Makes so many virtual CPU devices, unless more were asked for; False if the backend runs already."""
    if _num_cpu_devices_set() < number:
        try:
            jax.config.update("jax_num_cpu_devices", number)
        except RuntimeError:
            return False
    return True


def _check_num_cpu_devices(number: int) -> None:
    """Raises a RuntimeError if JAX's CPU backend, which is running, has fewer devices."""
    num_devices = len(jax.devices("cpu"))
    if num_devices < number:
        raise RuntimeError(
            f"{number} IPUs are needed, but JAX's CPU backend is already running with {num_devices} "
            "device(s), which cannot be changed any more. It started when a JAX array (jnp.float32(2), a "
            "module of Flax) or a random key was made, or with jax.devices(). Call "
            f"ipu.set_num_devices({number}) at the top of the program, or "
            "IPUConfig.configure_ipu_system() before that."
        )


def _num_cpu_devices_set() -> int:
    """How many virtual CPU devices were asked for before; 1 if nobody did."""
    flag = re.search(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    configured = int(jax.config.jax_num_cpu_devices)  # type: ignore[attr-defined]  # made at run time
    return configured if configured >= 1 else int(flag.group(1)) if flag else 1


def _check_numbers(name: str, value: Any) -> None:
    is_selection = name == "select_ipus"
    lowest = 0 if is_selection else 1
    numbers = value if isinstance(value, (list, tuple)) else [value]
    if value is None:
        return
    if not numbers or not all(
        isinstance(n, int) and not isinstance(n, bool) and n >= lowest for n in numbers
    ):
        kind = "list of device indices from 0" if is_selection else "number from 1, or a list of them"
        raise ValueError(f"IPUConfig.{name} must be a {kind}; got {value!r}.")
    if is_selection and (not isinstance(value, (list, tuple)) or len(set(numbers)) < len(numbers)):
        raise ValueError(
            f"IPUConfig.select_ipus must be a list of different device indices; got {value!r}."
        )


def _describe_unknown(name: str) -> str:
    near = find_near(name, [*_DEFAULTS, *CATEGORIES, *SETTINGS, "configure_ipu_system"])
    return f"IPUConfig has no attribute {name!r}.{near}"

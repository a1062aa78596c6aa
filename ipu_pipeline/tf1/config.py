"""`IPUConfig`: selects the JAX devices that are the IPUs, and sets options for all programs.

Without it, the first `run` selects as many devices as the programs compiled so far need.
"""

from __future__ import annotations

import copy
import enum
import itertools
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ipu_pipeline.graphcore.sdk_names import explain_missing
from ipu_pipeline.ground.checks import check_member, find_near, is_int, list_members, require
from ipu_pipeline.ground.user_warnings import warn_once
from ipu_pipeline.processes import device_selection
from ipu_pipeline.processes.device_selection import (
    reset_ipu_configuration,
    running_on_ipu_model,
    selected_devices,
    set_num_devices,
    spread,
)
from ipu_pipeline.processes.executable_cache import (
    CACHE_DIR_VARIABLE,
    enable_executable_cache,
)

__all__ = [
    "CACHE_DIR_VARIABLE",
    "DeviceConnectionType",
    "ExecutionProfileType",
    "IPUConfig",
    "MergeRemoteBuffersBehaviour",
    "SchedulingAlgorithm",
    "SelectionOrder",
    "StochasticRoundingBehaviour",
    "configure_ipu_system",
    "enable_executable_cache",
    "reset_ipu_configuration",
    "running_on_ipu_model",
    "selected_devices",
    "set_num_devices",
]


# Graphcore's categories of settings: names, types and defaults of Poplar SDK 3.3
# (`tensorflow.python.ipu.config`), and `verification_options` of SDK 2.


class DeviceConnectionType(enum.Enum):
    """When a program attached to IPUs. JAX devices are always there.

    Example:
      >>> config = ipu.config.IPUConfig()
      >>> config.device_connection.type = ipu.config.DeviceConnectionType.ALWAYS
    """

    ALWAYS = 0
    ON_DEMAND = 1
    NEVER = 2
    PRE_COMPILE = 3


class ExecutionProfileType(enum.Enum):
    """How much was profiled on IPUs.

    Example:
      >>> ipu.config.ExecutionProfileType.NO_PROFILE.name
      'NO_PROFILE'
    """

    NO_PROFILE = 0
    DEVICE_PROFILE = 1
    IPU_PROFILE = 2
    TILE_PROFILE = 3


class MergeRemoteBuffersBehaviour(enum.Enum):
    """Whether buffers in IPUs' remote memory were merged.

    Example:
      >>> config = ipu.config.IPUConfig()
      >>> config.optimizations.merge_remote_buffers = ipu.config.MergeRemoteBuffersBehaviour.IF_BENEFICIAL
    """

    NO_MERGING = 0
    MERGE = 1
    IF_BENEFICIAL = 2


class SchedulingAlgorithm(enum.Enum):
    """How Poplar ordered operations. XLA has an order of its own.

    Example:
      >>> config = ipu.config.IPUConfig()
      >>> config.scheduling.algorithm = ipu.config.SchedulingAlgorithm.CHOOSE_BEST
    """

    CHOOSE_BEST = 0
    CLUSTERING = 1
    POST_ORDER = 2
    LOOK_AHEAD = 3
    SHORTEST_PATH = 4


class SelectionOrder(enum.Enum):
    """The order in which stages take the devices, seen as a ladder whose rungs are 0-1, 2-3, 4-5, ...

    AUTO and ZIGZAG: 0, 1, 2, 3, ... SNAKE: 0, 1, 3, 2, 4, 5, 7, 6, ..., so that neighbours in a
    pipeline are neighbours on the ladder. HOOF: up one side, 0, 2, 4, ..., and down the other,
    ..., 5, 3, 1, so that the last is a neighbour of the first.

    Example:
      >>> config = ipu.config.IPUConfig()
      >>> config.selection_order = ipu.config.SelectionOrder.SNAKE
    """

    AUTO = enum.auto()
    ZIGZAG = enum.auto()
    SNAKE = enum.auto()
    HOOF = enum.auto()

    def permute(self, num_devices: int) -> tuple[int, ...]:
        """The devices' indices in this order."""
        indices = list(range(num_devices))
        if self is SelectionOrder.SNAKE:
            rungs = [indices[start : start + 2] for start in range(0, num_devices, 2)]
            return tuple(
                index
                for number, rung in enumerate(rungs)
                for index in (reversed(rung) if number % 2 else rung)
            )
        if self is SelectionOrder.HOOF:
            return (*indices[::2], *reversed(indices[1::2]))
        return tuple(indices)


class StochasticRoundingBehaviour(enum.Enum):
    """Whether IPUs rounded stochastically. JAX devices round to nearest.

    Example:
      >>> config = ipu.config.IPUConfig()
      >>> config.floating_point_behaviour.esr = ipu.config.StochasticRoundingBehaviour.OFF
    """

    OFF = 0
    ON = 1
    REPLICA_IDENTICAL_ONLY = 2

    @staticmethod
    def from_bool(value: bool) -> StochasticRoundingBehaviour:
        """ON for True, OFF for False."""
        return StochasticRoundingBehaviour.ON if value else StochasticRoundingBehaviour.OFF


@dataclass(frozen=True)
class Setting:
    """A setting, which as a rule has no effect.

    Attributes:
      default: its value.
      reason: why nothing follows from another one; "" if something does.
    """

    default: Any
    reason: str

    @property
    def types(self) -> tuple[type, ...]:
        """The types that it takes: that of the default, and integers for a fraction."""
        kind = type(self.default)
        return (float, int) if kind is float else (kind,)


_POPLAR = (
    "it was for Poplar and its libraries, and XLA compiles here (PipelineStageOptions has XLA's options)"
)
_FAST_MATH = (
    "it is an option of XLA's: PipelineStageOptions(compiler_options={'xla_cpu_enable_fast_math': True})"
)
_EXCEPTIONS = "JAX devices raise no exceptions; jax.config.update('jax_debug_nans', True) looks for NaN"
_XLA = "XLA makes such choices by itself"
_EXCHANGE = "nothing is clustered for an exchange between tiles; JAX copies each array by itself"
_CONNECTION = "there is no IPU to attach to; JAX devices are always there"
_MODEL = "virtual IPUs have no tiles and no code for them"
_TILES = "JAX devices have no tiles"
_SCHEDULER = "XLA orders operations"
_REMOTE = "there is no remote memory; what is offloaded lies in host memory, array by array"
_PROCESSES = "ipu.distributed knows how many processes there are, and which of them this is"
_KEYS = "nothing is transferred to another machine, and so nothing encrypted"

# By full name.
SETTINGS: Mapping[str, Setting] = {
    "compilation_poplar_options": Setting({}, _POPLAR),
    "gcl_poplar_options": Setting({}, _POPLAR),
    "serialization_output_folder": Setting(
        "",
        "executables of IPUs cannot be made; config.enable_executable_cache keeps compiled programs",
    ),
    "convolutions.poplar_options": Setting({}, _POPLAR),
    "matmuls.poplar_options": Setting({}, _POPLAR),
    "matmuls.clear_pass_type": Setting(False, _POPLAR),
    "pooling.poplar_options": Setting({}, _POPLAR),
    "slices.poplar_options": Setting({}, _POPLAR),
    "device_connection.type": Setting(DeviceConnectionType.ALWAYS, _CONNECTION),
    "device_connection.version": Setting("", _CONNECTION),
    "device_connection.enable_remote_buffers": Setting(False, _REMOTE),
    "experimental.always_rearrange_copies_on_the_host": Setting(False, _EXCHANGE),
    "experimental.enable_remote_buffer_embedding": Setting(False, _REMOTE),
    "experimental.enable_prng_stability": Setting(
        False, "random numbers depend on the seed and on names alone, whatever runs where"
    ),
    "experimental.multi_replica_distribution.process_index": Setting(0, _PROCESSES),
    "experimental.multi_replica_distribution.process_count": Setting(0, _PROCESSES),
    "floating_point_behaviour.inv": Setting(False, _EXCEPTIONS),
    "floating_point_behaviour.div0": Setting(False, _EXCEPTIONS),
    "floating_point_behaviour.oflo": Setting(False, _EXCEPTIONS),
    "floating_point_behaviour.esr": Setting(
        StochasticRoundingBehaviour.OFF,
        "JAX devices round to nearest; keep what is small in float32 (accumulators, variables)",
    ),
    "floating_point_behaviour.nanoo": Setting(
        False, "what overflows is infinite, as IEEE 754 has it, in float16 too"
    ),
    "floating_point_behaviour.set_all": Setting(False, _EXCEPTIONS),
    "io_tiles.num_io_tiles": Setting(0, _TILES),
    "io_tiles.place_ops_on_io_tiles": Setting(False, _TILES),
    "io_tiles.available_memory_proportion": Setting(0.9, _TILES),
    "ipu_model.compile_ipu_code": Setting(True, _MODEL),
    "ipu_model.tiles_per_ipu": Setting(0, _MODEL),
    "ipu_model.version": Setting("ipu2", _MODEL),
    "norms.use_stable_statistics": Setting(
        False, "ipu.layers always compute the mean first and the variance from differences to it"
    ),
    "norms.experimental.distributed_batch_norm_replica_group_size": Setting(1, ""),
    "optimizations.math.fast": Setting(False, _FAST_MATH),
    "optimizations.math.dot_strength": Setting(True, _XLA),
    "optimizations.enable_fast_math": Setting(False, _FAST_MATH),
    "optimizations.prefetch_data_streams": Setting(
        True, "infeeds always fetch ahead; IPUInfeedQueue(prefetch_depth=...) says how far"
    ),
    "optimizations.combine_embedding_lookups": Setting(False, _XLA),
    "optimizations.combine_matmuls": Setting(False, _XLA),
    "optimizations.enable_graph_outlining": Setting(
        True, "stages that are equal are compiled once, always"
    ),
    "optimizations.merge_infeed_io_copies": Setting(True, _EXCHANGE),
    "optimizations.maximum_cross_replica_sum_buffer_size": Setting(0, _EXCHANGE),
    "optimizations.maximum_reduce_scatter_buffer_size": Setting(0, _EXCHANGE),
    "optimizations.maximum_inter_ipu_copies_buffer_size": Setting(0, _EXCHANGE),
    "optimizations.maximum_send_recv_cluster_size": Setting(0, _EXCHANGE),
    "optimizations.maximum_reduce_many_buffer_size": Setting(0, _EXCHANGE),
    "optimizations.maximum_all_gather_buffer_size": Setting(0, _EXCHANGE),
    "optimizations.minimum_remote_tensor_size": Setting(128, _REMOTE),
    "optimizations.merge_remote_buffers": Setting(MergeRemoteBuffersBehaviour.IF_BENEFICIAL, _REMOTE),
    "optimizations.enable_gather_simplifier": Setting(True, _XLA),
    "optimizations.triangular_solve_expander_block_size": Setting(0, _XLA),
    "optimizations.cholesky_block_size": Setting(0, _XLA),
    "optimizations.enable_dynamic_slice_replacement": Setting(True, _XLA),
    "scheduling.algorithm": Setting(SchedulingAlgorithm.CHOOSE_BEST, _SCHEDULER),
    "scheduling.maximum_scheduler_lookahead_depth": Setting(5, _SCHEDULER),
    "scheduling.maximum_scheduler_search_space_size": Setting(64, _SCHEDULER),
    "verification_options.enabled": Setting(False, _KEYS),
    "verification_options.options": Setting({}, _KEYS),
}
CATEGORIES = tuple(dict.fromkeys(name.split(".")[0] for name in SETTINGS if "." in name))


class _WarningDict(dict[Any, Any]):
    """A dict that warns when it is changed, since programs set options of Poplar's item by item."""

    def __init__(self, name: str, items: Mapping[Any, Any]) -> None:
        super().__init__(items)
        self._name = name

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        _notice(self._name)

    def update(self, *args: Any, **kwargs: Any) -> None:
        super().update(*args, **kwargs)
        if self:
            _notice(self._name)

    def __reduce__(self) -> Any:
        return _WarningDict, (self._name, dict(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> _WarningDict:
        return _WarningDict(self._name, copy.deepcopy(dict(self), memo))


def _notice(name: str) -> None:
    warn_once(name, f"IPUConfig.{name} has no effect: {SETTINGS[name].reason}.")


class Category:
    """A part of `IPUConfig`, such as `IPUConfig().optimizations`: its settings are attributes."""

    def __init__(self, name: str) -> None:
        """Makes a category with all settings at their defaults.

        Args:
          name: the full name, such as "norms.experimental"; "" for the settings of IPUConfig itself.
        """
        prefix = f"{name}." if name else ""
        names = [member.removeprefix(prefix) for member in SETTINGS if member.startswith(prefix)]
        values: dict[str, Any] = {"_name": name, "_prefix": prefix}
        for member in names:
            first, _separator, remainder = member.partition(".")
            if remainder and name:
                values.setdefault(first, Category(prefix + first))
            elif not remainder:
                values[first] = _initial(prefix + first)
        vars(self).update(values)

    @property
    def settings(self) -> list[str]:
        """The names of its settings, and of the categories within it."""
        return [name for name in vars(self) if not name.startswith("_")]

    def __setattr__(self, name: str, value: Any) -> None:
        """Checks the name and the type."""
        full_name = self._prefix + name
        if full_name not in SETTINGS:
            self.__getattr__(name)
        setting = SETTINGS[full_name]
        if isinstance(setting.default, StochasticRoundingBehaviour) and isinstance(value, bool):
            value = StochasticRoundingBehaviour.from_bool(value)
        if int in setting.types and hasattr(type(value), "__index__") and not isinstance(value, bool):
            value = operator.index(value)  # NumPy's integers
        is_number = isinstance(value, bool) and bool not in setting.types
        if is_number or not isinstance(value, setting.types):
            kinds = " or ".join(
                f"{kind.__name__} ({list_members(kind)})" if issubclass(kind, enum.Enum) else kind.__name__
                for kind in setting.types
            )
            raise TypeError(f"IPUConfig.{full_name} must be of type {kinds}; got {value!r}.")
        if value != setting.default and setting.reason:
            _notice(full_name)
        vars(self)[name] = _WarningDict(full_name, value) if isinstance(value, dict) else value

    def __getattr__(self, name: str) -> Any:
        """Only called for unknown names."""
        if name.startswith("__"):
            raise AttributeError(name)
        where = f"IPUConfig.{self._name}" if self._name else "IPUConfig"
        near = find_near(name, self.settings, self._prefix)
        raise AttributeError(f"{where} has no attribute {name!r}.{near}")

    def __deepcopy__(self, memo: dict[int, Any]) -> Category:
        duplicate = copy.copy(self)
        vars(duplicate).update(copy.deepcopy(vars(self), memo))
        return duplicate

    def __repr__(self) -> str:
        return "\n".join(
            repr(value) if isinstance(value, Category) else f"{self._prefix}{name} = {value!r}"
            for name, value in vars(self).items()
            if not name.startswith("_")
        )


class IPUModel(Category):
    """`IPUConfig.ipu_model`: a boolean, whether CPU devices are the IPUs, and a category of settings."""

    def __init__(self, is_used: bool = False) -> None:
        """Makes the category, with the boolean."""
        super().__init__("ipu_model")
        vars(self)["_is_used"] = is_used

    def __bool__(self) -> bool:
        return bool(vars(self)["_is_used"])

    def __eq__(self, other: object) -> bool:
        return bool(self) == other if isinstance(other, bool) else self is other

    __hash__ = object.__hash__

    def with_used(self, is_used: bool) -> IPUModel:
        """Returns a copy of the settings with another boolean."""
        duplicate = copy.deepcopy(self)
        assert isinstance(duplicate, IPUModel)
        vars(duplicate)["_is_used"] = is_used
        return duplicate


def _initial(full_name: str) -> Any:
    default = SETTINGS[full_name].default
    return _WarningDict(full_name, default) if isinstance(default, dict) else default


class IPUConfig:
    """Selects the IPUs of a process or run.

    Example:
      >>> config = ipu.config.IPUConfig()
      >>> config.auto_select_ipus = 2
      >>> config.configure_ipu_system()
      >>> len(ipu.config.selected_devices(0))
      2

    Attributes:
      auto_select_ipus: the number of IPUs; a list has the number for each `/device:IPU:<n>`. For R replicas
        of a pipeline of S IPUs it is R times S.
      select_ipus: in place of the number, indices of JAX devices, in the order of `/device:IPU:0`.
      selection_order: a `utils.SelectionOrder`.
      ipu_model: True: CPU devices are the IPUs. It is also Graphcore's category of settings.
      auto_round_num_ipus: True: a number that is not a power of two is rounded up to the next one; the
        additional IPUs are idle.
      require_power_of_two: False: any number is allowed.
      allow_recompute: True: the stages of pipelines that train may compute values again in their backward,
        instead of keeping them; see `pipelining_ops.RecomputationMode`.

    `norms.experimental.distributed_batch_norm_replica_group_size` is the number of replicas of the program
    if they share the statistics of batch normalization, or 1 (the default) for separate statistics. It
    applies to programs that are compiled after `configure_ipu_system`.

    Graphcore's other settings have their names (`config.floating_point_behaviour.esr`) and no effect.
    Setting one to another value than its default warns once, with the reason.
    """

    auto_select_ipus: int | list[int] | None = None
    select_ipus: list[int] | None = None
    selection_order: SelectionOrder = SelectionOrder.AUTO
    ipu_model: IPUModel
    auto_round_num_ipus: bool = False
    require_power_of_two: bool = True
    allow_recompute: bool = False

    def __init__(self) -> None:
        """Starts with nothing selected."""
        for name in CATEGORIES:
            object.__setattr__(self, name, IPUModel() if name == "ipu_model" else Category(name))
        object.__setattr__(self, "_top_level", Category(""))

    def __setattr__(self, name: str, value: Any) -> None:
        """Checks the name and the value."""
        if name in SETTINGS:
            setattr(self._top_level, name, value)
            return
        if name in CATEGORIES and name != "ipu_model":
            raise TypeError(f"IPUConfig.{name} is a category: set what it has. Got {value!r}.")
        if name not in IPUConfig.__annotations__:
            raise AttributeError(_describe_unknown(name))
        if name in ("auto_select_ipus", "select_ipus"):
            _check_numbers(name, value)
        elif name == "selection_order":
            check_member("IPUConfig.selection_order", value, SelectionOrder)
        elif not isinstance(value, (bool, IPUModel) if name == "ipu_model" else bool):
            raise TypeError(f"IPUConfig.{name} must be True or False; got {value!r}.")
        elif name == "ipu_model":
            value = (value if isinstance(value, IPUModel) else self.ipu_model).with_used(bool(value))
        object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        """Only called for names that are no attributes of its own."""
        if name in SETTINGS and "_top_level" in vars(self):
            return getattr(self._top_level, name)
        raise AttributeError(_describe_unknown(name))

    def configure_ipu_system(self, device: str = "cpu") -> None:
        """Selects the devices. It starts JAX's backend, with enough virtual devices if that is a CPU.

        With several processes, devices of all processes are selected, process by process. If the
        environment names the processes (see `ipu_pipeline.distributed`), this call joins them.

        Example:
          >>> config = ipu.config.IPUConfig()
          >>> config.select_ipus = [3, 1]
          >>> ipu.config.configure_ipu_system(config)
          >>> [device.id for device in ipu.config.selected_devices(0)]
          [3, 1]

        Args:
          device: the host's device in Graphcore's programs; only "cpu" and names of a CPU device.

        Raises:
          ValueError: no IPUs are selected, or both ways are used; the number of IPUs is not a power of two;
            or there are fewer accelerators.
          RuntimeError: JAX's CPU backend is already running, with fewer devices.
        """
        rule = "configure_ipu_system: device is the host's, a CPU like 'cpu'"
        require("cpu" in str(device).lower(), rule, device)
        if self.select_ipus is not None:
            if self.auto_select_ipus is not None:
                raise ValueError(
                    "IPUConfig: set auto_select_ipus or select_ipus, not both; they are "
                    f"{self.auto_select_ipus} and {self.select_ipus}."
                )
            self._check_power_of_two(len(self.select_ipus))
            available = device_selection.find_devices(max(self.select_ipus) + 1, bool(self.ipu_model))
            chosen = [[available[index] for index in self.select_ipus]]
        elif self.auto_select_ipus is None:
            raise ValueError("IPUConfig: auto_select_ipus must be set to a number of IPUs; it is None.")
        else:
            reserved = [self._check_power_of_two(number) for number in self.group_sizes]
            available = spread(
                device_selection.find_devices(sum(reserved), bool(self.ipu_model)), sum(reserved)
            )
            remaining = iter(available)
            chosen = [list(itertools.islice(remaining, number)) for number in reserved]
        groups = [[group[index] for index in self.selection_order.permute(len(group))] for group in chosen]
        device_selection.select(
            device_selection.System(
                groups,
                is_automatic=False,
                allow_recompute=self.allow_recompute,
                wanted=self.group_sizes,
                norm_group_size=self.norms.experimental.distributed_batch_norm_replica_group_size,
            )
        )

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
        """Returns how many IPUs to take for a number that was asked for."""
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


def configure_ipu_system(config: IPUConfig, device: str = "cpu", reset_configuration: bool = True) -> None:
    """Does the same as `IPUConfig.configure_ipu_system`.

    Args:
      config: what to configure.
      device: the host's.
      reset_configuration: False refuses to replace another configuration.

    Raises:
      RuntimeError: `reset_configuration` is False, and devices are selected.
      Others: the errors of the method.
    """
    if not isinstance(config, IPUConfig):
        raise TypeError(f"configure_ipu_system: config must be an IPUConfig; got {type(config).__name__}.")
    if not reset_configuration and device_selection.is_selected():
        raise RuntimeError(
            "configure_ipu_system: devices have been selected already, and reset_configuration is False. "
            "Call reset_ipu_configuration() before."
        )
    config.configure_ipu_system(device)


def _check_numbers(name: str, value: Any) -> None:
    is_selection = name == "select_ipus"
    lowest = 0 if is_selection else 1
    numbers = value if isinstance(value, (list, tuple)) else [value]
    if value is None:
        return
    if not numbers or not all(is_int(n, lowest) for n in numbers):
        kind = "list of device indices from 0" if is_selection else "number from 1, or a list of them"
        raise ValueError(f"IPUConfig.{name} must be a {kind}; got {value!r}.")
    if is_selection and (not isinstance(value, (list, tuple)) or len(set(numbers)) < len(numbers)):
        raise ValueError(
            f"IPUConfig.select_ipus must be a list of different device indices; got {value!r}."
        )


def _describe_unknown(name: str) -> str:
    near = find_near(name, [*IPUConfig.__annotations__, *CATEGORIES, *SETTINGS, "configure_ipu_system"])
    return f"IPUConfig has no attribute {name!r}.{near}"


explain_missing(__name__)

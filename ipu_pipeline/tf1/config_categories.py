"""The categories of Graphcore's `IPUConfig`, for programs that set them: most say what nothing here has.

Names, types and defaults are those of Poplar SDK 3.3 (`tensorflow.python.ipu.config`), and
`verification_options` of SDK 2. What is set to something else than its default warns, once, with the reason
why nothing follows.
"""

from __future__ import annotations

import copy
import enum
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ipu_pipeline.ground.enumerations import list_members
from ipu_pipeline.ground.names import find_near
from ipu_pipeline.ground.warned import warn_once

__all__ = [
    "CATEGORIES",
    "SETTINGS",
    "Category",
    "DeviceConnectionType",
    "ExecutionProfileType",
    "IPUModel",
    "MergeRemoteBuffersBehaviour",
    "SchedulingAlgorithm",
    "SelectionOrder",
    "Setting",
    "StochasticRoundingBehaviour",
]


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

# By full name. What IPUConfig itself has is in `config`.
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


class _Noticed(dict[Any, Any]):
    """A dict whose first item is noticed, since programs set options of Poplar's item by item."""

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
        return _Noticed, (self._name, dict(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> _Noticed:
        return _Noticed(self._name, copy.deepcopy(dict(self), memo))


def _notice(name: str) -> None:
    warn_once(name, f"IPUConfig.{name} has no effect: {SETTINGS[name].reason}.")


class Category:
    """A part of `IPUConfig`, such as `IPUConfig().optimizations`: its settings are attributes."""

    def __init__(self, name: str) -> None:
        """With all settings at their defaults.

        Args:
          name: the full name, such as "norms.experimental"; "" for those of IPUConfig itself.
        """
        prefix = f"{name}." if name else ""
        below = [known.removeprefix(prefix) for known in SETTINGS if known.startswith(prefix)]
        values: dict[str, Any] = {"_name": name, "_prefix": prefix}
        for known in below:
            first, _separator, rest = known.partition(".")
            if rest and name:
                values.setdefault(first, Category(prefix + first))
            elif not rest:
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
        vars(self)[name] = _Noticed(full_name, value) if isinstance(value, dict) else value

    def __getattr__(self, name: str) -> Any:
        """Only called for unknown names."""
        if name.startswith("__"):
            raise AttributeError(name)
        where = f"IPUConfig.{self._name}" if self._name else "IPUConfig"
        near = find_near(name, self.settings, self._prefix)
        raise AttributeError(f"{where} has no attribute {name!r}.{near}")

    def __deepcopy__(self, memo: dict[int, Any]) -> Category:
        made = copy.copy(self)
        vars(made).update(copy.deepcopy(vars(self), memo))
        return made

    def __repr__(self) -> str:
        return "\n".join(
            repr(value) if isinstance(value, Category) else f"{self._prefix}{name} = {value!r}"
            for name, value in vars(self).items()
            if not name.startswith("_")
        )


class IPUModel(Category):
    """`IPUConfig.ipu_model`: a boolean, whether CPU devices are the IPUs, and a category of settings."""

    def __init__(self, is_used: bool = False) -> None:
        """With that boolean."""
        super().__init__("ipu_model")
        vars(self)["_is_used"] = is_used

    def __bool__(self) -> bool:
        return bool(vars(self)["_is_used"])

    def __eq__(self, other: object) -> bool:
        return bool(self) == other if isinstance(other, bool) else self is other

    __hash__ = object.__hash__

    def with_used(self, is_used: bool) -> IPUModel:
        """The same settings with the other boolean."""
        made = copy.deepcopy(self)
        assert isinstance(made, IPUModel)
        vars(made)["_is_used"] = is_used
        return made


def _initial(full_name: str) -> Any:
    default = SETTINGS[full_name].default
    return _Noticed(full_name, default) if isinstance(default, dict) else default

"""`IPUConfig`: selects the JAX devices that are the IPUs, and sets options for all programs.

Without it, the first `run` selects as many devices as the programs compiled so far need.
"""

from __future__ import annotations

import itertools
from typing import Any

from ipu_pipeline.graphcore.importing import explain_missing
from ipu_pipeline.ground.checks import is_int
from ipu_pipeline.ground.enumerations import list_members
from ipu_pipeline.ground.names import find_near
from ipu_pipeline.processes import selection
from ipu_pipeline.processes.devices import spread
from ipu_pipeline.processes.executable_cache import (
    CACHE_DIR_VARIABLE,
    enable_executable_cache,
)
from ipu_pipeline.processes.selection import (
    reset_ipu_configuration,
    running_on_ipu_model,
    selected_devices,
    set_num_devices,
)
from ipu_pipeline.tf1.config_categories import (
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
        object.__setattr__(self, "_others", Category(""))

    def __setattr__(self, name: str, value: Any) -> None:
        """Checks the name and the value."""
        if name in SETTINGS:
            setattr(self._others, name, value)
            return
        if name in CATEGORIES and name != "ipu_model":
            raise TypeError(f"IPUConfig.{name} is a category: set what it has. Got {value!r}.")
        if name not in IPUConfig.__annotations__:
            raise AttributeError(_describe_unknown(name))
        if name in ("auto_select_ipus", "select_ipus"):
            _check_numbers(name, value)
        elif name == "selection_order":
            if not isinstance(value, SelectionOrder):
                raise TypeError(
                    f"IPUConfig.selection_order must be one of {list_members(SelectionOrder)}; got "
                    f"{value!r}."
                )
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
            available = selection.find_devices(max(self.select_ipus) + 1, bool(self.ipu_model))
            chosen = [[available[index] for index in self.select_ipus]]
        elif self.auto_select_ipus is None:
            raise ValueError("IPUConfig: auto_select_ipus must be set to a number of IPUs; it is None.")
        else:
            reserved = [self._check_power_of_two(number) for number in self.group_sizes]
            available = spread(selection.find_devices(sum(reserved), bool(self.ipu_model)), sum(reserved))
            left = iter(available)
            chosen = [list(itertools.islice(left, number)) for number in reserved]
        groups = [[group[index] for index in self.selection_order.permute(len(group))] for group in chosen]
        selection.select(
            selection.System(
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


def configure_ipu_system(config: IPUConfig, device: str = "cpu", reset_configuration: bool = True) -> None:
    """As `IPUConfig.configure_ipu_system`.

    Args:
      config: what to configure.
      device: the host's.
      reset_configuration: False refuses to replace another configuration.

    Raises:
      RuntimeError: `reset_configuration` is False, and devices are selected.
      Others: as that.
    """
    if not isinstance(config, IPUConfig):
        raise TypeError(f"configure_ipu_system: config must be an IPUConfig; got {type(config).__name__}.")
    if not reset_configuration and selection.is_selected():
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

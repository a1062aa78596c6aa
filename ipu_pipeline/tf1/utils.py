"""Small functions that scripts for IPUs expect under `ipu.utils`.

Graphcore's functions that have nothing to do here also exist: they warn, once, and say why.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ipu_pipeline.graphcore.sdk_names import explain_missing, find_attribute
from ipu_pipeline.ground.user_warnings import warn_once
from ipu_pipeline.processes import device_selection
from ipu_pipeline.tf1.config import (
    DeviceConnectionType,
    ExecutionProfileType,
    IPUConfig,
    MergeRemoteBuffersBehaviour,
    SchedulingAlgorithm,
    SelectionOrder,
    configure_ipu_system,
    reset_ipu_configuration,
    running_on_ipu_model,
)

__all__ = [
    "DeviceConnectionType",
    "ExecutionProfileType",
    "IPUConfig",
    "MergeRemoteBuffersBehaviour",
    "SchedulingAlgorithm",
    "SelectionOrder",
    "auto_select_ipus",
    "configure_ipu_system",
    "create_ipu_config",
    "get_num_of_ipus_in_device",
    "reset_ipu_configuration",
    "reset_ipu_seed",
    "running_on_ipu_model",
    "select_ipus",
    "set_recomputation_options",
]

# What each function did, and why it does nothing here. Those whose first argument was options return them.
_ON_HOST = (
    "initial values are computed where a program first needs them, and no variable lives on IPUs before"
)
_OF_CONFIG = "set attributes of IPUConfig, which say themselves whether they have an effect"
_EVENTS = "there is no event trace of Poplar's"
WITHOUT_EFFECT = {
    "move_variable_initialization_to_cpu": ("moved the initialization of variables to the host", _ON_HOST),
    "export_dataset_to_file": (
        "wrote a data set for Graphcore's stand-alone executables",
        "there are none; Session.export writes a program that infers",
    ),
    "export_inputs_to_file": (
        "wrote inputs for Graphcore's stand-alone executables",
        "there are none; Session.export writes a program that infers",
    ),
    "use_synthetic_data_for": (
        "had data made on the IPU",
        "feed a data set of your own that repeats one element",
    ),
    "extract_all_events": ("read events of Poplar's", _EVENTS),
    "extract_all_strings_from_event_trace": ("read events of Poplar's", _EVENTS),
    "extract_all_types_from_event_trace": ("read events of Poplar's", _EVENTS),
    "extract_compile_reports": ("read reports of Poplar's", _EVENTS),
    "extract_execute_reports": ("read reports of Poplar's", _EVENTS),
    "extract_poplar_serialized_graphs": ("read graphs of Poplar's", _EVENTS),
    "set_compilation_options": ("gave options to Poplar", _OF_CONFIG),
    "set_convolution_options": ("gave options to Poplar's convolutions", _OF_CONFIG),
    "set_experimental_multi_replica_distribution_options": ("distributed replicas", _OF_CONFIG),
    "set_floating_point_behaviour_options": ("chose how IPUs rounded and overflowed", _OF_CONFIG),
    "set_gcl_options": ("gave options to Graphcore's collectives", _OF_CONFIG),
    "set_io_tile_options": ("reserved tiles for input and output", _OF_CONFIG),
    "set_ipu_connection_type": ("chose when to attach to IPUs", _OF_CONFIG),
    "set_ipu_model_options": ("set up the simulated IPU", _OF_CONFIG),
    "set_matmul_options": ("gave options to Poplar's matrix products", _OF_CONFIG),
    "set_norm_options": ("chose how normalizations computed variances", _OF_CONFIG),
    "set_optimization_options": ("chose optimizations of the graph", _OF_CONFIG),
    "set_pooling_options": ("gave options to Poplar's pooling", _OF_CONFIG),
    "set_report_options": ("chose what Poplar reported", _OF_CONFIG),
    "set_serialization_options": ("chose where executables were written", _OF_CONFIG),
    "set_transfer_options": ("chose who rearranged what is copied", _OF_CONFIG),
    "set_verification_options": ("encrypted transfers", _OF_CONFIG),
}


def __getattr__(name: str) -> Any:
    if name not in WITHOUT_EFFECT:
        return find_attribute(__name__, name)
    return _without_effect(name)


def __dir__() -> list[str]:
    return sorted([*__all__, *WITHOUT_EFFECT])


def _without_effect(name: str) -> Callable[..., Any]:
    did, reason = WITHOUT_EFFECT[name]

    def function(*args: Any, **kwargs: Any) -> Any:
        warn_once(f"utils.{name}", f"ipu.utils.{name} has no effect. It {did}: {reason}.")
        if name.startswith("set_"):
            return args[0] if args else kwargs.get("opts")
        return [] if name.startswith("extract_") else None

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"Warns, once: it {did}; {reason}."
    return function


def create_ipu_config(**options: Any) -> IPUConfig:
    """Makes an `IPUConfig`, as scripts before SDK 2.1 did.

    Example:
      >>> options = ipu.utils.create_ipu_config()
      >>> options = ipu.utils.auto_select_ipus(options, num_ipus=2)

    Args:
      **options: `selection_order`. Other options were for Poplar's profiles, and warn.
    """
    configuration = IPUConfig()
    if (order := options.pop("selection_order", None)) is not None:
        configuration.selection_order = order
    for name in options:
        warn_once(
            f"create_ipu_config.{name}",
            f"create_ipu_config: {name} has no effect: it was for Poplar's compiler and profiles.",
        )
    return configuration


def auto_select_ipus(opts: IPUConfig, num_ipus: int | Sequence[int]) -> IPUConfig:
    """Sets `IPUConfig.auto_select_ipus`, and returns the configuration.

    Example:
      >>> options = ipu.utils.auto_select_ipus(ipu.utils.create_ipu_config(), num_ipus=2)
      >>> options.configure_ipu_system()
      >>> ipu.utils.get_num_of_ipus_in_device("/device:IPU:0")
      2
    """
    opts.auto_select_ipus = num_ipus if isinstance(num_ipus, int) else list(num_ipus)
    return opts


def select_ipus(opts: IPUConfig, indices: Sequence[int]) -> IPUConfig:
    """Sets `IPUConfig.select_ipus`, and returns the configuration.

    Example:
      >>> options = ipu.utils.select_ipus(ipu.utils.create_ipu_config(), indices=[0, 2])
      >>> options.select_ipus
      [0, 2]
    """
    opts.select_ipus = list(indices)
    return opts


def set_recomputation_options(opts: IPUConfig, allow_recompute: bool = True, **options: Any) -> IPUConfig:
    """Sets `IPUConfig.allow_recompute`, and returns the configuration.

    Example:
      >>> options = ipu.utils.set_recomputation_options(ipu.utils.create_ipu_config())
      >>> options.allow_recompute
      True

    Args:
      opts: the configuration.
      allow_recompute: the value.
      **options: other options, which warn.
    """
    opts.allow_recompute = allow_recompute
    for name in options:
        warn_once(f"recomputation.{name}", f"set_recomputation_options: {name} has no effect.")
    return opts


def get_num_of_ipus_in_device(ipu_device: str, device: str = "cpu") -> int:
    """The number of IPUs of a device such as "/device:IPU:0"; 0 if none were selected.

    Args:
      ipu_device: the device's name.
      device: the host's name.

    Raises:
      ValueError: the name does not belong to an IPU device.
    """
    del device
    start, _separator, number = ipu_device.rpartition(":")
    if not start.lower().endswith("device:ipu") or not number.isdigit():
        raise ValueError(f'ipu_device must be like "/device:IPU:0"; got {ipu_device!r}.')
    return len(device_selection.selected_devices(int(number)))


class Seeded(Protocol):
    """A session, for `reset_ipu_seed`."""

    def reset_seed(self, seed: int) -> None:
        """Makes random numbers depend on another seed from now on."""


_seed = 0
_has_identical_replicas = False
_seeded: weakref.WeakSet[Any] = weakref.WeakSet()
_seeding = threading.Lock()


def reset_ipu_seed(
    seed: int,
    device: str = "/device:IPU:0",
    cpu_device: str = "cpu",
    experimental_identical_replicas: bool = False,
) -> None:
    """Sets the seed of open sessions, and of later sessions that are made without a seed.

    Random numbers of an open session then depend on the new seed and, as always, on the number of runs of
    its programs. Existing variables keep their values.

    Example:
      >>> ipu.utils.reset_ipu_seed(42)

    Args:
      seed: an integer of 64 bits.
      device: an IPU device; all have the same seed.
      cpu_device: the host's name.
      experimental_identical_replicas: whether all replicas of a program draw the same numbers as a single
        replica, until the next call of this function.

    Raises:
      TypeError, ValueError: the seed has a wrong type or value.
    """
    global _seed, _has_identical_replicas
    del device, cpu_device
    check_seed(seed, "reset_ipu_seed")
    if not isinstance(experimental_identical_replicas, bool):
        raise TypeError(
            "reset_ipu_seed: experimental_identical_replicas must be True or False; got "
            f"{experimental_identical_replicas!r}."
        )
    _seed, _has_identical_replicas = int(seed), experimental_identical_replicas
    with _seeding:
        for session in list(_seeded):
            session.reset_seed(_seed)


def check_seed(seed: Any, caller: str) -> None:
    """Raises if a value is not a seed."""
    if isinstance(seed, bool) or not hasattr(type(seed), "__index__"):
        raise TypeError(f"{caller}: seed must be an integer; got {seed!r}.")
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"{caller}: seed must fit 64 bits; got {seed}.")


def current_seed() -> int:
    """The seed of sessions that are made without one."""
    return _seed


def replicas_are_identical() -> bool:
    """Whether replicas draw the same random numbers, by `reset_ipu_seed`."""
    return _has_identical_replicas


def reach(session: Seeded) -> None:
    """Registers a session with `reset_ipu_seed`."""
    with _seeding:
        _seeded.add(session)


explain_missing(__name__)

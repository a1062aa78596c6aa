"""Processes that run one model together (`Options.Distributed`), and the devices of each.

Each has whole replicas of the model, and its own part of the data. Values that must be the same in all are
compared before they are used: the program is the same everywhere, but what it reads may not be.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import torch

from ipu_pipeline.engine.processes import current as current_peers
from ipu_pipeline.engine.processes import digest_array
from ipu_pipeline.ground.tables import between_bars
from ipu_pipeline.poptorch.dtypes import to_numpy
from ipu_pipeline.poptorch.enums import ConnectionType
from ipu_pipeline.poptorch.errors import Error
from ipu_pipeline.poptorch.execution.host_weights import on_host
from ipu_pipeline.poptorch.optim.device_state import SavedState
from ipu_pipeline.poptorch.options import Options
from ipu_pipeline.poptorch.options.strategies import PhasedExecution
from ipu_pipeline.poptorch.replica_groups import find_groups
from ipu_pipeline.processes import device_selection
from ipu_pipeline.processes.device_selection import have_cpu_devices
from ipu_pipeline.processes.rendezvous import join_by_environment

_PATH = "poptorch.Options().Distributed"
# Options of the process and its machine; the seed is compared as it is in use.
_OWN = {
    "executable_cache_path",
    "ipu_version",
    "log_dir",
    "model_name",
    "profile_dir",
    "profiling",
    "random_seed",
    "show_compilation_progress_bar",
    "source_location_excludes",
}
_MEND = (
    "Give all processes the same: torch.manual_seed with one number before the model is made, or one state "
    "dict for all. Buffers that each process keeps for itself, such as those of batch normalization, need "
    "Options.broadcastBuffers(False)."
)
_SHOWN = 5  # names in an error


@dataclass(frozen=True)
class Processes:
    """The processes that run a model."""

    index: int = 0  # the number of this process, from 0
    count: int = 1  # the number of processes
    keep_buffers: bool = False  # whether each may have its own values of buffers

    @classmethod
    def of(cls, options: Options) -> Processes:
        """Reads the processes from options."""
        distributed = options.Distributed
        return cls(distributed.processId, distributed.numProcesses, not options.broadcast_buffers)


ALONE = Processes()


def join(options: Options) -> None:
    """Joins the processes that the environment names, and checks that they are those of the options."""
    expected = Processes.of(options)
    if expected.count > 1:
        _check_supported(options)
    join_by_environment()
    peers = current_peers()
    joined = ALONE if peers is None else Processes(peers.index, peers.count)
    if (expected.index, expected.count) == (joined.index, joined.count):
        return
    claim = f"{_PATH} says that this is process {expected.index} of {expected.count}, but it has joined"
    if peers is not None:
        raise Error(
            f"{claim} the others as process {joined.index} of {joined.count}. Leave configureProcessId and "
            f"disable out, or call configureProcessId({joined.index}, {joined.count}): all processes of a "
            "run have all models together."
        )
    if jax.distributed.is_initialized():
        raise Error(
            f"{claim} others by jax.distributed only. Call ipu_pipeline.distributed.initialize instead."
        )
    raise Error(
        f"{claim} none. Start the program by `ipu-pipeline launch -n {expected.count}`; or call "
        f'ipu_pipeline.distributed.initialize("host:port", {expected.count}, {expected.index}) at its top, '
        "with the address of process 0."
    )


def _check_supported(options: Options) -> None:
    groups = find_groups(options.input_cgt, options.input_group_size, options.replication_factor)
    refused = {
        f"poptorch.{type(options.execution_strategy).__name__}": isinstance(
            options.execution_strategy, PhasedExecution
        ),
        "useReplicatedTensorSharding": bool(options.TensorLocations.asked_to_shard),
        "inputReplicaGrouping": len(set(groups)) < len(groups),
        "Precision.enableFloatingPointExceptions": options.Precision.floating_point_exceptions,
        "ConnectionType.Never (useOfflineIpuTarget)": options.connection_type is ConnectionType.Never,
    }
    for option, is_asked in refused.items():
        if is_asked:
            check_alone(options, option)


def check_alone(options: Options, feature: str) -> None:
    """Refuses several processes."""
    number = Processes.of(options).count
    if number > 1:
        raise NotImplementedError(
            f"{feature} does not exist here yet for several processes, and {_PATH} has {number}. Leave it "
            "out, or use one process with more replicas (replicationFactor)."
        )


def describe_options(options: Options) -> dict[str, str]:
    """Returns the options that must be the same in all processes, by name."""
    groups = {"": options, **{name: getattr(options, name) for name in options.groups}}
    del groups["Distributed"]
    return {
        f"Options.{path}{'.' * bool(path)}{name}": getattr(value, "__qualname__", None) or repr(value)
        for path, group in groups.items()
        for name, value in group.values_by_name().items()
        if name not in _OWN
    }


def agree(subject: str, document: Mapping[str, str]) -> None:
    """Compares documents of all processes, which must call it in the same order."""
    peers = current_peers()
    if peers is None:
        return
    try:
        peers.agree(subject, document)
    except ValueError as error:
        raise Error(str(error)) from None


def compare_arrays(subject: str, arrays: Mapping[str, Any], mend: str = _MEND) -> None:
    """Compares values that must be the same in all processes, like `agree`."""
    peers = current_peers()
    if peers is None:
        return
    text = json.dumps({name: digest_array(array) for name, array in arrays.items()})
    digests = [json.loads(text) for text in peers.exchange(f"PopTorch: {subject}", text)]
    names = dict.fromkeys(itertools.chain(*digests))
    differing = [name for name in names if len({process.get(name) for process in digests}) > 1]
    if differing:
        more = f" and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
        raise Error(
            f"{subject} differ between the {peers.count} processes: {', '.join(differing[:_SHOWN])}{more}. "
            f"{mend}"
        )


def compare_weights(model: torch.nn.Module, processes: Processes) -> None:
    """Compares a model's parameters on the host, and buffers that processes share, like `agree`.

    Process 0's are not sent to the others instead: a mistake, such as another seed, would go unnoticed.
    """
    if current_peers() is None:
        return
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters())
    if not processes.keep_buffers:
        tensors |= dict(model.named_buffers())
    with on_host(*tensors.values()):
        compare_arrays("The weights", {name: to_numpy(tensor, name) for name, tensor in tensors.items()})


def compare_state(saved: SavedState | None) -> None:
    """Compares the state that an optimizer has from before, if any, like `agree`."""
    if current_peers() is None:
        return
    tensors = {} if saved is None else {**saved.ipu_state, **saved.ipu_param}
    arrays = {name: to_numpy(torch.as_tensor(value), name) for name, value in tensors.items()}
    compare_arrays("The optimizer's states", arrays, "Load one state for all processes, or none.")


# Devices.

# Virtual CPU devices: a model that is compiled later may need more than the first one. XLA has at least one
# thread per device, and with many more threads than cores its matrix products take twice as long.
_USUAL_NUMBER = min(16, 2 * (os.cpu_count() or 1))


def select_devices(num_ipus: int, options: Options) -> list[Any]:
    """Returns a model's JAX devices, one per IPU, process by process. Starts JAX's backend."""
    num_devices = 1 << (num_ipus - 1).bit_length()
    if num_devices != num_ipus and not options.auto_round_num_ipus:
        raise Error(
            f"The model specifies the use of {num_ipus} IPUs, however PopTorch must reserve a minimum of "
            f"{num_devices} in order to allow the model to run, because PopTorch must reserve a power of 2 "
            "or maximum of 64 IPUs per process. Please reconfigure your model to use a different number of "
            "IPUs or set poptorch.Options().autoRoundNumIPUs(True)."
        )
    first = options.ipu_id if options.is_set("ipu_id") else 0
    use_model = options.is_set("use_model") and options.use_model
    number = options.Distributed.numProcesses
    with between_bars():  # JAX logs backends that are not there
        if device_selection.is_selected() and not first and not use_model:
            devices = device_selection.devices_for(0, number * num_devices)
        else:
            have_cpu_devices(number * max(first + num_devices, _USUAL_NUMBER))
            devices = device_selection.find_devices(number * (first + num_devices), use_model)
    if number == 1:
        return devices[first : first + num_devices]
    return _of_each_process(devices, number, range(first, first + num_ipus))


def _of_each_process(devices: Sequence[Any], number: int, places: range) -> list[Any]:
    """Selects some devices of each process."""
    chosen = []
    for process in range(number):
        process_devices = [device for device in devices if device.process_index == process]
        if len(process_devices) < places.stop:
            raise ValueError(
                f"Each process needs {places.stop} IPUs for its replicas of the model, but process "
                f"{process} has {len(process_devices)} of the {len(devices)}. Give each process that many "
                "devices, or use fewer replicas (replicationFactor is per process)."
            )
        chosen += process_devices[places.start : places.stop]
    return chosen

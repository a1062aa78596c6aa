"""Selects the JAX devices that are a model's IPUs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from ipu_pipeline.poptorch.errors import Error
from ipu_pipeline.poptorch.options import Options
from ipu_pipeline.processes import selection
from ipu_pipeline.processes.devices import have_cpu_devices

__all__ = ["select_devices"]

# Virtual CPU devices: a model that is compiled later may need more than the first one. XLA has at least one
# thread per device, and with many more threads than cores its matrix products take twice as long.
_USUAL_NUMBER = min(16, 2 * (os.cpu_count() or 1))


def select_devices(num_ipus: int, options: Options) -> list[Any]:
    """Returns a model's JAX devices, one per IPU, process by process. Starts JAX's backend."""
    wanted = 1 << (num_ipus - 1).bit_length()
    if wanted != num_ipus and not options.auto_round_num_ipus:
        raise Error(
            f"The model specifies the use of {num_ipus} IPUs, however PopTorch must reserve a minimum of "
            f"{wanted} in order to allow the model to run, because PopTorch must reserve a power of 2 or "
            "maximum of 64 IPUs per process. Please reconfigure your model to use a different number of "
            "IPUs or set poptorch.Options().autoRoundNumIPUs(True)."
        )
    first = options.ipu_id if options.is_set("ipu_id") else 0
    use_model = options.is_set("use_model") and options.use_model
    number = options.Distributed.numProcesses
    if selection.is_selected() and not first and not use_model:
        found = selection.devices_for(0, number * wanted)
    else:
        have_cpu_devices(number * max(first + wanted, _USUAL_NUMBER))
        found = selection.find_devices(number * (first + wanted), use_model)
    if number == 1:
        return found[first : first + wanted]
    return _of_each_process(found, number, range(first, first + num_ipus))


def _of_each_process(devices: Sequence[Any], number: int, places: range) -> list[Any]:
    """Selects some devices of each process."""
    chosen = []
    for process in range(number):
        own = [device for device in devices if device.process_index == process]
        if len(own) < places.stop:
            raise ValueError(
                f"Each process needs {places.stop} IPUs for its replicas of the model, but process "
                f"{process} has {len(own)} of the {len(devices)}. Give each process that many devices, or "
                "use fewer replicas (replicationFactor is per process)."
            )
        chosen += own[places.start : places.stop]
    return chosen

"""`ipu-pipeline devices`: lists the devices that JAX has here, each of which can be an IPU."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from ipu_pipeline.ground.cores import count_cores
from ipu_pipeline.ground.tables import align, describe_bytes, printable

__all__ = ["add"]


def add(parser: argparse.ArgumentParser) -> None:
    """Adds a description and arguments to the command's parser; see `main`."""
    parser.description = (
        "List JAX's devices on this machine. Each can be an IPU. This starts JAX's backend without "
        "reserving the memory of accelerators."
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(call=lambda parsed: _tell(parsed.json))


def _tell(as_json: bool) -> int:
    # A program that trains may want all of an accelerator's memory, or have it already.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax  # here, since other commands are faster without it

    try:
        devices = [_describe(device) for device in jax.devices()]
    except RuntimeError as error:
        print(f"ipu-pipeline devices: JAX does not start: {error}", file=sys.stderr)  # noqa: T201  # a program
        return 1
    virtual = _describe_virtual(devices)
    if as_json:
        print(json.dumps({"devices": devices, **virtual}))  # noqa: T201  # a program
        return 0
    rows = [("id", "platform", "kind", "process", "memory", "in use")]
    rows += [
        (
            str(device["id"]),
            device["platform"],
            printable(device["kind"]),
            str(device["process"]),
            *("" if size is None else describe_bytes(size) for size in _sizes(device)),
        )
        for device in devices
    ]
    print("\n".join(align(rows, (0, 3, 4, 5))))  # noqa: T201  # a program
    if virtual["can_make_virtual"]:
        print(  # noqa: T201  # a program
            f"These are virtual devices on {virtual['num_cores']} cores. A program gets as many as its "
            "pipelines need; IPUConfig and ipu.set_num_devices ask for more."
        )
    else:
        print(  # noqa: T201  # a program
            f"IPUConfig.ipu_model = True makes as many virtual devices of the CPU ({virtual['num_cores']} "
            "cores) as a program needs instead."
        )
    return 0


def _describe(device: Any) -> dict[str, Any]:
    try:
        stats = device.memory_stats() or {}
    except (RuntimeError, NotImplementedError, AttributeError):  # not all platforms know
        stats = {}
    return {
        "id": device.id,
        "platform": device.platform,
        "kind": device.device_kind,
        "process": device.process_index,
        "memory_bytes": stats.get("bytes_limit"),
        "used_bytes": stats.get("bytes_in_use"),
    }


def _describe_virtual(devices: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Facts about virtual devices: how many a program gets depends on its pipelines."""
    return {
        "can_make_virtual": devices[0]["platform"] == "cpu",
        "num_virtual": sum(device["platform"] == "cpu" for device in devices),
        "num_cores": count_cores(),
    }


def _sizes(device: dict[str, Any]) -> tuple[int | None, int | None]:
    return device["memory_bytes"], device["used_bytes"]

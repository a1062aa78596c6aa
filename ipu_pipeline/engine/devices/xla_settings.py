"""XLA's settings for a pipeline: compiler options, and the threads of the CPU backend."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from ipu_pipeline.engine.devices.device_groups import DeviceGroup
from ipu_pipeline.ground.checks import require
from ipu_pipeline.ground.host import count_cores

Options: TypeAlias = "Mapping[str, bool | int | float | str]"


class _Argument(NamedTuple):
    """An argument with options: its name, the stage (None: all stages) and the options."""

    argument: str
    stage: int | None
    options: Options

    def __str__(self) -> str:
        return self.argument if self.stage is None else f"{self.argument}[{self.stage}]"


@dataclass(frozen=True, eq=False)
class CompilerOptions:
    """The options of each program."""

    # per stage; if the pipeline trains, the last stage's are for its forward and backward. Stages behind
    # the last entry have none.
    forward: tuple[Options, ...]
    backward: tuple[Options, ...]  # per stage, too; the last stage has none
    update: Options  # for the weight update's programs
    whole: Options  # for the one program of all stages, where they are on one device
    # the options as they were given, with the stage that each is checked on
    arguments: tuple[tuple[_Argument, int], ...]

    def of_forward(self, stage: int) -> Options:
        """The options of a stage's forward program."""
        return self.forward[stage] if stage < len(self.forward) else {}

    def of_backward(self, stage: int) -> Options:
        """The options of a stage's backward program."""
        return self.backward[stage] if stage < len(self.backward) else {}


NO_OPTIONS = CompilerOptions((), (), {}, {}, ())


def plan_options(
    num_stages: int,
    is_one_program: bool,
    trains: bool,
    forward: Sequence[Options] | None,
    backward: Sequence[Options] | None,
    update: Options | None,
    argument_names: Mapping[str, str],
) -> CompilerOptions:
    """Works out which program gets which options."""
    called = {name: argument_names.get(name, name) for name in _ARGUMENTS}
    if not trains and (backward is not None or update is not None):
        name = called["update_options" if backward is None else "backward_options"]
        raise ValueError(f"{name} goes with an optimizer; the pipeline only runs forwards.")
    forwards = [_Argument(called["forward_options"], n, options) for n, options in enumerate(forward or ())]
    backwards = [
        _Argument(called["backward_options"], n, options) for n, options in enumerate(backward or ())
    ]
    updates = [] if update is None else [_Argument(called["update_options"], None, update)]
    for entry in (*forwards, *backwards, *updates):
        _check_types(entry)
    for many in (forwards, backwards):
        if len(many) > num_stages:
            raise ValueError(f"{many[0].argument} has {len(many)} entries for {num_stages} stages.")

    def of_stage(many: Sequence[_Argument], index: int) -> list[_Argument]:
        return [entry for entry in many if entry.stage == index]

    last = num_stages - 1
    merged = [_merge(of_stage(forwards, index), "") for index in range(last)]
    fused = "forward and backward of the last stage are one program"
    last_stage = [*of_stage(forwards, last), *of_stage(backwards, last)]
    entries = [*forwards, *backwards, *updates]
    reason = "all stages are on one device and so one program"
    return CompilerOptions(
        forward=() if is_one_program else (*merged, _merge(last_stage, fused)),
        backward=() if is_one_program else tuple(_merge(of_stage(backwards, n), "") for n in range(last)),
        update=_merge(updates, ""),
        whole=_merge(entries, reason) if is_one_program else {},
        arguments=tuple((entry, entry.stage or 0) for entry in entries),
    )


_ARGUMENTS = ("forward_options", "backward_options", "update_options")


def _check_types(entry: _Argument) -> None:
    if not isinstance(entry.options, Mapping):
        raise TypeError(f"{entry} must be a dict of compiler options; got {entry.options!r}.")
    for name, value in entry.options.items():
        if not isinstance(name, str):
            raise TypeError(f"{entry}: the names of compiler options are strings; got {name!r}.")
        rule = f"{entry}: the compiler option {name} must be a boolean, an integer, a float or a string"
        require(type(value) in (bool, int, float, str), rule, value, TypeError)


def _merge(parts: Iterable[_Argument], why: str) -> dict[str, Any]:
    """The options of one program. Raises a ValueError if they contradict each other."""
    merged: dict[str, Any] = {}
    origins: dict[str, _Argument] = {}
    for entry in parts:
        for name, value in entry.options.items():
            first = origins.setdefault(name, entry)
            earlier = merged.setdefault(name, value)
            if (type(earlier), earlier) != (type(value), value):
                raise ValueError(
                    f"The compiler option {name} is {earlier!r} in {first} and {value!r} in {entry}, but "
                    f"{why}. Give it one value, or leave it out in all but one."
                )
    return merged


def check_compiles(options: CompilerOptions, groups: Sequence[DeviceGroup]) -> None:
    """Compiles trivial programs with the options that were given."""
    results: dict[tuple[Any, ...], str | None] = {}
    faults = []
    for entry, stage in options.arguments:
        for name, value in entry.options.items():
            key = (groups[stage].devices[0].platform, name, type(value), value)
            if key not in results and groups[stage].is_here:
                results[key] = _compile_trivial({name: value}, groups[stage])
            error = results.get(key)
            if error is not None:
                faults.append(f"{entry}: the compiler option {name} with the value {value!r}: {error}")
    if faults:
        raise ValueError("XLA refuses compiler options.\n" + "\n".join(faults))


def _compile_trivial(options: Options, group: DeviceGroup) -> str | None:
    """Compiles a trivial program with the options. Returns XLA's error, or None."""
    trivial = jax.jit(lambda x: x, in_shardings=group.replicated, compiler_options=dict(options))
    try:
        trivial.lower(np.int32(0)).compile()
    except jax.errors.JaxRuntimeError as error:
        return str(error)
    return None


# One thread of XLA's CPU backend must be free for what other processes ask for. A program that joins what
# several processes have, as an all-reduce does, occupies a thread until all of them have come to it. What
# other processes pull meanwhile goes through a thread, too. If all threads were occupied, two processes
# could wait for each other for ever: one for what it pulls, the other for the first.

_VARIABLE = "PJRT_NPROC"


def num_cpu_devices_set() -> int:
    """The number of virtual CPU devices that this process has or will have; 1 by default."""
    flag = re.search(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    configured = int(jax.config.jax_num_cpu_devices)  # type: ignore[attr-defined]  # made at run time
    return configured if configured >= 1 else int(flag.group(1)) if flag else 1


def keep_one_free() -> None:
    """Makes XLA's CPU backend, which must not have started yet, create more threads than devices."""
    num_threads = num_cpu_devices_set() + 1
    if _num_threads() < num_threads:
        os.environ[_VARIABLE] = f"{num_threads}"


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

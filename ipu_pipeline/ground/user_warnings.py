"""Warnings for users, each given once: of deprecated names, and of untested versions of packages."""

from __future__ import annotations

import re
import sys
import warnings
from typing import NamedTuple

_warned: set[str] = set()


def warn_once(name: str, message: str, category: type[Warning] = UserWarning) -> None:
    """Warns the first time that it is called for a name."""
    if name not in _warned:
        _warned.add(name)
        frame, level = sys._getframe(), 1  # noqa: SLF001  # the program's line, however deep this is
        while frame.f_back is not None and _is_between(frame.f_globals.get("__name__", "")):
            level += not _is_skipped(frame.f_code.co_filename)
            frame = frame.f_back
        warnings.warn(message, category, stacklevel=level)


def _is_between(module: str) -> bool:
    """Whether a module is the package, or what imports it."""
    return module.split(".")[0] in ("ipu_pipeline", "importlib")


def _is_skipped(file: str) -> bool:
    """Whether `warnings.warn` does not count a frame of a file."""
    return "importlib" in file and "_bootstrap" in file


# Public names that are to go. Each still works, and warns once; docs/versions.md has the rule.


class Deprecated(NamedTuple):
    """The name to use instead, and the first version without the deprecated one."""

    instead: str
    until: str


DEPRECATED_NAMES = {
    "engine.DispatchPlan": Deprecated("engine.Chunking", "0.2.0"),
    "engine.ScheduleLike": Deprecated("engine.Schedule", "0.2.0"),
}


def warn_deprecated(name: str) -> None:
    """Warns once, with a DeprecationWarning, that a name of `DEPRECATED_NAMES` is to go."""
    instead, until = DEPRECATED_NAMES[name]
    warn_once(
        f"deprecated: {name}",
        f"{name} is deprecated, and is not in ipu_pipeline {until} any more: use {instead}.",
        DeprecationWarning,
    )


# The oldest and the newest versions that the tests ran with; docs/versions.md has them, too. Others are
# tried, with a warning.
TESTED = {
    "flatbuffers": ("24.3", "25.12.19"),
    "jax": ("0.9.0", "0.10.2"),
    "orbax-checkpoint": ("0.12.8", "0.12.8"),
    "torch": ("2.13.0", "2.14.1"),
}


def is_tested(package: str, version: str) -> bool:
    """Whether a version is between the two that are tested, or only a patch of the newest one."""
    oldest, newest = map(_version_numbers, TESTED[package])
    return _version_numbers(version) >= oldest and _version_numbers(version)[:2] <= newest[:2]


def warn_of_untested(package: str, version: str) -> None:
    """Warns once if a version of a package is not tested."""
    if not is_tested(package, version):
        oldest, newest = TESTED[package]
        span = newest if oldest == newest else f"{oldest} to {newest}"
        warn_once(
            f"untested {package}",
            f"ipu_pipeline is tested with {package} {span}, and this is {version}. It goes on, but if "
            f"something fails or numbers look wrong, install '{package}=={newest}'.",
        )


def _version_numbers(version: str) -> list[int]:
    """The numbers that a version begins with."""
    match = re.match(r"[\d.]*\d", version)
    return [int(part) for part in match[0].split(".")] if match else []

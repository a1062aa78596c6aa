"""The versions of other packages that the tests ran with. Newer ones are tried, with a warning."""

from __future__ import annotations

import re

from ipu_pipeline.ground.warned import warn_once

__all__ = ["TESTED", "is_tested", "warn_of_untested"]

# The oldest and the newest. docs/versions.md has them, too.
TESTED = {
    "flatbuffers": ("24.3", "25.12.19"),
    "jax": ("0.9.0", "0.10.2"),
    "orbax-checkpoint": ("0.12.8", "0.12.8"),
    "torch": ("2.13.0", "2.14.1"),
}


def is_tested(package: str, version: str) -> bool:
    """Whether a version is between the two that are tested, or only a patch of the newest one."""
    oldest, newest = map(_numbers, TESTED[package])
    return _numbers(version) >= oldest and _numbers(version)[:2] <= newest[:2]


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


def _numbers(version: str) -> list[int]:
    """The numbers that a version begins with."""
    found = re.match(r"[\d.]*\d", version)
    return [int(part) for part in found[0].split(".")] if found else []

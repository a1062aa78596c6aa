"""Public names that are to go. Each still works, and warns once; docs/versions.md has the rule."""

from __future__ import annotations

from typing import NamedTuple

from ipu_pipeline.ground.warned import warn_once

__all__ = ["NAMES", "Deprecated", "warn_deprecated"]


class Deprecated(NamedTuple):
    """What takes a name's place, and the first version that is without it."""

    instead: str
    until: str


NAMES = {
    "engine.DispatchPlan": Deprecated("engine.Chunking", "0.2.0"),
    "engine.ScheduleLike": Deprecated("engine.Schedule", "0.2.0"),
}


def warn_deprecated(name: str) -> None:
    """Warns once, with a DeprecationWarning, that a name of `NAMES` is to go."""
    instead, until = NAMES[name]
    warn_once(
        f"deprecated: {name}",
        f"{name} is deprecated, and is not in ipu_pipeline {until} any more: use {instead}.",
        DeprecationWarning,
    )

"""Warnings of attributes of optimizers, and keys of their groups, that have no effect.

An unknown attribute that an optimizer has when a model is wrapped with it may be for the user's own use:
there is no warning. One that is added later may be meant to change something, and so may an attribute of
the optimizer that stands in a group.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import torch

from ipu_pipeline.poptorch import logs
from ipu_pipeline.poptorch.optim.base import Optimizer

__all__ = ["Extra", "find_extras", "tell_of_extras"]

Extra: TypeAlias = "tuple[int | None, str]"  # the number of a group and a key; None and an attribute

_ATTRIBUTES = {"defaults", "state", "param_groups", "variable_attrs", "device_state"}
_KEYS = {"params", "param_names"}


def find_extras(
    optimizer: torch.optim.Optimizer, optimizer_name: str, keys: Iterable[str]
) -> frozenset[Extra]:
    """Finds extras. Warns of those in a group that would have an effect as attributes."""
    own = set(optimizer.own_defaults) if isinstance(optimizer, Optimizer) else set()
    found: set[Extra] = {
        (None, name)
        for name, value in vars(optimizer).items()
        if not _is_known(name, value) and name not in own
    }
    for number, group in enumerate(optimizer.param_groups):
        unknown = set(group) - _KEYS - set(keys)
        found |= {(number, name) for name in unknown}
        misplaced: set[Extra] = {(number, name) for name in unknown & (own | {"velocity_scaling"})}
        tell_of_extras(misplaced, optimizer_name)
    return frozenset(found)


def _is_known(name: str, value: Any) -> bool:
    is_scheduled = name == "step" and callable(value)  # schedulers of the learning rate wrap the method
    return name.startswith("_") or name in _ATTRIBUTES or is_scheduled


def tell_of_extras(extras: Iterable[Extra], optimizer_name: str, relaxed: bool = False) -> None:
    """Warns of extras, once; if `relaxed`, only logs them for debugging."""
    names: dict[int | None, list[str]] = {}
    for number, name in sorted(extras, key=str):
        names.setdefault(number, []).append(name)
    for number, of_group in names.items():
        what = "optimizer attribute" if number is None else f"group {number} attribute"
        message = f"Ignoring unexpected {what} in {optimizer_name} optimizer: {of_group}"
        if relaxed:
            logs.logger.debug(message)
        else:
            logs.warn_once(message)

"""Whether an optimizer may take the place of another in a compiled model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ipu_pipeline.poptorch import logs
from ipu_pipeline.poptorch.errors import Error
from ipu_pipeline.poptorch.optim.extras import tell_of_extras
from ipu_pipeline.poptorch.optim.specs import LossScaling, OptimizerSpec, Structure

__all__ = ["check_compatible", "check_same_groups"]

# These follow from which attributes are constant and from their values.
_FROM_CONSTANTS = ("decays", "has_momentum")
_WORDS = {
    "kind": "its class",
    "corrects_bias": "bias_correction",
    "uses_tf_variant": "use_tf_variant",
    "first_order_type": "velocity_accum_type, first_order_momentum_accum_type or use_combined_accum",
    "second_order_type": "second_order_momentum_accum_type",
    "accum_type": "accum_type or use_combined_accum",
}
_GROUP_WORDS = {"decouples_decay": "decoupled_weight_decay"}


def check_compatible(old: OptimizerSpec, new: OptimizerSpec, relaxed: bool = False) -> OptimizerSpec:
    """Checks what `setOptimizer` gets.

    Returns:
      The spec that the model uses from then on: the old structure with the new values.
    """
    _check_structures(old.structure, new.structure)
    _check_constants(old, new)
    is_automatic = old.structure.loss_scaling is LossScaling.AUTOMATIC
    if is_automatic and old.loss_scaling != new.loss_scaling:
        logs.warn_once(
            f"The new loss_scaling, {new.loss_scaling}, is ignored: with automatic loss scaling "
            "(Options.Training.setAutomaticLossScaling) it only says where the factor starts."
        )
    tell_of_extras(new.extras - old.extras, new.name, relaxed)
    return old.with_values_of(new)


def check_same_groups(old: Mapping[str, int], new: Mapping[str, int]) -> None:
    """Checks that two optimizers have the same variables in the same groups, see `assign_groups`."""
    moved = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
    if moved:
        first = moved[0]
        raise Error(
            "setOptimizer: the model is already compiled, and its parameters must stay in their groups; "
            f"{first} was in {_describe_group(old, first)} and now is in {_describe_group(new, first)}"
            f"{f', and {len(moved) - 1} more have moved' if len(moved) > 1 else ''}. Call destroy() on the "
            "model and wrap it again."
        )


def _describe_group(groups: Mapping[str, int], name: str) -> str:
    return f"group {groups[name]}" if name in groups else "none"


def _check_structures(old: Structure, new: Structure) -> None:
    if len(old.groups) != len(new.groups):
        _refuse("the number of groups", len(old.groups), len(new.groups))
    for field in dataclasses.fields(Structure):
        before, after = getattr(old, field.name), getattr(new, field.name)
        if field.name in _WORDS and before != after:
            _refuse(_WORDS[field.name], getattr(before, "value", before), getattr(after, "value", after))
    for number, (group, other) in enumerate(zip(old.groups, new.groups, strict=True)):
        for name, before in vars(group).items():
            after = getattr(other, name)
            if name not in _FROM_CONSTANTS and before != after:
                _refuse(f"{_GROUP_WORDS.get(name, name)} of group {number}", before, after)
    if new.clips and not old.clips:
        _refuse("whether max_grad_norm is infinite", "infinite", "finite")


def _refuse(what: str, before: object, after: object) -> None:
    raise Error(
        f"setOptimizer: the model is already compiled, for an optimizer that differs in {what}: it was "
        f"{before} and now is {after}. Call destroy() on the model and wrap it again with the new one."
    )


def _check_constants(old: OptimizerSpec, new: OptimizerSpec) -> None:
    for number, name in sorted(old.constants, key=str):
        before = old.loss_scaling if number is None else old.values[number][name]
        after = new.loss_scaling if number is None else new.values[number].get(name, before)
        if before != after:
            where = "" if number is None else f" of group {number}"
            raise Error(
                f"setOptimizer: {name}{where} is constant since the model was compiled, and cannot change "
                f"from {before} to {after}. Before that, give {name} to an optimizer of poptorch.optim as "
                f'an argument, or call variable_attrs.markAsVariable("{name}") on it.'
            )

"""Descriptions of optimizers: what an update is compiled for, and the values that may change.

Optimizers of torch and PopTorch are read into them, and they say whether one may take the place of another
in a compiled model.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from ipu_pipeline.poptorch import logs
from ipu_pipeline.poptorch.errors import Error
from ipu_pipeline.poptorch.optim.optimizers import LAMB, SGD, Adam, AdamW, Optimizer, RMSprop

Value: TypeAlias = "float | tuple[float, ...]"
AttributeKey: TypeAlias = "tuple[int | None, str]"  # the number of a group and a key; None and an attribute


class Kind(enum.Enum):
    """The formula of an update. AdamW is Adam with decoupled weight decay."""

    SGD = "SGD"
    ADAM = "Adam"
    RMSPROP = "RMSprop"
    LAMB = "LAMB"
    ADAGRAD = "Adagrad"
    ADADELTA = "Adadelta"
    ADAMAX = "Adamax"
    NADAM = "NAdam"
    RADAM = "RAdam"
    ASGD = "ASGD"
    RPROP = "Rprop"
    ADAFACTOR = "Adafactor"
    MUON = "Muon"


class LossScaling(enum.Enum):
    """How the loss is scaled: not at all, by a factor that the user gives, or by one that adapts."""

    NONE = "none"
    MANUAL = "manual"
    AUTOMATIC = "automatic"


@dataclass(frozen=True)
class GroupStructure:
    """The properties that the update of a group's variables is compiled for.

    Attributes:
      nesterov: whether momentum is Nesterov's.
      maximize: whether the loss is maximized.
      centered: whether the squared mean of the gradients is subtracted from the mean of their squares.
      decouples_decay: whether weights decay apart from the gradients.
      decays: whether weights may decay.
      has_momentum: whether there may be momentum.
      num_iterations: the number of Muon's Newton-Schulz iterations.
      adjustment: how Muon's learning rate depends on a matrix's shape.
    """

    nesterov: bool
    maximize: bool
    centered: bool
    decouples_decay: bool
    decays: bool
    has_momentum: bool
    num_iterations: int = 0
    adjustment: str = ""


@dataclass(frozen=True)
class Structure:
    """The properties that an update is compiled for.

    Attributes:
      kind: the formula.
      groups: the structures of the groups of parameters.
      corrects_bias: whether averages are corrected for starting at 0.
      uses_tf_variant: whether RMSprop's formula is TensorFlow's.
      scales_velocity: whether momentum buffers are kept multiplied by a factor.
      clips: whether gradients are scaled down to a norm.
      loss_scaling: how the loss is scaled.
      accum_type: the dtype that gradients accumulate in: "float32", "float16", or None for the variable's.
      first_order_type: the same for averages of gradients and for momentum.
      second_order_type: the same for averages of squares.
    """

    kind: Kind
    groups: tuple[GroupStructure, ...]
    corrects_bias: bool
    uses_tf_variant: bool
    scales_velocity: bool
    clips: bool
    loss_scaling: LossScaling
    accum_type: str | None
    first_order_type: str | None
    second_order_type: str | None


@dataclass(frozen=True, eq=False)
class OptimizerSpec:
    """An optimizer as it was when it was described.

    Attributes:
      name: the name of its class in torch or PopTorch.
      structure: what an update is compiled for. Specs with equal structures share it.
      values: the values of each group's hyperparameters, by torch's names.
      loss_scaling: the factor; the initial one if it adapts.
      max_grad_norm: the limit of the gradients' norm; infinite without clipping.
      constants: which hyperparameters of which group are constant; group None for the two above.
      extras: the unused attributes and keys of groups: `(group, name)`, or `(None, name)` for an attribute.
    """

    name: str
    structure: Structure
    values: tuple[Mapping[str, Value], ...]
    loss_scaling: float
    max_grad_norm: float
    constants: frozenset[AttributeKey]
    extras: frozenset[AttributeKey]

    @property
    def accumulator_dtype(self) -> Callable[[Any], np.dtype[Any] | None]:
        """A function that finds the dtype in which a variable's gradients accumulate; None for its own."""
        accum_type = self.structure.accum_type

        def find(variable: Any) -> np.dtype[Any] | None:
            if accum_type == "float16":
                return np.dtype(np.float16)
            is_narrow = np.dtype(variable.dtype).itemsize < np.dtype(np.float32).itemsize
            return np.dtype(np.float32) if accum_type == "float32" and is_narrow else None

        return find

    @property
    def needs_running_mean(self) -> bool:
        """Whether a mean of gradients is kept, because float16 may not hold their sum."""
        return self.structure.accum_type == "float16"

    def with_values_of(self, other: OptimizerSpec) -> OptimizerSpec:
        """Returns this spec's structure with the values of another spec."""
        return dataclasses.replace(
            self, values=other.values, loss_scaling=other.loss_scaling, max_grad_norm=other.max_grad_norm
        )


# Unused attributes of optimizers and keys of their groups.
#
# An unknown attribute that an optimizer has when a model is wrapped with it may be for the user's own use:
# there is no warning. One that is added later may be meant to change something, and so may an attribute of
# the optimizer that stands in a group.

_ATTRIBUTES = {"defaults", "state", "param_groups", "variable_attrs", "device_state"}
_KEYS = {"params", "param_names"}


def find_extras(
    optimizer: torch.optim.Optimizer, optimizer_name: str, keys: Iterable[str]
) -> frozenset[AttributeKey]:
    """Finds extras. Warns of those in a group that would have an effect as attributes."""
    attributes = set(optimizer.own_defaults) if isinstance(optimizer, Optimizer) else set()
    extras: set[AttributeKey] = {
        (None, name)
        for name, value in vars(optimizer).items()
        if not _is_known(name, value) and name not in attributes
    }
    for number, group in enumerate(optimizer.param_groups):
        unknown = set(group) - _KEYS - set(keys)
        extras |= {(number, name) for name in unknown}
        misplaced: set[AttributeKey] = {
            (number, name) for name in unknown & (attributes | {"velocity_scaling"})
        }
        warn_of_extras(misplaced, optimizer_name)
    return frozenset(extras)


def _is_known(name: str, value: Any) -> bool:
    is_scheduled = name == "step" and callable(value)  # schedulers of the learning rate wrap the method
    return name.startswith("_") or name in _ATTRIBUTES or is_scheduled


def warn_of_extras(extras: Iterable[AttributeKey], optimizer_name: str, relaxed: bool = False) -> None:
    """Warns of extras, once; if `relaxed`, only logs them for debugging."""
    names: dict[int | None, list[str]] = {}
    for number, name in sorted(extras, key=str):
        names.setdefault(number, []).append(name)
    for number, of_group in names.items():
        kind = "optimizer attribute" if number is None else f"group {number} attribute"
        message = f"Ignoring unexpected {kind} in {optimizer_name} optimizer: {of_group}"
        if relaxed:
            logs.logger.debug(message)
        else:
            logs.warn_once(message)


# Reading an optimizer.

_TORCHS_ALONE: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.ASGD,
    torch.optim.Rprop,
    torch.optim.Adafactor,
    torch.optim.Muon,
)
# torch's class (for LAMB: ours), our class, and the formula. Subclasses come before their base classes.
_SUPPORTED: tuple[tuple[type[torch.optim.Optimizer], type[torch.optim.Optimizer], Kind], ...] = (
    (LAMB, LAMB, Kind.LAMB),
    (torch.optim.AdamW, AdamW, Kind.ADAM),
    (torch.optim.Adam, Adam, Kind.ADAM),
    (torch.optim.RMSprop, RMSprop, Kind.RMSPROP),
    (torch.optim.SGD, SGD, Kind.SGD),
    *((torchs_class, torchs_class, Kind(torchs_class.__name__)) for torchs_class in _TORCHS_ALONE),
)
# Keyed by the name of torch's class and of the argument. Kept here because reading signatures is slow.
_DEFAULTS = {
    torchs_class.__name__: {
        name: argument.default for name, argument in inspect.signature(torchs_class).parameters.items()
    }
    for torchs_class, _our_class, _kind in _SUPPORTED
}

_VALUES = {
    Kind.SGD: ("lr", "momentum", "dampening", "weight_decay"),
    Kind.ADAM: ("lr", "betas", "eps", "weight_decay"),
    Kind.RMSPROP: ("lr", "alpha", "eps", "weight_decay", "momentum"),
    Kind.LAMB: ("lr", "betas", "eps", "weight_decay", "max_weight_norm"),
    Kind.ADAGRAD: ("lr", "lr_decay", "eps", "weight_decay", "initial_accumulator_value"),
    Kind.ADADELTA: ("lr", "rho", "eps", "weight_decay"),
    Kind.ADAMAX: ("lr", "betas", "eps", "weight_decay"),
    Kind.NADAM: ("lr", "betas", "eps", "weight_decay", "momentum_decay"),
    Kind.RADAM: ("lr", "betas", "eps", "weight_decay"),
    Kind.ASGD: ("lr", "lambd", "alpha", "t0", "weight_decay"),
    Kind.RPROP: ("lr", "etas", "step_sizes"),
    Kind.ADAFACTOR: ("lr", "beta2_decay", "eps", "d", "weight_decay"),
    Kind.MUON: ("lr", "momentum", "eps", "ns_coefficients", "weight_decay"),
}
_DECOUPLED = (Kind.ADAFACTOR, Kind.MUON)  # weights always decay apart from the gradients
_FLAGS = ("nesterov", "maximize", "centered", "decoupled_weight_decay", "amsgrad", "differentiable")
_COMPILED = ("ns_steps", "adjust_lr_fn")  # Muon's
# These say how torch computes, and change nothing here.
_IMPLEMENTATIONS = ("foreach", "fused", "capturable")


def describe(optimizer: torch.optim.Optimizer, automatic_loss_scaling: bool = False) -> OptimizerSpec:
    """Reads an optimizer."""
    torchs_class, kind = _find_class(optimizer)
    if any(getattr(optimizer, f"_optimizer_step_{when}_hooks", None) for when in ("pre", "post")):
        logs.warn_once(
            "The optimizer has hooks of step(), which are never called: weights are updated on the devices."
        )
    groups = optimizer.param_groups
    names = _VALUES[kind]
    combines = bool(getattr(optimizer, "use_combined_accum", False))
    if combines:
        names = (*names, "velocity_scaling")
    for number, group in enumerate(groups):
        _check_group(group, number)
    values = tuple(_read_values(group, names, number) for number, group in enumerate(groups))
    scale = _positive("loss_scaling", getattr(optimizer, "loss_scaling", 1.0))
    max_norm = _positive("max_grad_norm", getattr(optimizer, "max_grad_norm", math.inf), math.inf)
    constants = _find_constants(optimizer, torchs_class, values, scale)
    scaling = LossScaling.NONE
    if automatic_loss_scaling:
        scaling = LossScaling.AUTOMATIC
        constants -= {(None, "loss_scaling")}
    elif scale != 1 or (None, "loss_scaling") not in constants:
        scaling = LossScaling.MANUAL
    scales_velocity = combines and any(
        group["velocity_scaling"] != 1 or (number, "velocity_scaling") not in constants
        for number, group in enumerate(values)
    )
    first = "velocity_accum_type" if kind is Kind.SGD else "first_order_momentum_accum_type"
    structure = Structure(
        kind=kind,
        groups=tuple(
            _read_structure(kind, group, values[number], number, constants)
            for number, group in enumerate(groups)
        ),
        corrects_bias=bool(getattr(optimizer, "bias_correction", True)),
        uses_tf_variant=bool(getattr(optimizer, "use_tf_variant", False)),
        scales_velocity=scales_velocity,
        clips=math.isfinite(max_norm),
        loss_scaling=scaling,
        accum_type=None if combines else _read_type(optimizer, "accum_type"),
        first_order_type=None if combines else _read_type(optimizer, first),
        second_order_type=_read_type(optimizer, "second_order_momentum_accum_type"),
    )
    extras = find_extras(optimizer, torchs_class.__name__, {*names, *_FLAGS, *_COMPILED, *_IMPLEMENTATIONS})
    return OptimizerSpec(torchs_class.__name__, structure, values, scale, max_norm, constants, extras)


def assign_groups(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]
) -> dict[str, int]:
    """Returns the group of each variable that the optimizer trains.

    Returns:
      The number of the group by name, without parameters that are in no group or need no gradient.
    """
    numbers = {
        id(parameter): number
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }
    return {
        name: numbers[id(parameter)]
        for name, parameter in parameters.items()
        if parameter.requires_grad and id(parameter) in numbers
    }


def _find_class(optimizer: Any) -> tuple[type[torch.optim.Optimizer], Kind]:
    for torchs_class, our_class, kind in _SUPPORTED:
        if isinstance(optimizer, torchs_class):
            if type(optimizer) not in (torchs_class, our_class):
                logs.warn_once(
                    f"{type(optimizer).__name__} is a subclass of {torchs_class.__name__}. PopTorch "
                    "does not run Python optimizer code directly: what runs is "
                    f"{torchs_class.__name__} with its attributes, and none of its methods."
                )
            return torchs_class, kind
    names = ", ".join(torchs_class.__name__ for torchs_class, _our_class, _kind in reversed(_SUPPORTED))
    raise TypeError(
        f"Unsupported optimizer type {type(optimizer).__module__}.{type(optimizer).__qualname__}. Types "
        f"supported: {names} of torch.optim, and those of poptorch.optim."
    )


def _check_group(group: Mapping[str, Any], number: int) -> None:
    if group.get("amsgrad"):
        raise ValueError(
            f"Only non-amsgrad Adam/AdamW optimizers are supported. Group {number} has amsgrad=True."
        )
    if group.get("differentiable"):
        raise ValueError(
            f"Group {number} of the optimizer has differentiable=True, but an update on the devices is not "
            "part of torch's graph: nothing can be differentiated through it. Leave it out."
        )
    for name in _IMPLEMENTATIONS:
        if group.get(name):
            logs.warn_once(f"{name}=True has no effect: it says how torch computes; updates run on JAX.")


def _number(name: str, value: Any) -> float:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"The optimizer's {name} must be a number; got {value!r}.")
    return float(value)


def _positive(name: str, value: Any, limit: float = float(np.finfo(np.float32).max)) -> float:
    number = _number(name, value)
    if not 0 < number <= limit:
        finite = " and finite in float32" if math.isfinite(limit) else ""
        raise ValueError(f"The optimizer's {name} must be above 0{finite}; got {number}.")
    return number


def _read_values(group: Mapping[str, Any], names: Iterable[str], number: int) -> dict[str, Value]:
    values: dict[str, Value] = {}
    for name in names:
        where = f"{name} of group {number}"
        if isinstance(group[name], (tuple, list)):
            # Adafactor's epsilon may be None, for the weights' dtype's epsilon. -1 stands for it here.
            values[name] = tuple(-1.0 if part is None else _number(where, part) for part in group[name])
        else:
            convert = _positive if name == "velocity_scaling" else _number
            values[name] = convert(where, group[name])
    return values


def _read_structure(
    kind: Kind,
    group: Mapping[str, Any],
    values: Mapping[str, Value],
    number: int,
    constants: frozenset[AttributeKey],
) -> GroupStructure:
    def may_act(name: str) -> bool:
        return name in values and (values[name] != 0 or (number, name) not in constants)

    return GroupStructure(
        nesterov=bool(group.get("nesterov")),
        maximize=bool(group.get("maximize")),
        centered=bool(group.get("centered")),
        decouples_decay=bool(group.get("decoupled_weight_decay")) or kind in _DECOUPLED,
        decays=may_act("weight_decay"),
        has_momentum=may_act("momentum"),
        num_iterations=int(group.get("ns_steps", 0)),
        adjustment=str(group.get("adjust_lr_fn") or "original"),
    )


def _read_type(optimizer: torch.optim.Optimizer, name: str) -> str:
    value = getattr(optimizer, name, torch.float32)
    if value not in (torch.float32, torch.float16):
        raise ValueError(f"{name} must be set to either torch.float16 or torch.float32 not {value}")
    return str(value).removeprefix("torch.")


def _find_constants(
    optimizer: torch.optim.Optimizer,
    torchs_class: type[torch.optim.Optimizer],
    values: tuple[Mapping[str, Value], ...],
    scale: float,
) -> frozenset[AttributeKey]:
    """Finds what is marked as constant; in torch's own optimizers, every default value but the rate."""
    defaults = _DEFAULTS[torchs_class.__name__] | {"loss_scaling": 1.0}

    def is_constant(name: str, value: Value) -> bool:
        if isinstance(optimizer, Optimizer):
            return optimizer.variable_attrs.isConstant(name)
        return name != "lr" and bool(value == defaults[name])

    items: list[tuple[int | None, str, Value]] = [(None, "loss_scaling", scale)]
    items += [(number, *item) for number, group in enumerate(values) for item in group.items()]
    return frozenset((number, name) for number, name, value in items if is_constant(name, value))


# Replacing an optimizer in a compiled model.

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
    warn_of_extras(new.extras - old.extras, new.name, relaxed)
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


def _refuse(subject: str, before: object, after: object) -> None:
    raise Error(
        f"setOptimizer: the model is already compiled, for an optimizer that differs in {subject}: it was "
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

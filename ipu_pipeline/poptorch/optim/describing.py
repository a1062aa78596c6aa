"""Optimizers of torch and PopTorch, read."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from ipu_pipeline.poptorch import logs
from ipu_pipeline.poptorch.optim.adam import Adam, AdamW
from ipu_pipeline.poptorch.optim.base import Optimizer
from ipu_pipeline.poptorch.optim.extras import find_extras
from ipu_pipeline.poptorch.optim.lamb import LAMB
from ipu_pipeline.poptorch.optim.rmsprop import RMSprop
from ipu_pipeline.poptorch.optim.sgd import SGD
from ipu_pipeline.poptorch.optim.specs import (
    GroupStructure,
    Kind,
    LossScaling,
    OptimizerSpec,
    Structure,
    Value,
)

__all__ = ["assign_groups", "describe"]

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
    *((own, own, Kind(own.__name__)) for own in _TORCHS_ALONE),
)
# Keyed by the name of torch's class and of the argument. Kept here because reading signatures is slow.
_DEFAULTS = {
    torchs_class.__name__: {
        name: argument.default for name, argument in inspect.signature(torchs_class).parameters.items()
    }
    for torchs_class, _ours, _kind in _SUPPORTED
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
    names = ", ".join(torchs_class.__name__ for torchs_class, _ours, _kind in reversed(_SUPPORTED))
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
    found: dict[str, Value] = {}
    for name in names:
        where = f"{name} of group {number}"
        if isinstance(group[name], (tuple, list)):
            # Adafactor's epsilon may be None, for the weights' dtype's epsilon. -1 stands for it here.
            found[name] = tuple(-1.0 if part is None else _number(where, part) for part in group[name])
        else:
            read = _positive if name == "velocity_scaling" else _number
            found[name] = read(where, group[name])
    return found


def _read_structure(
    kind: Kind,
    group: Mapping[str, Any],
    values: Mapping[str, Value],
    number: int,
    constants: frozenset[tuple[int | None, str]],
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
) -> frozenset[tuple[int | None, str]]:
    """Finds what is marked as constant; in torch's own optimizers, every default value but the rate."""
    found: set[tuple[int | None, str]] = set()
    if isinstance(optimizer, Optimizer):
        is_constant = optimizer.variable_attrs.isConstant
        found |= {(number, name) for number, of in enumerate(values) for name in of if is_constant(name)}
        return frozenset(found | ({(None, "loss_scaling")} if is_constant("loss_scaling") else set()))
    defaults = _DEFAULTS[torchs_class.__name__]
    for number, group in enumerate(values):
        for name, value in group.items():
            if name != "lr" and value == defaults[name]:
                found.add((number, name))
    return frozenset(found | ({(None, "loss_scaling")} if scale == 1 else set()))

"""Turns optimizers of torch and PopTorch, with their states, into JSON and tensors and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ipu_pipeline.poptorch import optim
from ipu_pipeline.poptorch.files.values import decode, encode
from ipu_pipeline.poptorch.optim.attributes import VariableAttributes
from ipu_pipeline.poptorch.optim.device_state import SavedState
from ipu_pipeline.poptorch.optim.specs import Kind

__all__ = ["decode_optimizer", "encode_optimizer"]

_CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    **{
        f"poptorch.optim.{name}": getattr(optim, name)
        for name in ("SGD", "Adam", "AdamW", "RMSprop", "LAMB")
    },
    **{
        f"torch.optim.{name}": getattr(torch.optim, name)
        for name in ("AdamW", *(kind.value for kind in Kind if kind is not Kind.LAMB))
    },
}


def encode_optimizer(
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    keep: Callable[[torch.Tensor], int],
) -> Any:
    """Encodes an optimizer as JSON."""
    kind = next(name for base in type(optimizer).__mro__ for name, one in _CLASSES.items() if one is base)
    groups = [
        {
            "params": [names[id(p)] for p in group["params"] if id(p) in names],
            "values": encode(
                {key: _as_number(value) for key, value in group.items() if key != "params"},
                f"Group {number} of the optimizer",
                keep,
            ),
        }
        for number, group in enumerate(optimizer.param_groups)
    ]
    own: dict[str, Any] = {}
    if isinstance(optimizer, optim.Optimizer):
        kept = {name: getattr(optimizer, name) for name in optimizer.own_defaults}
        own = {
            "values": encode(kept, "An attribute of the optimizer", keep),
            "variable": optimizer.variable_attrs.variable,
        }
        known = optimizer.device_state.read([p for p in optimizer.all_parameters if id(p) in names])
        saved = {
            "ipu_state": None if known is None else dict(known.ipu_state),
            "ipu_param": None if known is None else dict(known.ipu_param),
        }
    else:
        optimizer.state_dict()  # brings the state from the devices
        saved = {names[id(p)]: dict(slots) for p, slots in optimizer.state.items() if id(p) in names}
    return {
        "class": kind,
        "groups": groups,
        "defaults": encode(
            {key: _as_number(value) for key, value in optimizer.defaults.items()},
            "A default of the optimizer",
            keep,
        ),
        "own": own,
        "state": encode(saved, "The state of the optimizer", keep),
    }


def decode_optimizer(
    data: Any, parameters: Mapping[str, torch.nn.Parameter], find: Callable[[Any], torch.Tensor]
) -> torch.optim.Optimizer:
    """Decodes the optimizer that `encode_optimizer` encoded."""
    kind: Any = _CLASSES[data["class"]]
    made: torch.optim.Optimizer = kind(
        [{"params": [parameters[name] for name in group["params"]]} for group in data["groups"]]
    )
    for group, saved in zip(made.param_groups, data["groups"], strict=True):
        values = decode(saved["values"], find)
        if "params" in values or group.keys() - {"params"} - values.keys():
            raise ValueError(f"a group of the optimizer has the values {sorted(values)}")
        group.update(values)
    made.defaults = decode(data["defaults"], find)
    state = decode(data["state"], find)
    if isinstance(made, optim.Optimizer):
        own = decode(data["own"]["values"], find)
        for name in made.own_defaults:
            setattr(made, name, own[name])
        attributes = (*made.defaults, "loss_scaling")
        made.variable_attrs = VariableAttributes(map(str, data["own"]["variable"]), attributes)
        if state["ipu_state"] is not None:
            made.device_state.load(SavedState(state["ipu_state"], state["ipu_param"]))
    else:
        for name, slots in state.items():
            made.state[parameters[name]] = slots
    return made


def _as_number(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    return value

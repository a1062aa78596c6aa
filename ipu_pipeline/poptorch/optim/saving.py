"""The state of the transformation as tensors under torch's names, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import torch

from ipu_pipeline.engine.fronts import LossScaleState
from ipu_pipeline.poptorch import logs
from ipu_pipeline.poptorch.dtypes import to_numpy, to_torch
from ipu_pipeline.poptorch.optim.device_state import SavedState, key_of, shorten, split_key
from ipu_pipeline.poptorch.optim.formulas import STEP
from ipu_pipeline.poptorch.optim.hyperparameters import STORED_SCALING, Hyperparameters
from ipu_pipeline.poptorch.optim.specs import Kind, OptimizerSpec
from ipu_pipeline.poptorch.optim.transformations import inner_state, replace_inner_state

__all__ = ["export_state", "import_state", "read_torch_state", "write_torch_state"]

_BUFFER = "momentum_buffer"
_SCALE, _GOOD = "loss_scale", "loss_scale_good_updates"  # of automatic loss scaling


def export_state(state: Any, spec: OptimizerSpec, group_of: Mapping[str, int]) -> SavedState:
    """Returns the state for an optimizer's `state_dict`."""
    packing = Hyperparameters(spec)
    host: Any = jax.device_get(state)
    inner = inner_state(host)
    found: dict[str, torch.Tensor] = {}
    for slot, of_slot in inner.slots.items():
        for name, value in of_slot.items():
            if slot == _BUFFER and spec.structure.kind is Kind.SGD:
                if not inner.slots[STEP][name]:
                    continue  # torch makes the buffer in the first update with momentum
                if packing.keeps_scaling:
                    scaling = inner.numbers[group_of[name], packing.index(STORED_SCALING)]
                    value = value.astype(np.float32) / np.float32(scaling)
            found[key_of(slot, name)] = to_torch(value)
    if isinstance(host, LossScaleState):
        found |= {_SCALE: to_torch(host.scale), _GOOD: to_torch(host.num_good)}
    return SavedState(found, _export_values(spec))


def _export_values(spec: OptimizerSpec) -> dict[str, torch.Tensor]:
    found = {"loss_scaling": torch.tensor(spec.loss_scaling)}
    if spec.structure.clips:
        found["max_grad_norm"] = torch.tensor(spec.max_grad_norm)
    for number, values in enumerate(spec.values):
        found |= {key_of(name, str(number)): torch.tensor(value) for name, value in values.items()}
    return found


def import_state(state: Any, saved: SavedState, spec: OptimizerSpec, group_of: Mapping[str, int]) -> Any:
    """Returns a state with what was exported put in.

    Returns:
      The state, with some leaves replaced by arrays on the host. What was not saved stays as in `state`.
      There is a warning if only a part of a variable's state was saved.
    """
    inner = inner_state(state)
    places = {key_of(slot, name): (slot, name) for slot, of_slot in inner.slots.items() for name in of_slot}
    saved_state = dict(saved.ipu_state)
    scale, good = saved_state.pop(_SCALE, None), saved_state.pop(_GOOD, None)
    if spec.structure.kind is Kind.SGD:  # a buffer says that there was an update
        made = [name for name in group_of if key_of(_BUFFER, name) in saved_state]
        saved_state = {key_of(STEP, name): torch.tensor(1.0) for name in made} | saved_state
    _check_names(places, saved_state)
    packing = Hyperparameters(spec)
    slots = {slot: dict(of_slot) for slot, of_slot in inner.slots.items()}
    for key, tensor in saved_state.items():
        if key not in places:
            continue
        slot, name = places[key]
        known = slots[slot][name]
        value = to_numpy(tensor, key)
        if value.shape != known.shape:
            raise ValueError(
                f"The optimizer's state {key} must have the shape {list(known.shape)} of its variable; it "
                f"has {list(value.shape)}."
            )
        if packing.keeps_scaling and slot == _BUFFER:
            scaling = inner.numbers[group_of[name], packing.index(STORED_SCALING)]
            value = value.astype(np.float32) * np.float32(scaling)
        slots[slot][name] = value.astype(known.dtype)
    state = replace_inner_state(state, inner._replace(slots=slots))
    if isinstance(state, LossScaleState) and scale is not None and good is not None:
        state = state._replace(scale=np.float32(scale.item()), num_good=np.int32(good.item()))
    return state


def read_torch_state(
    optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor]
) -> SavedState | None:
    """Reads the state of one of torch's optimizers, for `import_state`; None if it has none."""
    found = {
        key_of(slot, name): torch.as_tensor(value, dtype=torch.float32) if slot == STEP else value.detach()
        for name, tensor in tensors.items()
        if tensor in optimizer.state
        for slot, value in optimizer.state[tensor].items()
        if value is not None
    }
    return SavedState(found, {}) if found else None


def write_torch_state(
    optimizer: torch.optim.Optimizer,
    saved: SavedState,
    tensors: Mapping[str, torch.Tensor],
) -> None:
    """Gives one of torch's optimizers the state that a model had for it."""
    is_counted = not isinstance(optimizer, torch.optim.SGD)
    for key, value in saved.ipu_state.items():
        slot, name = split_key(key)
        if name in tensors and (is_counted or slot != STEP):
            optimizer.state[tensors[name]][slot] = value


def _check_names(places: Mapping[str, tuple[str, str]], saved: Mapping[str, torch.Tensor]) -> None:
    """Checks that saved names and places agree; an error if none match, else a warning."""
    slots = {key for key, (slot, _name) in places.items() if slot != STEP}
    known = {key for key in saved if not key.startswith(key_of(STEP, ""))}
    begun = {places[key][1] for key in known & slots}  # the others start from nothing, as in torch
    unknown = sorted(known - slots)
    missing = sorted(key for key in slots - known if places[key][1] in begun)
    if known and slots and not known & slots:
        raise RuntimeError(
            "The optimizer's state is of another optimizer or of another model: it has "
            f"{shorten(unknown)}, and what is needed is {shorten(sorted(slots))}."
        )
    if unknown:
        logs.warn_once(f"The optimizer's state has what is not needed, and is ignored: {shorten(unknown)}.")
    if missing:
        logs.warn_once(f"The optimizer's state lacks what starts from nothing: {shorten(missing)}.")

"""Transformations of Optax for described optimizers, and their state as tensors under torch's names.

Each is one transformation over all trained variables. Its hyperparameters are a leaf of its state, so new
values compile nothing. With loss scaling, the gradients it gets are too large by the scale, which is the
state's first leaf, as the engine requires.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch

from ipu_pipeline.engine.fronts import LossScaled, LossScaleState, count_dtype, scale_loss
from ipu_pipeline.poptorch import logs
from ipu_pipeline.poptorch.dtypes import to_numpy, to_torch
from ipu_pipeline.poptorch.optim.device_state import SavedState, key_of, shorten, split_key
from ipu_pipeline.poptorch.optim.formulas import (
    FORMULAS,
    STEP,
    STORED_SCALING,
    Case,
    Hyperparameters,
)
from ipu_pipeline.poptorch.optim.specs import Kind, LossScaling, OptimizerSpec

_CLIPPING_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_ has it
_GROWTH_FACTOR = 2.0
# Scaling starts at the user's factor, by default 1, so it must grow faster than if it started high.
_GROWTH_INTERVAL = 100


class OptimizerState(NamedTuple):
    """The state of the optimizer.

    Attributes:
      numbers: the hyperparameters, see `Hyperparameters`.
      slots: what is kept for variables: torch's name of the slot -> name of the variable -> array.
    """

    numbers: Any
    slots: dict[str, dict[str, Any]]


class ManualScaleState(NamedTuple):
    """The state with a scale that the user gives: a float32 scalar, and the optimizer's state."""

    scale: Any
    inner: OptimizerState


def make_transformation(
    spec: OptimizerSpec,
    group_of: Mapping[str, int],
    *,
    growth_interval: int = _GROWTH_INTERVAL,
    num_summed: int = 1,
    with_rows: Collection[str] = (),
) -> optax.GradientTransformation:
    """Makes the transformation.

    Returns:
      A transformation of flat dicts, name of the variable -> array. It computes in at least 32 bits. What
      it keeps has the dtypes of the spec. Its `init` raises a ValueError for a variable in no group.
    """
    if with_rows and spec.structure.kind in (Kind.ADAFACTOR, Kind.MUON):
        names = ", ".join(sorted(with_rows))
        raise ValueError(
            f"{spec.name} needs whole weights, and cannot train {names}: groups of replicas have their own "
            "values of these. Take another optimizer, or leave replicaGrouping out."
        )
    inner = _make_inner(spec, dict(group_of), num_summed, frozenset(with_rows))
    scaling = spec.structure.loss_scaling
    if scaling is LossScaling.NONE:
        return inner
    if scaling is LossScaling.MANUAL:

        def init(params: Any) -> ManualScaleState:
            return ManualScaleState(jnp.float32(spec.loss_scaling), inner.init(params))

        def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
            changes, after = inner.update(gradients, state.inner, params)
            return changes, ManualScaleState(state.scale, after)

        scaled = LossScaled(init, _with_extra(update))
    else:
        dynamic = scale_loss(inner, spec.loss_scaling, True, growth_interval, _GROWTH_FACTOR)

        def init_dynamic(params: Any) -> LossScaleState:
            return LossScaleState(jnp.float32(spec.loss_scaling), jnp.int32(0), inner.init(params))

        # Its own init would widen the variables, whose dtypes may decide the dtypes of the slots.
        scaled = LossScaled(init_dynamic, dynamic.update)
    scaled.initial_scale = spec.loss_scaling
    return scaled


def _with_extra(update: Any) -> Any:
    def with_extra(gradients: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        del extra
        return update(gradients, state, params)

    return with_extra


def _make_inner(
    spec: OptimizerSpec, group_of: Mapping[str, int], num_summed: int, with_rows: frozenset[str]
) -> optax.GradientTransformation:
    structure = spec.structure
    formula = FORMULAS[structure.kind]
    packing = Hyperparameters(spec)
    is_scaled = structure.loss_scaling is LossScaling.MANUAL

    def init(params: Mapping[str, Any]) -> OptimizerState:
        slots: dict[str, dict[str, Any]] = {}
        for name, parameter in params.items():
            if name not in group_of:
                raise ValueError(
                    f"Variable {name} is in no group of the optimizer, and cannot be trained. Leave it out "
                    f"of what is trained; in groups are {sorted(group_of)}."
                )
            number = group_of[name]
            for slot in formula.slots(structure, structure.groups[number], parameter.shape):
                slot_type = (
                    structure.second_order_type if slot.is_second_order else structure.first_order_type
                )
                is_scalar = slot.shape == ()
                dtype = np.dtype(np.float32) if is_scalar else _slot_dtype(slot_type, parameter.dtype)
                shape = parameter.shape if slot.shape is None else slot.shape
                initial: Any = slot.initial
                if isinstance(initial, str):
                    initial = spec.values[number][initial]
                start = jnp.full(shape, initial, dtype)
                slots.setdefault(slot.name, {})[name] = start
        return OptimizerState(jnp.asarray(packing.pack(spec)), slots)

    def update(
        gradients: Mapping[str, Any], state: OptimizerState, params: Mapping[str, Any] | None = None
    ) -> tuple[dict[str, Any], OptimizerState]:
        if params is None:
            raise ValueError("update: params must be given, as the formulas read the variables; got None.")
        # The gradients, in at least 32 bits.
        numbers = state.numbers
        wide = {
            name: np.promote_types(count_dtype(gradient.dtype), count_dtype(params[name].dtype))
            for name, gradient in gradients.items()
        }
        gradients = {name: gradient.astype(wide[name]) for name, gradient in gradients.items()}
        if is_scaled:
            scale = numbers[0, packing.index("loss_scaling")]
            gradients = {name: gradient / scale.astype(wide[name]) for name, gradient in gradients.items()}
        if num_summed > 1:  # a sum over replicas, as their mean times their number, in 32 bits
            gradients = {name: g * jnp.asarray(num_summed, g.dtype) for name, g in gradients.items()}
        if structure.clips:
            gradients = _clip(gradients, numbers[0, packing.index("max_grad_norm")])
        # The formula, variable by variable.
        changes: dict[str, Any] = {}
        slots: dict[str, dict[str, Any]] = {slot: {} for slot in state.slots}
        rows = _split(numbers, packing, {(group_of[name], wide[name]) for name in gradients})
        for name, gradient in gradients.items():
            number, dtype = group_of[name], wide[name]
            old_slots = {slot: of_slot[name] for slot, of_slot in state.slots.items() if name in of_slot}
            row = rows[number, dtype]
            counted = {}
            if STEP in old_slots:
                counted[STEP] = _count(old_slots[STEP], row, structure.kind)
            case = Case(
                gradient,
                params[name].astype(dtype),
                {slot: value.astype(dtype) for slot, value in old_slots.items()},
                {**row, **{column: value.astype(dtype) for column, value in counted.items()}},
                structure.groups[number],
                structure,
                name in with_rows,
            )
            changes[name], new_slots = formula.update(case)
            for slot, value in (counted | new_slots).items():
                slots[slot][name] = value.astype(old_slots[slot].dtype)
        return changes, OptimizerState(_store(numbers, packing), slots)

    return optax.GradientTransformationExtraArgs(init, _with_extra(update))


def _slot_dtype(slot_type: str | None, dtype: Any) -> Any:
    """Returns a slot's dtype: "float32" means at least float32, None the variable's own dtype."""
    if slot_type == "float16":
        return np.dtype(np.float16)
    return dtype if slot_type is None else count_dtype(dtype)


def _count(step: jax.Array, numbers: Mapping[str, jax.Array], kind: Kind) -> jax.Array:
    """Returns the number of a variable's updates with this one."""
    increment = jnp.ones_like(step)
    if kind is Kind.SGD:  # torch makes a buffer when momentum is first used
        increment = jnp.where(numbers["momentum"] != 0, increment, jnp.zeros_like(increment))
    return step + increment


def _store(numbers: jax.Array, packing: Hyperparameters) -> jax.Array:
    """Returns the numbers with the factor that momentum buffers are multiplied by now."""
    if not packing.keeps_scaling:
        return numbers
    return numbers.at[:, packing.index(STORED_SCALING)].set(numbers[:, packing.index("velocity_scaling")])


def _split(
    numbers: jax.Array, packing: Hyperparameters, keys: set[tuple[int, Any]]
) -> dict[tuple[int, Any], dict[str, jax.Array]]:
    """Returns the numbers of each wanted group and dtype, by column."""
    return {
        (number, dtype): {
            column: numbers[number, place].astype(dtype) for place, column in enumerate(packing.columns)
        }
        for number, dtype in keys
    }


def _clip(gradients: Mapping[str, jax.Array], max_norm: jax.Array) -> dict[str, jax.Array]:
    """Scales gradients down to a norm over all of them, as torch.nn.utils.clip_grad_norm_ does."""
    dtype = np.result_type(*(gradient.dtype for gradient in gradients.values()))
    total = jnp.zeros((), dtype)
    for gradient in gradients.values():
        total = total + jnp.sum(gradient * gradient).astype(dtype)
    one = jnp.ones((), dtype)
    factor = max_norm.astype(dtype) / (jnp.sqrt(total) + jnp.asarray(_CLIPPING_EPSILON, dtype))
    factor = jnp.minimum(factor, one)
    return {name: gradient * factor.astype(gradient.dtype) for name, gradient in gradients.items()}


def inner_state(state: Any) -> OptimizerState:
    """Returns the formulas' state inside a state."""
    inner: OptimizerState = state if isinstance(state, OptimizerState) else state.inner
    return inner


def replace_inner_state(state: Any, inner: OptimizerState) -> Any:
    """Returns the state with another formulas' state inside."""
    return inner if isinstance(state, OptimizerState) else state._replace(inner=inner)


def with_hyperparameters(state: Any, spec: OptimizerSpec) -> Any:
    """Returns the state with the hyperparameters of a spec.

    Returns:
      The state, with some leaves replaced by arrays on the host. With automatic scaling the scale stays.
    """
    inner = inner_state(state)
    numbers = Hyperparameters(spec).pack(spec, inner.numbers)
    state = replace_inner_state(state, inner._replace(numbers=numbers))
    if isinstance(state, ManualScaleState):
        state = state._replace(scale=np.float32(spec.loss_scaling))
    return state


# The state as tensors under torch's names.

_BUFFER = "momentum_buffer"
_SCALE, _GOOD = "loss_scale", "loss_scale_good_updates"  # of automatic loss scaling


def export_state(state: Any, spec: OptimizerSpec, group_of: Mapping[str, int]) -> SavedState:
    """Returns the state for an optimizer's `state_dict`."""
    packing = Hyperparameters(spec)
    host: Any = jax.device_get(state)
    inner = inner_state(host)
    tensors: dict[str, torch.Tensor] = {}
    for slot, of_slot in inner.slots.items():
        for name, value in of_slot.items():
            if slot == _BUFFER and spec.structure.kind is Kind.SGD:
                if not inner.slots[STEP][name]:
                    continue  # torch makes the buffer in the first update with momentum
                if packing.keeps_scaling:
                    scaling = inner.numbers[group_of[name], packing.index(STORED_SCALING)]
                    value = value.astype(np.float32) / np.float32(scaling)
            tensors[key_of(slot, name)] = to_torch(value)
    if isinstance(host, LossScaleState):
        tensors |= {_SCALE: to_torch(host.scale), _GOOD: to_torch(host.num_good)}
    return SavedState(tensors, _export_values(spec))


def _export_values(spec: OptimizerSpec) -> dict[str, torch.Tensor]:
    tensors = {"loss_scaling": torch.tensor(spec.loss_scaling)}
    if spec.structure.clips:
        tensors["max_grad_norm"] = torch.tensor(spec.max_grad_norm)
    for number, values in enumerate(spec.values):
        tensors |= {key_of(name, str(number)): torch.tensor(value) for name, value in values.items()}
    return tensors


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
        counted_names = [name for name in group_of if key_of(_BUFFER, name) in saved_state]
        saved_state = {key_of(STEP, name): torch.tensor(1.0) for name in counted_names} | saved_state
    _check_names(places, saved_state)
    packing = Hyperparameters(spec)
    slots = {slot: dict(of_slot) for slot, of_slot in inner.slots.items()}
    for key, tensor in saved_state.items():
        if key not in places:
            continue
        slot, name = places[key]
        array = slots[slot][name]
        value = to_numpy(tensor, key)
        if value.shape != array.shape:
            raise ValueError(
                f"The optimizer's state {key} must have the shape {list(array.shape)} of its variable; it "
                f"has {list(value.shape)}."
            )
        if packing.keeps_scaling and slot == _BUFFER:
            scaling = inner.numbers[group_of[name], packing.index(STORED_SCALING)]
            value = value.astype(np.float32) * np.float32(scaling)
        slots[slot][name] = value.astype(array.dtype)
    state = replace_inner_state(state, inner._replace(slots=slots))
    if isinstance(state, LossScaleState) and scale is not None and good is not None:
        state = state._replace(scale=np.float32(scale.item()), num_good=np.int32(good.item()))
    return state


def read_torch_state(
    optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor]
) -> SavedState | None:
    """Reads the state of one of torch's optimizers, for `import_state`; None if it has none."""
    state = {
        key_of(slot, name): torch.as_tensor(value, dtype=torch.float32) if slot == STEP else value.detach()
        for name, tensor in tensors.items()
        if tensor in optimizer.state
        for slot, value in optimizer.state[tensor].items()
        if value is not None
    }
    return SavedState(state, {}) if state else None


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
    saved_keys = {key for key in saved if not key.startswith(key_of(STEP, ""))}
    begun = {places[key][1] for key in saved_keys & slots}  # the others start from nothing, as in torch
    unknown = sorted(saved_keys - slots)
    missing = sorted(key for key in slots - saved_keys if places[key][1] in begun)
    if saved_keys and slots and not saved_keys & slots:
        raise RuntimeError(
            "The optimizer's state is of another optimizer or of another model: it has "
            f"{shorten(unknown)}, and what is needed is {shorten(sorted(slots))}."
        )
    if unknown:
        logs.warn_once(f"The optimizer's state has what is not needed, and is ignored: {shorten(unknown)}.")
    if missing:
        logs.warn_once(f"The optimizer's state lacks what starts from nothing: {shorten(missing)}.")

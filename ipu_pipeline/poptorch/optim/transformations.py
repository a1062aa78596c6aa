"""A described optimizer as one Optax transformation over all trained variables.

Its hyperparameters are a leaf of its state, so new values compile nothing. With loss scaling, the gradients
it gets are too large by the scale, which is the state's first leaf, as the engine requires.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ipu_pipeline.engine.fronts import LossScaled, LossScaleState, count_dtype, scale_loss
from ipu_pipeline.poptorch.optim.formulas import FORMULAS, STEP, Case
from ipu_pipeline.poptorch.optim.hyperparameters import STORED_SCALING, Hyperparameters
from ipu_pipeline.poptorch.optim.specs import Kind, LossScaling, OptimizerSpec
from ipu_pipeline.poptorch.optim.torch_formulas import TORCH_FORMULAS

__all__ = [
    "ManualScaleState",
    "OptimizerState",
    "inner_state",
    "make_transformation",
    "replace_inner_state",
    "with_hyperparameters",
]

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
    formula = {**FORMULAS, **TORCH_FORMULAS}[structure.kind]
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
                wanted = structure.second_order_type if slot.is_second_order else structure.first_order_type
                is_scalar = slot.shape == ()
                dtype = np.dtype(np.float32) if is_scalar else _slot_dtype(wanted, parameter.dtype)
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
        numbers = state.numbers
        wide = {
            name: np.promote_types(count_dtype(gradient.dtype), count_dtype(params[name].dtype))
            for name, gradient in gradients.items()
        }
        gradients = {name: gradient.astype(wide[name]) for name, gradient in gradients.items()}
        if is_scaled:
            scale = numbers[0, packing.index("loss_scaling")]
            gradients = {name: gradient / scale.astype(wide[name]) for name, gradient in gradients.items()}
        if num_summed > 1:
            gradients = {name: g * jnp.asarray(num_summed, g.dtype) for name, g in gradients.items()}
        if structure.clips:
            gradients = _clip(gradients, numbers[0, packing.index("max_grad_norm")])
        changes: dict[str, Any] = {}
        slots: dict[str, dict[str, Any]] = {slot: {} for slot in state.slots}
        rows = _split(numbers, packing, {(group_of[name], wide[name]) for name in gradients})
        for name, gradient in gradients.items():
            number, dtype = group_of[name], wide[name]
            known = {slot: of_slot[name] for slot, of_slot in state.slots.items() if name in of_slot}
            own = rows[number, dtype]
            counted = {}
            if STEP in known:
                counted[STEP] = _count(known[STEP], own, structure.kind)
            case = Case(
                gradient,
                params[name].astype(dtype),
                {slot: value.astype(dtype) for slot, value in known.items()},
                {**own, **{column: value.astype(dtype) for column, value in counted.items()}},
                structure.groups[number],
                structure,
                name in with_rows,
            )
            changes[name], kept = formula.update(case)
            for slot, value in (counted | kept).items():
                slots[slot][name] = value.astype(known[slot].dtype)
        return changes, OptimizerState(_store(numbers, packing), slots)

    return optax.GradientTransformationExtraArgs(init, _with_extra(update))


def _slot_dtype(wanted: str | None, dtype: Any) -> Any:
    """Returns a slot's dtype: "float32" means at least float32, None the variable's own dtype."""
    if wanted == "float16":
        return np.dtype(np.float16)
    return dtype if wanted is None else count_dtype(dtype)


def _count(step: jax.Array, numbers: Mapping[str, jax.Array], kind: Kind) -> jax.Array:
    """Returns the number of a variable's updates with this one."""
    one = jnp.ones_like(step)
    if kind is Kind.SGD:  # torch makes a buffer when momentum is first used
        one = jnp.where(numbers["momentum"] != 0, one, jnp.zeros_like(one))
    return step + one


def _store(numbers: jax.Array, packing: Hyperparameters) -> jax.Array:
    """Returns the numbers with the factor that momentum buffers are multiplied by now."""
    if not packing.keeps_scaling:
        return numbers
    return numbers.at[:, packing.index(STORED_SCALING)].set(numbers[:, packing.index("velocity_scaling")])


def _split(
    numbers: jax.Array, packing: Hyperparameters, wanted: set[tuple[int, Any]]
) -> dict[tuple[int, Any], dict[str, jax.Array]]:
    """Returns the numbers of each wanted group and dtype, by column."""
    return {
        (number, dtype): {
            column: numbers[number, place].astype(dtype) for place, column in enumerate(packing.columns)
        }
        for number, dtype in wanted
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
    found: OptimizerState = state if isinstance(state, OptimizerState) else state.inner
    return found


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

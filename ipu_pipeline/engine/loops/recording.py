"""Records what a looped body does besides computing: it trains, and it enqueues.

`record_training_step` leaves a marker in the jaxpr being traced, as variables and `enqueue` do, and notes
what it marks in the body's `Recorder`. What traces the body (`bodies`) turns the markers into outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import optax

from ipu_pipeline.engine.programs.accumulation import Reduction, find_accumulator_dtype
from ipu_pipeline.engine.programs.gradient_maps import GradientMap, check_gradient_map, join_gradient_maps
from ipu_pipeline.engine.tracing import frames
from ipu_pipeline.engine.tracing.captures import Captures
from ipu_pipeline.engine.tracing.specs import VariableSpec
from ipu_pipeline.engine.updates.loss_scaling import LossScaled
from ipu_pipeline.engine.updates.optimizer_tracing import TracedOptimizer, lift_captures, trace_optimizer
from ipu_pipeline.ground import jax_compat, jax_core

__all__ = [
    "BodyFrame",
    "Recorder",
    "TrainingStep",
    "current_body",
    "minimize_p",
    "record_training_step",
]


@dataclass(frozen=True, eq=False)
class TrainingStep:
    """A recorded training step."""

    name: str  # the optimizer's state is kept under this name
    optimizer: TracedOptimizer  # traced; what it captured from the body counts as outputs
    num_mini_batches: int  # iterations per weight update
    reduction: Reduction  # of the gradients over the mini-batches
    gradient_map: GradientMap | None  # applied to each iteration's gradients, before accumulation
    accumulator_dtypes: Mapping[str, Any]  # by full name of the variable
    offloads_state: bool  # whether the optimizer's state lies in host memory between updates
    shards_state: bool = False  # whether the replicas share out the optimizer's state
    averages_replicas: bool = False  # whether gradients are averaged over replicas


@dataclass(frozen=True, eq=False)
class Minimized:
    """A recorded call of `minimize`."""

    transformation: optax.GradientTransformation
    trained: Mapping[str, VariableSpec]  # by full name
    step: TrainingStep  # of this call alone, but for the optimizer


@dataclass(eq=False)
class Recorder:
    """Records what a body does while it is traced."""

    # the variables that it asked for, by full name
    variables: dict[str, VariableSpec] = field(default_factory=dict)
    minimized: list[Minimized] = field(default_factory=list)  # the calls of `minimize`
    training_step: TrainingStep | None = None  # of all of them together
    asks_for_training: bool = False  # whether a layer asked whether the program trains


# What training steps of one body have in common.
_SETTINGS = ("num_mini_batches", "reduction", "offloads_state", "shards_state", "averages_replicas")


@dataclass(frozen=True, eq=False)
class BodyFrame(frames.Frame):
    """A body being traced, with its recorder."""

    recorder: Recorder = field(default_factory=Recorder)

    @property
    def has_metrics(self) -> bool:
        """Returns False: loops have no metrics, as their iterations enqueue."""
        return False

    @property
    def may_recompute(self) -> bool:
        """Returns False: loops do not recompute."""
        return False

    def is_training(self) -> bool:
        """Whether the body is traced as one that trains. Notes that a layer asked."""
        self.recorder.asks_for_training = True
        return self.training

    def note_variable(self, spec: VariableSpec) -> None:
        """Notes that the body asked for a variable."""
        self.recorder.variables[spec.name] = spec


minimize_p = jax_core.Primitive("minimize")


@minimize_p.def_abstract_eval  # type: ignore[untyped-decorator]  # jax.extend has no annotations
def _minimize_abstract(*values: Any, index: int) -> Any:
    del values, index  # the loss, and what the optimizer captured
    return jax_compat.shaped_array((), np.dtype(np.int32))  # never read; a marker needs a result


def current_body(what: str, advice_in_stage: str) -> BodyFrame:
    """The body of a loop that is being traced."""
    frame = frames.current_frame(what)
    if not isinstance(frame, BodyFrame):
        advice = "Call it in the body of ipu.loops.repeat; repeat(1, ...) runs it once."
        raise frames.OutsideOfBodyError(
            f"{what} was called in {frame.place}. {advice_in_stage if frame.is_stage else advice}"
        )
    return frame


def record_training_step(
    body: BodyFrame,
    loss: jax.Array,
    transformation: optax.GradientTransformation,
    var_list: Sequence[str] | None,
    *,
    name: str,
    num_mini_batches: int,
    reduction: Reduction,
    accumulator_dtype: Any = None,
    gradient_maps: Sequence[GradientMap] = (),
    offloads_state: bool = False,
    shards_state: bool = False,
    averages_replicas: bool = False,
) -> str:
    """Records a training step of a body, at this point of its trace.

    A body may have several, of different variables. Each loss is differentiated with respect to its own
    variables only, at their values before the iteration. The state is kept under the first call's name.

    Returns:
      The name of the training step.
    """
    recorder = body.recorder
    if var_list is not None and not isinstance(var_list, str):
        var_list = [body.names.trained_name(one) for one in var_list]
    trained = _find_trained(recorder.variables, var_list)
    for gradient_map in gradient_maps:
        check_gradient_map(gradient_map, trained.values(), "gradient_mapping_function")
    dtypes = {
        known: find_accumulator_dtype(spec, accumulator_dtype, "dtype") for known, spec in trained.items()
    }
    own_trained, number, first = trained, len(recorder.minimized), recorder.training_step
    own_transformation = transformation
    if first is not None:
        trained = {**first.optimizer.trained, **trained}
        dtypes = {**first.accumulator_dtypes, **dtypes}
        parts = [(one.transformation, one.trained) for one in recorder.minimized]
        transformation = _join([*parts, (transformation, own_trained)])
    traced = trace_optimizer(transformation, trained, None, (), reduction, dtypes)
    captures = Captures()
    traced = lift_captures(traced, captures.find_number)
    name = body.names.layer_name("", name)
    step = TrainingStep(
        name=name if first is None else first.name,
        optimizer=traced,
        num_mini_batches=num_mini_batches,
        reduction=reduction,
        gradient_map=join_gradient_maps(gradient_maps),
        accumulator_dtypes=dtypes,
        offloads_state=offloads_state,
        shards_state=shards_state,
        averages_replicas=averages_replicas,
    )
    minimized = Minimized(own_transformation, own_trained, step)
    for other in recorder.minimized:
        _check_together(other, minimized)
    recorder.minimized.append(minimized)
    recorder.training_step = step
    minimize_p.bind(loss, *captures.values, index=number)
    return name


def _check_together(one: Minimized, other: Minimized) -> None:
    """Raises if a body cannot have two training steps."""
    what = "minimize was called twice in the body of one loop, or in one compiled function without loops"
    if shared := [name for name in one.trained if name in other.trained]:
        raise NotImplementedError(
            f"{what}, and both train {', '.join(shared)}. Give each its own variables by var_list; or add "
            "the losses, or train in two loops."
        )
    for name in _SETTINGS:
        if getattr(one.step, name) != getattr(other.step, name):
            raise NotImplementedError(
                f"{what}, with optimizers that accumulate, average or place their state differently "
                f"({name}). Give both the same settings, or train in two loops."
            )
    is_scaled = any(isinstance(own.transformation, LossScaled) for own in (one, other))
    if is_scaled or one.step.gradient_map is not None or other.step.gradient_map is not None:
        raise NotImplementedError(
            f"{what}, with a LossScalingOptimizer or a MapGradientOptimizer, which one training step alone "
            "may have. Train in two loops, or change gradients in the optimizers, by optax.chain."
        )


def _join(
    parts: Sequence[tuple[optax.GradientTransformation, Mapping[str, Any]]],
) -> optax.GradientTransformation:
    """One transformation of several, each with its own variables."""

    def init(params: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(own.init({name: params[name] for name in names}) for own, names in parts)

    def update(gradients: Mapping[str, Any], states: tuple[Any, ...], params: Any) -> Any:
        changes: dict[str, Any] = {}
        new_states = []
        for (own, names), state in zip(parts, states, strict=True):
            given = ({name: values[name] for name in names} for values in (gradients, params))
            own_gradients, own_params = given
            own_changes, new_state = own.update(own_gradients, state, own_params)
            changes.update(own_changes)
            new_states.append(new_state)
        return changes, tuple(new_states)

    return optax.GradientTransformation(init, update)


def _find_trained(
    known: Mapping[str, VariableSpec], var_list: Sequence[str] | None
) -> dict[str, VariableSpec]:
    trainable = {name: spec for name, spec in known.items() if spec.trainable}
    if isinstance(var_list, str):
        raise ValueError(f"minimize: var_list must be a list of full names; got the string {var_list!r}.")
    if var_list is not None and not var_list:
        raise ValueError("No variables to optimize: var_list is empty; None trains all.")
    for name in var_list or ():
        if name not in trainable:
            fault = "is not trainable" if name in known else "does not exist"
            raise ValueError(
                f"minimize: the variable {name!r} of var_list {fault}. Trainable are: "
                f"{', '.join(trainable) or 'none'}."
            )
    trained = {name: spec for name, spec in trainable.items() if var_list is None or name in var_list}
    if not trained:
        raise ValueError("No variables to optimize: the loop's body has asked for no trainable variable.")
    return trained

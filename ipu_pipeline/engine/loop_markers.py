"""Markers in a loop's body: the training step that it records, the shards that cut it into stages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ipu_pipeline.engine import jaxprs
from ipu_pipeline.engine.option_types import Reduction
from ipu_pipeline.engine.programs.accumulation import (
    GradientMap,
    check_gradient_map,
    find_accumulator_dtype,
    join_gradient_maps,
)
from ipu_pipeline.engine.tracing import frames, hoisting
from ipu_pipeline.engine.tracing.captures import Captures
from ipu_pipeline.engine.tracing.specs import VariableSpec
from ipu_pipeline.engine.tracing.stages import Source, TracedStage
from ipu_pipeline.engine.updates.optimizer_tracing import TracedOptimizer, lift_captures, trace_optimizer
from ipu_pipeline.engine.updates.optimizer_wrappers import LossScaled
from ipu_pipeline.ground import jax_compat, jax_core
from ipu_pipeline.ground.checks import is_integer, require

# The training step: `record_training_step` leaves a marker in the jaxpr being traced, as variables and
# `enqueue` do, and `loop.trace_body` turns the markers into outputs.


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


def current_body(caller: str, advice_in_stage: str) -> BodyFrame:
    """The body of a loop that is being traced."""
    frame = frames.current_frame(caller)
    if not isinstance(frame, BodyFrame):
        advice = "Call it in the body of ipu.loops.repeat; repeat(1, ...) runs it once."
        raise frames.OutsideOfBodyError(
            f"{caller} was called in {frame.place}. {advice_in_stage if frame.is_stage else advice}"
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
        var_list = [body.names.trained_name(variable) for variable in var_list]
    trained = _find_trained(recorder.variables, var_list)
    for gradient_map in gradient_maps:
        check_gradient_map(gradient_map, trained.values(), "gradient_mapping_function")
    dtypes = {
        key: find_accumulator_dtype(spec, accumulator_dtype, "dtype") for key, spec in trained.items()
    }
    own_trained, number, first = trained, len(recorder.minimized), recorder.training_step
    own_transformation = transformation
    if first is not None:
        trained = {**first.optimizer.trained, **trained}
        dtypes = {**first.accumulator_dtypes, **dtypes}
        parts = [(call.transformation, call.trained) for call in recorder.minimized]
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
    for earlier in recorder.minimized:
        _check_together(earlier, minimized)
    recorder.minimized.append(minimized)
    recorder.training_step = step
    minimize_p.bind(loss, *captures.values, index=number)
    return name


def _check_together(first: Minimized, second: Minimized) -> None:
    """Raises if a body cannot have two training steps."""
    fault = "minimize was called twice in the body of one loop, or in one compiled function without loops"
    if shared := [name for name in first.trained if name in second.trained]:
        raise NotImplementedError(
            f"{fault}, and both train {', '.join(shared)}. Give each its own variables by var_list; or add "
            "the losses, or train in two loops."
        )
    for name in _SETTINGS:
        if getattr(first.step, name) != getattr(second.step, name):
            raise NotImplementedError(
                f"{fault}, with optimizers that accumulate, average or place their state differently "
                f"({name}). Give both the same settings, or train in two loops."
            )
    is_scaled = any(isinstance(call.transformation, LossScaled) for call in (first, second))
    if is_scaled or first.step.gradient_map is not None or second.step.gradient_map is not None:
        raise NotImplementedError(
            f"{fault}, with a LossScalingOptimizer or a MapGradientOptimizer, which one training step "
            "alone may have. Train in two loops, or change gradients in the optimizers, by optax.chain."
        )


def _join(
    parts: Sequence[tuple[optax.GradientTransformation, Mapping[str, Any]]],
) -> optax.GradientTransformation:
    """One transformation of several, each with its own variables."""

    def init(params: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(
            transformation.init({name: params[name] for name in names}) for transformation, names in parts
        )

    def update(gradients: Mapping[str, Any], states: tuple[Any, ...], params: Any) -> Any:
        changes: dict[str, Any] = {}
        new_states = []
        for (transformation, names), state in zip(parts, states, strict=True):
            own_gradients, own_params = (
                {name: values[name] for name in names} for values in (gradients, params)
            )
            own_changes, new_state = transformation.update(own_gradients, state, own_params)
            changes.update(own_changes)
            new_states.append(new_state)
        return changes, tuple(new_states)

    return optax.GradientTransformation(init, update)


def _find_trained(
    variables: Mapping[str, VariableSpec], var_list: Sequence[str] | None
) -> dict[str, VariableSpec]:
    trainable = {name: spec for name, spec in variables.items() if spec.trainable}
    if isinstance(var_list, str):
        raise ValueError(f"minimize: var_list must be a list of full names; got the string {var_list!r}.")
    if var_list is not None and not var_list:
        raise ValueError("No variables to optimize: var_list is empty; None trains all.")
    for name in var_list or ():
        if name not in trainable:
            fault = "is not trainable" if name in variables else "does not exist"
            raise ValueError(
                f"minimize: the variable {name!r} of var_list {fault}. Trainable are: "
                f"{', '.join(trainable) or 'none'}."
            )
    trained = {name: spec for name, spec in trainable.items() if var_list is None or name in var_list}
    if not trained:
        raise ValueError("No variables to optimize: the loop's body has asked for no trainable variable.")
    return trained


# Shards. `ipu_shard(i)` is a `jax.named_scope`: after tracing, the scope stands in each equation's name
# stack, also within functions that `jax.jit` has cached. A run of equations of one shard is a stage on that
# shard's IPU. A shard may come again (0, 1, 0); values go straight from the run that makes them to readers.
#
# A variable that is asked for within a scope lives on that shard. One that is asked for outside of all
# scopes lives where it is first used. On other shards its value crosses, and its gradient comes back.

_PREFIX = "ipu_shard:"
_PUBLIC_NAMES = {
    "remat": "jax.checkpoint",
    "remat2": "jax.checkpoint",
    "checkpoint": "jax.checkpoint",
    "scan": "jax.lax.scan",
    "while": "jax.lax.while_loop",
    "cond": "jax.lax.cond",
    "custom_jvp_call": "jax.custom_jvp",
    "custom_vjp_call": "jax.custom_vjp",
    "shard_map": "jax.shard_map",
    "xla_pmap": "jax.pmap",
}


@contextlib.contextmanager
def ipu_shard(index: int) -> Iterator[None]:
    """Puts the operations of the `with` block on an IPU.

    Operations outside of any `ipu_shard` stay with the shard before them. Values cross from IPU to IPU by
    themselves, and the backward of an operation runs where the operation does. Of nested scopes, the
    innermost counts. One micro-batch is handled at a time; for overlap, see pipelines.

    Example:
      >>> def body(x):
      ...     with ipu.scopes.ipu_shard(0):
      ...         x = layers.Dense(8)(x)
      ...     with ipu.scopes.ipu_shard(1):
      ...         return layers.Dense(8)(x)
      >>> def model(x):
      ...     return ipu.loops.repeat(3, body, [x])
      >>> with ipu.scopes.ipu_scope("/device:IPU:0"):
      ...     program = ipu.ipu_compiler.compile(model, [np.ones([4, 8], np.float32)])
      >>> print(program.placement())
      Loop
        stage  IPU  device            operations  bytes of variables  variables
        0      0    not selected yet  3           288                 dense/kernel
                                                                      dense/bias
        1      1    not selected yet  3           288                 dense_1/kernel
                                                                      dense_1/bias
        ...

    Args:
      index: the number of the IPU, from 0.

    Raises:
      TypeError, ValueError: the index is not an integer from 0.
      RuntimeError: not called in the body of a loop: in a stage of a pipeline, whose IPU is given by
        `device_mapping`, or outside of a program.
    """
    require(is_integer(index), "ipu_shard: index must be an integer", index, TypeError)
    number = int(index)
    require(number >= 0, "ipu_shard: index must be at least 0", number)
    current_body("ipu_shard", "Its IPU is given by device_mapping: make a stage of each part.")
    with jax.named_scope(f"{_PREFIX}{number}"):
        yield


def read_shard(equation: Any) -> int | None:
    """The shard whose scope an equation is in; None outside of all scopes."""
    for name in reversed(jax_compat.scope_names(equation)):
        if name.startswith(_PREFIX):
            return int(name.removeprefix(_PREFIX))
    return None


def refuse_inner_scopes(equation: Any, place: str) -> None:
    """Raises if a shard scope is opened within the body of an equation."""
    # A derivative rule runs later, outside of the body: there `ipu_shard` itself raises.
    shard = _find_inner_scope(equation)
    if shard is not None:
        name = equation.primitive.name
        raise ValueError(
            f"{place}: ipu_shard({shard}) is opened inside the body of "
            f"{_PUBLIC_NAMES.get(name, name)}, which runs on one IPU as a whole. Open the scope around the "
            "call, or cut the body into several calls."
        )


def _find_inner_scope(equation: Any) -> int | None:
    for jaxpr in jax_core.jaxprs_in_params(equation.params):
        for inner in jaxpr.eqns:
            shard = read_shard(inner)
            inner_shard = _find_inner_scope(inner) if shard is None else shard
            if inner_shard is not None:
                return inner_shard
    return None


@dataclass(frozen=True, eq=False)
class ShardedFunction:
    """A function in stages."""

    stages: tuple[TracedStage, ...]  # one per run of equations of the same shard
    shards: tuple[int, ...]  # the shard of each stage
    outputs: tuple[Source, ...]  # where the function's outputs come from
    # where the loss comes from, the last output of the last stage; None without training
    loss: Source | None


@dataclass(eq=False)
class _Run:
    """Equations of one shard, and the variables that live with them."""

    shard: int
    equations: list[Any] = field(default_factory=list)
    variables: list[VariableSpec] = field(default_factory=list)


def split(
    hoisted: hoisting.Hoisted, outputs: Sequence[Any], loss: Any, sources: Mapping[Any, Source], place: str
) -> ShardedFunction:
    """Cuts a function into runs of equal shard."""
    # The runs, and where values are made.
    flat = hoisted.flat
    runs = _make_runs(hoisted)
    last = len(runs) - 1
    variables = dict(zip(hoisted.variables, flat.inputs, strict=False))
    key = flat.inputs[len(variables)] if hoisted.uses_key else None
    homes = {spec: index for index, run in enumerate(runs) for spec in run.variables}
    made_in = {variables[spec]: index for spec, index in homes.items()}
    for index, run in enumerate(runs):
        made_in.update((var, index) for equation in run.equations for var in equation.outvars)
    if loss is not None and (_is_literal(loss) or made_in.get(loss) != last):
        # The last stage's program starts the backward, so it has to compute the loss.
        copy = jaxprs.flatten(jax.make_jaxpr(jnp.copy)(jaxprs.aval_struct(loss.aval))).equations[0]
        runs[last].equations.append(copy.replace(invars=[loss]))
        (loss,) = copy.outvars

    # What each run returns for others, takes and assigns.
    returned: list[dict[Any, int]] = [{} for _run in runs]  # value for other runs -> its position

    def source_of(var: Any) -> Source:
        if var in sources:
            return sources[var]
        positions = returned[made_in[var]]
        return Source("output", positions.setdefault(var, len(positions)), made_in[var])

    def is_elsewhere(atom: Any, index: int) -> bool:
        is_local = _is_literal(atom) or atom is key or atom in flat.constants
        return not is_local and made_in.get(atom) != index

    new_values = dict(zip(hoisted.assigned, flat.outputs[-len(hoisted.assigned) :], strict=False))
    assigned_in = {
        spec: _find_assigning_run(
            runs, spec, homes[spec], None if _is_literal(value) else made_in.get(value), place
        )
        for spec, value in new_values.items()
    }
    inputs: list[dict[Any, Source]] = []
    for index, run in enumerate(runs):
        operands = [atom for equation in run.equations for atom in equation.invars]
        operands += [value for spec, value in new_values.items() if assigned_in[spec] == index]
        inputs.append({atom: source_of(atom) for atom in operands if is_elsewhere(atom, index)})
    # The last stage returns its own values, and constants; the rest goes straight from its maker.
    own_outputs = [atom for atom in outputs if not is_elsewhere(atom, last)]
    output_sources = [source_of(atom) if is_elsewhere(atom, last) else None for atom in outputs]
    first_own = len(returned[last])
    own_numbers = iter(range(first_own, first_own + len(own_outputs)))
    function_outputs = tuple(
        source or Source("output", next(own_numbers), last) for source in output_sources
    )

    stages = []
    for index, run in enumerate(runs):
        assigned = [spec for spec in new_values if assigned_in[spec] == index]
        extra = [spec for spec in assigned if spec not in run.variables]
        stage_variables = [*run.variables, *extra]
        # A variable that lives in another run of this shard is an unread input here.
        variable_vars = [variables[spec] for spec in run.variables]
        variable_vars += [hoisting.variable_input(spec) for spec in extra]
        uses_key = key is not None and any(key in equation.invars for equation in run.equations)
        results = list(returned[index])
        if index == last:
            results += own_outputs + ([] if loss is None else [loss])
        stages.append(
            TracedStage(
                place=place if last == 0 else f"{place}, shard {run.shard}",
                flat=jaxprs.FlatJaxpr(
                    [*variable_vars, *([key] if uses_key else []), *inputs[index]],
                    run.equations,
                    [*results, *(new_values[spec] for spec in assigned)],
                    flat.constants,
                ),
                variables=tuple(stage_variables),
                assigned=tuple(assigned),
                uses_key=uses_key,
                inputs=tuple(inputs[index].values()),
                outputs=tuple(Source("output", number, index) for number in range(len(results))),
                output_avals=tuple(
                    jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in results
                ),
            )
        )
    loss_source = None if loss is None else stages[last].outputs[-1]
    return ShardedFunction(tuple(stages), tuple(run.shard for run in runs), function_outputs, loss_source)


def _is_literal(atom: Any) -> bool:
    return isinstance(atom, jax_core.Literal)


def _make_runs(hoisted: hoisting.Hoisted) -> list[_Run]:
    """Groups the equations into runs, and assigns every variable to one of them."""
    flat = hoisted.flat
    scoped = {}  # variable -> the shard in whose scope it was asked for
    items: list[tuple[int | None, Any]] = [(read_shard(equation), equation) for equation in flat.equations]
    for spec, (number, marker) in reversed(hoisted.asked.items()):
        shard = read_shard(marker)
        if shard is not None:
            scoped[spec] = shard
            items.insert(number, (shard, spec))
    first = next((shard for shard, _item in items if shard is not None), 0)
    runs = [_Run(first)]
    for shard, item in items:
        if shard is not None and shard != runs[-1].shard:
            runs.append(_Run(shard))
        (runs[-1].variables if isinstance(item, VariableSpec) else runs[-1].equations).append(item)
    unscoped = {
        var: spec for spec, var in zip(hoisted.variables, flat.inputs, strict=False) if spec not in scoped
    }
    for run in runs:
        for equation in run.equations:
            for atom in equation.invars:
                if not _is_literal(atom) and atom in unscoped:
                    run.variables.append(unscoped.pop(atom))
    runs[0].variables.extend(unscoped.values())  # variables that no equation uses
    return runs


def _find_assigning_run(
    runs: Sequence[_Run], spec: VariableSpec, home: int, made_in: int | None, place: str
) -> int:
    """The run whose program returns a variable's new value."""
    if made_in is None or made_in <= home:
        return home
    if runs[made_in].shard != runs[home].shard:
        raise ValueError(
            f"{place}: variable {spec.name} lives on shard {runs[home].shard}, and is assigned a value "
            f"that is computed on shard {runs[made_in].shard}. Compute it in the scope that asks for the "
            "variable."
        )
    return made_in

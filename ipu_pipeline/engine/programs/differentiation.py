"""Differentiation of stages: forward and backward programs, cut out of the joint jaxpr of each.

A stage's jaxpr is differentiated once, by `jax.vjp` on symbolic cotangents, which gives a joint jaxpr of
its forward and its backward. What depends on a cotangent is the backward, the rest is the forward, and
what crosses from one to the other is a residual, unless the backward can have it without storing it:

1. inputs of the stage are held by the runner anyway;
2. what depends only on variables and constants is computed again in the backward;
3. with recomputation the stage is differentiated in segments (see `recomputation`), and only their
   beginnings cross.

The residuals of `jax.vjp` itself would have to be known by the identity of tracers, include what is made
of weights alone, and allow no other cuts.

The last stage is not cut: its forward and backward are one program that starts from the loss. Gradients
are computed only for what depends on trained variables. Those that are zero whatever the cotangents are
not computed at all.

The backward may be cut in halves: gradients of inputs first, and those of weights in a program of their
own. That repeats nothing of the first half, but takes what it needs as further residuals. What prints in
the backward does so in the second half, unless the first needs it.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.engine import jaxprs
from ipu_pipeline.engine.option_types import Recomputation, Reduction
from ipu_pipeline.engine.programs import accumulation, recomputation, stage_programs
from ipu_pipeline.engine.programs.accumulation import GradientMap
from ipu_pipeline.engine.programs.stage_programs import StageProgram, StagePrograms, Value, ValueKind
from ipu_pipeline.engine.tracing import stage_markers
from ipu_pipeline.engine.tracing.faults import add_derivative_note
from ipu_pipeline.engine.tracing.stage_meshes import in_mesh, mesh_of_stages
from ipu_pipeline.engine.tracing.stages import Source, TracedPipeline, TracedStage
from ipu_pipeline.ground import jax_compat, jax_core

Results: TypeAlias = "Sequence[tuple[Value, Any]]"  # what a program returns, with the atoms


@dataclass(frozen=True, eq=False)
class Joint:
    """A stage's forward and backward in one jaxpr."""

    index: int  # the stage's number
    stage: TracedStage  # the stage
    flat: jaxprs.FlatJaxpr  # the jaxpr
    labels: dict[Any, Value]  # what its inputs are
    results: list[tuple[Value, Any]]  # what the forward returns, with the atoms
    pulled: list[tuple[Value, Any]]  # the gradients that are not always zero, with the atoms
    backward_vars: set[Any]  # the variables that depend on a cotangent
    trained: tuple[int, ...]  # positions in the stage's variables

    def is_backward(self, equation: Any) -> bool:
        """Whether an equation belongs to the backward."""
        atoms = (*equation.outvars, *equation.invars)
        return any(var in self.backward_vars for var in jaxprs.variables_in(atoms))

    def is_forward(self, equation: Any) -> bool:
        """Whether an equation belongs to the forward."""
        return not self.is_backward(equation)


def fuse(joint: Joint, reduction: Reduction, is_scaled: bool) -> StagePrograms:
    """Makes forward and backward one program that starts from the loss."""
    forward = _Cutter(joint).cut(
        "forward_backward", [*joint.results, *joint.pulled], keep_effects_of=jaxprs.any_equation
    )
    forward = stage_programs.seed(forward, joint.stage.output_avals[-1].dtype, is_scaled)
    return StagePrograms(accumulation.accumulate(forward, reduction), None, (), joint.trained)


def split(joint: Joint, reduction: Reduction) -> StagePrograms:
    """Makes forward and backward two programs."""
    cutter = _Cutter(joint)
    backward = cutter.cut_later("backward", joint.pulled, cutter.stored, joint.is_backward)
    results = [*joint.results, *cutter.as_results(cutter.numbers)]
    return StagePrograms(
        cutter.cut("forward", results, keep_effects_of=joint.is_forward),
        None if backward is None else accumulation.accumulate(backward, reduction),
        cutter.residuals,
        joint.trained,
    )


def halve(joint: Joint, reduction: Reduction, is_last: bool, is_scaled: bool) -> StagePrograms:
    """Makes forward and both halves of the backward programs.

    On the last stage, the forward does the first half, too, and starts it from the loss.
    """
    cutter, flat = _Cutter(joint), joint.flat
    first: list[tuple[Value, Any]] = []
    second: list[tuple[Value, Any]] = []
    for value, atom in joint.pulled:
        (first if value.kind is ValueKind.INPUT_COTANGENT else second).append((value, atom))
    if is_last:
        computed = jaxprs.find_computed(flat, [atom for _value, atom in (*joint.results, *first)])
    else:
        computed = jaxprs.find_computed(flat, [atom for _value, atom in first], cutter.stored)
    first_ids = set(map(id, computed))

    def is_second(equation: Any) -> bool:
        return joint.is_backward(equation) and id(equation) not in first_ids

    saved = jaxprs.find_kept(computed, cutter.data_vars)
    weights = cutter.cut_later("weight_gradients", second, cutter.stored | saved, is_second)
    is_rest = jaxprs.any_equation if weights is None else lambda equation: not is_second(equation)
    if is_last:
        results = [*joint.results, *first, *cutter.as_results(cutter.numbers)]
        forward = cutter.cut("forward_input_gradients", results, keep_effects_of=is_rest)
        backward = None
        dtype = joint.stage.output_avals[-1].dtype
        forward = stage_programs.seed(forward, dtype, is_scaled)
        weights = None if weights is None else stage_programs.seed(weights, dtype, is_scaled)
    else:
        passed = cutter.as_results(
            var for var in cutter.numbers if var in saved and var not in cutter.stored
        )
        backward = cutter.cut_later(
            "input_gradients",
            [*first, *passed],
            cutter.stored,
            lambda equation: joint.is_backward(equation) and is_rest(equation),
        )
        sent = {var for _value, var in passed}
        results = [*joint.results, *cutter.as_results(var for var in cutter.numbers if var not in sent)]
        forward = cutter.cut("forward", results, keep_effects_of=joint.is_forward)
    return StagePrograms(
        forward,
        backward,
        cutter.residuals,
        joint.trained,
        is_halved=True,
        weights=None if weights is None else accumulation.accumulate(weights, reduction),
    )


class _Cutter:
    """Cuts the programs of a stage.

    Attributes:
      numbers: the numbers of the residuals, by variable.
      data_vars: the variables that depend on more than variables of the stage and constants.
      stored: the variables of the forward that later programs take instead of computing them again.
    """

    def __init__(self, joint: Joint) -> None:
        self.numbers: dict[Any, int] = {}
        self._joint = joint
        # An assigned variable's value in the forward is gone by the backward, so it counts as data: it is
        # stored if the backward needs it.
        assigned = {joint.stage.variables.index(spec) for spec in joint.stage.assigned}
        constant = {
            var
            for var, value in joint.labels.items()
            if value.kind is ValueKind.VARIABLE and value.index not in assigned
        }
        self.data_vars = jaxprs.dependents(joint.flat, [v for v in joint.flat.inputs if v not in constant])
        self.stored = {
            var
            for equation in joint.flat.equations
            if joint.is_forward(equation)
            for var in equation.outvars
            if var in self.data_vars or equation.effects  # printing is not repeated
        }
        self._later_labels = {
            var: value
            for var, value in joint.labels.items()
            if value.kind is not ValueKind.VARIABLE or var in constant
        }

    @property
    def residuals(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and dtypes of the residuals, by number."""
        return tuple(jaxprs.aval_struct(var.aval) for var in self.numbers)

    def as_results(self, variables: Iterable[Any]) -> list[tuple[Value, Any]]:
        """Makes residuals results of a program."""
        return [(Value(ValueKind.RESIDUAL, self.numbers[var]), var) for var in variables]

    def cut(self, name: str, results: Results, keep_effects_of: Callable[[Any], bool]) -> StageProgram:
        """Cuts a program that begins with a micro-batch."""
        joint = self._joint
        full_name = f"stage{joint.index}_{name}"
        return stage_programs.cut(full_name, joint.flat, results, joint.labels, (), keep_effects_of)

    def cut_later(
        self,
        name: str,
        results: Results,
        stored: Collection[Any],
        keep_effects_of: Callable[[Any], bool],
    ) -> StageProgram | None:
        """Cuts a program that takes residuals. Returns None if it has no results."""
        if not results:
            return None
        return stage_programs.cut(
            f"stage{self._joint.index}_{name}",
            self._joint.flat,
            results,
            self._later_labels,
            stored,
            keep_effects_of,
            self.numbers,
        )


_RANDOM = (Value(ValueKind.KEY), Value(ValueKind.EXECUTION_COUNT), Value(ValueKind.MICRO_BATCH))


def build(
    traced: TracedPipeline,
    trained: Collection[str],
    reduction: Reduction,
    gradient_map: GradientMap | None = None,
    recompute: Recomputation | None = None,
    is_scaled: bool = False,
    enqueued: Mapping[str, Sequence[int]] = MappingProxyType({}),
    halved: Collection[int] = (),
) -> tuple[StagePrograms, ...]:
    """Builds the programs of all stages."""
    alike = find_alike(traced.stages)
    if traced.loss is None:
        return tuple(
            _build_inference(index, stage, index in alike) for index, stage in enumerate(traced.stages)
        )
    differentiable = _find_differentiable(traced, trained)
    senders: dict[Source, list[int]] = {}  # value -> the stages that send a cotangent for it
    built: list[StagePrograms] = []
    for index in reversed(range(len(traced.stages))):
        is_last = index == len(traced.stages) - 1
        stage = traced.stages[index]
        evaluate = _evaluation(stage, is_last, recompute)
        try:
            joint = _differentiate(
                traced,
                index,
                evaluate,
                trained,
                differentiable,
                senders,
                gradient_map,
                is_scaled,
                enqueued,
                index in halved,
                index in alike,
            )
        except Exception as error:  # from a derivative rule, or an operation without a derivative
            if not str(error).startswith(stage.place):
                add_derivative_note(error, stage.place)
            raise
        if index in halved:
            built.append(halve(joint, reduction, is_last, is_scaled))
        else:
            built.append(fuse(joint, reduction, is_scaled) if is_last else split(joint, reduction))
    return tuple(reversed(built))


def _find_differentiable(traced: TracedPipeline, trained: Collection[str]) -> set[Source]:
    """The values between stages that depend on a trained variable and can carry a gradient."""
    sources: set[Source] = set()
    for stage in traced.stages:
        roots = [
            var
            for var, spec in zip(stage.flat.inputs, stage.variables, strict=False)
            if spec.name in trained
        ]
        roots += [
            var for var, source in zip(stage.input_vars, stage.inputs, strict=True) if source in sources
        ]
        depending = set(roots)
        for equation in stage.flat.equations:
            is_stopped = equation.primitive.name == "stop_gradient"
            if not is_stopped and not depending.isdisjoint(jaxprs.variables_in(equation.invars)):
                depending.update(
                    var for var in equation.outvars if jnp.issubdtype(var.aval.dtype, jnp.inexact)
                )
        for source, atom in zip(stage.outputs, stage.flat.outputs, strict=False):
            if jaxprs.is_var(atom) and atom in depending:
                sources.add(source)
    return sources


def _stage_arguments(stage: TracedStage) -> list[Value]:
    """The arguments of `_call_stage`."""
    values = [Value(ValueKind.VARIABLE, index) for index in range(len(stage.variables))]
    values += _RANDOM if stage.uses_key else ()
    values += [Value(ValueKind.INPUT, index) for index in range(len(stage.inputs))]
    return values


def _stage_avals(stage: TracedStage) -> list[jax.ShapeDtypeStruct]:
    """Shapes and dtypes of `_stage_arguments`."""
    avals = [jaxprs.aval_struct(var.aval) for var in stage.flat.inputs]
    if stage.uses_key:
        after_key = len(stage.variables) + 1
        avals[after_key:after_key] = [jax.ShapeDtypeStruct((), jnp.int32)] * 2
    return avals


def _call_stage(stage: TracedStage, *arguments: Any) -> list[Any]:
    """Evaluates a stage; the micro-batch's random key is folded here."""
    values = list(arguments)
    if stage.uses_key:
        random = slice(len(stage.variables), len(stage.variables) + len(_RANDOM))
        values[random] = [stage_markers.micro_batch_key(*values[random])]
    return jaxprs.close(stage.flat)(*values)


def _evaluation(
    stage: TracedStage, is_last: bool, recompute: Recomputation | None
) -> Callable[..., list[Any]]:
    """Makes the stage a function of `_stage_arguments`, to be differentiated."""
    is_cut = recompute is not Recomputation.RECOMPUTE_THEN_BACKPROPAGATE
    # Nothing is kept between the last stage's forward and backward, so one segment would save nothing.
    if recompute is None or (is_last and not (is_cut and stage_markers.has_marks(stage.flat))):
        return functools.partial(_call_stage, stage)
    return recomputation.in_segments(_flatten_stage(stage), is_cut)


def _flatten_stage(stage: TracedStage) -> jaxprs.FlatJaxpr:
    """Makes the stage a jaxpr that takes `_stage_arguments`."""
    return jaxprs.flatten(_trace_again(stage))


def _trace_again(stage: TracedStage) -> Any:
    return jax.make_jaxpr(functools.partial(_call_stage, stage))(*_stage_avals(stage))


def _own_results(index: int, stage: TracedStage, atoms: Sequence[Any]) -> list[tuple[Value, Any]]:
    """The results of `_call_stage` that the stage makes itself: outputs, new values, enqueued leaves."""
    num_outputs, num_assigned = len(stage.outputs), len(stage.assigned)
    results = [
        (Value(ValueKind.OUTPUT, position), atom)
        for position, atom in enumerate(atoms[:num_outputs])
        if stage.outputs[position] == Source("output", position, index)
    ]
    for spec, atom in zip(stage.assigned, atoms[num_outputs:][:num_assigned], strict=True):
        results.append((Value(ValueKind.ASSIGNED, stage.variables.index(spec)), atom))
    for number, atom in zip(stage.enqueued, atoms[num_outputs + num_assigned :], strict=True):
        results.append((Value(ValueKind.ENQUEUED, number), atom))
    return results


def _build_inference(index: int, stage: TracedStage, is_alike: bool) -> StagePrograms:
    flat = jaxprs.flatten(jaxprs.without_mesh(_trace_again(stage), is_differentiated=True))
    labels = dict(zip(flat.inputs, _stage_arguments(stage), strict=True))
    if is_alike:
        flat, labels = take_out_key_numbers(flat, labels)
    results = _own_results(index, stage, flat.outputs)
    name = f"stage{index}_forward"
    forward = stage_programs.cut(name, flat, results, labels, (), jaxprs.any_equation)
    return StagePrograms(forward, None, (), ())


def _differentiate(
    traced: TracedPipeline,
    index: int,
    evaluate: Callable[..., list[Any]],
    trained: Collection[str],
    differentiable: set[Source],
    senders: dict[Source, list[int]],
    gradient_map: GradientMap | None,
    is_scaled: bool,
    enqueued: Mapping[str, Sequence[int]],
    is_halved: bool,
    is_alike: bool,
) -> Joint:
    """Differentiates one stage, given as `evaluate`. Enters the cotangents that it sends into `senders`."""
    # Arguments: the stage's own, the cotangents, and the loss scale if gradients are mapped or enqueued.
    stage = traced.stages[index]
    received = _received_cotangents(traced, index, senders)
    arguments = _stage_arguments(stage)
    avals = _stage_avals(stage)
    avals += [stage.output_avals[value.index] for value in received]
    sees_gradients = gradient_map is not None or any(spec.name in enqueued for spec in stage.variables)
    scales = [Value(ValueKind.LOSS_SCALE)] if is_scaled and sees_gradients else []
    avals += [jax.ShapeDtypeStruct((), jnp.float32) for _scale in scales]
    # Which gradients are computed, and which of them are enqueued as well.
    targets = [
        (Value(ValueKind.ACCUMULATOR, position), Value(ValueKind.VARIABLE, position))
        for position, spec in enumerate(stage.variables)
        if spec.name in trained
    ]
    trained_positions = tuple(value.index for value, _of in targets)
    targets += [
        (Value(ValueKind.INPUT_COTANGENT, position), Value(ValueKind.INPUT, position))
        for position, source in enumerate(stage.inputs)
        if source in differentiable
    ]
    places = [arguments.index(of) for _value, of in targets]
    observed = [  # the gradient's place in `targets`, and the number of its leaf
        (place, number)
        for place, (value, _of) in enumerate(targets)
        if value.kind is ValueKind.ACCUMULATOR
        for number in enqueued.get(stage.variables[value.index].name, ())
    ]
    differentiated_outputs = sorted({value.index for value in received})

    # The joint function of forward and backward, traced.
    def joint(*values: Any) -> list[Any]:
        fixed, cotangents = values[: len(arguments)], values[len(arguments) :]
        cotangents, scale = cotangents[: len(received)], cotangents[len(received) :]

        def call(chosen: list[Any]) -> tuple[list[Any], list[Any]]:
            all_values = list(fixed)
            for place, value in zip(places, chosen, strict=True):
                all_values[place] = value
            outputs = evaluate(*all_values)
            return [outputs[position] for position in differentiated_outputs], outputs

        _primals, pull_back, outputs = jax.vjp(call, [fixed[p] for p in places], has_aux=True)
        sums: dict[int, Any] = {}
        for value, cotangent in zip(received, cotangents, strict=True):
            before = sums.get(value.index)
            sums[value.index] = cotangent if before is None else before + cotangent
        (pulled,) = pull_back([sums[position] for position in differentiated_outputs])
        if gradient_map is not None:
            for number, (value, of) in enumerate(targets):
                if value.kind is ValueKind.ACCUMULATOR:
                    variable = fixed[arguments.index(of)]
                    pulled[number] = _map_gradient(gradient_map, pulled[number], variable, *scale)
        return [*outputs, *pulled, *(_unscale(pulled[place], *scale) for place, _number in observed)]

    closed_jaxpr = _trace_joint(joint, avals, stage.place)
    if is_halved:
        num_outputs = len(closed_jaxpr.out_avals) - len(targets) - len(observed)
        first = {
            num_outputs + place
            for place, (value, _of) in enumerate(targets)
            if value.kind is ValueKind.INPUT_COTANGENT
        }
        closed_jaxpr = jaxprs.take_apart(
            closed_jaxpr, first.union(range(num_outputs)), range(len(arguments), len(avals))
        )
    # What the inputs and results of the joint jaxpr are.
    flat = jaxprs.flatten(closed_jaxpr, recomputation.isolate)
    labels = dict(zip(flat.inputs, [*arguments, *received, *scales], strict=True))
    if is_alike:
        flat, labels = take_out_key_numbers(flat, labels)
    backward_vars = jaxprs.dependents(flat, flat.inputs[len(arguments) : len(avals)])
    num_results = len(flat.outputs) - len(targets) - len(observed)
    pulled = [
        (value, atom)
        for (value, _of), atom in zip(targets, flat.outputs[num_results:], strict=False)
        # A gradient is linear in the cotangents: without any it is zero, unless it was mapped.
        if (gradient_map is not None and value.kind is ValueKind.ACCUMULATOR)
        or (jaxprs.is_var(atom) and atom in backward_vars)
    ]
    gradients = flat.outputs[num_results + len(targets) :]
    pulled += [
        (Value(ValueKind.ENQUEUED, number), atom)
        for (_place, number), atom in zip(observed, gradients, strict=True)
    ]
    for value, _atom in pulled:
        if value.kind is ValueKind.INPUT_COTANGENT:
            senders.setdefault(stage.inputs[value.index], []).append(index)
    return Joint(
        index=index,
        stage=stage,
        flat=flat,
        labels=labels,
        results=_own_results(index, stage, flat.outputs[:num_results]),
        pulled=pulled,
        backward_vars=backward_vars,
        trained=trained_positions,
    )


def _map_gradient(
    gradient_map: GradientMap, gradient: jax.Array, variable: jax.Array, scale: jax.Array | None = None
) -> jax.Array:
    """Maps a gradient. If there is a scale, the gradient and the result are `scale` times as large."""
    if scale is None:
        return gradient_map(gradient, variable)
    mapped = gradient_map(_unscale(gradient, scale), variable)
    wide = accumulation.count_dtype(gradient.dtype)
    scaled = (mapped.astype(wide) * scale.astype(wide)).astype(gradient.dtype)
    # A map such as a clip makes infinity finite, but the update must see that there was an overflow.
    return jnp.where(jnp.all(jnp.isfinite(gradient)), scaled, jnp.full_like(scaled, jnp.nan))


def _unscale(gradient: jax.Array, scale: jax.Array | None = None) -> jax.Array:
    if scale is None:
        return gradient
    wide = accumulation.count_dtype(gradient.dtype)
    return (gradient.astype(wide) / scale.astype(wide)).astype(gradient.dtype)


def _trace_joint(joint: Callable[..., list[Any]], avals: Sequence[Any], place: str) -> Any:
    closed_jaxpr = None
    # The mesh is for the rules of custom derivatives.
    with contextlib.suppress(jax.errors.UnexpectedTracerError), in_mesh(mesh_of_stages()):
        closed_jaxpr = jax.make_jaxpr(joint)(*avals)
    # A derivative rule is run here, after the stage was traced: the stage's values are gone.
    if closed_jaxpr is None or any(map(jax_compat.is_traced, closed_jaxpr.consts)):
        raise ValueError(
            f"{place}: a function with custom derivatives (jax.custom_vjp, jax.custom_jvp, "
            "jax.custom_gradient) uses a value of the stage that is not among its arguments. Pass it as an "
            "argument."
        )
    return jaxprs.without_mesh(closed_jaxpr, is_differentiated=True)


def _received_cotangents(
    traced: TracedPipeline, index: int, senders: dict[Source, list[int]]
) -> list[Value]:
    stage = traced.stages[index]
    if index == len(traced.stages) - 1:
        return [Value(ValueKind.COTANGENT, len(stage.outputs) - 1)]  # the loss is the last output
    return [
        Value(ValueKind.COTANGENT, position, sender)
        for position, source in enumerate(stage.outputs)
        if source == Source("output", position, index)
        for sender in senders.get(source, ())
    ]


# Numbers of random keys are taken out of programs, so that the programs of equal stages are equal.
#
# A stage's keys are folded from its micro-batch's key with two numbers each, that of the scope and that of
# the call (`stage_markers`). These differ from stage to stage. As constants they would make the programs of
# stages differ that are otherwise equal, and XLA would compile each of them.

_NUM_BEFORE, _NUM_FOLDS = 2, 4  # the first ones are with counts: of executions, and of micro-batches


def find_alike(stages: Sequence[TracedStage]) -> frozenset[int]:
    """Finds the stages that draw random keys and may be equal but for the numbers of these."""
    signatures = [
        (
            tuple(equation.primitive.name for equation in stage.flat.equations),
            tuple(str(var.aval) for var in stage.flat.inputs),
        )
        for stage in stages
    ]
    counts = Counter(signatures)
    return frozenset(
        index
        for index, (stage, signature) in enumerate(zip(stages, signatures, strict=True))
        if stage.uses_key and counts[signature] > 1
    )


def take_out_key_numbers(
    flat: jaxprs.FlatJaxpr, labels: dict[Any, Value]
) -> tuple[jaxprs.FlatJaxpr, dict[Any, Value]]:
    """Makes the numbers of a stage's random keys further inputs.

    Returns:
      The jaxpr, and the labels of all its inputs. Keys that are drawn within loops, conditionals and
      segments that are computed again keep their numbers.
    """
    folds = {var: 0 for var, value in labels.items() if value.kind is ValueKind.KEY}
    numbers: dict[Any, Value] = {}
    equations = []
    for equation in flat.equations:
        if equation.primitive.name == "random_fold_in":
            key, number = equation.invars
            num_folds = folds.get(key, _NUM_FOLDS)
            is_literal = isinstance(number, jax_core.Literal)
            if num_folds < _NUM_FOLDS and is_literal == (num_folds >= _NUM_BEFORE):
                (folded,) = equation.outvars
                folds[folded] = num_folds + 1
                if is_literal:
                    var = jax_core.Var(number.aval)
                    numbers[var] = Value(ValueKind.KEY_NUMBER, int(np.asarray(number.val)))
                    equation = equation.replace(invars=[key, var])
        equations.append(equation)
    inputs = [*flat.inputs, *numbers]
    return jaxprs.FlatJaxpr(inputs, equations, flat.outputs, flat.constants), {**labels, **numbers}

"""The body of a loop: a function that is traced once, and then cut into stages like a pipeline.

Its outputs are what it returns for the next iteration, what it enqueues and what its optimizer reads. Its
micro-batch is what the previous iteration and the feed give it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np

from ipu_pipeline.engine import jaxprs
from ipu_pipeline.engine.loops import shards
from ipu_pipeline.engine.loops.recording import BodyFrame, TrainingStep, minimize_p
from ipu_pipeline.engine.tracing import faults, frames, hoisting
from ipu_pipeline.engine.tracing.captures import Captures
from ipu_pipeline.engine.tracing.enqueuing import enqueue_p
from ipu_pipeline.engine.tracing.frames import Enqueued
from ipu_pipeline.engine.tracing.traced import Source, TracedPipeline
from ipu_pipeline.ground import jax_compat, jax_core

__all__ = ["BodyFunction", "TracedBody", "look_at_body", "trace_body", "trace_condition"]

BodyFunction: TypeAlias = "Callable[[list[Any], Any], list[Any]]"


@dataclass(frozen=True, eq=False)
class TracedBody:
    """A body as a pipeline whose micro-batches are iterations."""

    # Outputs: what the optimizer reads, then the carried values that change, then what is enqueued.
    # Inputs: what the body captured, then the carried values that stay the same.
    # Micro-batch: the carried values that change, then the feed's leaves.
    pipeline: TracedPipeline
    shards: tuple[int, ...]  # the IPU of each stage
    training: TrainingStep | None  # the recorded training step
    # what is enqueued, with the positions of its leaves among the outputs
    enqueued: tuple[tuple[Enqueued, tuple[int, ...]], ...]
    captured: tuple[Any, ...]  # traced values from outside, the first inputs
    changing: tuple[int, ...]  # which of the carried values change
    num_carried: int  # the number of carried values

    @property
    def num_read(self) -> int:
        """The number of outputs that only the optimizer reads; they come first."""
        num_enqueued = sum(len(places) for _enqueued, places in self.enqueued)
        return len(self.pipeline.outputs) - len(self.changing) - num_enqueued


class _NoTrainingStepError(Exception):
    """The body was traced as one that trains, and has no training step."""


def trace_body(
    function: BodyFunction,
    carried: Sequence[jax.ShapeDtypeStruct],
    element: Any,
    program_names: frames.ProgramNames,
    place: str,
    given: str = "",
) -> TracedBody:
    """Traces a body. Does not start a JAX backend."""
    try:
        with frames.unchanged_on_error(program_names):
            return _trace(function, carried, element, program_names, place, given, training=True)
    except _NoTrainingStepError:
        pass  # the second trace tells layers that there is none
    with frames.unchanged_on_error(program_names):
        return _trace(function, carried, element, program_names, place, given, training=False)


def _trace(
    function: BodyFunction,
    carried: Sequence[jax.ShapeDtypeStruct],
    element: Any,
    program_names: frames.ProgramNames,
    place: str,
    given: str,
    training: bool,
) -> TracedBody:
    recorded: list[Enqueued] = []
    frame = BodyFrame(program_names, training, place, is_stage=True, given=given, enqueued=recorded)
    recorder = frame.recorder

    def call(carried_values: list[Any], element_value: Any) -> list[Any]:
        with frames.frame(frame):
            return function(carried_values, element_value)

    try:
        with jax_compat.fresh_trace():
            closed_jaxpr = jax.make_jaxpr(call)(list(carried), element)
    except Exception as error:
        faults.add_note(error, place, given)
        raise
    if training and recorder.training_step is None and recorder.asks_for_training:
        raise _NoTrainingStepError
    _check_carried(carried, closed_jaxpr.out_avals, place)

    marked: dict[Any, list[Any]] = {}  # (primitive, index) -> the atoms that the marker takes

    def rule(equation: Any, atoms: list[Any], inline: jaxprs.InlineFunction) -> list[Any] | None:
        del inline
        if equation.primitive in (minimize_p, enqueue_p):
            key = (equation.primitive, equation.params.get("index"))
            if key in marked:
                raise ValueError(
                    f"{place}: {equation.primitive.name} is called in a function that JAX has traced once "
                    "and used twice, as it does with jax.jit. Call it outside of that function."
                )
            marked[key] = atoms
            return list(equation.outvars)
        for marker in (minimize_p, enqueue_p):
            if hoisting.contains(equation, (marker,)):
                raise ValueError(
                    f"{place}: {marker.name} is called inside the body of {equation.primitive.name}, where "
                    "it cannot be reached. Return the value from that body, and call it outside."
                )
        shards.refuse_inner_scopes(equation, place)
        return None

    closed_jaxpr, captured = jaxprs.lift_captures(closed_jaxpr)
    hoisted = hoisting.hoist(closed_jaxpr, place, program_names, rule)
    input_vars = hoisted.flat.inputs[len(hoisted.variables) + hoisted.uses_key :]
    captured_vars = input_vars[: len(captured)]
    carried_vars = input_vars[len(captured) : len(captured) + len(carried)]
    feed_vars = input_vars[len(captured) + len(carried) :]
    results = hoisted.flat.outputs[: len(carried)]
    changing = tuple(
        number
        for number, (before, after) in enumerate(zip(carried_vars, results, strict=True))
        if after is not before
    )
    constant_vars = [var for number, var in enumerate(carried_vars) if number not in changing]
    changing_vars = [carried_vars[number] for number in changing]
    sources = {var: Source("input", n) for n, var in enumerate([*captured_vars, *constant_vars])}
    sources |= {var: Source("element", n) for n, var in enumerate([*changing_vars, *feed_vars])}
    loss, read = None, []
    if recorder.minimized:
        # The step recorded last has the joint optimizer of all calls.
        marks = [marked[minimize_p, number] for number in range(len(recorder.minimized))]
        losses, read = [mark[0] for mark in marks], marks[-1][1:]
        loss = losses[0]
        if len(losses) > 1:
            names = [spec.name for spec in hoisted.variables]
            by_name = dict(zip(names, hoisted.flat.inputs[: len(names)], strict=True))
            assert recorder.training_step is not None
            trained = recorder.training_step.optimizer.trained
            frozen = [
                {by_name[name] for name in trained if name not in step.trained}
                for step in recorder.minimized
            ]
            flat, loss = jaxprs.join_losses(hoisted.flat, losses, frozen)
            hoisted = dataclasses.replace(hoisted, flat=flat)
    outputs = [*read, *(results[number] for number in changing)]
    enqueued = []
    for index, entry in enumerate(recorded):
        atoms = marked[enqueue_p, index]
        enqueued.append((entry, tuple(range(len(outputs), len(outputs) + len(atoms)))))
        outputs += atoms
    sharded = shards.split(hoisted, outputs, loss, sources, place)
    owners: dict[str, int] = {}  # a later stage that has the variable, too, only assigns it
    for index, stage in enumerate(sharded.stages):
        for spec in stage.variables:
            owners.setdefault(spec.name, index)
    avals = [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in outputs]
    pipeline = TracedPipeline(
        stages=sharded.stages,
        element=[jaxprs.aval_struct(var.aval) for var in [*changing_vars, *feed_vars]],
        inputs=tuple(jaxprs.aval_struct(var.aval) for var in [*captured_vars, *constant_vars]),
        output_tree=jax.tree.structure(avals),
        outputs=sharded.outputs,
        output_avals=tuple(avals),
        loss=sharded.loss,
        loss_avals=() if loss is None else (jax.ShapeDtypeStruct((), loss.aval.dtype),),
        owners=owners,
        levels=tuple(range(len(sharded.stages))),
    )
    return TracedBody(
        pipeline=pipeline,
        shards=sharded.shards,
        training=recorder.training_step,
        enqueued=tuple(enqueued),
        captured=tuple(captured),
        changing=changing,
        num_carried=len(carried),
    )


def _check_carried(before: Sequence[Any], after: Sequence[Any], place: str) -> None:
    described = [f"{aval.dtype.name}{list(aval.shape)}" for aval in after]
    if len(before) != len(after):
        raise ValueError(
            f"{place} must return as many values as it has inputs besides the feed, {len(before)}, since "
            f"they are the inputs of the next iteration; it returns {len(after)} "
            f"({', '.join(described) or 'none'})."
        )
    different = [
        f"input {number} is {old.dtype.name}{list(old.shape)}, and {described[number]} comes back"
        for number, (old, new) in enumerate(zip(before, after, strict=True))
        if old.shape != new.shape or old.dtype != new.dtype
    ]
    if different:
        raise ValueError(
            f"{place} must return its inputs' shapes and dtypes, since they are the inputs of the next "
            f"iteration; {'; '.join(different)}."
        )


def look_at_body(function: Callable[[], Any], names: frames.ProgramNames, place: str) -> None:
    """Calls a function as the body of a loop, then forgets all names that it took."""

    def body(_carried: list[Any], _element: Any) -> list[Any]:
        function()
        return []

    with frames.unchanged(names):
        trace_body(body, [], None, names, place)


def trace_condition(
    cond: Callable[..., Any], tree: Any, avals: Sequence[jax.ShapeDtypeStruct], what: str
) -> Callable[[list[Any]], Any]:
    """Traces the condition once. Returns it as a function of the carried values."""
    frame = frames.Frame(frames.ProgramNames(), False, f"the condition of {what}", is_stage=False)

    def call(*values: Any) -> Any:
        with frames.frame(frame):
            return cond(*jax.tree.unflatten(tree, values))

    closed_jaxpr = jax.make_jaxpr(call)(*avals)
    results = closed_jaxpr.out_avals
    if len(results) != 1 or results[0].shape != () or results[0].dtype != np.bool_:
        described = ", ".join(f"{aval.dtype.name}{list(aval.shape)}" for aval in results)
        raise ValueError(
            f"{what}: condition must return a boolean scalar; it returned {described or 'nothing'}."
        )
    Captures().check(closed_jaxpr.consts, frame.place)
    used = [*frame.names.host_tables, *frame.names.variables]
    if used:
        raise ValueError(
            f"{what}: condition asks for variable {used[0]}, but may only use "
            "the inputs. Let the body return what the condition needs."
        )
    evaluate = jax_core.jaxpr_as_fun(closed_jaxpr)
    return lambda carried: evaluate(*carried)[0]

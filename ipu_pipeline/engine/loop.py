"""Loops on devices: a body that is traced once and runs again and again, with training steps."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np

from ipu_pipeline.engine import jaxprs, loop_markers, peers, watching
from ipu_pipeline.engine.building import Built, Recipe
from ipu_pipeline.engine.devices.device_groups import absent
from ipu_pipeline.engine.devices.feeds import Take, take_nothing
from ipu_pipeline.engine.devices.links import check_peers, naming_peers
from ipu_pipeline.engine.devices.placement import put_host_copies
from ipu_pipeline.engine.execution import agreement
from ipu_pipeline.engine.execution.agreement import agree_on, answer_everywhere, describe_programs
from ipu_pipeline.engine.execution.contract import Iterated, Request
from ipu_pipeline.engine.execution.observation import rehearse
from ipu_pipeline.engine.loop_markers import BodyFrame, TrainingStep, minimize_p
from ipu_pipeline.engine.option_types import ONE_BY_ONE, Chunking, Offload, Recomputation, Reduction, Shard
from ipu_pipeline.engine.pipeline import Pipeline
from ipu_pipeline.engine.pipeline_options import PipelineOptions
from ipu_pipeline.engine.programs import differentiation
from ipu_pipeline.engine.programs.accumulation import make_collecting
from ipu_pipeline.engine.programs.stage_programs import StagePrograms
from ipu_pipeline.engine.segments import in_every_process
from ipu_pipeline.engine.state import Collected, OfReplicas, PipelineState, Progress, of_replica
from ipu_pipeline.engine.tracing import faults, frames, hoisting
from ipu_pipeline.engine.tracing.captures import Captures
from ipu_pipeline.engine.tracing.faults import describe_arguments
from ipu_pipeline.engine.tracing.frames import Enqueued, ProgramNames
from ipu_pipeline.engine.tracing.side_outputs import MetricReader, enqueue_p
from ipu_pipeline.engine.tracing.stages import Source, TracedPipeline, as_arguments, check_signature
from ipu_pipeline.engine.updates.update_programs import cut_updates
from ipu_pipeline.ground import jax_compat, jax_core

# Tracing a body.

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
    argument_text: str = "",
) -> TracedBody:
    """Traces a body. Does not start a JAX backend."""
    try:
        with frames.unchanged_on_error(program_names):
            return _trace(function, carried, element, program_names, place, argument_text, training=True)
    except _NoTrainingStepError:
        pass  # the second trace tells layers that there is none
    with frames.unchanged_on_error(program_names):
        return _trace(function, carried, element, program_names, place, argument_text, training=False)


def _trace(
    function: BodyFunction,
    carried: Sequence[jax.ShapeDtypeStruct],
    element: Any,
    program_names: frames.ProgramNames,
    place: str,
    argument_text: str,
    training: bool,
) -> TracedBody:
    recorded: list[Enqueued] = []
    frame = BodyFrame(program_names, training, place, is_stage=True, given=argument_text, enqueued=recorded)
    recorder = frame.recorder

    def call(carried_values: list[Any], element_value: Any) -> list[Any]:
        with frames.frame(frame):
            return function(carried_values, element_value)

    # The trace.
    try:
        with jax_compat.fresh_trace():
            closed_jaxpr = jax.make_jaxpr(call)(list(carried), element)
    except Exception as error:
        faults.add_note(error, place, argument_text)
        raise
    if training and recorder.training_step is None and recorder.asks_for_training:
        raise _NoTrainingStepError
    _check_carried(carried, closed_jaxpr.out_avals, place)

    # The markers, whose operands become outputs.
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
        loop_markers.refuse_inner_scopes(equation, place)
        return None

    closed_jaxpr, captured = jaxprs.lift_captures(closed_jaxpr)
    hoisted = hoisting.hoist(closed_jaxpr, place, program_names, rule)
    # The inputs: what changes from iteration to iteration is the micro-batch.
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
    # The loss: several calls of `minimize` are one step. The step recorded last has their joint optimizer.
    loss, optimizer_inputs = None, []
    if recorder.minimized:
        marks = [marked[minimize_p, number] for number in range(len(recorder.minimized))]
        losses, optimizer_inputs = [mark[0] for mark in marks], marks[-1][1:]
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
    # The outputs, and the stages.
    outputs = [*optimizer_inputs, *(results[number] for number in changing)]
    enqueued = []
    for index, entry in enumerate(recorded):
        atoms = marked[enqueue_p, index]
        enqueued.append((entry, tuple(range(len(outputs), len(outputs) + len(atoms)))))
        outputs += atoms
    sharded = loop_markers.split(hoisted, outputs, loss, sources, place)
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
    cond: Callable[..., Any], tree: Any, avals: Sequence[jax.ShapeDtypeStruct], caller: str
) -> Callable[[list[Any]], Any]:
    """Traces the condition once. Returns it as a function of the carried values."""
    frame = frames.Frame(frames.ProgramNames(), False, f"the condition of {caller}", is_stage=False)

    def call(*values: Any) -> Any:
        with frames.frame(frame):
            return cond(*jax.tree.unflatten(tree, values))

    closed_jaxpr = jax.make_jaxpr(call)(*avals)
    results = closed_jaxpr.out_avals
    if len(results) != 1 or results[0].shape != () or results[0].dtype != np.bool_:
        described = ", ".join(f"{aval.dtype.name}{list(aval.shape)}" for aval in results)
        raise ValueError(
            f"{caller}: condition must return a boolean scalar; it returned {described or 'nothing'}."
        )
    Captures().check(closed_jaxpr.consts, frame.place)
    names = [*frame.names.host_tables, *frame.names.variables]
    if names:
        raise ValueError(
            f"{caller}: condition asks for variable {names[0]}, but may only use "
            "the inputs. Let the body return what the condition needs."
        )
    evaluate = jax_core.jaxpr_as_fun(closed_jaxpr)
    return lambda carried: evaluate(*carried)[0]


# Running it.

_NEVER = 2**31 - 1  # iterations per weight update of a loop that does not train


class Loop(Pipeline):
    """A traced body as a pipeline whose micro-batches are iterations that hand values on.

    With all its operations on one device, its runner runs a block of iterations as one program. With
    several shards, it runs one iteration, shard after shard; with several replicas, one iteration of each.
    State that goes in is gone afterwards: its memory is reused.
    """

    # Replicas run as a pipeline's do. One program under `jax.shard_map`, with the all-reduce inside, would
    # save dispatches, but need conditions, assigned variables and ends of data of its own.

    def __init__(
        self,
        body: TracedBody,
        condition: Callable[[list[Any]], Any] | None = None,
        block_bytes: int = 64 * 2**20,
    ) -> None:
        """Builds the programs. Does not start JAX's backend."""
        self.body, training, shards = body, body.training, body.shards
        self._condition = condition
        self._goes_on = None if condition is None else jax.jit(self._holds)
        options = PipelineOptions(
            num_micro_batches=1,
            schedule="sequential",
            donate=True,
            block_bytes=block_bytes,
            reduction=Reduction.MEAN if training is None else training.reduction,
            offload=[Offload.WEIGHT_UPDATE_VARIABLES] if training and training.offloads_state else [],
            shard=[Shard.OPTIMIZER_STATE] if training and training.shards_state else [],
        )
        self._begin(Recipe((), shards, options), range(len(shards)), training is not None)
        self.timetable = dataclasses.replace(self.timetable, of_any_number=self.timetable(1))
        self._built = self._build()
        self.programs = self._built.programs
        first, last = body.num_read, body.num_read + len(body.changing)
        condition_of_values = None if condition is None else self._holds
        self.iterated = Iterated(body.pipeline.outputs[first:last], condition_of_values)

    @classmethod
    def of_body(
        cls,
        body: Callable[..., Any],
        inputs: Sequence[Any],
        element: Any,
        names: ProgramNames,
        place: str,
        returned: Callable[[Any], list[Any]],
        condition: Callable[..., Any] | None = None,
        what: str = "a loop",
    ) -> Loop:
        """Traces a body, and the condition of a loop that ends by itself."""
        avals, tree = jax.tree.flatten(tuple(inputs))
        fed_args, fed_kwargs = as_arguments(element)
        arguments = (*inputs, *fed_args)
        check_signature(body, (arguments, fed_kwargs), "the inputs and the infeed's element", place)

        def call(carried: list[Any], fed: Any) -> list[Any]:
            args, kwargs = as_arguments(fed)
            return returned(body(*jax.tree.unflatten(tree, carried), *args, **kwargs))

        argument_text = describe_arguments(body, arguments, fed_kwargs)
        traced = trace_body(call, avals, element, names, place, argument_text)
        return cls(traced, None if condition is None else trace_condition(condition, tree, avals, what))

    def _build(self) -> Built:
        body, training = self.body, self.body.training
        traced, updates = body.pipeline, None
        if training is not None:
            homes = {name: body.shards.index(body.shards[stage]) for name, stage in traced.owners.items()}
            updates = cut_updates(training.optimizer, homes, len(body.shards) - 1)
        is_enqueued = [
            number >= body.num_read + len(body.changing) for number in range(len(traced.outputs))
        ]

        def make_programs(recompute: Recomputation | None) -> tuple[StagePrograms, ...]:
            del recompute  # only one iteration is in flight
            if training is None:
                return differentiation.build(traced, (), Reduction.SUM)
            return differentiation.build(
                traced,
                training.optimizer.trained,
                training.reduction,
                training.gradient_map,
                is_scaled=updates is not None and updates.loss_scale is not None,
            )

        return Built(
            traced,
            updates,
            {} if training is None else training.accumulator_dtypes,
            make_collecting(traced, lambda _outputs: is_enqueued, losses=False),
            make_programs(None),
            make_programs,
            MetricReader.find((), ()),
            {},
        )

    @property
    def has_condition(self) -> bool:
        """Whether the loop ends by itself."""
        return self._condition is not None

    @property
    def dispatch_plan(self) -> Chunking | None:
        """The dispatch plan, of one iteration per program; None on one device."""
        return None if self.is_one_program else ONE_BY_ONE

    def updated_every(self, num_micro_batches: int | None = None) -> int:
        """Iterations per weight update; without training, more than any run has."""
        del num_micro_batches
        return _NEVER if self.body.training is None else self.body.training.num_mini_batches

    def _agree(self, devices: Sequence[Any]) -> None:
        """Checks that all processes of the run have the same loop."""
        training = self.body.training
        if training is None:
            settings = "no training"
        else:
            settings = (
                f"{training.num_mini_batches} mini-batches, {training.reduction.name}, offloaded: "
                f"{training.offloads_state}, shared out: {training.shards_state}"
            )
        texts = {
            "the number of replicas": str(self.num_replicas),
            "the shards": str(list(self.body.shards)),
            "the training step": settings,
        }
        pipeline, updates = self.body.pipeline, self.built.updates
        agree_on("loop", lambda: {**texts, **describe_programs(pipeline, updates)}, devices)

    def place(self, state: PipelineState) -> PipelineState:
        """Puts a state on the devices of the loop's shards."""
        return self.prepare().place(state, self.built.accumulator_dtypes)

    def split_carried(self, carried: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Splits the carried values into those that stay the same and those that change."""
        changing = set(self.body.changing)
        constant = [value for number, value in enumerate(carried) if number not in changing]
        return constant, [carried[number] for number in self.body.changing]

    def join_carried(self, constant: Sequence[Any], changing: Sequence[Any]) -> list[Any]:
        """The inverse of `split_carried`."""
        unchanged, changed = iter(constant), iter(changing)
        numbers = range(self.body.num_carried)
        return [next(changed if number in self.body.changing else unchanged) for number in numbers]

    def absent_carried(self) -> list[Any]:
        """Stand-ins for the carried values after iterations, in a process without devices of the loop."""
        runner, first = self.prepare(), self.body.num_read
        avals = self.body.pipeline.output_avals[first : first + len(self.body.changing)]
        groups = [home.groups[-1] for home in runner.homes]
        carried = [[absent(aval.shape, aval.dtype, group.replicated) for group in groups] for aval in avals]
        if len(groups) == 1:
            return [value for (value,) in carried]
        return [OfReplicas(tuple(values)) for values in carried]

    @property
    def has_part(self) -> bool:
        """Whether this process has a device of the loop; a process that runs alone does."""
        return agreement.has_part(self.prepare())

    def num_fetched_by(self, total: int) -> int:
        """The least number of elements that all replicas fetch ahead if `total` iterations run together."""
        return self.prepare().num_fetched(total, self.updated_every())

    def iterate(
        self,
        state: PipelineState,
        take: Take | None,
        captured: Sequence[Any],
        carried: Sequence[Any],
        on_iterations: Callable[[Progress, int], Any],
        on_settled: Callable[[PipelineState], Any],
        count: int | None,
        total: int,
        *,
        replacing: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        give_back: Callable[[], Any] = lambda: None,
    ) -> list[Any]:
        """Runs iterations, several together where that is possible.

        After an error, the state is the one last passed to `on_iterations`.

        Returns:
          The carried values after the last iteration, readable in each process.
        """
        runner, counter, num_per_update = self.prepare(), agreement.Done(), self.updated_every()
        constant, changing = self.split_carried(carried)
        inputs = [*captured, *constant]
        most = self.num_fetched_by(total) // self.num_replicas
        if (watcher := watching.current()) is not None:
            limit = most if count is None else min(most, count)
            rehearse(watcher, runner, state, Request(inputs, num_per_update, limit, total, changing))

        def settle(state: PipelineState) -> PipelineState:
            """Joins what the replicas still have separately."""
            # Not after each iteration: that would be an all-reduce where accumulation is to save it.
            if counter.count:
                with replacing():
                    state = runner.settle(state)
                    on_settled(state)
            return state

        if not self.has_part:
            try:
                agreement.hear_end(runner, counter)
            finally:
                settle(agreement.skip_iterations(runner, state, counter.count, num_per_update))
            changing = self.absent_carried() if counter.count else changing
            return self.join_carried(constant, in_every_process(changing))
        with agreement.telling_end(runner, counter), naming_peers():
            try:
                while (count is None or counter.count < count) and self.goes_on(inputs, changing):
                    limit = most if count is None else min(most, count - counter.count)
                    request = Request(inputs, num_per_update, limit, total, changing, counter.count)
                    pending = runner.fetch(state, request, take or take_nothing)
                    with replacing():
                        progress = runner.run(state, pending)
                        state, changing = progress.state, progress.carried
                        counter.count += progress.count
                        on_iterations(progress, pending.count - progress.count)
                    if pending.count > progress.count:
                        give_back()
            except BaseException as error:
                if not peers.is_of_collective(error):
                    with contextlib.suppress(Exception):  # the first error is the one to tell
                        check_peers()  # a process that has ended does not settle
                        settle(state)
                raise
            state = settle(state)
            jax.block_until_ready((state.variables, state.optimizer_state))
        return self.join_carried(constant, in_every_process(changing))

    def goes_on(self, inputs: Sequence[Any], changing: Sequence[Any]) -> bool:
        """Whether the condition holds; True without one. Waits for the values."""
        if self._goes_on is None:
            return True
        runner = self.prepare()
        conditions, groups = [], [home.groups[0] for home in runner.homes]
        for replica, (placement, group) in enumerate(zip(runner.homes, groups, strict=True)):
            if placement.has_peers:
                placement.begin_step()
            passed = ("inputs of the condition", inputs), ("carried values of the condition", changing)
            placed = [
                put_host_copies(
                    [of_replica(value, replica) for value in values], group, tag=placement.tag(name)
                )
                for name, values in passed
            ]
            if group.is_here:
                conditions.append(jax.device_put(self._goes_on(*placed), group.replicated))
            else:
                conditions.append(absent((), np.dtype(bool), group.replicated))
        homes = [group.devices[0] for group in groups]
        answers = answer_everywhere(runner.placement, conditions, homes)
        if len(set(answers)) > 1:
            going_on = [replica for replica, answer in enumerate(answers) if answer]
            raise ValueError(
                "ipu.loops.while_loop: condition must give the same in all replicas, which train and "
                f"compute together; it is True in replicas {going_on} of {len(answers)} only. Let it "
                "depend on what is the same in all, such as what cross_replica_ops.cross_replica_mean "
                "gives."
            )
        return answers[0]

    def _holds(self, inputs: list[Any], changing: list[Any]) -> Any:
        assert self._condition is not None
        return self._condition(self.join_carried(inputs[len(self.body.captured) :], changing))

    def split_enqueued(self, collected: Collected) -> list[list[Any]]:
        """Splits what is collected into what is enqueued, per entry of the body's `enqueued`."""
        first = self.body.num_read + len(self.body.changing)
        return [
            [collected.outputs[place - first] for place in places] for _entry, places in self.body.enqueued
        ]

"""Computes a step op by op: for a debugger, or to find the operation that made a nan.

The programs are those of the stages and of the weight update, as they are before XLA compiles them; each is
evaluated an equation at a time on the devices of its stage, micro-batch by micro-batch, without a schedule.
So a step has the same values as from a runner, to rounding, and whatever is found in it has a stage, a
direction, a micro-batch and a line.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.engine.building import Built
from ipu_pipeline.engine.devices.device_groups import DeviceGroup
from ipu_pipeline.engine.devices.placing import put
from ipu_pipeline.engine.execution.contract import Runner
from ipu_pipeline.engine.jaxprs import FlatJaxpr, flatten
from ipu_pipeline.engine.jaxprs.op_by_op import Evaluated, evaluate, find_nan, has_nan
from ipu_pipeline.engine.programs.bindings import Binding, BindingKind, Bindings
from ipu_pipeline.engine.programs.stage_programs import StageProgram, StagePrograms, ValueKind
from ipu_pipeline.engine.state import Handed, PipelineState, Progress, RunState
from ipu_pipeline.engine.tracing.faults import find_line
from ipu_pipeline.engine.tracing.keys import as_int32, micro_batch_key
from ipu_pipeline.engine.tracing.traced import Source, TracedPipeline
from ipu_pipeline.engine.updates.accumulators import variable_of
from ipu_pipeline.engine.updates.environment import UpdateCounts, UpdateEnvironment
from ipu_pipeline.engine.updates.optimizer_tracing import UpdateKind
from ipu_pipeline.ground.jax_compat import scope_names

__all__ = ["Replay", "Visit", "find_nans"]


class Traced(Protocol):
    """What a replay needs to know of the pipeline for some shapes of micro-batches."""

    programs: tuple[StagePrograms, ...]

    @property
    def built(self) -> Built:
        """The stages, and what is collected."""


@dataclass(frozen=True, eq=False)
class Visit:
    """A micro-batch whose turn has come."""

    number: int  # its number among those that the step was given
    replica: int  # the replica that it is for
    leaves: Sequence[Any]  # its leaves
    key: Any  # the random key that its own are folded from
    variables: Mapping[str, Any]  # full name -> value, in the replica


@dataclass(frozen=True, eq=False)
class _Made:
    """Where a value comes from: a result of a program that was evaluated."""

    stage: int
    words: str
    evaluated: Evaluated
    arguments: Sequence[Binding]
    place: int


@dataclass(eq=False)
class _Replica:
    """What a replica has so far."""

    key: Any
    variables: dict[str, Any]
    accumulators: dict[str, Any]
    collected: list[list[Any]] = field(default_factory=list)
    enqueued: list[list[Any]] = field(default_factory=list)
    outputs: list[list[Any]] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Replay:
    """A step that is computed op by op."""

    runner: Runner[Any]  # its placement says where stages are
    find: Callable[[Sequence[Any]], Traced]  # the pipeline for a micro-batch's shapes, from its leaves
    state: PipelineState  # the state before, placed
    micro_batches: Sequence[Sequence[Any]]  # the leaves of all micro-batches, of all replicas
    inputs: Sequence[Any]  # the leaves of the inputs
    accumulator_dtypes: Mapping[str, Any]
    has_identical_keys: bool = False  # whether all replicas draw the same random keys
    has_nan_checks: bool = False  # whether a nan in a result of a micro-batch or update is an error
    visit: Callable[[Visit], None] | None = None  # called for each micro-batch before its programs
    _flat: dict[int, FlatJaxpr] = field(default_factory=dict)  # by the program's identity

    def on(
        self, micro_batches: Sequence[Sequence[Any]], visit: Callable[[Visit], None] | None = None
    ) -> Replay:
        """The replay of a step with some micro-batches, each its leaves."""
        return dataclasses.replace(self, micro_batches=micro_batches, visit=visit)

    def run(self) -> Progress:
        """Computes the step.

        Raises:
          FloatingPointError: a result has a nan, and that is an error.
        """
        number = len(self.runner.homes)
        parts = [self._begin(replica) for replica in range(number)]
        for index, leaves in enumerate(self.micro_batches):
            replica = index % number
            self._run_micro_batch(parts[replica], index, replica, index // number, leaves)
        return self._finish(parts, len(self.micro_batches) // number)

    @property
    def _groups(self) -> Sequence[DeviceGroup]:
        return self.runner.homes[0].groups

    def _begin(self, replica: int) -> _Replica:
        key, placement = self.state.key, self.runner.placement
        if len(self.runner.homes) > 1 and not self.has_identical_keys:
            key = jax.random.fold_in(key, np.uint32(replica))
        plan, specs = placement.accumulator_plan, placement.traced.variables
        zeros = {
            own: np.zeros(specs[variable_of(own)].shape, self.accumulator_dtypes[variable_of(own)])
            for own in plan.keys.values()
        }
        return _Replica(key, dict(self.state.variables), zeros)

    def _run_micro_batch(
        self, part: _Replica, number: int, replica: int, index: int, leaves: Sequence[Any]
    ) -> None:
        pipeline = self.find(leaves)
        traced, programs = pipeline.built.traced, pipeline.programs
        count = jnp.int32(as_int32(self.state.execution_count))
        if self.visit is not None:
            key = micro_batch_key(part.key, count, jnp.int32(index))
            self.visit(Visit(number, replica, leaves, key, part.variables))
        known = {Binding(BindingKind.VARIABLE, name): value for name, value in part.variables.items()}
        known |= {Binding(BindingKind.ACCUMULATOR, k): value for k, value in part.accumulators.items()}
        known |= {Binding(BindingKind.INPUT, place): value for place, value in enumerate(self.inputs)}
        known |= {
            Binding(BindingKind.VALUE, Source("element", place)): value
            for place, value in enumerate(leaves)
        }
        scalars = {
            ValueKind.KEY: part.key,
            ValueKind.EXECUTION_COUNT: count,
            ValueKind.UPDATE_COUNT: jnp.int32(as_int32(self.state.update_count)),
            ValueKind.MICRO_BATCH: jnp.int32(index),
            ValueKind.ACCUMULATED: jnp.int32(index),
            ValueKind.LOSS_SCALE: self._find_loss_scale(),
        }
        known |= {Binding(BindingKind.SCALAR, kind): value for kind, value in scalars.items()}
        bindings = Bindings(traced, self.runner.placement.accumulator_plan.keys)
        made: dict[Binding, _Made] = {}
        where = f"micro-batch {number}" + (f" (of replica {replica})" if len(self.runner.homes) > 1 else "")
        order = [(stage, "forward", own.forward) for stage, own in enumerate(programs)]
        order += [
            (stage, "backward", program)
            for stage, own in reversed(list(enumerate(programs)))
            for program in own.backwards
        ]
        for stage, words, program in order:
            self._call(bindings, stage, words, program, known, made)

        def find(source: Source) -> Binding:
            return (
                Binding(BindingKind.INPUT, source.index)
                if source.kind == "input"
                else Binding(BindingKind.VALUE, source)
            )

        enqueued = [Binding(BindingKind.ENQUEUED, leaf) for leaf in range(len(traced.enqueued_avals))]
        collected = list(map(find, pipeline.built.collecting.sources))
        if self.has_nan_checks:
            own = [one for one in made if one.kind in (BindingKind.ACCUMULATOR, BindingKind.ASSIGNED)]
            loss = [] if traced.loss is None else [find(traced.loss)]
            for binding in (*loss, *collected, *enqueued, *own):
                if binding in made and has_nan(known[binding]):
                    raise self._explain(traced, binding, made, where)
        part.collected.append([known[binding] for binding in collected])
        part.outputs.append([known[find(source)] for source in traced.outputs])
        part.enqueued.append([known[binding] for binding in enqueued])
        part.accumulators = {key: known[Binding(BindingKind.ACCUMULATOR, key)] for key in part.accumulators}
        part.variables |= {
            binding.key: value for binding, value in known.items() if binding.kind is BindingKind.ASSIGNED
        }

    def _call(
        self,
        bindings: Bindings,
        stage: int,
        words: str,
        program: StageProgram,
        known: dict[Binding, Any],
        made: dict[Binding, _Made],
    ) -> None:
        """Evaluates a program on what is known, which then has its results."""
        arguments = bindings.arguments(stage, program)
        values = self._put([known[binding] for binding in arguments], stage)
        evaluated = self._evaluate(program.function, values)
        for place, (bound, result) in enumerate(
            zip(bindings.results(stage, program), evaluated.results, strict=True)
        ):
            for binding in bound:
                known[binding] = result
                made[binding] = _Made(stage, words, evaluated, arguments, place)

    def _put(self, values: Sequence[Any], stage: int) -> list[Any]:
        return put(values, self._groups[stage])

    def _evaluate(self, function: Callable[..., list[Any]], values: Sequence[Any]) -> Evaluated:
        flat = self._flat.get(id(function))
        if flat is None:
            flat = self._flat[id(function)] = flatten(jax.make_jaxpr(function)(*values))
        return evaluate(flat, values)

    def _explain(
        self, traced: TracedPipeline, binding: Binding, made: Mapping[Binding, _Made], where: str
    ) -> FloatingPointError:
        """The error for a nan in a micro-batch's value: where it was made, or who gave it."""
        while binding in made:
            own = made[binding]
            origin = find_nan(own.evaluated, own.evaluated.flat.outputs[own.place])
            if origin.equation is not None or origin.argument < 0:
                words = own.words
                if origin.equation is not None and _is_of_backward(origin.equation):
                    words = "backward"  # which the last stage does with its forward
                return _make_error(origin.equation, f"{traced.stages[own.stage].place}, {words}, {where}")
            binding = own.arguments[origin.argument]
            if binding.kind is BindingKind.ACCUMULATOR:  # all later ones have it, too
                break
        return FloatingPointError(
            f"A nan came with {_describe(binding)}; found in {where}, before any operation made one."
        )

    def _find_loss_scale(self) -> Any:
        updates = self.runner.placement.updates
        if updates is None or updates.loss_scale is None or self.state.optimizer_state is None:
            return jnp.float32(1)
        return jax.tree.leaves(self.state.optimizer_state)[updates.loss_scale.leaf]

    def _finish(self, parts: Sequence[_Replica], every: int) -> Progress:
        """Does the weight update, and makes the step's progress."""
        runner, updates = self.runner, self.runner.placement.updates
        first = parts[0]
        variables = dict(self.state.variables)
        for name in runner.assigned:
            variables[name] = _mean([part.variables[name] for part in parts])
        accumulators = {
            key: _mean([part.accumulators[key] for part in parts]) for key in first.accumulators
        }
        state = RunState(dataclasses.replace(self.state, variables=variables), {})
        leaves: list[Any] = []
        updated: list[Handed] = []
        if updates is not None:
            state = runner.with_optimizer(state, dict(enumerate(first.outputs[0])))
            leaves = jax.tree.leaves(state.pipeline.optimizer_state)
            environment = self._update(state.pipeline, leaves, accumulators, first.outputs[-1], every)
            variables |= environment.variables
            leaves = environment.state_leaves
            enqueued = [environment.enqueued[number] for number in range(len(environment.enqueued))]
            updated = [Handed(enqueued, None)] if enqueued else []
        collecting = self.find(self.micro_batches[0]).built.collecting if self.micro_batches else None
        joined = [list(map(_stack, *some)) for some in _across([part.collected for part in parts])]
        if collecting is not None and collecting.is_summed and joined:
            avals = collecting.avals
            wide = [[v.astype(a.dtype) for v, a in zip(own, avals, strict=True)] for own in joined]
            joined = [[sum(values[1:], values[0]) for values in zip(*wide, strict=True)]]
        handed = [list(map(_stack, *some)) for some in _across([part.enqueued for part in parts])]
        return Progress(
            runner.advance(state, variables, leaves, {}, every, every),
            [],
            [] if collecting is None else [collecting.collect(values, None) for values in joined],
            len(self.micro_batches),
            [Handed(values, None) for values in handed],
            updated,
        )

    def _update(
        self,
        state: PipelineState,
        leaves: list[Any],
        accumulators: Mapping[str, Any],
        outputs: Sequence[Any],
        every: int,
    ) -> UpdateEnvironment:
        placement = self.runner.placement
        updates = placement.updates
        assert updates is not None

        def add(accumulator: Any, total: Any, part: Any) -> Any:
            total, part = self._put([total, part], placement.traced.owners[accumulator.variable])
            return total + part.astype(total.dtype)

        merged = placement.accumulator_plan.merge(accumulators, add)
        counts = UpdateCounts(jnp.int32(every), jnp.int32(as_int32(state.update_count)))
        environment = UpdateEnvironment(state.variables, merged, leaves, outputs, counts)
        made: dict[Any, tuple[Evaluated, int, Sequence[Any]]] = {}
        for program in updates.updates:
            values = self._put([environment[value] for value in program.arguments], program.stage)
            evaluated = self._evaluate(program.function, values)
            for place, (value, result) in enumerate(zip(program.results, evaluated.results, strict=True)):
                environment[value] = result
                made[value] = evaluated, place, program.arguments
        if self.has_nan_checks:
            wanted = (UpdateKind.PARAMETER, UpdateKind.STATE, UpdateKind.ENQUEUED)
            for value, (evaluated, place, _arguments) in list(made.items()):
                if value.kind in wanted and has_nan(evaluated.results[place]):
                    raise _explain_update(value, made, updates.state_leaves)
        return environment


def find_nans(progress: Progress) -> str:
    """Describes a part of a step's results that has a nan; "" if none has one. Waits for them."""
    state = progress.state.pipeline
    named = [("the loss", part.loss) for part in progress.collected]
    named += [
        ("what the last stage returned", leaf) for part in progress.collected for leaf in part.outputs
    ]
    handed = [*progress.enqueued, *progress.updated]
    named += [("what was enqueued", leaf) for part in handed for leaf in part.leaves]
    named += [(f"variable {name}", value) for name, value in state.variables.items()]
    named += [("the optimizer's state", leaf) for leaf in jax.tree.leaves(state.optimizer_state)]
    is_nan = [
        (what, jnp.isnan(value).any())
        for what, value in named
        if value is not None and jnp.issubdtype(value.dtype, jnp.inexact)
    ]  # all are started before the first one is waited for
    return next((what for what, answer in is_nan if answer), "")


def _explain_update(
    value: Any, made: Mapping[Any, tuple[Evaluated, int, Sequence[Any]]], state_leaves: Sequence[Any]
) -> FloatingPointError:
    """The error for a nan in a result of the weight update."""

    def describe(value: Any) -> str:
        kinds = {UpdateKind.PARAMETER: "variable", UpdateKind.GRADIENT: "the gradient of"}
        if value.kind in kinds:
            return f"{kinds[value.kind]} {value.key}"
        if value.kind == UpdateKind.STATE:
            return f"the optimizer's state {state_leaves[value.key].path}"
        return "a value of the last stage" if value.kind == UpdateKind.OUTPUT else "a value"

    of = describe(value)
    seen: set[Any] = set()
    while value in made and value not in seen:
        seen.add(value)
        evaluated, place, arguments = made[value]
        origin = find_nan(evaluated, evaluated.flat.outputs[place])
        if origin.equation is not None or origin.argument < 0:
            return _make_error(origin.equation, f"the weight update of {of}")
        value = arguments[origin.argument]
        if value.kind != UpdateKind.SENT:  # it was there before the update
            break
    return FloatingPointError(f"A nan came with {describe(value)} to the weight update of {of}.")


def _is_of_backward(equation: Any) -> bool:
    return any(name.startswith("transpose") for name in scope_names(equation))


def _make_error(equation: Any, place: str) -> FloatingPointError:
    if equation is None:
        return FloatingPointError(f"invalid value (nan) in a constant of {place}.")
    line = find_line(equation)
    at = f"\n  at {line}" if line else ""
    return FloatingPointError(f"invalid value (nan) encountered in {equation.primitive.name}: {place}{at}")


def _describe(binding: Binding) -> str:
    """What a nan came with that no operation of the step made."""
    if binding.kind is BindingKind.VARIABLE:
        return f"variable {binding.key}"
    if binding.kind is BindingKind.VALUE:
        return f"leaf {binding.key.index} of the micro-batch"
    if binding.kind is BindingKind.INPUT:
        return f"leaf {binding.key} of the inputs"
    return "the accumulated gradients" if binding.kind is BindingKind.ACCUMULATOR else "a count or scale"


def _across(parts: Sequence[Sequence[list[Any]]]) -> list[list[list[Any]]]:
    """For each micro-batch of a replica, the leaves in all replicas."""
    return [list(some) for some in zip(*parts, strict=True)]


def _stack(*values: Any) -> Any:
    return values[0] if len(values) == 1 else jnp.stack(_together(values))


def _mean(values: Sequence[Any]) -> Any:
    """The mean over replicas of floating-point numbers; of others, the first replica's value."""
    if len(values) == 1 or not jnp.issubdtype(values[0].dtype, jnp.floating):
        return values[0]
    together = _together(values)
    return sum(together[1:], together[0]) / len(together)


def _together(values: Sequence[Any]) -> list[Any]:
    """The values where the first one is."""
    sharding = getattr(values[0], "sharding", None)
    return list(values) if sharding is None else [jax.device_put(value, sharding) for value in values]

"""A compiled program: an ordered list of jitted segments, pipelines and loops."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core as jex_core

from ipu_pipeline.engine import jaxprs
from ipu_pipeline.engine.planning.dispatch_plans import DispatchPlan
from ipu_pipeline.engine.tracing import frames, hoisting
from ipu_pipeline.engine.tracing.specs import VariableSpec
from ipu_pipeline.ground import jax_compat
from ipu_pipeline.ground.errors import without_traceback_note
from ipu_pipeline.processes import selection
from ipu_pipeline.queues.infeed import IPUInfeedQueue
from ipu_pipeline.queues.operations import Operation
from ipu_pipeline.reports.programs import Placement, ProgramSummary
from ipu_pipeline.tf1.graph.internal_variables import is_internal
from ipu_pipeline.tf1.graph.placeholders import Placeholder, live_placeholders, standing
from ipu_pipeline.tf1.graph.symbols import Symbol
from ipu_pipeline.tf1.program.calls import Call, PipelineCall, ProgramBuilder, building, run_call_p
from ipu_pipeline.tf1.program.host_tables import HostTable, check_tables
from ipu_pipeline.tf1.program.outputs import Output

__all__ = ["CallStep", "Program", "Segment", "build_program", "read_atom", "returned_values"]


class CallStep(NamedTuple):
    """A pipeline or loop, the atoms that it takes, and the jaxpr variables that it returns."""

    call: Call
    operands: list[Any]
    results: list[Any]


@dataclass(frozen=True, eq=False)
class Segment:
    """Equations between two calls, jitted.

    Attributes:
      function: the jitted equations.
      arguments: the jaxpr variables that it takes.
      results: the jaxpr variables that it returns.
      reads: which of the arguments are variables, read from the session just before.
    """

    function: Callable[..., list[Any]]
    arguments: list[Any]
    results: list[Any]
    reads: dict[Any, VariableSpec]


class Program:
    """What `ipu_compiler.compile` returns, for `Session.run`. It is data; `session.running` runs it.

    It is also the sequence of the values that the compiled function returns, each of which can be run, as
    in TensorFlow 1: `(loss,) = compile(...)`, `session.run(compiled[0])`. If the function returns a dict,
    the values are found by its keys.

    Attributes:
      steps: segments, pipelines and loops, in the order in which they run.
      input_vars: the jaxpr variables of its inputs.
      constants: the jaxpr variables that stand for constant arrays, with their values.
      result_tree: the structure of what `Session.run` returns: a list, a dict or another pytree of leaves;
        without leaves if the function returns operations or nothing.
      result_atoms: the atoms of its leaves.
      host_tables: the tables in host memory that it looks up.
    """

    def __init__(
        self,
        ipu_device: int,
        inputs: Sequence[Placeholder | np.ndarray[Any, Any]],
        input_vars: Sequence[Any],
        steps: Sequence[Segment | CallStep],
        result_tree: Any,
        result_atoms: Sequence[Any],
        constants: Mapping[Any, Any],
        host_tables: Sequence[HostTable],
    ) -> None:
        """Made by `build_program`."""
        self._ipu_device = ipu_device
        self._inputs = list(inputs)
        self.input_vars = list(input_vars)
        self.steps = list(steps)
        self.result_tree = result_tree
        self.result_atoms = list(result_atoms)
        self.constants = dict(constants)
        self.host_tables = list(host_tables)

    @property
    def outputs(self) -> Any:
        """The values that the compiled function returns, in their structure; None if there are none."""
        if not self.result_atoms:
            return None
        return self.result_tree.unflatten([Output(self, n) for n in range(len(self.result_atoms))])

    def _known_outputs(self) -> Any:
        if not self.result_atoms:
            raise TypeError(
                "The compiled function returns no values, only operations or nothing, so the program "
                "cannot be indexed or unpacked. Run it as a whole: session.run(program)."
            )
        return self.outputs

    def __iter__(self) -> Iterator[Any]:
        """Goes through the values; through the keys, if the function returns a dict."""
        return iter(self._known_outputs())

    def __getitem__(self, key: Any) -> Any:
        """A value, or what was returned in its place."""
        return self._known_outputs()[key]

    def __len__(self) -> int:
        """How many values there are."""
        return len(self._known_outputs())

    def __bool__(self) -> bool:
        """True, whatever the function returns."""
        return True

    @property
    def ipu_device(self) -> int:
        """The number in `/device:IPU:<n>`."""
        return self._ipu_device

    @property
    def calls(self) -> list[Call]:
        """The pipelines and loops, in the order in which they run."""
        return [step.call for step in self.steps if isinstance(step, CallStep)]

    @property
    def num_ipus(self) -> int:
        """How many IPUs the program needs."""
        return max((call.num_ipus for call in self.calls), default=1)

    def placement(self) -> Placement:
        """What went where: stages or shards, their devices, operations and variables, and what crosses.

        It does not start JAX's backend: devices are named once they have been selected, by
        `IPUConfig.configure_ipu_system` or the first run.

        Example:
          print(program.placement())
        """
        devices = tuple(map(str, selection.selected_devices(self._ipu_device)))
        return Placement(
            tuple(call.placement() for call in self.calls),
            devices,
            tuple(call.replication.name_devices() for call in self.calls),
        )

    def summary(self) -> ProgramSummary:
        """What the program will need and do, before anything runs or is compiled.

        Per stage: parameters by layer, what goes to other IPUs and what is held per micro-batch, memory of
        micro-batches in flight, and operations; then the share of their time in which IPUs will wait, and
        how each pipeline over several IPUs is dispatched, and why. It does not start JAX's backend.

        Example:
          print(program.summary())
        """
        return ProgramSummary(tuple(call.summary() for call in self.calls))

    @property
    def dispatch_plans(self) -> dict[str, DispatchPlan]:
        """How pipelines over several IPUs are dispatched, by the pipeline's name.

        `dataclasses.asdict` makes a dict of a plan, which can be kept as JSON.
        """
        pipelines = [call for call in self.calls if isinstance(call, PipelineCall)]
        plans = {call.name: call.pipeline.dispatch_plan for call in pipelines}
        return {name: plan for name, plan in plans.items() if plan is not None}

    @property
    def placeholders(self) -> list[Placeholder]:
        """The placeholders to feed."""
        return [value for value in self._inputs if isinstance(value, Placeholder)]

    @property
    def variables(self) -> dict[str, VariableSpec]:
        """All variables that the program uses, by full name."""
        found: dict[str, VariableSpec] = {}
        for step in self.steps:
            used = step.call.variables if isinstance(step, CallStep) else step.reads
            found.update((spec.name, spec) for spec in used.values() if not is_internal(spec.name))
        return found | {table.spec.name: table.spec for table in self.host_tables}

    def find_operands(
        self, call: Call, known: Mapping[Placeholder, Any], read: Callable[[VariableSpec], Any]
    ) -> list[Any]:
        """What a pipeline takes, with some placeholders known: arrays, or the placeholders themselves.

        Args:
          call: the pipeline, before which there is no other one.
          known: placeholder -> value.
          read: gives the value of a variable.

        Raises:
          NotImplementedError: something that another pipeline or loop returns is taken.
          ValueError: a value would be computed from a placeholder that is not known.
        """
        values: dict[Any, Any] = dict(self.constants)
        for var, value in zip(self.input_vars, self._inputs, strict=True):
            values[var] = value
            if isinstance(value, Placeholder) and value in known:
                values[var] = value.check_value(known[value])
        for step in self.steps:
            if isinstance(step, CallStep):
                assert step.call is call
                return [read_atom(values, atom) for atom in step.operands]
            values.update((var, read(spec)) for var, spec in step.reads.items())
            arguments = [values[var] for var in step.arguments]
            for argument in arguments:
                if isinstance(argument, Placeholder):
                    raise ValueError(
                        f"export: something is computed from {argument!r} before the pipeline. Give its "
                        "value in `inputs`, or compute it in a stage."
                    )
            values.update(zip(step.results, step.function(*map(np.asarray, arguments)), strict=True))
        raise AssertionError("the call is one of the steps")

    @property
    def infeeds(self) -> list[IPUInfeedQueue]:
        """The infeeds of its pipelines and loops."""
        return [call.infeed_queue for call in self.calls if call.infeed_queue is not None]

    def feed(self, feed_dict: Mapping[Placeholder, Any]) -> list[Any]:
        """The values of its inputs.

        Raises:
          ValueError: one is missing, or does not fit.
        """
        fed = []
        for value in self._inputs:
            if not isinstance(value, Placeholder):
                fed.append(value)
            elif value not in feed_dict:
                raise ValueError(f"You must feed a value for {value!r}: run(program, {{...: value}}).")
            else:
                fed.append(value.check_value(feed_dict[value]))
        return fed


def build_program(
    function: Callable[..., Any],
    inputs: Sequence[Placeholder | np.ndarray[Any, Any]],
    ipu_device: int,
) -> Program:
    """Traces a function into a program. It does not start JAX's backend.

    Args:
      function: takes one array per input; calls `pipelining_ops.pipeline` and `loops.repeat`, and
        computes around them.
      inputs: placeholders, or arrays that are the same in every run.
      ipu_device: the number in `/device:IPU:<n>`.

    Returns:
      The program.

    Raises:
      ValueError: a pipeline or loop is called inside the body of another transformation.
    """
    builder = ProgramBuilder(ipu_device)
    live = live_placeholders()
    result: list[Any] = []

    def traced(*arguments: Any) -> list[Any]:
        named = [value.name if isinstance(value, Placeholder) else "a constant" for value in inputs]
        given = arguments[: len(inputs)]
        builder.inputs = list(zip(given, named, strict=True))
        builder.placeholders = dict(zip(live, arguments[len(inputs) :], strict=True))
        frame = frames.Frame(builder.names, False, "the compiled function", is_stage=False)
        with building(builder), standing(builder.capture), frames.frame(frame):
            leaves, tree = jax.tree.flatten(returned_values(function(*given)))
        result[:] = [tree]
        return leaves

    avals = [
        value.aval if isinstance(value, Placeholder) else jax.ShapeDtypeStruct(value.shape, value.dtype)
        for value in (*inputs, *live)
    ]
    with without_traceback_note(), jax_compat.fresh_trace():
        closed_jaxpr = jax.make_jaxpr(traced)(*avals)
    reads: list[dict[VariableSpec, Any]] = [{}]  # one entry per segment

    def read(spec: VariableSpec) -> Any:
        if spec not in reads[-1]:
            reads[-1][spec] = hoisting.variable_input(spec)
        return reads[-1][spec]

    def refuse(*arguments: Any) -> Any:
        raise AssertionError(f"assign and next_rng_key refuse to work here: {arguments}")

    markers = hoisting.marker_rule(
        "the compiled function", builder.names, read, refuse, refuse, refuse, refuse
    )

    def rule(equation: Any, atoms: list[Any], inline: jaxprs.InlineFunction) -> list[Any] | None:
        if equation.primitive is run_call_p:
            reads.append({})
            return None
        if hoisting.contains(equation, (run_call_p,)):
            raise ValueError(
                "pipelining_ops.pipeline or a loop of ipu.loops is called inside the body of "
                f"{equation.primitive.name}. Each is a step of a program of its own: call it outside. A "
                "pipeline repeats by repeat_count."
            )
        return markers(equation, atoms, inline)

    flat = jaxprs.flatten(closed_jaxpr, rule)
    outfeeds = [(call.replication, outfed) for call in builder.calls for outfed in call.outfeeds]
    for _replication, outfed in outfeeds:
        outfed.queue.check(outfed.tree, outfed.avals)
    for replication, outfed in outfeeds:
        count = replication.count if outfed.is_of_replicas else None
        outfed.queue.bind(outfed.tree, outfed.avals, count)
    (tree,) = result
    num_given = len(inputs)
    captured = dict(zip(live, flat.inputs[num_given:], strict=True))
    used = list(builder.captured)
    builder.forget_values()
    steps = _make_steps(flat, reads, builder.calls)
    return Program(
        ipu_device,
        [*inputs, *used],
        [*flat.inputs[:num_given], *(captured[known] for known in used)],
        steps,
        tree,
        list(flat.outputs),
        flat.constants,
        _check_tables(builder, steps),
    )


def _check_tables(builder: ProgramBuilder, steps: Sequence[Segment | CallStep]) -> list[HostTable]:
    """The tables in host memory that a program looks up, checked against what else it has."""
    tables: list[HostTable] = list(builder.names.host_tables.values())
    for table in tables:
        if table.spec.name in builder.names.variables:
            raise ValueError(
                f"A host embedding and a variable of the program are named {table.spec.name!r}. Give one "
                "of them another name."
            )
    for call in builder.calls if tables else ():
        check_tables(tables, call, call.updated_every)
    outside = {spec.name for step in steps if isinstance(step, Segment) for spec in step.reads.values()}
    for table in tables:
        if table.marker in outside and any(call.trains for call in builder.calls):
            warnings.warn(
                f"The host embedding {table.spec.name!r} is looked up outside of the pipelines and loops "
                "of a program that trains. These rows are not trained: look them up in a stage, or in "
                "the body of the loop.",
                stacklevel=4,
            )
    return tables


def returned_values(values: Any) -> Any:
    """What a program returns of what its function returns, as TensorFlow 1's `xla.compile` has it.

    Values are returned in a list, a single one too. Operations, which have no values, follow them and are
    left out; within other structures None takes their places.

    Raises:
      ValueError: an operation stands before a value.
    """
    if isinstance(values, tuple):
        values = list(values)
    elif isinstance(values, Symbol) or jax.tree_util.all_leaves([values]):
        values = [values]
    if not isinstance(values, list):
        return _without_operations(values)
    is_operation = [isinstance(value, Operation) for value in values]
    num_values = len(values) - sum(is_operation)
    if any(is_operation[:num_values]):
        first = is_operation.index(True)
        raise ValueError(
            f"The compiled function returns the operation {values[first].name!r} at position {first}, "
            "before a value. Return values first and operations last, or leave operations out: they run "
            "anyway."
        )
    return _without_operations(values[:num_values])


def _without_operations(values: Any) -> Any:
    return jax.tree.map(lambda leaf: None if isinstance(leaf, Operation) else leaf, values)


def _make_steps(
    flat: jaxprs.FlatJaxpr, reads: Sequence[dict[VariableSpec, Any]], calls: Sequence[Call]
) -> list[Segment | CallStep]:
    runs: list[list[Any]] = [[]]
    markers: list[Any] = []
    for equation in flat.equations:
        if equation.primitive is run_call_p:
            markers.append(equation)
            runs.append([])
        else:
            runs[-1].append(equation)
    steps: list[Segment | CallStep] = []
    for index, run in enumerate(runs):
        later = [*markers[index:], *(equation for rest in runs[index + 1 :] for equation in rest)]
        wanted = [atom for equation in later for atom in equation.invars] + list(flat.outputs)
        used = {atom for atom in wanted if not isinstance(atom, jex_core.Literal)}
        results = [var for equation in run for var in equation.outvars if var in used]
        # A variable that is returned, or given to a pipeline, as it is still has to be read.
        read_here = {var: spec for spec, var in reads[index].items()}
        results += [var for var in read_here if var in used]
        if results or any(equation.effects for equation in run):
            steps.append(_make_segment(flat, run, results, read_here))
        if index < len(markers):
            marker = markers[index]
            call = calls[marker.params["index"]]
            steps.append(CallStep(call, list(marker.invars), list(marker.outvars[1:])))
    return steps


def _make_segment(
    flat: jaxprs.FlatJaxpr, run: list[Any], results: list[Any], read_here: dict[Any, VariableSpec]
) -> Segment:
    made = {var for equation in run for var in equation.outvars}
    atoms = [atom for equation in run for atom in equation.invars] + results
    taken = dict.fromkeys(
        atom
        for atom in atoms
        if not isinstance(atom, jex_core.Literal) and atom not in made and atom not in flat.constants
    )
    part = jaxprs.FlatJaxpr(list(taken), run, results, flat.constants)
    program = jaxprs.extract(part, results, (), jaxprs.any_equation)

    def segment(*arguments: Any) -> list[Any]:
        return program(*arguments)

    return Segment(
        jax.jit(segment),
        program.inputs,
        results,
        {var: spec for var, spec in read_here.items() if var in program.inputs},
    )


def read_atom(values: Mapping[Any, Any], atom: Any) -> Any:
    """The value of an atom: a literal's own, a variable's by `values`."""
    return np.asarray(atom.val) if isinstance(atom, jex_core.Literal) else values[atom]

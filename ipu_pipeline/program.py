"""A compiled program: an ordered list of jitted segments and pipelines.

Over 400 lines, since how a function becomes segments and how they run are two sides of one thing.
"""

from __future__ import annotations

import contextlib
import contextvars
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.extend import core as jex_core

from ipu_pipeline import config
from ipu_pipeline.engine import hoisting, jaxprs, names, placement
from ipu_pipeline.engine.pipeline import Pipeline
from ipu_pipeline.engine.variables import VariableSpec, fresh_trace
from ipu_pipeline.ipu_infeed_queue import IPUInfeedQueue
from ipu_pipeline.ipu_outfeed_queue import IPUOutfeedQueue
from ipu_pipeline.placeholders import Placeholder

if TYPE_CHECKING:
    from ipu_pipeline.session import Session

__all__ = [
    "Operation",
    "PipelineCall",
    "Program",
    "ProgramBuilder",
    "build_program",
    "current_builder",
    "run_pipeline_p",
]


class Operation:
    """What `pipeline` returns: something to run, without a value."""

    def __init__(self, name: str) -> None:
        """Names the operation."""
        self.name = name


@dataclass(frozen=True, eq=False)
class PipelineCall:
    """A pipeline in a program.

    Attributes:
      name: the pipeline's; optimizer state is kept under it.
      pipeline: the engine's.
      repeat_count: how often it runs in one `run`.
      infeed_queue: its feed.
      outfeed_queue: where its outputs or losses go.
      outfeeds_loss: which of the two.
    """

    name: str
    pipeline: Pipeline
    repeat_count: int
    infeed_queue: IPUInfeedQueue | None
    outfeed_queue: IPUOutfeedQueue | None
    outfeeds_loss: bool

    @property
    def optimizer_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the optimizer's state by path; empty without training."""
        updates = self.pipeline.updates
        return {} if updates is None else {leaf.path: leaf.aval for leaf in updates.state_leaves}

    @property
    def outfed(self) -> tuple[Any, tuple[jax.ShapeDtypeStruct, ...]]:
        """The structure of what is enqueued per micro-batch, and shapes and dtypes of its leaves."""
        traced = self.pipeline.traced
        if self.outfeeds_loss:
            return jax.tree.structure(0), traced.loss_avals
        return traced.output_tree, traced.output_avals


run_pipeline_p = jex_core.Primitive("run_pipeline")


@run_pipeline_p.def_abstract_eval
def _run_pipeline_abstract(*inputs: Any, index: int) -> jax.core.ShapedArray:
    del inputs, index  # the position in ProgramBuilder.calls; JAX's caches keep parameters for long
    return jax.core.ShapedArray((), np.dtype(np.int32))  # nobody reads it; a marker needs a result


@dataclass(eq=False)
class ProgramBuilder:
    """A program while its function is traced.

    Attributes:
      ipu_device: the number in `/device:IPU:<n>`.
      names: the names that the program gives out.
      inputs: what the function was given, as (value, name).
      calls: the pipelines.
    """

    ipu_device: int
    names: names.ProgramNames = field(default_factory=names.ProgramNames)
    inputs: list[tuple[Any, str]] = field(default_factory=list)
    calls: list[PipelineCall] = field(default_factory=list)

    def add(self, call: PipelineCall, inputs: Sequence[Any]) -> None:
        """Adds a pipeline at this point of the program.

        Args:
          call: the pipeline.
          inputs: the leaves of its inputs.

        Raises:
          ValueError: it enqueues to the outfeed of another one; or has its name and another structure of
            optimizer state.
        """
        for other in self.calls:
            if call.outfeed_queue is not None and call.outfeed_queue is other.outfeed_queue:
                raise ValueError(
                    "An IPUOutfeedQueue can be enqueued to only once in a program; pipelines "
                    f"{other.name!r} and {call.name!r} both do."
                )
            shapes, other_shapes = call.optimizer_shapes, other.optimizer_shapes
            trains_both = call.pipeline.updates is not None and other.pipeline.updates is not None
            if call.name == other.name and trains_both and shapes != other_shapes:
                raise ValueError(
                    f"Two pipelines of the program are named {call.name!r}, under which optimizer state is "
                    "kept, but their optimizer states have different structures. Give one another `name`."
                )
        self.calls.append(call)
        run_pipeline_p.bind(*inputs, index=len(self.calls) - 1)

    def describe_input(self, value: Any) -> str | None:
        """The name of a value that the function was given."""
        return next((name for known, name in self.inputs if known is value), None)


_builder: contextvars.ContextVar[ProgramBuilder | None] = contextvars.ContextVar(
    "program_builder", default=None
)


def current_builder() -> ProgramBuilder | None:
    """The program whose function is being traced."""
    return _builder.get()


@contextlib.contextmanager
def _building(builder: ProgramBuilder) -> Iterator[None]:
    token = _builder.set(builder)
    try:
        yield
    finally:
        _builder.reset(token)


@dataclass(frozen=True, eq=False)
class _Segment:
    """Equations between two pipelines, jitted.

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
    """What `ipu_compiler.compile` returns, for `Session.run`."""

    def __init__(
        self,
        ipu_device: int,
        inputs: Sequence[Placeholder | np.ndarray[Any, Any]],
        input_vars: Sequence[Any],
        steps: Sequence[_Segment | tuple[PipelineCall, list[Any]]],
        result_tree: Any,
        result_atoms: Sequence[Any],
        constants: Mapping[Any, Any],
    ) -> None:
        """Made by `build_program`."""
        self._ipu_device = ipu_device
        self._inputs = list(inputs)
        self._input_vars = list(input_vars)
        self._steps = list(steps)
        self._result_tree = result_tree
        self._result_atoms = list(result_atoms)
        self._constants = dict(constants)

    @property
    def ipu_device(self) -> int:
        """The number in `/device:IPU:<n>`."""
        return self._ipu_device

    @property
    def pipelines(self) -> list[PipelineCall]:
        """The pipelines, in the order in which they run."""
        return [step[0] for step in self._steps if isinstance(step, tuple)]

    @property
    def num_ipus(self) -> int:
        """How many IPUs the program needs."""
        return max((call.pipeline.num_ipus for call in self.pipelines), default=1)

    @property
    def placeholders(self) -> list[Placeholder]:
        """The placeholders to feed."""
        return [value for value in self._inputs if isinstance(value, Placeholder)]

    @property
    def variables(self) -> dict[str, VariableSpec]:
        """All variables that the program uses, by full name."""
        found: dict[str, VariableSpec] = {}
        for step in self._steps:
            specs = step[0].pipeline.variables.values() if isinstance(step, tuple) else step.reads.values()
            found.update((spec.name, spec) for spec in specs)
        return found

    def run(self, session: Session, feed_dict: Mapping[Placeholder, Any]) -> Any:
        """Runs the program; see `Session.run`."""
        values = dict(self._constants)
        for var, value in zip(self._input_vars, self._feed(feed_dict), strict=True):
            values[var] = value
        infeeds = [call.infeed_queue for call in self.pipelines if call.infeed_queue is not None]
        for infeed in infeeds:
            infeed.check_initialized()
        devices = config.devices_for(self._ipu_device, self.num_ipus)
        row = placement.make_rows(devices, (0,))[0]
        try:
            for step in self._steps:
                if isinstance(step, tuple):
                    call, atoms = step
                    session.run_pipeline(call, [_read(values, atom) for atom in atoms], devices)
                else:
                    for var, spec in step.reads.items():
                        values[var] = session.variable(spec)
                    arguments = placement.put_host_copies([values[v] for v in step.arguments], row)
                    values.update(zip(step.results, step.function(*arguments), strict=True))
        except BaseException:
            for infeed in infeeds:
                infeed.stop()
            raise
        results = [None if atom is None else np.array(_read(values, atom)) for atom in self._result_atoms]
        return self._result_tree.unflatten(results)

    def _feed(self, feed_dict: Mapping[Placeholder, Any]) -> list[Any]:
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
      function: takes one array per input; calls `pipelining_ops.pipeline`, and computes around it.
      inputs: placeholders, or arrays that are the same in every run.
      ipu_device: the number in `/device:IPU:<n>`.

    Returns:
      The program.

    Raises:
      ValueError: a pipeline is called inside the body of a loop or another transformation.
    """
    builder = ProgramBuilder(ipu_device)
    result: list[Any] = []

    def traced(*arguments: Any) -> list[Any]:
        named = [value.name if isinstance(value, Placeholder) else "a constant" for value in inputs]
        builder.inputs = list(zip(arguments, named, strict=True))
        frame = names.Frame(builder.names, False, "the compiled function", is_stage=False)
        with _building(builder), names.frame(frame):
            leaves, tree = jax.tree.flatten(function(*arguments))
        result[:] = [tree, [isinstance(leaf, Operation) for leaf in leaves]]
        return [leaf for leaf in leaves if not isinstance(leaf, Operation)]

    avals = [
        value.aval if isinstance(value, Placeholder) else jax.ShapeDtypeStruct(value.shape, value.dtype)
        for value in inputs
    ]
    try:
        with fresh_trace():
            closed_jaxpr = jax.make_jaxpr(traced)(*avals)
    except TypeError as error:
        # Most uses of a placeholder raise its own error; JAX's innermost functions look at types only.
        if Placeholder.__name__ not in str(error):
            raise
        named = re.search(r"placeholder '([^']*)'", f"{error.__cause__}")
        raise ValueError(
            f"Trying to capture the tensor {named.group(1) if named else 'of a placeholder'}. Give "
            "placeholders to ipu_compiler.compile in `inputs`, and use what the function gets for them."
        ) from error
    reads: list[dict[VariableSpec, Any]] = [{}]  # one entry per segment

    def read(spec: VariableSpec) -> Any:
        if spec not in reads[-1]:
            reads[-1][spec] = hoisting.variable_input(spec)
        return reads[-1][spec]

    def refuse(*arguments: Any) -> Any:
        raise AssertionError(f"assign and next_rng_key refuse to work here: {arguments}")

    markers = hoisting.marker_rule("the compiled function", builder.names, read, refuse, refuse)

    def rule(equation: Any, atoms: list[Any], inline: jaxprs.InlineFunction) -> list[Any] | None:
        if equation.primitive is run_pipeline_p:
            reads.append({})
            return None
        if hoisting.contains(equation, (run_pipeline_p,)):
            raise ValueError(
                f"pipelining_ops.pipeline is called inside the body of {equation.primitive.name}. A "
                "pipeline is a step of a program of its own: call it outside, and use repeat_count."
            )
        return markers(equation, atoms, inline)

    flat = jaxprs.flatten(closed_jaxpr, rule)
    for call in builder.calls:
        if call.outfeed_queue is not None:
            call.outfeed_queue.bind(*call.outfed)
    tree, is_operation = result
    outputs = iter(flat.outputs)
    return Program(
        ipu_device,
        inputs,
        flat.inputs,
        _make_steps(flat, reads, builder.calls),
        tree,
        [None if operation else next(outputs) for operation in is_operation],
        flat.constants,
    )


def _make_steps(
    flat: jaxprs.FlatJaxpr, reads: Sequence[dict[VariableSpec, Any]], calls: Sequence[PipelineCall]
) -> list[_Segment | tuple[PipelineCall, list[Any]]]:
    runs: list[list[Any]] = [[]]
    markers: list[Any] = []
    for equation in flat.equations:
        if equation.primitive is run_pipeline_p:
            markers.append(equation)
            runs.append([])
        else:
            runs[-1].append(equation)
    steps: list[_Segment | tuple[PipelineCall, list[Any]]] = []
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
            steps.append((calls[markers[index].params["index"]], list(markers[index].invars)))
    return steps


def _make_segment(
    flat: jaxprs.FlatJaxpr, run: list[Any], results: list[Any], read_here: dict[Any, VariableSpec]
) -> _Segment:
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

    return _Segment(
        jax.jit(segment),
        program.inputs,
        results,
        {var: spec for var, spec in read_here.items() if var in program.inputs},
    )


def _read(values: Mapping[Any, Any], atom: Any) -> Any:
    return np.asarray(atom.val) if isinstance(atom, jex_core.Literal) else values[atom]

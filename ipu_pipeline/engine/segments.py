"""Cuts a function that calls pipelines and loops, traced once, into what is computed between the calls.

`mark_call` leaves a marker where a pipeline or loop is called. The equations between two markers are a
segment, which is jitted. It reads its variables anew, since a call may have trained them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.engine import jaxprs, peers
from ipu_pipeline.engine.devices.device_groups import is_here, make_groups
from ipu_pipeline.engine.devices.placement import put_host_copies
from ipu_pipeline.engine.devices.process_exchange import read_gathered
from ipu_pipeline.engine.state import OfReplicas, of_replica
from ipu_pipeline.engine.tracing import frames, hoisting
from ipu_pipeline.engine.tracing.specs import VariableSpec
from ipu_pipeline.engine.tracing.variables import resolve
from ipu_pipeline.ground import jax_compat, jax_core
from ipu_pipeline.ground.errors import without_traceback_note

_PLACE = "the compiled function"  # what errors call it
_MEND_REPLICAS = (
    "Give all of them the same number of replicas, or return what is the same for all, such as what "
    "cross_replica_ops.cross_replica_mean gives, and feed it to another program."
)

_call_p = jax_core.Primitive("run_call")
_call_p.multiple_results = True


@_call_p.def_abstract_eval  # type: ignore[untyped-decorator]  # jax.extend has no annotations
def _call_abstract(*operands: Any, number: int, results: tuple[Any, ...]) -> list[Any]:
    # `number` stands for the call, since JAX's caches keep parameters for long.
    del operands, number
    return [jax_compat.shaped_array((), np.dtype(np.int32)), *results]  # a marker needs a result


def mark_call(number: int, operands: Sequence[Any], results: Sequence[jax.ShapeDtypeStruct]) -> list[Any]:
    """Marks a call at this point of the function that is being traced.

    Returns:
      Its results, traced.
    """
    avals = tuple(jax_compat.shaped_array(aval.shape, aval.dtype) for aval in results)
    values: list[Any]
    _marker, *values = _call_p.bind(*operands, number=number, results=avals)
    return values


class CallStep(NamedTuple):
    """A pipeline or loop that is called."""

    number: int  # the number of the call
    operands: list[Any]  # the atoms that it takes
    results: list[Any]  # the jaxpr variables that it returns


@dataclass(frozen=True, eq=False)
class Segment:
    """Equations between two calls."""

    function: Callable[..., list[Any]]  # the equations, jitted
    arguments: list[Any]  # the jaxpr variables that it takes
    results: list[Any]  # the jaxpr variables that it returns
    reads: dict[Any, VariableSpec]  # the arguments that are variables, read just before the segment
    number: None = None  # it is no call


Step: TypeAlias = CallStep | Segment


@dataclass(frozen=True, eq=False)
class SegmentedFunction:
    """A function cut into segments and calls."""

    steps: Sequence[Step]  # in the order in which they run
    inputs: Sequence[Any]  # jaxpr variables
    outputs: Sequence[Any]  # atoms
    constants: Mapping[Any, Any]  # the jaxpr variables that stand for constant arrays, with their values

    @classmethod
    def trace(
        cls, function: Callable[..., Any], avals: Sequence[jax.ShapeDtypeStruct], names: frames.ProgramNames
    ) -> SegmentedFunction:
        """Traces a function that calls `mark_call`. Does not start JAX's backend."""

        def traced(*arguments: Any) -> Any:
            with frames.frame(frames.Frame(names, False, _PLACE, is_stage=False)):
                return function(*arguments)

        with without_traceback_note(), jax_compat.fresh_trace():
            closed_jaxpr = jax.make_jaxpr(traced)(*avals)
        reads: list[dict[VariableSpec, Any]] = [{}]  # one entry per segment

        def read(spec: VariableSpec) -> Any:
            if spec not in reads[-1]:
                reads[-1][spec] = hoisting.variable_input(spec)
            return reads[-1][spec]

        def refuse(*arguments: Any) -> Any:
            raise AssertionError(f"assign and next_rng_key refuse to work here: {arguments}")

        initialized: list[tuple[VariableSpec, list[Any]]] = []
        markers = hoisting.marker_rule(
            _PLACE, names, read, refuse, refuse, refuse, refuse, initialized.append
        )

        def rule(equation: Any, atoms: list[Any], inline: jaxprs.InlineFunction) -> list[Any] | None:
            if equation.primitive is _call_p:
                reads.append({})
                return None
            if hoisting.contains(equation, (_call_p,)):
                raise ValueError(
                    "pipelining_ops.pipeline or a loop of ipu.loops is called inside the body of "
                    f"{equation.primitive.name}. Each is a step of a program of its own: call it outside. "
                    "A pipeline repeats by repeat_count."
                )
            return markers(equation, atoms, inline)

        flat = jaxprs.flatten(closed_jaxpr, rule)
        computed = [equation for equation in flat.equations if equation.primitive is not _call_p]
        resolve(computed, flat.constants, initialized, _PLACE)
        return cls(_make_steps(flat, reads), flat.inputs, list(flat.outputs), flat.constants)

    def begin(self, inputs: Sequence[Any]) -> Values:
        """The values of the inputs, and later of what the steps give."""
        return Values(self, inputs)

    @property
    def read_outside(self) -> set[str]:
        """The full names of the variables that are read outside of calls."""
        return {
            spec.name for step in self.steps if isinstance(step, Segment) for spec in step.reads.values()
        }

    def with_inputs(self, numbers: Sequence[int]) -> SegmentedFunction:
        """The function with only some of its inputs; the others must be unused."""
        return SegmentedFunction(
            self.steps, [self.inputs[number] for number in numbers], self.outputs, self.constants
        )


def _make_steps(flat: jaxprs.FlatJaxpr, reads: Sequence[dict[VariableSpec, Any]]) -> list[Step]:
    runs: list[list[Any]] = [[]]
    markers: list[Any] = []
    for equation in flat.equations:
        if equation.primitive is _call_p:
            markers.append(equation)
            runs.append([])
        else:
            runs[-1].append(equation)
    steps: list[Step] = []
    for index, run in enumerate(runs):
        later = [*markers[index:], *(equation for later_run in runs[index + 1 :] for equation in later_run)]
        atoms = [atom for equation in later for atom in equation.invars] + list(flat.outputs)
        read_atoms = {atom for atom in atoms if not isinstance(atom, jax_core.Literal)}
        results = [var for equation in run for var in equation.outvars if var in read_atoms]
        # A variable that is returned or given to a pipeline unchanged still has to be read.
        read_here = {var: spec for spec, var in reads[index].items()}
        results += [var for var in read_here if var in read_atoms]
        if results or any(equation.effects for equation in run):
            steps.append(_make_segment(flat, run, results, read_here))
        if index < len(markers):
            marker = markers[index]
            steps.append(CallStep(marker.params["number"], list(marker.invars), list(marker.outvars[1:])))
    return steps


def _make_segment(
    flat: jaxprs.FlatJaxpr, run: list[Any], results: list[Any], read_here: dict[Any, VariableSpec]
) -> Segment:
    computed = {var for equation in run for var in equation.outvars}
    atoms = [atom for equation in run for atom in equation.invars] + results
    arguments = dict.fromkeys(
        atom
        for atom in atoms
        if not isinstance(atom, jax_core.Literal) and atom not in computed and atom not in flat.constants
    )
    part = jaxprs.FlatJaxpr(list(arguments), run, results, flat.constants)
    program = jaxprs.extract(part, results, (), jaxprs.any_equation)

    def compute(*arguments: Any) -> list[Any]:
        return program(*arguments)

    return Segment(
        jax.jit(compute),
        program.inputs,
        results,
        {var: spec for var, spec in read_here.items() if var in program.inputs},
    )


class Values:
    """The inputs of a function's steps, and the results so far."""

    def __init__(self, function: SegmentedFunction, inputs: Sequence[Any]) -> None:
        self._function = function
        self._values = {**function.constants, **dict(zip(function.inputs, inputs, strict=True))}

    def find(self, atom: Any) -> Any:
        """The value of an atom; None if it has not been made yet."""
        return np.asarray(atom.val) if isinstance(atom, jax_core.Literal) else self._values.get(atom)

    def operands(self, step: CallStep) -> list[Any]:
        """The operands of a call, once the steps before it have run."""
        return [self._read(atom) for atom in step.operands]

    def arguments(self, step: Segment) -> list[Any]:
        """The arguments of a segment, with None for variables."""
        return [None if var in step.reads else self._values[var] for var in step.arguments]

    def set_results(self, step: Step, results: Sequence[Any]) -> None:
        """Sets the results of a step."""
        self._values.update(zip(step.results, results, strict=True))

    def compute(
        self, step: Segment, variables: Sequence[Any], devices: Sequence[Any], waits: bool = False
    ) -> None:
        """Runs a segment on the first device of this process.

        Where its values differ between replicas, it computes each replica's own.
        """
        self._values.update(zip(step.reads, read_gathered(variables), strict=True))
        device = next(filter(is_here, devices), None) or jax.local_devices()[0]
        group = make_groups([device], (0,))[0]
        arguments = [self._values[var] for var in step.arguments]
        sizes = {len(value.values) for value in arguments if isinstance(value, OfReplicas)}
        if len(sizes) > 1:
            raise ValueError(
                "A computation between loops takes values of loops with different numbers of replicas: "
                f"{', '.join(map(str, sorted(sizes)))}. {_MEND_REPLICAS}"
            )
        results: list[Any]
        if not sizes:
            results = step.function(*put_host_copies(arguments, group))
        else:
            of_replicas = [
                step.function(*put_host_copies([of_replica(value, replica) for value in arguments], group))
                for replica in range(sizes.pop())
            ]
            results = [OfReplicas(values) for values in zip(*of_replicas, strict=True)]
        if waits:
            jax.block_until_ready(results)
        self.set_results(step, in_every_process(results))

    def compute_on_host(self, step: Segment, variables: Sequence[Any]) -> None:
        """Runs a segment on JAX's default device, from arrays of the host."""
        self._values.update(zip(step.reads, variables, strict=True))
        arguments = [np.asarray(self._values[var]) for var in step.arguments]
        self.set_results(step, step.function(*arguments))

    def outputs(self) -> list[Any]:
        """The function's results, the first replica's if they differ: arrays of NumPy, and random keys."""
        returned = [of_replica(self._read(atom), 0) for atom in self._function.outputs]
        return [value if _is_key(value) else np.array(value) for value in returned]

    def _read(self, atom: Any) -> Any:
        return np.asarray(atom.val) if isinstance(atom, jax_core.Literal) else self._values[atom]


def fit_replicas(name: str, operands: Sequence[Any], num_replicas: int) -> list[Any]:
    """Fits operands to a call's number of replicas; a call without replicas takes the first replica's."""
    if num_replicas == 1:
        return [of_replica(value, 0) for value in operands]
    sizes = {len(value.values) for value in operands if isinstance(value, OfReplicas)} - {num_replicas}
    if sizes:
        raise ValueError(
            f"{name!r} has {num_replicas} replicas, and takes a value that a loop of {min(sizes)} "
            f"replicas gave, one for each of them. {_MEND_REPLICAS}"
        )
    return list(operands)


def read_count(name: str, value: Any) -> int:
    """The count of a call, which is one of its operands."""
    values = value.values if isinstance(value, OfReplicas) else (value,)
    counts = list(map(int, values))
    if len(set(counts)) > 1:
        raise ValueError(
            f"The count of {name!r} must be the same in all replicas, which compute together; a loop "
            f"gave them {counts}. Let it depend on what is the same in all, such as what "
            "cross_replica_ops.cross_replica_mean gives."
        )
    return counts[0]


def in_every_process(values: Sequence[Any]) -> list[Any]:
    """Makes values of a segment or loop readable in each process; with one process, they stay as they are.

    With several processes they become arrays of NumPy, which a pipeline or loop takes on any devices.
    """
    if peers.current() is None:
        return list(values)
    leaves, tree = jax.tree.flatten(list(values))
    readable: list[Any] = jax.tree.unflatten(tree, list(map(_as_numpy, read_gathered(leaves))))
    return readable


def _as_numpy(array: Any) -> Any:
    return array if _is_key(array) else np.asarray(array)


def _is_key(array: Any) -> bool:
    return bool(jnp.issubdtype(array.dtype, jax.dtypes.prng_key))

"""Compiled programs: what they run and return, and those that are still in use."""

from __future__ import annotations

import itertools
import math
import numbers
import operator
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ipu_pipeline.checkpointing.states import find_different_leaves
from ipu_pipeline.engine import Chunking, VariableSpec
from ipu_pipeline.engine.fronts import SegmentedFunction
from ipu_pipeline.processes import device_selection
from ipu_pipeline.processes.launcher import MEMORY_VARIABLE
from ipu_pipeline.queues.infeed import IPUInfeedQueue
from ipu_pipeline.queues.outfeed import Operation
from ipu_pipeline.reports.program_summary import Placement, ProgramSummary
from ipu_pipeline.tf1.graph import Placeholder, Symbol, finding_placeholders, is_internal, live_placeholders
from ipu_pipeline.tf1.program.calls import Call, PipelineCall, ProgramBuilder, building, current_builder
from ipu_pipeline.tf1.program.host_tables import HostTable, check_tables


class Fetched:
    """A value for `Session.run`. Python's operators on it give another such value, computed on the host."""

    __array_ufunc__ = None  # NumPy's arrays and scalars leave operators to it
    __iter__ = None  # it has no length before it is run


@dataclass(frozen=True, eq=False)
class Output(Fetched):
    """A value that a compiled function returns; `Session.run` runs the program once for all of them."""

    program: Any  # the program
    number: int  # the position of the value among the leaves of what the function returns


@dataclass(frozen=True, eq=False)
class Computed(Fetched):
    """A value that is computed from other values when these have been fetched."""

    function: Callable[..., Any]  # computes it
    parts: tuple[Any, ...]  # its arguments: values to fetch, or plain values


def _forward(name: str, is_reflected: bool = False) -> Callable[..., Computed]:
    function = getattr(operator, name)

    def method(self: Fetched, *operands: Any) -> Computed:
        for operand in operands:
            _check_operand(operand, name)
        parts = (*operands, self) if is_reflected else (self, *operands)
        return Computed(function, parts)

    return method


def _check_operand(value: Any, name: str) -> None:
    """Raises if an operand for the host is not a number, array or index."""
    if isinstance(value, Fetched):
        return
    is_usable = isinstance(value, (numbers.Number, np.generic, np.ndarray, jax.Array))
    if name == "getitem":
        parts = value if isinstance(value, tuple) else (value,)
        limits = [limit for part in parts if isinstance(part, slice) for limit in _limits(part)]
        is_usable = not any(isinstance(part, Fetched) for part in (*parts, *limits))
    elif isinstance(value, (list, tuple)):
        is_usable = np.asarray(value, dtype=object if _has_fetched(value) else None).dtype.kind in "biufc"
    if not is_usable:
        raise TypeError(
            f"What a program returns was an operand of {name}, with {type(value).__name__}. The host takes "
            "numbers, arrays and other values of programs with it. Compute the rest in the program, or "
            "from what Session.run returns."
        )


def _limits(part: slice) -> tuple[Any, Any, Any]:
    return part.start, part.stop, part.step


def _has_fetched(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_has_fetched, value))
    return isinstance(value, Fetched)


for _name in ["add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow"]:
    setattr(Fetched, f"__{_name}__", _forward(_name))
    setattr(Fetched, f"__r{_name}__", _forward(_name, is_reflected=True))
for _name in ["neg", "pos", "abs", "getitem"]:
    setattr(Fetched, f"__{_name}__", _forward(_name))


class Program:
    """The result of `ipu_compiler.compile`, for `Session.run`. It is data; `session.program_runs` runs it.

    It is also the sequence of the values that the compiled function returns. Each can be run, as in
    TensorFlow 1: `(loss,) = compile(...)`, `session.run(compiled[0])`. If the function returns a dict, its
    keys select the values.

    Example:
      >>> def model(x):
      ...     return {"double": 2 * x, "square": x * x}
      >>> with ipu.scopes.ipu_scope("/device:IPU:0"):
      ...     program = ipu.ipu_compiler.compile(model, [np.float32(3)])
      >>> with ipu.Session() as session:
      ...     session.run(program["square"])
      array(9., dtype=float32)

    Attributes:
      function: the compiled function, cut into segments, pipelines and loops.
      calls: the pipelines and loops, in the order in which they run.
      result_tree: the structure of the result of `Session.run`: a list, a dict or another pytree of leaves;
        without leaves if the function returns operations or nothing.
      host_tables: the tables in host memory that it uses.
    """

    def __init__(
        self,
        ipu_device: int,
        inputs: Sequence[Placeholder | np.ndarray[Any, Any]],
        function: SegmentedFunction,
        calls: Sequence[Call],
        result_tree: Any,
        host_tables: Sequence[HostTable],
    ) -> None:
        """Made by `build_program`."""
        self._ipu_device = ipu_device
        self._inputs = list(inputs)
        self.function = function
        self.calls = list(calls)
        self.result_tree = result_tree
        self.host_tables = list(host_tables)

    @property
    def outputs(self) -> Any:
        """The values that the compiled function returns, in their structure; None if there are none."""
        # Made when asked for: a program that refers to itself would not go at once when it is dropped.
        number = len(self.function.outputs)
        return self.result_tree.unflatten([Output(self, n) for n in range(number)]) if number else None

    def _known_outputs(self) -> Any:
        if not self.function.outputs:
            raise TypeError(
                "The compiled function returns no values, only operations or nothing, so the program "
                "cannot be indexed or unpacked. Run it as a whole: session.run(program)."
            )
        return self.outputs

    def __iter__(self) -> Iterator[Any]:
        """Iterates over the values; over the keys, if the function returns a dict."""
        return iter(self._known_outputs())

    def __getitem__(self, key: Any) -> Any:
        """Returns the value at an index or key."""
        return self._known_outputs()[key]

    def __len__(self) -> int:
        """The number of values."""
        return len(self._known_outputs())

    def __bool__(self) -> bool:
        """Returns True, whatever the function returns."""
        return True

    @property
    def ipu_device(self) -> int:
        """The number in `/device:IPU:<n>`."""
        return self._ipu_device

    @property
    def num_ipus(self) -> int:
        """The number of IPUs that the program needs."""
        return max((call.num_ipus for call in self.calls), default=1)

    def placement(self) -> Placement:
        """Describes stages or shards: their devices, operations, variables and transfers.

        It does not start JAX's backend: devices are named once they are selected, by
        `IPUConfig.configure_ipu_system` or the first run.

        Example:
          >>> def model(x):
          ...     return ipu.loops.repeat(4, layers.Dense(8), [x])
          >>> with ipu.scopes.ipu_scope("/device:IPU:0"):
          ...     program = ipu.ipu_compiler.compile(model, [np.ones([2, 8], np.float32)])
          >>> print(program.placement())
          Loop
            stage  IPU  device            operations  bytes of variables  variables
            0      0    not selected yet  3           288                 dense/kernel
                                                                          dense/bias
          per iteration:
            nothing crosses
        """
        selected = device_selection.selected_devices(self._ipu_device)
        of_replicas: list[tuple[tuple[str, ...], ...]] = []
        for call in self.calls:
            number = call.replication.count()
            dealt = call.replication.deal_devices(selected, number) if number > 1 and selected else ()
            of_replicas.append(tuple(tuple(map(str, group)) for group in dealt))
        return Placement(
            tuple(call.placement() for call in self.calls), tuple(map(str, selected)), tuple(of_replicas)
        )

    def summary(self) -> ProgramSummary:
        """Summarizes the program's memory and work before anything is compiled.

        For each stage it shows parameters by layer, bytes sent to other IPUs and held per micro-batch, the
        memory of micro-batches in flight, and operations; then the bubble, and the dispatch plan of each
        pipeline on several IPUs with its reason. It does not start JAX's backend.

        Example:
          >>> def model(x):
          ...     return ipu.loops.repeat(4, layers.Dense(8), [x])
          >>> with ipu.scopes.ipu_scope("/device:IPU:0"):
          ...     program = ipu.ipu_compiler.compile(model, [np.ones([2, 8], np.float32)])
          >>> print(program.summary())
          Loop: 1 part on 1 IPU, no training
            72 parameters, 288 B
            stage  IPU  layers  parameters   size   forward
            0      0    dense           72  288 B  496 flop
          forward: estimated operations
          bubble: none, as everything is on one IPU
        """
        return ProgramSummary(tuple(call.summary() for call in self.calls), self._count_checkpoint_bytes())

    def _count_checkpoint_bytes(self) -> int | None:
        if not os.environ.get(MEMORY_VARIABLE) or not any(call.trains for call in self.calls):
            return None
        shapes: list[Any] = list(self.variables.values())
        shapes += [leaf for call in self.calls for leaf in call.optimizer_shapes.values()]
        return sum(math.prod(shape.shape) * shape.dtype.itemsize for shape in shapes)

    @property
    def dispatch_plans(self) -> dict[str, Chunking]:
        """The dispatch plans of pipelines on several IPUs, by the pipeline's name.

        `dataclasses.asdict` converts a plan to a dict, which can be stored as JSON.
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
        variables: dict[str, VariableSpec] = {}
        for step in self.function.steps:
            specs = step.reads if step.number is None else self.calls[step.number].variables
            variables.update((spec.name, spec) for spec in specs.values() if not is_internal(spec.name))
        return variables | {table.spec.name: table.spec for table in self.host_tables}

    def find_operands(
        self, call: Call, feeds: Mapping[Placeholder, Any], read: Callable[[VariableSpec], Any]
    ) -> list[Any]:
        """Finds a pipeline's operands if some placeholders are known: arrays, or the other placeholders.

        Args:
          call: the pipeline; there is no other one before it.
          feeds: placeholder -> value.
          read: returns the value of a variable.

        Raises:
          NotImplementedError: the pipeline takes a result of another pipeline or loop.
          ValueError: a value would be computed from a placeholder that is not known.
        """
        inputs = [
            value.check_value(feeds[value]) if isinstance(value, Placeholder) and value in feeds else value
            for value in self._inputs
        ]
        values = self.function.begin(inputs)
        for step in self.function.steps:
            if step.number is not None:
                assert self.calls[step.number] is call
                return values.operands(step)
            variables = [read(spec) for spec in step.reads.values()]
            for argument in values.arguments(step):
                if isinstance(argument, Placeholder):
                    raise ValueError(
                        f"export: something is computed from {argument!r} before the pipeline. Give its "
                        "value in `inputs`, or compute it in a stage."
                    )
            values.compute_on_host(step, variables)
        raise AssertionError("the call is one of the steps")

    @property
    def infeeds(self) -> list[IPUInfeedQueue]:
        """The infeeds of its pipelines and loops."""
        return [call.infeed_queue for call in self.calls if call.infeed_queue is not None]

    def feed(self, feed_dict: Mapping[Placeholder, Any]) -> list[Any]:
        """Returns the values of its inputs.

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

    Returns:
      The program.
    """
    builder = ProgramBuilder(ipu_device)
    live = live_placeholders()
    result: list[Any] = []

    def traced(*arguments: Any) -> list[Any]:
        named = [value.name if isinstance(value, Placeholder) else "a constant" for value in inputs]
        own_inputs = arguments[: len(inputs)]
        builder.inputs = list(zip(own_inputs, named, strict=True))
        builder.placeholders = dict(zip(live, arguments[len(inputs) :], strict=True))
        with building(builder), finding_placeholders(builder.capture):
            leaves, tree = jax.tree.flatten(returned_values(function(*own_inputs)))
        result[:] = [tree]
        return leaves

    avals = [
        value.aval if isinstance(value, Placeholder) else jax.ShapeDtypeStruct(value.shape, value.dtype)
        for value in (*inputs, *live)
    ]
    cut = SegmentedFunction.trace(traced, avals, builder.names)
    outfeeds = [(call.replication, outfeed) for call in builder.calls for outfeed in call.outfeeds]
    for _replication, outfeed in outfeeds:
        outfeed.queue.check(outfeed.tree, outfeed.avals)
    for replication, outfeed in outfeeds:
        count = replication.count if outfeed.is_of_replicas else None
        outfeed.queue.bind(outfeed.tree, outfeed.avals, count)
    (tree,) = result
    captured = list(builder.captured)
    builder.forget_values()
    numbers = {symbol: number for number, symbol in enumerate(live, len(inputs))}
    places = [*range(len(inputs)), *(numbers[symbol] for symbol in captured)]
    return Program(
        ipu_device,
        [*inputs, *captured],
        cut.with_inputs(places),
        builder.calls,
        tree,
        _check_tables(builder, cut.read_outside),
    )


def _check_tables(builder: ProgramBuilder, outside: set[str]) -> list[HostTable]:
    """Finds the tables in host memory that a program looks up, and checks them against its other parts."""
    tables: list[HostTable] = list(builder.names.host_tables.values())
    for table in tables:
        if table.spec.name in builder.names.variables:
            raise ValueError(
                f"A host embedding and a variable of the program are named {table.spec.name!r}. Give one "
                "of them another name."
            )
    for call in builder.calls if tables else ():
        check_tables(tables, call, call.updated_every)
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
    """Finds the results of a program among its function's, as TensorFlow 1's `xla.compile` does.

    Values are returned in a list, even a single one. Operations, which have no values, follow them and are
    left out; within other structures None takes their places.
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


# Programs that are still in use.

_programs: weakref.WeakValueDictionary[int, Program] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def register(program: Program) -> None:
    """Adds a program, for as long as it is referred to elsewhere."""
    _programs[next(_numbers)] = program


def compiled_programs() -> list[Program]:
    """The programs that are still in use, in the order in which they were compiled."""
    return [program for _number, program in sorted(_programs.items())]


def find_trained(name: str, leaves: Mapping[str, Any]) -> set[str] | None:
    """The full names of the variables that an optimizer's state is for; None if no such program is used."""
    for program in compiled_programs():
        for call in program.calls:
            is_its = call.trains and not find_different_leaves(leaves, call.optimizer_shapes)
            if call.name == name and is_its:
                return call.trained
    return None


def global_variables() -> list[VariableSpec]:
    """Returns specifications of all variables: `name` (the full one), `shape`, `dtype`, `trainable`.

    In a function that is being compiled, these are the variables that it has asked for so far; elsewhere,
    the variables of all compiled programs that are still in use. They are in the order in which they were
    first asked for.

    Example:
      >>> def model(x):
      ...     return layers.BatchNormalization()(layers.Dense(4)(x))
      >>> with ipu.scopes.ipu_scope("/device:IPU:0"):
      ...     program = ipu.ipu_compiler.compile(model, [np.ones([2, 8], np.float32)])
      >>> [spec.name for spec in ipu.global_variables()]
      ['dense/kernel', 'dense/bias', 'batch_normalization/moving_mean', ...]
    """
    builder = current_builder()
    if builder is not None:
        names = builder.names
        specs = [spec for spec in names.variables.values() if not is_internal(spec.name)]
        return specs + [table.spec for table in names.host_tables.values()]
    variables: dict[str, VariableSpec] = {}
    for program in compiled_programs():
        for name, spec in program.variables.items():
            variables.setdefault(name, spec)
    return list(variables.values())


def trainable_variables() -> list[VariableSpec]:
    """Returns the variables of `global_variables` that pipelines with an optimizer train.

    Example:
      >>> names = [spec.name for spec in ipu.trainable_variables()]
    """
    return [spec for spec in global_variables() if spec.trainable]


def reserve_ipus(ipu_device: int, number: int) -> None:
    """Reserves IPUs for a program that is being compiled, in addition to those of other programs."""
    reserved = [(program.ipu_device, program.num_ipus) for program in compiled_programs()]
    device_selection.reserve([*reserved, (ipu_device, number)])

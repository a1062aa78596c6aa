"""Makes stages of a list of layers, or of one function, cut where a step is then shortest.

The layers are traced as a pipeline in which each is a stage, so everything is known of them that is known
of stages: programs, what crosses from one to the next, memory, the weight update's programs. Their
programs are measured one at a time (`execution.measured_costs`), on one device or two; no state is made, so
a model may be larger than a device. Equal layers are measured once. A function is cut into parts first,
which are then what layers are (`tracing.model_stages`), but for their order, which may be another one.
`schedules.graph_splits` finds the split.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from ipu_pipeline.engine import peers
from ipu_pipeline.engine.devices.device_groups import DeviceGroup
from ipu_pipeline.engine.execution.measured_costs import Measured, time_shortest, why_not_timed
from ipu_pipeline.engine.execution.runner import PlanRunner
from ipu_pipeline.engine.inspect.descriptions import Crossing, find_crossings
from ipu_pipeline.engine.inspect.pipelines import plan_memory
from ipu_pipeline.engine.option_types import Chunking, Offload, Shard
from ipu_pipeline.engine.pipeline import Pipeline
from ipu_pipeline.engine.pipeline_options import PipelineOptions, make_options
from ipu_pipeline.engine.planning.dispatch_plans import (
    HOST_SECONDS,
    choose_chunk_size,
    count_seconds,
    describe_seconds,
    nominal_speed,
    possible_chunk_sizes,
)
from ipu_pipeline.engine.programs.stage_programs import ValueKind, read_sources
from ipu_pipeline.engine.schedules.graph_splits import Order, find_graph_split
from ipu_pipeline.engine.schedules.layer_splits import (
    FusedPair,
    LayerMemory,
    SentValue,
    Split,
    SplitProblem,
    even_split,
    num_simulations,
    weigh,
)
from ipu_pipeline.engine.schedules.scenarios import Costs, StageEdge
from ipu_pipeline.engine.schedules.schedule_arguments import SearchedSchedule
from ipu_pipeline.engine.state import PipelineState
from ipu_pipeline.engine.tracing.frames import ProgramNames, Surroundings
from ipu_pipeline.engine.tracing.model_graphs import ModelGraph, trace_model
from ipu_pipeline.engine.tracing.model_stages import ModelCut, ModelParts, make_model_stages, number_names
from ipu_pipeline.engine.tracing.stage_lists import Stage, StageEntry, join_layers, with_parameters
from ipu_pipeline.engine.tracing.stage_parameters import Layout
from ipu_pipeline.engine.tracing.stages import Source
from ipu_pipeline.ground.checks import is_integer, name_of, parse_members, require
from ipu_pipeline.ground.errors import without_traceback_note
from ipu_pipeline.ground.host import count_cores
from ipu_pipeline.ground.pytrees import as_shapes, num_bytes
from ipu_pipeline.ground.tables import align, describe_bytes, shorten

_WIDTH = 60  # of a stage's layers in the table
_PARTS_PER_STAGE = 12  # of a model, on average, and at most: then stages differ by a few percent
_OWN = ("parameters", "device_mapping", "hooks")  # that layers have of their own
# options of pipelines that say something of each stage, or do not go with several devices
_NOT_FOR_LAYERS = (
    "forward_options",
    "backward_options",
    "execution_phases",
    "num_serialized",
    "dispatch_plan",
)


@dataclass(frozen=True)
class SplitRow:
    """A split of a `SplitTable`.

    Attributes:
      what: "chosen", "even by layers" (or "even by parts") or "best other".
      groups: the names of each stage's layers.
      forward_seconds: the time of a micro-batch in each stage's forward; for the last stage, forward and
        backward.
      backward_seconds: the time of a micro-batch in each stage's backward.
      step_seconds: the predicted time of a step if each device has its own cores.
      shared_seconds: the predicted time of a step if the devices share this machine's cores with each
        other and with other replicas, as virtual devices of a CPU do; None if they do not.
      chunk_size: the number of micro-batches per program with the shortest times, among the pipeline's
        choices.
      num_bytes: the estimated most bytes on each device, for any number of micro-batches per program that
        the pipeline may choose; empty with all stages on one device.
      fits: whether these are within the limit.
    """

    what: str
    groups: tuple[tuple[str, ...], ...]
    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    step_seconds: float
    shared_seconds: float | None
    chunk_size: int
    num_bytes: tuple[int, ...]
    fits: bool

    @property
    def stage_seconds(self) -> tuple[float, ...]:
        """The time of a micro-batch in each stage, forward and backward."""
        pairs = zip(self.forward_seconds, self.backward_seconds, strict=True)
        return tuple(forward + backward for forward, backward in pairs)


@dataclass(frozen=True)
class SplitTable:
    """The reasons for a split: costs of layers and predictions. `print` shows it.

    Example:
      >>> parts = [lambda x: jnp.tanh(x @ ipu.get_variable("w", [8, 8]))] + [jnp.tanh] * 3
      >>> x = np.ones([4, 8], np.float32)
      >>> stages = engine.auto_stages(parts, 2, x, num_micro_batches=4, measure=False)
      >>> print(stages.table.cuts)
      cut by layers, counted, all 3 simulated:
        stage  device  layers                takes  crosses the cut before it
        0      0    <lambda>              60 us
        1      1    tanh.0 to tanh.2 (3)  60 us                      128 B
        a step takes 325 us, stage 1 is the longest; even by layers 325 us; best other 325 us

    Attributes:
      rows: the chosen split, the even one by the number of layers, and the best of the others if each
        device has its own cores; equal ones are listed once.
      layers: the names of the layers.
      forward_seconds: the time of a micro-batch in each layer's forward, as a separate program. The last
        layer's program includes its backward, or the input gradients if the backward is split.
      backward_seconds: the time of a micro-batch in each layer's backward.
      update_seconds: the time of each layer's weight update.
      sent_bytes: the bytes that cross the cut before each layer, there and back, per micro-batch.
      source: the source of the times: "measured on ..." or "counted".
      search: how splits were searched, in words.
      device_mapping: the device of each stage.
      unit: the word for a layer: "layer" or "part".
    """

    rows: tuple[SplitRow, ...]
    layers: tuple[str, ...]
    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    update_seconds: tuple[float, ...]
    sent_bytes: tuple[int, ...]
    source: str
    search: str
    device_mapping: tuple[int, ...]
    unit: str = "layer"

    def __str__(self) -> str:
        """Formats the layers, and the splits with their stages, as tables."""
        lines = [f"{self.unit.capitalize()}s ({self.source}):"]
        columns = [self.unit, "forward", "backward", "update", "crosses the cut before it"]
        cells = zip(
            self.layers,
            map(describe_seconds, self.forward_seconds),
            map(describe_seconds, self.backward_seconds),
            map(describe_seconds, self.update_seconds),
            ["", *map(describe_bytes, self.sent_bytes[1:])],
            strict=True,
        )
        lines += align([columns, *([shorten(row[0], _WIDTH), *row[1:]] for row in cells)], (1, 2, 3, 4))
        lines.append(f"Splits ({self.search}):")
        is_shared = self.rows[0].shared_seconds is not None
        on_cores = [f"on {count_cores()} shared cores"] * is_shared
        table = [["", "stages", "longest stage", "step", *on_cores, "per program", "fullest device"]]
        for row in self.rows:
            longest = max(row.stage_seconds)
            cells_of_row = [
                row.what,
                " ".join(str(len(group)) for group in row.groups) + f" {self.unit}s",
                f"{describe_seconds(longest)} (stage {row.stage_seconds.index(longest)})",
                describe_seconds(row.step_seconds),
                *([] if row.shared_seconds is None else [describe_seconds(row.shared_seconds)]),
                str(row.chunk_size),
                (describe_bytes(max(row.num_bytes)) if row.num_bytes else "not known")
                + ("" if row.fits else ", too much"),
            ]
            table.append(cells_of_row)
        lines += align(table, range(2, len(table[0])))
        return "\n".join(lines)

    @property
    def costs(self) -> Costs | None:
        """The measured costs of the chosen stages, without transfers; None if they were counted."""
        if not self.source.startswith("measured"):
            return None
        chosen, first, update = self.rows[0], 0, []
        for group in chosen.groups:
            update.append(sum(self.update_seconds[first : first + len(group)]))
            first += len(group)
        return Costs.of(
            len(chosen.groups),
            forward=chosen.forward_seconds,
            backward=chosen.backward_seconds,
            update=update,
            host=HOST_SECONDS,
        )

    @property
    def cuts(self) -> str:
        """The chosen stages, the bytes that cross between them, and the times of other splits, in lines."""
        chosen, *other_rows = self.rows
        rows = [["stage", "device", f"{self.unit}s", "takes", "crosses the cut before it"]]
        first = 0
        for stage, group in enumerate(chosen.groups):
            names = [shorten(name, _WIDTH // 2) for name in (group[0], group[-1])]
            named = names[0] if len(group) == 1 else f"{names[0]} to {names[1]} ({len(group)})"
            sent = describe_bytes(self.sent_bytes[first]) if stage else ""
            seconds = describe_seconds(chosen.stage_seconds[stage])
            rows.append([str(stage), str(self.device_mapping[stage]), named, seconds, sent])
            first += len(group)
        longest = chosen.stage_seconds.index(max(chosen.stage_seconds))
        notes = [f"a step takes {describe_seconds(chosen.step_seconds)}, stage {longest} is the longest"]
        notes += [f"{row.what} {describe_seconds(row.step_seconds)}" for row in other_rows]
        lines = [f"cut by {self.unit}s, {self.source}, {self.search}:"]
        return "\n".join([*lines, *align(rows, (3, 4)), f"  {'; '.join(notes)}"])


class AutoStages(list[Any]):
    """Stages as a list, for a pipeline.

    Attributes:
      groups: the numbers of each stage's layers.
      table: the reasons for the split.
    """

    def __init__(self, stages: Iterable[Any], groups: Sequence[Sequence[int]], table: SplitTable) -> None:
        """Takes the stages, the layers of each, and the table."""
        super().__init__(stages)
        self.groups = tuple(tuple(group) for group in groups)
        self.table = table


def auto_stages(
    layers: Sequence[StageEntry],
    num_stages: int,
    micro_batch: Any,
    *inputs: Any,
    bytes_per_ipu: int | None = None,
    measure: bool = True,
    **options: Any,
) -> AutoStages:
    """Groups layers into stages so that the predicted step time is shortest.

    A step is simulated with the schedule, the device mapping, and the times of each layer's programs, its
    part of the weight update and the transfers between layers. These times are measured on this machine's
    devices, once for equal programs, and stored beside JAX's compiled programs, or in
    ~/.cache/ipu_pipeline, so that the next run makes the same choice. They are estimated from counted
    operations if layers print, call back into Python or have a `while_loop`, or if the program runs in
    several processes, each of which would measure differently.

    Example:
      >>> parts = [lambda x: jnp.tanh(x @ ipu.get_variable("w", [8, 8]))] + [jnp.tanh] * 3
      >>> x = np.ones([4, 8], np.float32)
      >>> stages = engine.auto_stages(parts, 2, x, num_micro_batches=4, measure=False)
      >>> stages.groups
      ((0,), (1, 2, 3))

    Args:
      layers: functions or `Stage`s like stages, without parallel ones: each takes the previous one's
        result.
      num_stages: the number of stages, from 1 to the number of layers.
      micro_batch: a micro-batch, or the same pytree of `jax.ShapeDtypeStruct`s; None for no feed.
      *inputs: the inputs that are constant during a step, or their shapes and dtypes.
      bytes_per_ipu: the most bytes that a device may hold, by the estimate for each split: variables,
        optimizer state, accumulators, micro-batches in flight and temporaries. None: no limit.
      measure: False: times are estimated from counted operations, and nothing is run.
      **options: the options of the pipeline that you will make from the stages, fields of
        `PipelineOptions`. `num_micro_batches` must be given. `parameters` are the layers' parameters, which
        the returned stages have. `device_mapping` has the device of each stage; by default each has its
        own.

    Returns:
      The stages. Variables of layers with a pytree of parameters are named after layers, `layer3/...`, not
      after stages, so that names do not depend on the split.

    Raises:
      TypeError: there is no such option.
      ValueError: an argument has a wrong value, a layer has a fault, or the layers do not fit.
    """
    if not isinstance(layers, (list, tuple)) or not layers:
        raise ValueError(f"auto_stages: layers must be a list of at least one function; got {layers!r}.")
    for number, layer in enumerate(layers):
        if isinstance(layer, (list, tuple)) or not (callable(layer) or isinstance(layer, Stage)):
            raise ValueError(
                f"auto_stages: layers[{number}] must be a function or a Stage, since layers come one after "
                f"another; got {layer!r}."
            )
    task = _Task.of("auto_stages", num_stages, len(layers), "layers", bytes_per_ipu, options)
    entries = _name_layers(layers, task.options.parameters)
    names = [layer.__name__ if isinstance(layer, Stage) else name_of(layer) for layer in entries]
    chain = [range(max(0, number - 1), number) for number in range(len(entries))]

    def join(groups: Sequence[Sequence[int]]) -> list[StageEntry]:
        return [join_layers([entries[layer] for layer in group]) for group in groups]

    groups, table = _Layers(entries, names, task, micro_batch, inputs, measure, join).choose(chain)
    return AutoStages(join(groups), groups, table)


class ModelStages(AutoStages):
    """The stages into which `split` cuts a model, as a list, for a pipeline.

    Example:
      >>> def model(w, x):
      ...     for _ in range(4):
      ...         x = jnp.tanh(x @ w)
      ...     return x
      >>> stages = engine.split(
      ...     model,
      ...     2,
      ...     np.ones([4, 8], np.float32),
      ...     parameters=np.eye(8, dtype=np.float32),
      ...     num_micro_batches=4,
      ...     measure=False,
      ... )
      >>> len(stages)
      2

    Attributes:
      groups: the numbers of each stage's parts.
      table: the reasons for the split.
      scopes: the names of the scopes (`jax.named_scope`) of each stage's operations.
    """

    def __init__(
        self,
        parts: ModelParts,
        groups: Sequence[Sequence[int]],
        table: SplitTable,
        reused: Collection[str],
        trace: Callable[[Any, Any], ModelGraph],
    ) -> None:
        """Makes the stages of a model.

        Args:
          parts: the model.
          groups: see above.
          table: see above.
          reused: full names of variables that its program had before.
          trace: traces the model for other shapes; see `ModelCut`.
        """
        super().__init__(ModelCut(parts, groups, reused, trace).stages, groups, table)
        self._graph = parts.graph
        self.scopes = tuple(parts.find_scopes(group) for group in groups)

    def parameters(self, state: PipelineState) -> Any:
        """Returns the model's pytree of parameters from a state of a pipeline of these stages.

        Stacked parameters of layers are stacked again, on the first layer's device.

        Raises:
          ValueError: the model has no `parameters`, or the state belongs to another pipeline.
        """
        layout = self._graph.parameters
        if layout is None:
            raise ValueError(
                "The model has no pytree of parameters: its variables come from get_variable, by the names "
                "that they have in the state."
            )
        return layout.read(state.variables)


def split(
    model: StageEntry,
    num_stages: int,
    micro_batch: Any,
    *inputs: Any,
    parameters: Any = None,
    bytes_per_ipu: int | None = None,
    measure: bool = True,
    cut_scans: bool = True,
    **options: Any,
) -> ModelStages:
    """Splits a model that is one function into stages so that the predicted step time is shortest.

    The model is traced, and cut into parts where few values are live. Skip connections go directly from the
    stage that computes a value to the stage that reads it. A scan over layers with stacked parameters is
    cut between its iterations. Masks, random keys and variables cast to other dtypes are computed in each
    stage that reads them. Parts are measured and grouped like layers, see `auto_stages`. If branches allow
    several orders of the parts, several are tried and the best is taken.

    The operations inside `jax.checkpoint`, a conditional, another loop or a function with custom
    derivatives stay in one stage.

    Args:
      model: `model(*inputs, *micro_batch)`, with variables by `get_variable`; with `parameters` these come
        first. Or a `Stage`.
      num_stages: the number of stages, at least 1.
      micro_batch: a micro-batch, or the same pytree of `jax.ShapeDtypeStruct`s; None for no feed.
      *inputs: the inputs that are constant during a step, or their shapes and dtypes.
      parameters: the pytree of parameters, as for `Stage`. Their variables are named `model/` and the path.
        None: the model uses `get_variable`, or has no variables.
      bytes_per_ipu: see `auto_stages`.
      measure: see `auto_stages`.
      cut_scans: False keeps each scan over layers in one stage, and its parameters stacked.
      **options: see `auto_stages`. `trained` has names of the stages' variables.

    Returns:
      The stages. For micro-batches of other shapes, the model is cut in the same places. Names of variables
      and random numbers do not depend on the cuts: a state of one split fits all splits. A stacked
      parameter of a scan that is cut becomes a variable for each layer, `model/blocks/w/0` and so on, which
      optimizers see one by one.

    Raises:
      TypeError: there is no such option.
      ValueError: an argument has a wrong value, the model has too few parts, or they do not fit.
      Others: errors that the model raises.
    """
    if not callable(model) and not isinstance(model, Stage):
        raise ValueError(f"split: model must be a function or a Stage; got {model!r}.")
    if isinstance(model, Stage) and parameters is not None:
        raise ValueError("split: parameters must be None if the model is a Stage, which has its own.")
    if options.get("tensor_parallel") is not None:
        raise ValueError(
            "split: tensor_parallel is not supported; leave it out, or write the stages yourself."
        )
    task = _Task.of("split", num_stages, None, "parts", bytes_per_ipu, options)
    if parameters is not None:
        model = Stage(model, parameters, "model")  # type: ignore[arg-type]  # it is a function
    surroundings = Surroundings.now(task.options.hooks.program_names)
    graph = _trace_model(model, task.options, micro_batch, inputs, cut_scans)

    def trace(args: Any, kwargs: Any) -> ModelGraph:
        hooks = dataclasses.replace(task.options.hooks, program_names=surroundings.names.copy())
        options = dataclasses.replace(task.options, hooks=hooks)
        element = kwargs or args[len(inputs) :] or None
        return surroundings.run(_trace_model, model, options, element, args[: len(inputs)], cut_scans)

    parts = ModelParts(graph, num_stages, _PARTS_PER_STAGE * max(num_stages, 2))
    number = len(parts.names)
    if number < num_stages:
        raise ValueError(
            f"split: num_stages must be at most {number}, the parts into which the model can be "
            f"cut; got {num_stages}. What jax.checkpoint, a loop or a function with custom derivatives "
            "computes is one part; so is a scan over layers whose parameters are transposed, sliced or "
            "reshaped before it."
        )

    def join(groups: Sequence[Sequence[int]]) -> list[StageEntry]:
        return list(make_model_stages(parts, groups))

    single_parts = join([[part] for part in range(number)])
    layers = _Layers(single_parts, parts.names, task, micro_batch, inputs, measure, join)
    groups, table = layers.choose(parts.before)
    return ModelStages(parts, groups, table, task.options.hooks.program_names.variables, trace)


def _trace_model(
    model: StageEntry, options: PipelineOptions, micro_batch: Any, inputs: Sequence[Any], cut_scans: bool
) -> ModelGraph:
    if isinstance(model, Stage):
        layout: Layout | None = model.layout(0)
        function = model.with_variables(model.layout(0), set())
    else:
        layout, function = None, model
    shapes = as_shapes(micro_batch, "The micro-batch"), as_shapes(list(inputs), "The inputs")
    hooks, trains = options.hooks, options.loss is not None
    with without_traceback_note():
        traced = trace_model(function, *shapes, trains, hooks.program_names, hooks.captures)
    return ModelGraph(traced, hooks.captures.values, layout, model, cut_scans=cut_scans)


@dataclass(frozen=True)
class _Task:
    """The checked arguments of `auto_stages` or `split`.

    Attributes:
      num_stages: the number of stages.
      options: of the pipeline.
      mapping: the device of each stage.
      bytes_per_ipu: the most that a device may hold; None: anything.
      unit: what layers are called in tables.
      caller: what errors call the function that was called.
    """

    num_stages: int
    options: PipelineOptions
    mapping: tuple[int, ...]
    bytes_per_ipu: int | None
    unit: str
    caller: str

    @classmethod
    def of(
        cls,
        caller: str,
        num_stages: int,
        num_layers: int | None,
        units: str,
        bytes_per_ipu: int | None,
        options: dict[str, Any],
    ) -> _Task:
        """Checks arguments."""
        if not is_integer(num_stages, 1) or (num_layers is not None and num_stages > num_layers):
            most = "" if num_layers is None else f" to the number of layers, {num_layers}"
            least = "of at least 1" if num_layers is None else "from 1"
            raise ValueError(f"{caller}: num_stages must be an integer {least}{most}; got {num_stages!r}.")
        rule = f"{caller}: bytes_per_ipu must be an integer of at least 1, or None"
        require(bytes_per_ipu is None or is_integer(bytes_per_ipu, 1), rule, bytes_per_ipu)
        pipeline_options = make_options(caller, **options)
        if pipeline_options.num_micro_batches is None:
            raise ValueError(f"{caller}: num_micro_batches must be given, as the best split depends on it.")
        for name in _NOT_FOR_LAYERS:
            if name in options and options[name] not in (None, 1):
                raise ValueError(
                    f"{caller}: {name} is not supported here; got {options[name]!r}. Pass it to the "
                    "pipeline only."
                )
        mapping = _find_mapping(caller, pipeline_options, num_stages)
        bytes_per_ipu = _find_limit(caller, pipeline_options.schedule, bytes_per_ipu)
        if bytes_per_ipu is not None and len(set(mapping)) == pipeline_options.num_devices_per_ipu == 1:
            raise ValueError(
                f"{caller}: bytes_per_ipu needs several devices; on one, everything is one program. Leave "
                "it out."
            )
        return cls(num_stages, pipeline_options, mapping, bytes_per_ipu, units.removesuffix("s"), caller)


def _find_mapping(caller: str, options: PipelineOptions, num_stages: int) -> tuple[int, ...]:
    numbers = options.device_mapping
    if numbers is None:
        return tuple(range(num_stages))
    mapping: tuple[Any, ...] = tuple(numbers) if isinstance(numbers, Iterable) else ()
    rule = f"{caller}: device_mapping must have the number of a device for each of the {num_stages} stages"
    require(len(mapping) == num_stages and all(is_integer(ipu, 0) for ipu in mapping), rule, numbers)
    if num_stages > 1 and len(set(mapping)) == options.num_devices_per_ipu == 1:
        raise ValueError(
            f"{caller}: device_mapping must have several devices; got {list(mapping)}. With all stages on "
            "one, everything is one program, and a step takes as long wherever it is cut."
        )
    return tuple(map(int, mapping))


def _find_limit(caller: str, schedule: Any, bytes_per_ipu: int | None) -> int | None:
    """The limit of bytes, which a search of the order must have, too."""
    if not isinstance(schedule, SearchedSchedule):
        return bytes_per_ipu
    if bytes_per_ipu is not None and schedule.bytes_per_ipu is None:
        raise ValueError(
            f"{caller}: with bytes_per_ipu a schedule that is searched needs the limit, too, since it "
            "may take all memory otherwise. Give the schedule "
            f"SearchedSchedule(bytes_per_ipu={bytes_per_ipu}) here and to the pipeline."
        )
    return schedule.bytes_per_ipu if bytes_per_ipu is None else bytes_per_ipu


def _name_layers(layers: Sequence[StageEntry], parameters: Sequence[Any] | None) -> list[StageEntry]:
    """Layers with names that do not depend on the stage that they are in."""
    entries = (
        list(layers) if parameters is None else with_parameters(layers, parameters, "layers", "parameters")
    )
    named: list[StageEntry] = []
    for number, entry in enumerate(entries):
        if isinstance(entry, Stage) and entry.name is None:
            entry = copy.copy(entry)
            entry.name = f"layer{number}"
        named.append(entry)
    return named


class _Layers:
    """Layers as a pipeline in which each is a stage, with their costs."""

    def __init__(
        self,
        entries: Sequence[StageEntry],
        names: Sequence[str],
        task: _Task,
        micro_batch: Any,
        inputs: Sequence[Any],
        measure: bool,
        join: Callable[[Sequence[Sequence[int]]], Sequence[StageEntry]],
    ) -> None:
        """Traces layers, and measures them, alone and in pairs."""
        self._names, self._task = number_names(names), task
        options, mapping = task.options, task.mapping
        self._options, self._mapping, self._num_stages = options, mapping, task.num_stages
        number = len(entries)
        problem = SplitProblem(
            Costs.of(number, forward=1.0),
            0.0,
            task.num_stages,
            options.schedule,
            options.num_micro_batches or 1,
            mapping,
            options.optimizer is not None,
            bytes_per_ipu=task.bytes_per_ipu,
        )
        is_halved = bool(problem.timetable.halved)
        shared_options = {
            field.name: getattr(options, field.name)
            for field in dataclasses.fields(options)
            if field.name not in (*_NOT_FOR_LAYERS, *_OWN, "devices", "schedule")
        }
        shared_options |= {"num_replicas": 1, "shard": ()}
        schedule = options.schedule
        may_chunk = schedule == "grouped" and options.recompute is None and not options.offload
        may_chunk = may_chunk and not self._is_one_program

        def trace(stages: Sequence[StageEntry]) -> Pipeline:
            pipeline = Pipeline(
                list(stages),
                schedule="zero_bubble" if is_halved else "interleaved",
                device_mapping=range(len(stages)),
                dispatch_plan=Chunking() if len(stages) > 1 else None,
                hooks=dataclasses.replace(
                    options.hooks, program_names=ProgramNames(), gathers_outputs=True
                ),
                **shared_options,
            )
            pipeline.trace(micro_batch, *inputs)
            return pipeline

        # The layers, each as a stage.
        self._pipeline = trace(entries)
        crossings = find_crossings(self._pipeline.traced, self._pipeline.programs, range(number))
        self._crossings = [crossing for crossing in crossings if crossing.stage is not None]
        programs = [
            program for stage in self._pipeline.programs for program in (stage.forward, *stage.backwards)
        ]
        if may_chunk and not any(program.reaches_python for program in programs):
            sizes = tuple(possible_chunk_sizes(problem.num_micro_batches))
            most = options.max_chunked_bytes
            problem = dataclasses.replace(problem, chunk_sizes=sizes, max_chunked_bytes=most)
        # Their costs, alone and in pairs.
        self._platform, self._source = "cpu", "counted"
        self._homes: list[list[Any]] = []  # the devices on which layers are measured
        measured, overhead = self._measure(measure)
        memory, cores = None, count_cores() / options.num_replicas
        if not self._is_one_program:
            memory = _find_memory(self._pipeline, options, measured.num_temporary_bytes)
        self._problem = dataclasses.replace(
            problem,
            layers=dataclasses.replace(measured.costs, transfers={}),
            overhead=overhead,
            memory=memory,
            sent=_find_sent(self._crossings, measured.costs.transfers),
            cores=cores if self._homes and self._platform == "cpu" else None,
        )
        pairs: list[FusedPair] = []
        if self._homes and number > 2:
            for first in (0, 1):
                groups = [[0]] * first + [list(range(number))[n : n + 2] for n in range(first, number, 2)]
                pairs += self._measure_pairs(groups, trace(join(groups)))
        self._problem = dataclasses.replace(self._problem, fused=tuple(pairs))

    @property
    def _is_one_program(self) -> bool:
        """Whether all stages are on one device."""
        return len(set(self._mapping)) == self._options.num_devices_per_ipu == 1

    def _measure(self, may_run: bool) -> tuple[Measured, float]:
        """The costs of the layers, and the seconds of the shortest program."""
        pipeline, number = self._pipeline, len(self._names)
        devices = self._options.devices
        reason = "" if may_run else "measure=False"
        if may_run and (peers.current() is not None or jax.process_count() > 1):
            reason = "there are several processes"
        if number == 1 or self._num_stages == 1:  # there is one split
            self._source = "counted"
            return self._count_costs(), nominal_speed(self._platform).per_dispatch
        reason = reason or self._in_layers(why_not_timed(pipeline.programs))
        if reason:
            if devices is not None:
                self._platform = devices[0].platform
            self._source = f"counted, since {reason}" if may_run else "counted"
            return self._count_costs(), nominal_speed(self._platform).per_dispatch
        available = list(jax.devices() if devices is None else devices)
        per_stage = self._options.num_devices_per_ipu
        starts = range(0, len(available) - per_stage + 1, per_stage)
        self._homes = [available[first : first + per_stage] for first in starts][:2]
        if not self._homes:
            raise ValueError(
                f"{self._task.caller}: a stage takes {per_stage} devices, and there are {len(available)}. "
                "ipu_pipeline.set_num_devices makes more on a CPU."
            )
        self._platform = self._homes[0][0].platform
        self._source = f"measured on {self._homes[0][0].device_kind}"
        measured, group = self._run(pipeline)
        return measured, time_shortest(group)

    def _run(self, pipeline: Pipeline, is_whole: bool = True) -> tuple[Measured, DeviceGroup]:
        """Measures a pipeline's stages, which take turns on the devices; `is_whole`: updates, too."""
        homes, number = self._homes, len(pipeline.device_mapping)
        runner = pipeline.prepare([device for n in range(number) for device in homes[n % len(homes)]])
        assert isinstance(runner, PlanRunner)
        measured = runner.measure(HOST_SECONDS, with_updates=is_whole, with_skips=is_whole)
        return measured, runner.placement.groups[0]

    def _measure_pairs(self, groups: Sequence[Sequence[int]], pipeline: Pipeline) -> list[FusedPair]:
        """The seconds that pairs of layers save, from a pipeline of such pairs and single layers."""
        problem = self._problem
        alone, together = problem.layers, self._run(pipeline, is_whole=False)[0].costs
        last = len(self._names) - 1 if alone.is_fused and problem.training else None
        halved = bool(problem.timetable.halved)

        def net(*times: float) -> float:
            return sum(max(time - problem.overhead, 0.0) for time in times)

        pairs = []
        for stage, group in enumerate(groups):
            if len(group) < 2:
                continue
            second = [alone.weight_gradients[layer] if halved else 0.0 for layer in group]
            joined_second = together.weight_gradients[stage] if halved else 0.0
            forward = [alone.forward[layer] for layer in group]
            backward = [alone.backward[layer] - half for layer, half in zip(group, second, strict=True)]
            # A pair that took longer than its layers was measured while something else ran.
            of_second = net(*second) - net(joined_second)
            if group[1] == last:  # whose forward is one program with the backward, or its first half
                forward += backward
                of_both = of_second = max(0.0, of_second)
            else:
                of_first = net(*backward) - net(together.backward[stage] - joined_second)
                of_both = max(0.0, of_first + of_second)
            of_forward = max(0.0, net(*forward) - net(together.forward[stage]))
            pairs.append(FusedPair((group[0], group[1]), of_forward, of_both, of_second))
        return pairs

    def _in_layers(self, text: str) -> str:
        """A text about programs of stages, as one about layers."""
        return re.sub(r"stage(\d+)_\w+", lambda match: self._names[int(match[1])], text)

    def _count_costs(self) -> Measured:
        """The costs of the layers, from counted operations and nominal speeds."""
        pipeline, speed = self._pipeline, nominal_speed(self._platform)
        programs = [program for stage in pipeline.programs for program in (stage.forward, *stage.backwards)]
        named = frozenset().union(*(program.uncounted for program in programs))
        uncounted = sorted(name for name in named if not name.startswith("debug_"))  # which are prints
        if uncounted and self._num_stages > 1:
            raise ValueError(
                f"{self._task.caller}: {self._task.unit}s call {', '.join(uncounted)}, whose time is "
                f"not known from their operations and is not measured here ({self._source}). Give the "
                "stages yourself."
            )
        weights = [count_seconds(stage.weights, speed) for stage in pipeline.programs]
        first = [count_seconds(stage.backward, speed) for stage in pipeline.programs]
        sizes: dict[StageEdge, int] = {}
        for crossing in self._crossings:
            edge = _edge(crossing)
            sizes[edge] = sizes.get(edge, 0) + num_bytes([crossing.aval])
        transfers = {edge: speed.per_transfer + size * speed.per_byte for edge, size in sizes.items()}
        number = len(pipeline.programs)
        update = [0.0] * number
        for program in () if pipeline.built.updates is None else pipeline.built.updates.updates:
            update[program.stage] += program.num_operations * speed.per_operation + speed.per_dispatch
        costs = Costs.of(
            number,
            forward=[count_seconds(stage.forward, speed) for stage in pipeline.programs],
            backward=[of_inputs + of_weights for of_inputs, of_weights in zip(first, weights, strict=True)],
            weight_gradients=weights,
            update=update,
            transfer=transfers,
            host=HOST_SECONDS,
        )
        return Measured(costs, (0,) * number)

    def choose(self, before: Sequence[Iterable[int]]) -> tuple[list[list[int]], SplitTable]:
        """Chooses among the best splits by what the pipeline makes of them, with its chunks.

        Returns:
          The layers of each stage, and the table.
        """
        # The search, and the split that is even by layers.
        problems = [self._problem]
        if self._problem.cores is not None:  # else the best one on devices of their own may not be seen
            problems.append(dataclasses.replace(self._problem, cores=None))
        most = num_simulations(self._problem) // len(problems)
        searched = [find_graph_split(problem, before, most) for problem in problems]
        candidates: dict[tuple[frozenset[int], ...], _Candidate] = {}

        def add(order: Order, problem: SplitProblem, split: Split) -> _Candidate:
            groups = [[order[place] for place in group] for group in problem.groups(split)]
            key = tuple(map(frozenset, groups))
            if key not in candidates:
                candidates[key] = _Candidate(
                    groups, self._row(problem, split, [self._names[n] for n in order])
                )
            return candidates[key]

        for order, problem, result in searched:
            for split in (result.split, *(split for split, _judged in result.others)):
                add(order, problem, split)
        evens = [
            add(order, problem, even_split(problem.num_layers, problem.num_stages))
            for order, problem, _result in searched
        ]
        # The best of them by the pipeline's own chunks.
        fitting = [candidate for candidate in candidates.values() if candidate.row.fits]
        chosen = min(fitting, key=_Candidate.rank)
        even = chosen if chosen in evens else evens[0]
        even_label = f"even by {self._task.unit}s"
        rows = [chosen.named("chosen, " + even_label if chosen is even else "chosen")]
        if chosen is not even:
            rows.append(even.named(even_label))
        fitting = [candidate for candidate in fitting if candidate is not chosen and candidate is not even]
        if fitting:
            best = min(fitting, key=lambda candidate: (candidate.row.step_seconds, candidate.groups))
            rows.append(best.named("best other"))
        is_exact = all(result.is_exact for _order, _problem, result in searched)
        counts = [result.num_simulated for _order, _problem, result in searched]
        count_text = f"all {counts[0]:,}" if is_exact else f"{sum(counts):,}"
        judged = ' by "zero_bubble"' if isinstance(self._problem.schedule, SearchedSchedule) else ""
        in_order = list(itertools.chain(*chosen.groups))
        costs = self._problem.layers
        table = SplitTable(
            tuple(rows),
            tuple(self._names[layer] for layer in in_order),
            tuple(costs.forward[layer] for layer in in_order),
            tuple(costs.backward[layer] for layer in in_order),
            tuple(costs.update[layer] for layer in in_order),
            self._sent_bytes(in_order),
            self._source,
            f"{count_text} simulated{judged}",
            self._mapping,
            self._task.unit,
        )
        return chosen.groups, table

    def _sent_bytes(self, order: Sequence[int]) -> tuple[int, ...]:
        """The bytes that cross the cut before each layer of an order, there and back."""
        places = {layer: place for place, layer in enumerate(order)}
        sizes = [0] * len(order)
        for crossing in self._crossings:
            ends = sorted(places[layer] for layer in _edge(crossing))
            for cut in range(ends[0] + 1, ends[1] + 1):
                sizes[cut] += num_bytes([crossing.aval])
        return tuple(sizes)

    def _row(self, problem: SplitProblem, split: Split, names: Sequence[str]) -> SplitRow:
        cores = self._problem.cores
        chunk_size = choose_chunk_size(
            problem.possible_chunk_sizes(split), lambda size: problem.step_time(split, cores, size)
        )
        costs = problem.costs(split)
        return SplitRow(
            "",
            tuple(tuple(names[layer] for layer in group) for group in problem.groups(split)),
            costs.forward,
            costs.backward,
            problem.step_time(split, None, chunk_size),
            None if cores is None else problem.step_time(split, cores, chunk_size),
            chunk_size,
            problem.num_bytes(split),
            not problem.excess(split),
        )


class _Candidate(NamedTuple):
    """A split: the layers of each stage, and its row in the table."""

    groups: list[list[int]]
    row: SplitRow

    def rank(self) -> Any:
        """The key by which the best split is chosen."""
        return weigh(self.row.step_seconds, self.row.shared_seconds), self.groups

    def named(self, label: str) -> SplitRow:
        return dataclasses.replace(self.row, what=label)


def _edge(crossing: Crossing) -> StageEdge:
    """The layers that a crossing goes from and to, where each layer has a device of its own."""
    assert crossing.stage is not None
    return crossing.stage, crossing.target


def _find_sent(
    crossings: Iterable[Crossing], transfers: Mapping[StageEdge, float]
) -> tuple[SentValue, ...]:
    """The values that layers send each other; the time of an edge is divided over them by their bytes."""
    values: dict[tuple[Source, bool], dict[StageEdge, int]] = {}
    sizes: dict[StageEdge, int] = {}
    for crossing in crossings:
        edge, size = _edge(crossing), num_bytes([crossing.aval])
        values.setdefault((crossing.value, crossing.is_backward), {})[edge] = size
        sizes[edge] = sizes.get(edge, 0) + size
    sent_values = []
    for (source, is_backward), edges in values.items():
        seconds = [transfers.get(edge, 0.0) * size / max(sizes[edge], 1) for edge, size in edges.items()]
        readers = tuple(edge[0 if is_backward else 1] for edge in edges)
        sent_values.append(SentValue(source.stage, readers, max(seconds), is_backward))
    return tuple(sent_values)


def _find_memory(pipeline: Pipeline, options: PipelineOptions, temporaries: Sequence[int]) -> LayerMemory:
    """The memory of each layer, with a copy of what it shares with others."""
    traced, programs = pipeline.traced, pipeline.programs
    state = _State(pipeline, options)
    sharing: dict[str, list[int]] = {}
    fed: dict[Source, list[int]] = {}
    holding: dict[Source, set[int]] = {}  # value -> the layers that hold it, and the one where it is anyway
    for index, (stage, stage_programs) in enumerate(zip(traced.stages, programs, strict=True)):
        for spec in stage.variables:
            sharing.setdefault(spec.name, []).append(index)
        for source in read_sources(stage, stage_programs.forward, *stage_programs.backwards):
            if source.kind == "element":
                fed.setdefault(source, []).append(index)
        for source in read_sources(stage, *stage_programs.backwards):
            if source.is_of_micro_batch:
                holding.setdefault(source, set()).add(index)
        recomputes = options.recompute is not None  # then a stage keeps what it is given, and no results
        for values in stage_programs.forward.results:
            is_kept = recomputes or any(value.kind is ValueKind.RESIDUAL for value in values)
            for value in values if is_kept else ():
                if value.kind is ValueKind.OUTPUT:
                    holding.setdefault(Source("output", value.index, index), set()).add(index)
    stages = plan_memory(pipeline)
    return LayerMemory(
        tuple(state.of_layer(index) for index in range(len(programs))),
        tuple(stage.num_held_bytes for stage in stages),
        tuple(stage.num_between_bytes for stage in stages),
        tuple(temporaries),
        tuple(
            (tuple(sorted(layers)), num_bytes([traced.aval(source)]))
            for source, layers in holding.items()
            if len(layers) > 1
        ),
        tuple((tuple(layers), state.of_copy(name)) for name, layers in sharing.items() if len(layers) > 1),
        tuple((tuple(layers), num_bytes([traced.aval(source)])) for source, layers in fed.items()),
    )


class _State:
    """The bytes of state that layers need on a device all the time."""

    def __init__(self, pipeline: Pipeline, options: PipelineOptions) -> None:
        self._pipeline, self._num_replicas = pipeline, options.num_replicas
        self._offload = parse_members(Offload, options.offload, "offload")
        self._shard = parse_members(Shard, options.shard, "shard")
        self._num_devices = options.num_devices_per_ipu
        self._shared = pipeline.traced.shared()

    def of_layer(self, index: int) -> int:
        """The bytes of a layer's variables, accumulators and leaves of the optimizer's state."""
        pipeline = self._pipeline
        size = sum(self.of_copy(spec.name) for spec in pipeline.traced.stages[index].variables)
        if pipeline.built.updates is None or Offload.WEIGHT_UPDATE_VARIABLES in self._offload:
            return size
        is_shared_out = Shard.OPTIMIZER_STATE in self._shard
        leaves = [leaf for leaf in pipeline.built.updates.state_leaves if leaf.stage == index]
        return size + sum(self._part(leaf.aval, leaf.variable, is_shared_out) for leaf in leaves)

    def of_copy(self, name: str) -> int:
        """The bytes of a variable and its accumulator, which each stage that reads it has."""
        spec, dtypes = self._pipeline.traced.variables[name], self._pipeline.built.accumulator_dtypes
        size = 0
        if Offload.WEIGHTS not in self._offload:
            size += self._part(spec, name, Shard.WEIGHTS in self._shard and name not in self._shared)
        if name in dtypes and Offload.GRADIENT_ACCUMULATION_BUFFERS not in self._offload:
            size += self._part(jax.ShapeDtypeStruct(spec.shape, dtypes[name]), name, False)
        return size

    def _part(self, aval: Any, name: str | None, is_shared_out: bool) -> int:
        """The bytes of an array that one device has."""
        size, number = num_bytes([aval]), self._num_replicas
        variables, partitions = self._pipeline.traced.variables, self._pipeline.built.partitions
        if name is not None and name in partitions and aval.shape == variables[name].shape:
            size //= self._num_devices
        if is_shared_out and number > 1 and any(axis and axis % number == 0 for axis in aval.shape):
            size //= number
        return size

"""Compiles a model: captures it, cuts it into stages, and makes a pipeline of the engine."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np
import torch

from ipu_pipeline import engine
from ipu_pipeline.engine import processes, schedules
from ipu_pipeline.engine.fronts import Hooks
from ipu_pipeline.ground.tables import shorten
from ipu_pipeline.poptorch.dtypes import jax_dtype, to_numpy
from ipu_pipeline.poptorch.enums import Liveness, OutputMode
from ipu_pipeline.poptorch.errors import Error
from ipu_pipeline.poptorch.execution.call_values import (
    OTHER_THAN_SHAPES,
    Arguments,
    Batching,
    Signature,
    check_batches,
    check_like_first,
    check_shapes,
    check_written,
    describe_shapes,
    first_micro_batch,
    shapes_of,
)
from ipu_pipeline.poptorch.execution.compiled_model import CompiledModel, Program
from ipu_pipeline.poptorch.execution.host_weights import host_weights_of, on_host
from ipu_pipeline.poptorch.execution.instrumentation import CompileProgress
from ipu_pipeline.poptorch.execution.model_optimizer import ModelOptimizer
from ipu_pipeline.poptorch.execution.process_groups import (
    Processes,
    agree,
    check_alone,
    compare_weights,
    describe_options,
    select_devices,
)
from ipu_pipeline.poptorch.execution.restoration import bind
from ipu_pipeline.poptorch.files.model_files import SavedGraph
from ipu_pipeline.poptorch.graphs.capture import Captured, Modes, capture
from ipu_pipeline.poptorch.graphs.partitions import (
    BlockId,
    Placement,
    Section,
    cut_into_phases,
    cut_into_sections,
    find_blocks,
)
from ipu_pipeline.poptorch.graphs.stages import ModelStages, is_gradient, make_stages, split_stages
from ipu_pipeline.poptorch.logs import logger, warn_once
from ipu_pipeline.poptorch.lowering.interpreter import IndexChecks
from ipu_pipeline.poptorch.operations.custom_ops import check_collectives
from ipu_pipeline.poptorch.options import Options
from ipu_pipeline.poptorch.options.strategies import PhasedExecution, PipelinedExecution, ShardedExecution
from ipu_pipeline.poptorch.replica_groups import GroupRows, ReplicaGrouping, find_groups
from ipu_pipeline.poptorch.thread_views import changed_for_this_thread_alone
from ipu_pipeline.processes import executable_cache

# Parameters with a value for each group of replicas: `replicaGrouping`.


def check_groupings(
    model: torch.nn.Module, groupings: Mapping[str, Any], num_replicas: int
) -> dict[int, GroupRows]:
    """Checks groupings of a model's parameters. Returns the rows of each, by the parameter's id."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    grouping_of: dict[int, tuple[str, ReplicaGrouping]] = {}
    for name, values in groupings.items():
        if name not in parameters:
            raise Error(
                f"per_replica_params names {name!r}, which is no parameter of the model. It has "
                f"{', '.join(parameters) or 'none'}."
            )
        grouping = ReplicaGrouping.check(f"replicaGrouping of {name}", values, num_replicas)
        first_name, first_grouping = grouping_of.setdefault(id(parameters[name]), (name, grouping))
        if first_grouping != grouping:
            raise Error(
                f"{first_name} and {name} are one parameter, and have different groupings: "
                f"{first_grouping} and {grouping}."
            )
    rows_of: dict[int, GroupRows] = {}
    for key, (name, grouping) in grouping_of.items():
        rows = grouping.rows(num_replicas)
        if rows is not None:
            rows.check(name, tuple(parameters[name].shape))
            rows_of[key] = rows
    return rows_of


@contextlib.contextmanager
def showing_first_rows(
    model: torch.nn.Module, rows: Mapping[int, GroupRows]
) -> Iterator[Callable[[Captured], Captured]]:
    """Shows the model's forward only the first row of parameters with rows, inside this `with` block.

    Yields:
      A function that puts the parameters themselves back into a model captured in the block.
    """
    first_rows: dict[int, torch.nn.Parameter] = {}
    originals: dict[int, torch.Tensor] = {}

    def restored(captured: Captured) -> Captured:
        tensors = {key: originals.get(id(tensor), tensor) for key, tensor in captured.tensors.items()}
        return dataclasses.replace(captured, tensors=tensors)

    with changed_for_this_thread_alone(model):
        for module in model.modules():
            parameters: dict[str, Any] = vars(module)["_parameters"]
            for name, parameter in list(parameters.items()):
                if id(parameter) not in rows:
                    continue
                if id(parameter) not in first_rows:
                    with torch.inference_mode(False):
                        row = torch.nn.Parameter(parameter.detach()[0].clone(), parameter.requires_grad)
                    first_rows[id(parameter)], originals[id(row)] = row, parameter
                parameters[name] = first_rows[id(parameter)]
        yield restored


# Compiling.

# Schedules with which stages that follow each other on one IPU are one, as in PopTorch.
_JOINING = ("grouped", "interleaved", "sequential")


@dataclass(frozen=True, eq=False)
class Wrapped:
    """The arguments of a wrapper."""

    model: torch.nn.Module  # the user's model
    modes: Modes  # the training mode of each of its modules
    options: Options  # the model's options, frozen; the output mode is never `Default`
    trains: bool  # whether it is a `trainingModel`


def batching_of(options: Options) -> Batching:
    """Returns how the options cut a call's tensors."""
    groups = find_groups(options.input_cgt, options.input_group_size, options.replication_factor)
    return Batching(options.device_iterations, options.Training.gradient_accumulation, groups)


@processes.one_thread("compiling a PopTorch model")
def compile_model(
    wrapped: Wrapped,
    arguments: Arguments,
    optimizer: torch.optim.Optimizer | None,
    progress: CompileProgress,
    groupings: Mapping[str, Any],
    graph: SavedGraph | None = None,
) -> tuple[CompiledModel, ModelOptimizer | None]:
    """Compiles a model for the arguments of a call."""
    options = wrapped.options
    seed = find_seed(options)

    def begin(stages: ModelStages) -> ModelOptimizer:
        assert optimizer is not None
        tensors, trained, rows = stages.tensors, stages.trained, stages.group_rows
        return ModelOptimizer(optimizer, tensors, trained, options, wrapped.model, rows)

    program, training = _make_program(wrapped, arguments, begin, progress, groupings, graph)
    devices = select_devices(program.pipeline.num_devices * options.replication_factor, options)
    key = make_key(seed)
    checks = options.Precision.floating_point_exceptions
    compiled = CompiledModel(wrapped.model, program, devices, key, checks, Processes.of(options))
    progress.done("trace")
    _log_sections(program.stages)
    return compiled, training


@processes.one_thread("compiling a PopTorch model")
def compile_shapes(
    wrapped: Wrapped,
    arguments: Arguments,
    compiled: CompiledModel,
    training: ModelOptimizer | None,
    progress: CompileProgress,
    groupings: Mapping[str, Any],
) -> None:
    """Compiles a model for arguments of other shapes, too, with a program that uses the same state.

    It is captured anew. One program of dynamic shapes would need them in every lowering and in the engine's
    plans, and what forward does with a length (positions, masks) would have to be right for all.
    """

    def go_on(_stages: ModelStages) -> ModelOptimizer:
        assert training is not None
        training.check_same_frozen()
        return training

    program, _training = _make_program(wrapped, arguments, go_on, progress, groupings)
    progress.done("trace")
    compiled.add(program, num_compiled(wrapped))
    _log_sections(program.stages)


def num_compiled(wrapped: Wrapped) -> int:
    """Returns the number of weight updates that a call's programs are compiled for; 1 in inference."""
    return batching_of(wrapped.options).device_iterations if wrapped.trains else 1


def make_key(seed: int) -> jax.Array:
    """Returns the random key of a seed of 64 bits."""
    return jax.random.fold_in(jax.random.key(seed % 2**32), seed >> 32 & 2**32 - 1)


def find_seed(options: Options) -> int:
    """Returns the seed of a model's random numbers: the option's, or torch's."""
    return options.random_seed if options.is_set("random_seed") else torch.initial_seed()


def _make_program(
    wrapped: Wrapped,
    arguments: Arguments,
    find_optimizer: Callable[[ModelStages], ModelOptimizer],
    progress: CompileProgress,
    groupings: Mapping[str, Any],
    graph: SavedGraph | None = None,
) -> tuple[Program, ModelOptimizer | None]:
    """Makes an untraced program, and the optimizer that trains it."""
    options, trains = wrapped.options, wrapped.trains
    num_replicas = options.replication_factor * Processes.of(options).count
    batching = batching_of(options)
    tensors = first_micro_batch(arguments, batching)
    if names := [name for name, p in wrapped.model.named_parameters() if p.is_inference()]:
        raise Error(
            f"Parameter {names[0]} was made within torch.inference_mode, and cannot be captured. Make the "
            "model outside of it."
        )
    _check_agreement(wrapped, arguments, find_seed(options))

    # The graph.
    if groupings:
        check_alone(options, "replicaGrouping")
    group_rows = check_groupings(wrapped.model, groupings, options.replication_factor)
    if graph is not None:
        if group_rows:
            raise Error(
                "A model from a file cannot have parameters with replicaGrouping: it was captured "
                "without it. Compile the model itself."
            )
        captured = bind(graph, wrapped.model, trains)
    else:
        with (
            processes.occupied("capturing a model"),
            host_weights_of(wrapped.model).unwatched(),
            showing_first_rows(wrapped.model, group_rows) as restored,
        ):
            captured = capture(
                wrapped.model,
                tensors,
                arguments.structure,
                wrapped.modes,
                trains,
                options.source_location_excludes,
                options.value_branches,
            )
            captured = restored(captured)
    progress.done("capture")
    if not trains:
        _warn_of_training_mode(wrapped.modes)

    # The stages.
    anchored = options.anchored_tensors.values()
    if options.index_checks:
        check_alone(options, "Options.checkIndices")
    if any(is_gradient(anchor.long_name) for anchor in anchored):
        check_alone(options, "anchorTensor of a gradient")
    schedule = find_schedule(options)
    is_split = options.num_split_ipus is not None
    if is_split:
        _check_splittable(captured, options)
    stages = make_stages(
        captured,
        wrapped.model,
        lambda graph: cut_into_levels(graph, options, trains, schedule),
        trains,
        [anchor.long_name for anchor in anchored],
        options.module_namescope,
        group_rows,
        IndexChecks() if options.index_checks else None,
        has_scopes=is_split,
    )
    check_collectives(captured.program.graph, num_replicas)
    _check_buffers(stages, options)
    check_written(arguments, stages.written_inputs)
    _warn_of_narrowing([*tensors, *stages.tensors.values()])

    # The pipeline's options.
    training = None
    pipeline_options: dict[str, Any] = {}
    if trains:
        training = find_optimizer(stages)
        pipeline_options = {**training.pipeline_options(), "loss": _last}
        if stages.has_checkpoints:
            pipeline_options["recompute"] = "auto"
    if options.executable_cache_path is not None:
        executable_cache.enable_executable_cache(options.executable_cache_path)
    checks = options.Precision.floating_point_exceptions
    micro_batch = tuple(
        to_numpy(tensor, f"Input {name}") for name, tensor in zip(arguments.names, tensors, strict=True)
    )
    pipeline_options |= {
        "num_micro_batches": batching.gradient_accumulation if trains else batching.device_iterations,
        "schedule": schedule,
        "offload": _find_offloaded(options, trains),
    }
    has_others = bool(anchored or stages.written_inputs or stages.expected)
    is_summed = options.output_mode is OutputMode.Sum and not has_others

    # Automatic partitioning.
    table = None
    if options.num_split_ipus is not None:
        # Tracing and measuring start JAX, so the devices must be there before.
        devices = select_devices(options.num_split_ipus * options.replication_factor, options)
        split_options = {
            **pipeline_options,
            "num_replicas": num_replicas,
            "devices": devices,
            "hooks": Hooks(collect_losses=not trains),
        }
        stages, table = _split(stages, micro_batch, options.num_split_ipus, split_options)
    _warn_of_idle_stages(stages, batching, options)

    pipeline = engine.Pipeline(
        stages.functions if table is None else engine.AutoStages(stages.functions, (), table),
        device_mapping=[[section.ipu for section in level] for level in stages.levels],
        execution_phases=_find_phases(stages, options, trains),
        # A number that is not finite, or an index out of range, ends a run after it has begun: the old
        # state must still be there.
        donate=not (checks or options.index_checks or stages.expected),
        collect_outputs=_all_but_last if trains else True,
        sum_collected=is_summed,
        sum_dtype=_sum_dtype if is_summed else None,
        num_replicas=num_replicas,
        shard=_find_shared_out(options, trains) if num_replicas > 1 else (),
        # Replicas' copies of written buffers may differ: each reads its own, and the host gets the first's.
        joins_assigned=False,
        # A process reads only its own replicas' outputs.
        hooks=Hooks(collect_losses=not trains, gathers_outputs=False),
        **pipeline_options,
    )
    return Program(arguments, captured, stages, pipeline, micro_batch), training


def _check_splittable(captured: Captured, options: Options) -> None:
    """Raises an Error if `splitAutomatically` does not go with the model or another option."""
    name = "poptorch.Options.splitAutomatically"
    if find_blocks(captured.program.graph)[1]:
        raise Error(
            f"{name} is for a model without blocks, and the model has some. Leave the option out, or the "
            "blocks (poptorch.removeBlocks(model) takes away those of BeginBlock and of wrapped modules)."
        )
    anchored = [anchor.long_name for anchor in options.anchored_tensors.values()]
    conflicts = {
        "poptorch.Options.allowNewShapes": options.allow_new_shapes,
        "poptorch.Options.checkIndices": options.index_checks,
        "anchorTensor of a gradient": any(map(is_gradient, anchored)),
        f"poptorch.{type(options.execution_strategy).__name__}": isinstance(
            options.execution_strategy, PhasedExecution
        ),
    }
    for option, is_set in conflicts.items():
        if is_set:
            raise Error(f"{name} does not go with {option}. Leave one of them out, or place blocks.")


def _split(
    stages: ModelStages, micro_batch: Sequence[Any], num_ipus: int, split_options: Mapping[str, Any]
) -> tuple[ModelStages, engine.SplitTable]:
    """Cuts a model into as many stages as there are IPUs. Also returns the table behind the cuts."""
    (function,) = stages.functions[0]
    try:
        split = engine.split(function, num_ipus, micro_batch, cut_scans=False, **split_options)
    except ValueError as error:
        if not str(error).startswith("split: "):
            raise
        text = str(error).removeprefix("split: ").replace("num_stages", "num_ipus")
        raise Error(f"poptorch.Options.splitAutomatically: {text}") from error
    logger.info("The model is split by what its parts take:\n%s", split.table)
    return split_stages(stages, list(zip(split, split.scopes, strict=True))), split.table


def _log_sections(stages: ModelStages) -> None:
    for section, ipu in zip(stages.sections, stages.ipus, strict=True):
        logger.info("IPU %d: %s, %d operations", ipu, section.name, len(section.nodes))


def _check_agreement(wrapped: Wrapped, arguments: Arguments, seed: int) -> None:
    """Compares the arguments of several processes. An Error names what differs."""
    options = wrapped.options
    named = zip(arguments.names, arguments.tensors, strict=True)
    descriptions = [f"{name}: {tensor.dtype}{list(tensor.shape)}" for name, tensor in named]
    document = {
        "the model": type(wrapped.model).__name__,
        "the wrapper": "trainingModel" if wrapped.trains else "inferenceModel",
        "the arguments": ", ".join(descriptions) or "none",
        "the seed (Options.randomSeed, or torch.manual_seed)": str(seed),
        **describe_options(options),
    }
    agree("a PopTorch model", document)
    compare_weights(wrapped.model, Processes.of(options))


def _check_buffers(stages: ModelStages, options: Options) -> None:
    """Raises an Error if replicas write buffers, and the options do not let these differ."""
    num_replicas = options.replication_factor * options.Distributed.numProcesses
    if num_replicas > 1 and options.broadcast_buffers and stages.assigned:
        names = ", ".join(sorted(name.partition("/")[2] for name in stages.assigned))
        raise Error(
            "PopTorch does not support broadcasting buffers. If your model is able to tolerate buffers "
            "becoming out of sync between replicas, you can disable buffer broadcasting using "
            f"poptorch.Options.broadcastBuffers(False). The model writes: {names}."
        )


def _warn_of_training_mode(modes: Modes) -> None:
    """Warns if inference draws random numbers or changes statistics, which may be a mistake."""
    kinds = (torch.nn.modules.dropout._DropoutNd, torch.nn.modules.batchnorm._NormBase)  # noqa: SLF001
    names = {type(m).__name__ for m, is_training in modes.items() if is_training and isinstance(m, kinds)}
    if names:
        warn_once(
            "The model was in training mode when it was wrapped by inferenceModel, and stays so: "
            f"{' and '.join(sorted(names))} are as in training. Call model.eval() before wrapping it."
        )


def cut_into_levels(
    graph: torch.fx.Graph, options: Options, trains: bool, schedule: schedules.Schedule
) -> Sequence[Sequence[Section]]:
    """Cuts a model into sections, level by level."""
    strategy = options.execution_strategy

    def place(blocks: Sequence[BlockId]) -> list[Placement]:
        if unused := strategy.find_unused(blocks):
            warn_once(f"The model opens no block {', '.join(map(repr, unused))}, which {strategy!r} has.")
        return strategy.place(blocks)

    if isinstance(strategy, PhasedExecution):
        return cut_into_phases(graph, place, trains and strategy.separate_backward_phase)
    sections = cut_into_sections(graph, place, has_several=schedule not in _JOINING)
    return [[section] for section in sections]


def _find_phases(stages: ModelStages, options: Options, trains: bool) -> engine.ExecutionPhases | None:
    """Returns the phases of a model, if it runs in phases."""
    strategy = options.execution_strategy
    if not isinstance(strategy, PhasedExecution):
        return None
    liveness = strategy.liveness
    num_ahead = {Liveness.AlwaysLive: None, Liveness.OffChipAfterFwd: 1}
    return engine.ExecutionPhases(
        of_levels=tuple(level[0].phase for level in stages.levels),
        shares_last=not (trains and strategy.separate_backward_phase and len(stages.levels) > 1),
        num_ahead=num_ahead.get(liveness, 0),
        keeps_values=liveness is not Liveness.OffChipAfterEachPhase,
    )


def _find_offloaded(options: Options, trains: bool) -> list[str]:
    """Returns what lies in host memory; the same options are for inference, which has less to keep."""
    offloaded = options.TensorLocations.find_offloaded(_is_live(options))
    inference_kinds = ["weights"]
    if isinstance(options.execution_strategy, PhasedExecution):
        inference_kinds.append("activations")
    return offloaded if trains else [kind for kind in offloaded if kind in inference_kinds]


def _find_shared_out(options: Options, trains: bool) -> list[Literal["optimizer_state", "weights"]]:
    """Returns what replicas divide among them."""
    return [kind for kind in options.TensorLocations.shard if trains or kind == "weights"]


def _is_live(options: Options) -> bool:
    """Whether tensors without a location stay on the devices."""
    strategy = options.execution_strategy
    return not isinstance(strategy, PhasedExecution) or strategy.liveness is Liveness.AlwaysLive


def find_schedule(options: Options) -> schedules.Schedule:
    """Returns the schedule that options ask for."""
    strategy = options.execution_strategy
    if isinstance(strategy, (ShardedExecution, PhasedExecution)):
        if options.is_set("pipeline_schedule"):
            warn_once(
                f"setPipelineSchedule has no effect with poptorch.{type(strategy).__name__}, in which a "
                "micro-batch ends before the next one begins."
            )
        return "sequential"
    schedule: schedules.Schedule = options.pipeline_schedule
    assert isinstance(strategy, PipelinedExecution)
    if strategy.schedule is None:
        return schedule
    if options.is_set("pipeline_schedule") and schedule != strategy.schedule:
        warn_once(
            "setPipelineSchedule has no effect: the execution strategy has the schedule "
            f"{strategy.schedule!r}."
        )
    return strategy.schedule


def _warn_of_idle_stages(stages: ModelStages, batching: Batching, options: Options) -> None:
    """Warns where PopTorch raises an error, because it cannot run such a pipeline."""
    number = (
        batching.gradient_accumulation if batching.gradient_accumulation > 1 else batching.num_micro_batches
    )
    is_filled = number >= len(stages.sections)
    if is_filled or isinstance(options.execution_strategy, (ShardedExecution, PhasedExecution)):
        return
    warn_once(
        f"There are {len(stages.sections)} pipeline stages, and only {number} micro-batches for them at a "
        "time, so some are always idle. Raise poptorch.Options().Training.gradientAccumulation, or "
        "for inference poptorch.Options().deviceIterations."
    )


def _warn_of_narrowing(tensors: Sequence[torch.Tensor]) -> None:
    """Warns where float64 becomes float32."""
    with on_host():
        is_wide = any(tensor.dtype is torch.float64 for tensor in tensors)
    if is_wide and jax_dtype(torch.float64) != np.float64:
        warn_once(
            "Tensors of float64 are computed in float32, and come back as float64. Set the environment "
            "variable JAX_ENABLE_X64=1 to compute in 64 bits."
        )


def _last(*outputs: Any) -> Any:
    return outputs[-1]


def _all_but_last(outputs: Sequence[Any]) -> list[bool]:
    return [*[True] * (len(outputs) - 1), False]


def _sum_dtype(value: jax.ShapeDtypeStruct) -> Any:
    return jax.numpy.int32 if value.dtype == bool else None


# Chooses the program that a call runs, by the shapes of its arguments: `Options.allowNewShapes`.

_MAX_SHAPES_LENGTH = 60  # characters


def use_program(
    compiled: CompiledModel, signature: Signature, arguments: Arguments, options: Options
) -> bool:
    """Uses the program that is for a call's arguments. Returns whether there is one."""
    current, shapes = compiled.program, shapes_of(arguments)
    if not options.allow_new_shapes:
        check_like_first(signature, current.arguments, arguments)
        check_shapes(arguments, current.shapes)
        check_written(arguments, current.stages.written_inputs)
        compiled.check_same_tensors()
        return True
    check_like_first(signature, current.arguments, arguments, OTHER_THAN_SHAPES)
    compiled.check_same_tensors()
    if compiled.pipeline.built.updates is not None:  # several processes train, and compile, together
        agree("a call of a PopTorch model", {"the shapes": describe_shapes(arguments.names, shapes)})
    if compiled.use(shapes):
        check_written(arguments, compiled.stages.written_inputs)
        return True
    check_batches(arguments, batching_of(options))
    if len(compiled.programs) >= options.max_shapes:
        raise Error(
            f"The model is compiled for {len(compiled.programs)} shapes, which is the limit of "
            f"Options.allowNewShapes(True, max_shapes={options.max_shapes}), and these are new ones: "
            f"{describe_shapes(arguments.names, shapes)}. Raise max_shapes, or give inputs fewer shapes, "
            "for example by padding to a few lengths. It was compiled for: "
            f"{'; '.join(program.describe() for program in compiled.programs.values())}."
        )
    compiled.check_not_lost()
    if compiled.state is None:
        raise Error("Device is not attached. Call attachToDevice() first, to compile for other shapes.")
    return False


def describe_next_shapes(compiled: CompiledModel | None, arguments: Arguments, options: Options) -> str:
    """Describes what is compiled next, for the progress bar; empty if no other shapes are allowed."""
    if not options.allow_new_shapes:
        return ""
    described = describe_shapes(arguments.names, shapes_of(arguments))
    number = 1 + (0 if compiled is None else len(compiled.programs))
    return (
        f" for {shorten(described, _MAX_SHAPES_LENGTH)} ({number} of at most {options.max_shapes} shapes)"
    )

"""Traces a pipeline's functions, makes programs of them, and describes both to other processes."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from ipu_pipeline.engine import jaxprs, peers
from ipu_pipeline.engine.execution.agreement import describe_programs
from ipu_pipeline.engine.option_types import Chunking, Recomputation, Reduction
from ipu_pipeline.engine.pipeline_options import PipelineOptions
from ipu_pipeline.engine.programs import differentiation
from ipu_pipeline.engine.programs.accumulation import (
    Collecting,
    GradientTarget,
    check_gradient_map,
    find_accumulator_dtype,
    make_collecting,
)
from ipu_pipeline.engine.programs.stage_programs import StagePrograms
from ipu_pipeline.engine.schedules.schedule_arguments import schedule_name
from ipu_pipeline.engine.schedules.timetables import Timetable
from ipu_pipeline.engine.tracing import frames, stages
from ipu_pipeline.engine.tracing.faults import Faults
from ipu_pipeline.engine.tracing.side_outputs import MetricReader, first_leaves, metric_names
from ipu_pipeline.engine.tracing.specs import VariableSpec
from ipu_pipeline.engine.tracing.stage_meshes import Partitions, TensorParallel, dividing
from ipu_pipeline.engine.tracing.stages import TracedPipeline, send_variables
from ipu_pipeline.engine.updates import optimizer_tracing, optimizer_wrappers
from ipu_pipeline.engine.updates.update_programs import Updates, cut_updates
from ipu_pipeline.ground.errors import without_traceback_note


@dataclass(frozen=True, eq=False)
class Recipe:
    """What a pipeline is made of.

    Attributes:
      functions: the stages, level by level.
      mapping: the device of each stage.
      options: the other arguments of the pipeline.
    """

    functions: Sequence[Sequence[stages.StageFunction]]
    mapping: tuple[int, ...]
    options: PipelineOptions

    @property
    def reduction(self) -> Reduction:
        """The reduction of the gradients over the micro-batches."""
        return Reduction(self.options.reduction)


@dataclass(frozen=True, eq=False)
class Built:
    """A pipeline as jaxprs.

    Attributes:
      traced: the stages.
      updates: the optimizer's programs; None without training.
      accumulator_dtypes: dtype of each trained variable's accumulators.
      collecting: which outputs of the last stage are wanted.
      programs: the programs of the stages.
      make_programs: makes the programs for another choice of what stages keep for their backward.
      metrics: what stages and the optimizer report.
      partitions: how variables are divided over the devices of their stage.
    """

    traced: TracedPipeline
    updates: Updates | None
    accumulator_dtypes: Mapping[str, Any]
    collecting: Collecting
    programs: tuple[StagePrograms, ...]
    make_programs: Callable[[Recomputation | None], tuple[StagePrograms, ...]]
    metrics: MetricReader
    partitions: Partitions


@without_traceback_note()
def build(
    recipe: Recipe,
    element: Any,
    inputs: tuple[Any, ...],
    recompute: Recomputation | None,
    halved: Collection[int] = (),
) -> Built:
    """Traces the stages and the optimizer, and checks them. It does not start a JAX backend."""
    options, hooks = recipe.options, recipe.options.hooks
    parallel = options.tensor_parallel or TensorParallel(1)
    with frames.unchanged_on_error(hooks.program_names):
        # The stages, whose faults are reported together.
        faults = Faults()
        loss = options.loss
        if loss is not None and options.loss_weight is not None:
            loss = optimizer_wrappers.with_weight(loss, options.loss_weight)
        with dividing(parallel.size) as divided_values:
            traced = stages.trace(
                recipe.functions, element, inputs, loss, hooks.program_names, faults, hooks.captures
            )
        trained: dict[str, VariableSpec] = {}
        if options.optimizer is not None:
            with faults.collecting("the optimizer"):
                trained = _find_trained(recipe, traced, may_be_empty=faults.has_constant_modules)
        if faults:
            raise faults.as_error()
        # What is divided over a stage's devices, what is collected, and the weight update.
        partitions = parallel.resolve(traced.variables)
        divides = divided_values.is_used or any(
            jaxprs.uses_mesh(stage.flat.equations) for stage in traced.stages
        )
        if parallel.size > 1 and not partitions and not divides:
            warnings.warn(
                f"tensor_parallel: each stage has {parallel.size} devices, but nothing is divided over "
                "them, so all of them compute the same. Say in TensorParallel.variables what is divided.",
                stacklevel=2,
            )
        collecting = make_collecting(
            traced,
            options.collect_outputs,
            hooks.collect_losses,
            options.sum_collected,
            options.sum_dtype,
            hooks.option_names.get("sum_dtype", "sum_dtype"),
        )
        dtypes = {
            name: spec.dtype
            if optimizer_wrappers.is_loss_weight(name)
            else find_accumulator_dtype(
                spec,
                options.accumulator_dtype,
                hooks.option_names.get("accumulator_dtype", "accumulator_dtype"),
            )
            for name, spec in trained.items()
        }
        updates, traced = _make_updates(recipe, traced, trained, dtypes)
        metrics = _find_metrics(traced, updates)
        # Gradients of micro-batches: mapped, enqueued or both.
        gradient_map = None if options.gradient_map is None else options.gradient_map()
        targets = () if hooks.gradient_targets is None else hooks.gradient_targets()
        if gradient_map is not None:
            called = hooks.option_names.get("gradient_map", "map of gradient_map")
            optimizer_wrappers.check_not_mapped(trained.values())
            check_gradient_map(gradient_map, trained.values(), called)
        if gradient_map is not None or targets:  # both see the whole gradient of a micro-batch
            shared = traced.shared() & trained.keys()
            _check_mapped(recipe, traced, shared)
            sending = send_variables(traced.stages, traced.owners, shared)
            traced = dataclasses.replace(traced, stages=tuple(sending))
        traced, enqueued = _enqueue_gradients(traced, trained, targets)
        is_scaled = updates is not None and updates.loss_scale is not None

        def make_programs(recompute: Recomputation | None) -> tuple[StagePrograms, ...]:
            with dividing(parallel.size):
                return differentiation.build(
                    traced, trained, recipe.reduction, gradient_map, recompute, is_scaled, enqueued, halved
                )

        programs = make_programs(recompute)
        hooks.program_names.reads.clear()
    return Built(traced, updates, dtypes, collecting, programs, make_programs, metrics, partitions)


def _make_updates(
    recipe: Recipe, traced: TracedPipeline, trained: Mapping[str, VariableSpec], dtypes: Mapping[str, Any]
) -> tuple[Updates | None, TracedPipeline]:
    """The programs of the weight update. What the optimizer captured becomes an output of the pipeline."""
    if recipe.options.optimizer is None:
        return None, traced
    optimizer = optimizer_tracing.trace_optimizer(
        recipe.options.optimizer,
        trained,
        traced.output_tree,
        traced.output_avals,
        recipe.reduction,
        dtypes,
        may_enqueue=True,
    )
    captures = recipe.options.hooks.captures
    for flat in (optimizer.init, optimizer.update):
        captures.check(flat.constants.values(), "the optimizer")
    positions: list[int] = []  # positions of what was captured

    def find_position(value: Any) -> int | None:
        number = captures.find_number(value)
        if number is None:
            return None
        if number not in positions:
            positions.append(number)
        return len(traced.outputs) + positions.index(number)

    optimizer = optimizer_tracing.lift_captures(optimizer, find_position)
    extended = traced.with_captured(list(map(jaxprs.aval_struct, captures.values)), positions)
    # All variables of one device are updated together, by its first stage, except in execution phases,
    # whose memory does not hold them all.
    mapping = recipe.mapping
    homes = {name: mapping.index(mapping[stage]) for name, stage in traced.owners.items()}
    if recipe.options.execution_phases is not None:
        homes = dict(traced.owners)
    return cut_updates(optimizer, homes, len(traced.stages) - 1), extended


def _find_metrics(traced: TracedPipeline, updates: Updates | None) -> MetricReader:
    of_updates = () if updates is None else updates.enqueued
    shared = set(metric_names(traced.enqueued)) & set(metric_names(of_updates))
    if shared:
        raise ValueError(
            f"metric: {sorted(shared)[0]!r} is reported by a stage and by the weight update. Give one of "
            "them another name."
        )
    return MetricReader.find(traced.enqueued, of_updates)


def _enqueue_gradients(
    traced: TracedPipeline, trained: Mapping[str, VariableSpec], targets: Sequence[GradientTarget]
) -> tuple[TracedPipeline, dict[str, list[int]]]:
    """The pipeline that enqueues each micro-batch's gradients, a dict by full name, to some targets.

    Returns:
      The pipeline, and the numbers of the leaves that are the gradient of each variable.
    """
    numbers: dict[str, list[int]] = {}
    for target in targets:
        first, names = first_leaves(traced.enqueued)[-1], sorted(target.choose(trained))
        for number, name in enumerate(names):  # the order in which JAX flattens a dict
            numbers.setdefault(name, []).append(first + number)
        specs = {name: trained[name] for name in names}
        leaves, tree = jax.tree.flatten(
            {name: jax.ShapeDtypeStruct(spec.shape, spec.dtype) for name, spec in specs.items()}
        )
        entry = frames.Enqueued(target.target, tree, tuple(leaves))
        traced = dataclasses.replace(traced, enqueued=(*traced.enqueued, entry))
    return traced, numbers


def _find_trained(recipe: Recipe, traced: TracedPipeline, *, may_be_empty: bool) -> dict[str, VariableSpec]:
    # The specs as first asked for: conflicts between stages are reported elsewhere.
    variables = {name: recipe.options.hooks.program_names.variables[name] for name in traced.variables}
    names = recipe.options.trained
    if callable(names):
        names = names(variables)
    trainable = {name: spec for name, spec in variables.items() if spec.trainable}
    if names is not None:
        for name in names:
            if name not in trainable or optimizer_wrappers.is_loss_weight(name):
                fault = "is not trainable" if name in variables else "does not exist"
                raise ValueError(
                    f"The variable {name!r} to train {fault}. Trainable are: "
                    f"{', '.join(optimizer_wrappers.without_weights(trainable)) or 'none'}."
                )
    trained = {
        name: spec
        for name, spec in trainable.items()
        if names is None or name in names or optimizer_wrappers.is_loss_weight(name)
    }
    if not optimizer_wrappers.without_weights(trained) and not may_be_empty:
        why = "no stage has a trainable variable" if names is None else "trained names none"
        raise ValueError(f"No variables to optimize: {why}.")
    return trained


def _check_mapped(recipe: Recipe, traced: TracedPipeline, shared: Collection[str]) -> None:
    """Raises if a gradient map would get a gradient whose parts parallel stages make at the same time."""
    for index, stage in enumerate(traced.stages):
        for spec in stage.variables:
            home = traced.owners[spec.name]
            is_parallel = home != index and traced.levels[home] == traced.levels[index]
            if is_parallel and spec.name in shared and len(set(recipe.mapping)) > 1:
                raise ValueError(
                    f"Variable {spec.name} is shared by {traced.stages[home].place} and {stage.place}, "
                    "which are parallel, and gradients are mapped or enqueued: its whole gradient of a "
                    "micro-batch would be known after both, while each is to run without waiting for the "
                    "other. Return the variable from an earlier stage and pass it to both, or put all "
                    "stages on one device."
                )


# What processes compare before the first step.


def describe(
    built: Built,
    options: PipelineOptions,
    mapping: Sequence[int],
    timetable: Timetable,
    plan: Chunking | None,
) -> dict[str, str]:
    """Describes a pipeline in texts, by subject."""
    traced = built.traced
    return {
        "the number of stages": str(len(traced.stages)),
        "device_mapping": str(list(mapping)),
        "num_replicas": str(options.num_replicas),
        "num_micro_batches": str(options.num_micro_batches),
        "the micro-batch": _describe_leaves(traced.element),
        "the inputs of a step": _describe_leaves(traced.inputs),
        "the schedule": _describe_schedule(options.schedule, timetable),
        "micro-batches per program": str(None if plan is None else plan.chunk_size),
        "the reduction": str(options.reduction),
        "recompute": str(options.recompute),
        "offload": str(options.offload),
        "num_serialized": str(options.num_serialized),
        "tensor_parallel": f"{options.num_devices_per_ipu} devices, {dict(built.partitions)}",
        **describe_programs(traced, built.updates),
    }


def _describe_leaves(tree: Any) -> str:
    return ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(tree)) or "nothing"


def _describe_schedule(schedule: Any, timetable: Timetable) -> str:
    lines = [str(row) for row in timetable.rows]
    return f"{schedule_name(schedule)} ({peers.digest(lines)})"

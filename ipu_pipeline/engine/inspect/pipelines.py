"""Questions about a pipeline or loop that are answered before anything is compiled. Starts no backend."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from ipu_pipeline.engine import schedules, watching
from ipu_pipeline.engine.inspect.describing import describe, find_shared_sends, find_update_sends
from ipu_pipeline.engine.inspect.facts import PipelineDetails, Sent, select_fields
from ipu_pipeline.engine.inspect.summary import PipelineSummary
from ipu_pipeline.engine.inspect.waiting import estimate_bubble
from ipu_pipeline.engine.loop import Loop
from ipu_pipeline.engine.pipeline import Pipeline, accumulator_plan, plan_in_flight
from ipu_pipeline.engine.updates.loss_weights import is_loss_weight

__all__ = ["find_facts", "find_searched", "find_separate_variables", "introduce", "summarize"]


def find_facts(
    pipeline: Pipeline, num_micro_batches: int | None = None, *, left_out: Collection[str] = ()
) -> PipelineDetails:
    """Returns the facts that are known before anything is compiled. Does not start JAX's backend.

    Example:
      >>> pipeline = engine.Pipeline([layers.Dense(4), layers.Dense(2)], num_micro_batches=2)
      >>> pipeline.trace(np.ones([2, 8], np.float32))
      >>> engine.inspect.find_facts(pipeline).edges[1]
      Edge(source=0, target=1, num_forward_bytes=32, num_backward_bytes=0)

    Args:
      pipeline: a traced pipeline.
      num_micro_batches: micro-batches of a step, if the pipeline has no fixed number. Without it, a step of
        one micro-batch is assumed.
      left_out: full names of variables to leave out.

    Raises:
      RuntimeError: the pipeline has not been traced; see `Pipeline.trace`.
    """
    if isinstance(pipeline, Loop):
        training = pipeline.body.training
        return dataclasses.replace(
            _find_facts(pipeline, 1, left_out),
            name="Loop",
            kind="loop",
            num_micro_batches=1 if training is None else training.num_mini_batches,
            dispatch="",
        )
    return _find_facts(pipeline, num_micro_batches, left_out)


def _find_facts(
    pipeline: Pipeline, num_micro_batches: int | None, left_out: Collection[str]
) -> PipelineDetails:
    built, options, plan = pipeline.built, pipeline.options, pipeline.dispatch_plan
    count = options.num_micro_batches if num_micro_batches is None else num_micro_batches
    chunk_size, table = 1 if plan is None else plan.chunk_size, pipeline.split_table
    trains = built.updates is not None
    costs = None if table is None else table.costs
    if pipeline.measured_costs is not None and pipeline.measured_costs[0] is pipeline.runner:
        costs = pipeline.measured_costs[1]
    return describe(
        built.traced,
        pipeline.programs,
        plan_in_flight(pipeline, count or 1, chunk_size),
        built.accumulator_dtypes if trains else None,
        0 if pipeline.iterated is None else len(pipeline.iterated.carried),
        {*left_out, *filter(is_loss_weight, built.traced.variables)},
        name="Pipeline",
        kind="training" if trains else "inference",
        schedule=schedules.schedule_name(options.schedule),
        num_micro_batches=count,
        num_serialized=options.num_serialized,
        chunk_size=chunk_size,
        is_one_program=pipeline.is_one_program,
        num_replicas=pipeline.num_replicas,
        sent=_find_sends(pipeline),
        dispatch="" if plan is None else str(plan),
        cuts="" if table is None else table.cuts,
        costs=costs,
        num_devices_per_ipu=options.num_devices_per_ipu,
        divided=tuple(built.partitions),
    )


def _find_sends(pipeline: Pipeline) -> tuple[Sent, ...]:
    """What crosses from device to device per weight update."""
    built, ipus = pipeline.built, pipeline.device_mapping
    sent = find_update_sends(built.updates, ipus)
    if isinstance(pipeline, Loop):
        return sent
    extra = accumulator_plan(pipeline).extra
    return (*find_shared_sends(built.traced, ipus, extra, built.accumulator_dtypes), *sent)


def summarize(
    pipeline: Pipeline, num_micro_batches: int | None = None, *, left_out: Collection[str] = ()
) -> PipelineSummary:
    """Summarizes the memory and work of each stage, and the bubble, before anything is compiled.

    Does not start JAX's backend. `print` shows it as a table; `PipelineSummary` has an example.

    Example:
      >>> pipeline = engine.Pipeline([layers.Dense(4), layers.Dense(2)], num_micro_batches=2)
      >>> pipeline.trace(np.ones([2, 8], np.float32))
      >>> engine.inspect.summarize(pipeline).num_parameters
      46

    Args:
      pipeline: a traced pipeline.
      num_micro_batches: micro-batches of a step, if the pipeline has no fixed number. Without it, a long
        step is assumed.
      left_out: full names of variables to leave out.

    Raises:
      RuntimeError: the pipeline has not been traced; see `Pipeline.trace`.
    """
    if isinstance(pipeline, Loop):
        facts = find_facts(pipeline, left_out=left_out)
        bubble = estimate_bubble(facts.stages, pipeline.timetable, 1, repeats=True)
        return select_fields(PipelineSummary, facts, schedule="", bubble=bubble)
    schedule, count = pipeline.options.schedule, pipeline.options.num_micro_batches
    count = count if num_micro_batches is None else num_micro_batches
    facts = find_facts(pipeline, count or 2 * len(pipeline.device_mapping), left_out=left_out)
    num_chunks, has_name = (count or 0) // facts.chunk_size, isinstance(schedule, str)
    told = facts.schedule if has_name else "of your own"
    if isinstance(schedule, schedules.SearchedSchedule):
        found = None if count is None else find_searched(pipeline, num_micro_batches)
        told = "searched, when the pipeline is prepared" if found is None else str(found)
    bubble = estimate_bubble(facts.stages, pipeline.timetable, num_chunks, has_name) if count else None
    return select_fields(PipelineSummary, facts, schedule=told, num_micro_batches=count, bubble=bubble)


def find_searched(pipeline: Pipeline, num_micro_batches: int | None = None) -> schedules.Searched | None:
    """Returns the result of the search for a pipeline's schedule, with its bound.

    Example:
      >>> pipeline = engine.Pipeline([layers.Dense(4), layers.Dense(2)], num_micro_batches=2)
      >>> pipeline.trace(np.ones([2, 8], np.float32))
      >>> engine.inspect.find_searched(pipeline) is None  # the schedule is "grouped"
      True

    Args:
      pipeline: the pipeline.
      num_micro_batches: as for `Pipeline.step`.

    Returns:
      The rows, the step time by the measured costs, without updates, a lower bound for any order, and the
      gap between them. None if nothing is searched: the schedule is another one, there is no training, or
      all stages are on one device. Then, and until `prepare` is called, the timetable is "interleaved" with
      a split backward.
    """
    searches = pipeline.timetable.searches
    if searches is None:
        return None
    return searches.find(pipeline.updated_every(num_micro_batches))


def introduce(pipeline: Pipeline, name: str) -> None:
    """Tells the watcher, if there is one, that a pipeline is about to run, and its name for people."""
    if (watcher := watching.current()) is not None:
        watcher.introduce(pipeline.prepare(), pipeline, name)


def find_separate_variables(pipeline: Pipeline) -> frozenset[str]:
    """Finds the full names of the variables that have a separate value in each replica."""
    if pipeline.options.joins_assigned or pipeline.num_replicas == 1:
        return frozenset()
    return frozenset(spec.name for stage in pipeline.traced.stages for spec in stage.assigned)

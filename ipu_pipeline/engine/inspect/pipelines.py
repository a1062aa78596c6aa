"""Questions about a pipeline: its facts, memory and costs; and the same pipeline with another plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from ipu_pipeline.engine import schedules, watching
from ipu_pipeline.engine.execution.measured_costs import Measured, divide_last, why_not_timed
from ipu_pipeline.engine.execution.runner import PlanRunner
from ipu_pipeline.engine.inspect.descriptions import describe, find_shared_sends, find_update_sends
from ipu_pipeline.engine.inspect.estimates import estimate_bubble
from ipu_pipeline.engine.inspect.facts import PipelineDetails, Sent, select_fields
from ipu_pipeline.engine.inspect.summary import PipelineSummary
from ipu_pipeline.engine.loop import Loop
from ipu_pipeline.engine.measured_choices import make_scenario
from ipu_pipeline.engine.mesh_isolation import apart
from ipu_pipeline.engine.option_types import Chunking, Recomputation
from ipu_pipeline.engine.pipeline import Pipeline, accumulator_plan, plan_in_flight
from ipu_pipeline.engine.planning.dispatch_plans import HOST_SECONDS, check_dispatch_plan
from ipu_pipeline.engine.planning.memory_records import IpuMemory, StageMemory
from ipu_pipeline.engine.updates.optimizer_wrappers import is_loss_weight
from ipu_pipeline.ground.host import count_cores

# Facts. Nothing is compiled, and no backend is started.


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
    """Finds what crosses from device to device per weight update."""
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
    description = facts.schedule if has_name else "of your own"
    if isinstance(schedule, schedules.SearchedSchedule):
        searched = None if count is None else find_searched(pipeline, num_micro_batches)
        description = "searched, when the pipeline is prepared" if searched is None else str(searched)
    bubble = estimate_bubble(facts.stages, pipeline.timetable, num_chunks, has_name) if count else None
    return select_fields(
        PipelineSummary, facts, schedule=description, num_micro_batches=count, bubble=bubble
    )


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


# Memory and costs, planned or measured, and the same pipeline with another plan.


def plan_memory(pipeline: Pipeline, num_micro_batches: int | None = None) -> tuple[StageMemory, ...]:
    """Plans the memory that each stage holds between forwards and backwards.

    Example:
      >>> pipeline = engine.Pipeline([layers.Dense(4), layers.Dense(2)], num_micro_batches=2)
      >>> pipeline.trace(np.ones([2, 8], np.float32))
      >>> engine.planning.plan_memory(pipeline)[0].num_held_bytes
      0

    Args:
      pipeline: a traced pipeline.
      num_micro_batches: micro-batches of a step, if the pipeline has no fixed number.

    Raises:
      ValueError: the number of micro-batches is given neither here nor to the pipeline.
    """
    plan = pipeline.dispatch_plan
    count = _find_count(pipeline, num_micro_batches)
    return plan_in_flight(pipeline, count, 1 if plan is None else plan.chunk_size)


def plan_ipu_memory(pipeline: Pipeline, num_micro_batches: int | None = None) -> tuple[IpuMemory, ...]:
    """Plans the memory of each device while steps run: state, accumulators, micro-batches and programs.

    The programs' memory is known once they are compiled, in the first step. With all stages on one device
    it includes the micro-batches.

    Example:
      >>> pipeline = engine.Pipeline([layers.Dense(4), layers.Dense(2)], num_micro_batches=2)
      >>> state = pipeline.init(jax.random.key(0), np.ones([2, 8], np.float32))
      >>> engine.planning.plan_ipu_memory(pipeline)[0].num_variable_bytes
      144

    Args:
      pipeline: a traced pipeline.
      num_micro_batches: micro-batches of a step, if the pipeline has no fixed number.

    Returns:
      One entry per device, in order.

    Raises:
      ValueError: the number of micro-batches is given neither here nor to the pipeline; or there are too
        few devices.
    """
    count = _find_count(pipeline, num_micro_batches)
    runner, stages = pipeline.prepare(), plan_memory(pipeline, count)
    num_each = count * pipeline.options.num_serialized
    return runner.plan_memory(pipeline.built.accumulator_dtypes, stages, num_each)


def plan_host_memory(pipeline: Pipeline, link: schedules.LinkSpeed) -> schedules.HostMemory | None:
    """Plans the transfers of execution phases from and to host memory, for `Scenario.host_memory`.

    Example:
      >>> pipeline = engine.Pipeline([layers.Dense(4), layers.Dense(2)], num_micro_batches=2)
      >>> pipeline.trace(np.ones([2, 8], np.float32))
      >>> engine.planning.plan_host_memory(pipeline, engine.LinkSpeed()) is None  # there are no phases
      True

    Args:
      pipeline: a traced pipeline.
      link: the link between each device and host memory, with the same speed in either direction.

    Returns:
      The bytes of each program; None if there are no phases, or nothing leaves the devices.

    Raises:
      ValueError: there are several replicas, whose steps in phases are not simulated; or there are too few
        devices.
    """
    runner = pipeline.prepare()
    if pipeline.options.execution_phases is None:
        return None
    assert isinstance(runner, PlanRunner)
    if pipeline.num_replicas > 1:
        raise ValueError(
            "plan_host_memory goes with one replica, as steps of replicas in phases are not simulated; "
            f"num_replicas is {pipeline.num_replicas}."
        )
    return runner.find_host_memory(link)


def measure_scenario(pipeline: Pipeline, num_micro_batches: int | None = None) -> schedules.Scenario:
    """Measures a step, for `simulate`, `what_if`, `advise` and `ipu-pipeline simulate --costs-from`.

    Programs, transfers and updates are measured one at a time, unless they were measured before. CPU
    devices share the CPU's cores. With several replicas the scenario is the first replica's, with its share
    of the cores.

    Example:
      >>> pipeline = engine.Pipeline([layers.Dense(4), layers.Dense(2)], num_micro_batches=2)
      >>> pipeline.trace(np.ones([2, 8], np.float32))
      >>> scenario = engine.planning.measure_scenario(pipeline)
      >>> advice = engine.advise(scenario)

    Args:
      pipeline: a traced pipeline.
      num_micro_batches: micro-batches of a step, if the pipeline has no fixed number.

    Raises:
      ValueError: all stages are on one device; or they cannot be run on zeros: they print, call back into
        Python or loop by data; or there are several processes, or execution phases.
    """
    count = _find_count(pipeline, num_micro_batches) * pipeline.options.num_serialized
    runner, measured = _measure("measure_scenario", pipeline)
    is_shared = runner.placement.groups[0].devices[0].platform == "cpu"
    return make_scenario(
        runner,
        pipeline.built,
        measured.costs,
        plan_in_flight(pipeline, count, runner.chunk_size),
        pipeline.options.schedule,
        count,
        measured.num_temporary_bytes,
        count_cores() / pipeline.num_replicas if is_shared else None,
        [stage.whole_layers for stage in find_facts(pipeline).stages],
    )


@apart
def measure_costs(pipeline: Pipeline) -> schedules.Costs:
    """Measures programs, transfers and updates, in seconds; `measure_scenario` includes them.

    The time of the last stage's program is divided into forward and backward by their operations. The host
    is assumed to start a program in 20 microseconds.

    Example:
      >>> pipeline = engine.Pipeline([layers.Dense(4), layers.Dense(2)], num_micro_batches=2)
      >>> pipeline.trace(np.ones([2, 8], np.float32))
      >>> len(engine.planning.measure_costs(pipeline).forward)
      2

    Args:
      pipeline: a traced pipeline.

    Raises:
      ValueError: see `measure_scenario`.
    """
    return _measure("measure_costs", pipeline)[1].costs


def _measure(caller: str, pipeline: Pipeline) -> tuple[PlanRunner, Measured]:
    runner, options = pipeline.prepare(), pipeline.options
    reason_not_timed = why_not_timed(pipeline.programs)
    reasons = {
        "all stages are on one device, in one program": not isinstance(runner, PlanRunner),
        "there are execution phases": options.execution_phases is not None,
        "there are several processes": runner.placement.has_peers,
        reason_not_timed: bool(reason_not_timed),
    }
    if reason := next((reason for reason, holds in reasons.items() if holds), ""):
        raise ValueError(f"{caller} runs the stages on zeros, one at a time; here {reason}.")
    assert isinstance(runner, PlanRunner)
    is_searched = isinstance(options.schedule, schedules.SearchedSchedule)
    measured = runner.measure(HOST_SECONDS, with_updates=True, with_skips=not is_searched)
    last = find_facts(pipeline).stages[-1]
    costs = dataclasses.replace(measured.costs, is_fused=last.is_fused)
    if last.is_fused:
        first = last.backward_operations - last.weight_operations
        costs = divide_last(costs, last.forward_operations, first, is_halved=last.is_halved)
    pipeline.measured_costs = runner, costs
    return runner, measured._replace(costs=costs)


def with_dispatch_plan(pipeline: Pipeline, plan: Chunking | None) -> Pipeline:
    """Returns a pipeline with another dispatch plan (None: it is chosen). Nothing is traced again.

    Example:
      >>> pipeline = engine.Pipeline([layers.Dense(4), layers.Dense(2)], num_micro_batches=2)
      >>> engine.planning.with_dispatch_plan(pipeline, engine.Chunking(2)).dispatch_plan.chunk_size
      2
    """
    if plan is not None:
        check_dispatch_plan(plan, pipeline.options.num_micro_batches, pipeline.is_one_program)
    return pipeline.copied(dispatch_plan=plan)


def with_recomputation(pipeline: Pipeline, recompute: Recomputation | None) -> Pipeline:
    """Returns a pipeline whose stages keep other values for their backward. Nothing is traced again.

    Example:
      >>> pipeline = engine.Pipeline([layers.Dense(4), layers.Dense(2)], num_micro_batches=2)
      >>> recompute = engine.Recomputation.RECOMPUTE_THEN_BACKPROPAGATE
      >>> other = engine.planning.with_recomputation(pipeline, recompute)
    """
    if recompute is pipeline.recompute:
        return pipeline
    other = pipeline.copied()
    other.set_recomputation(recompute)
    return other


def _find_count(pipeline: Pipeline, num_micro_batches: int | None) -> int:
    count = pipeline.options.num_micro_batches if num_micro_batches is None else num_micro_batches
    if count is None:
        raise ValueError("plan_memory: num_micro_batches must be given, as for `step`; it is None.")
    return count

import dataclasses
import types
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ipu_pipeline import engine
from ipu_pipeline.engine import schedules
from ipu_pipeline.engine.execution import measured_costs
from ipu_pipeline.engine.execution.measured_costs import ProgramTime, divide_last, make_measured
from ipu_pipeline.engine.inspect import find_facts, find_searched, summarize
from ipu_pipeline.engine.measured_choices import check_one_process
from ipu_pipeline.engine.planning import measure_costs, measure_scenario, plan_ipu_memory
from ipu_pipeline.engine.schedules import ActionKind, Costs
from ipu_pipeline.ground.host import count_cores

WIDTH, COUNT = 8, 4
TRAINING = {"optimizer": optax.adam(1e-2)}


def dense(parameters, x):
    return jnp.tanh(x @ parameters["w"])


def mean_square(parameters, x):
    return jnp.mean((x @ parameters["w"]) ** 2)


def make(schedule, stages=(dense, dense, mean_square), **options):
    rng = np.random.default_rng(0)
    parameters = [{"w": rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 6} for _stage in stages]
    options = {"num_micro_batches": COUNT, **TRAINING, **options}
    return engine.Pipeline(list(stages), parameters=parameters, schedule=schedule, **options)


MICRO_BATCHES = [
    np.random.default_rng(number).normal(size=(8, WIDTH)).astype(np.float32) for number in range(COUNT)
]
KEY = jax.random.key(0)


def prepared(schedule, **options):
    pipeline = make(schedule, **options)
    pipeline.init(KEY, MICRO_BATCHES[0])
    return pipeline


def test_what_is_found_is_followed():
    """And every named schedule is at least as long."""
    pipeline = make("searched")
    assert pipeline.options.schedule == engine.SearchedSchedule()
    pipeline.trace(MICRO_BATCHES[0])
    assert find_searched(pipeline) is None
    assert "schedule searched, when the pipeline is prepared," in str(summarize(pipeline))
    state = pipeline.init(KEY, MICRO_BATCHES[0])
    found = find_searched(pipeline)
    assert pipeline.timetable(COUNT).rows == found.rows
    assert pipeline.timetable(COUNT).halved == {0, 1, 2}
    assert found.bound <= found.step_time
    assert f"schedule {found}, " in str(summarize(pipeline))
    assert find_facts(pipeline).schedule == "searched"
    pipeline.step(state, MICRO_BATCHES)
    for name in schedules.named_schedules():
        try:
            other = dataclasses.replace(measure_scenario(pipeline), schedule=name, num_micro_batches=COUNT)
            time = schedules.predict_step_time(other)
        except engine.ScheduleError:
            continue
        assert found.step_time <= time * (1 + 1e-9), name


def traced(schedule):
    pipeline = make(schedule)
    pipeline.trace(MICRO_BATCHES[0])
    return pipeline


def test_a_limit_is_kept():
    most = max(memory.num_device_bytes for memory in plan_ipu_memory(traced("all_forwards")))
    least = max(memory.num_device_bytes for memory in plan_ipu_memory(traced("sequential")))
    limit = (least + most) // 2
    pipeline = prepared(engine.SearchedSchedule(limit))
    planned = plan_ipu_memory(pipeline)
    assert max(memory.num_device_bytes for memory in planned) <= limit
    peaks = find_searched(pipeline).num_peak_bytes
    assert peaks == tuple(memory.num_device_bytes for memory in planned)
    assert find_searched(pipeline).bound > 0


@pytest.mark.parametrize("limit", [0, True, "1 GB"])
def test_a_limit_is_a_number_of_bytes(limit):
    with pytest.raises(ValueError, match=r"bytes_per_ipu must be an integer of at least 1, or None; got"):
        engine.SearchedSchedule(limit)


def test_too_low_a_limit_names_the_ipu_and_can_be_raised():
    pipeline = make(engine.SearchedSchedule(1000))
    for _time in range(2):
        with pytest.raises(ValueError, match=r"device 0 needs [\d,]+ bytes .*and the limit is 1,000"):
            pipeline.init(KEY, MICRO_BATCHES[0])
        assert find_searched(pipeline) is None


def test_each_number_of_micro_batches_is_searched():
    pipeline = make("searched", num_micro_batches=None)
    state = pipeline.init(KEY, MICRO_BATCHES[0])
    for number in (2, 4):
        state, _outputs = pipeline.step(state, MICRO_BATCHES[:number], num_micro_batches=number)
        assert pipeline.timetable(number).rows == find_searched(pipeline, number).rows
    assert find_searched(pipeline, 2).step_time < find_searched(pipeline, 4).step_time


@pytest.mark.thorough
def test_another_choice_of_what_is_kept_is_measured_again():
    pipeline = prepared("searched")
    before = measure_scenario(pipeline)
    pipeline.set_recomputation(engine.Recomputation.AUTO)
    assert find_searched(pipeline) is None
    pipeline.prepare()
    held = [sum(scenario.memory.num_held_bytes) for scenario in (before, measure_scenario(pipeline))]
    assert held[1] < held[0]


def printing(parameters, x):
    jax.debug.print("seen {}", x[0, 0])
    return dense(parameters, x)


def doubling(parameters, x):
    size = jax.lax.while_loop(lambda size: size < 10, lambda size: 2 * size + 1, jnp.abs(x).sum())
    return dense(parameters, x) / jax.lax.stop_gradient(size)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ((printing, dense, mean_square), "runs the stages on zeros .*print or call back into Python"),
        ((dense, doubling, mean_square), "may not end on them, and stage1_forward has one"),
    ],
)
def test_stages_that_are_refused(stages, message):
    with pytest.raises(ValueError, match=message):
        prepared("searched", stages=stages)
    with pytest.raises(ValueError, match="stages one after another; these have parallel ones"):
        engine.Pipeline([dense, [dense, dense], jnp.mean], num_micro_batches=2, schedule="searched")


def test_zeros_may_make_nans():
    def unit(parameters, x):
        return dense(parameters, x / jnp.linalg.norm(x))

    with jax.debug_nans(True):
        pipeline = prepared("searched", stages=(unit, dense, mean_square))
        assert find_searched(pipeline) is not None


def test_one_ipu_has_nothing_to_search():
    pipeline = make("searched", device_mapping=[0, 0, 0])
    with pytest.warns(UserWarning, match="searched schedule has no effect: all stages are on one device"):
        state = pipeline.init(KEY, MICRO_BATCHES[0])
    pipeline.step(state, MICRO_BATCHES)
    assert find_searched(pipeline) is None


def test_forwards_only_are_not_searched():
    pipeline = make("searched", loss=None, optimizer=None)
    state = pipeline.init(KEY, MICRO_BATCHES[0])
    assert find_searched(pipeline) is None
    _state, outputs = pipeline.step(state, MICRO_BATCHES)
    assert len(outputs.outputs) == COUNT


def test_several_processes_are_refused():
    groups = [types.SimpleNamespace(processes=(number,)) for number in (0, 1)]
    check_one_process(groups[1:] * 2)
    with pytest.raises(ValueError, match=r"those given are of the processes \[0, 1\]\. Search in one"):
        check_one_process(groups)


def test_costs_of_a_micro_batch_are_shares_of_a_chunk():
    times = {
        (ActionKind.FORWARD, 0): ProgramTime(4.0, 1.0, 0),
        (ActionKind.INPUT_GRADIENTS, 1): ProgramTime(3.0, 2.0, 7),
        (ActionKind.WEIGHT_GRADIENTS, 1): ProgramTime(1.0, 1.0, 0),
    }
    transfers, updates = {(0, 1): 2.0, (2, 1): 3.0}, {1: ProgramTime(5.0, 1.0, 0)}
    measured = make_measured(3, times, transfers, updates, 2, host=0.5)
    assert measured.num_temporary_bytes == (0, 7, 0)
    costs = measured.costs
    assert costs.forward == (2.0, 0.0, 0.0)
    assert costs.backward == (0.0, 2.0, 0.0)
    assert costs.weight_gradients == (0.0, 0.5, 0.0)
    assert costs.backward_cores == (1.0, 1.75, 1.0)
    assert costs.update == (0.0, 5.0, 0.0)
    assert costs.transfers == {(0, 1): 1.0, (2, 1): 1.5}
    assert costs.host == 0.5


def test_what_is_found_for_chunks_is_followed():
    """What was told was another search, of as many chunks as a step has micro-batches."""
    pipeline = prepared("searched", dispatch_plan=engine.Chunking(2))
    assert pipeline.timetable(COUNT // 2).rows == find_searched(pipeline).rows


def test_a_scenario_is_what_plans_are_chosen_by():
    pipeline = prepared("interleaved")
    scenario = measure_scenario(pipeline)
    measured = pipeline.prepare().measure(20e-6, with_updates=True)
    for name in ("forward", "backward", "weight_gradients"):
        assert getattr(scenario.costs, name)[:-1] == getattr(measured.costs, name)[:-1]
    # The last stage's program does both, and nothing tells when.
    last = scenario.costs.forward[-1], scenario.costs.backward[-1]
    assert min(last) > 0
    assert sum(last) == pytest.approx(measured.costs.forward[-1])
    halves = [whole / 2 for whole in scenario.costs.backward]
    assert scenario.costs.weight_gradients == pytest.approx(halves)
    assert scenario.costs.transfers == measured.costs.transfers
    assert measure_costs(pipeline) == scenario.costs
    assert min(scenario.costs.update) > 0
    assert (scenario.schedule, scenario.num_micro_batches) == ("interleaved", COUNT)
    assert scenario.cores == count_cores()
    for plan, constant, temporary in zip(
        plan_ipu_memory(pipeline),
        scenario.memory.num_constant_bytes,
        measured.num_temporary_bytes,
        strict=True,
    ):
        without = plan.num_device_bytes - plan.num_activation_bytes - (plan.num_temporary_bytes or 0)
        assert constant == without + temporary
    assert schedules.Scenario.from_dict(scenario.as_dict()) == scenario
    assert schedules.simulate(scenario).free_running.step_time > 0
    assert measure_scenario(pipeline) == scenario  # nothing is measured twice


def test_halves_of_the_last_stage():
    costs = Costs.of(2, forward=[1, 6], backward=[2, 3], weight_gradients=[1, 3])
    costs = dataclasses.replace(costs, forward_cores=(1, 2.0), backward_cores=(1, 1.3))
    found = divide_last(costs, 10.0, 20.0, is_halved=True)
    assert (found.forward, found.backward, found.weight_gradients) == ((1, 2), (2, 7), (1, 3))
    assert found.backward_cores == pytest.approx((1, (4 * 2 + 3 * 1.3) / 7))  # of both its programs
    whole = Costs.of(2, forward=[1, 6], backward=[2, 0], weight_gradients=[1, 0], forward_cores=[1, 2])
    found = divide_last(whole, 10.0, 20.0, is_halved=False)
    assert (found.forward, found.backward, found.weight_gradients) == ((1, 2), (2, 4), (1, 2))
    assert found.backward_cores == (1, 2)
    nothing_left = divide_last(whole, 10.0, 20.0, is_halved=True)  # a second half without a program
    assert nothing_left.weight_gradients == (1, 0)


def test_a_scenario_of_halves_and_of_replicas():
    pipeline = prepared("zero_bubble")
    measured = pipeline.prepare().measure().costs
    scenario = measure_scenario(pipeline)
    assert scenario.costs.weight_gradients == measured.weight_gradients
    assert min(scenario.costs.weight_gradients) > 0
    together = measured.forward[-1] + measured.weight_gradients[-1]
    assert scenario.costs.forward[-1] + scenario.costs.backward[-1] == pytest.approx(together)
    scenario = measure_scenario(prepared("interleaved", num_replicas=2))
    assert scenario.cores == count_cores() / 2


def keep_two(x):
    return x @ engine.get_variable("keep_two", (WIDTH, WIDTH)), jnp.sin(x)


@pytest.mark.thorough
def test_values_that_skip_stages_are_part_of_a_scenario():
    """But not of a searched one, which has what its search had."""
    stages = [keep_two, lambda x, kept: (jnp.tanh(x), kept), lambda x, kept: jnp.mean((x + kept) ** 2)]
    for schedule, edges in (("interleaved", {(0, 2)}), ("searched", set())):
        pipeline = engine.Pipeline(stages, schedule=schedule, num_micro_batches=COUNT, **TRAINING)
        pipeline.init(KEY, np.ones((4, WIDTH), np.float32))
        scenario = measure_scenario(pipeline)
        skipping = {edge for edge in scenario.costs.transfers if abs(edge[0] - edge[1]) > 1}
        assert edges <= skipping
        assert bool(edges) == bool(skipping)
        assert schedules.simulate(scenario).free_running.step_time > 0


def waiting(parameters, x):
    return jax.lax.while_loop(lambda own: own[0, 0] < 0, lambda own: own + 1, dense(parameters, x))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"device_mapping": [0, 0, 0]}, "all stages are on one device, in one program"),
        ({"stages": (waiting, dense, mean_square), "loss": None, "optimizer": None}, "a loop that ends"),
    ],
)
def test_pipelines_without_a_scenario(options, reason):
    pipeline = prepared("grouped", **options)
    with pytest.raises(ValueError, match=f"measure_scenario runs the stages on zeros.*; here {reason}"):
        measure_scenario(pipeline)


@pytest.mark.parametrize(
    "is_prepared",
    [pytest.param(False, marks=pytest.mark.thorough), True],
    ids=["at first", "for other devices"],
)
def test_an_interrupt_while_measuring_leaves_a_pipeline_that_can_be_prepared(is_prepared, monkeypatch):
    pipeline = make("searched")
    pipeline.trace(MICRO_BATCHES[0])
    devices = jax.devices()[is_prepared:]
    if is_prepared:
        pipeline.prepare()

    def interrupt(*_arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(measured_costs, "_repeat", interrupt)
        patch.setattr(measured_costs, "_find", lambda *_arguments: None)
        with pytest.raises(KeyboardInterrupt):
            pipeline.prepare(devices)
    assert find_searched(pipeline) is None
    state = pipeline.init(KEY, MICRO_BATCHES[0])
    assert [value.devices() for value in state.variables.values()] == [{device} for device in devices[:3]]
    pipeline.step(state, MICRO_BATCHES)
    assert find_searched(pipeline) is not None


@pytest.mark.thorough
def test_two_pipelines_are_prepared_in_two_threads():
    pipelines = [make("searched"), make("searched")]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda pipeline: pipeline.init(KEY, MICRO_BATCHES[0]), pipelines))
    assert all(find_searched(pipeline) is not None for pipeline in pipelines)

import dataclasses

import pytest

from ipu_pipeline.engine.schedules.order_search import search
from ipu_pipeline.engine.schedules.scenarios import Costs, Memory, Scenario
from ipu_pipeline.engine.schedules.schedule_arguments import SearchedSchedule
from ipu_pipeline.engine.schedules.simulator import predict_step_time
from ipu_pipeline.engine.schedules.timetables import check

COSTS = Costs.of(
    3,
    forward=(2, 3, 2),
    backward=(3, 5, 4),
    weight_gradients=(3, 2, 2),
    update=(1, 2, 1),
    transfer=(1, 0.5),
)
MEMORY = Memory((100, 200, 0), (30, 20, 0), (20, 20, 10))
SCENARIO = Scenario(COSTS, "interleaved", 6, memory=MEMORY)


@pytest.mark.parametrize(
    ("limit", "mapping", "chunk_size", "is_fused"),
    [(None, (), 1, True), (250, (), 2, False), (250, (0, 1, 0), 1, False), (None, (0, 1, 0), 2, True)],
)
def test_the_simulator_finds_the_same_step_time(limit, mapping, chunk_size, is_fused):
    scenario = dataclasses.replace(
        SCENARIO,
        costs=dataclasses.replace(COSTS, is_fused=is_fused),
        memory=dataclasses.replace(MEMORY, num_constant_bytes=(100, 200, 0)[: 2 if mapping else 3]),
        device_mapping=mapping,
        chunk_size=chunk_size,
    )
    problem = scenario.problem(limit and 2 * limit)
    found = search(problem)
    table = check(found.rows, 3, 6 // chunk_size, problem.device_mapping, training=True)
    simulated = predict_step_time(dataclasses.replace(scenario, schedule=table))
    assert simulated == pytest.approx(found.step_time)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"training": False}, "training=True"),
        ({"levels": (0, 0, 1)}, "a level of its own for each stage"),
        ({"costs": dataclasses.replace(COSTS, transfers={(0, 2): 2.5})}, "values that skip stages faster"),
        ({"memory": None}, "memory, for a limit of bytes"),
    ],
)
def test_what_a_search_does_not_know_is_refused(fields, message):
    with pytest.raises(ValueError, match=f"needs a scenario with {message}"):
        dataclasses.replace(SCENARIO, **fields).problem(1000)


@pytest.mark.parametrize(("edge", "most"), [((0, 2), 2.0), ((2, 0), 4.0)])
def test_what_skips_stages_matters_only_where_it_may_be_late(edge, most):
    skips = dataclasses.replace(COSTS, transfers={**COSTS.transfers, edge: most})
    found = search(dataclasses.replace(SCENARIO, costs=skips).problem())
    assert found == search(SCENARIO.problem())
    table = check(found.rows, 3, 6, (0, 1, 2), training=True)
    simulated = predict_step_time(dataclasses.replace(SCENARIO, costs=skips, schedule=table))
    assert simulated == pytest.approx(found.step_time)
    with pytest.raises(ValueError, match=rf"unlike \[\({edge[0]}, {edge[1]}\)\]"):
        later = dataclasses.replace(skips, transfers={**COSTS.transfers, edge: most + 0.5})
        dataclasses.replace(SCENARIO, costs=later).problem()


def test_a_scenario_is_searched():
    scenario = dataclasses.replace(SCENARIO, schedule=SearchedSchedule(250))
    found = scenario.searched
    assert found == search(SCENARIO.problem(250))
    assert max(found.num_peak_bytes) <= 250
    assert predict_step_time(scenario) == pytest.approx(found.step_time)
    assert found.step_time > dataclasses.replace(SCENARIO, schedule="searched").searched.step_time

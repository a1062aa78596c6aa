import functools
import typing

import pytest

from ipu_pipeline import engine
from ipu_pipeline.engine import schedules
from ipu_pipeline.tf1.program.pipeline_arguments import PipelineSchedule

FOUND = {
    "Grouped": "grouped",
    "1f1b": "interleaved",
    "1F1B": "interleaved",
    "OneForwardOneBackward": "interleaved",
    "gpipe": "all_forwards",
    "GPipe": "all_forwards",
    "LoopedBFS": "all_forwards",
    "interleaved_1f1b": "looped",
    "Interleaved1F1B": "looped",
    "zero bubble": "zero_bubble",
    "ZB-H1": "zero_bubble",
    "ZeroBubbleH2": "zero_bubble_h2",
    "InterleavedZeroBubble": "looped_zero_bubble",
    "zbv": "zero_bubble_v",
    "ZBVZeroBubble": "zero_bubble_v",
    "v-half": "v_half",
    "VMIN": "v_min",
    "DualPipeV": "dual_pipe_v",
    "ScheduleInterleaved1F1B": "looped",
    "ScheduleGPipe": "all_forwards",
    "AFAB": "all_forwards",
    "F-then-B": "all_forwards",
    "VPP": "looped",
    "DAPPLE": "interleaved",
    "Non-interleaved": "interleaved",
    "interleaved": "interleaved",
}


def test_names_of_other_libraries():
    assert {name: schedules.find_schedule(name) for name in FOUND} == FOUND


def test_a_name_means_one_schedule():
    names = [name for own in schedules.SCHEDULES for name in (own.name, *own.others)]
    plain = [name.replace("_", "") for name in names]
    assert len(set(plain)) == len(plain)


def test_the_fronts_have_all_schedules():
    assert {member.name: member.value for member in PipelineSchedule} == {
        own.member: own.name for own in schedules.SCHEDULES
    }
    assert PipelineSchedule.OneForwardOneBackward is PipelineSchedule.Interleaved


def test_members_are_found_by_their_names():
    for own in schedules.SCHEDULES:
        assert schedules.find_schedule(own.member) == own.name


def test_unknown_names_list_the_known_ones():
    listed = r"one of grouped .*interleaved \(1f1b, .*looped \(interleaved_1f1b, .*\), zero.*; got 'fast'"
    with pytest.raises(ValueError, match=f"pipeline_schedule must be {listed}"):
        schedules.find_schedule("fast", "pipeline_schedule")


def test_what_is_no_schedule():
    for value in (None, ["grouped"]):
        with pytest.raises(TypeError, match="schedule must be one of grouped"):
            schedules.find_schedule(value)
    with pytest.raises(TypeError, match=r"must take \(num_stages, num_micro_batches, device_mapping, tr"):
        schedules.find_schedule(lambda num_stages: num_stages)


def test_functions_are_found_as_they_are():
    function = functools.partial(schedules.interleaved, levels=None)
    assert schedules.find_schedule(function) is function


def test_pipelines_and_scenarios_know_the_schedule_by_its_name_here():
    pipeline = engine.Pipeline([lambda x: x], num_micro_batches=2, schedule="1F1B")
    assert pipeline.options.schedule == "interleaved"
    costs = schedules.Costs.of(2, forward=1.0, backward=2.0)
    assert schedules.Scenario(costs, "GPipe", 4).schedule == "all_forwards"


def test_what_schedule_takes_has_a_public_type():
    assert engine.PipelineOptions.__annotations__["schedule"] == "schedules.Schedule"
    assert set(typing.get_args(engine.Schedule)) >= {str, engine.ScheduleFunction, engine.SearchedSchedule}

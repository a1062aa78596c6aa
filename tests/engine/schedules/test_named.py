import functools
import typing

import pytest

from ipu_pipeline import engine
from ipu_pipeline.engine import schedules
from ipu_pipeline.tf1.program.pipeline_arguments import PipelineSchedule

FOUND = {
    "grouped": ["Grouped"],
    "interleaved": ["1f1b", "1F1B", "OneForwardOneBackward", "DAPPLE", "Non-interleaved", "interleaved"],
    "all_forwards": ["gpipe", "GPipe", "LoopedBFS", "ScheduleGPipe", "AFAB", "F-then-B"],
    "looped": ["interleaved_1f1b", "Interleaved1F1B", "ScheduleInterleaved1F1B", "VPP"],
    "zero_bubble": ["zero bubble", "ZB-H1"],
    "zero_bubble_h2": ["ZeroBubbleH2"],
    "looped_zero_bubble": ["InterleavedZeroBubble"],
    "zero_bubble_v": ["zbv", "ZBVZeroBubble"],
    "v_half": ["v-half"],
    "v_min": ["VMIN"],
    "dual_pipe_v": ["DualPipeV"],
}


def test_names_of_other_libraries():
    found = {name: [schedules.find_schedule(other) for other in FOUND[name]] for name in FOUND}
    assert found == {name: [name] * len(others) for name, others in FOUND.items()}


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
    assert {engine.ScheduleFunction, engine.SearchedSchedule} < set(typing.get_args(engine.Schedule))

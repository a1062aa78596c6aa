"""Dispatch plans through the front: given, chosen, described, kept and given again; and measured."""

import dataclasses
import json

import jax
import numpy as np
import optax
import pytest

from ipu_pipeline import engine
from ipu_pipeline.pipelining_ops import Chunking, PipelineSchedule
from tests.support import front, models


def test_a_chosen_plan_is_kept_and_given_again():
    program = front.Model(gradient_accumulation_count=8, repeat_count=2).program
    chosen = program.dispatch_plans["Pipeline"]
    assert f"dispatch: {chosen}" in str(program.summary())
    assert chosen.chunk_size in (1, 2)  # of eight micro-batches, with four chunks, as it is measured
    given = dataclasses.replace(chosen, chunk_size=4)  # which would not have been chosen
    kept = json.loads(json.dumps(dataclasses.asdict(given)))
    model = front.Model(gradient_accumulation_count=8, repeat_count=2, dispatch_plan=Chunking(**kept))
    assert model.program.dispatch_plans["Pipeline"] == given


def test_what_has_no_choice_says_why():
    summary = str(front.Model(pipeline_schedule=PipelineSchedule.Interleaved).program.summary())
    assert "one micro-batch per program" in summary
    assert "schedule was chosen" in summary
    single = front.Model(device_mapping=[0, 0]).program
    assert "dispatch:" not in str(single.summary())
    assert single.dispatch_plans == {}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dispatch_plan": "fast"}, TypeError, "dispatch_plan must be a Chunking, or None"),
        ({"dispatch_plan": Chunking(3)}, ValueError, "chunk_size must divide .* is 8; got 3"),
        (
            {"dispatch_plan": Chunking(2), "device_mapping": [0, 0]},
            ValueError,
            "all stages are on one device, where everything is one program",
        ),
    ],
)
def test_plans_that_do_not_fit(options, error, message):
    with pytest.raises(error, match=message):
        front.Model(gradient_accumulation_count=8, **options)


def test_a_measured_plan():
    micro_batches = models.mlp_batches(np.random.default_rng(0), 8)
    options = {"optimizer": optax.sgd(0.1), "donate": True}
    pipeline = engine.Pipeline(models.mlp_stages(2), num_micro_batches=8, **options)
    state = pipeline.init(jax.random.key(0), micro_batches[0])
    plan = engine.measure_dispatch_plan(pipeline, state, micro_batches, num_steps=2)
    assert plan.reason.startswith("measured, a step by micro-batches per program: 1 ")
    assert plan.reason.count(" us") + plan.reason.count(" ms") == 4  # chunks of 1, 2, 4 and 8
    assert pipeline.dispatch_plan.reason != plan.reason
    pipeline.step(state, micro_batches)  # the state is still there

    options = {"device_mapping": [0, 0], "collect_outputs": False}
    alone = engine.Pipeline(models.mlp_stages(2), num_micro_batches=8, **options)
    with pytest.raises(ValueError, match="all stages are on one device"):
        engine.measure_dispatch_plan(alone, state, micro_batches)

"""What options may be, and warnings of those that have no effect."""

import itertools
import subprocess
import sys
import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ipu_pipeline as ipu
from ipu_pipeline import engine
from ipu_pipeline.engine import schedules
from ipu_pipeline.engine.option_types import OffloadName, RecomputationName, ReductionName, ShardName
from ipu_pipeline.engine.tracing.side_outputs import _REDUCTIONS, MetricReduction

STAGES = [lambda p, x: jnp.tanh(x * p), lambda p, x: jnp.mean(x * p)]
FORWARDS = {"parameters": [np.float32(2), np.float32(3)], "num_micro_batches": 2}
TRAINING = {**FORWARDS, "optimizer": optax.sgd(0.1)}
X = np.ones(3, np.float32)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"donate": "no"}, "donate must be True or False; got 'no'"),
        ({"collect_outputs": "loss"}, "collect_outputs must be True, False, or a function"),
        ({"loss": 3}, "loss must be a function of what the last stage returns, or None; got 3"),
        ({"trained": "w"}, "trained must be a collection of full names, .*; got 'w'"),
        ({"trained": lambda: ["w"]}, "trained must be a collection of full names"),
        ({"gradient_map": lambda gradient, _own: gradient}, "gradient_map=lambda: halve, or None; got"),
        ({"devices": "cpu"}, "devices must be a list of devices, .*; got 'cpu'"),
        ({"devices": [0, 1]}, r"devices must be a list of devices, .*; got \[0, 1\]"),
        ({"execution_phases": (0, 1)}, "execution_phases must be an engine.ExecutionPhases"),
        ({"block_bytes": -1}, "block_bytes must be an integer of at least 0; got -1"),
        ({"max_chunked_bytes": 1.5}, "max_chunked_bytes must be an integer of at least 0; got 1.5"),
        ({"stages": [], "parameters": None}, "at least one function"),
        ({"num_micro_batches": 0}, "num_micro_batches must be an integer of at least 1; got 0"),
        ({"num_micro_batches": 2.0}, "must be an integer of at least 1; got 2.0"),
        ({"num_micro_batches": "4"}, "must be an integer of at least 1; got '4'"),
        ({"optimizer": None, "loss": jnp.mean}, "Pass an optimizer with loss"),
        ({"schedule": "latest"}, "'latest'"),
        ({"reduction": "median"}, "median"),
        ({"devices": 3}, "devices must be a list of devices.*; got 3"),
        ({"device_mapping": [0]}, "each of the 2 stages"),
        ({"device_mapping": [-1, 0]}, "one number from 0"),
        ({"device_mapping": [0.0, 1.0]}, r"device_mapping must have one number .*; got \[0.0, 1.0\]"),
        ({"device_mapping": 1}, "device_mapping must have one number .*; got 1"),
        ({"device_mapping": "01"}, "device_mapping must have one number"),
    ],
)
def test_what_is_not_usable_is_refused_at_once(options, text):
    with pytest.raises(ValueError, match=text):
        engine.Pipeline(**{"stages": STAGES, **TRAINING, **options})


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: engine.Pipeline(STAGES), "^Pipeline: num_micro_batches must be given"),
        (lambda: engine.Pipeline(STAGES, 2), "^Pipeline: options are given by their names; got 2"),
        (
            lambda: engine.auto_stages(STAGES, 2, X, donates=True),
            "^auto_stages: .* 'donates'. Did .* 'donate'",
        ),
        (lambda: engine.split(jnp.tanh, 2, X), "^split: num_micro_batches must be given"),
    ],
)
def test_options_that_are_not_there(call, text):
    with pytest.raises(TypeError, match=text):
        call()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"stages": STAGES[0]}, "stages must be a list of functions or Stages; got funct"),
        ({"shedule": "1f1b"}, "^Pipeline: there is no option 'shedule'. Did you mean 'schedule'"),
        ({"stages": (stage for stage in STAGES)}, "stages must be a list .* got generator"),
        ({"optimizer": optax.adam}, r"got the function adam. Call it, for example adam\(1e-3\)"),
        ({"optimizer": ipu.optimizers.tf1.AdamOptimizer}, "got the class AdamOptimizer. Call it"),
        ({"optimizer": optax.sgd(1).update}, "must be an optax.GradientTra"),
    ],
)
def test_what_is_of_another_type_is_refused_at_once(options, text):
    with pytest.raises(TypeError, match=text):
        engine.Pipeline(**{"stages": STAGES, **TRAINING, **options})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"devices": []}, "needs 2 devices"),
        ({"trained": []}, "No variables to optimize: trained names none"),
        (
            {"gradient_map": lambda: lambda gradient, _variable: gradient[None]},
            "map of gradient_map must return the gradient's shape",
        ),
    ],
)
def test_what_is_refused_as_it_starts(options, text):
    with pytest.raises(ValueError, match=text):
        engine.Pipeline(STAGES, **TRAINING, **options).init(jax.random.key(0), X)


@pytest.mark.parametrize(
    "options",
    [
        {"trained": ["stage0"]},
        {"gradient_map": lambda: None},
        {"accumulator_dtype": jnp.float32},
        {"recompute": "auto"},
        {"reduction": "sum"},
        {"offload": ["weights", "activations"]},
        {"shard": ["weights", "optimizer_state"], "num_replicas": 2},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_only_training_has_a_use_for(options):
    with pytest.warns(UserWarning, match="has no effect: the pipeline only runs forwards") as caught:
        engine.Pipeline(STAGES, **FORWARDS, **options)
    (warning,) = caught
    assert next(iter(options)) in str(warning.message)
    assert warning.filename == __file__
    engine.Pipeline(STAGES, **TRAINING, **options)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"sum_dtype": jnp.float32}, "sum_dtype has no effect without sum_collected"),
        (
            {"sum_collected": True, "collect_outputs": False, "optimizer": None},
            "neither outputs nor losses are collected",
        ),
        ({"shard": ["optimizer_state"]}, "shard has no effect: there is one replica"),
    ],
)
def test_what_has_no_effect_beside_others(options, reason):
    with pytest.warns(UserWarning, match=reason):
        engine.Pipeline(STAGES, **{**TRAINING, **options}).init(jax.random.key(0), X)


# For type checkers.


@pytest.mark.parametrize(
    ("alias", "words"),
    [
        (
            schedules.ScheduleName,
            [*itertools.chain(*([one.name, *one.others] for one in schedules.SCHEDULES)), "searched"],
        ),
        (ReductionName, [one.value for one in engine.Reduction]),
        (RecomputationName, [one.value for one in engine.Recomputation]),
        (OffloadName, [one.value for one in engine.Offload]),
        (ShardName, [one.value for one in engine.Shard]),
        (MetricReduction, list(_REDUCTIONS)),
    ],
)
def test_types_have_the_words_that_are_accepted(alias, words):
    assert list(typing.get_args(alias)) == words


CHOICES = """
import torch
from ipu_pipeline import datasets, engine, layers, poptorch

pipeline = engine.Pipeline([], num_micro_batches=2, schedule="{1f2b}", reduction="{sums}")
engine.Pipeline([], num_micro_batches=2, recompute="{all}", offload=["{weight}"], shard=["{state}"])
engine.metric("a", 1.0, "{median}")
engine.schedules.timetable("{gpip}", 2, 4, (0, 1), True)
datasets.Buckets([], [4], 2, remainder="{keep}", too_long="{skip}")
layers.Conv2D(3, 3, padding="{sames}")
poptorch.identity_loss(torch.ones(1), "{means}")
poptorch.Options().setPipelineSchedule("{1f2b}")
"""
GOOD = {
    "{1f2b}": "1f1b",
    "{sums}": "sum",
    "{all}": "auto",
    "{weight}": "weights",
    "{state}": "weights",
    "{median}": "last",
    "{gpip}": "gpipe",
    "{keep}": "drop",
    "{skip}": "cut",
    "{sames}": "same",
    "{means}": "mean",
}


@pytest.mark.thorough
def test_a_type_checker_finds_other_words(tmp_path):
    good = CHOICES
    for wrong, right in GOOD.items():
        good = good.replace(wrong, right)
    files = [tmp_path / "good.py", tmp_path / "wrong.py"]
    for path, text in zip(files, (good, CHOICES), strict=True):
        path.write_text(text)
    options = ["--config-file=", f"--cache-dir={tmp_path}", "--follow-imports=silent"]
    command = [sys.executable, "-m", "mypy", *map(str, files), *options]
    told = subprocess.run(command, capture_output=True, text=True).stdout
    lines = [line for line in told.splitlines() if ": error: " in line]
    assert not [line for line in lines if "good.py" in line], told
    found = [int(line.split(":")[1]) for line in lines]
    texts = enumerate(CHOICES.splitlines(), 1)
    numbers = [number for number, text in texts for _word in range(text.count("{"))]
    assert found == numbers, told

"""What advice predicts, against a step that is measured after the move: emulated devices, nested trees."""

import dataclasses
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks.emulation import stages, values
from ipu_pipeline import engine

NUM_MICRO_BATCHES, NUM_ROUNDS, NUM_ATTEMPTS = 8, 3, 6
FORWARD_MS, BACKWARD_MS = 5.0, 10.0
BOUND = 0.1


def make_block():
    """The parameters of a block, deep as Flax makes them; names sort otherwise than they run."""
    return {
        "norm": {"scale": np.ones(values.WIDTH, np.float32)},
        "attention": {"query": {"kernel": np.ones(values.WIDTH, np.float32)}},
    }


def make_pipeline(blocks):
    """Stages of the given blocks, each of which takes 5 ms forwards and 10 ms backwards."""
    emulated = stages.emulated_stage(FORWARD_MS, BACKWARD_MS)

    def make_stage(index, names):
        def stage(parameters, x):
            own = parameters["params"]
            if index == 0:
                x = x + own["wpe"]
            for name in names:
                x = emulated(own[name]["attention"]["query"]["kernel"], x * own[name]["norm"]["scale"])
            return jnp.mean(x**2) if index == len(blocks) - 1 else x

        parameters = {name: make_block() for name in names}
        if index == 0:
            parameters["wpe"] = np.zeros((1, values.WIDTH), np.float32)
        return engine.Stage(stage, {"params": parameters})

    pipeline = engine.Pipeline(
        [make_stage(*one) for one in enumerate(blocks)],
        num_micro_batches=NUM_MICRO_BATCHES,
        loss=lambda loss: loss,
        optimizer=optax.sgd(values.RATE),
        dispatch_plan=engine.Chunking(),
    )
    micro_batches = values.make_micro_batches(NUM_MICRO_BATCHES, stages.LEAST_BYTES)
    return pipeline, pipeline.init(jax.random.key(0), micro_batches[0]), micro_batches


def time_step(pipeline, state, micro_batches):
    begin = time.perf_counter()
    state, outputs = pipeline.step(state, micro_batches)
    jax.block_until_ready((state, outputs.collected))
    return time.perf_counter() - begin


@pytest.mark.thorough
@pytest.mark.alone
@pytest.mark.skipif(stages.find_compiler() is None, reason="there is no g++")
def test_a_step_takes_what_the_advice_said_after_the_move():
    """The advice was "12% more (502 to 446 ms)" for a table of positions, with which it took 504 ms."""
    stages.register()
    before = [[f"block_{number}" for number in own] for own in (range(8, 12), [12], [13], [14])]
    present = make_pipeline(before)
    scenario = dataclasses.replace(present[0].scenario(), cores=None)
    moves = [row for row in engine.what_if(scenario, counts=[]) if row.split]
    best = max(moves, key=lambda row: row.gain)
    after = [
        [layer.name.rpartition("/")[2] for layer in own if "block" in layer.name]
        for own in best.scenario.layers
    ]
    assert sorted(map(len, after)) == [1, 2, 2, 2]
    assert [name for own in after for name in own] == [name for own in before for name in own]
    moved = make_pipeline(after)
    least = [float("inf")] * 2  # what else runs on the machine only makes steps longer
    predicted = [engine.simulate(scenario).free_running.step_time, best.step_time]
    for _attempt in range(NUM_ATTEMPTS):
        pairs = [(time_step(*present), time_step(*moved)) for _round in range(NUM_ROUNDS)]
        least = list(map(min, least, map(statistics.median, zip(*pairs, strict=True))))
        if all(abs(taken / own - 1) <= BOUND for taken, own in zip(least, predicted, strict=True)):
            return
    raise AssertionError(f"as it is and after the move, measured: {least}, predicted: {predicted}")

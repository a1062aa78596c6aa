"""Pipelines on one device: one program, block by block."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ipu_pipeline as ipu
from ipu_pipeline import engine
from ipu_pipeline.engine.devices.feeds import Feed
from ipu_pipeline.engine.execution.block_runner import BlockSizes, block_sizes
from ipu_pipeline.engine.pipeline_options import PipelineOptions
from ipu_pipeline.errors import OutOfRangeError
from ipu_pipeline.pipelining_ops import OptimizerFunctionOutput
from tests.support import beside, front, models, scheduled
from tests.support.compilations import compiled_in

ELEMENT_BYTES = 4 * 12 * 4 + 4 * 4 + 4  # of models.mlp_batches, and the loss


@pytest.mark.parametrize(
    ("num_micro_batches", "unit", "limit", "expected"),
    [
        (160, 16, 1000, (16, 160, 160)),  # all in one
        (160, 16, 100, (16, 80, 80)),  # two blocks of five updates, and not of six and four
        (48, 16, 47, (16, 32, 32)),
        (160, 16, 16, (16, 16, 16)),
        (32, 16, 15, (1, 8, 8)),  # an update in two parts
        (32, 16, 1, (1, 1, 1)),
        (7, 1, 3, (1, 3, 3)),
        (5000, 1, 4000, (1, 1000, 1000)),  # not more than 1,024 at once
        (0, 1, 10, (1, 1, 1)),
    ],
)
def test_block_sizes(num_micro_batches, unit, limit, expected):
    assert block_sizes(num_micro_batches, unit, 8, limit * 8) == BlockSizes(*expected)
    assert block_sizes(num_micro_batches, unit, 8, limit * 8 + 7) == BlockSizes(*expected)


def test_stacks():
    feed = Feed(lambda arrays: arrays, is_block=True)
    feed.set_size(3)
    rows = [feed.add([np.full(2, number), np.float32(number)]) for number in range(7)]
    first = feed.place(rows[:3], 3)
    np.testing.assert_array_equal(first[0], [[0, 0], [1, 1], [2, 2]])
    assert first[0] is rows[0].stack.arrays[0]  # no copy
    assert first[1].ctypes.data % 64 == 0
    crossing = feed.place(rows[4:7], 3)  # from two stacks
    np.testing.assert_array_equal(crossing[1], [4, 5, 6])
    partial = feed.place(rows[6:], 3)  # the stack that is being filled
    more = feed.add([np.full(2, 9), np.float32(9)])
    assert more.stack.arrays is not partial
    np.testing.assert_array_equal(partial[1][:1], [6])
    ahead = feed.place_ahead(rows, 2, 3)  # two at once, in stacks with room for three
    for first in range(0, 6, 2):
        np.testing.assert_array_equal(feed.place(ahead[first : first + 2], 3)[1][:2], [first, first + 1])


@pytest.mark.parametrize(
    ("options", "block_bytes"),
    [
        pytest.param({"device_mapping": [0, 0]}, 7 * ELEMENT_BYTES, marks=pytest.mark.thorough),
        ({"device_mapping": [0, 0]}, 2 * ELEMENT_BYTES),
        ({"device_mapping": [0, 1], "gradient_accumulation_count": 8}, 2**26),  # in chunks of two
    ],
    ids=str,
)
def test_the_end_of_the_data_keeps_whole_updates(options, block_bytes, monkeypatch):
    monkeypatch.setitem(PipelineOptions.__init__.__kwdefaults__, "block_bytes", block_bytes)
    count = options.get("gradient_accumulation_count", 3)
    num_elements, ended = 3 * count + 2, f"ended after {3 * count + 2} elements"
    model = front.Model(front.data(num_elements), repeat_count=8, **options)
    pipeline, rate = model.program.calls[0].pipeline, np.float32(0.1)
    assert count == 3 or pipeline.dispatch_plan.chunk_size == 2
    elements = list(front.data(num_elements)())
    with ipu.Session(seed=3) as session:
        session.run([model.initializer, ipu.global_variables_initializer()])
        plain = pipeline.init(jax.random.key(3), elements[0], rate)
        plain = dataclasses.replace(beside.copied(plain), variables=session.variables)
        with pytest.raises(OutOfRangeError, match=ended):
            model.run(session)
        assert session.update_count() == 3
        losses, completed, expected = session.run(model.outfeed.dequeue()), session.variables, []
        for first in range(0, 3 * count, count):
            step = elements[first : first + count]
            plain, outputs = beside.step_plainly(pipeline, plain, step, rate)
            expected += outputs.losses
        models.assert_trees_close(losses, np.array(expected))
        models.assert_trees_close(completed, jax.tree.map(np.asarray, plain.variables))
        with pytest.raises(OutOfRangeError, match=ended):  # the data begin again with the initializer only
            model.run(session)
        models.assert_trees_close(session.variables, completed, 0)
        session.run(model.initializer)  # what the broken update accumulated is gone
        with pytest.raises(OutOfRangeError):
            model.run(session)
        assert session.update_count() == 6
        again = session.run(model.outfeed.dequeue())
        assert np.size(again) == 3 * count
        assert np.mean(again) < np.mean(losses)  # the same data, and what was learned stands


def test_inference_without_a_feed():
    """Each micro-batch has random numbers of its own, the same on one device as on two."""
    stages = [lambda: jax.random.normal(ipu.next_rng_key(), (2,)), lambda x: (x, 3.0)]
    found = []
    for mapping in ([0, 0], [0, 1]):
        queue = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
        options = {"repeat_count": 3, "device_mapping": mapping, "outfeed_queue": queue}
        program = front.compile_pipeline(stages, 2, **options)
        with ipu.Session(seed=3) as session:
            session.run(program)
            found.append(session.run(queue.dequeue()))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    np.testing.assert_array_equal(found[0][1], np.full(6, 3.0, "float32"))
    assert len(np.unique(found[0][0])) == 12


def test_an_accumulating_optimizer_in_a_pipeline():
    def optimizer_function(rate, loss):
        nested = ipu.optimizers.GradientAccumulationOptimizerV2(optax.sgd(rate), 2)
        return OptimizerFunctionOutput(nested, loss)

    with pytest.raises(ValueError, match="a pipeline accumulates by itself"):
        front.Model(optimizer_function=optimizer_function)


@pytest.mark.parametrize("mapping", [pytest.param([0, 0], marks=pytest.mark.thorough), [0, 1]])
def test_outputs_that_are_not_collected(mapping, rng):
    pipeline = engine.Pipeline(
        scheduled.stages(2),
        num_micro_batches=3,
        optimizer=optax.sgd(0.1),
        device_mapping=mapping,
        collect_outputs=False,
    )
    step = list(rng.normal(size=(3, 2, scheduled.SIZE)).astype("float32"))
    _state, outputs = pipeline.step(pipeline.init(jax.random.key(2), step[0]), step)
    assert outputs.outputs == []
    assert len(outputs.losses) == 3


def test_an_initializer_that_returns_one_array_again_and_again():
    kept = jnp.ones(3)

    def body():
        a = ipu.get_variable("a", (3,), initializer=lambda key, shape, dtype: kept)
        b = ipu.get_variable("b", (3,), initializer=lambda key, shape, dtype: kept)
        optimizer = ipu.optimizers.GradientAccumulationOptimizerV2(optax.sgd(1.0), 1)
        return optimizer.minimize(jnp.sum(a + b))

    program = front.compile_program(lambda: ipu.loops.repeat(2, body))
    with ipu.Session() as session:
        session.run(program)
        session.run([ipu.global_variables_initializer(), program])
        np.testing.assert_array_equal(session.variables["a"], [-1, -1, -1])
    np.testing.assert_array_equal(kept, [1, 1, 1])


def test_one_compilation(caplog):
    model = front.Model(device_mapping=[0, 0], repeat_count=3)
    with front.session_of(model, seed=3) as session:
        model.run(session)
        assert compiled_in(lambda: model.run(session), caplog) == []


def test_placed_micro_batches_of_an_update_in_parts():
    """They used to be one stack with room for a part of them only."""

    def stage(x):
        return jnp.sum((x @ engine.get_variable("kernel", (4, 4))) ** 2)

    step = [np.full((2, 4), number, "float32") for number in range(6)]
    options = {"num_micro_batches": 6, "optimizer": optax.sgd(0.1)}
    found = []
    for block_bytes in (2**26, 200):
        pipeline = engine.Pipeline([stage], block_bytes=block_bytes, **options)
        state = pipeline.init(jax.random.key(0), step[0])
        found.append(pipeline.step(state, pipeline.place_micro_batches(step))[0].variables)
        with pytest.raises(ValueError, match="0 were placed, but a step has 6"):
            pipeline.step(state, pipeline.place_micro_batches([]))
    models.assert_trees_close(found[1], found[0])

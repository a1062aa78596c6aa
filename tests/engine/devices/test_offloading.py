"""Offloading: where arrays lie, and results that are the same to the last bit."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ipu_pipeline as ipu
from ipu_pipeline import engine
from ipu_pipeline.engine.execution.single_device.runner import BlockRunner
from ipu_pipeline.engine.schedules.actions import ActionKind
from ipu_pipeline.pipelining_ops import OptimizerFunctionOutput, pipeline
from tests.support import front, models

KINDS = ["weight_update_variables", "activations", "gradient_accumulation_buffers", "weights"]


def make_stages():
    def make(index):
        def stage(x, labels):
            with engine.variable_scope(f"stage{index}"):
                x = models.dense("first", 16, x, lambda a: jnp.tanh(jnp.sin(a)))
                x = engine.recomputation_checkpoint(x)
                x = x * jax.random.bernoulli(engine.next_rng_key(), 0.8, x.shape).astype("float32")
                total = engine.get_variable("total", (), initializer=0.0, trainable=False)
                engine.assign("total", total + x.mean())
                x = models.dense("second", 16, x, jnp.tanh)
            return models.cross_entropy(x, labels) if index == 2 else (x, labels)

        return stage

    return [make(index) for index in range(3)]


def make(offload, **options):
    options = {"num_micro_batches": 4, "loss": lambda loss: loss, "optimizer": optax.adam(0.01)} | options
    return engine.Pipeline(make_stages(), offload=offload, donate=True, **options)


def run(pipeline, num_steps=2):
    rng = np.random.default_rng(0)
    steps = [models.mlp_batches(rng, 4) for _ in range(num_steps)]
    state = pipeline.init(jax.random.key(0), steps[0][0])
    losses = []
    for step in steps:
        state, outputs = pipeline.step(state, step)
        losses.append(outputs.losses)
    arrays = jax.tree.map(np.asarray, (losses, state.variables, state.optimizer_state))
    return state, arrays


@functools.cache
def without_offloading(**options):
    return run(make((), **options))[1]


def memory_kinds(tree):
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)}


@pytest.mark.parametrize(
    ("offload", "mapping", "schedule", "recompute"),
    [
        (KINDS[:1], (0, 0, 0), "sequential", None),
        (KINDS[1:2], (0, 1, 0), "interleaved", "auto"),
        (KINDS[2:3], (0, 0, 0), "sequential", None),
        (KINDS[3:], (0, 1, 2), "grouped", None),
        (KINDS, (0, 1, 2), "grouped", None),
        (KINDS, (0, 0, 0), "sequential", "auto"),
    ],
)
def test_results_are_the_same_to_the_last_bit(offload, mapping, schedule, recompute):
    options = {"device_mapping": mapping, "schedule": schedule, "recompute": recompute}
    pipeline = make(offload, **options)
    state, arrays = run(pipeline)
    jax.tree.map(np.testing.assert_array_equal, arrays, without_offloading(**options))
    trained = {name: value for name, value in state.variables.items() if not name.endswith("total")}
    assert memory_kinds(trained) == {"pinned_host" if "weights" in offload else "device"}
    wanted = {"pinned_host" if "weight_update_variables" in offload else "device"}
    assert memory_kinds(state.optimizer_state) == wanted
    wanted = {"pinned_host" if "gradient_accumulation_buffers" in offload else "device"}
    assert memory_kinds(pipeline._accumulators) == wanted
    counters = {name: value for name, value in state.variables.items() if name.endswith("total")}
    assert memory_kinds(counters) == {"device"}  # they are read and written in every micro-batch


def test_activations_lie_in_host_memory_between_forward_and_backward():
    pipeline = make(["activations"])
    rng = np.random.default_rng(0)
    pipeline.trace(models.mlp_batches(rng, 1)[0])
    executor = pipeline.prepare()
    templates = executor.columns[0].plan.templates
    kept = set()

    def observe(_replica, template, micro_batch, values):
        for stage in range(2):
            if template is templates[ActionKind.FORWARD, stage]:
                found = [values[micro_batch][slot] for slot in template.kept]
                held = sum(array.nbytes for array in found)
                assert held == pipeline.plan_memory()[stage].num_held_bytes
                assert memory_kinds(found) == {"pinned_host"}
                kept.add((stage, micro_batch))

    executor.observe(observe)
    run(pipeline, num_steps=1)
    assert kept == set(itertools.product(range(2), range(4)))


@pytest.mark.parametrize("offload", [(), *([kind] for kind in KINDS)])
def test_host_memory_in_one_program(offload, monkeypatch):
    """Transfers stand in the compiled program, and what lies in host memory goes in and comes out there."""
    texts = []
    original = BlockRunner._jit

    def jit(self, *arguments):
        function = original(self, *arguments)

        def call(*values):
            texts.append(function.lower(*values).as_text())
            return function(*values)

        call.lower = function.lower
        return call

    monkeypatch.setattr(BlockRunner, "_jit", jit)
    run(make(offload, device_mapping=[0, 0, 0]), num_steps=1)
    (text,) = texts
    assert ("annotate_device_placement" in text) == bool(offload)
    assert ("pinned_host" in text) == (tuple(offload) not in ((), ("activations",)))


def test_serialized_micro_batches(rng):
    options = {"num_micro_batches": 2, "num_serialized": 2, "schedule": "sequential"}
    _state, expected = run(make((), device_mapping=[0, 0, 0], **options))
    _state, arrays = run(make(KINDS, device_mapping=[0, 0, 0], **options))
    jax.tree.map(np.testing.assert_array_equal, arrays, expected)


def test_shared_weights():
    def first(x, labels):
        with engine.variable_scope("shared"):
            return jnp.tanh(x @ engine.get_variable("kernel", (12, 12))), labels

    def last(x, labels):
        with engine.variable_scope("shared", reuse=True):
            return models.cross_entropy(x @ engine.get_variable("kernel", (12, 12)), labels)

    rng = np.random.default_rng(0)
    step = models.mlp_batches(rng, 4)
    found = []
    for offload in ((), KINDS):
        pipeline = engine.Pipeline(
            [first, last],
            num_micro_batches=4,
            loss=lambda loss: loss,
            optimizer=optax.adam(0.1),
            offload=offload,
        )
        state = pipeline.init(jax.random.key(0), step[0])
        state, outputs = pipeline.step(state, step)
        found.append(jax.tree.map(np.asarray, (outputs.losses, state.variables)))
    jax.tree.map(np.testing.assert_array_equal, *found)


def test_forwards_only():
    pipeline = engine.Pipeline(make_stages()[:2], num_micro_batches=4, offload=["weights"])
    rng = np.random.default_rng(0)
    step = models.mlp_batches(rng, 4)
    state = pipeline.init(jax.random.key(0), step[0])
    state, _outputs = pipeline.step(state, step)
    assert memory_kinds(state.variables["stage0/first/kernel"]) == {"pinned_host"}


@pytest.mark.parametrize("sum_collected", [False, True])
def test_what_is_kept_and_collected_is_on_the_device(sum_collected, rng):
    """The last stage returns what the first one, on the same IPU, keeps for its backward."""

    def first(x, labels):
        return models.dense("first", 16, x, jnp.tanh), x, labels

    def middle(h, x, labels):
        return models.dense("middle", 16, h, jnp.tanh), x, labels

    def last(h, x, labels):
        return models.cross_entropy(models.dense("last", 10, h), labels), x

    def step(offload):
        pipeline = engine.Pipeline(
            [first, middle, last],
            num_micro_batches=4,
            loss=lambda loss, x: loss,
            optimizer=optax.adam(0.01),
            device_mapping=(0, 1, 0),
            offload=offload,
            sum_collected=sum_collected,
        )
        state = pipeline.init(jax.random.key(0), batches[0])
        return pipeline.step(state, batches)[1].outputs

    batches = models.mlp_batches(rng, 4)
    outputs = step(["activations"])
    assert memory_kinds(outputs) == {"device"}
    jax.tree.map(np.testing.assert_array_equal, outputs, step(()))


def test_wrong_names():
    with pytest.raises(ValueError, match="offload must be a collection of names; got the string 'weights'"):
        make("weights")
    with pytest.raises(ValueError, match="must be one of 'weight_update_variables', .*; got 'gradients'"):
        make(["gradients"])


# The front.


def build(trains=True, mapping=None, **arguments):
    infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(front.data())
    outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()

    def model():
        return pipeline(
            make_stages(),
            gradient_accumulation_count=4,
            repeat_count=2,
            infeed_queue=infeed,
            outfeed_queue=outfeed,
            device_mapping=mapping,
            optimizer_function=(lambda loss: OptimizerFunctionOutput(optax.adam(0.1), loss))
            if trains
            else None,
            **arguments,
        )

    return front.compile_program(model), infeed, outfeed


def test_arguments_of_pipeline():
    for value, wanted in ((None, ()), (False, ()), (True, KINDS)):
        program, _infeed, _outfeed = build(**{f"offload_{kind}": value for kind in KINDS})
        (call,) = program.calls
        assert {offload.value for offload in call.pipeline.options.offload} == set(wanted)


def test_two_updates_in_one_program():
    found = []
    for value in (None, True):
        program, infeed, outfeed = build(mapping=[0, 0, 0], **{f"offload_{kind}": value for kind in KINDS})
        with ipu.Session(seed=1) as session:
            session.run([infeed.initializer, program])
            session.run(program)
            found.append((session.run(outfeed.dequeue()), session.variables))
            kinds = memory_kinds(session._store.state.pipelines["Pipeline"].optimizer.tree)
            assert kinds == {"pinned_host" if value else "device"}
    jax.tree.map(np.testing.assert_array_equal, *found)


@pytest.mark.parametrize("kind", KINDS)
def test_each_argument_moves_its_own_kind(kind):
    program, infeed, _outfeed = build(**{f"offload_{kind}": True})
    (call,) = program.calls
    executor = call.pipeline.prepare()
    kept = []

    def observe(_replica, template, chunk, values):
        kept.extend(values[chunk][slot] for slot in template.kept)

    executor.observe(observe)
    with ipu.Session() as session:
        session.run([infeed.initializer, program])
        assert call.pipeline.prepare() is executor
        found = {
            "weight_update_variables": session._store.state.pipelines["Pipeline"].optimizer.tree,
            "activations": kept,
            "gradient_accumulation_buffers": call.pipeline._accumulators,
            "weights": session._store.state.variables["stage0/first/kernel"],
        }
        for name, tree in found.items():
            assert memory_kinds(tree) == {"pinned_host" if name == kind else "device"}, name


@pytest.mark.parametrize("kind", KINDS[:3])
def test_no_effect_in_inference(kind):
    with pytest.warns(UserWarning, match=f"offload_{kind} will have no effect .* inference"):
        build(trains=False, **{f"offload_{kind}": True})


def test_wrong_values():
    with pytest.raises(TypeError, match="offload_weights must be True, False or None; got 'yes'"):
        build(offload_weights="yes")


def test_loops_offload_optimizer_state():
    found = []
    for offloads in (False, True):
        infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(front.data())
        outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()

        def body(x, labels, outfeed=outfeed, offloads=offloads):
            loss = models.cross_entropy(ipu.layers.Dense(10)(x), labels)
            optimizer = ipu.optimizers.GradientAccumulationOptimizerV2(
                optax.adam(0.1), 2, offload_weight_update_variables=offloads
            )
            return optimizer.minimize(loss), outfeed.enqueue(loss)

        program = front.compile_program(
            lambda body=body, infeed=infeed: ipu.loops.repeat(6, body, infeed_queue=infeed)
        )
        with ipu.Session(seed=1) as session:
            session.run(infeed.initializer)
            session.run(program)
            found.append((session.run(outfeed.dequeue()), session.variables))
            tree = session._store.state.pipelines["GradientAccumulationOptimizerV2"].optimizer.tree
            assert memory_kinds(tree) == {"pinned_host" if offloads else "device"}
    jax.tree.map(np.testing.assert_array_equal, *found)

"""Offloading: where arrays lie, and results that are the same to the last bit."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ipu_pipeline as ipu
from ipu_pipeline import engine
from ipu_pipeline.engine import watching
from tests.support import front, models, watchers

KINDS = ["weight_update_variables", "activations", "gradient_accumulation_buffers", "weights"]


def make_stages(num_stages=2):
    def make(index):
        def stage(x, labels):
            with engine.variable_scope(f"stage{index}"):
                x = models.dense("first", 8, x, lambda a: jnp.tanh(jnp.sin(a)))
                x = engine.recomputation_checkpoint(x)
                total = engine.get_variable("total", (), initializer=0.0, trainable=False)
                engine.assign("total", total + x.mean())
                x = models.dense("second", 16, x, jnp.tanh)
            return models.cross_entropy(x, labels) if index == num_stages - 1 else (x, labels)

        return stage

    return [make(index) for index in range(num_stages)]


def make(offload, **options):
    options = {"num_micro_batches": 4, "optimizer": optax.adam(0.01)} | options
    stages = make_stages(len(options.get("device_mapping", (0, 1))))
    return engine.Pipeline(stages, offload=offload, donate=True, **options)


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


ONE, TWO = {"device_mapping": (0, 0)}, {"device_mapping": (0, 1), "schedule": "grouped"}


@pytest.mark.parametrize(
    ("offload", "options"),
    [
        pytest.param(
            KINDS,
            {**ONE, "num_micro_batches": 2, "num_serialized": 2, "schedule": "sequential"},
            marks=pytest.mark.thorough,
        ),
        (KINDS, TWO),
        pytest.param(KINDS[3:], TWO, marks=pytest.mark.thorough),
        pytest.param(KINDS[:1], {**ONE, "recompute": "auto"}, marks=pytest.mark.thorough),
        pytest.param(
            KINDS[1:3],
            {"device_mapping": (0, 1, 0), "schedule": "interleaved", "recompute": "auto"},
            marks=pytest.mark.thorough,
        ),
    ],
    ids=str,
)
def test_results_are_the_same_to_the_last_bit(offload, options):
    state, arrays = run(make(offload, **options))
    jax.tree.map(np.testing.assert_array_equal, arrays, without_offloading(**options))
    trained = {name: value for name, value in state.variables.items() if not name.endswith("total")}
    assert memory_kinds(trained) == {"pinned_host" if "weights" in offload else "device"}
    wanted = {"pinned_host" if "weight_update_variables" in offload else "device"}
    assert memory_kinds(state.optimizer_state) == wanted
    counters = {name: value for name, value in state.variables.items() if name.endswith("total")}
    assert memory_kinds(counters) == {"device"}  # they are read and written in every micro-batch


class HostBytes(watchers.Watcher):
    """Watches the programs of a run for the most bytes of each device in host memory."""

    def __init__(self):
        self.peaks = collections.Counter()

    def run(self, launch, function, arguments):
        results = super().run(launch, function, arguments)
        self.peaks |= host_bytes()
        return results


def host_bytes():
    found = collections.Counter()
    for array in jax.live_arrays():
        if array.sharding.memory_kind == "pinned_host":
            found[array.device.id] += array.nbytes
    return found


@pytest.mark.usefixtures("no_garbage")
def test_activations_lie_in_host_memory_between_forward_and_backward():
    watcher, pipeline, before = HostBytes(), make(["activations"]), host_bytes()
    with watching.watching(watcher):
        run(pipeline, num_steps=1)
    planned, of_last = (stage.num_live_bytes for stage in engine.planning.plan_memory(pipeline))
    # Besides, what the last forward has left while the first backward runs.
    assert watcher.peaks - before == {0: planned + 4 * 16 * 4}
    assert planned > of_last == 0


@pytest.mark.parametrize("offload", [(), ["activations"]])
def test_activations_of_one_program_are_moved_in_it(offload, monkeypatch):
    class LoweredError(Exception):
        """Has the text of a program, which is not compiled."""

    def stop(lowered, *_arguments, **_options):
        raise LoweredError(lowered.as_text())

    pipeline, step = make(offload, **ONE), models.elements_of(4)
    state = pipeline.init(jax.random.key(0), step[0])
    monkeypatch.setattr(jax.stages.Lowered, "compile", stop)
    with pytest.raises(LoweredError) as caught:
        pipeline.step(state, step)
    assert ("annotate_device_placement" in str(caught.value)) == bool(offload)


def test_forwards_only():
    stages = [lambda x, labels: (models.dense("first", 4, x), labels), lambda x, labels: x]
    pipeline = engine.Pipeline(stages, num_micro_batches=4, offload=["weights"])
    step = models.elements_of(4)
    state, _outputs = pipeline.step(pipeline.init(jax.random.key(0), step[0]), step)
    assert memory_kinds(state.variables["first/kernel"]) == {"pinned_host"}


def test_what_is_kept_and_collected_is_on_the_device(rng):
    """The last stage returns what the first one, on the same IPU, keeps for its backward."""

    def first(x, labels):
        return models.dense("first", 4, x, jnp.tanh), x, labels

    def middle(h, x, labels):
        return models.dense("middle", 4, h, jnp.tanh), x, labels

    def last(h, x, labels):
        return models.cross_entropy(models.dense("last", 10, h), labels), x

    batches = models.mlp_batches(rng, 4)
    training = {"loss": lambda loss, x: loss, "optimizer": optax.adam(0.01), "device_mapping": (0, 1, 0)}

    def step(**options):
        options = {"num_micro_batches": 4, "offload": ["activations"], **training, **options}
        pipeline = engine.Pipeline([first, middle, last], **options)
        return pipeline.step(pipeline.init(jax.random.key(0), batches[0]), batches)[1].outputs

    outputs, sums = step(), step(sum_collected=True)
    assert memory_kinds((outputs, sums)) == {"device"}
    for (_loss, x), (given, _labels) in zip(outputs, batches, strict=True):
        np.testing.assert_array_equal(x, given)
    np.testing.assert_allclose(sums[0][1], sum(out[1] for out in outputs), rtol=1e-5)


def test_a_string_is_no_collection_of_names():
    with pytest.raises(ValueError, match="offload must be a collection of names; got the string 'weights'"):
        make("weights")


# The front.


def test_arguments_of_pipeline():
    def found(**arguments):
        (call,) = front.Model(**arguments).program.calls
        return {offload.value for offload in call.pipeline.options.offload}

    assert found(**{f"offload_{kind}": False for kind in KINDS}) == set()
    for kind in KINDS:
        assert found(**{f"offload_{kind}": True}) == {kind}
    with pytest.raises(TypeError, match="offload_weights must be True, False or None; got 'yes'"):
        front.Model(offload_weights="yes")


def test_no_effect_in_inference():
    for kind in KINDS[:3]:
        with pytest.warns(UserWarning, match=f"offload_{kind} will have no effect .* inference"):
            front.Model(optimizer_function=None, outfeed_loss=False, **{f"offload_{kind}": True})


def test_loops_offload_optimizer_state():
    infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(front.data())

    def body(x, labels):
        loss = models.cross_entropy(ipu.layers.Dense(10)(x), labels)
        return ipu.optimizers.GradientAccumulationOptimizerV2(
            optax.adam(0.1), 2, offload_weight_update_variables=True
        ).minimize(loss)

    program = front.compile_program(lambda: ipu.loops.repeat(4, body, infeed_queue=infeed))
    with front.session_of(infeed, seed=1) as session:
        before = host_bytes()
        session.run(program)
        assert sum((host_bytes() - before).values()) > 2 * 4 * 12 * 10  # Adam's two for each weight

"""Stages that several devices compute together: equal to a plain loop, and divided as was said."""

import itertools
import re
import warnings
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import ipu_pipeline as ipu
from ipu_pipeline import engine
from ipu_pipeline.engine.devices.process_exchange import read_gathered
from ipu_pipeline.engine.inspect import LiveBytes
from ipu_pipeline.engine.planning import plan_ipu_memory, plan_memory
from ipu_pipeline.ipu_pipeline_estimator import IPUPipelineEstimator, IPUPipelineEstimatorSpec
from ipu_pipeline.ipu_run_config import IPURunConfig, RunConfig
from ipu_pipeline.reports.profile import EventKind
from tests.engine.execution.test_replicas import COUNT, begun, make, make_steps
from tests.support import beside, front, joined, models
from tests.support.compilations import compilations
from tests.support.estimating import variables_of

SIZE = 16


def block(name, x, size=SIZE):
    """A dense layer with a hidden one, as the partitions of `divide` cut it."""
    with engine.variable_scope(name):
        dtype = x.dtype
        hidden = x @ engine.get_variable("in", (x.shape[-1], size), dtype)
        hidden = jnp.tanh(hidden + engine.get_variable("offset", (size,), dtype))
        hidden = engine.constrain(hidden, P(None, "model"))
        return x + hidden @ engine.get_variable("out", (size, x.shape[-1]), dtype)


def divide(spec):
    axes = {"in": (None, "model"), "offset": ("model",), "out": ("model",)}.get(spec.name.split("/")[-1])
    return None if axes is None else P(*axes)


def make_stages():
    """A stage with random numbers, and one with the loss and a variable that it assigns."""

    def first(x, labels):
        x = block("first", x)
        return x * jax.random.uniform(engine.next_rng_key(), x.shape, x.dtype), labels

    def second(x, labels):
        x = block("second", x)
        zeros = jax.nn.initializers.zeros
        seen = engine.get_variable("seen", (12,), x.dtype, initializer=zeros, trainable=False)
        engine.assign("seen", 0.5 * seen + x.mean(0))
        return models.cross_entropy(models.dense("last", 10, x), labels)

    return [first, second]


def make_divided(num_replicas=1, size=2, stages=None, **options):
    given = {"tensor_parallel": engine.TensorParallel(size, divide)}
    return make(make_stages() if stages is None else stages, num_replicas, **{**given, **options})


def parts(array):
    """The shape of what a device has."""
    return array.addressable_shards[0].data.shape


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"size": 4, "device_mapping": [0, 0]}, marks=pytest.mark.thorough),
        {"num_replicas": 2, "shard": ["optimizer_state", "weights"]},
    ],
    ids=["one IPU", "shared out"],
)
def test_what_is_divided(options):
    """Also over replicas, where the axis allows it."""
    pipeline = make_divided(**options)
    num_replicas, size = pipeline.num_replicas, pipeline.options.num_devices_per_ipu
    state, _step = begun(pipeline)
    share = size * (num_replicas if "shard" in options else 1)
    for name in ("first/in", "second/out"):
        variable = state.variables[name]
        assert np.prod(parts(variable)) * share == variable.size
        assert len(variable.devices()) == size * num_replicas
    assert parts(state.variables["last/kernel"]) == ((6, 10) if "shard" in options else (12, 10))


def test_what_devices_have():
    """Each has the part of variables, gradients and state that the plan says."""
    whole, divided = make_divided(size=1), make_divided()
    begun(whole)
    state, _step = begun(divided)
    num_divided = 4 * (2 * 12 * SIZE + SIZE)  # of a stage
    for own, plain in zip(plan_ipu_memory(divided), plan_ipu_memory(whole), strict=True):
        assert plain.num_variable_bytes - own.num_variable_bytes == num_divided // 2
        assert plain.num_optimizer_bytes - own.num_optimizer_bytes == num_divided
        assert plain.num_accumulator_bytes - own.num_accumulator_bytes == num_divided // 2
    measured = sum(
        array.addressable_shards[0].data.nbytes
        for array in jax.tree.leaves((state.variables, state.optimizer_state))
        if isinstance(array, jax.Array) and array.devices() == set(jax.devices()[:2])
    )
    planned = plan_ipu_memory(divided)[0]
    assert measured == planned.num_variable_bytes + planned.num_optimizer_bytes


@pytest.mark.thorough
def test_dense_layers_have_one_sum_over_the_devices(monkeypatch):
    """As in Megatron-LM."""
    texts, compile_ = {}, jax.stages.Lowered.compile

    def compile_and_note(lowered, *arguments, **options):
        made = compile_(lowered, *arguments, **options)
        texts[re.search(r"module @jit_(\w+)", lowered.as_text())[1]] = made.as_text()
        return made

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_and_note)
    pipeline = make_divided()
    pipeline.step(*begun(pipeline))
    text = texts["stage0_forward"]
    assert len(re.findall(r"all-reduce(-start)?\(", text)) == 1
    assert not re.search(r"all-to-all|all-gather|collective-permute", text)


def only_stage(x, labels):
    return models.cross_entropy(block("only", x), labels)


ONLY = {"only/in": P(None, "model"), "only/out": P("model", None), "only/offset": P(("model",))}


def test_nothing_is_compiled_twice():
    """Also where a partition ends with None, which JAX leaves away in what it gives back."""
    parallel = engine.TensorParallel(2, ONLY)
    options = {"tensor_parallel": parallel, "shard": ["optimizer_state", "weights"]}
    pipeline = make_divided(2, stages=[only_stage], **options)
    state, step = begun(pipeline, 2)
    state, _outputs = pipeline.step(state, step)
    with compilations() as found:
        pipeline.step(state, step)
    assert found == []


def test_what_is_kept_and_goes_on():
    """A value that both the next stage and the backward take is whole on each device, and counted so."""

    def first(x, labels):
        return jnp.tanh(jnp.tanh(x @ engine.get_variable("w", (12, 16), x.dtype))), labels

    parallel = engine.TensorParallel(2, {"w": P(None, "model")})
    pipeline = make_divided(stages=[first, last_stage], tensor_parallel=parallel, num_micro_batches=1)
    state, step = begun(pipeline, count=1)
    live_bytes = LiveBytes(pipeline.prepare())
    pipeline.step(state, step)
    whole, half = 4 * 4 * 16, 4 * 4 * 16 // 2
    planned = plan_memory(pipeline)[0]
    # Of each y = tanh(x) the stage keeps y and 1 - y; the y of the outer tanh is also its output.
    assert planned.num_residual_bytes == 3 * half + whole
    assert live_bytes.peaks[0] == planned.num_held_bytes


@pytest.mark.parametrize(
    ("partitions", "message"),
    [
        ({"nobody": P("model")}, "there is no variable 'nobody'; there are first/in, "),
        ({"first/in": "model"}, "variable first/in: its partition must be a .*PartitionSpec"),
        ({"first/in": P("data")}, "variable first/in: .* names 'data'. The one axis .* is 'model'"),
        (
            {"first/in": P(None, None, unreduced={"model"})},
            "variable first/in: .* has axes that are summed",
        ),
        ({"first/in": P("model", "model")}, "variable first/in: .* divides axes 0 and 1"),
        ({"first/offset": P(None, "model")}, r"has 2 places, and the shape \(16,\) 1\."),
        ({"seen": P("model")}, r"variable seen: axis 0 of its shape \(12,\) must be a multiple of size 8"),
    ],
)
def test_wrong_partitions(partitions, message):
    pipeline = make_divided(tensor_parallel=engine.TensorParallel(8, partitions))
    with pytest.raises(ValueError, match=message):
        pipeline.trace(make_steps(1)[0][0])


def test_constraints_in_an_optimizer_say_nothing():
    def constrain(update):
        return engine.constrain(update, P("model" if update.shape[0] % 2 == 0 else None))

    constraints = optax.stateless(lambda updates, _params: jax.tree.map(constrain, updates))
    pipeline = make_divided(
        stages=[only_stage],
        tensor_parallel=engine.TensorParallel(2, ONLY),
        num_micro_batches=1,
        optimizer=optax.chain(constraints, optax.sgd(0.1)),
    )
    beside.train(pipeline, [make_steps(1)[0][:1]])


def last_stage(x, labels):
    return models.cross_entropy(models.dense("last", 10, x), labels)


@pytest.mark.thorough
def test_a_state_of_another_layout():
    """Also divided along another axis, or where the new layout leaves it whole."""
    steps = make_steps(1)
    first = make_divided(
        tensor_parallel=engine.TensorParallel(2, {"first/in": P("model"), "seen": P("model")})
    )
    layouts = [
        make_divided(size=4, tensor_parallel=engine.TensorParallel(4, {"first/in": P(None, "model")})),
        make_divided(size=1, device_mapping=[0, 0]),
    ]
    state = first.init(jax.random.key(3), steps[0][0])
    state, _outputs = first.step(state, steps[0])
    for pipeline, step in zip(layouts, steps, strict=True):
        pipeline.trace(step[0])
        expected, _wanted = beside.step_plainly(pipeline, beside.copied(state), step)
        state, _outputs = pipeline.step(state, step)
        models.assert_trees_close(state.variables, expected.variables)


def test_dividing_nothing_warns():
    element = make_steps(1)[0][0]
    stages = models.mlp_stages(2)
    pipeline = make_divided(stages=stages, tensor_parallel=engine.TensorParallel(2))
    with pytest.warns(UserWarning, match="each stage has 2 devices, but nothing is divided over them"):
        pipeline.trace(element)
    with warnings.catch_warnings(action="error"):
        make_divided(size=1, stages=stages).trace(element)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: engine.TensorParallel(0), "size must be an integer of at least 1; got 0"),
        (lambda: engine.TensorParallel(2, "in"), "variables must be a dict from full names"),
        (
            lambda: make_divided(tensor_parallel=2),
            "tensor_parallel must be a TensorParallel or None; got 2",
        ),
        (
            lambda: make_divided(num_serialized=2, schedule="sequential", device_mapping=[0, 0]),
            r"num_serialized must be 1 with several devices for each stage; got 2 and tensor_.*size 2",
        ),
    ],
)
def test_what_is_not_usable(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_constraints_that_do_not_fit():
    def pipeline(partition):
        def first(x, labels):
            return last_stage(engine.constrain(x, partition)[:, :12], labels)

        return make([first], 1, tensor_parallel=engine.TensorParallel(8, {"last/kernel": P()}))

    for partition, message in ((P("model"), "must be a multiple of the 8 devices"), (P("x"), "'model'")):
        with pytest.raises(ValueError, match=f"constrain: .*{message}"):
            pipeline(partition).trace(make_steps(1)[0][0])
    x = np.ones((3, 4), "float32")
    assert engine.constrain(x, P("model")) is not None  # outside of a pipeline it says nothing


def test_too_few_devices_and_other_replicas_in_stages():
    with pytest.raises(
        ValueError, match="needs 16 devices, 2 per number in device_mapping of 4 replicas, but"
    ):
        begun(make_divided(4))

    def first(x, labels):
        return engine.cross_replica_sum(block("first", x)), labels

    stages = [first, make_stages()[1]]
    with pytest.raises(ValueError, match=r"computes with other replicas .* tensor_parallel"):
        begun(make_divided(2, stages=stages))
    begun(make_divided(1, stages=stages))


# The front.


def train(num_replicas, size, directory=None, restores=False):
    """What a program that sets nothing but `tensor_parallel` trains in two runs; `size`: devices of an IPU.

    The state after the first run is saved in the directory, or restored from there in place of that run.
    Returns the losses, the variables, the optimizer's state, and what the program says of itself.
    """
    front.ipu_config(2 * num_replicas * size).configure_ipu_system()
    elements = models.mlp_batches(np.random.default_rng(2), 2 * COUNT * num_replicas)
    infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(elements)
    outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()

    def optimizer_function(loss):
        optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.01))
        if num_replicas > 1:
            optimizer = ipu.optimizers.CrossReplicaOptimizer(optimizer)
        return ipu.pipelining_ops.OptimizerFunctionOutput(optimizer, loss)

    compiled = front.compile_pipeline(
        make_stages(),
        COUNT,
        infeed_queue=infeed,
        outfeed_queue=outfeed,
        optimizer_function=optimizer_function,
        reduction_method="mean",
        tensor_parallel=ipu.pipelining_ops.TensorParallel(size, divide),
    )
    with front.session_of(infeed, seed=3) as session:
        if restores:
            session.restore(directory)
        else:
            session.run(compiled)
            if directory is not None:
                session.save(directory)
        session.run(compiled)
        text = (str(compiled.placement()), str(compiled.summary()))
        return session.run(outfeed.dequeue()), session.variables, session.optimizer_state(), text


@pytest.mark.thorough
@pytest.mark.parametrize("num_processes", [1, 2])
def test_sessions_and_checkpoints(num_processes, tmp_path):
    """One process without divided stages goes on from what one, or two, saved after the first run."""
    expected = train(2, 1)
    ipu.config.reset_ipu_configuration()
    saved, num_devices = str(tmp_path / "saved"), 8 // num_processes
    processes = joined.start(
        train, num_processes, num_devices, 2, 2, saved, directory=tmp_path, joins_itself=True
    )
    made = joined.finish(processes, tmp_path, timeout=600)
    assert sorted(len(one[0]) for one in made) == [0] * (num_processes - 1) + [len(expected[0])]
    losses, *values, _text = train(2, 1, saved, restores=True)
    models.assert_trees_close(losses, expected[0][len(losses) :])
    models.assert_trees_close(values, list(expected[1:3]))
    for losses, *values, (placement, summary) in made:
        models.assert_trees_close(values, list(expected[1:3]))
        if len(losses):
            models.assert_trees_close(losses, expected[0])
        if num_processes == 1:
            assert "cpu:0, cpu:1, cpu:4, cpu:5" in placement
            assert "2 stages on 2 groups of 2 IPUs" in summary
            assert (
                "each of the 2 devices of an IPU has a part of:\n  first/in\n  first/offset\n" in placement
            )


def test_arguments_of_the_front(tmp_path):
    infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(models.mlp_batches(np.random.default_rng(0), 4))
    outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
    queues = {"infeed_queue": infeed, "outfeed_queue": outfeed}
    with pytest.raises(TypeError, match="tensor_parallel must be a TensorParallel, or None; got 2"):
        front.compile_pipeline(make_stages(), 4, tensor_parallel=2, **queues)
    parallel = ipu.pipelining_ops.TensorParallel(2, divide)
    compiled = front.compile_pipeline(make_stages(), 4, tensor_parallel=parallel, **queues)
    with front.session_of(infeed) as session:
        session.run(compiled)
        assert session.run(outfeed.dequeue()).shape == (4,)
        told = r"one device for each stage, and this pipeline has 2"
        with pytest.raises(NotImplementedError, match=told):
            session.export(tmp_path / "exported", compiled)


def model_fn(mode, params):
    stages = make_stages()

    def last(x, labels):
        x = block("second", x)
        logits = models.dense("last", 10, x)
        return logits if mode == ipu.ModeKeys.PREDICT else models.cross_entropy(logits, labels)

    def optimizer_function(loss):
        opt = ipu.optimizers.CrossReplicaOptimizer(optax.adam(0.01))
        return ipu.pipelining_ops.OptimizerFunctionOutput(opt, loss)

    return IPUPipelineEstimatorSpec(
        mode,
        [stages[0], last],
        gradient_accumulation_count=COUNT,
        optimizer_function=optimizer_function,
        eval_metrics_fn=lambda loss: {"loss": loss},
        tensor_parallel=ipu.pipelining_ops.TensorParallel(params["size"], divide),
    )


@pytest.mark.thorough
def test_an_estimator(tmp_path):
    elements = models.mlp_batches(np.random.default_rng(4), 4 * COUNT)
    found = []
    for size in (1, 2):
        options = ipu.config.IPUConfig()
        options.auto_select_ipus = 2 * 2 * size
        run_config = IPURunConfig(
            iterations_per_loop=COUNT, num_shards=2 * size, num_replicas=2, ipu_options=options
        )
        config = RunConfig(ipu_run_config=run_config, tf_random_seed=7)
        estimator = IPUPipelineEstimator(model_fn, tmp_path / str(size), config, {"size": size})
        estimator.train(lambda: elements, steps=2 * COUNT)
        loss = estimator.evaluate(lambda: elements)["loss"]
        predicted = np.stack(list(estimator.predict(lambda: elements)))
        found.append((variables_of(estimator), loss, predicted))
    models.assert_trees_close(found[1], found[0])


def test_an_execution_report(tmp_path):
    """An IPU is shown by the first of its devices."""

    def first(x, labels):
        return jnp.tanh(x @ engine.get_variable("in", (12, SIZE))), labels

    def last(x, labels):
        return models.cross_entropy(x @ engine.get_variable("out", (SIZE, 10)), labels)

    pipeline = make_divided(stages=[first, last], optimizer=optax.sgd(0.1))
    state, step = begun(pipeline)
    with ipu.reports.capture(tmp_path) as captured:
        pipeline.step(state, step)
    kinds = [EventKind.FORWARD, EventKind.BACKWARD]
    computed = Counter((one.kind, one.ipu) for one in captured.profile.events if one.kind in kinds)
    assert computed == dict.fromkeys(itertools.product(kinds, [0, 1]), COUNT)


# Several processes.


def change_layouts(num_devices, *layouts):
    """Trains with one number of replicas and devices after another, on the state of the one before."""
    jax.config.update("jax_num_cpu_devices", num_devices)
    ipu.distributed.initialize()
    rng = np.random.default_rng(7)
    state = None
    for num_replicas, size in layouts:
        step = models.mlp_batches(rng, COUNT * num_replicas)
        pipeline = make_divided(num_replicas, size)
        if state is None:
            state = pipeline.init(jax.random.key(3), step[0])
        else:
            pipeline.trace(step[0])
        state, _outputs = pipeline.step(state, step)
    values = read_gathered(list(state.variables.values()))
    return {name: np.asarray(value) for name, value in zip(state.variables, values, strict=True)}


@pytest.mark.thorough
def test_layouts_change_in_two_processes(tmp_path):
    layouts, found = [(1, 4), (2, 2), (4, 1), (1, 4)], []
    for number in (1, 2):
        place = tmp_path / str(number)
        place.mkdir()
        sizes = number, 8 // number, 8 // number
        started = joined.start(change_layouts, *sizes, *layouts, directory=place, joins_itself=True)
        found.append(joined.finish(started, place, timeout=600))
    ((expected,), made) = found
    for variables in made:
        models.assert_trees_close(variables, expected)


def refuse():
    """A process whose devices are fewer than compute a stage together."""
    try:
        train(1, 4)
    except ValueError as error:
        return str(error)
    return "nothing raised"


@pytest.mark.thorough
def test_devices_of_one_ipu_in_two_processes(tmp_path):
    processes = joined.start(refuse, 4, 2, directory=tmp_path, joins_itself=True)
    for message in joined.finish(processes, tmp_path, timeout=600):
        assert "the 4 devices with number 0 must be in one process; they are in 0, 1. Give each" in message

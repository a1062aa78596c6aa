"""Replicas through the front: optimizers, devices, outfeeds, sessions and checkpoints."""

import contextlib
import re
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ipu_pipeline as ipu
from ipu_pipeline import optimizers
from ipu_pipeline.pipelining_ops import OptimizerFunctionOutput
from ipu_pipeline.tf1.program import program
from tests.support import front, models

pytestmark = pytest.mark.usefixtures("nothing_warned")


COUNT, UPDATES = 3, 2
Queue = ipu.ipu_outfeed_queue.IPUOutfeedQueue


def select(number, **settings):
    front.ipu_config(number, **settings).configure_ipu_system()


def average(opt):
    return optimizers.CrossReplicaOptimizer(opt)


def elements_of(number):
    rng = np.random.default_rng(0)
    return [tuple(rng.normal(size=(2, 4)).astype("float32") for _part in "xy") for _number in range(number)]


def layer(index, x):
    return jnp.tanh(x * ipu.get_variable(f"w{index}", (4,)))


def stages_of(number):
    """Four layers with a variable each, and the loss, in 1, 2 or 4 stages."""

    def make(first):
        def stage(x, y):
            for index in range(first, first + 4 // number):
                x = layer(index, x)
            return jnp.mean((x - y) ** 2) if index == 3 else (x, y)

        return stage

    return [make(first) for first in range(0, 4, 4 // number)]


def plain_loss(variables, x, y):
    for index in range(4):
        x = jnp.tanh(x * variables[f"w{index}"])
    return jnp.mean((x - y) ** 2)


class Model(front.Pipelined):
    """The four layers in stages, with queues."""

    def __init__(self, elements, num_stages=4, opt=None, stages=None, trains=True, **options):
        if trains:
            opt, options = opt or average(optax.adam(0.01)), {"outfeed_loss": True, **options}
        super().__init__(stages or stages_of(num_stages), COUNT, elements, opt, **options)

    def run(self, session, times=1):
        for _time in range(times):
            session.run(self.program)
        return session.run(self.outfeed.dequeue())


@contextlib.contextmanager
def started(model, number=None, seed=3, **settings):
    """A session in which a model's infeed is initialized, and its variables before anything ran.

    With so many IPUs, unless they are selected already.
    """
    if number is not None:
        select(number, **settings)
    with front.session_of(model, seed=seed) as session:
        session.create_variables(model.program)
        yield session, session.variables


def loop(loss, variables, elements, num_replicas, optimizer, reduction="sum", count=COUNT):
    """Plain jax.grad over the elements k * R + r: losses [updates * count, replicas], and variables."""
    groups = list(zip(*[iter(elements)] * num_replicas, strict=True))
    losses, variables, _rest = models.plain_loop(
        loss, variables, groups, count, optimizer, reduction.upper()
    )
    return losses, jax.tree.map(np.asarray, variables)


# Numbers.


def test_other_numbers_and_options_equal_a_plain_loop():
    elements, sgd = elements_of(3 * COUNT * UPDATES), optax.sgd(0.1, momentum=0.9)
    options = {"reduction_method": "mean", "repeat_count": UPDATES, "device_mapping": [1, 0]}
    options |= {"offload_weights": True, "gradient_accumulation_dtype": np.float32}
    model = Model(elements, 2, average(sgd), **options)
    with started(model, 6) as (session, variables):
        losses = model.run(session)
        expected, wanted = loop(plain_loss, variables, elements, 3, sgd, "mean")
        assert losses.shape == (COUNT * UPDATES, 3)
        models.assert_trees_close(losses, expected)
        models.assert_trees_close(session.variables, wanted)
        assert session.update_count() == UPDATES
        empty = session.run(model.outfeed.dequeue())
        assert (empty.shape, empty.dtype) == ((0, 3), np.float32)


def test_losses_with_weights_are_divided_by_those_of_all_replicas():
    """Token-weighted losses: those of one large batch, of all micro-batches of all replicas."""
    rng = np.random.default_rng(1)
    elements = [(*element, (rng.random(2) < 0.6).astype("float32")) for element in elements_of(2 * COUNT)]

    def losses_of(x, y, mask):
        return jnp.sum(((x - y) ** 2).mean(axis=1) * mask), jnp.sum(mask)

    def optimizer_function(loss, weight):
        return OptimizerFunctionOutput(average(optax.sgd(0.5)), loss, loss_weight=weight)

    def whole(w0):
        x, y, mask = (np.concatenate(part) for part in zip(*elements, strict=True))
        loss, weight = losses_of(jnp.tanh(x * w0), y, mask)
        return loss / weight

    stages = [lambda x, y, mask: losses_of(layer(0, x), y, mask)]
    model = Model(elements, stages=stages, optimizer_function=optimizer_function)
    with started(model, 2) as (session, variables):
        model.run(session)
        wanted = variables["w0"] - 0.5 * jax.grad(whole)(variables["w0"])
        models.assert_trees_close(session.variables["w0"], np.asarray(wanted))


# Optimizers.


def mapped(opt):
    return optimizers.MapGradientOptimizer(opt, lambda gradient, variable: gradient * 0.5 + variable)


def scaled(opt):
    return optimizers.LossScalingOptimizer(opt, initial_scale=2.0**10)


def watched(opt, queue, mode=optimizers.OutfeedOptimizerMode.AFTER_COMPUTE):
    return optimizers.OutfeedOptimizer(opt, queue, mode, ["w3"])


NESTS = {
    "outside": lambda opt, queue: average(mapped(scaled(watched(opt, queue)))),
    "inside": lambda opt, queue: watched(scaled(mapped(average(opt))), queue),
    "between": lambda opt, queue: mapped(average(watched(scaled(opt), queue))),
}


@pytest.mark.thorough
@pytest.mark.parametrize("nest", NESTS)
def test_optimizers_in_any_order(nest):
    elements, queue = elements_of(2 * COUNT), Queue()
    model = Model(elements, 2, NESTS[nest](optax.sgd(0.1), queue))
    with started(model, 4) as (session, variables):
        model.run(session)
        gradients = session.run(queue.dequeue())["w3"]
        each = [jax.grad(plain_loss)(variables, *element) for element in elements]
        wanted = {
            name: value - 0.1 * sum(0.5 * one[name] + value for one in each) / 2
            for name, value in variables.items()
        }
        models.assert_trees_close(session.variables, jax.tree.map(np.asarray, wanted))
        halved = [0.5 * one["w3"] + variables["w3"] for one in each]
        models.assert_trees_close(gradients, np.stack(halved).reshape(COUNT, 2, -1))


def test_gradients_that_the_optimizer_gets_are_means_over_replicas():
    elements, queue = elements_of(2 * COUNT), Queue()
    opt = average(watched(optax.sgd(0.1), queue, optimizers.OutfeedOptimizerMode.BEFORE_APPLY))
    model = Model(elements, 2, opt)
    with started(model, 4) as (session, variables):
        assert session.run(queue.dequeue())["w3"].shape == (0, 4)
        model.run(session)
        (gradient,) = session.run(queue.dequeue())["w3"]  # the same in all replicas
        each = [jax.grad(plain_loss)(variables, *element)["w3"] for element in elements]
        models.assert_trees_close(gradient, np.asarray(sum(each) / 2))


def test_wrong_optimizers():
    with pytest.raises(ValueError, match="average gradients over replicas only once; two are nested"):
        Model(elements_of(1), 1, average(average(optax.sgd(0.1))))
    with pytest.raises(TypeError, match="CrossReplicaOptimizer: the optimizer to wrap must be an optax"):
        average(0.1)
    accumulating = optimizers.CrossReplicaGradientAccumulationOptimizerV2(optax.sgd(0.1), 2)
    with pytest.raises(ValueError, match="pipeline accumulates by itself. .* in a CrossReplicaOptimizer"):
        Model(elements_of(1), 1, accumulating)
    with pytest.raises(ValueError, match="num_mini_batches must be from 1"):
        optimizers.CrossReplicaGradientAccumulationOptimizerV2(optax.sgd(0.1), 0)


# How many replicas there are.


def test_an_optimizer_alone_makes_no_replicas():
    """Devices that nobody configured are as many as programs need, another one's too."""
    larger = Model(elements_of(COUNT), 4, optax.sgd(0.1), name="other")
    model = Model(elements_of(2 * COUNT), 2, average(optax.sgd(0.1)))
    with started(model) as (session, _variables):
        assert model.run(session).shape == (COUNT,)
        assert len(ipu.config.selected_devices(0)) == 4
    del larger


THREE = [lambda x, y: (layer(0, x), y), lambda x, y: (layer(1, x), y), lambda x, y: jnp.mean(x - y)]
ROUNDED = {"require_power_of_two": True, "auto_round_num_ipus": True}


@pytest.mark.parametrize(
    ("stages", "opt", "num_ipus", "settings"),
    [(stages_of(2), optax.sgd(0.1), 8, {}), (THREE, None, 3, ROUNDED)],
    ids=["no optimizer averages", "three were asked for, four are there"],
)
def test_more_ipus_alone_make_no_replicas(stages, opt, num_ipus, settings):
    model = Model(elements_of(COUNT), stages=stages, opt=opt)
    with started(model, num_ipus, **settings) as (session, _variables):
        assert model.run(session).shape == (COUNT,)


def test_ipus_that_are_no_multiple():
    model = Model(elements_of(COUNT), 4)
    text = (
        "IPUConfig selects 5 IPUs for /device:IPU:0, but the pipeline or loop has 4 IPUs and a "
        "cross-replica optimizer: the number must be a multiple of 4, .*auto_select_ipus to 4 or 8"
    )
    with started(model, 5) as (session, _variables), pytest.raises(ValueError, match=text):
        session.run(model.program)


def test_not_with_batch_serialization():
    opt = average(optax.sgd(0.1))
    model = Model(elements_of(8), 2, opt, batch_serialization_iterations=2)
    with started(model, 2) as (session, _variables), pytest.raises(ValueError, match="replicas"):
        session.run(model.program)


def test_another_number_of_replicas_in_the_same_session():
    elements, sgd = elements_of(5 * COUNT), optax.sgd(0.1)
    model = Model(elements, 1, average(sgd))
    with started(model, 2) as (session, variables):
        session.run(model.program)
        select(1)
        with pytest.raises(ValueError, match=r"elements of 2 replica\(s\) .* has 1. Dequeue them first"):
            session.run(model.program)
        losses = session.run(model.outfeed.dequeue())
        first, wanted = loop(plain_loss, variables, elements[: 2 * COUNT], 2, sgd)
        models.assert_trees_close(losses, first)
        losses = model.run(session)
        second, wanted = loop(plain_loss, wanted, elements[2 * COUNT : 3 * COUNT], 1, sgd)
        models.assert_trees_close(losses, second[:, 0])
        select(2)
        third, wanted = loop(plain_loss, wanted, elements[3 * COUNT :], 2, sgd)
        models.assert_trees_close(model.run(session), third)
        models.assert_trees_close(session.variables, wanted)


def test_inference_beside_training():
    """It has no cross-replica optimizer, and so one replica, with the weights of all, or their averages."""
    elements = elements_of(2 * COUNT)
    opt = average(optimizers.with_averaged_weights(optax.sgd(0.1), 0.5))
    model = Model(elements, 1, opt)
    inference = Model(elements, 1, trains=False, name="inference")
    with started(model, 2) as (session, variables):
        session.run(inference.initializer)
        model.run(session)
        losses = inference.run(session)
        assert losses.shape == (COUNT,)
        expected = [plain_loss(session.variables, *element) for element in elements[:COUNT]]
        models.assert_trees_close(losses, np.array(expected))
        averages = {name: 0.5 * variables[name] + 0.5 * value for name, value in session.variables.items()}
        with session.weights_of("average"):
            losses = inference.run(session)
        expected = [plain_loss(averages, *element) for element in elements[COUNT:]]
        models.assert_trees_close(losses, np.array(expected))


def test_what_replicas_share_out():
    arguments = ("replicated_optimizer_state_sharding", "replicated_weight_sharding")
    elements = elements_of(2 * COUNT)
    model = Model(elements, 1, **dict.fromkeys(arguments, True))
    with started(model, 2) as (session, variables):
        model.run(session)
        _losses, wanted = loop(plain_loss, variables, elements, 2, optax.adam(0.01))
        models.assert_trees_close(session.variables, wanted)
        arrays = jax.tree.leaves(session.take_snapshot(is_kept=False).arrays())
        sizes = [array.addressable_shards[0].data.nbytes for array in arrays]
        assert sum(sizes) < 0.6 * sum(array.nbytes for array in arrays)


def test_one_replica_shares_nothing_out():
    model = Model(elements_of(2 * COUNT), 1, replicated_weight_sharding=True)
    with (
        started(model, 1) as (session, _variables),
        pytest.warns(UserWarning, match="replicated_weight_sharding of .* has no effect"),
    ):
        model.run(session)


# Checkpoints.


@pytest.mark.thorough
def test_training_goes_on_with_another_number_of_replicas(tmp_path):
    """The optimizer's state, too."""
    elements = elements_of(3 * COUNT)
    select(4)
    model = Model(elements, 2)
    with started(model) as (session, variables):
        model.run(session)
        session.save(tmp_path / "checkpoint")
    select(2)
    model = Model(elements, 2)
    with ipu.Session() as session:
        session.restore(tmp_path / "checkpoint")
        session.run(model.initializer)
        model.run(session)
        found = session.variables
    optimizer = optax.adam(0.01)
    wanted, state = variables, optimizer.init(variables)
    for own, number in ((elements[: 2 * COUNT], 2), (elements[2 * COUNT :], 1)):
        each = [jax.grad(plain_loss)(wanted, *element) for element in own]
        mean = jax.tree.map(lambda *leaves, n=number: sum(leaves) / n, *each)
        with jax.numpy_dtype_promotion("standard"):
            changes, state = optimizer.update(mean, state, wanted)
            wanted = optax.apply_updates(wanted, changes)
    models.assert_trees_close(found, jax.tree.map(np.asarray, wanted))


# What the last stage returns, sums and metrics.


def test_outputs_and_sums_have_an_axis_for_replicas():
    elements = elements_of(2 * COUNT)

    def stage(x, labels):
        loss = stages_of(1)[0](x, labels)
        ipu.metric("largest", jnp.max(x), "max")
        ipu.metric("mean", jnp.mean(x))
        return loss, {"x": x, "labels": labels}

    options = {"stages": [stage], "opt": average(optax.sgd(0.1)), "outfeed_loss": False}
    model = Model(elements, **options)
    sums = Model(elements, **options, outfeed_mask=[True, False], accumulate_outfeed=True, name="sums")
    with started(model, 2) as (session, _variables):
        session.run(sums.initializer)
        _loss, values = model.run(session)
        xs, labels = (np.stack(part) for part in zip(*elements, strict=True))
        np.testing.assert_array_equal(values["x"], xs.reshape(COUNT, 2, 2, 4))
        np.testing.assert_array_equal(values["labels"], labels.reshape(COUNT, 2, 2, 4))
        metrics = session.metrics()
        np.testing.assert_allclose(metrics["mean"], [xs.mean()], rtol=1e-5)
        np.testing.assert_array_equal(metrics["largest"], [xs.max()])
        (found,) = sums.run(session)
        models.assert_trees_close(found["x"], xs.reshape(1, COUNT, 2, 2, 4).sum(axis=1))


def test_a_queue_in_a_stage_and_mode_last():
    elements, queue = elements_of(2 * COUNT), Queue()
    last = Queue(ipu.ipu_outfeed_queue.IPUOutfeedMode.LAST)

    def first(x, labels):
        queue.enqueue(ipu.replication_ops.replication_index())
        return x, labels

    model = Model(elements, stages=[first, stages_of(1)[0]], outfeed_queue=last)
    with started(model, 4) as (session, variables):
        assert session.run(queue.dequeue()).shape == (0, 2)  # by the devices, before anything ran
        session.run(model.program)
        np.testing.assert_array_equal(session.run(queue.dequeue()), [[0, 1]] * COUNT)
        expected = [plain_loss(variables, *element) for element in elements[-2:]]
        models.assert_trees_close(session.run(last.dequeue()), np.array(expected))


def test_placement_shows_the_devices_of_all_replicas():
    model = Model(elements_of(1), 2)
    assert "not selected yet" in str(model.program.placement())
    select(4)
    first, *rest = str(model.program.placement()).splitlines()
    assert first == "Pipeline, in 2 replicas"
    names = list(map(str, jax.devices()))
    assert any(f"{names[0]}, {names[2]}" in line for line in rest)
    assert any(f"{names[1]}, {names[3]}" in line for line in rest)
    select(2)
    assert str(model.program.placement()).splitlines()[0] == "Pipeline"


@pytest.mark.thorough
def test_the_page_s_examples(capsys, tmp_path, monkeypatch):
    """docs/replicas.md: what its programs print, up to the last digit."""
    monkeypatch.chdir(tmp_path)  # a checkpoint goes there
    text = (Path(__file__).parents[2] / "docs" / "replicas.md").read_text()
    code, expected = (
        "".join(re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL)) for kind in ("python", "text")
    )
    exec(code, {})  # noqa: S102
    printed = capsys.readouterr().out
    numbers = r"\d\.\d+"
    assert re.sub(numbers, "#", printed) == re.sub(numbers, "#", expected)
    for actual, written in zip(re.findall(numbers, printed), re.findall(numbers, expected), strict=True):
        assert abs(float(actual) - float(written)) < 0.01


# Within stages.


def test_values_of_all_replicas_and_their_gradients():
    """The loss of each replica depends on what all of them have."""
    elements = [(np.float32(number),) for number in range(1, 2 * COUNT + 1)]
    queue = Queue()

    def stage(x):
        weight = ipu.get_variable("weight", (), initializer=2.0)
        mean = ipu.cross_replica_ops.cross_replica_mean(weight * x)
        total = ipu.cross_replica_ops.cross_replica_sum(weight * x)
        own = ipu.cross_replica_ops.cross_replica_sum(x, replica_group_size=1)
        queue.enqueue((mean, total, own))
        return (weight * x - mean) ** 2 + total

    def total_loss(weight, values):
        mean = (weight * values).mean(axis=1, keepdims=True)
        total = (weight * values).sum(axis=1, keepdims=True)
        return (weight * values - mean) ** 2 + total

    for number in (2, 1):
        queue = Queue()
        model = Model(elements, stages=[stage], opt=average(optax.sgd(1.0)))
        with started(model, number) as (session, _variables):
            losses = model.run(session).reshape(COUNT, number)
            found = [part.reshape(COUNT, number) for part in session.run(queue.dequeue())]
            values = np.array(elements, np.float32)[: number * COUNT, 0].reshape(COUNT, number)
            models.assert_trees_close(losses, np.asarray(total_loss(np.float32(2), values)))
            np.testing.assert_allclose(found[0], np.repeat(2 * values.mean(1, keepdims=True), number, 1))
            np.testing.assert_allclose(found[1], np.repeat(2 * values.sum(1, keepdims=True), number, 1))
            np.testing.assert_array_equal(found[2], values)
            gradient = jax.grad(lambda *given: jnp.sum(total_loss(*given)))(jnp.float32(2), values) / number
            np.testing.assert_allclose(session.variables["weight"], 2 - gradient, rtol=1e-5)


def select_with_groups(number, size):
    """Selects IPUs, with batch normalization over so many replicas."""
    config = front.ipu_config(number)
    config.norms.experimental.distributed_batch_norm_replica_group_size = size
    config.configure_ipu_system()


def test_synchronized_batch_normalization_is_that_of_one_large_batch():
    """Against one replica with micro-batches of twice the size; by the configuration."""
    elements = elements_of(2 * COUNT * UPDATES)
    large = [
        tuple(np.concatenate(pair) for pair in zip(*elements[start : start + 2], strict=True))
        for start in range(0, len(elements), 2)
    ]

    def stage(x, y):
        x = ipu.layers.BatchNormalization(momentum=0.8)(layer(0, x))
        return jnp.mean((layer(1, x) - y) ** 2)

    found = []
    for number, data in ((1, large), (2, elements)):
        select_with_groups(number, number)
        model = Model(data, stages=[stage], opt=average(optax.sgd(0.1)))
        with started(model) as (session, _variables):
            losses = model.run(session, UPDATES).reshape(COUNT * UPDATES, number).mean(axis=1)
            found.append((losses, session.variables))
    models.assert_trees_close(found[1], found[0])


def test_batch_normalization_of_each_replica():
    elements = elements_of(2 * COUNT)

    def stage(x, labels):
        x = ipu.layers.BatchNormalization(momentum=0.5)(x)
        return jnp.mean((layer(1, x) - labels) ** 2)

    model = Model(elements, stages=[stage])
    with started(model, 2) as (session, _variables):
        model.run(session)
        moving = np.zeros((2, 4), np.float32)  # of each replica
        for number, (x, _labels) in enumerate(elements):
            moving[number % 2] = moving[number % 2] * 0.5 + x.mean(axis=0) * 0.5
        found = session.variables["batch_normalization/moving_mean"]
        models.assert_trees_close(found, np.mean(moving, axis=0))


@pytest.mark.parametrize("size", [2, 3])
def test_wrong_groups_of_batch_normalization(size):
    if size == 2:
        model = Model(elements_of(8), 1)
        select_with_groups(2, size)
        text = "is 2, but was 1 when the pipeline 'Pipeline' was compiled"
    else:
        select_with_groups(2, size)
        model = Model(elements_of(8), 1)
        text = "must be 1, for statistics of each replica, or the number of replicas, .* has 2. It is 3"
    with started(model) as (session, _variables), pytest.raises(ValueError, match=text):
        session.run(model.program)


def test_wrong_values_and_places():
    mean, total = ipu.cross_replica_ops.cross_replica_mean, ipu.cross_replica_ops.cross_replica_sum
    for function, error, text in (
        (lambda x: mean(x.astype("int32")), TypeError, "x must be floating-point numbers; got int"),
        (lambda _x: total("x"), TypeError, "cross_replica_sum: x must be an array"),
        (lambda x: total(x > 0), TypeError, "x must be an array of numbers; got bool"),
        (lambda x: total(x, 2), NotImplementedError, "must be None, .* or 1; got 2"),
        (lambda x: total(x, 1.5), TypeError, "must be an integer, or None; got 1.5"),
    ):
        with pytest.raises(error, match=text):
            Model(elements_of(1), stages=[lambda x, labels, use=function: (use(x), jnp.mean(x))[1]])
    for function in (lambda: total(1.0), ipu.replication_ops.replication_index):
        with pytest.raises(RuntimeError):
            function()


# Random numbers.


def test_random_numbers_differ_between_replicas_or_are_identical(monkeypatch):
    monkeypatch.setattr(ipu.utils, "_seed", 0)
    monkeypatch.setattr(ipu.utils, "_has_identical_replicas", False)
    queue = Queue()

    def stage(x, labels):
        queue.enqueue(jax.random.uniform(ipu.next_rng_key()))
        return stages_of(1)[0](x, labels)

    model, found = Model(elements_of(5 * COUNT), stages=[stage]), []
    for number, is_identical in ((1, False), (2, True), (2, False)):
        select(number)
        with ipu.Session() as session:
            ipu.utils.reset_ipu_seed(7, experimental_identical_replicas=is_identical)
            session.run(model.initializer)
            model.run(session)
            found.append(session.run(queue.dequeue()).reshape(COUNT, number))
    np.testing.assert_array_equal(found[1], np.repeat(found[0], 2, axis=1))
    assert len(np.unique(found[2])) == 2 * COUNT
    with pytest.raises(TypeError, match="experimental_identical_replicas must be True or False; got 1"):
        ipu.utils.reset_ipu_seed(7, experimental_identical_replicas=1)


# popdist.


def test_popdist(monkeypatch):
    popdist = ipu.popdist
    monkeypatch.setattr(program, "_programs", weakref.WeakValueDictionary())  # programs of other tests
    assert not popdist.isPopdistEnvSet()
    assert (popdist.getNumInstances(), popdist.getInstanceIndex()) == (1, 0)
    plain = Model(elements_of(1), 2, optax.sgd(0.1), name="plain")
    with pytest.raises(RuntimeError, match="there is none. Compile the program first"):
        popdist.getNumTotalReplicas()
    model = Model(elements_of(1), 2)
    assert popdist.getNumIpusPerReplica() == 2
    assert popdist.checkNumIpusPerReplica(2)
    assert not popdist.checkNumIpusPerReplica(4)
    assert popdist.getNumTotalReplicas() == 1
    with pytest.raises(RuntimeError, match="once IPUs are selected"):
        popdist.getNumLocalReplicas()
    select(6)
    assert popdist.getNumTotalReplicas() == popdist.getNumLocalReplicas() == 3
    assert popdist.getReplicaIndexOffset() == 0
    other = Model(elements_of(1), 4)
    assert popdist.getNumIpusPerReplica() == 4  # that of the last one
    with pytest.raises(ValueError, match="IPUConfig selects 6 IPUs .* must be a multiple of 4"):
        popdist.getNumTotalReplicas()
    del plain, model, other

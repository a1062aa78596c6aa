"""Metrics of weight updates, and the number of the update: as a plain loop computes them."""

import functools
import os
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ipu_pipeline as ipu
from ipu_pipeline import engine
from ipu_pipeline.optimizers import LossScalingOptimizer, with_metrics
from ipu_pipeline.pipelining_ops import OptimizerFunctionOutput
from ipu_pipeline.tf1.session import store as session_metrics
from tests.support import front, models

COUNT, UPDATES = 4, 3
LAYERS = (5, 6, 4)


def rows(num=COUNT * UPDATES):
    rng = np.random.default_rng(0)

    def draw(width):
        return rng.normal(size=(2, width)).astype("float32")

    return [{"x": draw(3), "y": draw(4)} for _ in range(num)]


def first_weights():
    rng, sizes = np.random.default_rng(1), (3, *LAYERS)
    return {f"w{n}": rng.normal(size=sizes[n : n + 2]).astype("float32") for n in range(3)}


def layer(number, x):
    weight = first_weights()[f"w{number}"]
    variable = ipu.get_variable(f"w{number}", weight.shape, initializer=lambda *_: jnp.asarray(weight))
    return jnp.tanh(x @ variable)


def first(x, y):
    ipu.metric("mean", jnp.mean(x))
    ipu.metric("last", jnp.mean(x), "last")
    ipu.metric("sum", jnp.mean(x), "sum")
    ipu.metric("smallest", jnp.mean(x), reduction="min")
    ipu.metric("largest", jnp.mean(x), reduction="max")
    return layer(0, x), y


def second(x, y):
    @jax.jit
    def inner(x):
        with ipu.variable_scope("second"):
            ipu.metric("positive", jnp.mean((x > 0).astype(jnp.float32)))
        return x

    @jax.checkpoint
    def kept(x):
        x = layer(1, x)
        ipu.metric("norm", jnp.linalg.norm(x))
        return x

    return kept(inner(x)), y


def third(x, y):
    x = layer(2, x)
    ipu.metric("is_good", jnp.all(jnp.abs(x) < 2))
    return jnp.mean((x - y) ** 2)


def mean(x, y):
    return jnp.mean(layer(1, x))


def schedule(count):
    return 0.1 / (1 + count)


def optimizer_function(loss):
    ipu.metric("loss", loss)
    return OptimizerFunctionOutput(with_metrics(optax.adam(schedule), schedule), loss)


class Model:
    def __init__(
        self,
        mapping,
        stages=(first, second, third),
        optimizer=optimizer_function,
        repeat=UPDATES,
        data=None,
        **options,
    ):
        self.infeed = ipu.ipu_infeed_queue.IPUInfeedQueue((lambda: iter(rows())) if data is None else data)
        self.program = front.compile_pipeline(
            list(stages),
            COUNT,
            repeat_count=repeat,
            infeed_queue=self.infeed,
            outfeed_queue=ipu.ipu_outfeed_queue.IPUOutfeedQueue(),
            optimizer_function=optimizer,
            device_mapping=mapping,
            **options,
        )

    def run(self, session):
        session.run(self.infeed.initializer)
        session.run(self.program)
        return session


def metrics_of(*arguments, **options):
    with ipu.Session() as session:
        return Model(*arguments, **options).run(session).metrics()


@functools.cache
def expected(reduction="sum"):
    """The metrics of a plain loop, per weight update."""

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def differentiate(weights, row):
        x, seen = row["x"], {"mean": jnp.mean(row["x"])}
        x = jnp.tanh(x @ weights["w0"])
        seen["second/positive"] = jnp.mean((x > 0).astype(jnp.float32))
        x = jnp.tanh(x @ weights["w1"])
        seen["norm"] = jnp.linalg.norm(x)
        x = jnp.tanh(x @ weights["w2"])
        seen["is_good"] = jnp.all(jnp.abs(x) < 2).astype(jnp.float32)
        seen["loss"] = jnp.mean((x - row["y"]) ** 2)
        return seen["loss"], seen

    weights, optimizer = first_weights(), optax.adam(schedule)
    state, found = optimizer.init(weights), []
    for update in range(UPDATES):
        step = rows()[update * COUNT : (update + 1) * COUNT]
        gradients, seen = zip(*(differentiate(weights, row) for row in step), strict=True)
        total = jax.tree.map(lambda *leaves: sum(leaves), *gradients)
        if reduction == "mean":
            total = jax.tree.map(lambda leaf: leaf / COUNT, total)
        with jax.numpy_dtype_promotion("standard"):
            changes, state = optimizer.update(total, state, weights)
        means = {name: np.mean([float(values[name]) for values in seen]) for name in seen[0]}
        inputs = np.array([float(values["mean"]) for values in seen])
        means |= {
            "last": inputs[-1],
            "sum": inputs.sum(),
            "smallest": inputs.min(),
            "largest": inputs.max(),
        }
        means["gradient_norm"] = float(optax.tree_utils.tree_norm(total))
        means["update_norm"] = float(optax.tree_utils.tree_norm(changes))
        means["learning_rate"] = schedule(update)
        found.append(means)
        weights = optax.apply_updates(weights, changes)
    return {name: np.array([means[name] for means in found]) for name in found[0]}


def check(found, reduction="sum"):
    wanted = expected(reduction)
    assert found.keys() == {"update", *wanted}
    np.testing.assert_array_equal(found["update"], np.arange(1, UPDATES + 1))
    for name, values in wanted.items():
        assert found[name].dtype == np.float32
        np.testing.assert_allclose(found[name], values, rtol=1e-5, err_msg=name)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("mapping", "options"),
    [
        ([0, 1, 2], {"dispatch_plan": ipu.pipelining_ops.Chunking(2), "reduction_method": "mean"}),
        ([0, 1, 0], {"accumulate_outfeed": True, "offload_weight_update_variables": True}),
    ],
    ids=["chunks", "sums"],
)
def test_metrics_are_those_of_a_plain_loop(mapping, options):
    found = metrics_of(mapping, outfeed_loss=True, **options)
    check(found, options.get("reduction_method", "sum"))


def test_the_engine_returns_those_of_a_step():
    pipeline = engine.Pipeline(
        [first, second, third],
        num_micro_batches=COUNT,
        loss=lambda loss: (engine.metric("loss", loss), loss)[1],
        optimizer=engine.with_metrics(optax.adam(schedule), schedule),
        block_bytes=1,  # an update that does not fit is run in parts
        device_mapping=[0, 0, 0],
    )
    state, found = pipeline.init(jax.random.key(0), rows()[0]), []
    for update in range(UPDATES):
        state, outputs = pipeline.step(state, rows()[update * COUNT :][:COUNT])
        found.append(outputs.metrics)
    together = {name: np.array([values[name] for values in found]) for name in found[0]}
    check({"update": np.arange(1, UPDATES + 1), **together}, "mean")


def test_recomputation_does_not_report_again():
    pipeline = engine.Pipeline(
        [first, second, third],
        num_micro_batches=COUNT,
        optimizer=optax.sgd(0.1),
        recompute="recompute_then_backpropagate",
    )
    _state, outputs = pipeline.step(pipeline.init(jax.random.key(0), rows()[0]), rows()[:COUNT])
    wanted = expected("mean")
    optimizer_s = {"loss", "gradient_norm", "update_norm", "learning_rate"}
    assert outputs.metrics.keys() == wanted.keys() - optimizer_s
    for name, value in outputs.metrics.items():
        np.testing.assert_allclose(value, wanted[name][0], rtol=1e-5)


@pytest.mark.thorough
def test_programs_of_one_name_may_report_different_metrics():
    def silent(loss):
        return OptimizerFunctionOutput(optax.adam(schedule), loss)

    with ipu.Session() as session:
        for optimizer in (optimizer_function, silent):
            Model([0, 1], stages=(first, mean), repeat=1, optimizer=optimizer).run(session)
        found = session.metrics()
    assert list(found["update"]) == [1, 2]
    assert list(np.isnan(found["loss"])) == [False, True]
    assert not np.isnan(found["mean"]).any()


def test_an_exported_program_has_the_count_and_no_metrics(tmp_path):
    step = ipu.get_global_step()

    def scaled(x, y):
        ipu.metric("mean", jnp.mean(x))
        return layer(0, x) * (1 + step).astype(jnp.float32)

    with ipu.Session() as session:
        Model([0, 0], (first, mean), repeat=1).run(session)
        session.export(tmp_path / "exported", Model([0], [scaled], optimizer=None).program)
        weight = session.variables["w0"]
    found = ipu.load_program(tmp_path / "exported").run(rows(2))
    wanted = [np.tanh(row["x"] @ weight) * 2 for row in rows(2)]
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.mark.parametrize("mapping", [[0], pytest.param([0, 1], marks=pytest.mark.thorough)])
def test_a_model_computes_with_the_global_step(mapping):
    """The learning rate, and what a stage does, depend on the number of the update."""
    step = ipu.get_global_step()  # as a model_fn has it, before the pipeline

    def scaled(x, y):
        return layer(0, x) * (1 + step).astype(jnp.float32), y

    def optimize(loss):
        rate = 0.1 * 0.5 ** step.astype(jnp.float32)
        return OptimizerFunctionOutput(with_metrics(optax.sgd(rate), rate), loss)

    def loss_of(weights, row, number):
        x = jnp.tanh(row["x"] @ weights["w0"]) * (1 + number)
        return jnp.mean(jnp.tanh(x @ weights["w1"]))

    groups = [[(row, np.float32(index // COUNT))] for index, row in enumerate(rows())]
    weights, rates = {name: first_weights()[name] for name in ("w0", "w1")}, np.float32([0.1, 0.05, 0.025])
    by_rates = optax.sgd(lambda count: jnp.asarray(rates)[count])
    _losses, weights, _left = models.plain_loop(loss_of, weights, groups, COUNT, by_rates)
    stages = [scaled, mean] if len(mapping) > 1 else [lambda x, y: mean(*scaled(x, y))]
    with ipu.Session() as session:
        Model(mapping, stages, optimize).run(session)
        models.assert_trees_close(session.variables, weights)
        np.testing.assert_allclose(session.metrics()["learning_rate"], rates, rtol=1e-6)


def test_the_number_of_updates_goes_on_after_a_restore(tmp_path):
    """That of a pipeline that infers is that of its weights."""
    step = ipu.get_global_step()

    def counted(x, y):
        ipu.metric("step", step)
        return layer(0, x), y

    with ipu.Session() as session:
        Model([0, 1], stages=(first, mean)).run(session)
        session.save(tmp_path / "saved")
        assert list(session.metrics()["update"]) == [1, 2, 3]
    with ipu.Session() as session:
        model = Model([0, 0], stages=(first, mean), repeat=2, data=lambda: iter(rows(6 * COUNT)))
        session.restore(tmp_path / "saved")
        after = model.run(session).metrics()
        Model([0], stages=[counted], optimizer=None).run(session)
        assert list(session.metrics(training=False)["step"]) == [5] * UPDATES
    assert list(after["update"]) == [4, 5]
    np.testing.assert_allclose(after["learning_rate"], [schedule(3), schedule(4)], rtol=1e-6)


def test_the_global_step_is_an_array_to_whatever_takes_arrays():
    step = ipu.get_global_step()

    def stage(x, y):
        for name, value in {
            "eq": (step == 1).astype(jnp.float32),
            "ne": (step != 1).astype(jnp.float32),
            "minimum": jnp.minimum(step, 1),
            "where": jnp.where(step == 0, 0, step),
            "index": jnp.arange(3)[jnp.asarray(step)],
            "jit": jax.jit(lambda v: 2 * v)(step),
            "cond": jax.lax.cond(step > 0, lambda v: v + 10, lambda v: v, step),
            "schedule": optax.linear_schedule(1.0, 0.0, 4)(step),
        }.items():
            ipu.metric(name, value)
        with pytest.raises(jax.errors.TracerBoolConversionError):
            assert step in (0, 1)
        return layer(0, x), y

    found = metrics_of([0, 0], (stage, mean))
    wanted = {
        "eq": [0, 1, 0],
        "ne": [1, 0, 1],
        "minimum": [0, 1, 1],
        "where": [0, 1, 2],
        "index": [0, 1, 2],
    }
    wanted |= {"jit": [0, 2, 4], "cond": [0, 11, 12]}
    assert {name: found[name].tolist() for name in wanted} == wanted
    np.testing.assert_allclose(found["schedule"], [1, 0.75, 0.5])
    assert step in {step}


def test_the_global_step_has_no_one_value_in_the_compiled_function():
    step = ipu.get_global_step()
    with pytest.raises(RuntimeError, match="the compiled function, which has no such number"):
        front.compile_program(lambda: step + 1)
    with pytest.raises(RuntimeError, match="outside of a program"):
        jnp.asarray(step)
    assert repr(step) == "the global step"


def test_norms_are_without_the_scale_of_the_loss():
    """The third update overflows: its rate is the optimizer's, whose schedule stays where it is."""
    seen = rows()
    seen[2 * COUNT]["x"][:] = np.inf

    def optimize(loss):
        inner = with_metrics(optax.adam(schedule), schedule)
        return OptimizerFunctionOutput(LossScalingOptimizer(inner, initial_scale=2.0**10), loss)

    found = metrics_of([0, 0, 0], optimizer=optimize, data=seen + rows(COUNT), repeat=4)
    wanted = expected()
    for name in ("gradient_norm", "update_norm", "learning_rate"):
        np.testing.assert_allclose(found[name][:2], wanted[name][:2], rtol=1e-5)
    np.testing.assert_allclose(found["learning_rate"][2:], [schedule(2), schedule(2)], rtol=1e-6)
    assert not np.isfinite(found["update_norm"][2])


def test_what_cannot_be_summed_is_infinite():
    """And nobody warns: warnings are errors here."""
    found = metrics_of([0, 1], (report("much", 3e38, "sum"), mean))
    assert list(found["much"]) == [np.inf] * UPDATES


def test_metrics_are_read_by_a_signal_s_handler():
    read = []

    def data():
        yield from rows()[: 2 * COUNT]
        os.kill(os.getpid(), signal.SIGUSR1)
        yield from rows()[2 * COUNT :]

    with ipu.Session() as session:
        known = signal.signal(signal.SIGUSR1, lambda *_: read.extend(session.metrics()["update"]))
        try:
            Model([0, 1], stages=(first, mean), data=data).run(session)
        finally:
            signal.signal(signal.SIGUSR1, known)
        read.extend(session.metrics()["update"])
    assert read == [1, 2, 3]


def test_metrics_are_those_of_a_plain_loop_and_an_interrupt_loses_nothing(monkeypatch):
    def interrupted(_entries):
        raise KeyboardInterrupt

    with ipu.Session() as session:
        Model([0, 1, 2]).run(session)
        monkeypatch.setattr(session_metrics, "_join", interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.metrics()
        monkeypatch.undo()
        check(session.metrics())
        assert len(session.metrics()["update"]) == 0  # read once


def test_names_that_nobody_has():
    with ipu.Session() as session:
        assert list(session.metrics("Other")) == ["update"]
        Model([0, 1], stages=(first, mean)).run(session)
        with pytest.raises(KeyError, match="named 'Other' has reported anything; these have: Pipeline"):
            session.metrics("Other")
        with pytest.raises(TypeError, match="name must be the name of a pipeline; got 3"):
            session.metrics(3)
        session.run(ipu.global_variables_initializer())
        assert len(session.metrics()["update"]) == 0


def test_the_learning_rate_is_found_in_the_state_and_fed_by_a_placeholder():
    rate = ipu.placeholder(np.float32, [], name="rate")

    def by_placeholder(loss):
        return OptimizerFunctionOutput(with_metrics(optax.sgd(rate), rate), loss)

    def by_state(loss):
        return OptimizerFunctionOutput(with_metrics(optax.inject_hyperparams(optax.sgd)(schedule)), loss)

    with ipu.Session() as session:
        model = Model([0, 1], (first, mean), by_placeholder)
        session.run(model.infeed.initializer)
        session.run(model.program, {rate: 0.25})
        np.testing.assert_array_equal(session.metrics()["learning_rate"], [0.25] * UPDATES)
    found = metrics_of([0, 1], (first, mean), by_state)["learning_rate"]
    np.testing.assert_allclose(found, list(map(schedule, range(UPDATES))), rtol=1e-6)


def test_a_pipeline_that_infers_reports_per_execution():
    with ipu.Session() as session:
        Model([0, 1], (first, mean), optimizer=None).run(session)
        assert len(session.metrics()["update"]) == 0
        found = session.metrics(training=False)
    np.testing.assert_array_equal(found["update"], [1, 2, 3])
    np.testing.assert_allclose(found["mean"], expected()["mean"], rtol=1e-5)
    assert "gradient_norm" not in found


def test_metrics_are_read_while_a_run_goes_on():
    go_on, read = threading.Event(), []

    def data():
        yield from rows()[: 2 * COUNT]
        assert go_on.wait(600)
        yield from rows()[2 * COUNT :]

    with ipu.Session() as session:
        model = Model([0, 1], stages=(first, mean), data=data)
        session.run(model.infeed.initializer)
        running = threading.Thread(target=session.run, args=(model.program,))
        running.start()
        while not read and running.is_alive():
            read += list(session.metrics()["update"])
        go_on.set()
        running.join()
        read += list(session.metrics()["update"])
    assert read == [1, 2, 3]


@pytest.mark.parametrize("mapping", [[0, 0], pytest.param([0, 1], marks=pytest.mark.thorough)])
def test_what_nobody_reads_is_bounded(mapping, monkeypatch):
    monkeypatch.setattr(session_metrics, "_MAX_UPDATES", 2)
    monkeypatch.setattr(session_metrics, "_MAX_PENDING", 0)
    with ipu.Session() as session:
        model = Model(mapping, stages=(first, mean), repeat=1)
        session.run(model.infeed.initializer)
        for _run in range(UPDATES):
            session.run(model.program)
        assert list(session.metrics()["update"]) == [2, 3]


def report(*arguments, **options):
    def stage(x, y):
        ipu.metric(*arguments, **options)
        return layer(0, x), y

    return stage


def reporting(x):
    ipu.metric("a", jnp.mean(x))
    return x


traced_once = jax.jit(reporting)


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        (report("", 1.0), "name must not be empty"),
        (report("update", 1.0), "nor 'update', as the numbers of weight updates are called"),
        (report("a", None), r"metric\('a'\): value must be a scalar; got None"),
        (report(3, 1.0), "name must be a string; got 3"),
        (report("a", np.ones(2, "float32")), r"must be a scalar.*float32\[2\]. Reduce it"),
        (report("a", 1j), "a real number"),
        (report("a", 1.0, "median"), "must be one of 'mean', 'sum', 'min', 'max', 'last'; got 'median'"),
        (report("gradient_norm", 1.0), "'gradient_norm' is reported by a stage and by the weight update"),
        (report("loss", 1.0), "third\\) has a metric 'loss' already. Give"),
        (lambda x, y: (jax.lax.map(reporting, layer(0, x)), y), "body of scan"),
        (lambda x, y: (jax.lax.cond(True, reporting, lambda v: v, layer(0, x)), y), "body of cond"),
        (
            lambda x, y: (layer(0, traced_once(traced_once(x))), y),
            "metric or enqueue was called in a function that JAX has traced once",
        ),
    ],
)
def test_wrong_metrics(stage, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Model([0, 1, 2], stages=(stage, second, third))


def test_metrics_have_their_places():
    with pytest.raises(RuntimeError, match="outside of a program"):
        ipu.metric("a", 1.0)
    with pytest.raises(RuntimeError, match="called in the compiled function. Call it in a stage"):
        front.compile_program(lambda: ipu.metric("a", 1.0))
    with pytest.raises(RuntimeError, match="in a loop, enqueue the value"):
        front.compile_program(lambda: ipu.loops.repeat(1, lambda: ipu.metric("a", 1.0), []))
    with pytest.raises(TypeError, match="with_metrics: the optimizer must be"):
        with_metrics(LossScalingOptimizer(optax.sgd(0.1)))

    def now_and_then(loss):
        inner = optax.MultiSteps(with_metrics(optax.sgd(0.1)), 2).gradient_transformation()
        return OptimizerFunctionOutput(inner, loss)

    message = "with_metrics goes around transformations that update now and then"
    with pytest.raises(ValueError, match=message):
        Model([0, 1, 2], optimizer=now_and_then)


def test_nothing_is_differentiated_through_a_metric():
    """Also where a stage differentiates by itself."""

    def stage(x, y):
        def energy(x):
            ipu.metric("energy", jnp.sum(x**2))
            return jnp.sum(x**2)

        return layer(0, x + 0.1 * jax.grad(energy)(x)), y

    found = metrics_of([0, 0], (stage, mean))
    squares = np.array([np.sum(row["x"] ** 2) for row in rows()])
    np.testing.assert_allclose(found["energy"], squares.reshape(UPDATES, COUNT).mean(1), rtol=1e-5)

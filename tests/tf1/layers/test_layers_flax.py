"""Modules of Flax as layers, compared with Flax itself."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx, traverse_util

import ipu_pipeline as ipu
from ipu_pipeline import engine, layers
from ipu_pipeline.ground import checks
from tests.support import front, models

NUM = 2  # micro-batches


class Block(linen.Module):
    size: int
    rate: float = 0.0

    @linen.compact
    def __call__(self, x, train):
        x = linen.Dense(self.size)(x)
        x = linen.BatchNorm(use_running_average=not train, momentum=0.8)(x)
        return linen.Dropout(self.rate, deterministic=not train)(jnp.tanh(x))


class NnxBlock(nnx.Module):
    def __init__(self, num_in, size, rngs, rate=0.0):
        self.dense = nnx.Linear(num_in, size, rngs=rngs)
        self.norm = nnx.BatchNorm(size, momentum=0.8, rngs=rngs)
        self.drop = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x):
        return self.drop(jnp.tanh(self.norm(self.dense(x))))


def make(kind, rate=0.0):
    if kind == "linen":
        return Block(6, rate), Block(5, rate)
    rngs = nnx.Rngs(7)
    return NnxBlock(12, 6, rngs, rate), NnxBlock(6, 5, rngs, rate)


def loss_of(x):
    return jnp.mean(x * np.arange(1, 6, dtype="float32"))


def cut(blocks, num_stages):
    """Two blocks in 1 or 2 stages."""

    def apply(number):
        return lambda x: layers.Flax(blocks[number], name="ab"[number])(x)

    first, second = apply(0), apply(1)
    if num_stages == 1:
        return [lambda x: loss_of(second(first(x)))]
    return [first, lambda x: loss_of(second(x))]


def batches(num=NUM):
    rng = np.random.default_rng(5)
    return [rng.normal(size=(8, 12)).astype("float32") for _ in range(num)]


def pipeline_of(stages, training=True, **options):
    return engine.Pipeline(
        stages,
        num_micro_batches=NUM,
        optimizer=optax.trace(decay=0.0) if training else None,  # its state is the gradient
        **options,
    )


def run(pipeline, variables=None, key=3):
    state = pipeline.init(jax.random.key(key), batches()[0])
    if variables is not None:
        state = engine.PipelineState(variables, None, state.update_count, state.execution_count, state.key)
    return state, *pipeline.step(state, batches())


def start_of(kind, blocks, variables):
    """The blocks' variables as Flax has them, from ours at the start; and back from them to our names."""
    if kind == "linen":

        def gather(prefix):
            tree = {"params": {}, "batch_stats": {}}
            for name, value in variables.items():
                scope, *path = name.split("/")
                if scope == prefix:
                    collection = path.pop(0) if path[0] == "batch_stats" else "params"
                    tree[collection].setdefault(path[0], {})[path[1]] = np.asarray(value)
            return tree

        return [gather("a"), gather("b")]
    return [nnx.split(block, nnx.Param, ...) for block in blocks]


def reference(kind, blocks, variables):
    """Losses, mean gradients and batch statistics after all micro-batches, by Flax, by our names."""
    starts = start_of(kind, blocks, variables)
    losses, mean = [], None
    if kind == "linen":
        parameters = [start["params"] for start in starts]
        rest = [start["batch_stats"] for start in starts]
    else:
        parameters, rest = [start[1] for start in starts], [start[2] for start in starts]

    def loss(parameters, rest, x):
        new = []
        for block, start, own, other in zip(blocks, starts, parameters, rest, strict=True):
            if kind == "linen":
                variables = {"params": own, "batch_stats": other}
                x, changed = block.apply(variables, x, True, mutable="batch_stats")
                new.append(changed["batch_stats"])
            else:
                module = nnx.merge(start[0], own, other, copy=True)
                x = module(x)
                new.append(nnx.split(module, nnx.Param, ...)[2])
        return loss_of(x), new

    with jax.numpy_dtype_promotion("standard"):
        step = jax.jit(jax.value_and_grad(loss, has_aux=True))
        for x in batches():
            (value, rest), gradients = step(parameters, rest, x)
            losses.append(value)
            part = jax.tree.map(lambda gradient: gradient / NUM, gradients)
            mean = part if mean is None else jax.tree.map(jnp.add, mean, part)

    def by_name(trees, middle=""):
        found = {}
        for prefix, tree in zip("ab", trees, strict=True):
            if kind == "nnx":
                flat = {path: v.get_value() for path, v in nnx.to_flat_state(tree) if "rngs" not in path}
            else:
                flat = traverse_util.flatten_dict(tree)
            found |= {"/".join([prefix, *middle, *map(str, path)]): v for path, v in flat.items()}
        return found

    return losses, by_name(mean), by_name(rest, ["batch_stats"] if kind == "linen" else [])


@pytest.mark.parametrize(
    ("kind", "num_stages", "options"),
    [("linen", 2, {"device_mapping": [0, 0]}), ("nnx", 2, {"schedule": "interleaved"})],
)
def test_losses_gradients_and_batch_statistics_are_flaxs(kind, num_stages, options):
    """And evaluation uses what training left; a module of nnx stays as it was."""
    blocks = make(kind)
    pipeline = pipeline_of(cut(blocks, num_stages), **options)
    before, after, outputs = run(pipeline)
    losses, gradients, statistics = reference(kind, blocks, before.variables)
    models.assert_trees_close(models.on_one_device(list(outputs.losses)), losses)
    models.assert_trees_close(models.on_one_device(after.optimizer_state.trace), gradients)
    ours = {name: value for name, value in after.variables.items() if name in statistics}
    models.assert_trees_close(models.on_one_device(ours), statistics)
    assert len(statistics) == 4
    assert {*gradients, *statistics} == set(pipeline.variables)
    if kind == "linen":
        check_initial_values(before.variables)
    else:
        kernel = blocks[0].dense.kernel.get_value()
        np.testing.assert_array_equal(before.variables["a/dense/kernel"], kernel)
        assert not np.any(np.asarray(blocks[0].norm.mean.get_value()))
    check_evaluation(kind, make(kind, 0.5), models.on_one_device(after.variables))


def check_initial_values(variables):
    """Linen's depend on the seed and the name alone."""
    with jax.numpy_dtype_promotion("standard"):
        init = jax.jit(lambda key: Block(6).init(key, batches()[0], train=False))
        for name in ("a/Dense_0/kernel", "a/batch_stats/BatchNorm_0/var"):
            made = init(jax.random.fold_in(jax.random.key(3), checks.hash_name(name)))
            *_scope, module, leaf = name.split("/")
            collection = "batch_stats" if "batch_stats" in name else "params"
            np.testing.assert_array_equal(variables[name], made[collection][module][leaf])


def check_evaluation(kind, blocks, variables):
    """Without dropout, and by the statistics that it does not change."""

    def whole(x):
        return layers.Flax(blocks[1], name="b")(layers.Flax(blocks[0], name="a")(x))

    _state, after, outputs = run(pipeline_of([whole], training=False), variables)
    models.assert_trees_close(models.on_one_device(after.variables), variables)
    x, starts = batches()[0], start_of(kind, blocks, variables)
    for prefix, block, start in zip("ab", blocks, starts, strict=True):
        if kind == "linen":
            apply = functools.partial(block.apply, start, train=False)
        else:
            apply = nnx.merge(*nnx.split(block))
            apply.eval()
            for path, variable in nnx.iter_graph(apply):
                if isinstance(variable, (nnx.Param, nnx.BatchStat)):
                    variable.set_value(variables["/".join([prefix, *path])])
        x = jax.jit(lambda x, apply=apply: apply(x))(x)
    np.testing.assert_allclose(outputs.outputs[0], x, rtol=1e-5, atol=1e-6)


def test_masks_differ_between_layers_micro_batches_and_executions_and_not_by_the_split():
    one = layers.Flax(linen.Dropout(0.5), name="a")
    others = [layers.Flax(nnx.Dropout(0.5, rngs=nnx.Rngs(0)), name=name) for name in "bc"]

    def first(x):
        return x, one(jnp.ones_like(x), training=True)

    def second(x, mask):
        return mask, *(other(jnp.ones_like(x), training=True) for other in others)

    found = []
    for stages in ([lambda x: second(*first(x))], [first, second]):
        pipeline = pipeline_of(stages, training=False)
        state, state_after, outputs = run(pipeline)
        again = pipeline.step(state_after, batches())[1]
        found.append([np.asarray(mask) for out in (*outputs.outputs, *again.outputs) for mask in out])
    np.testing.assert_array_equal(*found)
    for index, mask in enumerate(found[1][::3][:NUM]):  # by the key of the micro-batch, and the name
        key = jax.random.fold_in(jax.random.fold_in(state.key, 0), index)
        key = jax.random.fold_in(jax.random.fold_in(key, np.uint32(checks.hash_name("a"))), np.uint32(0))
        rngs, ones = {"dropout": key}, jnp.ones((8, 12))
        expected = linen.Dropout(0.5).apply({}, ones, deterministic=False, rngs=rngs)
        np.testing.assert_array_equal(mask, expected)
    masks = found[0]
    assert len({mask.tobytes() for mask in masks}) == len(masks) == 6 * NUM
    assert {*np.unique(masks)} == {0, 2}


@pytest.mark.thorough
def test_in_the_body_of_a_loop():
    infeed = ipu.ipu_infeed_queue.IPUInfeedQueue([(x,) for x in batches()])
    outfeed, blocks = ipu.ipu_outfeed_queue.IPUOutfeedQueue(), make("nnx")

    def body(x):
        loss = cut(blocks, 1)[0](x)
        optimizer = ipu.optimizers.GradientAccumulationOptimizerV2(optax.sgd(0.0), NUM)
        return optimizer.minimize(loss), outfeed.enqueue(loss)

    program = front.compile_program(lambda: ipu.loops.repeat(NUM, body, [], infeed))
    with ipu.Session(seed=3) as session:
        session.run(infeed.initializer)
        session.run(ipu.global_variables_initializer())
        start = session.variables
        session.run(program)
        losses, statistics = session.run(outfeed.dequeue()), session.variables
    expected, _gradients, expected_statistics = reference("nnx", blocks, start)
    models.assert_trees_close(list(losses), expected)
    ours = {name: statistics[name] for name in expected_statistics}
    models.assert_trees_close(ours, expected_statistics)


def test_one_layer_in_two_stages_shares_its_variables():
    layer = layers.Flax(linen.Dense(12), name="shared")
    pipeline = pipeline_of([layer, layer, lambda x: jnp.mean(x**2)])
    pipeline.trace(batches()[0])
    assert sorted(pipeline.variables) == ["shared/bias", "shared/kernel"]


class Kinds(nnx.Module):
    """A tied parameter, a list, a counter, and a value that is no Variable."""

    def __init__(self):
        self.first = nnx.Linear(12, 12, rngs=nnx.Rngs(0))
        self.second = nnx.Linear(12, 12, rngs=nnx.Rngs(1))
        self.second.kernel = self.first.kernel
        self.rest = nnx.List([nnx.Linear(12, 2, use_bias=False, rngs=nnx.Rngs(2))])
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls[...] += 1
        return self.rest[0](self.second(self.first(x)))


def test_kinds_of_nnx_variables():
    module = Kinds()
    pipeline = pipeline_of([layers.Flax(module), lambda x: jnp.mean(x)])
    _before, after, _outputs = run(pipeline)
    trained = {name: spec.trainable for name, spec in pipeline.variables.items()}
    assert trained == {
        "flax/calls": False,
        "flax/first/bias": True,
        "flax/first/kernel": True,
        "flax/rest/0/kernel": True,
        "flax/second/bias": True,
    }
    assert after.variables["flax/calls"] == NUM

    def reference_loss(kernel, x):
        hidden = (x @ kernel) @ kernel
        return jnp.mean(hidden @ module.rest[0].kernel.get_value())

    kernel = module.first.kernel.get_value()
    expected = jax.jit(jax.grad(reference_loss))(kernel, np.concatenate(batches()))
    gradients = models.on_one_device(after.optimizer_state.trace)
    models.assert_trees_close(gradients["flax/first/kernel"], expected)


def test_call_arguments():
    class Module(linen.Module):
        @linen.compact
        def __call__(self, x, mask, *, deterministic, scale=1.0):
            return {"out": jnp.where(mask, x * scale, 0.0), "deterministic": jnp.asarray(deterministic)}

    def stage(x):
        mask = jnp.arange(12) < 3
        return (
            layers.Flax(Module())(x, mask, scale=2.0),
            layers.Flax(Module())(x, mask=mask, training=True),
            layers.Flax(Module())(x, mask, deterministic=False),
        )

    outputs = run(pipeline_of([stage], training=False))[2].outputs[0]
    assert [bool(out["deterministic"]) for out in outputs] == [True, False, False]
    np.testing.assert_array_equal(outputs[0]["out"][:, :3], batches()[0][:, :3] * 2)
    assert not np.any(np.asarray(outputs[1]["out"])[:, 3:])


def test_an_attribute_of_the_module_is_not_given_again():
    def loss(x):
        return jnp.mean(layers.Flax(linen.BatchNorm(use_running_average=True))(x))

    before, after, _outputs = run(pipeline_of([loss]))
    name = "flax/batch_stats/mean"
    np.testing.assert_array_equal(before.variables[name], after.variables[name])


def trace(stage):
    pipeline_of([stage], training=False).trace(batches()[0])


def test_wrong_modules():
    with pytest.raises(TypeError, match="module must be a module of flax.linen or flax.nnx, .*got <class"):
        layers.Flax(linen.Dense)
    with pytest.raises(ValueError, match="training=True was given, but Dense takes none of train"):
        trace(lambda x: layers.Flax(linen.Dense(3))(x, training=True))
    with pytest.raises(ValueError, match="Flax made: the nnx module has no value at .*make it outside"):
        trace(lambda x: layers.Flax(nnx.Linear(12, 3, rngs=nnx.Rngs(0)), name="made")(x))

    class Changes(nnx.Module):
        def __init__(self):
            self.weight = nnx.Param(jnp.zeros(()))

        def __call__(self, x):
            self.weight[...] += 1
            return x

    module = Changes()
    with pytest.raises(ValueError, match="the module changes its parameter weight"):
        trace(lambda x: layers.Flax(module)(x))


def test_without_flax(monkeypatch):
    monkeypatch.setitem(sys.modules, "flax", None)
    with pytest.raises(ImportError, match=r'pip install "ipu_pipeline\[flax\]"'):
        layers.Flax(object())


def test_an_error_in_a_module_names_the_scope():
    class Wrong(linen.Module):
        def __call__(self, x):
            return x @ jnp.ones((7, 7))  # in a module

    def encode(x):
        with ipu.variable_scope("encoder"):
            return layers.Flax(Wrong())(x)

    with pytest.raises(TypeError) as caught:
        trace(encode)
    (note,) = (note for note in caught.value.__notes__ if note.startswith("This happened"))
    assert "\n  in scope encoder/flax\n" in note
    assert note.endswith("return x @ jnp.ones((7, 7))  # in a module")


class Table(nnx.Module):
    def __init__(self, rngs):
        self.embedding = nnx.Param(rngs.normal((6, 5)))
        self.first = self.second = nnx.Linear(5, 5, rngs=rngs)

    def __call__(self, ids):
        return self.second(self.first(self.embedding.get_value()[ids]))


class Head(nnx.Module):
    """Its kernel is the table's, its layer one of the table's layers."""

    def __init__(self, table):
        self.table = table.embedding
        self.dense = table.first

    def __call__(self, x):
        return self.dense(x) @ self.table.get_value().T


def tied_modules():
    table = Table(nnx.Rngs(3))
    return table, Head(table)


def test_what_modules_share_is_one_variable():
    """Over three stages. Each is what Flax itself makes of it: one array, and the sum of both gradients."""
    table, head = tied_modules()
    middle = nnx.Linear(5, 5, rngs=nnx.Rngs(4))

    stages = [
        lambda ids, labels: (layers.Flax(table, name="table")(ids), labels),
        lambda x, labels: (layers.Flax(middle, name="middle")(x), labels),
        lambda x, labels: models.cross_entropy(layers.Flax(head, name="head")(x), labels),
    ]
    options = {"optimizer": optax.sgd(0.5), "device_mapping": (0, 1, 0)}
    pipeline = engine.Pipeline(stages, num_micro_batches=2, **options)
    ids, labels = np.random.default_rng(0).integers(0, 6, (2, 2, 8)).astype("int32")
    micro_batches = list(zip(ids, labels, strict=True))
    state = pipeline.init(jax.random.key(0), micro_batches[0])
    tied = {"table/embedding", "table/first/kernel", "table/first/bias"}
    assert set(pipeline.variables) == tied | {"middle/kernel", "middle/bias"}
    state, outputs = pipeline.step(state, micro_batches)

    def total(module):
        first, second, third = module
        losses = [models.cross_entropy(third(second(first(ids))), labels) for ids, labels in micro_batches]
        return sum(losses) / 2, losses

    first, tied_head = tied_modules()
    module = nnx.List([first, nnx.clone(middle), tied_head])
    (_total, losses), gradients = nnx.jit(nnx.value_and_grad(total, has_aux=True))(module)
    np.testing.assert_allclose([float(loss) for loss in outputs.losses], losses, rtol=1e-5)
    for name, parameter, gradient in (
        ("table/embedding", first.embedding, gradients[0]["embedding"]),
        ("table/first/kernel", first.first.kernel, gradients[0]["first"]["kernel"]),
    ):
        expected = parameter.get_value() - 0.5 * gradient.get_value()
        models.assert_trees_close(np.asarray(state.variables[name]), np.asarray(expected))


def test_modules_share_in_programs_of_their_own_only():
    """In another program, the parameter is called after the first place there."""
    table, head = tied_modules()

    def variables(x, *stages):
        pipeline = engine.Pipeline(stages, num_micro_batches=1)
        pipeline.trace(x)
        return set(pipeline.variables)

    embed, project = layers.Flax(table, name="table"), layers.Flax(head, name="head")
    assert all(name.startswith("table/") for name in variables(np.zeros(3, "int32"), embed, project))
    found = variables(np.zeros((3, 5), "float32"), project)
    assert found == {"head/table", "head/dense/kernel", "head/dense/bias"}

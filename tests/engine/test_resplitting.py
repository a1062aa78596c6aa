"""States that move between splits, replicas and processes, in memory and through a directory."""

import dataclasses
import functools
import itertools
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ipu_pipeline as ipu
from ipu_pipeline import engine
from ipu_pipeline.ground.errors import CheckpointError
from tests.support import front, joined, models

COUNT, WIDTH = 4, 8
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
OPTIONS = {"num_micro_batches": COUNT, "optimizer": OPTIMIZER}


def make_batches(number=COUNT):
    rng = np.random.default_rng(1)
    return [tuple(rng.normal(size=(2, 6, WIDTH)).astype(np.float32)) for _ in range(number)]


def make_layers(number=4):
    rng = np.random.default_rng(2)
    return [
        {"w": (rng.normal(size=(WIDTH, WIDTH)) / 3).astype(np.float32), "b": np.zeros(WIDTH, np.float32)}
        for _layer in range(number)
    ]


def dense(parameters, x):
    return jnp.tanh(x @ parameters["w"] + parameters["b"])


def run_list(parameters, x, targets):
    for own in parameters:
        x = dense(own, x)
    return x, targets


def run_stacked(parameters, x, targets):
    return jax.lax.scan(lambda x, own: (dense(own, x), None), x, parameters)[0], targets


def error(x, targets):
    return jnp.mean((x - targets) ** 2)


def cut(layers, sizes):
    ends = np.cumsum([0, *sizes])
    return [layers[first:end] for first, end in itertools.pairwise(ends)]


def make(stages, parameters=None, **options):
    """A pipeline that is traced."""
    pipeline = engine.Pipeline(stages, parameters=parameters, **{**OPTIONS, **options})
    pipeline.trace(make_batches()[0])
    return pipeline


def as_lists(sizes, **options):
    """Stages with lists of layers."""
    return make([run_list] * len(sizes), cut(make_layers(), sizes), **{"loss": error, **options})


def stack(layers):
    return jax.tree.map(lambda *own: np.stack(own), *layers)


def as_stacks(sizes):
    """Stages with layers stacked on a first axis."""
    return make([run_stacked] * len(sizes), list(map(stack, cut(make_layers(), sizes))), loss=error)


def as_model(num_stages):
    """A model that the engine cuts, with layers stacked before."""

    def model(parameters, x, targets):
        return error(*run_stacked(parameters, x, targets))

    options = {"parameters": stack(make_layers()), "measure": False, **OPTIONS}
    return make(engine.split(model, num_stages, make_batches()[0], **options))


def as_auto(num_stages):
    """Layers that the engine groups."""
    layers = [lambda own, x, targets: (dense(own, x), targets)] * 3
    layers.append(lambda own, x, targets: error(dense(own, x), targets))
    options = {"parameters": make_layers(), "measure": False, **OPTIONS}
    return make(engine.auto_stages(layers, num_stages, make_batches()[0], **options))


def begin(pipeline, updates=2):
    """A state after some updates."""
    return go_on(pipeline, pipeline.init(jax.random.key(3), make_batches()[0]), updates)[0]


def go_on(pipeline, state, updates=2):
    """Trains further; returns the state, and the losses of the last step."""
    batches = make_batches(COUNT * pipeline.num_replicas)
    for _update in range(updates):
        state, outputs = pipeline.step(state, batches)
    return state, jax.device_get(outputs.losses)


SPLITS = {
    "lists 2 2": lambda: as_lists([2, 2]),
    "lists 1 3": lambda: as_lists([1, 3]),
    "stacks 2 2": lambda: as_stacks([2, 2]),
    "stacks 3 1": lambda: as_stacks([3, 1]),
    "model": lambda: as_model(2),
    "auto": lambda: as_auto(3),
}


@functools.cache
def pipeline_of(name):
    return SPLITS[name]()


@functools.cache
def begun(name):
    """A pipeline and its state after two updates; the state after two more, and their last losses."""
    state = begin(pipeline_of(name))
    return pipeline_of(name), state, *go_on(pipeline_of(name), state)


@pytest.mark.parametrize(
    ("before", "after", "is_saved"),
    [
        ("lists 2 2", "lists 1 3", True),
        ("stacks 2 2", "stacks 3 1", False),
        ("lists 1 3", "stacks 2 2", False),
        ("stacks 3 1", "model", True),
        ("model", "lists 2 2", False),
        ("auto", "stacks 2 2", False),
    ],
)
def test_training_goes_on_in_another_split(before, after, is_saved, tmp_path):
    """As if it had not moved: losses, and, moved back, every leaf."""
    old, state, expected, losses = begun(before)
    new = pipeline_of(after)
    if is_saved:
        engine.save(tmp_path / "state", state)
        moved = engine.restore(tmp_path / "state", new)
    else:
        moved = engine.resplit(state, new)
    assert (moved.update_count, moved.execution_count) == (2, 2)
    back = engine.resplit(moved, old)
    jax.tree.map(np.testing.assert_array_equal, *map(jax.device_get, (back.variables, state.variables)))
    jax.tree.map(np.testing.assert_array_equal, back.optimizer_state, state.optimizer_state)
    moved, found = go_on(new, moved)
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    back = engine.resplit(moved, old)
    models.assert_trees_close(back.variables, expected.variables)
    models.assert_trees_close(back.optimizer_state, expected.optimizer_state)


def test_replicas_and_what_they_share_out():
    old, state, _later, _losses = begun("lists 2 2")
    new = as_lists([4], num_replicas=2, shard=["optimizer_state", "weights"])
    moved = engine.resplit(state, new)
    sharded = moved.variables["stage0/2/w"]
    assert not sharded.sharding.is_fully_replicated
    np.testing.assert_array_equal(sharded, state.variables["stage1/0/w"])
    after, _losses = go_on(new, moved, 1)
    back = engine.resplit(after, old)
    assert {leaf.sharding.num_devices for leaf in jax.tree.leaves(back.variables)} == {1}
    np.testing.assert_array_equal(back.variables["stage1/0/w"], after.variables["stage0/2/w"])


def test_random_numbers_go_on():
    def dropping(parameters, x, targets):
        with engine.variable_scope("dropping"):
            keep = jax.random.bernoulli(engine.next_rng_key(), 0.7, x.shape)
        return run_list(parameters, jnp.where(keep, x, 0), targets)

    old, new = (
        make([dropping, *[run_list] * (len(sizes) - 1)], cut(make_layers(2), sizes), loss=error)
        for sizes in ([1, 1], [2])
    )
    state = begin(old, 1)
    np.testing.assert_allclose(go_on(new, engine.resplit(state, new))[1], go_on(old, state)[1], rtol=1e-5)


def test_inference_takes_variables_only():
    state = begun("lists 2 2")[1]
    evaluator = as_lists([1, 3], loss=None, optimizer=None)
    moved = engine.resplit(state, evaluator)
    assert moved.optimizer_state is None
    trainer = pipeline_of("lists 1 3")
    again = engine.resplit(moved, trainer)  # it begins with new optimizer state
    assert go_on(trainer, again, 1)[0].optimizer_state is not None


def test_the_error_for_another_split_names_the_mend():
    state, other = begun("lists 1 3")[1], pipeline_of("lists 2 2")
    with pytest.raises(ValueError, match=r"no variable stage0/1/\w.*moved by engine.resplit\(state, pipel"):
        other.step(state, make_batches())
    with pytest.raises(ValueError, match=r"moved by engine.resplit"):
        other.parameters(state)


@pytest.mark.parametrize(
    ("known", "wanted"),
    [
        ({"stage0/w": (8, 16)}, {"stage0/w": (8, 8)}),
        ({"stage0/w": (8,)}, {"stage0/w": (8,), "stage1/w": (8,)}),
        ({"stage0/w": (2, 8), "stage1/w": (2, 8)}, {"stage0/w": (3, 8)}),
        ({"stage0/w": (8,)}, {"stage0/v": (8,)}),
        # Rows that only happen to add up, as what is beside them shows.
        (
            {"stage0/w": (8, 4, 4), "stage0/b": (4,), "stage1/w": (32, 4, 4), "stage1/b": (4,)},
            {"stage0/w": (32, 4, 4), "stage0/b": (4,), "stage1/w": (8, 4, 4), "stage1/b": (4,)},
        ),
        (
            {"stage0/w": (8, 16), "stage0/b": (16,), "stage1/w": (32, 16), "stage1/b": (16,)},
            {"stage0/w": (32, 16), "stage0/b": (16,), "stage1/w": (8, 16), "stage1/b": (16,)},
        ),
    ],
)
def test_variables_that_do_not_belong_together(known, wanted):
    with pytest.raises(ValueError, match="not those of the pipeline's layers, .* Left over in the state: "):
        resplit(known, wanted)


def resplit(known, wanted):
    """What `engine.resplit` makes of variables by these names and shapes: those of before, and of after."""
    rng = np.random.default_rng(4)

    def pipeline_of(shapes):
        own = [engine.Shared(name, rng.normal(size=size).astype("f4")) for name, size in shapes.items()]
        pipeline = engine.Pipeline([lambda _own, x: x], parameters=[own], num_micro_batches=1)
        pipeline.trace(np.float32(0))
        return pipeline

    state = pipeline_of(known).init(jax.random.key(0), np.float32(0))
    return state.variables, engine.resplit(state, pipeline_of(wanted)).variables


M = (8, 8)


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        # Numbers that stand at words, as in modules of Flax, begin anew in each stage.
        (
            "stage0/Dense_0/w stage0/Dense_1/w stage1/Dense_0/w",
            "stage0/Dense_0/w stage1/Dense_0/w stage1/Dense_1/w",
        ),
        # Entries of lists without parameters are counted, too.
        ("stage1/0/w stage2/1/w", "stage0/1/w stage1/0/w"),
        # A list of matrices and a list of vectors for each stage: the first number tells no layer.
        (
            "stage0/0/0 stage0/0/1 stage0/1/0 stage0/1/1 stage1/0/0 stage1/1/0",
            "stage0/0/0 stage1/0/0 stage0/1/0 stage1/1/0 stage1/0/1 stage1/1/1",
        ),
        # [w, b] of each layer: the second number tells none.
        (
            "stage0/0/0 stage0/0/1 stage0/1/0 stage0/1/1 stage1/0/0 stage1/0/1",
            "stage0/0/0 stage0/0/1 stage1/0/0 stage1/0/1 stage1/1/0 stage1/1/1",
        ),
        # More than ten stages: by their numbers, and not as text.
        (
            " ".join(f"stage{n}/w" for n in range(12)),
            " ".join(f"stage{n // 2}/{n % 2}/w" for n in range(12)),
        ),
        ("stage0/0/w stage0/1/w", "layer0/w layer1/w"),
        # Names of layers count before their order.
        ("stage0/lb/w stage1/la/w", "stage1/lb/w stage0/la/w"),
    ],
    ids=["words", "gaps", "kinds first", "kinds last", "many", "layers", "names"],
)
def test_which_layer_is_which(known, expected):
    before, after = resplit(dict.fromkeys(known.split(), M), dict.fromkeys(expected.split(), M))
    for old, new in zip(known.split(), expected.split(), strict=True):
        np.testing.assert_array_equal(after[new], before[old], err_msg=new)


@pytest.mark.parametrize(
    ("known", "wanted"),
    [
        # Names that are the user's own, and others.
        ({"block/0/w": M, "block/1/w": M}, {"block/1/w": M, "block/2/w": M}),
        ({"layer0/w": M, "layer1/w": M}, {"layer1/w": M, "layer2/w": M}),
        # Rows of matrices that only happen to add up, with nothing beside them that tells.
        ({"stage0/w": (8, 4), "stage1/w": (4, 4)}, {"stage0/w": (4, 4), "stage1/w": (8, 4)}),
        # Words whose numbers say another thing than the order of the stages.
        ({"stage0/block1/w": M, "stage1/block0/w": M}, {"stage0/block0/w": M, "stage0/block1/w": M}),
    ],
)
def test_what_could_be_meant_in_two_ways_is_an_error(known, wanted):
    with pytest.raises(ValueError, match="or it is not certain which are which"):
        resplit(known, wanted)


def test_a_stack_beside_other_parameters():
    stacked = {"stage0/w": (4, *M), "stage0/last": M}
    single = {**{f"model/w/{n}": M for n in range(4)}, "model/last": M}
    for known, wanted in ((stacked, single), (single, stacked)):
        variables = {}
        for own in resplit(known, wanted):
            variables |= own
        for n in range(4):
            np.testing.assert_array_equal(variables[f"model/w/{n}"], variables["stage0/w"][n])
        np.testing.assert_array_equal(variables["model/last"], variables["stage0/last"])


@pytest.mark.thorough
def test_modules_of_flax_in_stages():
    linen = pytest.importorskip("flax.linen", reason="Flax is not installed (extra flax)")

    class Layers(linen.Module):
        number: int

        @linen.compact
        def __call__(self, x):
            for _layer in range(self.number):
                x = jnp.tanh(linen.Dense(WIDTH)(x))
            return x

    def of_sizes(*sizes):
        modules, x = [Layers(size) for size in sizes], make_batches()[0][0]
        parameters = [jax.device_get(module.init(jax.random.key(n), x)) for n, module in enumerate(modules)]
        stages = [lambda own, x, t, module=module: (module.apply(own, x), t) for module in modules]
        return make(stages, parameters, loss=error)

    old, new = of_sizes(2, 1), of_sizes(1, 2)
    state = begin(old, 1)
    moved = engine.resplit(state, new)
    np.testing.assert_allclose(go_on(new, moved, 1)[1], go_on(old, state, 1)[1], rtol=1e-5)


def test_other_optimizers():
    state, clip = begun("lists 2 2")[1], optax.clip_by_global_norm(1.0)
    narrow = optax.adamw(1e-2, mu_dtype=jnp.bfloat16)
    for optimizer, message in (
        (optax.chain(clip, optax.sgd(0.1)), r"of another optimizer.*it has no .*mu"),
        (optax.adamw(1e-2), r"of another optimizer.*count is missing there"),
        (optax.chain(OPTIMIZER, optax.trace(0.9)), "of another optimizer.*is missing there"),
        (optax.chain(clip, narrow), r"mu.* is float32\[8\] there, not bfloat16"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.resplit(state, as_lists([1, 3], optimizer=optimizer))


def test_what_an_optimizer_keeps_beside_its_variables_moves():
    """As Muon keeps the coefficients of its iteration."""

    def update(gradients, state, params=None):
        del params
        return jax.tree.map(lambda gradient: -state[1] * gradient, gradients), 2 * state

    optimizer = optax.GradientTransformation(lambda _parameters: jnp.array([0.1, 0.2]), update)
    one, other = (as_lists(sizes, optimizer=optimizer) for sizes in ([2, 2], [1, 3]))
    state = begin(one, 1)
    moved = engine.resplit(state, other)
    assert moved.optimizer_state.tolist() == pytest.approx([0.2, 0.4])
    (_state, losses), (_moved, others) = go_on(one, state), go_on(other, moved)
    np.testing.assert_allclose(others, losses, rtol=1e-5)


def test_optimizer_state_of_all_variables_together():
    one, other, same = (
        as_lists(sizes, optimizer=optax.flatten(optax.adam(1e-2))) for sizes in ([2, 2], [1, 3], [2, 2])
    )
    state = begin(one, 1)
    with pytest.raises(ValueError, match=r"shape \(288,\) and belongs to no single variable"):
        engine.resplit(state, other)
    moved = engine.resplit(state, same)
    jax.tree.map(np.testing.assert_array_equal, moved.optimizer_state, state.optimizer_state)


def test_arguments_of_other_types(tmp_path):
    pipeline, state, _later, _losses = begun("lists 2 2")
    for call, message in (
        (
            lambda: engine.resplit({}, pipeline),
            "resplit: state must be what init or step returned; got dict",
        ),
        (
            lambda: engine.resplit(state, [run_list]),
            "resplit: pipeline must be an engine.Pipeline; got list",
        ),
        (lambda: engine.save(tmp_path, {}), "save: state must be what init or step returned; got dict"),
        (lambda: engine.save(3, state), "save: path must be a string or a path; got 3"),
        (lambda: engine.restore(None, pipeline), "restore: path must be a string or a path; got None"),
        (
            lambda: engine.restore(tmp_path, [run_list]),
            "restore: pipeline must be an engine.Pipeline; got list",
        ),
    ):
        with pytest.raises(TypeError, match=message):
            call()


def test_an_untraced_pipeline():
    untraced = engine.Pipeline([run_list], parameters=[make_layers()], **{**OPTIONS, "loss": error})
    with pytest.raises(RuntimeError, match="has not been traced"):
        engine.resplit(begun("lists 2 2")[1], untraced)


def test_saved_states_are_exact_and_whole(tmp_path):
    pipeline, state, later, _losses = begun("lists 2 2")
    path = tmp_path / "deep" / "state"
    engine.save(path, state)
    both = state, engine.restore(path, pipeline)
    plain = [jax.device_get(dataclasses.replace(own, key=jax.random.key_data(own.key))) for own in both]
    jax.tree.map(np.testing.assert_array_equal, *plain)
    engine.save(path, later)  # it replaces the other one
    assert engine.restore(path, pipeline).update_count == 4
    assert os.listdir(path.parent) == ["state"]
    (path / "checkpoint.json").unlink()
    with pytest.raises(CheckpointError, match="is not complete"):
        engine.restore(path, pipeline)
    with pytest.raises(CheckpointError, match="There is no checkpoint at"):
        engine.restore(tmp_path / "other", pipeline)
    (tmp_path / "file").write_text("mine")
    with pytest.raises((ValueError, OSError)):
        engine.save(tmp_path / "file", state)
    assert (tmp_path / "file").read_text() == "mine"


def test_half_precision_and_empty_variables_are_saved(tmp_path):
    def stage(parameters, x, targets):
        return error(x @ parameters["w"].astype(np.float32), targets) + jnp.sum(parameters["none"])

    parameters = {"w": np.eye(WIDTH, dtype=jnp.bfloat16), "none": np.zeros((0, 3), np.float32)}
    pipeline = make([stage], [parameters])
    state = begin(pipeline, 1)
    engine.save(tmp_path / "state", state)
    restored = engine.restore(tmp_path / "state", pipeline)
    assert restored.variables["stage0/w"].dtype == jnp.bfloat16
    jax.tree.map(np.testing.assert_array_equal, restored.variables, state.variables)


def test_a_checkpoint_of_a_session_can_be_restored(tmp_path):
    def weight(scope):
        with ipu.variable_scope(scope):
            return ipu.get_variable("w", (WIDTH, WIDTH))

    stages = [
        lambda x, targets: (jnp.tanh(x @ weight("first")), targets),
        lambda x, targets: error(x @ weight("last"), targets),
    ]
    infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(make_batches())
    program = front.compile_pipeline(
        stages,
        COUNT,
        infeed_queue=infeed,
        outfeed_queue=ipu.ipu_outfeed_queue.IPUOutfeedQueue(),
        optimizer_function=lambda loss: ipu.pipelining_ops.OptimizerFunctionOutput(optax.adam(1e-2), loss),
    )
    with ipu.Session(seed=1) as session:
        session.run(infeed.initializer)
        session.run(program)
        session.save(tmp_path / "session")
        variables = {name: np.asarray(value) for name, value in session.variables.items()}
    pipeline = make([lambda *own: stages[1](*stages[0](*own))], optimizer=optax.adam(1e-2))
    state = engine.restore(tmp_path / "session", pipeline)
    assert state.update_count == 1
    jax.tree.map(np.testing.assert_array_equal, dict(state.variables), variables)
    go_on(pipeline, state)


def go_on_in_processes(saved, moved, target):
    """In each process: restores what one process saved, and what is moved goes on in another split."""
    ipu.set_num_devices(4)  # of both processes, which it joins
    pipeline = as_lists([1, 1, 1, 1])
    state, losses = go_on(pipeline, engine.restore(saved, pipeline))
    engine.save(target, state)
    other = as_lists([1, 3], devices=[jax.devices()[0], jax.devices()[-1]], num_micro_batches=COUNT)
    _state, others = go_on(other, engine.resplit(state, other), 1)
    engine.save(moved, engine.resplit(state, other))
    model = as_model(4)
    again = engine.restore(target, pipeline)
    known = engine.gathered(again.variables)
    without = dict(again.variables)
    removed = without.popitem()[0]  # of the last stage, so of the last process
    _state, adoption = pipeline.adopt(dataclasses.replace(again, variables=without))
    assert (adoption.new, adoption.takes_optimizer_state) == ((removed,), True)
    model_losses = go_on(model, engine.restore(target, model), 1)[1]
    return losses, others, model_losses, jax.tree.map(np.asarray, known)


def save_alone(path):
    """In a process that only JAX has joined."""
    pipeline = as_lists([1, 1, 1, 1])
    with pytest.raises(RuntimeError, match="engine.save in 2 processes needs ipu_pipeline.distributed"):
        engine.save(path, begin(pipeline, 1))


@pytest.mark.thorough
def test_processes_that_have_not_joined(tmp_path):
    joined.run(save_alone, 2, 2, str(tmp_path / "state"))
    assert not list(tmp_path.iterdir())


@pytest.mark.thorough
def test_several_processes(tmp_path):
    """What one process saves, several restore, and the other way round, to the last bit."""
    saved, target, moved = (tmp_path / name for name in ("saved", "target", "moved"))
    pipeline = as_lists([2, 2])
    state = begin(pipeline)
    engine.save(saved, state)
    expected, losses = go_on(pipeline, state)
    paths = map(str, (saved, moved, target))
    started = joined.start(go_on_in_processes, 2, None, *paths, directory=tmp_path, joins_itself=True)
    found = joined.finish(started, tmp_path, 120)
    np.testing.assert_allclose(found[1][0], losses, rtol=1e-5)  # of the process with the last stage
    restored = engine.restore(target, pipeline)
    assert restored.update_count == 4
    models.assert_trees_close(restored.variables, expected.variables)
    models.assert_trees_close(restored.optimizer_state, expected.optimizer_state)
    _state, later = go_on(pipeline, restored, 1)
    np.testing.assert_allclose(found[1][1], later, rtol=1e-5)
    np.testing.assert_allclose(found[1][2], later, rtol=1e-5)
    others = as_lists([1, 1, 1, 1])
    exact = engine.restore(target, others).variables
    for own in found:
        jax.tree.map(np.testing.assert_array_equal, own[3], dict(exact))
    by_name = engine.restore(moved, others).variables
    jax.tree.map(np.testing.assert_array_equal, dict(by_name), dict(exact))

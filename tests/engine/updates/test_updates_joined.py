"""Optimizers that join the variables of several IPUs equal the reference, and send little."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ipu_pipeline as ipu
from ipu_pipeline import engine, loops, scopes
from ipu_pipeline.engine.inspect import Sent, find_facts
from ipu_pipeline.ipu_infeed_queue import IPUInfeedQueue
from ipu_pipeline.ipu_outfeed_queue import IPUOutfeedQueue
from ipu_pipeline.optimizers import GradientAccumulationOptimizerV2
from tests.support import beside, front, models, scheduled

NUM_UPDATES = 3
CLIPPED_SGD = optax.chain(optax.clip_by_global_norm(0.01), optax.sgd(0.5))
EARLY = {f"stage{index}/kernel": index < 2 for index in range(4)}


def clipped(norm=0.05, rate=0.1):
    return optax.chain(optax.clip_by_global_norm(norm), optax.adam(optax.linear_schedule(rate, 0.0, 10)))


def orthogonal_to_the_last():
    """Joins by a while loop and by a scan, whose carried values are of several IPUs."""

    def update(updates, state, params=None):
        del params

        def halve(carry):
            return jax.tree.map(lambda leaf: leaf / 2, carry)

        updates = jax.lax.while_loop(lambda tree: optax.tree.norm(tree) > 0.1, halve, updates)
        (updates, steps), _none = jax.lax.scan(
            lambda carry, _: ((halve(carry[0]), carry[1] + 1), None), (updates, 0), None, length=2
        )
        share = optax.tree.vdot(updates, state[0]) / (optax.tree.vdot(state[0], state[0]) + 1e-3)
        updates = jax.tree.map(lambda u, s: u - 0.1 * share * s, updates, state[0])
        return updates, (updates, state[1] + steps)

    return optax.GradientTransformation(lambda p: (jax.tree.map(jnp.zeros_like, p), 0), update)


OPTIMIZERS = {
    "clip": clipped,
    "multi_steps": lambda: optax.MultiSteps(clipped(), 2).gradient_transformation(),
    "apply_if_finite": lambda: optax.apply_if_finite(clipped(), 2),
    "multi_transform": lambda: optax.multi_transform({True: clipped(), False: CLIPPED_SGD}, EARLY),
    "masked": lambda: optax.chain(optax.masked(optax.clip_by_global_norm(0.01), EARLY), optax.sgd(0.5)),
    "lamb": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.lamb(0.05, weight_decay=0.1)),
    "flatten": lambda: optax.flatten(clipped()),
    "prodigy": lambda: optax.contrib.prodigy(0.1),
    "conditionally_mask": lambda: optax.chain(
        optax.conditionally_mask(optax.clip_by_global_norm(0.01), lambda step: step % 2 == 0),
        optax.sgd(0.5),
    ),
    "noise": lambda: optax.chain(optax.add_noise(0.01, 0.5, jax.random.key(1)), clipped()),
    "lbfgs": lambda: optax.scale_by_lbfgs(memory_size=3),
    "injected": lambda: optax.inject_hyperparams(
        lambda learning_rate, norm: optax.chain(optax.clip_by_global_norm(norm), optax.sgd(learning_rate))
    )(learning_rate=optax.linear_schedule(0.5, 0.0, 10), norm=0.1),
    "loops": lambda: optax.chain(orthogonal_to_the_last(), optax.sgd(1.0)),
}


# With what nothing else in `make test` joins; random models have others.
OF_MANY_KINDS = ("conditionally_mask", "loops")


def make(optimizer, num_stages=4, **options):
    stages, training = scheduled.stages(num_stages), {"optimizer": optimizer}
    return engine.Pipeline(stages, num_micro_batches=2, **training, **options)


STEPS = list(np.random.default_rng(3).normal(size=(NUM_UPDATES, 2, 3, scheduled.SIZE)).astype("float32"))


def as_data(tree):
    def convert(leaf):
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return jax.random.key_data(leaf) if is_key else leaf

    return jax.tree.map(convert, tree)


TWO_IPUS = {"num_stages": 2, "device_mapping": (0, 1), "donate": True}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, TWO_IPUS) for name in OF_MANY_KINDS),
        *(
            pytest.param(
                name,
                {"device_mapping": (0, 1, 0, 2), "donate": name != "multi_steps"},
                marks=pytest.mark.thorough,
            )
            for name in OPTIMIZERS
            if name not in OF_MANY_KINDS
        ),
        ("flatten", {**TWO_IPUS, "devices": "one"}),
    ],
)
def test_equals_reference(name, options):
    """Also for two IPUs on one device."""
    if "devices" in options:
        options = {**options, "devices": jax.devices()[:1] * 2}
    pipeline = make(OPTIMIZERS[name](), **options)
    state = pipeline.init(jax.random.key(7), STEPS[0][0])
    expected = jax.tree.map(jnp.copy, models.on_one_device(state))
    places = [leaf.devices() for leaf in jax.tree.leaves((state.variables, state.optimizer_state))]
    for step in STEPS:
        before = jax.tree.map(np.array, state.variables)
        state, _outputs = pipeline.step(old := state, step)
        expected, _outputs = beside.step_plainly(pipeline, expected, step, optimizer=OPTIMIZERS[name]())
        models.assert_trees_close(state.variables, expected.variables)
        models.assert_trees_close(as_data(state.optimizer_state), as_data(expected.optimizer_state))
        if not options["donate"]:
            models.assert_trees_close(old.variables, before, 0)
        now = [leaf.devices() for leaf in jax.tree.leaves((state.variables, state.optimizer_state))]
        assert now == places


def programs_of(optimizer, **options):
    pipeline = make(optimizer, **options)
    pipeline.trace(STEPS[0][0])
    return pipeline.built.updates, find_facts(pipeline).sent


def test_a_global_norm_sends_scalars_only():
    updates, sent = programs_of(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)))
    assert [program.name for program in updates.updates] == [
        *(f"stage{index}_update_round0" for index in range(4)),
        "joint_update",
        *(f"stage{index}_update" for index in range(4)),
    ]
    # The sum runs over the leaves one after another: that of the first stage is one number by then.
    to_joint = [Sent(index, 3, "1 scalar", 4, "") for index in range(3)]
    from_joint = [Sent(3, index, "2 scalars", 5, "") for index in range(3)]  # the norm, and if it is small
    assert sent == tuple(sorted(to_joint + from_joint, key=lambda s: (s.source, s.target)))
    # One IPU, one program; two, a norm each.
    assert len(programs_of(clipped(), device_mapping=(0, 0, 0, 0))[0].updates) == 1
    assert len(programs_of(clipped(), device_mapping=(0, 0, 1, 1))[0].updates) == 5


@pytest.mark.parametrize("name", ["multi_steps", "apply_if_finite", "lamb", "masked", "multi_transform"])
def test_what_stands_around_a_global_norm_sends_scalars_only(name):
    _updates, sent = programs_of(OPTIMIZERS[name]())
    assert sent
    assert all("scalar" in s.what for s in sent)


def test_per_variable_transformations_are_one_program_per_ipu():
    updates, sent = programs_of(optax.adam(0.1))
    assert [program.name for program in updates.updates] == [f"stage{index}_update" for index in range(4)]
    assert sent == tuple(Sent(0, index, "1 scalar", 4, "") for index in (1, 2, 3))  # Adam's count


def test_leaves_move_where_they_are_concatenated():
    """Where most of the gradients are, the optimizer's state is too."""
    _updates, sent = programs_of(
        optax.flatten(optax.sgd(0.1, momentum=0.9)), num_stages=3, device_mapping=(0, 1, 1)
    )
    assert [s for s in sent if s.source == 0] == [Sent(0, 1, "float32[4, 4]", 4 * 4 * 4, "concatenate")]
    assert sum(s.num_bytes for s in sent if s.source == 1) == 4 * 4 * 4


def test_what_is_read_later_is_not_donated():
    """The first IPU makes the count anew; the second one reads the old one after it."""
    pipeline = make(optax.adam(0.1), num_stages=2, donate=True)
    state = pipeline.init(jax.random.key(0), STEPS[0][0])
    count = state.optimizer_state[0].count
    weights = state.variables["stage0/kernel"]
    pipeline.step(state, STEPS[0])
    assert weights.is_deleted()
    assert not count.is_deleted()


def test_leaves_that_start_as_one_number_are_made_without_xla():
    def init(params):
        filled = jax.tree.map(lambda leaf: jnp.full_like(leaf, 0.25), params)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.bfloat16), params)
        return filled, zeros, params, jnp.ones((), jnp.int32)

    optimizer = optax.GradientTransformation(init, lambda updates, state, params=None: (updates, state))
    pipeline = make(optimizer, num_stages=2)
    state = pipeline.init(jax.random.key(0), STEPS[0][0])
    filled, zeros, copied, one = state.optimizer_state
    for name, value in state.variables.items():
        np.testing.assert_array_equal(filled[name], np.full(value.shape, 0.25, "float32"))
        assert zeros[name].dtype == jnp.bfloat16
        np.testing.assert_array_equal(copied[name], value)
        assert filled[name].sharding == copied[name].sharding == value.sharding
    assert one == 1
    assert len([result for program in pipeline.built.updates.inits for result in program.results]) == len(
        copied
    )
    assert programs_of(clipped())[0].inits == ()


@pytest.mark.thorough
def test_a_sharded_loop():
    def body(x, labels):
        with scopes.ipu_shard(0):
            hidden = models.dense("a", 8, x)
        with scopes.ipu_shard(1):
            loss = models.cross_entropy(models.dense("b", 10, hidden), labels)
        GradientAccumulationOptimizerV2(clipped(), 2, reduction_method="MEAN").minimize(loss)
        outfeed.enqueue(loss)

    elements, outfeed = models.elements_of(4), IPUOutfeedQueue()
    infeed = IPUInfeedQueue(lambda: iter(elements))
    program = front.compile_program(lambda: loops.repeat(4, body, infeed_queue=infeed))
    (call,) = program.placement().calls
    assert [(s.source, s.target, s.what) for s in call.sent] == [
        (0, 1, "3 scalars"),  # a part of the norm, and the counts of Adam and its schedule
        (1, 0, "2 scalars"),
    ]
    table = "per weight update:\n  from   to     bytes  what       read by\n  IPU 0  IPU 1  "
    assert table in str(program.placement())
    with ipu.Session() as session:
        session.run([ipu.global_variables_initializer(), infeed.initializer])
        variables = jax.tree.map(jnp.asarray, session.variables)
        session.run(program)
        losses, trained = session.run(outfeed.dequeue()), session.variables

    def plain_loss(variables, x, labels):
        for name in ("a", "b"):
            x = jax.nn.relu(x @ variables[f"{name}/kernel"] + variables[f"{name}/bias"])
        return models.cross_entropy(x, labels)

    groups = [[element] for element in elements]
    expected, variables, _left = models.plain_loop(plain_loss, variables, groups, 2, clipped(), "MEAN")
    models.assert_trees_close(losses, expected[:, 0])
    models.assert_trees_close(trained, variables)


# What an optimizer tells.


def telling(told, inner):
    """An optimizer that tells a norm over all variables, a sum over one, nothing, and a condition."""

    def update(updates, state, params=None):
        norm = optax.tree.norm(updates)
        jax.debug.callback(lambda value: told.append(("norm", float(value))), norm)
        total = jnp.sum(updates["stage0/kernel"])
        jax.debug.callback(lambda value: told.append(("sum", float(value))), total)
        jax.debug.callback(lambda: told.append(("called", 0.0)))
        jax.lax.cond(
            norm > 0, lambda: jax.debug.callback(lambda: told.append(("positive", 0.0))), lambda: None
        )
        return inner.update(updates, state, params)

    return optax.GradientTransformation(inner.init, update)


@pytest.mark.parametrize(
    ("mapping", "inner"), [((0, 1), clipped()), ((0, 0), optax.sgd(0.1))], ids=["joint", "one"]
)
def test_what_is_called_in_an_update_is_called_once(mapping, inner):
    told, wanted = [], []
    pipeline = make(telling(told, inner), num_stages=2, device_mapping=mapping)
    state = pipeline.init(jax.random.key(7), STEPS[0][0])
    expected, optimizer = beside.copied(state), telling(wanted, inner)
    for step in STEPS[:2]:
        state, _outputs = pipeline.step(state, step)
        expected, _outputs = beside.step_plainly(pipeline, expected, step, optimizer=optimizer)
    jax.block_until_ready((state.variables, expected.variables))
    jax.effects_barrier()
    for kind in ("norm", "sum", "called", "positive"):
        found, plain = ([value for k, value in one if k == kind] for one in (told, wanted))
        assert len(found) == len(plain) == 2
        np.testing.assert_allclose(found, plain, rtol=1e-5)


@pytest.mark.parametrize("mapping", [[0, 1], pytest.param([0, 0], marks=pytest.mark.thorough)])
def test_an_update_that_raises_leaves_the_state_before_it(mapping):
    raising = []

    def check(value):
        if raising:
            raise ArithmeticError(f"a norm of {value}")

    def optimizer_function(rate, loss):
        def update(updates, state, params=None):
            jax.debug.callback(check, optax.tree.norm(updates))
            return optax.adam(rate).update(updates, state, params)

        made = optax.GradientTransformation(optax.adam(0.1).init, update)
        return ipu.pipelining_ops.OptimizerFunctionOutput(made, loss)

    model = front.Model(device_mapping=mapping, optimizer_function=optimizer_function)
    with ipu.Session() as session:
        session.run(model.initializer)
        model.run(session)
        before, number = session.variables, session.update_count()
        raising.append(True)
        with pytest.raises(Exception, match="a norm of"):
            session.run(model.program, {model.rate: 0.01})
        models.assert_trees_close(session.variables, before, 0)
        assert session.update_count() == number
        raising.clear()
        model.run(session)  # goes on
        assert session.update_count() == number + 1

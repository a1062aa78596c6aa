"""Updates of IPUs that differ: what is equal in them is a program of its own, compiled once."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ipu_pipeline import engine
from ipu_pipeline.engine.jaxprs import equal_parts
from tests.support import beside

NAMES = ["abc", "bca", "abc", "cab"]  # of a stage's kernel, bias and scale: their order differs


def block(index, x):
    kernel, bias, scale = NAMES[index]
    width = x.shape[-1]
    with engine.variable_scope(f"block{index}"):
        x = x @ engine.get_variable(kernel, (width, width))
        x = x + engine.get_variable(bias, (width,), initializer=jax.nn.initializers.zeros)
        return jnp.tanh(x) * engine.get_variable(scale, (1, width), initializer=jax.nn.initializers.ones)


def first(x, target):
    return block(0, x @ engine.get_variable("embedding", (x.shape[-1], target.shape[-1]))), target


def last(x, target):
    x = block(3, x) * engine.get_variable("norm", (1, x.shape[-1]), initializer=jax.nn.initializers.ones)
    return jnp.mean((x - target) ** 2)


def make(middle=(1, 2), **options):
    middle = [lambda x, target, index=index: (block(index, x), target) for index in middle]
    return engine.Pipeline(
        [first, *middle, last],
        num_micro_batches=2,
        optimizer=make_optimizer(),
        **options,
    )


def update_names(width=16, **options):
    """The names of a pipeline's programs of updates."""
    pipeline = make(**options)
    pipeline.trace(micro_batches(width)[0])
    return [program.name for program in pipeline.built.updates.updates]


def make_optimizer():
    return optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(optax.linear_schedule(0.1, 0.0, 10)))


def micro_batches(width, seed=0):
    random = np.random.default_rng(seed)
    return [
        (random.normal(size=(4, 3)).astype("float32"), random.normal(size=(4, width)).astype("float32"))
        for _number in range(2)
    ]


@pytest.fixture
def of_any_size(monkeypatch):
    monkeypatch.setattr(equal_parts, "_LEAST_BYTES", 0)
    monkeypatch.setattr(equal_parts, "_LEAST_SAVED", 1)


def test_what_ipus_have_in_common_is_one_program():
    pipeline = make()
    pipeline.trace(micro_batches(512)[0])
    programs = pipeline.built.updates.updates
    assert [program.name for program in programs] == [
        "stage0_update_round0_part0",
        "stage0_update_round0",  # the embedding's share of the norm, and the sum of this IPU's
        "stage1_update_round0",
        "stage2_update_round0",
        "stage3_update_round0_part0",
        "stage3_update_round0",
        "joint_update",
        "stage0_update_part0",
        "stage0_update",
        "stage1_update",
        "stage2_update",
        "stage3_update_part0",
        "stage3_update",
    ]
    for program in programs:  # a new value takes the memory of the old one, which is in the same program
        made = {value for value in program.results if value.kind != "sent"}
        assert all(value in program.arguments for value in made)
    texts = collections.Counter(
        jax.jit(program.function).lower(*program.function.closed_jaxpr.in_avals).as_text()
        for program in programs
    )
    assert sorted(texts.values()) == [1, 1, 1, 1, 1, 4, 4]


def test_small_updates_stay_whole():
    assert not [name for name in update_names() if "part" in name]


def test_one_ipu_has_one_program(of_any_size):
    assert update_names(device_mapping=[0] * 4) == ["stage0_update"]


def test_the_results_are_those_of_a_plain_loop(of_any_size):
    pipeline = make(middle=(), donate=True)
    beside.train(pipeline, [micro_batches(16, seed) for seed in range(2)])
    assert any("part" in program.name for program in pipeline.built.updates.updates)

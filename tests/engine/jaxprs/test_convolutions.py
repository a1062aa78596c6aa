"""Convolutions as products of matrices: the same numbers as `lax.conv_general_dilated`, and none left."""

import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from ipu_pipeline import engine
from ipu_pipeline.engine.jaxprs import convolutions
from ipu_pipeline.engine.jaxprs.convolutions import has_convolutions, with_fast_convolutions

FIRST = ("NCHW", "OIHW", "NCHW")
LAST = ("NHWC", "HWIO", "NHWC")


def draw(seed, *shape, dtype=np.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def make_convolution(choose):
    """A convolution of one to three lengths, its operands in float64, and arrays for its gradients."""
    num = choose.choice([1, 2, 2, 3])
    groups, per_group = choose.choice([1, 1, 2, 3]), choose.choice([1, 2, 3])
    sizes = {"N": choose.choice([1, 2, 4]), "C": groups * per_group, "I": per_group}
    sizes["O"] = groups * choose.choice([1, 2])
    letters = "DHW"[:num]
    lengths = [choose.randint(3, 7) for _ in letters]
    taps = [choose.randint(1, 4) for _ in letters]
    layouts = [f"NC{letters}", f"OI{letters}", f"NC{letters}"]
    if choose.random() < 0.3:
        layouts = [f"N{letters}C", f"{letters}IO", f"N{letters}C"]
    elif choose.random() < 0.3:
        layouts = ["".join(choose.sample(layout, num + 2)) for layout in layouts]
    options = {
        "window_strides": [choose.choice([1, 1, 2, 3]) for _ in letters],
        "padding": [(choose.randint(-1, 3), choose.randint(-1, 3)) for _ in letters],
        "lhs_dilation": [choose.choice([1, 1, 1, 2]) for _ in letters],
        "rhs_dilation": [choose.choice([1, 1, 2]) for _ in letters],
        "feature_group_count": groups,
    }

    def array(layout, values):
        known = {**sizes, **dict(zip(letters, values, strict=True))}
        return draw(choose.randint(0, 999), *(known[letter] for letter in layout), dtype=np.float64)

    image, kernel = array(layouts[0], lengths), array(layouts[1], taps)

    def convolve(x, w):
        return lax.conv_general_dilated(x, w, dimension_numbers=tuple(layouts), **options)

    return convolve, image, kernel


@pytest.mark.parametrize(
    "seed", [1, 2, 3, *(pytest.param(n, marks=pytest.mark.thorough) for n in range(4, 16))]
)
def test_random_convolutions_and_their_gradients(seed, monkeypatch):
    choose = random.Random(seed)  # noqa: S311  # shapes, the same in every run
    monkeypatch.setattr(convolutions, "_BLOCK_BYTES", choose.choice([100, 3000, 10**9]))
    monkeypatch.setattr(convolutions, "_FEW_TAPS", choose.choice([1, 9]))
    monkeypatch.setattr(convolutions, "_MAX_SUMMED", choose.choice([1, 8]))
    monkeypatch.setattr(convolutions, "_FEW_PLACES", choose.choice([1, 10, 10**9]))
    monkeypatch.setattr(convolutions, "_MAX_TAPS", choose.choice([1, 64, 64]))
    with jax.enable_x64(True):
        for _attempt in itertools.count():
            convolve, image, kernel = make_convolution(choose)
            try:
                shape = jax.eval_shape(convolve, image, kernel).shape
            except ValueError:  # the padded image is smaller than the kernel
                continue
            if 0 not in shape:
                break
        pulled, pushed = draw(1, *shape, dtype=np.float64), draw(2, *image.shape, dtype=np.float64)

        def everything(x, w):
            y, pull = jax.vjp(convolve, x, w)
            again = jax.grad(lambda w: jnp.vdot(jax.vjp(convolve, x, w)[1](pulled)[0], pushed))(w)
            return [y, *pull(pulled), again]

        expected = everything(image, kernel)
        fast = jax.jit(with_fast_convolutions(everything))
        if convolutions._MAX_TAPS > 1:
            assert not has_convolutions(jax.make_jaxpr(fast)(image, kernel).jaxpr)
        for one, other in zip(fast(image, kernel), expected, strict=True):
            difference = np.linalg.norm(one - other)
            assert difference <= 1e-12 * np.linalg.norm(other)


def convolve(x, w, layouts=FIRST, groups=1):
    return lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=layouts, feature_group_count=groups
    )


@pytest.mark.parametrize("within", ["scan", "while", "cond", "checkpoint", "jit", "custom_vjp"])
def test_loops_branches_and_calls_have_none_left(within):
    x, w = draw(0, 2, 3, 5, 5), draw(1, 3, 3, 3, 3)

    def step(x):
        return jnp.tanh(convolve(x, w))

    ways = {
        "scan": lambda x: lax.scan(lambda x, _: (step(x), None), x, None, length=3)[0],
        "while": lambda x: lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, step(s[1])), (0, x))[1],
        "cond": lambda x: lax.cond(x[0, 0, 0, 0] > 0, step, lambda x: -step(x), x),
        "checkpoint": lambda x: jax.grad(lambda x: jax.checkpoint(step)(x).sum())(x),
        "jit": lambda x: jax.jit(step)(x),
    }
    if within == "custom_vjp":
        ruled = jax.custom_vjp(step)
        ruled.defvjp(lambda x: (step(x), None), lambda kept, g: (g,))
        ways[within] = ruled

    def function(x):
        return [ways[within](x)]

    assert has_convolutions(jax.make_jaxpr(function)(x).jaxpr)
    fast = with_fast_convolutions(function)
    assert not has_convolutions(jax.make_jaxpr(fast)(x).jaxpr)
    np.testing.assert_allclose(jax.jit(fast)(x)[0], jax.jit(function)(x)[0], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("layouts", "groups"), [(FIRST, 4), (LAST, 1)])
def test_narrow_floats_are_summed_wide_and_rounded_once(layouts, groups, monkeypatch):
    monkeypatch.setattr(convolutions, "_BLOCK_BYTES", 1000)  # several blocks, whose sums are added
    x, w = draw(0, 8, 4, 9, 9, dtype=jnp.bfloat16), draw(1, 4, 4 // groups, 3, 3, dtype=jnp.bfloat16)
    if layouts is LAST:
        x, w = x.transpose(0, 2, 3, 1), w.transpose(2, 3, 1, 0)

    def everything(x, w):
        y, pull = jax.vjp(lambda x, w: convolve(x, w, layouts, groups), x, w)
        return [y, *pull(jnp.ones_like(y))]

    exact = everything(*(array.astype(jnp.float32) for array in (x, w)))
    for one, other in zip(jax.jit(with_fast_convolutions(everything))(x, w), exact, strict=True):
        assert one.dtype == jnp.bfloat16
        # A unit in the last place of bfloat16 is 2**-8; half of it is what rounding once costs.
        np.testing.assert_allclose(
            one.astype(np.float32), other, rtol=2**-8, atol=2**-12 * np.abs(other).max()
        )


def test_convolutions_of_integers_and_of_nothing_stay():
    fast = with_fast_convolutions(lambda x, w: [convolve(x, w)])
    for images, dtype in ((1, jnp.int32), (0, jnp.float32)):
        x, w = draw(0, images, 2, 4, 4).astype(dtype), draw(1, 2, 2, 3, 3).astype(dtype)
        assert has_convolutions(jax.make_jaxpr(fast)(x, w).jaxpr)
        np.testing.assert_array_equal(jax.jit(fast)(x, w)[0], convolve(x, w))


def test_names_and_lines_stay_with_what_they_are_of():
    def function(x, w):
        with jax.named_scope("here"):
            return [convolve(x, w)]

    fast = jax.make_jaxpr(with_fast_convolutions(function))(draw(0, 1, 2, 4, 4), draw(1, 2, 2, 3, 3))
    named = [str(equation.source_info.name_stack) for equation in fast.jaxpr.eqns]
    assert named
    assert all("here" in name for name in named)


def test_programs_are_rewritten_where_they_run():
    def first(images):
        kernel = engine.get_variable("kernel", shape=(4, 1, 3, 3))
        return jax.nn.relu(convolve(images, kernel)).mean((2, 3))

    def last(features):
        return jnp.mean((features @ engine.get_variable("weights", shape=(4, 3))) ** 2)

    pipeline = engine.Pipeline([first, last], num_micro_batches=4)
    pipeline.init(jax.random.key(0), jnp.ones((2, 1, 5, 5)))
    made, run = pipeline.programs, pipeline.prepare().programs
    assert [own.forward.has_convolutions for own in made] == [True, False]
    assert run[0].forward.function is not made[0].forward.function
    assert run[1].forward.function is made[1].forward.function
    assert made[0].on("gpu").forward.function is made[0].forward.function

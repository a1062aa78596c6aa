"""`pipelining_ops.auto_stages` and `split`: in compiled functions and outside, and in programs."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ipu_pipeline as ipu
from ipu_pipeline import pipelining_ops
from tests.support import front

COUNT = 2


def first(rate, x, labels):
    return rate, x.reshape(x.shape[0], -1), labels


def make_dense(size):
    def dense(rate, x, labels):
        with ipu.variable_scope(f"dense{size}"):
            return rate, ipu.layers.Dense(size, activation=jax.nn.relu)(x), labels

    return dense


def last(rate, x, labels):
    with ipu.variable_scope("last"):
        logits = ipu.layers.Dense(10)(x)
    return rate, jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


LAYERS = [first, *map(make_dense, (24, 12)), last]


def optimizer_function(rate, loss):
    return pipelining_ops.OptimizerFunctionOutput(optax.sgd(rate), loss)


class Queues:
    """The queues of a program, over two updates of random images."""

    def __init__(self):
        rng = np.random.default_rng(0)
        images = rng.normal(size=(2 * COUNT, 8, 4, 4)).astype(np.float32)
        labels = rng.integers(0, 10, (2 * COUNT, 8)).astype(np.int32)
        self.infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(list(zip(images, labels, strict=True)))
        self.outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
        self.options = {"infeed_queue": self.infeed, "optimizer_function": optimizer_function}

    def given(self, options):
        return {**self.options, "gradient_accumulation_count": COUNT, "measure": False, **options}

    def auto(self, num_stages=3, **options):
        return pipelining_ops.auto_stages(LAYERS, num_stages, **self.given(options))

    def split(self, model, num_stages=3, **options):
        return pipelining_ops.split(model, num_stages, **self.given(options))

    def pipeline(self, stages, inputs, **options):
        given = {**self.options, "outfeed_queue": self.outfeed, "outfeed_loss": True}
        given["device_mapping"] = [0] * len(stages)  # one program compiles faster
        return pipelining_ops.pipeline(stages, COUNT, inputs=inputs, **(given | options))

    def run(self, program, feed=None):
        """The losses of a run, and the variables after it."""
        with ipu.Session(seed=1) as session:
            session.run(self.infeed.initializer)
            session.run(program, feed or {})
            return session.run(self.outfeed.dequeue()), session.variables


def train(queues, stages):
    """Losses and variables after two updates."""
    rate = ipu.placeholder(np.float32, [], name="rate")
    program = front.compile_program(lambda rate: queues.pipeline(stages, [rate], repeat_count=2), [rate])
    return queues.run(program, {rate: 0.1})


def whole(rate, x, labels):
    """The layers as one function, in which later ones have names that go on counting."""
    values = first(rate, x, labels)
    for layer in LAYERS[1:-1]:
        values = layer(*values)
    x = values[1]
    for _number in range(2):
        x = x + ipu.layers.Dense(12)(x)  # dense, dense_1
    return last(rate, x, labels)


def check(found, expected):
    """Losses and variables."""
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    assert sorted(found[1]) == sorted(expected[1])
    for name, value in expected[1].items():
        np.testing.assert_allclose(found[1][name], value, rtol=1e-5, atol=1e-6)


def test_layers_outside_of_a_compiled_function():
    queues = Queues()
    stages = queues.auto(inputs=[ipu.placeholder(np.float32, [])], measure=True)
    assert isinstance(stages, pipelining_ops.AutoStages)
    assert stages.table.layers == ("first", "dense.0", "dense.1", "last")
    assert [stage.__name__ for stage in stages] == [
        "-".join(LAYERS[layer].__name__ for layer in group) for group in stages.groups
    ]


def test_a_function_inside_and_outside_of_a_compiled_function():
    """Inside, it captures a placeholder and gets the global step."""
    expected = train(Queues(), [whole])
    assert {"dense/kernel", "dense_1/kernel", "dense24/dense/kernel"} <= set(expected[1])
    queues = Queues()
    outside = queues.split(whole, inputs=[ipu.placeholder(np.float32, [])])
    check(train(queues, outside), expected)
    assert isinstance(outside, pipelining_ops.AutoStages)
    assert outside.table.unit == "part"
    scale, inside = ipu.placeholder(np.float32, [], name="scale"), Queues()

    def model(rate, x, labels):
        return whole(rate, x * scale, labels)

    def compiled():
        rate = 0.1 / (ipu.get_global_step().astype(np.float32) + np.float32(1.0))
        return inside.pipeline(inside.split(model, 2, inputs=[rate]), [rate])

    losses, _variables = inside.run(front.compile_program(compiled), {scale: 1.0})
    np.testing.assert_allclose(losses, expected[0][:COUNT], rtol=1e-5)


@pytest.mark.parametrize("reuse", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_two_pipelines_of_one_model(reuse):
    """Layers are numbered on in the second one, and shared where the scope says so, as without a split."""
    found = []
    for is_split in (False, True):
        queues, other = Queues(), Queues()
        rate = ipu.placeholder(np.float32, [])

        def compiled(rate, is_split=is_split, queues=queues, other=other):
            model = named if reuse else whole
            for own in (queues, other):
                if own is queues or not reuse:
                    stages = own.split(model, 2, inputs=[rate]) if is_split else [model]
                scope = ipu.get_variable_scope()
                with ipu.variable_scope(scope, reuse=reuse and own is other):
                    own.pipeline(stages, [rate], name=f"pipeline{own is other}")

        found.append(front.compile_program(compiled, [rate]).variables)
    assert sorted(found[0]) == sorted(found[1])
    assert ("dense_2/kernel" in found[0]) is not reuse


def named(rate, x, labels):
    """A model that may be called again where variables are shared."""
    x = x.reshape(x.shape[0], -1)
    for number in range(3):
        with ipu.variable_scope(f"named{number}"):
            w = ipu.get_variable("w", (16, 16))
        x = x + jnp.tanh(x @ w)
    with ipu.variable_scope("named_last"):
        logits = x @ ipu.get_variable("w", (16, 10))
    return rate, jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


def test_a_program_shows_where_it_is_cut_and_why(tmp_path):
    """In its placement, its summary, its profile and the page of that; with a global step as input."""
    queues = Queues()

    def compiled():
        rate = 0.1 / (ipu.get_global_step().astype(np.float32) + 1)
        return queues.pipeline(queues.split(whole, 2, inputs=[rate]), [rate], device_mapping=None)

    program = front.compile_program(compiled)
    (call,) = program.placement().calls
    lines = call.cuts.splitlines()
    assert lines[0].startswith("cut by parts, counted, all ")
    assert [line.split()[:2] for line in lines[2:4]] == [["0", "0"], ["1", "1"]]
    assert lines[2].split()[-1] in ("us", "ms")  # nothing crosses before the first stage
    assert lines[3].split()[-1].endswith("B")
    assert re.search(r"a step takes .*, stage \d is the longest; .*best other ", lines[4])
    assert call.cuts in str(program.placement())
    assert call.cuts in str(program.summary())
    with ipu.reports.capture(tmp_path / "report") as captured:
        queues.run(program)
    assert captured.profile.pipelines[0].cuts == call.cuts
    page = (tmp_path / "report" / "report.html").read_text()
    assert "<h3>Where it is cut</h3>\n<pre>cut by parts" in page
    by_hand = front.compile_program(lambda: Queues().pipeline(LAYERS, [np.float32(0.1)]))
    assert by_hand.placement().calls[0].cuts == ""


def test_inference_and_counting():
    queues = Queues()
    stages = queues.auto(2, inputs=[np.float32(0.1)], optimizer_function=None)
    assert stages.table.source == "counted"
    assert set(stages.table.update_seconds) == {0.0}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_stages": 5}, ValueError, "num_stages must be an integer from 1 to the number of layers, 4"),
        ({"gradient_accumulation_count": None}, ValueError, "accumulation_count must be specified"),
        ({"gradient_accumulation_count": 0}, ValueError, "gradient_accumulation_count"),
        ({"device_mapping": [0]}, ValueError, "must be mapped to an IPU: 1 mappings != 3 stages"),
        ({"pipeline_schedule": "gouped"}, ValueError, "gouped"),
        ({"optimizer_function": 3}, TypeError, "optimizer_function"),
        ({"tensor_parallel": 2}, TypeError, "tensor_parallel must be a TensorParallel"),
    ],
)
def test_arguments_that_cannot_be(options, error, message):
    with pytest.raises(error, match=message):
        Queues().auto(inputs=[np.float32(0.1)], **options)


def test_a_count_that_is_known_at_run_only():
    count = ipu.placeholder(np.int32, [], name="count")
    with pytest.raises(TypeError, match="must be an integer here, as the best split depends on it"):
        Queues().auto(inputs=[np.float32(0.1)], gradient_accumulation_count=count)

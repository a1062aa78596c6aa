"""Losses that are sums over tokens: gradients are those of one large batch, however long its rows are."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ipu_pipeline as ipu
from ipu_pipeline.optimizers import LossScalingOptimizer, MapGradientOptimizer
from ipu_pipeline.pipelining_ops import OptimizerFunctionOutput, PipelineSchedule
from tests.support import front, models

LENGTHS = [5, 1, 3, 4, 2, 5, 5, 1]
COUNT = 4


def rows(dtype):
    rng = np.random.default_rng(0)
    tokens = rng.normal(size=(len(LENGTHS), 5, 3)).astype(dtype)
    masks = (np.arange(5) < np.array(LENGTHS)[:, None]).astype(dtype)
    return [{"tokens": t, "mask": m} for t, m in zip(tokens, masks, strict=True)]


def losses(parameters, tokens, mask):
    return jnp.sum(mask * jnp.sum((jnp.tanh(tokens @ parameters["a"]) @ parameters["b"]) ** 2, -1))


@jax.jit
def differentiate(parameters, tokens, mask):
    return jax.grad(lambda parameters: losses(parameters, tokens, mask) / mask.sum())(parameters)


def expected(dtype, make_optimizer, num_updates=2):
    """One large batch for each update."""
    parameters = {"a": jnp.full((3, 4), 0.2, dtype), "b": jnp.full((4, 2), 0.3, dtype)}
    optimizer = make_optimizer()
    state = optimizer.init(parameters)
    given = rows(dtype)
    for number in range(num_updates):
        part = given[number * COUNT : (number + 1) * COUNT]
        tokens, mask = (np.concatenate([row[key] for row in part]) for key in ("tokens", "mask"))
        gradients = differentiate(parameters, tokens, mask)
        with jax.numpy_dtype_promotion("standard"):
            changes, state = optimizer.update(gradients, state, parameters)
            parameters = optax.apply_updates(parameters, changes)
    return parameters


class Model(front.Pipelined):
    """Three stages, whose last returns the loss and what `weigh` makes of the mask, its weight."""

    def __init__(self, dtype, make_optimizer, mapping=(0, 1, 2), weigh=jnp.sum, fields=None, **options):
        def first(tokens, mask):
            return jnp.tanh(tokens @ ipu.get_variable("a", (3, 4), dtype, 0.2)), mask

        def second(x, mask):
            return x @ ipu.get_variable("b", (4, 2), dtype, 0.3), mask

        def last(x, mask):
            return jnp.sum(mask * jnp.sum(x**2, -1)), weigh(mask)

        def optimizer_function(loss, weight):
            given = {"loss_weight": weight} | (fields or {})
            return OptimizerFunctionOutput(make_optimizer(), loss, **given)

        options |= {"optimizer_function": optimizer_function, "device_mapping": mapping, "repeat_count": 2}
        super().__init__([first, second, last], COUNT, lambda: iter(rows(dtype)), **options)

    def train(self):
        outputs, variables = self.once()
        assert {*variables} == {"a", "b"} == {spec.name for spec in ipu.trainable_variables()} & {"a", "b"}
        return variables, outputs


def clipped():
    return optax.chain(optax.clip_by_global_norm(0.3), optax.adamw(0.05))


def sgd():
    return optax.sgd(0.1)


SEQUENTIAL = {"pipeline_schedule": PipelineSchedule.Sequential}


@pytest.mark.parametrize(
    ("mapping", "reduction", "make_optimizer", "options"),
    [
        ([0, 0, 0], "mean", sgd, {}),
        pytest.param([0, 1, 0], "running_mean", clipped, SEQUENTIAL, marks=pytest.mark.thorough),
    ],
)
def test_equals_one_large_batch(mapping, reduction, make_optimizer, options):
    with jax.enable_x64(True):
        model = Model(np.float64, make_optimizer, mapping, reduction_method=reduction, **options)
        variables, (sums, weights) = model.train()
        models.assert_trees_close(variables, expected(np.float64, make_optimizer), 1e-12)
        assert weights.ravel().tolist() == LENGTHS
        assert sums.shape == weights.shape


def test_weights_are_counted_in_float32():
    """However gradients are accumulated; and whole numbers may be weights."""

    def weigh(mask):
        return jnp.sum(mask).astype(jnp.int32)

    model = Model(np.float32, sgd, [0, 0, 0], weigh=weigh, gradient_accumulation_dtype=jnp.bfloat16)
    variables, _outputs = model.train()
    models.assert_trees_close(variables, expected(np.float32, sgd), 1e-2)


def test_with_loss_scaling_and_a_list_of_variables():
    scaled = Model(np.float32, lambda: LossScalingOptimizer(optax.sgd(0.1), 1024), [0, 0, 0])
    models.assert_trees_close(scaled.train()[0], expected(np.float32, sgd), 1e-5)
    some = Model(np.float32, sgd, [0, 0, 0], fields={"compute_gradients_kwargs": {"var_list": ["a"]}})
    variables, _outputs = some.train()
    assert (variables["b"] == np.float32(0.3)).all()
    assert not (variables["a"] == np.float32(0.2)).all()


def test_no_weight_at_all():
    model = Model(np.float32, sgd, [0, 0, 0], weigh=lambda mask: 0 * jnp.sum(mask))
    variables, _outputs = model.train()
    assert (variables["a"] == np.float32(0.2)).all()
    assert (variables["b"] == np.float32(0.3)).all()


def test_wrong_weights():
    for weigh in (lambda mask: mask, lambda mask: mask[0] > 0):
        with pytest.raises(ValueError, match="loss_weight must be a scalar, an integer or floating-point"):
            Model(np.float32, sgd, weigh=weigh)
    mapped = lambda: MapGradientOptimizer(optax.sgd(0.1), lambda gradient, variable: gradient)  # noqa: E731
    with pytest.raises(ValueError, match="loss_weight and a MapGradientOptimizer cannot be combined"):
        Model(np.float32, mapped)


@pytest.mark.thorough
def test_checkpoints_are_those_without_weights(tmp_path):
    values = None
    for number, fields in enumerate(({}, {"loss_weight": None}, {})):
        model = Model(np.float32, sgd, [0, 0, 0], fields=fields)
        with ipu.Session() as session:
            if values is not None:
                session.restore(tmp_path / str(number - 1), infeeds=False)
                models.assert_trees_close(session.variables, values, 0)
            session.run([model.initializer, model.program])
            session.save(tmp_path / str(number))
            values = session.variables


@pytest.mark.thorough
def test_losses_of_two_dtypes_in_one_session():
    with jax.enable_x64(True), ipu.Session() as session:
        for dtype, scope in ((np.float32, "narrow"), (np.float64, "wide")):
            with ipu.variable_scope(scope):
                model = Model(dtype, sgd, [0, 0, 0], name=scope)
            session.run([model.initializer, model.program])

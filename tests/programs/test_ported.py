"""The programs in `ported`: they run, their losses fall, and they compute what a plain loop computes.

Runs are short where there are ReLUs: sooner or later an activation is so near to 0 that rounding decides
whether it has a gradient.
"""

import functools
import itertools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ipu_pipeline as ipu
from ipu_pipeline import datasets, utils
from ipu_pipeline.engine import reference
from ipu_pipeline.engine.state import PipelineState
from ipu_pipeline.ground import warned
from tests.programs.ported import (
    bert,
    click_through_rate,
    custom_gradient,
    estimator_cnn,
    inspecting_tensors,
    reinforcement_learning,
    resnet,
    sales_forecasting,
    unet_industrial,
)
from tests.support import front, models
from tests.support.recurrent_formulas import plain_gru, plain_lstm


@pytest.fixture(autouse=True)
def as_in_a_new_process(monkeypatch):
    monkeypatch.setattr(warned, "_warned", set())
    monkeypatch.setattr(utils, "_seed", 0)


def plain_loop(program, start, updates, make_optimizer, seed=0, is_mean=False, find_weight=None):
    """Weight updates on one device, each from `jax.grad` of one micro-batch after another.

    Args:
      program: of one pipeline; of it only what its stages compute is used.
      start: the variables.
      updates: for each update its micro-batches, and the learning rate, which the program has as its input.
      make_optimizer: takes the learning rate.
      seed: the session's.
      is_mean: whether gradients are divided by the number of micro-batches.
      find_weight: what gradients are divided by, from what the last stage returned for each micro-batch.

    Returns:
      The losses, and the variables.
    """
    traced = program.calls[0].pipeline.traced
    specs = traced.variables.values()
    hidden = {spec.name: jnp.zeros(spec.shape, spec.dtype) for spec in specs if spec.name not in start}
    trained = [spec.name for spec in specs if spec.trainable and spec.name in start]
    variables = jax.tree.map(jnp.asarray, {**start, **hidden})
    optimizer_state, losses = None, []

    @jax.jit
    def gradients(variables, micro_batch, number, count, rate):
        state = PipelineState(variables, None, np.int32(0), count, jax.random.key(seed))
        return reference.gradients(traced, state, micro_batch, number, [rate], trained)

    @jax.jit
    def updated(parameters, total, optimizer_state, rate):
        with jax.numpy_dtype_promotion("standard"):
            changes, state = make_optimizer(rate).update(total, optimizer_state, parameters)
            return optax.apply_updates(parameters, changes), state

    for update, (micro_batches, rate) in enumerate(updates):
        before, total, all_outputs = variables, None, []
        for number, micro_batch in enumerate(micro_batches):
            loss, found, outputs, variables = gradients(
                variables, micro_batch, np.int32(number), np.int32(update), rate
            )
            total = found if total is None else jax.tree.map(jnp.add, total, found)
            losses.append(loss)
            all_outputs.append(outputs)
        divisor = len(micro_batches) if is_mean else 1 if find_weight is None else find_weight(all_outputs)
        total = jax.tree.map(lambda value, by=divisor: value / by, total)
        parameters = {name: before[name] for name in trained}
        if optimizer_state is None:
            optimizer_state = jax.jit(make_optimizer(rate).init)(parameters)
        parameters, optimizer_state = updated(parameters, total, optimizer_state, rate)
        variables = {**variables, **parameters}
    return np.array(losses), {name: np.asarray(variables[name]) for name in sorted(start)}


def plain_outputs(program, variables, micro_batches):
    """What the last stage of a program that infers returns, for one micro-batch after another."""
    traced = program.calls[0].pipeline.traced

    @jax.jit
    def outputs(micro_batch):
        state = PipelineState(variables, None, np.int32(0), np.int32(0), jax.random.key(0))
        return reference.gradients(traced, state, micro_batch, 0, [], [])[2]

    return np.array([outputs(micro_batch) for micro_batch in micro_batches])


def initial_variables(program, seed):
    with ipu.Session(seed) as session:
        session.create_variables(program)
        return session.variables


def make_updates(dataset, rates, count):
    """The first micro-batches of a data set, so many for each learning rate."""
    micro_batches = iter(dataset)
    return [(list(itertools.islice(micro_batches, count)), np.float32(rate)) for rate in rates]


# The programs


def run_unet(argv):
    """A run's variables and what the estimator did last, and a plain loop's losses and variables."""
    args = unet_industrial.parse_args(argv)
    estimator, results = unet_industrial.run(args)
    names = [name for name in estimator.get_variable_names() if name != "global_step"]
    variables = {name: estimator.get_variable_value(name) for name in names}
    program = compile_spec(ipu.ModeKeys.TRAIN, estimator.params)
    count = args.gradient_accumulation_count
    rates = [args.learning_rate] * (estimator.get_variable_value("global_step") // count)
    dataset = unet_industrial.training_input_fn(estimator.params)()
    start, updates = initial_variables(program, args.seed), make_updates(dataset, rates, count)

    def make_optimizer(rate):
        return optax.rmsprop(rate, decay=0.9, eps=1e-10, initial_scale=1.0)

    expected = plain_loop(program, start, updates, make_optimizer, is_mean=True)
    return variables, results, expected


def compile_spec(mode, params):
    """What an estimator compiles."""
    spec = unet_industrial.model_fn(mode, params)
    return front.compile_program(
        lambda: ipu.pipelining_ops.pipeline(
            spec.computational_stages,
            gradient_accumulation_count=spec.gradient_accumulation_count,
            infeed_queue=ipu.ipu_infeed_queue.IPUInfeedQueue(unet_industrial.eval_input_fn(params)),
            outfeed_queue=ipu.ipu_outfeed_queue.IPUOutfeedQueue(),
            optimizer_function=spec.optimizer_function if mode == ipu.ModeKeys.TRAIN else None,
        )
    )


def assert_evaluated(argv, variables, metrics):
    params = vars(unet_industrial.parse_args(argv))
    program = compile_spec(ipu.ModeKeys.EVAL, params)
    expected = plain_outputs(program, variables, unet_industrial.eval_input_fn(params))
    np.testing.assert_allclose([metrics["loss"], metrics["dice"]], expected.mean(axis=0), rtol=1e-5)


@pytest.mark.thorough
def test_unet_goes_on_evaluates_and_predicts(tmp_path):
    """Skip connections cross stages; an estimator trains."""
    argv = ["--steps", "16", "--base-filters", "8", "--model-dir", str(tmp_path)]
    unet_industrial.main([*argv, "--exec-mode", "train"])
    variables, metrics, (losses, expected) = run_unet(argv)
    assert len(losses) == 32
    assert losses[-8:].mean() < 0.95 * losses[:8].mean()
    models.assert_trees_close(variables, expected)
    assert_evaluated(argv, variables, metrics)
    _estimator, masks = unet_industrial.run(unet_industrial.parse_args([*argv, "--exec-mode", "predict"]))
    params = vars(unet_industrial.parse_args(argv))
    program = compile_spec(ipu.ModeKeys.PREDICT, params)
    expected = plain_outputs(program, variables, unet_industrial.eval_input_fn(params))
    np.testing.assert_allclose(masks, expected.reshape(masks.shape), rtol=1e-5)


def run_bert(argv):
    """The losses of a run's micro-batches, for each token, and its variables; and those of a plain loop."""
    args = bert.parse_args(argv)
    bert.configure(args)
    graph = bert.Graph(args)
    (mlm_losses, nsp_losses, num_tokens), variables = bert.train(args, graph)
    rates = [bert.learning_rate_at(args, step) for step in range(args.steps)]
    updates = make_updates(
        bert.PretrainingData(args),
        np.repeat(rates, args.batches_per_step),
        args.gradient_accumulation_count,
    )
    losses, expected = plain_loop(
        graph.train,
        initial_variables(graph.train, args.seed),
        updates,
        lambda rate: bert.get_optimizer(args, rate),
        seed=args.seed,
        find_weight=lambda outputs: sum(number for _mlm, _nsp, number, *_captured in outputs),
    )
    return (mlm_losses / num_tokens + nsp_losses, variables), (losses / num_tokens, expected)


@pytest.mark.thorough
def test_bert():
    """Embeddings and heads have one table; the loss is a sum over tokens, whose number the update sees.

    With LAMB, or where the norm is clipped, it would see the gradients' direction only.
    """
    options = "--steps 3 --warmup-steps 1 --dropout-prob 0 --optimizer momentum --base-learning-rate 0.1"
    found, expected = run_bert([*options.split(), "--max-grad-norm", "100"])
    losses, variables = found
    assert losses[-8:].mean() < losses[:8].mean()
    assert [name for name in variables if "word_embeddings" in name] == ["bert/embeddings/word_embeddings"]
    models.assert_trees_close(found, expected)


@pytest.mark.thorough
def test_bert_with_everything(tmp_path):
    """Dropout, too: the plain loop has the same keys. Later a run goes on from an older checkpoint."""
    argv = ["--steps", "4", "--save-path", str(tmp_path), "--steps-per-save", "2"]
    found, expected = run_bert([*argv, "--recompute", "--offload-optimizer"])
    models.assert_trees_close(found, expected)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["4", "8"]
    shutil.rmtree(tmp_path / "8")
    args = bert.parse_args([*argv, "--restore", "--layers-per-stage", "2"])
    bert.configure(args)
    (mlm_losses, nsp_losses, num_tokens), variables = bert.train(args, bert.Graph(args))
    losses, expected = found
    models.assert_trees_close((mlm_losses / num_tokens + nsp_losses, variables), (losses[16:], expected))


@pytest.mark.thorough
def test_bert_in_bfloat16():
    """Variables, accumulators and the optimizer are in float32."""
    options = "--precision 16.32 --num-layers 1 --optimizer adamw --base-learning-rate 0.01"
    args = bert.parse_args(options.split())
    bert.configure(args)
    (mlm_losses, _nsp_losses, num_tokens), variables = bert.train(args, bert.Graph(args))
    first, last = (
        mlm_losses[part].sum() / num_tokens[part].sum() for part in (slice(16), slice(-16, None))
    )
    assert last < 0.9 * first
    assert {value.dtype.name for value in variables.values()} == {"float32"}


def run_resnet(argv, is_compared=True):
    args = resnet.parse_args(argv)
    resnet.configure(args)
    digits = datasets.load_digits()
    train, valid = resnet.training_graph(args, digits), resnet.validation_graph(args, digits)
    history, variables = resnet.train_process(args, train, valid)
    losses = np.concatenate([losses for losses, _accuracy in history])
    if not is_compared:
        return losses, variables
    images = digits.train_images[..., np.newaxis]
    batches = datasets.TrainingBatches(images, digits.train_labels, args.batch_size, args.seed)
    rates = [resnet.learning_rate_at(args, epoch) for epoch in range(args.epochs)]
    updates = make_updates(
        batches, np.repeat(rates, args.updates_per_epoch), args.gradient_accumulation_count
    )

    def make_optimizer(rate):
        def is_decayed(parameters):
            return {name: name.endswith("kernel") for name in parameters}

        decay = optax.add_decayed_weights(args.weight_decay, is_decayed)
        return optax.chain(decay, optax.sgd(rate, args.momentum))

    start = initial_variables(train.run, args.seed)
    models.assert_trees_close(
        (losses, variables), plain_loop(train.run, start, updates, make_optimizer, is_mean=True)
    )
    images = digits.test_images[..., np.newaxis]
    held_out = datasets.TrainingBatches(images, digits.test_labels, args.batch_size)
    accuracies = plain_outputs(valid.run, variables, itertools.islice(iter(held_out), valid.num_batches))
    assert history[-1][1] == pytest.approx(np.mean(accuracies))
    return losses, variables


@pytest.mark.thorough
def test_resnet():
    """Stages are cut at names; validation shares the variables, the moving means among them."""
    argv = ["--epochs", "2", "--updates-per-epoch", "2", "--blocks", "1", "1", "--pipeline-splits", "b2/0"]
    losses, _variables = run_resnet(argv)
    assert losses[-4:].mean() < losses[:4].mean()


@pytest.mark.thorough
def test_resnet_goes_on_in_another_split(tmp_path):
    argv = ["--norm-type", "GROUP", "--blocks", "2", "--updates-per-epoch", "2", "--seed", "1"]
    argv += ["--pipeline-splits", "b1/0", "b1/1"]
    losses, variables = run_resnet([*argv, "--epochs", "4"])
    argv += ["--log-dir", str(tmp_path)]
    first, _variables = run_resnet([*argv, "--epochs", "2"], is_compared=False)
    argv += ["--restoring", "--pipeline-splits", "head"]
    second, restored = run_resnet([*argv, "--epochs", "4"], is_compared=False)
    models.assert_trees_close((np.concatenate([first, second]), restored), (losses, variables))


# Loops.


def small_net(variables, x):
    """The logits of a convolution, a pooling and a dense layer."""
    layout = ("NHWC", "HWIO", "NHWC")
    kernel = variables["conv2d/kernel"]
    x = jax.lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=layout)
    x = jax.nn.relu(x + variables["conv2d/bias"])
    size = (x.shape[1] // 2) * 2
    x = x[:, :size, :size].reshape(x.shape[0], size // 2, 2, size // 2, 2, -1).max((2, 4))
    return x.reshape(x.shape[0], -1) @ variables["dense/kernel"] + variables["dense/bias"]


def small_net_loss(variables, x, y):
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(small_net(variables, x), y))


@pytest.mark.thorough
def test_estimator_of_a_net(tmp_path):
    """Trained as a loop of jax.grad trains; what is evaluated, predicted and served is NumPy's."""
    opts = estimator_cnn.parse_args(["--model-dir", str(tmp_path), "--batches-per-loop", "30"])
    estimator, result, classes, served = estimator_cnn.main(opts)
    names = [name for name in estimator.get_variable_names() if name != "global_step"]
    trained = {name: estimator.get_variable_value(name) for name in names}

    first = estimator_cnn.parse_args(["--model-dir", str(tmp_path / "first"), "--batches-per-loop", "1"])
    first.learning_rate = 0.0
    initial = estimator_cnn.make_estimator(first)
    initial.train(lambda: estimator_cnn.training_data(first), steps=1)
    variables = {name: jnp.asarray(initial.get_variable_value(name)) for name in names}
    velocity = jax.tree.map(jnp.zeros_like, variables)
    step = jax.jit(jax.grad(small_net_loss))
    for number, batch in enumerate(itertools.islice(estimator_cnn.training_data(opts), 90)):
        rate = np.float32(opts.learning_rate * 0.5 ** (number // opts.learning_rate_decay_steps))
        velocity = jax.tree.map(lambda v, g: np.float32(0.9) * v + g, velocity, step(variables, *batch))
        variables = jax.tree.map(lambda w, v, rate=rate: w - rate * v, variables, velocity)
    models.assert_trees_close(trained, jax.tree.map(np.asarray, variables))

    images, labels = (
        np.concatenate(part) for part in zip(*estimator_cnn.evaluation_data(opts), strict=True)
    )
    logits = np.asarray(small_net(trained, images))
    np.testing.assert_array_equal(classes, logits.argmax(-1))
    assert result["accuracy"] == pytest.approx(np.mean(classes == labels))
    assert result["global_step"] == 90
    found = ipu.load_program(served)(images[:12])
    np.testing.assert_array_equal(found["classes"], classes[:12])
    np.testing.assert_allclose(found["probabilities"], jax.nn.softmax(logits[:12]), rtol=1e-4)


@pytest.mark.thorough
def test_custom_gradient():
    with (
        pytest.warns(UserWarning, match="move_variable_initialization_to_cpu has no effect"),
        pytest.warns(UserWarning, match="set_optimization_options has no effect"),
    ):
        plain, custom = custom_gradient.train(4)
    inputs, targets = jnp.asarray(custom_gradient.INPUTS), jnp.asarray(custom_gradient.TARGETS)

    def loss_of(weights, inputs):
        sigmoid = 0.5 * (jnp.tanh(inputs @ weights) + 1)
        targets_ = targets.astype(np.float32)
        return jnp.sum(-jnp.log(sigmoid * targets_ + (1 - sigmoid) * (1 - targets_)))

    weights, losses, gradients = jnp.zeros((3, 1)), [], []
    for _step in range(4):
        before = weights
        loss, (change, gradient) = jax.value_and_grad(loss_of, (0, 1))(weights, inputs)
        weights = weights - np.float32(0.05) * change
        losses.append(loss)
        gradients.append(gradient)
    for found in (plain, custom):
        expected = (np.array(losses), np.array(gradients), np.asarray(before))
        models.assert_trees_close((np.array(found[0]), np.array(found[1]), found[2]), expected)


def plain_click_through_rate(variables, batch):
    """The logits: attention over the states of a GRU, whose scores are in the gates of another one."""

    def embed(items):
        of_items = variables["embedding/items"][items]
        return jnp.concatenate([of_items, variables["embedding/categories"][items % 6]], axis=-1)

    lengths, target = batch["lengths"], embed(batch["target"])
    zeros = jnp.zeros((len(lengths), 6))
    kernel, biases = (variables[f"interests/popnn_dynamic_gru/{part}"] for part in ("kernel", "biases"))
    history = jnp.swapaxes(embed(batch["history"]), 0, 1)
    states, _last = plain_gru(jnp, history, zeros, kernel, biases, lengths)
    scores = jnp.sum(states * (target @ variables["attention/dense/kernel"]), axis=-1)
    weights = jnp.where(np.arange(len(states))[:, None] < lengths, jnp.exp(scores), 0.0)
    weights = weights / jnp.sum(weights, axis=0)
    own = {name: variables[f"evolution/popnn_augru/{name}"] for name in ("kernel", "bias_r_u", "bias_c")}
    biases = jnp.concatenate([own["bias_r_u"], own["bias_c"]])
    _states, interest = plain_gru(jnp, states, zeros, own["kernel"], biases, lengths, weights)
    x = jnp.concatenate([interest, target], axis=-1)
    x = jax.nn.sigmoid(x @ variables["head/dense/kernel"] + variables["head/dense/bias"])
    return (x @ variables["head/dense_1/kernel"] + variables["head/dense_1/bias"])[:, 0]


@pytest.mark.thorough
@pytest.mark.parametrize("on_host", [False, True])
def test_click_through_rate(on_host):
    """Embeddings, a dynamic GRU and an AUGRU learn by Adagrad, in a loop of updates on the device.

    Tables on the host learn by SGD.
    """
    opts = click_through_rate.parse_args(["--steps", "2", *["--host-embeddings"] * on_host])
    found, variables, after = click_through_rate.train(opts)

    @jax.jit
    def step(variables, batch):
        def loss_of(variables):
            logits = plain_click_through_rate(variables, batch)
            return -jnp.mean(
                jnp.where(batch["clicked"] == 1, jax.nn.log_sigmoid(logits), jax.nn.log_sigmoid(-logits))
            ), jax.nn.sigmoid(logits)

        return jax.value_and_grad(loss_of, has_aux=True)(variables)

    tables = ("embedding/items", "embedding/categories") if on_host else ()
    squares = jax.tree.map(lambda value: np.full_like(value, 0.1), variables)
    expected = []
    for batch in itertools.islice(click_through_rate.make_batches(opts), len(found["loss"])):
        (loss, probabilities), gradients = step(variables, batch)
        squares = jax.tree.map(lambda s, g: s + g**2, squares, gradients)
        rate = np.float32(opts.learning_rate)
        variables = {
            name: w - rate * gradients[name] / (1 if name in tables else np.sqrt(squares[name]))
            for name, w in variables.items()
        }
        expected.append({"loss": loss, "probabilities": probabilities})
    stacked = jax.tree.map(lambda *all: np.stack(all), *expected)
    models.assert_trees_close((found, after), (stacked, jax.tree.map(np.asarray, variables)))


def plain_forecast(opts, variables, batch, is_training):
    """The mean absolute error; the RMSPE, and the mean and variance of the continuous features."""
    own = {name.removeprefix("model/"): value for name, value in variables.items()}
    columns, truth = batch[:, :3].astype(np.int32).T, batch[:, -1:]
    features = [own[f"embedding_{number}"][column] for number, column in enumerate(columns, 1)]
    x = batch[:, 3:-1]
    moments = {"moving_mean": x.mean(0), "moving_variance": x.var(0)}
    used = moments if is_training else {name: own[f"batch_norm/{name}"] for name in moments}
    x = (x - used["moving_mean"]) / jnp.sqrt(used["moving_variance"] + np.float32(1e-3))
    x = jnp.concatenate([*features, own["batch_norm/gamma"] * x + own["batch_norm/beta"]], axis=1)
    for layer in range(len(opts.sizes)):
        x = jnp.maximum(x @ own[f"d{layer}_l2tag/kernel"] + own[f"d{layer}_l2tag/bias"], 0)
    x = 1 / (1 + jnp.exp(-(x @ own["df/kernel"] + own["df/bias"])))
    difference = truth - np.float32(1.2 * sales_forecasting.LOG_MAX_SALES) * x
    is_open = (truth > 0.001).astype(np.float32)
    squares = is_open * (1 - jnp.exp(-difference)) ** 2
    return jnp.mean(jnp.abs(difference)), (jnp.sqrt(jnp.sum(squares) / jnp.sum(is_open)), moments)


@pytest.mark.thorough
def test_sales_forecasting(tmp_path):
    """Gradients of each replica decay the tagged kernels and are clipped, before the replicas' mean."""
    argv = "--dropout 0 --plateau-patience 0 --gradient-clipping 0.05 --steps 4 --batches-per-step 16"
    opts = sales_forecasting.parse_args([*argv.split(), "--log-dir", str(tmp_path)])
    found, variables = sales_forecasting.train(opts)
    data, validation = (sales_forecasting.make_batches(opts, seed) for seed in (1, 2))
    forecast = jax.jit(functools.partial(plain_forecast, opts), static_argnums=2)
    gradients_of = jax.jit(jax.value_and_grad(forecast, has_aux=True), static_argnums=2)
    clip = np.float32(opts.gradient_clipping)
    rate, best, num_clipped = 2**opts.base_learning_rate * opts.batch_size, np.inf, 0
    for used_rate, trained, validated, after in found:
        assert used_rate == rate
        of_first = []
        for _iteration in range(opts.batches_per_step // opts.replicas):
            made = [gradients_of(variables, next(data), True) for _replica in range(opts.replicas)]
            of_first.append([made[0][0][0], made[0][0][1][0]])
            moved = {}
            for name, value in variables.items():
                moment = name.removeprefix("model/batch_norm/")
                if moment.startswith("moving"):
                    mean = sum(moments[moment] for (_loss, (_rmspe, moments)), _gradient in made) / 2
                    moved[name] = np.float32(0.99) * value + np.float32(0.01) * mean
                    continue
                gradients = [np.asarray(gradient[name]) for _losses, gradient in made]
                if "l2tag/kernel" in name:
                    gradients = [g + np.float32(opts.weight_decay) * value for g in gradients]
                num_clipped += sum(np.sum(np.abs(g) > clip) for g in gradients)
                mean = sum(np.clip(g, -clip, clip) for g in gradients) / 2
                moved[name] = value - np.float32(rate) * mean
            variables = moved
        models.assert_trees_close(np.array(trained), np.mean(of_first, axis=0))
        models.assert_trees_close(after, variables)
        losses = []
        for _batch in range(opts.validation_batches):
            loss, (rmspe, _moments) = forecast(after, next(validation), False)
            losses.append([loss, rmspe])
        models.assert_trees_close(np.array(validated), np.mean(losses, axis=0))
        rate, best = (rate, validated[1]) if validated[1] < best else (rate * opts.plateau_factor, best)
    assert num_clipped > 100
    assert used_rate < found[0][0]


@pytest.mark.thorough
def test_sales_forecasting_drops_units_out_only_in_training(tmp_path):
    argv = "--dropout 0.5 --replicas 1 --steps 1 --batches-per-step 1"
    opts = sales_forecasting.parse_args([*argv.split(), "--log-dir", str(tmp_path)])
    [(_rate, trained, validated, after)], before = sales_forecasting.train(opts)
    batch = next(sales_forecasting.make_batches(opts, 1))
    with_all_units, _others = plain_forecast(opts, before, batch, True)
    assert np.isfinite(trained).all()
    assert abs(trained[0] - with_all_units) > 1e-3
    batches = itertools.islice(sales_forecasting.make_batches(opts, 2), opts.validation_batches)
    expected = [plain_forecast(opts, after, batch, False) for batch in batches]
    losses = np.mean([[loss, rmspe] for loss, (rmspe, _moments) in expected], axis=0)
    models.assert_trees_close(np.array(validated), losses)


def plain_log_probabilities(variables, discrete, continuous, states):
    """Of all actions, [time, batch, actions]; time goes first once the observations are joined."""
    tables = [variables[f"popnn_lookup/emb_matrix{index}"] for index in range(4)]
    continuous = [*continuous[:3], jnp.minimum(jnp.maximum(continuous[3], -5), 5)]
    joined = [
        jnp.concatenate([table[rows], others], axis=-1)
        for table, rows, others in zip(tables, discrete, continuous, strict=True)
    ]
    joined[3] = joined[3] @ variables["dense/kernel"] + variables["dense/bias"]
    x = jnp.swapaxes(jnp.concatenate([one.max(axis=2) for one in joined], axis=-1), 0, 1)
    c, h = states[:, 0], states[:, 1]
    outputs, _c, _h = plain_lstm(jnp, x, c, h, variables["lstm/kernel"], variables["lstm/biases"])
    logits = outputs @ variables["logits/kernel"] + variables["logits/bias"]
    return logits - jnp.log(jnp.sum(jnp.exp(logits), axis=-1, keepdims=True))


@pytest.mark.thorough
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float16", 5e-3)])
def test_reinforcement_learning(dtype, tolerance):
    """Actions are drawn, and the same ones give the loss of a plain loop.

    The plain loop is in float32. In float16 each number is rounded by up to 5e-4 of itself.
    """
    opts = reinforcement_learning.parse_args(["--accumulate-grad", "--dtype", dtype])
    totals, found, before, after = reinforcement_learning.train(opts)
    assert np.mean(found["actions"][:, 0] != found["actions"][:, 1]) > 0.7  # replicas draw their own
    data = iter(reinforcement_learning.EnvGenerator(opts))

    def widen(tree):
        return jax.tree.map(lambda leaf: np.float32(leaf) if leaf.dtype == dtype else leaf, tree)

    groups = [[(*widen(next(data)), drawn) for drawn in of_replicas] for of_replicas in found["actions"]]

    @jax.jit
    def loss_of(variables, *element):
        log_probabilities = plain_log_probabilities(variables, element[:4], element[4:8], element[9])
        chosen = jax.nn.one_hot(element[10].T, log_probabilities.shape[-1])
        return jnp.sum(jnp.sum(chosen * log_probabilities, axis=-1) * element[8].T)

    assert {value.dtype.name for value in (totals, found["loss"], *after.values())} == {dtype}
    every = opts.gradient_accumulation_count
    sgd = optax.sgd(opts.learning_rate)
    losses, variables, _left = models.plain_loop(loss_of, widen(before), groups, every, sgd)
    models.assert_trees_close(widen(found["loss"]), losses, tolerance)
    models.assert_trees_close(widen(totals), losses[:, 0].reshape(opts.steps, -1).sum(1), tolerance)
    models.assert_trees_close(widen(after), jax.tree.map(np.asarray, variables), tolerance)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("arguments", "activation_names", "gradient_names"),
    [
        ("", {"dense1", "dense3"}, {"dense1/kernel", "dense1/bias", "dense2/kernel", "dense2/bias"}),
        (
            "--outfeed-pre-accumulated-gradients --activation-filters dense2 --gradient-filters kernel",
            {"dense2", "dense3"},
            {"dense1/kernel", "dense2/kernel", "dense3/kernel"},
        ),
    ],
    ids=["of_updates", "of_micro_batches"],
)
def test_inspecting_tensors(arguments, activation_names, gradient_names):
    """What the filters keep: each micro-batch's activations, its gradients or an update's sums of them."""
    opts = inspecting_tensors.parse_args([*arguments.split(), "--steps", "2", "--sizes", "32", "16"])
    losses, found, variables, after = inspecting_tensors.train(opts)

    @jax.jit
    def step(variables, images, labels):
        def loss_of(variables):
            x, activations = images.reshape(len(images), -1), {}
            for name in ("dense1", "dense2", "dense3"):
                x = x @ variables[f"FCModel/{name}/kernel"] + variables[f"FCModel/{name}/bias"]
                activations[name] = x = x if name == "dense3" else jnp.maximum(x, 0)
            log_probabilities = x - jnp.log(jnp.sum(jnp.exp(x), axis=-1, keepdims=True))
            return -jnp.mean(log_probabilities[np.arange(len(labels)), labels]), activations

        return jax.value_and_grad(loss_of, has_aux=True)(variables)

    data, rate, expected_losses = iter(inspecting_tensors.create_dataset(opts)), np.float32(0.02), []
    for activations, gradients, summary in found:
        all_activations, all_gradients = [], []
        for _update in range(opts.repeat_count):
            made = [step(variables, *next(data)) for _number in range(opts.gradient_accumulation_count)]
            expected_losses += [loss for (loss, _activations), _gradient in made]
            all_activations += [computed for (_loss, computed), _gradient in made]
            of_each = [gradient for _found, gradient in made]
            total = jax.tree.map(lambda *leaves: sum(leaves), *of_each)
            all_gradients += of_each if opts.outfeed_pre_accumulated_gradients else [total]
            variables = jax.tree.map(lambda w, g: w - rate * g, variables, total)
        expected = jax.tree.map(lambda *leaves: np.stack(leaves), *all_activations)
        expected = {name: expected[name] for name in activation_names}
        models.assert_trees_close(activations, expected)
        of_all = jax.tree.map(lambda *leaves: np.stack(leaves), *all_gradients)
        of_all = {name: of_all[name] for name in (f"FCModel/{short}" for short in gradient_names)}
        models.assert_trees_close(gradients, of_all)
        assert summary.keys() == {**expected, **of_all}.keys()
        for name, value in {**expected, **of_all}.items():
            *numbers, has_nans, has_infinities = summary[name]
            assert not has_nans
            assert not has_infinities
            wanted = [value.mean(), value.std(), value.min(), value.max()]
            models.assert_trees_close(np.array(numbers), np.array(wanted, np.float64))
    assert losses[-8:].mean() < losses[:8].mean()
    models.assert_trees_close(losses, np.array(expected_losses))
    models.assert_trees_close(after, jax.tree.map(np.asarray, variables))

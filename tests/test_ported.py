"""The programs in `ported`: they run, their losses fall, and they compute what a plain loop computes."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ipu_pipeline as ipu
from ipu_pipeline import config_categories, datasets, utils
from ipu_pipeline.engine import reference
from ipu_pipeline.engine.state import PipelineState
from tests import front, models
from tests.ported import bert, pipelining, resnet, unet_industrial


@pytest.fixture(autouse=True)
def as_in_a_new_process(monkeypatch):
    monkeypatch.setattr(config_categories, "_warned", set())
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


def test_pipelining():
    """The learning rate is an input, and goes through the stages."""
    argv = ["--steps", "3", "--filters", "4"]
    with pytest.warns(UserWarning, match="move_variable_initialization_to_cpu has no effect"):
        losses, variables = pipelining.main(argv)
    args = pipelining.parse_args(argv)
    assert len(losses) == 3 * args.repeat_count * args.gradient_accumulation_count
    assert losses[-8:].mean() < losses[:8].mean()
    program = pipelining.Graph(args).train_op
    rates = [args.learning_rate] * args.steps * args.repeat_count
    updates = make_updates(pipelining.create_dataset(args), rates, args.gradient_accumulation_count)
    expected = plain_loop(program, initial_variables(program, args.seed), updates, optax.sgd)
    models.assert_trees_close((losses, variables), expected)


def test_unet_industrial(tmp_path):
    """Skip connections cross stages; an estimator trains, evaluates and predicts."""
    args = unet_industrial.parse_args(["--steps", "16", "--model-dir", str(tmp_path)])
    estimator, metrics, masks = unet_industrial.run(args)
    names = [name for name in estimator.get_variable_names() if name != "global_step"]
    variables = {name: estimator.get_variable_value(name) for name in names}
    train, evaluate = (
        compile_spec(mode, estimator.params) for mode in (ipu.ModeKeys.TRAIN, ipu.ModeKeys.EVAL)
    )
    count = args.gradient_accumulation_count
    dataset = unet_industrial.training_input_fn(estimator.params)()
    losses, expected = plain_loop(
        train,
        initial_variables(train, args.seed),
        make_updates(dataset, [args.learning_rate] * (args.steps // count), count),
        lambda rate: optax.rmsprop(rate, decay=0.9),
        is_mean=True,
    )
    assert losses[-count:].mean() < losses[:count].mean()
    models.assert_trees_close(variables, expected)
    found = plain_outputs(evaluate, variables, unet_industrial.eval_input_fn(estimator.params))
    np.testing.assert_allclose([metrics["loss"], metrics["dice"]], np.mean(found, axis=0), rtol=1e-5)
    assert np.shape(masks) == (args.eval_steps * args.batch_size, 16, 16, 1)


def compile_spec(mode, params):
    """What an estimator compiles, in one program."""
    spec = unet_industrial.model_fn(mode, params)
    is_training = mode == ipu.ModeKeys.TRAIN
    return front.compile_program(
        lambda: ipu.pipelining_ops.pipeline(
            spec.computational_stages,
            gradient_accumulation_count=spec.gradient_accumulation_count,
            infeed_queue=ipu.ipu_infeed_queue.IPUInfeedQueue(unet_industrial.eval_input_fn(params)),
            outfeed_queue=ipu.ipu_outfeed_queue.IPUOutfeedQueue(),
            optimizer_function=spec.optimizer_function if is_training else None,
        )
    )


def assert_bert_equals_a_plain_loop(argv):
    _losses, variables = bert.main(argv)
    args = bert.parse_args(argv)
    program = bert.Graph(args).train
    rates = [bert.learning_rate_at(args, step) for step in range(args.steps)]
    updates = make_updates(
        bert.PretrainingData(args),
        np.repeat(rates, args.batches_per_step),
        args.gradient_accumulation_count,
    )
    _losses, expected = plain_loop(
        program,
        initial_variables(program, args.seed),
        updates,
        lambda rate: bert.get_optimizer(args, rate),
        seed=args.seed,
        find_weight=lambda outputs: sum(num_tokens for _mlm, _nsp, num_tokens, *_captured in outputs),
    )
    models.assert_trees_close(variables, expected)
    assert [name for name in variables if "word_embeddings" in name] == ["bert/embeddings/word_embeddings"]
    return _losses


def test_bert(tmp_path):
    """With dropout: the plain loop has the same keys."""
    argv = ["--steps", "3", "--warmup-steps", "1", "--recompute", "--offload-optimizer"]
    argv += ["--save-path", str(tmp_path), "--steps-per-save", "1"]
    losses = assert_bert_equals_a_plain_loop(argv)
    assert losses[-8:].mean() < losses[:8].mean()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["4", "6"]


def test_resnet(tmp_path):
    """Training, validation and checkpoints."""
    argv = ["--epochs", "2", "--log-dir", str(tmp_path)]
    history, variables = resnet.main(argv)
    args = resnet.parse_args(argv)
    digits = datasets.load_digits()
    train, valid = resnet.training_graph(args, digits), resnet.validation_graph(args, digits)
    batches, held_out = (
        datasets.TrainingBatches(images[..., np.newaxis], labels, args.batch_size, seed)
        for images, labels, seed in (
            (digits.train_images, digits.train_labels, args.seed),
            (digits.test_images, digits.test_labels, 0),
        )
    )

    def make_optimizer(rate):
        def is_decayed(parameters):
            return {name: name.endswith("kernel") for name in parameters}

        decay = optax.add_decayed_weights(args.weight_decay, is_decayed)
        return optax.chain(decay, optax.sgd(rate, args.momentum))

    rates = [resnet.learning_rate_at(args, epoch) for epoch in range(args.epochs)]
    updates = make_updates(
        batches, np.repeat(rates, args.updates_per_epoch), args.gradient_accumulation_count
    )
    start = initial_variables(train.run, args.seed)
    expected = plain_loop(train.run, start, updates, make_optimizer, is_mean=True)
    losses = np.concatenate([losses for losses, _accuracy in history])
    assert losses[-8:].mean() < losses[:8].mean()
    models.assert_trees_close((losses, variables), expected)
    accuracies = plain_outputs(valid.run, variables, itertools.islice(iter(held_out), valid.num_batches))
    assert history[-1][1] == pytest.approx(np.mean(accuracies))

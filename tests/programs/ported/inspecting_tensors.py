"""A feature example: activations and gradients of a pipelined net, looked at on the host after each step.

python -m tests.programs.ported.inspecting_tensors --steps 3
"""

import argparse
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ipu_pipeline as ipu
from ipu_pipeline import datasets
from ipu_pipeline.optimizers import OutfeedOptimizer, OutfeedOptimizerMode, tf1


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--sizes", type=int, nargs=2, default=[256, 128])
    parser.add_argument("--gradient-accumulation-count", type=int, default=4)
    parser.add_argument("--repeat-count", type=int, default=2, help="Weight updates in one run.")
    parser.add_argument("--learning-rate", type=float, default=0.02)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument(
        "--outfeed-pre-accumulated-gradients",
        action="store_true",
        help="Outfeed the gradients of each micro-batch, not those that were accumulated.",
    )
    parser.add_argument("--activation-filters", nargs="*", default=["dense1"], help="Of the first stage.")
    parser.add_argument("--gradient-filters", nargs="*", default=["dense1", "dense2"])
    return parser.parse_args(argv)


class MaybeOutfeedQueue:
    """An outfeed of those tensors whose names have one of some filters in them; without filters, of all."""

    def __init__(self, filters=None):
        self.queue = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
        self._filters = filters
        self._values = {}

    def is_wanted(self, name):
        return self._filters is None or any(part in name for part in self._filters)

    def maybe_outfeed(self, name, tensor):
        if self.is_wanted(name):
            self._values[name] = tensor

    def maybe_enqueue(self):
        return self.queue.enqueue(self._values) if self._values else None

    def maybe_dequeue(self):
        return self.queue.dequeue() if self.queue.enqueued else None


def create_dataset(opts):
    # Different: not MNIST, and no tf.data.
    digits = datasets.load_digits()
    return datasets.TrainingBatches(digits.train_images, digits.train_labels, opts.batch_size, seed=1)


def stage1(opts, queue, lr, images, labels):
    x = ipu.layers.Flatten()(images)
    x = ipu.layers.Dense(opts.sizes[0], activation=jax.nn.relu, name="dense1")(x)
    queue.maybe_outfeed("dense1", x)
    x = ipu.layers.Dense(opts.sizes[1], activation=jax.nn.relu, name="dense2")(x)
    queue.maybe_outfeed("dense2", x)
    # Different: no control dependencies, in either stage; what is enqueued runs.
    queue.maybe_enqueue()
    return lr, x, labels


def stage2(queue, lr, inputs, labels):
    logits = ipu.layers.Dense(10, name="dense3")(inputs)
    queue.maybe_outfeed("dense3", logits)
    queue.maybe_enqueue()
    loss = jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))
    return lr, loss


def optimizer_function(queue, mode, lr, loss):
    optimizer = tf1.GradientDescentOptimizer(lr)
    # Different: the optimizer takes the outfeed itself, and the full names of variables in place of
    # filters. What it enqueues is named so, too, without `:0_grad` at the end.
    names = [variable.name for variable in ipu.trainable_variables() if queue.is_wanted(variable.name)]
    if names:
        optimizer = OutfeedOptimizer(
            optimizer, queue.queue, outfeed_optimizer_mode=mode, variable_names=names
        )
    return ipu.pipelining_ops.OptimizerFunctionOutput(optimizer, loss)


def model(opts, infeed_queue, outfeed_queue, stage1_queue, stage2_queue, optimizer_queue, lr):
    mode = OutfeedOptimizerMode.BEFORE_APPLY
    if opts.outfeed_pre_accumulated_gradients:
        mode = OutfeedOptimizerMode.AFTER_COMPUTE
    with ipu.variable_scope("FCModel", use_resource=True):
        return ipu.pipelining_ops.pipeline(
            computational_stages=[partial(stage1, opts, stage1_queue), partial(stage2, stage2_queue)],
            gradient_accumulation_count=opts.gradient_accumulation_count,
            repeat_count=opts.repeat_count,
            inputs=[lr],
            infeed_queue=infeed_queue,
            outfeed_queue=outfeed_queue,
            optimizer_function=partial(optimizer_function, optimizer_queue, mode),
            outfeed_loss=True,
            name="Pipeline",
        )


def summarize(values):
    """Mean, standard deviation, minimum, maximum, and whether there are NaNs or infinities, by name."""
    statistics = (np.mean, np.std, np.min, np.max, lambda x: np.isnan(x).any(), lambda x: np.isinf(x).any())
    return {name: [of(value.astype(np.float64)) for of in statistics] for name, value in values.items()}


def print_summary(summary, step):
    print(f"Step {step}: {'name':22} {'mean':>10} {'std':>10} {'min':>10} {'max':>10}  NaNs   infs")
    for name, (*numbers, has_nans, has_infinities) in summary.items():
        columns = " ".join(f"{number:10.6f}" for number in numbers)
        print(f"        {name:22} {columns}  {has_nans!s:5}  {has_infinities}")


def train(opts):
    """The losses; activations, gradients and their summaries of each step; variables before and after."""
    infeed_queue = ipu.ipu_infeed_queue.IPUInfeedQueue(create_dataset(opts), "infeed")
    outfeed_queue = ipu.ipu_outfeed_queue.IPUOutfeedQueue("outfeed")
    optimizer_queue = MaybeOutfeedQueue(opts.gradient_filters)
    stage1_queue, stage2_queue = MaybeOutfeedQueue(opts.activation_filters), MaybeOutfeedQueue()
    lr = ipu.placeholder(np.float32, [])
    with ipu.scopes.ipu_scope("/device:IPU:0"):
        queues = infeed_queue, outfeed_queue, stage1_queue, stage2_queue, optimizer_queue
        compiled_model = ipu.ipu_compiler.compile(partial(model, opts, *queues), inputs=[lr])
    activation_ops = [queue.maybe_dequeue() for queue in (stage1_queue, stage2_queue)]
    gradients_op = optimizer_queue.maybe_dequeue()

    config = ipu.config.IPUConfig()
    config.auto_select_ipus = 2
    config.configure_ipu_system()
    losses, found = [], []
    with ipu.Session(seed=3) as sess:
        sess.run([ipu.global_variables_initializer(), infeed_queue.initializer])
        before = sess.variables
        for step in range(opts.steps):
            sess.run(compiled_model, {lr: opts.learning_rate})
            losses.append(sess.run(outfeed_queue.dequeue()))
            activations = {}
            for operation in activation_ops:
                activations.update(sess.run(operation) if operation else {})
            gradients = sess.run(gradients_op) if gradients_op else {}
            summary = summarize({**activations, **gradients})
            print_summary(summary, step)
            print(f"Mean loss: {np.mean(losses[-1]):.3f}")
            found.append((activations, gradients, summary))
        return np.concatenate(losses), found, before, sess.variables


if __name__ == "__main__":
    train(parse_args())

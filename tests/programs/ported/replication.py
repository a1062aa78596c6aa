"""A feature example: a small convolutional net that is replicated, in a loop on the IPUs.

python -m tests.programs.ported.replication --replicas 2 --steps 5
"""

import argparse
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ipu_pipeline as ipu
from ipu_pipeline import datasets
from ipu_pipeline.optimizers import tf1

NUM_CLASSES = 10


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--max-cross-replica-sum-buffer-size", type=int, default=10 * 1024**2)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--iterations-per-step", type=int, default=8)
    parser.add_argument("--batches-to-accumulate", type=int, default=1)
    parser.add_argument("--learning-rate", type=float, default=0.02)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--filters", type=int, default=4)
    return parser.parse_args(argv)


def get_dataset(opts):
    # Different: not CIFAR-10, and no tf.data.
    digits = datasets.load_digits()
    images = digits.train_images[..., np.newaxis]
    return datasets.TrainingBatches(images, digits.train_labels, opts.batch_size, seed=1)


def training_step(opts, outfeed, x, y):
    # Different: layers are called as they are made; Keras's Sequential is not there.
    x = ipu.layers.Conv2D(opts.filters, (3, 3))(x)
    x = jax.nn.relu(x)
    x = ipu.layers.MaxPooling2D(pool_size=(2, 2))(x)
    x = ipu.layers.Flatten()(x)
    logits = ipu.layers.Dense(NUM_CLASSES)(x)
    loss = jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, y))
    optimizer = tf1.GradientDescentOptimizer(learning_rate=opts.learning_rate)
    if opts.batches_to_accumulate > 1:
        optimizer = ipu.optimizers.CrossReplicaGradientAccumulationOptimizerV2(
            optimizer, num_mini_batches=opts.batches_to_accumulate
        )
    else:
        optimizer = ipu.optimizers.CrossReplicaOptimizer(optimizer)
    train_op = optimizer.minimize(loss)
    return outfeed.enqueue(loss), train_op


def build_ipu_graph(opts, dataset):
    infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(
        dataset, replication_factor=opts.replicas, feed_name="infeed"
    )
    outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue(replication_factor=opts.replicas, feed_name="outfeed")

    with ipu.scopes.ipu_scope("/device:IPU:0"):

        def training_loop():
            return ipu.loops.repeat(
                opts.iterations_per_step, partial(training_step, opts, outfeed), infeed_queue=infeed
            )

        compile_and_run = ipu.ipu_compiler.compile(training_loop)

    dequeue_outfeed = outfeed.dequeue()
    init = [ipu.global_variables_initializer(), infeed.initializer]  # Different: a list for tf.group
    ipu.utils.move_variable_initialization_to_cpu()

    config = ipu.utils.create_ipu_config()
    config = ipu.utils.auto_select_ipus(config, opts.replicas)
    config = ipu.utils.set_optimization_options(
        config, max_cross_replica_sum_buffer_size=opts.max_cross_replica_sum_buffer_size
    )
    ipu.utils.configure_ipu_system(config)
    return init, compile_and_run, dequeue_outfeed


def train(opts):
    """The losses, [steps * iterations, replicas], and the variables before and after."""
    init, compile_and_run, dequeue_outfeed = build_ipu_graph(opts, get_dataset(opts))
    all_losses = []
    with ipu.Session(seed=2) as sess:
        sess.run(init)
        before = sess.variables
        for i in range(opts.steps):
            sess.run(compile_and_run)
            losses = sess.run(dequeue_outfeed)
            print(f"Step: {i + 1} | Average loss: {np.mean(losses):.3f}")
            all_losses.append(losses)
        return np.concatenate(all_losses), before, sess.variables


if __name__ == "__main__":
    train(parse_args())

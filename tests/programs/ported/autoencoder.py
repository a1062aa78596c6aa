"""An application: an autoencoder that fills in ratings, sharded, replicated and validated as it goes.

python -m tests.programs.ported.autoencoder --multiple-ipus --replicas 2 --epochs 3
"""

import argparse
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import ipu_pipeline as ipu
from ipu_pipeline.optimizers import tf1

NUM_ITEMS = 40


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--size", type=int, default=12)
    parser.add_argument("--batches-per-epoch", type=int, default=12)
    parser.add_argument("--accumulation-count", type=int, default=3)
    parser.add_argument("--base-learning-rate", type=float, default=0.01)
    parser.add_argument("--weight-decay", type=float, default=1e-3)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--multiple-ipus", action="store_true")
    parser.add_argument("--log-dir", default="autoencoder")
    return parser.parse_args(argv)


def rate_items(opts, seed):
    """Batches of ratings from 1 to 5, 0 where there is none: users and items of three tastes."""
    # Different: not Netflix's ratings.
    items = np.random.default_rng(0).normal(size=(3, NUM_ITEMS))
    rng = np.random.default_rng(seed)
    while True:
        ratings = np.clip(np.round(3 + rng.normal(size=(opts.batch_size, 3)) @ items), 1, 5)
        yield (ratings * (rng.random(ratings.shape) < 0.4)).astype(np.float32)


def dense(name, x, size, activation=jax.nn.selu):
    with ipu.variable_scope(name):
        # Different: Glorot's initializer is get_variable's own.
        weights = ipu.get_variable("weights", [x.shape[-1], size])
        biases = ipu.get_variable("biases", [size], initializer="zeros")
    return activation(x @ weights + biases)


def autoencoder(opts, ratings):
    """The sum of squared errors of the ratings that there are, and their number."""
    with ipu.variable_scope("autoencoder", reuse=ipu.AUTO_REUSE):
        with ipu.scopes.ipu_shard(0):
            code = dense("encoder_1", dense("encoder_0", ratings, 2 * opts.size), opts.size)
        with ipu.scopes.ipu_shard(1 if opts.multiple_ipus else 0):
            hidden = dense("decoder_0", code, 2 * opts.size)
            predicted = dense("decoder_1", hidden, ratings.shape[-1], lambda x: x)
            mask = ratings != 0
            errors = jnp.where(mask, predicted - ratings, 0.0)
            return jnp.sum(errors**2), jnp.sum(mask).astype(np.float32)


def make_graph(opts, is_training, data):
    """A program, with its queues."""
    infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(
        data, feed_name=f"infeed_{is_training}", replication_factor=opts.replicas
    )
    outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue(
        feed_name=f"outfeed_{is_training}", replication_factor=opts.replicas
    )

    def body(learning_rate, ratings):
        total, number = autoencoder(opts, ratings)
        with ipu.scopes.ipu_shard(1 if opts.multiple_ipus else 0):
            loss = total / number
            enqueued = outfeed.enqueue([loss, total, number])
            if not is_training:
                return learning_rate, enqueued
            optimizer = ipu.optimizers.CrossReplicaGradientAccumulationOptimizerV2(
                tf1.AdamWOptimizer(opts.weight_decay, learning_rate), opts.accumulation_count
            )
            return learning_rate, enqueued, optimizer.minimize(loss)

    with ipu.scopes.ipu_scope("/device:IPU:0"):
        # Different: a learning rate that is fed goes into the loop as a value that it carries.
        learning_rate = ipu.placeholder(np.float32, [], name=f"learning_rate_{is_training}")
        repeat = partial(ipu.loops.repeat, opts.batches_per_epoch, body)
        program = ipu.ipu_compiler.compile(
            lambda rate: repeat([rate], infeed_queue=infeed), inputs=[learning_rate]
        )
    return infeed, program, outfeed.dequeue(), learning_rate


def train(opts):
    """For each epoch: losses in training, the validation's root mean square error; variables, [epoch]."""
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = opts.replicas * (2 if opts.multiple_ipus else 1)
    config.configure_ipu_system()
    training = make_graph(opts, True, partial(rate_items, opts, 1))
    validation = make_graph(opts, False, partial(rate_items, opts, 2))
    saver = ipu.Saver(max_to_keep=2)
    found = []
    with ipu.Session(seed=4) as sess, ipu.Session(seed=5) as other:
        sess.run([ipu.global_variables_initializer(), training[0].initializer])
        before = sess.variables
        other.run(validation[0].initializer)
        for epoch in range(opts.epochs):
            rate = opts.base_learning_rate / (1 + epoch)
            sess.run(training[1], {training[3]: rate})
            losses, _totals, _numbers = sess.run(training[2])
            path = saver.save(sess, f"{opts.log_dir}/model", global_step=epoch)
            # As the original, which validates in a process of its own, from the newest checkpoint.
            saver.restore(other, path)
            other.run(validation[1], {validation[3]: 0.0})
            _losses, totals, numbers = other.run(validation[2])
            error = float(np.sqrt(totals.sum() / numbers.sum()))
            print(f"Epoch {epoch}: loss {losses.mean():.3f}, validation RMSE {error:.3f}")
            found.append((losses, error, sess.variables))
    return found, before


if __name__ == "__main__":
    train(parse_args())

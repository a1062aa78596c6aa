"""An application: sales of shops are forecast by an MLP, replicated; its validation lowers the rate.

python -m tests.programs.ported.sales_forecasting --replicas 2 --steps 8
"""

import argparse
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import ipu_pipeline as ipu
from ipu_pipeline.optimizers import tf1

NUM_CATEGORIES = (12, 7, 4)  # shops, days of the week, promotions
NUM_CONTINUOUS = 2
LOG_MAX_SALES = 3.5


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--embedding-size", type=int, default=3)
    parser.add_argument("--sizes", type=int, nargs="*", default=[16, 16, 8])
    parser.add_argument("--dropout", type=float, default=0.5)
    parser.add_argument("--batches-per-step", type=int, default=32, help="Of all replicas together.")
    parser.add_argument("--validation-batches", type=int, default=16, help="Of all replicas together.")
    parser.add_argument("--base-learning-rate", type=float, default=-5, help="A power of 2, for one row.")
    parser.add_argument("--plateau-factor", type=float, default=0.5)
    parser.add_argument("--plateau-patience", type=int, default=1)
    parser.add_argument("--loss-scaling", type=float, default=8)
    parser.add_argument("--weight-decay", type=float, default=1e-3)
    parser.add_argument("--gradient-clipping", type=float, default=1.0)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--log-dir", default="sales_forecasting")
    return parser.parse_args(argv)


def make_batches(opts, seed):
    """Matrices whose columns are categories, continuous features and the logarithm of the sales."""
    # Different: not Rossmann's shops, and no pandas.
    known = np.random.default_rng(0)
    effects = [known.normal(scale=0.3, size=number) for number in NUM_CATEGORIES]
    rng = np.random.default_rng(seed)
    while True:
        categories = [rng.integers(number, size=opts.batch_size) for number in NUM_CATEGORIES]
        continuous = rng.normal(5.0, 2.0, size=(opts.batch_size, NUM_CONTINUOUS))
        sales = 2 + sum(effect[column] for effect, column in zip(effects, categories, strict=True))
        sales = np.clip(sales + 0.1 * (continuous[:, 0] - 5), 0, LOG_MAX_SALES)
        sales *= rng.random(opts.batch_size) > 0.04  # some shops are closed
        yield np.column_stack([*categories, continuous, sales]).astype(np.float32)


class DynamicScheduler:
    """Lowers the learning rate after more stagnating validations than it has patience for."""

    def __init__(self, opts):
        self.rate = 2**opts.base_learning_rate * opts.batch_size
        self.factor, self.patience = opts.plateau_factor, opts.plateau_patience
        self.best, self.failures = np.inf, 0

    def schedule(self, loss):
        if loss < self.best:
            self.best, self.failures = loss, 0
            return
        self.failures += 1
        if self.failures > self.patience:
            self.rate *= self.factor
            self.failures = 0


def model(opts, is_training, observed):
    """The predictions, [batch, 1]."""
    with ipu.variable_scope("model", use_resource=True, reuse=ipu.AUTO_REUSE):
        features = []
        for column, number in enumerate(NUM_CATEGORIES):
            shape = [number, opts.embedding_size]
            # Different: the initializer has Keras's name; its range is the same.
            table = ipu.get_variable(f"embedding_{column + 1}", shape, initializer="random_uniform")
            features.append(jax.nn.one_hot(observed[:, column].astype(np.int32), number) @ table)
        continuous = observed[:, len(NUM_CATEGORIES) :]
        # Different: layers are objects; the moving statistics are updated without UPDATE_OPS.
        normalize = ipu.layers.BatchNormalization(
            momentum=0.99, epsilon=1e-3, trainable=is_training, name="batch_norm"
        )
        x = jnp.concatenate([*features, normalize(continuous, training=is_training)], axis=1)
        for layer, size in enumerate(opts.sizes):
            x = ipu.layers.Dense(size, activation=jax.nn.relu, name=f"d{layer}_l2tag")(x)
        if is_training:
            x = ipu.rand_ops.dropout(x, rate=opts.dropout)
        return jax.nn.sigmoid(ipu.layers.Dense(1, name="df")(x)) * (LOG_MAX_SALES * 1.2)


def penalty(opts):
    """What has `weight_decay * kernel` as its gradient, for the kernels of the tagged layers."""
    tagged = [one for one in ipu.trainable_variables() if "l2tag" in one.name and "kernel" in one.name]
    with ipu.variable_scope(ipu.get_variable_scope(), reuse=True):
        kernels = [ipu.get_variable(one.name, one.shape) for one in tagged]
    return 0.5 * opts.weight_decay * sum(jnp.sum(kernel**2) for kernel in kernels)


def graph_builder(opts, is_training, learning_rate, batch):
    """The loss, the root mean square percentage error of the sales, and a training step or None."""
    observed, truth = batch[:, :-1], batch[:, -1:]
    predictions = model(opts, is_training, observed)
    loss = jnp.mean(jnp.abs(truth - predictions))
    errors = (jnp.exp(truth) - jnp.exp(predictions)) / jnp.exp(truth)
    rmspe = jnp.sqrt(jnp.mean(errors**2, where=truth > 0.001))  # of shops that are open
    if not is_training:
        # Different: without the means over replicas a loop that does not train has one replica. They count
        # all batches; otherwise a loop returns what the first replica has.
        mean = ipu.cross_replica_ops.cross_replica_mean
        return mean(loss), mean(rmspe), None

    def unscale_and_clip(gradient, variable):
        del variable
        return jnp.clip(gradient / opts.loss_scaling, -opts.gradient_clipping, opts.gradient_clipping)

    # Different: an optimizer around the other one does what was done between tf.gradients and
    # apply_gradients: in each replica, before the mean, as there. Its function is not told the names of
    # variables, so the decay of the tagged kernels comes from a penalty, a part of the loss.
    optimizer = ipu.optimizers.MapGradientOptimizer(
        tf1.GradientDescentOptimizer(learning_rate), unscale_and_clip
    )
    if opts.replicas > 1:
        optimizer = ipu.optimizers.CrossReplicaOptimizer(optimizer)
    return loss, rmspe, optimizer.minimize(opts.loss_scaling * (loss + penalty(opts)))


def generic_graph(opts, is_training, data):
    """A program, the infeed's initializer, and the placeholder of the learning rate."""
    infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(data)
    learning_rate = ipu.placeholder(np.float32, [])
    num_batches = opts.batches_per_step if is_training else opts.validation_batches
    num_batches //= opts.replicas

    def body(total_loss, total_rmspe, batch):
        loss, rmspe, train_op = graph_builder(opts, is_training, learning_rate, batch)
        return total_loss + loss, total_rmspe + rmspe, train_op

    def comp_fn():
        return ipu.loops.repeat(num_batches, body, [np.float32(0)] * 2, infeed)

    with ipu.scopes.ipu_scope("/device:IPU:0"):
        outputs = ipu.ipu_compiler.compile(comp_fn, [])
    return [total / num_batches for total in outputs], infeed.initializer, learning_rate


def train(opts):
    """For each step: rate, loss, RMSPE, those of the validation, variables; and the variables before."""
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = [opts.replicas]
    config.configure_ipu_system()
    program, start, learning_rate = generic_graph(opts, True, partial(make_batches, opts, 1))
    validation, start_validation, _rate = generic_graph(opts, False, partial(make_batches, opts, 2))
    scheduler, saver = DynamicScheduler(opts), ipu.Saver()
    found = []
    with ipu.Session(seed=6) as sess, ipu.Session(seed=7) as other:
        sess.run([ipu.global_variables_initializer(), start])
        before = sess.variables
        other.run(start_validation)
        for step in range(opts.steps):
            rate = scheduler.rate
            trained = sess.run(program, feed_dict={learning_rate: rate})
            saver.restore(other, saver.save(sess, opts.log_dir))
            validated = other.run(validation)
            print(f"Step {step}: rate {rate}, loss {trained[0]:.3f}, validation RMSPE {validated[1]:.3f}")
            found.append((rate, trained, validated, sess.variables))
            scheduler.schedule(validated[1])
    return found, before


if __name__ == "__main__":
    train(parse_args())

"""A benchmark of reinforcement learning: a policy of embeddings and an LSTM, whose actions are drawn.

python -m tests.programs.ported.reinforcement_learning --replicas 2 --accumulate-grad --steps 3
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

import ipu_pipeline as ipu
from ipu_pipeline import embedding_ops, ipu_compiler, ipu_infeed_queue, loops, rnn_ops, utils
from ipu_pipeline.optimizers import CrossReplicaOptimizer, GradientAccumulationOptimizerV2, tf1
from ipu_pipeline.scopes import ipu_scope

# Of discrete observations: how many there are of each kind, from how many values, and their embeddings.
DISCRETE_SIZES = (3, 4, 3, 5)
CARDINALITIES = (20, 6, 15, 8)
EMBEDDING_SIZES = (2, 2, 2, 3)
CONTINUOUS_SHAPES = ((3, 4), (4, 2), (3, 2), (5, 3))
NUM_TRANSFORMED = 8
NUM_ACTIONS = 6


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=["float32", "float16"], default="float32")
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--time-steps", type=int, default=5)
    parser.add_argument("--hidden-size", type=int, default=8)
    parser.add_argument("--batches-per-step", type=int, default=4)
    parser.add_argument("--accumulate-grad", action="store_true")
    parser.add_argument("--gradient-accumulation-count", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=0.01)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(argv)


class EnvGenerator:
    """Batches of observations and rewards, which no environment gives: they are random."""

    def __init__(self, opts):
        self.opts = opts
        self.rng = np.random.default_rng(opts.seed)

    def __call__(self):
        return self

    def __iter__(self):
        return self

    def __next__(self):
        # Different: each batch is another one, so that it matters which replica gets which.
        sizes = self.opts.micro_batch_size, self.opts.time_steps
        discrete = [
            self.rng.integers(number, size=(*sizes, size)).astype(np.int32)
            for size, number in zip(DISCRETE_SIZES, CARDINALITIES, strict=True)
        ]
        shapes = [(*sizes, *shape) for shape in CONTINUOUS_SHAPES]
        shapes += [sizes, (sizes[0], 2, self.opts.hidden_size)]  # rewards, and the LSTM's initial state
        others = [self.rng.normal(scale=2, size=shape).astype(self.opts.dtype) for shape in shapes]
        return (*discrete, *others)


def create_policy(opts, *infeed_data):
    """The actions that are drawn, and the logarithms of their probabilities, [batch, time]."""
    discrete, continuous, state_in = infeed_data[:4], list(infeed_data[4:8]), infeed_data[-1]
    embedded = []
    with ipu.variable_scope("popnn_lookup"):
        for index, observed in enumerate(discrete):
            shape = [CARDINALITIES[index], EMBEDDING_SIZES[index]]
            table = ipu.get_variable(f"emb_matrix{index}", shape, opts.dtype)
            embedded.append(embedding_ops.embedding_lookup(table, observed, name=f"emb_lookup{index}"))
    continuous[-1] = jnp.clip(continuous[-1], -5.0, 5.0)
    joined = [jnp.concatenate(pair, axis=3) for pair in zip(embedded, continuous, strict=True)]
    joined[-1] = ipu.layers.Dense(NUM_TRANSFORMED, dtype=opts.dtype)(joined[-1])
    lstm_input = jnp.concatenate([jnp.max(one, axis=2) for one in joined], axis=2)

    lstm_cell = rnn_ops.PopnnLSTM(num_units=opts.hidden_size, dtype=opts.dtype, name="lstm")
    lstm_output, _state_out = lstm_cell(
        jnp.transpose(lstm_input, [1, 0, 2]),
        training=True,
        initial_state=rnn_ops.LSTMStateTuple(state_in[:, 0], state_in[:, 1]),
    )
    lstm_output = jnp.transpose(lstm_output, [1, 0, 2])
    logits = ipu.layers.Dense(NUM_ACTIONS, name="logits", dtype=opts.dtype)(lstm_output)
    log_prob = jax.nn.log_softmax(logits)

    # Different: a key for tf.random.categorical's hidden state. Each replica and iteration has another one.
    actions = jax.random.categorical(ipu.next_rng_key(), logits)
    masks = jax.nn.one_hot(actions, NUM_ACTIONS, dtype=opts.dtype)
    return actions, jnp.sum(masks * log_prob, axis=-1)


def build_train_op(opts, outfeed_queue, previous_loss, *infeed_data):
    with ipu_scope("/device:IPU:0"):
        actions, action_prob = create_policy(opts, *infeed_data)
        loss = jnp.sum(action_prob * infeed_data[-2])
        opt = tf1.GradientDescentOptimizer(opts.learning_rate)
        if opts.accumulate_grad:  # Different: the newer class, V2
            opt = GradientAccumulationOptimizerV2(opt, num_mini_batches=opts.gradient_accumulation_count)
        opt = CrossReplicaOptimizer(opt)
        # Different: no control dependencies; and the actions are enqueued, to be looked at.
        enqueued = outfeed_queue.enqueue({"loss": loss, "actions": actions})
        return previous_loss + loss, opt.minimize(loss), enqueued


def train(opts):
    """Total losses, [steps]; what was enqueued, [iterations, replicas, ...]; variables before and after."""
    # Different: a queue takes no iterator, even one that can be called; what makes one it takes.
    infeed_queue = ipu_infeed_queue.IPUInfeedQueue(lambda: EnvGenerator(opts))
    outfeed_queue = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
    with ipu_scope("/device:IPU:0"):
        total_loss = ipu_compiler.compile(
            lambda: loops.repeat(
                opts.batches_per_step,
                lambda *carried: build_train_op(opts, outfeed_queue, *carried),
                infeed_queue=infeed_queue,
                inputs=[np.zeros((), opts.dtype)],
            )
        )
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = [opts.replicas]
    config.configure_ipu_system()
    utils.reset_ipu_seed(opts.seed)
    totals, enqueued = [], []
    with ipu.Session() as sess:
        sess.run([ipu.global_variables_initializer(), infeed_queue.initializer])
        before = sess.variables
        for _step in range(opts.steps):
            totals += sess.run(total_loss)
            enqueued.append(sess.run(outfeed_queue.dequeue()))
            print(f"Total loss of the first replica: {totals[-1]:.3f}")
        together = jax.tree.map(lambda *parts: np.concatenate(parts), *enqueued)
        return np.array(totals), together, before, sess.variables


if __name__ == "__main__":
    train(parse_args())

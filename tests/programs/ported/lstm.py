"""A benchmark of a net of LSTMs with a dense layer at its end, which may be trained: a loop on the device.

python -m tests.programs.ported.lstm --train --steps 3
"""

import argparse
import time

import jax.numpy as jnp
import numpy as np

import ipu_pipeline as ipu
from ipu_pipeline import ipu_compiler, ipu_infeed_queue, ipu_outfeed_queue, loops, rnn_ops, scopes, utils
from ipu_pipeline.optimizers import tf1


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", default=4, type=int)
    parser.add_argument("--timesteps", default=10, type=int, help="Recurrent steps.")
    parser.add_argument("--input-size", default=3, type=int)
    parser.add_argument("--hidden-size", default=8, type=int, help="Units of each LSTM.")
    parser.add_argument("--num-layers", default=2, type=int, help="LSTMs.")
    parser.add_argument("--train", action="store_true", help="Compute the loss, and update the weights.")
    parser.add_argument("--batches-per-step", default=20, type=int, help="Iterations of the loop.")
    parser.add_argument("--steps", default=2, type=int, help="Runs of the session.")
    parser.add_argument("--learning-rate", default=0.1, type=float)
    parser.add_argument("--seed", default=1, type=int)
    return parser.parse_args(argv)


def lstm_block(x, num_units, args, name=""):
    # The same: inputs are [timesteps, batch_size, input_size].
    lstm_cell = rnn_ops.PopnnLSTM(num_units=num_units, dtype=x.dtype, name=name)
    return lstm_cell(x, training=args.train)


def lstm_model(args, x):
    for _layer in range(args.num_layers):
        x, final_state = lstm_block(x, args.hidden_size, args)
    # tf.layers.dense(x, 1) is a layer object here.
    return ipu.layers.Dense(1)(final_state.h)


def make_batches(args):
    """Sequences, and what their first feature is on average."""
    # They come from an infeed: the original made constant inputs of the loop's index, in float16.
    rng = np.random.default_rng(args.seed)
    while True:
        inputs = rng.normal(size=(args.timesteps, args.batch_size, args.input_size))
        inputs += rng.normal(size=(1, args.batch_size, args.input_size))
        yield {
            "inputs": inputs.astype(np.float32),
            "labels": inputs[..., 0].mean(axis=0)[:, np.newaxis].astype(np.float32),
        }


class Graph:
    """Queues and operations."""

    def __init__(self, args):
        self.infeed_queue = ipu_infeed_queue.IPUInfeedQueue(lambda: make_batches(args))
        self.outfeed_queue = ipu_outfeed_queue.IPUOutfeedQueue()

        def body(inputs, labels):
            output = lstm_model(args, inputs)
            if not args.train:
                return self.outfeed_queue.enqueue(output)
            # tf.losses.mean_squared_error
            loss = jnp.mean((output - labels) ** 2)
            # The original kept its training step in the loop by a variable. Here what was recorded runs.
            train = tf1.GradientDescentOptimizer(args.learning_rate).minimize(loss)
            return train, self.outfeed_queue.enqueue(loss)

        def loop():
            return loops.repeat(args.batches_per_step, body, infeed_queue=self.infeed_queue)

        with scopes.ipu_scope("/device:IPU:0"):
            self.run = ipu_compiler.compile(loop)
        self.outfeed_op = self.outfeed_queue.dequeue()
        # utils.move_variable_initialization_to_cpu() is left out: variables always start on the host.
        self.init_op = ipu.global_variables_initializer()


def configure(args):
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = 1
    config.configure_ipu_system()
    utils.reset_ipu_seed(args.seed)


def benchmark(args, graph):
    """What the loop enqueued, losses or outputs, and the variables."""
    items = args.batch_size * args.batches_per_step
    with ipu.Session() as session:
        session.run(graph.init_op)
        session.run(graph.infeed_queue.initializer)
        enqueued = []
        for _step in range(args.steps):
            begin = time.time()
            session.run(graph.run)
            enqueued.append(session.run(graph.outfeed_op))
            print(f"{items / (time.time() - begin):5f} items/sec")
        session.run(graph.infeed_queue.deleter)
        return np.concatenate(enqueued), session.variables


def main(argv=None):
    args = parse_args(argv)
    configure(args)
    benchmark(args, Graph(args))


if __name__ == "__main__":
    main()

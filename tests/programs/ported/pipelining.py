"""A feature example: a small convolutional net in three stages, trained by a loop over sessions' runs.

python -m tests.programs.ported.pipelining --steps 20
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ipu_pipeline as ipu
from ipu_pipeline import datasets, ipu_compiler, ipu_infeed_queue, ipu_outfeed_queue, scopes
from ipu_pipeline.ops import pipelining_ops


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--repeat-count", type=int, default=2, help="Weight updates in one run.")
    parser.add_argument("--gradient-accumulation-count", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=0.02)
    parser.add_argument("--steps", type=int, default=10, help="Runs of the session.")
    parser.add_argument("--filters", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--pipeline-schedule",
        choices=[schedule.name for schedule in pipelining_ops.PipelineSchedule],
        default="Grouped",
    )
    return parser.parse_args(argv)


def create_dataset(args):
    digits = datasets.load_digits()
    return datasets.TrainingBatches(
        digits.train_images[..., np.newaxis], digits.train_labels, args.batch_size, args.seed
    )


def conv(x, filters, name):
    with ipu.variable_scope(name):
        kernel = ipu.get_variable("kernel", [3, 3, x.shape[-1], filters], initializer="glorot_uniform")
        bias = ipu.get_variable("bias", [filters], initializer="zeros")
        layout = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=layout)
        return jax.nn.relu(x + bias)


def pipelined_model(args, learning_rate, infeed_queue, outfeed_queue):
    """The net. The learning rate goes in as an input, and through the stages to the optimizer."""

    def stage1(lr, images, labels):
        with ipu.variable_scope("stage1", use_resource=True):
            x = conv(images, args.filters, "conv1")
            x = ipu.layers.MaxPooling2D(2)(x)
        return lr, x, labels

    def stage2(lr, x, labels):
        with ipu.variable_scope("stage2", use_resource=True):
            x = conv(x, 2 * args.filters, "conv2")
            x = ipu.layers.Flatten()(x)
        return lr, x, labels

    def stage3(lr, x, labels):
        with ipu.variable_scope("stage3", use_resource=True):
            logits = ipu.layers.Dense(10)(x)
            cross_entropy = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            loss = jnp.mean(cross_entropy)
        return lr, loss

    def optimizer_function(lr, loss):
        return pipelining_ops.OptimizerFunctionOutput(optax.sgd(lr), loss)

    schedule = next(s for s in pipelining_ops.PipelineSchedule if s.name == args.pipeline_schedule)
    return pipelining_ops.pipeline(
        computational_stages=[stage1, stage2, stage3],
        gradient_accumulation_count=args.gradient_accumulation_count,
        repeat_count=args.repeat_count,
        inputs=[learning_rate],
        infeed_queue=infeed_queue,
        outfeed_queue=outfeed_queue,
        optimizer_function=optimizer_function,
        pipeline_schedule=schedule,
        outfeed_loss=True,
        name="pipelined_model",
    )


class Graph:
    """Everything that a run needs: queues, placeholders and operations."""

    def __init__(self, args):
        self.infeed_queue = ipu_infeed_queue.IPUInfeedQueue(create_dataset(args))
        self.outfeed_queue = ipu_outfeed_queue.IPUOutfeedQueue()
        self.learning_rate = ipu.placeholder(np.float32, [], name="learning_rate")

        def model(learning_rate):
            return pipelined_model(args, learning_rate, self.infeed_queue, self.outfeed_queue)

        with scopes.ipu_scope("/device:IPU:0"):
            self.train_op = ipu_compiler.compile(model, inputs=[self.learning_rate])
        self.outfeed_op = self.outfeed_queue.dequeue()
        self.init_op = ipu.global_variables_initializer()
        ipu.utils.move_variable_initialization_to_cpu()


def configure(args):
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = 4  # the next power of two
    config.configure_ipu_system()
    ipu.utils.reset_ipu_seed(args.seed)


def train(args, graph):
    """The losses of all micro-batches, and the variables."""
    examples_per_step = args.batch_size * args.gradient_accumulation_count * args.repeat_count
    with ipu.Session() as session:
        session.run(graph.init_op)
        session.run(graph.infeed_queue.initializer)
        all_losses = []
        for step in range(args.steps):
            begin = time.time()
            session.run(graph.train_op, feed_dict={graph.learning_rate: args.learning_rate})
            losses = session.run(graph.outfeed_op)
            all_losses.append(losses)
            speed = examples_per_step / (time.time() - begin)
            print(f"Step {step}: loss {np.mean(losses):.4f}, {speed:.0f} images per second")
        session.run(graph.infeed_queue.deleter)
        return np.concatenate(all_losses), session.variables


def main(argv=None):
    args = parse_args(argv)
    configure(args)
    train(args, Graph(args))


if __name__ == "__main__":
    main()

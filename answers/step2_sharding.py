"""Tutorial step 2: the model sharded over two IPUs, in a loop."""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ipu_pipeline as ipu
from ipu_pipeline import datasets, tutorial_support
from ipu_pipeline.tutorial_support import emulate


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    tutorial_support.add_arguments(parser, repeat_count=160)
    args = parser.parse_args()
    remainder = args.repeat_count % args.batches_to_accumulate
    if remainder > 0:
        args.repeat_count += args.batches_to_accumulate - remainder
        print(f"Rounding the repeat count up to a multiple of --batches-to-accumulate: {args.repeat_count}")
    return args


def compute_logits(images: Any) -> Any:
    with ipu.scopes.ipu_shard(0):
        with ipu.variable_scope("flatten"):
            activations = ipu.layers.Flatten()(images)
        with ipu.variable_scope("dense256"):
            activations = emulate(ipu.layers.Dense(256, activation=jax.nn.relu)(activations))
        with ipu.variable_scope("dense128"):
            activations = emulate(ipu.layers.Dense(128, activation=jax.nn.relu)(activations))
        with ipu.variable_scope("dense64"):
            activations = emulate(ipu.layers.Dense(64, activation=jax.nn.relu)(activations))
    with ipu.scopes.ipu_shard(1):
        with ipu.variable_scope("dense32"):
            activations = emulate(ipu.layers.Dense(32, activation=jax.nn.relu)(activations))
        with ipu.variable_scope("logits"):
            return emulate(ipu.layers.Dense(10)(activations))


def count_right(logits: Any, labels: Any, mask: Any) -> Any:
    is_right = (jnp.argmax(logits, axis=-1) == labels) & mask
    return jnp.sum(is_right.astype(jnp.int32))


def main() -> None:
    args = parse_arguments()
    data, data_line = datasets.load(args.dataset, args.data_dir)
    print(data_line)
    num_examples = len(data.train_images)

    # The queues between the host and the device.
    batches = datasets.TrainingBatches(data.train_images, data.train_labels, args.batch_size, args.seed)
    infeed_queue = ipu.ipu_infeed_queue.IPUInfeedQueue(batches)
    outfeed_queue = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
    feeds = tutorial_support.make_evaluation_feeds(data, args.batch_size)
    num_test_batches, test_infeed_queue, test_outfeed_queue = feeds

    def model(learning_rate: Any, images: Any, labels: Any) -> Any:
        logits = compute_logits(images)
        with ipu.variable_scope("softmax_ce"):
            cross_entropy = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        with ipu.variable_scope("mean"):
            loss = emulate(jnp.mean(cross_entropy))
        optimizer = ipu.optimizers.GradientAccumulationOptimizerV2(
            optax.sgd(learning_rate), num_mini_batches=args.batches_to_accumulate
        )
        train_op = optimizer.minimize(loss)
        return learning_rate, train_op, outfeed_queue.enqueue(loss)

    def loop_repeat_model(learning_rate: Any) -> Any:
        with ipu.variable_scope("FCModel"):
            return ipu.loops.repeat(args.repeat_count, model, [learning_rate], infeed_queue)

    def evaluation_model(images: Any, labels: Any, mask: Any) -> Any:
        return test_outfeed_queue.enqueue(count_right(compute_logits(images), labels, mask))

    def loop_evaluation_model() -> Any:
        with ipu.variable_scope("FCModel"):
            return ipu.loops.repeat(num_test_batches, evaluation_model, [], test_infeed_queue)

    learning_rate = ipu.placeholder(np.float32, [], name="learning_rate")
    with ipu.scopes.ipu_scope("/device:IPU:0"):
        compiled_model = ipu.ipu_compiler.compile(loop_repeat_model, inputs=[learning_rate])
        compiled_evaluation = ipu.ipu_compiler.compile(loop_evaluation_model)

    config = ipu.config.IPUConfig()
    config.auto_select_ipus = 2
    config.selection_order = ipu.utils.SelectionOrder.SNAKE
    config.ipu_model = args.ipu_model
    config.configure_ipu_system()

    examples_per_step = args.batch_size * args.repeat_count
    steps = tutorial_support.count_steps(args, examples_per_step, num_examples)
    outfeed_op = outfeed_queue.dequeue()
    with ipu.Session(seed=args.seed) as session:
        session.run(infeed_queue.initializer)

        def run_step() -> Any:
            session.run(compiled_model, {learning_rate: args.learning_rate})
            return session.run(outfeed_op)

        tutorial_support.train(run_step, steps, examples_per_step, num_examples)
        tutorial_support.evaluate(
            session,
            compiled_evaluation,
            test_infeed_queue,
            test_outfeed_queue,
            len(data.test_images),
        )
    print("Program ran successfully")


if __name__ == "__main__":
    tutorial_support.exit_on_error(main)

"""Tutorial step 3: the model in two pipeline stages, each on its own IPU."""

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
    tutorial_support.add_arguments(parser, repeat_count=10)
    tutorial_support.add_schedule_argument(parser)
    return parser.parse_args()


# Every layer takes and returns the learning rate and the labels too: what a later stage needs travels
# through the stages before it. Values that are only passed on cost nothing.


def layer1_flatten(learning_rate: Any, images: Any, labels: Any) -> Any:
    with ipu.variable_scope("flatten"):
        activations = ipu.layers.Flatten()(images)
        return learning_rate, activations, labels


def layer2_dense256(learning_rate: Any, activations: Any, labels: Any) -> Any:
    with ipu.variable_scope("dense256"):
        activations = emulate(ipu.layers.Dense(256, activation=jax.nn.relu)(activations))
        return learning_rate, activations, labels


def layer3_dense128(learning_rate: Any, activations: Any, labels: Any) -> Any:
    with ipu.variable_scope("dense128"):
        activations = emulate(ipu.layers.Dense(128, activation=jax.nn.relu)(activations))
        return learning_rate, activations, labels


def layer4_dense64(learning_rate: Any, activations: Any, labels: Any) -> Any:
    with ipu.variable_scope("dense64"):
        activations = emulate(ipu.layers.Dense(64, activation=jax.nn.relu)(activations))
        return learning_rate, activations, labels


def layer5_dense32(learning_rate: Any, activations: Any, labels: Any) -> Any:
    with ipu.variable_scope("dense32"):
        activations = emulate(ipu.layers.Dense(32, activation=jax.nn.relu)(activations))
        return learning_rate, activations, labels


def layer6_logits(learning_rate: Any, activations: Any, labels: Any) -> Any:
    with ipu.variable_scope("logits"):
        logits = emulate(ipu.layers.Dense(10)(activations))
        return learning_rate, logits, labels


def layer7_cel(learning_rate: Any, logits: Any, labels: Any) -> Any:
    with ipu.variable_scope("softmax_ce"):
        cross_entropy = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    with ipu.variable_scope("mean"):
        loss = emulate(jnp.mean(cross_entropy))
        return learning_rate, loss


def count_right(logits: Any, labels: Any, mask: Any) -> Any:
    is_right = (jnp.argmax(logits, axis=-1) == labels) & mask
    return jnp.sum(is_right.astype(jnp.int32))


def optimizer_function(learning_rate: Any, loss: Any) -> ipu.pipelining_ops.OptimizerFunctionOutput:
    # The pipeline accumulates the gradients and applies the optimizer to each stage's variables.
    return ipu.pipelining_ops.OptimizerFunctionOutput(optax.sgd(learning_rate), loss)


def stage1(learning_rate: Any, images: Any, labels: Any) -> Any:
    values = layer1_flatten(learning_rate, images, labels)
    values = layer2_dense256(*values)
    values = layer3_dense128(*values)
    return layer4_dense64(*values)


def stage2(learning_rate: Any, activations: Any, labels: Any) -> Any:
    values = layer5_dense32(learning_rate, activations, labels)
    values = layer6_logits(*values)
    return layer7_cel(*values)


def evaluation_stage1(images: Any, labels: Any, mask: Any) -> Any:
    activations = stage1(None, images, labels)[1]
    return activations, labels, mask


def evaluation_stage2(activations: Any, labels: Any, mask: Any) -> Any:
    values = layer5_dense32(None, activations, labels)
    logits = layer6_logits(*values)[1]
    return count_right(logits, labels, mask)


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

    def model(learning_rate: Any) -> Any:
        with ipu.variable_scope("FCModel"):
            return ipu.pipelining_ops.pipeline(
                computational_stages=[stage1, stage2],
                gradient_accumulation_count=args.batches_to_accumulate,
                repeat_count=args.repeat_count,
                inputs=[learning_rate],
                infeed_queue=infeed_queue,
                outfeed_queue=outfeed_queue,
                optimizer_function=optimizer_function,
                pipeline_schedule=tutorial_support.schedule_of(args),
                outfeed_loss=True,
                name="Pipeline",
            )

    def evaluation_model() -> Any:
        with ipu.variable_scope("FCModel"):
            return ipu.pipelining_ops.pipeline(
                computational_stages=[evaluation_stage1, evaluation_stage2],
                gradient_accumulation_count=num_test_batches,
                infeed_queue=test_infeed_queue,
                outfeed_queue=test_outfeed_queue,
                name="Evaluation",
            )

    learning_rate = ipu.placeholder(np.float32, [], name="learning_rate")
    with ipu.scopes.ipu_scope("/device:IPU:0"):
        compiled_model = ipu.ipu_compiler.compile(model, inputs=[learning_rate])
        compiled_evaluation = ipu.ipu_compiler.compile(evaluation_model)

    config = ipu.config.IPUConfig()
    config.auto_select_ipus = 2
    config.selection_order = ipu.utils.SelectionOrder.SNAKE
    config.ipu_model = args.ipu_model
    config.configure_ipu_system()

    examples_per_step = args.batch_size * args.batches_to_accumulate * args.repeat_count
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

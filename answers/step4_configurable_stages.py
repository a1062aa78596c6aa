"""Tutorial step 4: the model in pipeline stages that the command line chooses."""

import argparse
import itertools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ipu_pipeline as ipu
from ipu_pipeline import datasets, tutorial_support
from ipu_pipeline.tutorial_support import emulate

Layer = Callable[..., Any]


def parse_arguments(layer_names: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    tutorial_support.add_arguments(parser, repeat_count=10)
    tutorial_support.add_schedule_argument(parser)
    parser.add_argument(
        "--splits",
        nargs="+",
        default=["dense32"],
        metavar="LAYER",
        help="Where to split: each names the layer that starts the next stage; or auto, where a step is "
        "then shortest. The layers are: " + ", ".join(layer_names) + ".",
    )
    parser.add_argument(
        "--num-pipeline-stages",
        type=tutorial_support.positive_int,
        default=None,
        metavar="N",
        help="With --splits auto: how many stages to make; by default 2.",
    )
    parser.add_argument(
        "--auto-round-num-ipus",
        action="store_true",
        help="Take as many IPUs as the next power of two, where the stages are fewer.",
    )
    args = parser.parse_args()
    if "auto" in args.splits and len(args.splits) > 1:
        parser.error("--splits auto stands alone")
    if args.num_pipeline_stages is not None and args.splits != ["auto"]:
        parser.error(
            "--num-pipeline-stages goes with --splits auto; other splits say how many stages there are"
        )
    if (args.num_pipeline_stages or 0) > len(layer_names):
        parser.error(f"--num-pipeline-stages: at most {len(layer_names)}, one for each layer")
    return args


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


def discover_layers() -> list[tuple[str, Layer]]:
    """This module's functions named `layer<number>_<name>`, as (name, function) in order of the number."""
    found = []
    for symbol, value in globals().items():
        match = re.fullmatch(r"layer(\d+)_(\w+)", symbol)
        if match and callable(value):
            found.append((int(match.group(1)), match.group(2), value))
    return [(name, function) for _number, name, function in sorted(found)]


def move_layers_to_stages(
    layers: list[tuple[str, Layer]], splits: list[str]
) -> list[list[tuple[str, Layer]]]:
    """The layers of each stage; every split names the layer that starts the next one."""
    names = [name for name, _function in layers]
    for split in splits:
        if split not in names:
            raise ValueError(f"--splits: there is no layer {split!r}; the layers are {', '.join(names)}.")
    starts = [0, *(names.index(split) for split in splits), len(names)]
    if starts != sorted(starts):
        raise ValueError(
            f"--splits: {' '.join(splits)} is out of order; the layers are, in order, {', '.join(names)}."
        )
    stages = [layers[start:end] for start, end in itertools.pairwise(starts)]
    if [] in stages:
        raise ValueError(
            f"--splits: {' '.join(splits)} leaves stage {stages.index([])} empty. The first layer, "
            f"{names[0]}, cannot start a new stage, and no layer can start two."
        )
    return stages


def find_splits(
    layers: list[tuple[str, Layer]], args: argparse.Namespace, infeed_queue: Any
) -> ipu.pipelining_ops.AutoStages:
    """The stages whose step takes least, by what each layer takes on the IPUs."""
    return ipu.pipelining_ops.auto_stages(
        [layer for _name, layer in layers],
        args.num_pipeline_stages or 2,
        inputs=[np.float32(args.learning_rate)],
        infeed_queue=infeed_queue,
        optimizer_function=optimizer_function,
        gradient_accumulation_count=args.batches_to_accumulate,
        pipeline_schedule=tutorial_support.schedule_of(args),
    )


def make_stage(index: int, layers: list[tuple[str, Layer]]) -> Layer:
    """A stage function that calls the layers one after another."""

    def stage(*values: Any) -> Any:
        for name, layer in layers:
            with jax.named_scope(f"stage{index}_{name}"):
                print(f"Issuing stage {index} layer {name}")
                values = layer(*values)
        return values

    stage.__name__ = "-".join(name for name, _layer in layers)
    return stage


def make_evaluation_stage(layers: list[tuple[str, Layer]], is_last: bool) -> Layer:
    """The same for the held-out images: in place of the loss, the number of right answers."""

    def stage(activations: Any, labels: Any, mask: Any) -> Any:
        for name, layer in layers:
            if name != "cel":
                activations = layer(None, activations, labels)[1]
        return count_right(activations, labels, mask) if is_last else (activations, labels, mask)

    return stage


def main() -> None:
    layers = discover_layers()
    args = parse_arguments([name for name, _function in layers])
    stages = None if args.splits == ["auto"] else move_layers_to_stages(layers, args.splits)
    num_stages = len(stages) if stages else args.num_pipeline_stages or 2

    config = ipu.config.IPUConfig()
    config.auto_select_ipus = num_stages
    config.auto_round_num_ipus = args.auto_round_num_ipus
    config.selection_order = ipu.utils.SelectionOrder.SNAKE
    config.ipu_model = args.ipu_model
    config.configure_ipu_system()

    data, data_line = datasets.load(args.dataset, args.data_dir)
    num_examples = len(data.train_images)

    # The queues between the host and the device.
    batches = datasets.TrainingBatches(data.train_images, data.train_labels, args.batch_size, args.seed)
    infeed_queue = ipu.ipu_infeed_queue.IPUInfeedQueue(batches)
    outfeed_queue = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
    feeds = tutorial_support.make_evaluation_feeds(data, args.batch_size)
    num_test_batches, test_infeed_queue, test_outfeed_queue = feeds

    print("Layers:")
    print(" " + ", ".join(name for name, _function in layers))
    if stages is None:
        found = find_splits(layers, args, infeed_queue)
        print(found.table)
        stages = [[layers[number] for number in group] for group in found.groups]
    print("Stages:")
    for index, stage in enumerate(stages):
        print(f" {index}. " + "-".join(name for name, _function in stage))
    print(data_line)

    def model(learning_rate: Any) -> Any:
        with ipu.variable_scope("FCModel"):
            return ipu.pipelining_ops.pipeline(
                computational_stages=[make_stage(index, stage) for index, stage in enumerate(stages)],
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
                computational_stages=[
                    make_evaluation_stage(stage, stage is stages[-1]) for stage in stages
                ],
                gradient_accumulation_count=num_test_batches,
                infeed_queue=test_infeed_queue,
                outfeed_queue=test_outfeed_queue,
                name="Evaluation",
            )

    learning_rate = ipu.placeholder(np.float32, [], name="learning_rate")
    with ipu.scopes.ipu_scope("/device:IPU:0"):
        compiled_model = ipu.ipu_compiler.compile(model, inputs=[learning_rate])
        compiled_evaluation = ipu.ipu_compiler.compile(evaluation_model)

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

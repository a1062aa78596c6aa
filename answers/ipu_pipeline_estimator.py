"""The tutorial's model in two pipeline stages, trained, evaluated and used by an estimator."""

import argparse
import logging
import sys
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ipu_pipeline as ipu
from ipu_pipeline import datasets, tutorial_support


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    tutorial_support.add_arguments(parser, repeat_count=10)
    tutorial_support.add_schedule_argument(parser)
    parser.add_argument(
        "--model-dir",
        default=None,
        help="Where checkpoints and scalars go, from which training goes on; by default a folder that is "
        "removed at the end.",
    )
    parser.add_argument(
        "--save-checkpoints-steps",
        type=tutorial_support.positive_int,
        default=None,
        help="Steps between checkpoints; by default one every ten minutes.",
    )
    return parser.parse_args()


def layer1_flatten(images: Any, labels: Any) -> Any:
    with ipu.variable_scope("flatten"):
        activations = ipu.layers.Flatten()(images)
        return activations, labels


def layer2_dense256(activations: Any, labels: Any) -> Any:
    with ipu.variable_scope("dense256"):
        activations = ipu.layers.Dense(256, activation=jax.nn.relu)(activations)
        return activations, labels


def layer3_dense128(activations: Any, labels: Any) -> Any:
    with ipu.variable_scope("dense128"):
        activations = ipu.layers.Dense(128, activation=jax.nn.relu)(activations)
        return activations, labels


def layer4_dense64(activations: Any, labels: Any) -> Any:
    with ipu.variable_scope("dense64"):
        activations = ipu.layers.Dense(64, activation=jax.nn.relu)(activations)
        return activations, labels


def layer5_dense32(activations: Any, labels: Any) -> Any:
    with ipu.variable_scope("dense32"):
        activations = ipu.layers.Dense(32, activation=jax.nn.relu)(activations)
        return activations, labels


def layer6_logits(activations: Any, labels: Any) -> Any:
    with ipu.variable_scope("logits"):
        logits = ipu.layers.Dense(10)(activations)
        return logits, labels


def layer7_cel(logits: Any, labels: Any) -> Any:
    with ipu.variable_scope("softmax_ce"):
        cross_entropy = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    with ipu.variable_scope("mean"):
        return jnp.mean(cross_entropy)


def model_fn(mode: str, params: dict[str, Any]) -> Any:
    # The model is the same for training, evaluation and prediction, but for what the last stage returns.
    # The held-out images come with a mask, which is False for those that only fill the last batch.
    def stage1(images: Any, labels: Any, *mask: Any) -> Any:
        with ipu.variable_scope("FCModel"):
            values = layer1_flatten(images, labels)
            values = layer2_dense256(*values)
            values = layer3_dense128(*values)
            return *layer4_dense64(*values), *mask

    def stage2(activations: Any, labels: Any, *mask: Any) -> Any:
        with ipu.variable_scope("FCModel"):
            values = layer5_dense32(activations, labels)
            logits, labels = layer6_logits(*values)
        if mode == ipu.ModeKeys.TRAIN:
            return layer7_cel(logits, labels)
        digits = jnp.argmax(logits, axis=-1)
        if mode == ipu.ModeKeys.PREDICT:
            return digits
        num_right = jnp.sum(((digits == labels) & mask[0]).astype(jnp.int32))
        return layer7_cel(logits, labels), num_right

    def optimizer_function(loss: Any) -> Any:
        return ipu.pipelining_ops.OptimizerFunctionOutput(optax.sgd(params["learning_rate"]), loss)

    def eval_metrics_fn(losses: Any, num_right: Any) -> dict[str, Any]:
        return {"loss": losses, "right per batch": num_right}  # of which means are taken

    return ipu.ipu_pipeline_estimator.IPUPipelineEstimatorSpec(
        mode,
        computational_stages=[stage1, stage2],
        optimizer_function=optimizer_function,
        eval_metrics_fn=eval_metrics_fn,
        gradient_accumulation_count=params["gradient_accumulation_count"],
        pipeline_schedule=params["pipeline_schedule"],
    )


class PrintingHook(ipu.ipu_session_run_hooks.SessionRunHook):
    """Prints the mean loss of every tenth step, and of the last one."""

    def __init__(
        self, examples_per_step: int, num_examples: int, iterations_per_loop: int, steps: int
    ) -> None:
        self._examples_per_step = examples_per_step
        self._num_examples = num_examples
        self._iterations_per_loop = iterations_per_loop
        self._steps = steps

    def before_run(self, _run_context: Any) -> Any:
        """Asks for the mean loss of the run."""
        return ipu.ipu_session_run_hooks.SessionRunArgs("loss")

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Prints it if it is time."""
        step = run_context.global_step // self._iterations_per_loop - 1
        losses = [] if tutorial_support.uses_synthetic_data() else run_values.results
        tutorial_support.print_step(step, self._steps, self._examples_per_step, self._num_examples, losses)


def run(args: argparse.Namespace, model_dir: str) -> None:
    data, data_line = datasets.load(args.dataset, args.data_dir)
    print(data_line)
    num_examples = len(data.train_images)

    # For the estimator a step is a micro-batch; it runs as many at once as the other programs do in theirs.
    iterations_per_loop = args.batches_to_accumulate * args.repeat_count
    examples_per_step = args.batch_size * iterations_per_loop
    steps = tutorial_support.count_steps(args, examples_per_step, num_examples)

    ipu_options = ipu.config.IPUConfig()
    ipu_options.auto_select_ipus = 2
    ipu_options.ipu_model = args.ipu_model
    ipu_options.selection_order = ipu.utils.SelectionOrder.SNAKE
    ipu_run_config = ipu.ipu_run_config.IPURunConfig(
        num_shards=2, iterations_per_loop=iterations_per_loop, ipu_options=ipu_options
    )
    every = args.save_checkpoints_steps
    config = ipu.ipu_run_config.RunConfig(
        ipu_run_config=ipu_run_config,
        tf_random_seed=args.seed,
        log_step_count_steps=iterations_per_loop,
        save_summary_steps=iterations_per_loop,
        save_checkpoints_steps=None if every is None else every * iterations_per_loop,
    )
    estimator = ipu.ipu_pipeline_estimator.IPUPipelineEstimator(
        model_fn=model_fn,
        model_dir=model_dir,
        config=config,
        params={
            "learning_rate": args.learning_rate,
            "gradient_accumulation_count": args.batches_to_accumulate,
            "pipeline_schedule": tutorial_support.schedule_of(args),
        },
    )

    def input_fn() -> Any:
        return datasets.TrainingBatches(data.train_images, data.train_labels, args.batch_size, args.seed)

    def test_input_fn() -> Any:
        return datasets.EvaluationBatches(data.test_images, data.test_labels, args.batch_size)

    before = 0
    if estimator.latest_checkpoint() is not None:
        before = int(estimator.get_variable_value("global_step"))
        print(f"Training goes on after step {before // iterations_per_loop - 1}")
    begin = time.perf_counter()
    hook = PrintingHook(examples_per_step, num_examples, iterations_per_loop, steps)
    estimator.train(input_fn, hooks=[hook], max_steps=steps * iterations_per_loop)
    elapsed = time.perf_counter() - begin
    trained = (int(estimator.get_variable_value("global_step")) - before) * args.batch_size
    tutorial_support.print_speed(trained, elapsed)

    if tutorial_support.uses_synthetic_data():
        print("Test accuracy: none, as synthetic data bring nothing back")
        return
    metrics = estimator.evaluate(test_input_fn)
    num_test_images = len(data.test_images)
    num_right = round(metrics["right per batch"] * len(test_input_fn()))
    print(f"Test accuracy: {num_right / num_test_images:.4f} ({num_right} of {num_test_images} images)")

    digits = list(estimator.predict(test_input_fn))[:num_test_images]
    if np.sum(digits == data.test_labels) != num_right:
        raise RuntimeError("The predictions are others than those that were evaluated.")
    print("Predictions of the first images:", *digits[:10])
    print("Their labels:                   ", *data.test_labels[:10])


def main() -> None:
    args = parse_arguments()
    logging.basicConfig(format="%(message)s", stream=sys.stderr, level=logging.WARNING)
    if args.model_dir is not None:
        run(args, args.model_dir)
    else:
        with tempfile.TemporaryDirectory(prefix="ipu_pipeline_estimator_") as folder:
            run(args, folder)
    print("Program ran successfully")


if __name__ == "__main__":
    tutorial_support.exit_on_error(main)

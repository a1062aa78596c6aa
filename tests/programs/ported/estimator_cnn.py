"""A feature example: a convolutional net in an IPUEstimator, trained, evaluated and served.

python -m tests.programs.ported.estimator_cnn --model-dir /tmp/cnn
"""

import argparse

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
    parser.add_argument("--batch-size", type=int, default=12)
    parser.add_argument("--batches-per-loop", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--learning-rate", type=float, default=0.05)
    parser.add_argument("--learning-rate-decay-steps", type=int, default=20)
    parser.add_argument("--model-dir", default="estimator_cnn")
    return parser.parse_args(argv)


def model_fn(features, labels, mode, params):
    # Different: layers of ipu.layers are called as they are made; Keras's Sequential is not there.
    x = ipu.layers.Conv2D(4, (3, 3))(features)
    x = jax.nn.relu(x)
    x = ipu.layers.MaxPooling2D(pool_size=(2, 2))(x)
    x = ipu.layers.Flatten()(x)
    logits = ipu.layers.Dense(NUM_CLASSES)(x)
    if mode == ipu.ModeKeys.PREDICT:
        predictions = {"classes": jnp.argmax(logits, -1), "probabilities": jax.nn.softmax(logits)}
        return ipu.ipu_estimator.IPUEstimatorSpec(mode, predictions=predictions)
    loss = jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))
    if mode == ipu.ModeKeys.EVAL:
        metrics = {"accuracy": ipu.metrics.accuracy(labels, jnp.argmax(logits, -1))}
        return ipu.ipu_estimator.IPUEstimatorSpec(mode, loss=loss, eval_metric_ops=metrics)
    learning_rate = tf1.exponential_decay(
        params["learning_rate"], ipu.get_global_step(), params["decay_steps"], 0.5, staircase=True
    )
    train_op = tf1.MomentumOptimizer(learning_rate, 0.9).minimize(loss)
    return ipu.ipu_estimator.IPUEstimatorSpec(mode, loss=loss, train_op=train_op)


def make_estimator(opts):
    ipu_options = ipu.config.IPUConfig()
    ipu_options.auto_select_ipus = 1
    config = ipu.ipu_run_config.RunConfig(
        ipu_run_config=ipu.ipu_run_config.IPURunConfig(
            iterations_per_loop=opts.batches_per_loop, ipu_options=ipu_options
        ),
        log_step_count_steps=opts.batches_per_loop,
        save_summary_steps=opts.batches_per_loop,
        model_dir=opts.model_dir,
        tf_random_seed=42,
    )
    return ipu.ipu_estimator.IPUEstimator(
        config=config,
        model_fn=model_fn,
        params={"learning_rate": opts.learning_rate, "decay_steps": opts.learning_rate_decay_steps},
    )


def training_data(opts):
    # Different: digits, not CIFAR-10; the data set goes on without end.
    digits = datasets.load_digits()
    images = digits.train_images[..., np.newaxis]
    return datasets.TrainingBatches(images, digits.train_labels, opts.batch_size, seed=3)


def evaluation_data(opts):
    # Different: the last, smaller batch may stay; IPUs needed all batches to be of one size.
    digits = datasets.load_digits()
    images, labels = digits.test_images[..., np.newaxis], digits.test_labels
    starts = range(0, len(images), opts.batch_size)
    return [(images[n : n + opts.batch_size], labels[n : n + opts.batch_size]) for n in starts]


def receive(opts):
    """What a server gets."""
    return jax.ShapeDtypeStruct((opts.batch_size, 28, 28, 1), np.float32)


def main(opts):
    """What the evaluation gives, the classes of the test images, and the folder of what is served."""
    estimator = make_estimator(opts)
    num_loops = opts.epochs * 119 // opts.batches_per_loop
    steps = num_loops * opts.batches_per_loop
    result, _exported = ipu.train_and_evaluate(
        estimator,
        ipu.TrainSpec(lambda: training_data(opts), max_steps=steps),
        ipu.EvalSpec(lambda: evaluation_data(opts), steps=None),
    )
    print(f"Accuracy {result['accuracy']:.3f} after {result['global_step']} batches.")
    images = [image for image, _labels in evaluation_data(opts)]
    classes = [found["classes"] for found in estimator.predict(lambda: images)]
    served = estimator.export_saved_model(f"{opts.model_dir}/served", lambda: receive(opts))
    return estimator, result, np.array(classes), served


if __name__ == "__main__":
    main(parse_args())

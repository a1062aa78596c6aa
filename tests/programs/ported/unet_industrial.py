"""A U-Net that finds defects in textures, in four stages: skip connections cross them. By an estimator.

python -m tests.programs.ported.unet_industrial --steps 200 --model-dir unet
"""

import argparse
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ipu_pipeline as ipu
from ipu_pipeline import ipu_pipeline_estimator, ipu_run_config, normalization_ops
from ipu_pipeline.optimizers import tf1
from ipu_pipeline.pipelining_ops import OptimizerFunctionOutput


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--exec-mode",
        choices=["train_and_evaluate", "train", "evaluate", "predict"],
        default="train_and_evaluate",
    )
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--image-size", type=int, default=16)
    parser.add_argument("--base-filters", type=int, default=4)
    parser.add_argument("--gradient-accumulation-count", type=int, default=4)
    parser.add_argument("--iterations-per-loop", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument("--steps", type=int, default=64, help="Micro-batches to train on.")
    parser.add_argument("--eval-steps", type=int, default=8)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--model-dir")
    return parser.parse_args(argv)


def make_batches(params, seed, num_batches):
    """Noise, with a bright ellipse in it; and where that is."""
    rng = np.random.default_rng(seed)
    size, shape = params["image_size"], (params["batch_size"], 1, 1)
    rows, columns = np.mgrid[:size, :size]
    for _batch in range(num_batches):
        centre = rng.uniform(0.25 * size, 0.75 * size, (2, *shape))
        radii = rng.uniform(0.15 * size, 0.3 * size, (2, *shape))
        is_defect = ((rows - centre[0]) / radii[0]) ** 2 + ((columns - centre[1]) / radii[1]) ** 2 < 1
        image = rng.normal(0, 0.3, is_defect.shape) + is_defect
        yield {
            "image": image[..., np.newaxis].astype(np.float32),
            "mask": is_defect[..., np.newaxis].astype(np.float32),
        }


def training_input_fn(params):
    return lambda: make_batches(params, params["seed"], 1_000_000)


def eval_input_fn(params):
    return list(make_batches(params, params["seed"] + 1, params["eval_steps"]))


def conv_block(x, filters, name):
    with ipu.variable_scope(name):
        x = ipu.layers.Conv2D(filters, 3, padding="same", use_bias=False, kernel_initializer="he_normal")(x)
        x = normalization_ops.group_norm(x, groups=2)
        return jax.nn.relu(x)


def upsample_block(x, skip, filters, name):
    with ipu.variable_scope(name):
        x = ipu.layers.Conv2DTranspose(filters, 2, strides=2, padding="same", name="upsample")(x)
        x = jnp.concatenate([skip, x], axis=-1)
    return conv_block(x, filters, f"{name}/conv")


def dice_score(probabilities, mask):
    intersection = jnp.sum(probabilities * mask, axis=(1, 2, 3))
    union = jnp.sum(probabilities, axis=(1, 2, 3)) + jnp.sum(mask, axis=(1, 2, 3))
    return jnp.mean((2 * intersection + 1) / (union + 1))


def model_fn(mode, params):
    filters = params["base_filters"]

    def down(image, mask):
        with ipu.variable_scope("unet"):
            skip1 = conv_block(image, filters, "down1")
            x = ipu.layers.MaxPooling2D(2)(skip1)
            skip2 = conv_block(x, 2 * filters, "down2")
            x = ipu.layers.MaxPooling2D(2)(skip2)
        return x, skip1, skip2, mask

    def bottleneck(x, skip1, skip2, mask):
        with ipu.variable_scope("unet"):
            x = conv_block(x, 4 * filters, "bottleneck")
        return x, skip1, skip2, mask

    def up2(x, skip1, skip2, mask):
        with ipu.variable_scope("unet"):
            x = upsample_block(x, skip2, 2 * filters, "up2")
        return x, skip1, mask

    def up1(x, skip1, mask):
        with ipu.variable_scope("unet"):
            x = upsample_block(x, skip1, filters, "up1")
            logits = ipu.layers.Conv2D(1, 1, name="logits")(x)
        probabilities = jax.nn.sigmoid(logits)
        if mode == ipu.ModeKeys.PREDICT:
            return probabilities
        dice = dice_score(probabilities, mask)
        loss = jnp.mean(optax.sigmoid_binary_cross_entropy(logits, mask)) + 1 - dice
        if mode == ipu.ModeKeys.TRAIN:
            return loss
        is_found = (probabilities > 0.5).astype(jnp.float32)
        return loss, dice_score(is_found, mask)

    def optimizer_function(loss):
        return OptimizerFunctionOutput(tf1.RMSPropOptimizer(params["learning_rate"], decay=0.9), loss)

    def eval_metrics_fn(loss, dice):
        return {"loss": loss, "dice": dice}

    return ipu_pipeline_estimator.IPUPipelineEstimatorSpec(
        mode,
        computational_stages=[down, bottleneck, up2, up1],
        gradient_accumulation_count=params["gradient_accumulation_count"],
        optimizer_function=optimizer_function,
        eval_metrics_fn=eval_metrics_fn,
        device_mapping=[0, 1, 2, 3],
        reduction_method=ipu.gradient_accumulation.GradientAccumulationReductionMethod.MEAN,
        pipeline_schedule=ipu.pipelining_ops.PipelineSchedule.Interleaved,
    )


def create_estimator(args):
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = 4
    run_config = ipu_run_config.RunConfig(
        ipu_run_config=ipu_run_config.IPURunConfig(
            num_shards=4, iterations_per_loop=args.iterations_per_loop, ipu_options=config
        ),
        tf_random_seed=args.seed,
        log_step_count_steps=args.iterations_per_loop,
    )
    return ipu_pipeline_estimator.IPUPipelineEstimator(
        model_fn=model_fn, config=run_config, params=vars(args), model_dir=args.model_dir
    )


def run(args):
    """The estimator, and what it did last: metrics or masks."""
    estimator, results = create_estimator(args), None
    if "train" in args.exec_mode:
        estimator.train(training_input_fn, steps=args.steps)
    if "evaluate" in args.exec_mode:
        results = estimator.evaluate(eval_input_fn, steps=args.eval_steps)
        print(", ".join(f"{name} {value:.4f}" for name, value in sorted(results.items())))
    if args.exec_mode == "predict":
        results = np.stack(list(estimator.predict(eval_input_fn)))
        print(f"{len(results)} masks; defects take {np.mean(results > 0.5):.1%} of all pixels")
    return estimator, results


def main(argv=None):
    args = parse_args(argv)
    if args.model_dir is not None:
        run(args)
        return
    with tempfile.TemporaryDirectory() as args.model_dir:
        run(args)


if __name__ == "__main__":
    main()

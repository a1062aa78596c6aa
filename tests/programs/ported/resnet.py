"""A ResNet, cut into stages at the names of its blocks; training and validation share variables.

python -m tests.programs.ported.resnet --pipeline-splits b2/0 b3/0 --epochs 5 --log-dir resnet
"""

import argparse
import functools
from collections import namedtuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ipu_pipeline as ipu
from ipu_pipeline import datasets
from ipu_pipeline.ipu_infeed_queue import IPUInfeedQueue
from ipu_pipeline.ipu_outfeed_queue import IPUOutfeedQueue

GraphOps = namedtuple("GraphOps", ["run", "initializer", "outfeed", "placeholders", "num_batches"])


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pipeline-splits", nargs="*", default=["b2/0", "b3/0"])
    parser.add_argument("--norm-type", choices=["BATCH", "GROUP"], default="BATCH")
    parser.add_argument("--blocks", type=int, nargs="+", default=[1, 1, 1], help="Blocks of each size.")
    parser.add_argument("--filters", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--gradient-accumulation-count", type=int, default=4)
    parser.add_argument("--updates-per-epoch", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--base-learning-rate", type=float, default=0.1)
    parser.add_argument("--learning-rate-decay", type=float, nargs="*", default=[1.0, 0.1])
    parser.add_argument("--learning-rate-schedule", type=float, nargs="*", default=[0.7])
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--weight-decay", type=float, default=1e-4)
    parser.add_argument("--label-smoothing", type=float, default=0.1)
    parser.add_argument("--log-dir", help="Where checkpoints go.")
    parser.add_argument("--restoring", action="store_true", help="Go on from the newest checkpoint.")
    parser.add_argument("--seed", type=int, default=2)
    return parser.parse_args(argv)


# The model


class ResNet:
    """Blocks by name, in order; each takes and returns images, the last one returns logits."""

    def __init__(self, args, is_training):
        self.args = args
        self.is_training = is_training

    def conv(self, x, filters, size, stride, name):
        layer = ipu.layers.Conv2D(
            filters,
            size,
            strides=stride,
            padding="same",
            use_bias=False,
            kernel_initializer=jax.nn.initializers.variance_scaling(2.0, "fan_out", "truncated_normal"),
            name=name,
        )
        return layer(x)

    def norm(self, x, name):
        if self.args.norm_type == "GROUP":
            return ipu.normalization_ops.group_norm(x, groups=2, training=self.is_training, scope=name)
        return ipu.layers.BatchNormalization(momentum=0.9, name=name)(x, training=self.is_training)

    def first_block(self, x):
        x = self.conv(x, self.args.filters, 3, 1, "conv")
        return jax.nn.relu(self.norm(x, "batch_norm"))

    def residual_block(self, x, filters, stride):
        shortcut = x
        if stride > 1 or x.shape[-1] != filters:
            shortcut = self.conv(x, filters, 1, stride, "conv_shortcut")
            shortcut = self.norm(shortcut, "batch_norm_shortcut")
        x = self.conv(x, filters, 3, stride, "conv1")
        x = jax.nn.relu(self.norm(x, "batch_norm1"))
        x = self.conv(x, filters, 3, 1, "conv2")
        return jax.nn.relu(self.norm(x, "batch_norm2") + shortcut)

    def last_block(self, x):
        x = jnp.mean(x, axis=(1, 2))
        return ipu.layers.Dense(10, name="dense")(x)

    def blocks(self):
        found = {"b0": self.first_block}
        for size, number in enumerate(self.args.blocks):
            for index in range(number):
                filters, stride = self.args.filters * 2**size, 2 if size > 0 and index == 0 else 1
                found[f"b{size + 1}/{index}"] = functools.partial(
                    self.residual_block, filters=filters, stride=stride
                )
        return {**found, "head": self.last_block}

    def stages(self):
        """Lists of blocks, cut before each name of --pipeline-splits."""
        blocks = self.blocks()
        unknown = [name for name in self.args.pipeline_splits if name not in blocks]
        if unknown:
            raise ValueError(f"--pipeline-splits: there are no blocks {unknown}; there are {list(blocks)}")
        groups = [{}]
        for name, block in blocks.items():
            if name in self.args.pipeline_splits:
                groups.append({})
            groups[-1][name] = block
        return [functools.partial(run_blocks, group) for group in groups]


def run_blocks(blocks, x, labels):
    for name, block in blocks.items():
        with ipu.variable_scope(f"all/{name}"):
            x = block(x)
    return x, labels


def with_last(stages, last):
    """Stages with a function behind the last one."""

    def stage(*args):
        return last(*stages[-1](*args))

    return [*stages[:-1], stage]


# Programs


def get_optimizer(args, learning_rate):
    decayed = {
        variable.name: "batch_norm" not in variable.name and "bias" not in variable.name
        for variable in ipu.trainable_variables()
    }
    return optax.chain(
        optax.add_decayed_weights(args.weight_decay, mask=decayed),
        optax.sgd(learning_rate, momentum=args.momentum),
    )


def training_graph(args, digits):
    images = digits.train_images[..., np.newaxis]
    batches = datasets.TrainingBatches(images, digits.train_labels, args.batch_size, args.seed)
    infeed_queue, outfeed_queue = IPUInfeedQueue(batches), IPUOutfeedQueue()
    placeholders = {"learning_rate": ipu.placeholder(np.float32, [], name="learning_rate")}

    def calculate_loss(logits, labels):
        targets = optax.smooth_labels(jax.nn.one_hot(labels, 10), args.label_smoothing)
        accuracy = jnp.mean((jnp.argmax(logits, axis=-1) == labels).astype(jnp.float32))
        return jnp.mean(optax.softmax_cross_entropy(logits, targets)), accuracy

    def optimizer_function(loss, _accuracy):
        optimizer = get_optimizer(args, placeholders["learning_rate"])
        return ipu.pipelining_ops.OptimizerFunctionOutput(optimizer, loss)

    def net():
        return ipu.pipelining_ops.pipeline(
            computational_stages=with_last(ResNet(args, is_training=True).stages(), calculate_loss),
            gradient_accumulation_count=args.gradient_accumulation_count,
            repeat_count=args.updates_per_epoch,
            infeed_queue=infeed_queue,
            outfeed_queue=outfeed_queue,
            optimizer_function=optimizer_function,
            reduction_method=ipu.gradient_accumulation.GradientAccumulationReductionMethod.MEAN,
        )

    with ipu.scopes.ipu_scope("/device:IPU:0"):
        run = ipu.ipu_compiler.compile(net, [])
    return GraphOps(run, infeed_queue.initializer, outfeed_queue.dequeue(), placeholders, None)


def validation_graph(args, digits):
    images = digits.test_images[..., np.newaxis]
    num_batches = len(images) // args.batch_size
    batches = datasets.TrainingBatches(images, digits.test_labels, args.batch_size)
    infeed_queue, outfeed_queue = IPUInfeedQueue(batches), IPUOutfeedQueue()

    def calculate_accuracy(logits, labels):
        return jnp.mean((jnp.argmax(logits, axis=-1) == labels).astype(jnp.float32))

    def net():
        return ipu.pipelining_ops.pipeline(
            computational_stages=with_last(ResNet(args, is_training=False).stages(), calculate_accuracy),
            gradient_accumulation_count=num_batches,
            infeed_queue=infeed_queue,
            outfeed_queue=outfeed_queue,
            name="validation",
        )

    with ipu.scopes.ipu_scope("/device:IPU:0"):
        run = ipu.ipu_compiler.compile(net, [])
    return GraphOps(run, infeed_queue.initializer, outfeed_queue.dequeue(), {}, num_batches)


# Training


def configure(args):
    config = ipu.utils.create_ipu_config()
    config = ipu.utils.auto_select_ipus(config, 1 << len(args.pipeline_splits).bit_length())
    ipu.utils.configure_ipu_system(config)
    ipu.utils.reset_ipu_seed(args.seed)


def learning_rate_at(args, epoch):
    """The base rate, times the decay of the part of the training that the epoch is in."""
    number = sum(epoch >= part * args.epochs for part in args.learning_rate_schedule)
    return args.base_learning_rate * args.learning_rate_decay[number]


def train_process(args, train, valid):
    """The losses and the validation's accuracy of each epoch, and the variables."""
    saver = ipu.Saver(max_to_keep=3)
    history = []
    with ipu.Session() as session:
        session.run(ipu.global_variables_initializer())
        if args.restoring:
            saver.restore(session, ipu.latest_checkpoint(args.log_dir))
        session.run([train.initializer, valid.initializer])
        for epoch in range(session.update_count() // args.updates_per_epoch, args.epochs):
            feeds = {train.placeholders["learning_rate"]: learning_rate_at(args, epoch)}
            session.run(train.run, feed_dict=feeds)
            losses, accuracies = session.run(train.outfeed)
            session.run(valid.run)
            valid_accuracy = np.mean(session.run(valid.outfeed))
            print(
                f"Epoch {epoch}: loss {np.mean(losses):.4f}, accuracy {np.mean(accuracies):.1%}, "
                f"of validation {valid_accuracy:.1%}"
            )
            history.append((losses, valid_accuracy))
            if args.log_dir is not None:
                saver.save(session, args.log_dir)
        return history, session.variables


def main(argv=None):
    args = parse_args(argv)
    configure(args)
    digits = datasets.load_digits()
    train_process(args, training_graph(args, digits), validation_graph(args, digits))


if __name__ == "__main__":
    main()

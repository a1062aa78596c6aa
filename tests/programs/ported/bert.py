"""Pretraining of a BERT: masked words and next sentences. Embeddings and heads share a table, and IPU 0.

python -m tests.programs.ported.bert --steps 40 --num-layers 4 --layers-per-stage 2
"""

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ipu_pipeline as ipu
from ipu_pipeline import ipu_compiler, ipu_infeed_queue, ipu_outfeed_queue, scopes
from ipu_pipeline.ops import embedding_ops, nn_ops, normalization_ops, pipelining_ops, rand_ops

MASK_ID = 0
NOT_DECAYED = ("bias", "beta", "gamma")


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab-size", type=int, default=24)
    parser.add_argument("--hidden-size", type=int, default=16)
    parser.add_argument("--num-layers", type=int, default=2)
    parser.add_argument("--layers-per-stage", type=int, default=1)
    parser.add_argument("--attention-heads", type=int, default=2)
    parser.add_argument("--seq-length", type=int, default=12)
    parser.add_argument("--max-predictions-per-seq", type=int, default=3)
    parser.add_argument("--dropout-prob", type=float, default=0.1)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--gradient-accumulation-count", type=int, default=4)
    parser.add_argument("--batches-per-step", type=int, default=2, help="Weight updates in one run.")
    parser.add_argument("--base-learning-rate", type=float, default=0.05)
    parser.add_argument("--warmup-steps", type=int, default=2)
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--max-grad-norm", type=float, default=1.0)
    parser.add_argument("--optimizer", choices=["lamb", "adamw", "momentum"], default="lamb")
    parser.add_argument("--precision", choices=["32", "16.32"], default="32", help="Computation.variables.")
    parser.add_argument(
        "--pipeline-schedule", type=lambda name: pipelining_ops.PipelineSchedule[name], default="Grouped"
    )
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--offload-optimizer", action="store_true")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--steps-per-save", type=int, default=5)
    parser.add_argument("--save-path")
    parser.add_argument("--restore", action="store_true", help="Go on from the newest checkpoint.")
    parser.add_argument("--seed", type=int, default=5)
    return parser.parse_args(argv)


class PretrainingData:
    """Sentences that count up, two in a sequence: the second goes on with the first, or does not."""

    def __init__(self, args):
        self.args = args

    def __iter__(self):
        args, rng = self.args, np.random.default_rng(self.args.seed)
        half, words = args.seq_length // 2, args.vocab_size - 1
        while True:
            starts = rng.integers(0, words // 6, (args.batch_size, 2))
            is_next = rng.integers(0, 2, args.batch_size)
            starts[:, 1] = np.where(is_next, starts[:, 0] + half, starts[:, 1])
            ids = 1 + (starts[:, :, np.newaxis] + np.arange(half)).reshape(args.batch_size, -1) % words
            positions = np.argsort(rng.random(ids.shape))[:, : args.max_predictions_per_seq]
            targets = np.take_along_axis(ids, positions, axis=1)
            np.put_along_axis(ids, positions, MASK_ID, axis=1)
            number = rng.integers(1, args.max_predictions_per_seq + 1, (args.batch_size, 1))
            segments = np.repeat([[0, 1]], half, axis=1).repeat(args.batch_size, axis=0)
            yield {
                "input_ids": ids.astype(np.int32),
                "segment_ids": segments.astype(np.int32),
                "masked_lm_positions": positions.astype(np.int32),
                "masked_lm_ids": targets.astype(np.int32),
                "masked_lm_weights": (np.arange(targets.shape[1]) < number).astype(np.float32),
                "next_sentence_labels": is_next.astype(np.int32),
            }


def in_float32(getter, name, shape=None, dtype=None, *args, **kwargs):
    """A custom getter: variables are kept in float32, whatever is computed with them."""
    return getter(name, shape, jnp.float32, *args, **kwargs).astype(dtype)


class BertModel:
    """The parts of the model, each with the variables that it has in the checkpoints of others."""

    def __init__(self, args, is_training):
        self.args = args
        self.dtype = jnp.float32 if args.precision == "32" else jnp.bfloat16
        self.dropout_prob = args.dropout_prob if is_training else 0.0
        self.initializer = jax.nn.initializers.truncated_normal(0.1)

    def scope(self, name, **options):
        getter = None if self.dtype == jnp.float32 else in_float32
        return ipu.variable_scope(
            name, dtype=self.dtype, initializer=self.initializer, custom_getter=getter, **options
        )

    def dense(self, x, units, name, activation=None):
        with ipu.variable_scope(name):
            kernel = ipu.get_variable("kernel", [x.shape[-1], units])
            x = x @ kernel + ipu.get_variable("bias", [units], initializer="zeros")
        return x if activation is None else activation(x)

    def norm(self, x):
        """Of each row; `layer_norm` takes all axes but the first one together."""
        rows = normalization_ops.layer_norm(x.reshape(-1, x.shape[-1]), epsilon=1e-3, scope="LayerNorm")
        return rows.reshape(x.shape)

    def dropout(self, x):
        return rand_ops.dropout(x, rate=self.dropout_prob)

    def word_table(self):
        with self.scope("bert/embeddings", reuse=ipu.AUTO_REUSE):
            return ipu.get_variable("word_embeddings", [self.args.vocab_size, self.args.hidden_size])

    def embedding_stage(
        self,
        input_ids,
        segment_ids,
        masked_lm_positions,
        masked_lm_ids,
        masked_lm_weights,
        next_sentence_labels,
    ):
        x = embedding_ops.embedding_lookup(self.word_table(), input_ids)
        with self.scope("bert/embeddings"):
            positions = ipu.get_variable("position_embeddings", [self.args.seq_length, x.shape[-1]])
            segments = ipu.get_variable("token_type_embeddings", [2, x.shape[-1]])
            x = x + positions + jax.nn.one_hot(segment_ids, 2, dtype=x.dtype) @ segments
            x = self.dropout(self.norm(x))
        return x, masked_lm_positions, masked_lm_ids, masked_lm_weights, next_sentence_labels

    def self_attention(self, x):
        batch, length, size = x.shape
        heads = self.args.attention_heads
        kernel = ipu.get_variable("qkv_kernel", [size, 3 * size])
        split = (x @ kernel).reshape(batch, length, 3, heads, size // heads)
        query, key, value = jnp.unstack(split, axis=2)
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / (size // heads) ** 0.5
        probabilities = self.dropout(jax.nn.softmax(scores.astype(jnp.float32)).astype(x.dtype))
        return jnp.einsum("bhqk,bkhd->bqhd", probabilities, value).reshape(x.shape)

    def encoder_layer(self, x):
        @ipu.outlined_function
        def attention(x):
            with ipu.variable_scope("attention"):
                outputs = self.dense(self.self_attention(x), x.shape[-1], "output")
                return self.norm(x + self.dropout(outputs))

        @ipu.outlined_function
        def feed_forward(x):
            with ipu.variable_scope("intermediate"):
                wide = self.dense(x, 4 * x.shape[-1], "dense", nn_ops.gelu)
            with ipu.variable_scope("output"):
                return self.norm(x + self.dropout(self.dense(wide, x.shape[-1], "dense")))

        return feed_forward(attention(x))

    def encoder_stage(self, x, *labels, layers):
        for number in layers:
            with self.scope(f"bert/encoder/layer_{number}"):
                x = pipelining_ops.recomputation_checkpoint(self.encoder_layer(x), name=f"layer_{number}")
        return x, *labels

    def heads_stage(self, x, masked_lm_positions, masked_lm_ids, masked_lm_weights, next_sentence_labels):
        table = self.word_table()  # asked for outside of the scopes below, which would be part of its name
        with self.scope("cls/predictions"):
            masked = jnp.take_along_axis(x, masked_lm_positions[:, :, np.newaxis], axis=1)
            with ipu.variable_scope("transform"):
                masked = self.norm(self.dense(masked, x.shape[-1], "dense", nn_ops.gelu))
            bias = ipu.get_variable("output_bias", [self.args.vocab_size], initializer="zeros")
            logits = (masked @ table.T + bias).astype(jnp.float32)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, masked_lm_ids)
            mlm_loss = jnp.sum(losses * masked_lm_weights)
            num_tokens = jnp.sum(masked_lm_weights)
        with self.scope("bert/pooler"):
            pooled = self.dense(x[:, 0], x.shape[-1], "dense", jnp.tanh)
        with self.scope("cls/seq_relationship"):
            logits = self.dense(pooled, 2, "dense").astype(jnp.float32)
            nsp_loss = jnp.mean(
                optax.softmax_cross_entropy_with_integer_labels(logits, next_sentence_labels)
            )
        return mlm_loss, nsp_loss, num_tokens

    def stages(self):
        numbers = range(self.args.num_layers)
        groups = [
            numbers[first : first + self.args.layers_per_stage]
            for first in range(0, len(numbers), self.args.layers_per_stage)
        ]
        encoders = [functools.partial(self.encoder_stage, layers=group) for group in groups]
        stages = [self.embedding_stage, *encoders, self.heads_stage]
        return stages, [0, *range(1, len(encoders) + 1), 0]


def get_optimizer(args, learning_rate):
    def is_decayed(parameters):
        return {name: not name.endswith(NOT_DECAYED) for name in parameters}

    if args.optimizer == "momentum":
        optimizer = optax.chain(
            optax.add_decayed_weights(args.weight_decay, is_decayed), optax.sgd(learning_rate, momentum=0.9)
        )
    else:
        make = {"lamb": optax.lamb, "adamw": optax.adamw}[args.optimizer]
        optimizer = make(learning_rate, eps=1e-6, weight_decay=args.weight_decay, mask=is_decayed)
    return optax.chain(optax.clip_by_global_norm(args.max_grad_norm), optimizer)


class Graph:
    """Everything that a run needs: queues, placeholders, operations and the saver."""

    def __init__(self, args):
        self.infeed_queue = ipu_infeed_queue.IPUInfeedQueue(PretrainingData(args), prefetch_depth=8)
        self.outfeed_queue = ipu_outfeed_queue.IPUOutfeedQueue()
        self.learning_rate = learning_rate = ipu.placeholder(np.float32, [], name="learning_rate")

        def optimizer_function(mlm_loss, nsp_loss, num_tokens):
            """The mean over all tokens of an update, whichever micro-batches they are in."""
            optimizer = get_optimizer(args, learning_rate)
            loss = mlm_loss + nsp_loss * num_tokens
            return pipelining_ops.OptimizerFunctionOutput(optimizer, loss, loss_weight=num_tokens)

        def bert_net():
            stages, device_mapping = BertModel(args, is_training=True).stages()
            return pipelining_ops.pipeline(
                computational_stages=stages,
                gradient_accumulation_count=args.gradient_accumulation_count,
                gradient_accumulation_dtype=np.float32,
                repeat_count=args.batches_per_step,
                inputs=[],
                infeed_queue=self.infeed_queue,
                outfeed_queue=self.outfeed_queue,
                optimizer_function=optimizer_function,
                device_mapping=device_mapping,
                pipeline_schedule=args.pipeline_schedule,
                recomputation_mode=(
                    pipelining_ops.RecomputationMode.RecomputeAndBackpropagateInterleaved
                    if args.recompute
                    else None
                ),
                offload_weight_update_variables=args.offload_optimizer,
                name="Pipeline",
            )

        with scopes.ipu_scope("/device:IPU:0"):
            self.train = ipu_compiler.compile(bert_net, [])
        self.outfeed = self.outfeed_queue.dequeue()
        self.saver = ipu.Saver(max_to_keep=2)


def configure(args):
    num_ipus = 1 + -(-args.num_layers // args.layers_per_stage)
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = num_ipus
    config.auto_round_num_ipus = True
    config.allow_recompute = args.recompute
    config.configure_ipu_system()
    ipu.utils.reset_ipu_seed(args.seed)


def learning_rate_at(args, step):
    """Rises over the warm-up, then falls to 0."""
    if step < args.warmup_steps:
        return args.base_learning_rate * (step + 1) / (args.warmup_steps + 1)
    return args.base_learning_rate * (args.steps - step) / max(1, args.steps - args.warmup_steps)


def train(args, graph):
    """What the outfeed gave, [micro-batches] each, and the variables."""
    with ipu.Session() as session:
        session.run(graph.infeed_queue.initializer)
        if args.restore:
            graph.saver.restore(session, ipu.latest_checkpoint(args.save_path))
        outputs = []
        for step in range(session.update_count() // args.batches_per_step, args.steps):
            session.run(graph.train, {graph.learning_rate: learning_rate_at(args, step)})
            outputs.append(session.run(graph.outfeed))
            mlm_losses, nsp_losses, num_tokens = outputs[-1]
            mlm_loss, nsp_loss = mlm_losses.sum() / num_tokens.sum(), nsp_losses.mean()
            print(f"Step {step}: masked words {mlm_loss:.4f}, next sentences {nsp_loss:.4f}")
            if args.save_path is not None and (step + 1) % args.steps_per_save == 0:
                print(f"Saved {graph.saver.save(session, args.save_path)}")
        return np.concatenate(outputs, axis=1), session.variables


def main(argv=None):
    args = parse_args(argv)
    configure(args)
    graph = Graph(args)
    num_parameters = sum(int(np.prod(variable.shape)) for variable in ipu.trainable_variables())
    print(f"{num_parameters:,} parameters")
    train(args, graph)


if __name__ == "__main__":
    main()

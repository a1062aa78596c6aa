"""An application: the probability of a click, from what a user looked at before, by attention and an AUGRU.

python -m tests.programs.ported.click_through_rate --steps 5
"""

import argparse
import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ipu_pipeline as ipu
from ipu_pipeline.optimizers import tf1

NUM_ITEMS, NUM_CATEGORIES = 60, 6


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--history", type=int, default=6)
    parser.add_argument("--embedding-size", type=int, default=4)
    parser.add_argument("--host-embeddings", action="store_true")
    parser.add_argument("--hidden-size", type=int, default=6)
    parser.add_argument("--batches-per-step", type=int, default=10)
    parser.add_argument("--learning-rate", type=float, default=0.2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--seed", type=int, default=3)
    return parser.parse_args(argv)


def make_batches(opts):
    # Different: not Amazon's reviews. A user looks at items of one category, and clicks on such ones.
    rng = np.random.default_rng(opts.seed)
    while True:
        own = rng.integers(NUM_CATEGORIES, size=(opts.batch_size, 1))
        history = own + NUM_CATEGORIES * rng.integers(NUM_ITEMS // NUM_CATEGORIES, size=(1, opts.history))
        target = rng.integers(NUM_ITEMS, size=opts.batch_size)
        yield {
            "history": history.astype(np.int32),
            "lengths": rng.integers(1, opts.history + 1, size=opts.batch_size).astype(np.int32),
            "target": target.astype(np.int32),
            "clicked": (target % NUM_CATEGORIES == own[:, 0]).astype(np.float32),
        }


def make_host_embeddings(opts):
    spec = ipu.embedding_ops.HostEmbeddingOptimizerSpec(opts.learning_rate)
    return {
        name: ipu.embedding_ops.create_host_embedding(
            f"embedding/{name}", [number, opts.embedding_size], np.float32, optimizer_spec=spec
        )
        for name, number in (("items", NUM_ITEMS), ("categories", NUM_CATEGORIES))
    }


def make_tables(opts):
    """What looks rows up in each table: on the IPU, where no tables on the host are given."""
    with ipu.variable_scope("embedding"):
        size = opts.embedding_size
        tables = {
            "items": ipu.get_variable("items", [NUM_ITEMS, size]),
            "categories": ipu.get_variable("categories", [NUM_CATEGORIES, size]),
        }
    return {
        name: functools.partial(ipu.embedding_ops.embedding_lookup, value) for name, value in tables.items()
    }


def embed(table, items):
    return jnp.concatenate([table["items"](items), table["categories"](items % NUM_CATEGORIES)], axis=-1)


def model(opts, on_host, history, lengths, target):
    """The logits, [batch]."""
    table = {name: one.lookup for name, one in on_host.items()} or make_tables(opts)
    target = embed(table, target)
    with ipu.variable_scope("interests"):
        states, _last = ipu.rnn_ops.PopnnDynamicGRU(opts.hidden_size)(
            embed(table, history), lengths, time_major=False
        )
    with ipu.variable_scope("attention"):
        projected = ipu.layers.Dense(opts.hidden_size, use_bias=False)(target)
        scores = jnp.einsum("tbh,bh->tb", states, projected)
        is_there = jnp.arange(opts.history, dtype=np.int32)[:, None] < lengths
        scores = jax.nn.softmax(jnp.where(is_there, scores, -(2.0**16)), axis=0)
    with ipu.variable_scope("evolution"):
        _states, interest = ipu.rnn_ops.PopnnAUGRU(opts.hidden_size)(states, lengths, scores)
    with ipu.variable_scope("head"):
        joined = jnp.concatenate([interest, target], axis=-1)
        hidden = ipu.layers.Dense(8, activation=jax.nn.sigmoid)(joined)
        return ipu.layers.Dense(1)(hidden)[:, 0]


def make_graph(opts, on_host):
    infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(lambda: make_batches(opts), feed_name="infeed")
    outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue(feed_name="outfeed")

    def body(history, lengths, target, clicked):
        logits = model(opts, on_host, history, lengths, target)
        loss = jnp.mean(optax.sigmoid_binary_cross_entropy(logits, clicked))
        train_op = tf1.AdagradOptimizer(opts.learning_rate).minimize(loss)
        return train_op, outfeed.enqueue({"loss": loss, "probabilities": jax.nn.sigmoid(logits)})

    with ipu.scopes.ipu_scope("/device:IPU:0"):
        program = ipu.ipu_compiler.compile(
            lambda: ipu.loops.repeat(opts.batches_per_step, body, [], infeed_queue=infeed)
        )
    return program, infeed, outfeed.dequeue()


def train(opts):
    """What was enqueued, and the variables before and after."""
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = 1
    config.configure_ipu_system()
    on_host = make_host_embeddings(opts) if opts.host_embeddings else {}
    program, infeed, dequeue = make_graph(opts, on_host)
    found = []
    with contextlib.ExitStack() as stack:
        sess = stack.enter_context(ipu.Session(seed=opts.seed))
        for embedding in on_host.values():
            stack.enter_context(embedding.register(sess))
        sess.run([ipu.global_variables_initializer(), infeed.initializer])
        before = sess.variables
        for step in range(opts.steps):
            sess.run(program)
            found.append(sess.run(dequeue))
            print(f"Step {step}: loss {found[-1]['loss'].mean():.3f}")
        return jax.tree.map(lambda *parts: np.concatenate(parts), *found), before, sess.variables


if __name__ == "__main__":
    train(parse_args())

"""A model with all that a checkpoint has to hold: dropout, batch statistics, Adam, an order of the data."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ipu_pipeline as ipu
from ipu_pipeline.pipelining_ops import OptimizerFunctionOutput
from tests.support.front import compile_pipeline

SPLITS = {1: [6], 2: [2, 4], 3: [1, 3, 2], 4: [1, 2, 2, 1]}
MICRO_BATCHES = 4


class Batches:
    """Without end, in an order that is drawn anew every epoch; its iterators have no state."""

    def __init__(self, num_batches=40, size=4, seed=5):
        rng = np.random.default_rng(seed)
        self.x = rng.normal(size=(num_batches, size, 6)).astype(np.float32)
        self.y = rng.normal(size=(num_batches, size, 3)).astype(np.float32)

    def __iter__(self):
        epoch = 0
        while True:
            for number in np.random.default_rng(epoch).permutation(len(self.x)):
                yield self.x[number], self.y[number]
            epoch += 1


def layers(width=16):
    def dense(name, size, activation=None):
        def layer(x, y):
            with ipu.variable_scope(name):
                return ipu.layers.Dense(size, activation=activation)(x), y

        return layer

    def dropout(x, y):
        with ipu.variable_scope("dropout"):
            return ipu.layers.Dropout(0.3)(x), y

    def normalize(x, y):
        with ipu.variable_scope("norm"):
            return ipu.layers.BatchNormalization()(x), y

    def last(x, y):
        with ipu.variable_scope("last"):
            prediction = ipu.layers.Dense(3)(x)
        return prediction, y

    relu = jax.nn.relu
    return [dense("a", width, relu), dropout, dense("b", width, relu), normalize, dense("c", 8), last]


def make_stages(num_stages, width=16, scope=""):
    """The layers as stages, within a scope; the last one returns predictions and targets."""
    rest, stages = layers(width), []
    for size in SPLITS[num_stages]:
        own, rest = rest[:size], rest[size:]

        def stage(x, y, own=own):
            with ipu.variable_scope(scope) if scope else contextlib.nullcontext():
                for layer in own:
                    x, y = layer(x, y)
            return x, y

        stages.append(stage)
    return stages


def loss_of(prediction, y):
    return jnp.mean((prediction - y) ** 2)


class Training:
    """A training program with its queues."""

    def __init__(
        self, num_stages=2, dataset=None, optimizer=None, width=16, scope="", num_replicas=None, **options
    ):
        data = Batches() if dataset is None else dataset
        self.infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(data, replication_factor=num_replicas)
        self.outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()

        def optimizer_function(prediction, y):
            return OptimizerFunctionOutput(optimizer or optax.adam(1e-2), loss_of(prediction, y))

        self.program = compile_pipeline(
            make_stages(num_stages, width, scope),
            MICRO_BATCHES,
            infeed_queue=self.infeed,
            outfeed_queue=self.outfeed,
            optimizer_function=optimizer_function,
            outfeed_loss=True,
            **options,
        )
        self.initializer = self.infeed.initializer

    def start(self, session):
        session.run(self.initializer)

    def run(self, session, updates):
        for _update in range(updates):
            session.run(self.program)
        return session.run(self.outfeed.dequeue())


class Inference:
    """The same model without training, on one micro-batch that is the same in every run."""

    def __init__(self, num_stages=1, width=16):
        self.outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
        data = Batches()
        self.program = compile_pipeline(
            make_stages(num_stages, width),
            1,
            inputs=[data.x[0], data.y[0]],
            outfeed_queue=self.outfeed,
            name="Inference",
        )

    def run(self, session):
        session.run(self.program)
        return session.run(self.outfeed.dequeue())[0][0]


def assert_same(one, other):
    """Both sessions have the same variables, to the last bit."""
    mine, theirs = one.variables, other.variables
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        assert value.dtype == theirs[name].dtype
        np.testing.assert_array_equal(value, theirs[name], err_msg=name)

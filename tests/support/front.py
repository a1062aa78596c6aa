"""A small model through the front, for the tests of its parts."""

import contextlib
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ipu_pipeline as ipu
from ipu_pipeline.pipelining_ops import OptimizerFunctionOutput, pipeline


def data(num_batches=None, seed=0, size=4):
    """A callable data set of (x, labels), without end or with so many batches."""

    def iterate():
        rng = np.random.default_rng(seed)
        number = 0
        while num_batches is None or number < num_batches:
            yield rng.normal(size=(size, 12)).astype("float32"), rng.integers(0, 10, size).astype("int32")
            number += 1

    return iterate


def first_stage(rate, x, labels):
    with ipu.variable_scope("first"):
        return rate, ipu.layers.Dense(16, activation=jax.nn.relu)(x), labels


def second_stage(rate, x, labels):
    with ipu.variable_scope("second"):
        logits = ipu.layers.Dense(10)(x)
    return rate, jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


def optimizer_function(rate, loss):
    return OptimizerFunctionOutput(optax.sgd(rate), loss)


def compile_program(function, inputs=None):
    with ipu.scopes.ipu_scope("/device:IPU:0"):
        return ipu.ipu_compiler.compile(function, inputs)


def compile_pipeline(stages, count, **options):
    """A program of one pipeline."""
    return compile_program(lambda: pipeline(stages, count, **options))


def ipu_config(number, **settings):
    """A configuration that selects so many IPUs."""
    config = ipu.config.IPUConfig()
    config.auto_select_ipus, config.require_power_of_two = number, False
    for name, value in settings.items():
        setattr(config, name, value)
    return config


@contextlib.contextmanager
def session_of(model, **options):
    """A session in which a model's infeed is initialized."""
    with ipu.Session(**options) as session:
        session.run(model.initializer)
        yield session


def no_infeed_runs():
    """Whether the threads of all infeeds end; one that is making an element ends after it."""
    threads = [thread for thread in threading.enumerate() if thread.name == "ipu-infeed"]
    for thread in threads:
        thread.join(60)
    return not any(thread.is_alive() for thread in threads)


class Model:
    """Queues, a placeholder and a training program."""

    def __init__(self, dataset=None, outfeed_mode=None, **options):
        self.rate = ipu.placeholder(np.float32, [], name="rate")
        self.infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(data() if dataset is None else dataset)
        modes = ipu.ipu_outfeed_queue.IPUOutfeedMode
        self.outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue(outfeed_mode or modes.ALL)
        self.options = {
            "computational_stages": [first_stage, second_stage],
            "gradient_accumulation_count": 3,
            "infeed_queue": self.infeed,
            "outfeed_queue": self.outfeed,
            "optimizer_function": optimizer_function,
            "outfeed_loss": True,
            **options,
        }
        self.program = compile_program(
            lambda rate: pipeline(inputs=[rate], **self.options), inputs=[self.rate]
        )
        self.initializer = self.infeed.initializer

    def run(self, session, rate=0.1):
        session.run(self.program, {self.rate: rate})
        return session.run(self.outfeed.dequeue())

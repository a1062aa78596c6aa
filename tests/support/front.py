"""A small model through the front, for the tests of its parts."""

import contextlib
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ipu_pipeline as ipu
from ipu_pipeline.ipu_infeed_queue import IPUInfeedQueue
from ipu_pipeline.ipu_outfeed_queue import IPUOutfeedMode, IPUOutfeedQueue
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


def minimizing(optimizer):
    """An optimizer function for a last stage whose first output is the loss."""
    return lambda loss, *_others: OptimizerFunctionOutput(optimizer, loss)


def results(function, *inputs, seed=0):
    """What a compiled function of arrays returns, in a session of its own."""
    program = compile_program(function, [np.asarray(value) for value in inputs])
    with ipu.Session(seed=seed) as session:
        return session.run(program)


class Pipelined:
    """A pipeline without inputs, its queues and its program.

    Args:
      stages: the pipeline's.
      count: micro-batches per weight update.
      elements: the infeed's data set, or None.
      optimizer: of what the last stage returns first, or None.
      mode: the outfeed's.
      **options: the pipeline's.
    """

    def __init__(self, stages, count, elements=None, optimizer=None, mode=IPUOutfeedMode.ALL, **options):
        self.outfeed = IPUOutfeedQueue(mode)
        given = {"outfeed_queue": self.outfeed}
        if elements is not None:
            self.infeed = given["infeed_queue"] = IPUInfeedQueue(elements)
            self.initializer = self.infeed.initializer
        if optimizer is not None:
            given["optimizer_function"] = minimizing(optimizer)
        self.program = compile_pipeline(stages, count, **(given | options))

    def run(self, session, feed=None):
        session.run(self.program, feed or {})
        return session.run(self.outfeed.dequeue())

    def once(self, seed=0):
        """What a run from initial values enqueues, and the variables after it."""
        with ipu.Session(seed=seed) as session:
            if hasattr(self, "initializer"):
                session.run(self.initializer)
            return self.run(session), session.variables


class Model:
    """Queues, a placeholder and a training program."""

    def __init__(self, dataset=None, outfeed_mode=None, **options):
        self.rate = ipu.placeholder(np.float32, [], name="rate")
        self.infeed = IPUInfeedQueue(data() if dataset is None else dataset)
        self.outfeed = IPUOutfeedQueue(outfeed_mode or IPUOutfeedMode.ALL)
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

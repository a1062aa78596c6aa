"""Pipelines of any number of small stages that follow a schedule, beside the plain loop."""

import jax.numpy as jnp
import numpy as np

from ipu_pipeline import engine
from tests.support import beside, models

SIZE = 4


def stages(number):
    """Stages with a variable each, the last of which returns the loss."""

    def make(index):
        def stage(x):
            x = jnp.tanh(x @ models.weight(f"stage{index}", x, size=SIZE))
            return jnp.mean(x**2) if index == number - 1 else x

        return stage

    return list(map(make, range(number)))


def check(schedule, mapping, num_micro_batches, num_steps=1):
    """Compares a pipeline's steps with the plain loop."""
    pipeline = engine.Pipeline(
        stages(len(mapping)),
        num_micro_batches=num_micro_batches,
        optimizer=models.showing_gradients(),
        schedule=schedule,
        device_mapping=list(mapping),
    )
    rng = np.random.default_rng(0)
    shape = (num_steps, num_micro_batches, 3, SIZE)
    steps = [[(x,) for x in step] for step in rng.normal(size=shape).astype("float32")]
    beside.train(pipeline, steps)

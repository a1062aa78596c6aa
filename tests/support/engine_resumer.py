"""A JAX program that trains in processes that may be killed at any moment, and goes on from memory.

python -m tests.support.engine_resumer DIR STEPS NUM_STAGES NUM_REPLICAS
"""

import itertools
import os
import sys
from pathlib import Path

import jax
import numpy as np
import optax

import ipu_pipeline as ipu
from ipu_pipeline import engine
from tests.support.resumable import MICRO_BATCHES, Batches, loss_of, make_stages


def make_pipeline(num_stages, num_replicas):
    """Dropout, batch statistics and Adam."""
    return engine.Pipeline(
        make_stages(num_stages),
        num_micro_batches=MICRO_BATCHES,
        loss=loss_of,
        optimizer=optax.adam(1e-2),
        num_replicas=num_replicas,
        donate=True,
    )


def train(pipeline, steps, report, num_replicas=1):
    """Trains with in-memory checkpoints, which also have the place in the data; returns the state.

    `report` gets each step and its losses.
    """
    data = Batches()
    checkpoints = engine.InMemoryCheckpoints(pipeline)
    state = checkpoints.restore(pipeline.init(jax.random.key(3), next(iter(data))))
    read = checkpoints.extra.get("read", 0)
    batches = itertools.islice(data, read, None)
    for step in range(state.execution_count, steps):
        checkpoints.save(state, {"read": read})
        state, outputs = pipeline.step(state, batches)
        read += MICRO_BATCHES * num_replicas
        report(step, [np.asarray(loss) for loss in outputs.losses])
    return state


def main(directory, steps, num_stages, num_replicas):
    """Writes a line for each step with its losses, and at the end the variables."""
    count = int(os.environ["IPU_PIPELINE_NUM_PROCESSES"])
    jax.config.update("jax_num_cpu_devices", num_stages * num_replicas // count)
    ipu.distributed.initialize()

    def report(step, losses):
        if losses:  # it has the last stage
            text = " ".join(float(one).hex() for loss in losses for one in loss.ravel())
            with (directory / "losses").open("a") as stream:
                stream.write(f"{step} {text}\n")

    state = train(make_pipeline(num_stages, num_replicas), steps, report, num_replicas)
    engine.save(directory / "state", state)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))

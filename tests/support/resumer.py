"""A program that trains in processes that may be killed at any moment, and goes on by `Session.resume`.

python -m tests.support.resumer DIR RUNS NUM_STAGES NUM_REPLICAS

With RESUMER_DIES="1 8 0", process 1 of the first start dies before run 8.
"""

import os
import signal
import sys
from pathlib import Path

import numpy as np
import optax

import ipu_pipeline as ipu
from ipu_pipeline.processes.launcher import RESTART_VARIABLE
from tests.support import front
from tests.support.resumable import Training


def make_training(num_stages, num_replicas):
    """The training, compiled; the IPUs are selected."""
    optimizer = optax.adam(1e-2)
    if num_replicas > 1:
        optimizer = ipu.optimizers.CrossReplicaOptimizer(optimizer)
    return Training(num_stages, optimizer=optimizer, num_replicas=num_replicas)


def main(directory, runs, num_stages, num_replicas):
    """Writes a line for each run with its losses, and at the end the variables."""
    front.ipu_config(num_stages * num_replicas).configure_ipu_system()
    training = make_training(num_stages, num_replicas)
    process = os.environ.get("IPU_PIPELINE_PROCESS_ID", "0")
    with ipu.Session(seed=3) as session:
        training.start(session)
        for number in range(session.resume(), runs):
            if os.environ.get("RESUMER_DIES") == f"{process} {number} {os.environ.get(RESTART_VARIABLE)}":
                os.kill(os.getpid(), signal.SIGKILL)
            losses = np.asarray(training.run(session, 1))
            if losses.size:  # it has the last stage
                text = " ".join(float(loss).hex() for loss in losses.ravel())
                with (directory / "losses").open("a") as stream:
                    stream.write(f"{number} {text}\n")
        variables = session.variables
    if process == "0":
        by_name = {name.replace("/", "|"): value for name, value in variables.items()}
        np.savez(directory / "variables.npz", **by_name)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))

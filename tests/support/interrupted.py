"""A program that is interrupted at some moment: `python -m tests.support.interrupted MAPPING UPDATES FILE`.

SIGINT either ends it, before there is a session, or it goes on from where it was interrupted. In the end it
writes how many weight updates it made, their losses and the variables to the file.
"""

import sys

import jax
import numpy as np

import ipu_pipeline as ipu
from tests.support.resumable import Training


def until_done(function, *arguments):
    """Calls a function until it is not interrupted."""
    while True:
        try:
            return function(*arguments)
        except KeyboardInterrupt:
            print("interrupted in", function.__name__, flush=True)


def train(session, training, updates):
    if session.update_count() == 0:
        print("trains", flush=True)
    while session.update_count() < updates:
        session.run(training.program)


def main():
    mapping, updates, path = sys.argv[1:]
    ipu.set_num_devices(2)
    jax.random.key(0)  # JAX's own start is no place for an interrupt; nor is Orbax's import
    import orbax.checkpoint  # noqa: F401

    options = {"device_mapping": [int(ipu) for ipu in mapping], "repeat_count": 2}
    print("begins", flush=True)
    training = until_done(lambda: Training(2, **options))
    with ipu.Session(seed=3) as session:
        until_done(session.run, training.initializer)
        for part in (int(updates) // 2, int(updates)):
            until_done(train, session, training, part)
            until_done(session.save, f"{path}.checkpoint")
        losses = until_done(session.run, training.outfeed.dequeue())
        variables = until_done(lambda: session.variables)
        count = until_done(session.update_count)
    until_done(lambda: np.savez(path, count=count, losses=losses, **variables))
    print("done", flush=True)


if __name__ == "__main__":
    main()

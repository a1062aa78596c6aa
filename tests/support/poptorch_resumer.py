"""A PopTorch program that trains in processes that may be killed, and goes on by `resume`.

python -m tests.support.poptorch_resumer DIR CALLS NUM_STAGES NUM_REPLICAS
"""

import os
import sys
from pathlib import Path

import torch

import ipu_pipeline.poptorch as poptorch
from tests.support.poptorch_front import make_options, seeded
from tests.support.poptorch_processes import WithBuffers, make_call, own_part, this_process

ITERATIONS, ACCUMULATION = 2, 2


class Remembering(WithBuffers):
    """What a replica has seen changes what it learns."""

    def __init__(self):
        super().__init__(0.3)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x, target=None):
        self.seen.mul_(0.9).add_(0.1 * x.mean(0))
        return super().forward(x - self.seen, target)


def make_model(num_replicas, optimizer_class=None, **options):
    """Batch normalization, dropout and a buffer of their own in each replica; and the optimizer."""
    made = make_options(ITERATIONS, ACCUMULATION, **options).randomSeed(1)
    made.replicationFactor(num_replicas).autoRoundNumIPUs(True).broadcastBuffers(False)
    model = seeded(Remembering)
    optimizer = (optimizer_class or poptorch.optim.Adam)(model.parameters(), lr=0.01)
    return poptorch.trainingModel(model, made, optimizer), optimizer


def train(executor, optimizer, calls, report, num_replicas):
    """Trains with a schedule of rates; the data of a call depend on its number."""
    index, count = this_process()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    done = executor.resume()
    for _call in range(done):
        scheduler.step()
    for number in range(done, calls):
        batch = make_call(number, num_replicas * count, ITERATIONS * ACCUMULATION)
        _output, loss = executor(*own_part(batch, ITERATIONS * ACCUMULATION, index, count))
        scheduler.step()
        executor.setOptimizer(optimizer)
        report(number, loss)


def main(directory, calls, num_stages, num_replicas):
    """Writes a line for each call with the losses of process 0, and at the end its weights and state."""
    del num_stages  # two
    index, count = this_process()
    executor, optimizer = make_model(num_replicas // count)

    def report(number, losses):
        if index == 0:
            with (directory / "losses").open("a") as stream:
                stream.write(f"{number} {' '.join(loss.hex() for loss in losses.flatten().tolist())}\n")

    train(executor, optimizer, calls, report, num_replicas // count)
    if index == 0:
        torch.save((executor.state_dict(), optimizer.state_dict()), directory / "state.pt")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))

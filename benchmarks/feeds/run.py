"""Examples per second of the feeds: iterated alone, and through an infeed queue onto a device.

    python -m benchmarks.feeds.run [--rounds 7] [--json FILE]

Batches of 32 of the tutorial's training data, shuffled and repeated, of the size of MNIST (60,000 images of
28 x 28 bytes or floats, made up here). Alone: a loop that does nothing with them. Through the queue: as a
program takes them, placed on the device by the queue's thread.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.harness import Row

BATCH_SIZE, NUM_BATCHES = 32, 4000
MICRO_BATCHES = 16  # per weight update, as in the tutorial
LEAST_ALONE, LEAST_QUEUED = 0.8e6, 0.3e6


def make_batches() -> Any:
    """The tutorial's training batches, of images of noise."""
    from ipu_pipeline import datasets

    rng = np.random.default_rng(0)
    images = rng.random((60_000, 28, 28, 1), np.float32)
    return datasets.TrainingBatches(images, rng.integers(0, 10, 60_000).astype(np.int32), BATCH_SIZE)


def measure_alone(batches: Any) -> float:
    """Examples per second of a loop over the batches."""
    iterator = iter(batches)
    next(iterator)
    begin = time.perf_counter()
    for _ in range(NUM_BATCHES):
        next(iterator)
    return NUM_BATCHES * BATCH_SIZE / (time.perf_counter() - begin)


def measure_queued(batches: Any) -> float:
    """Examples per second of an infeed queue that places them on a device."""
    import jax

    from ipu_pipeline.engine.devices.device_groups import make_groups
    from ipu_pipeline.engine.devices.placement import put_host_copies
    from ipu_pipeline.ipu_infeed_queue import IPUInfeedQueue

    (row,) = make_groups(jax.devices(), [0])
    queue = IPUInfeedQueue(batches)
    queue.initialize()
    take = queue.connect(lambda leaves: put_host_copies(leaves, row))
    (last,) = take(1)
    begin = time.perf_counter()
    for number in range(NUM_BATCHES):
        (last,) = take(1)
        if number % MICRO_BATCHES == MICRO_BATCHES - 1:
            queue.mark()  # the weight update is done: as a run says
    jax.block_until_ready(last)
    seconds = time.perf_counter() - begin
    queue.delete()
    return NUM_BATCHES * BATCH_SIZE / seconds


def main() -> None:
    parser = harness.make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    batches = make_batches()
    alone, queued = [], []
    for number in range((3 if args.short else args.rounds) + 1):
        found = measure_alone(batches), measure_queued(batches)
        if number:
            alone.append(found[0])
            queued.append(found[1])
    rows = []
    for case, speeds, least in (
        ("iterated alone", alone, LEAST_ALONE),
        ("through IPUInfeedQueue", queued, LEAST_QUEUED),
    ):
        speed = statistics.median(speeds)
        spread = (min(speeds), max(speeds))
        rows.append(
            Row("feeds", f"{case}, examples/s", f"{speed:,.0f}/s", "", speed, spread, least, at_most=False)
        )
    harness.report(rows, args.json)


if __name__ == "__main__":
    main()

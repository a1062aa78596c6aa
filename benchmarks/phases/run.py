"""Phased execution: bytes on a device at their peak, and time per call, by the liveness of tensors.

    python -m benchmarks.phases.run [--rounds 5] [--json FILE]

Eight layers, each a phase of its own on one IPU, are trained by Adam through `poptorch`. The peak is of the
arrays in the device's memory whenever a program has been started, with its arguments and results; where a
device says itself what it had at most, as a GPU does, it is that. All sides must have the same losses.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks import harness
from benchmarks.harness import Row

MODULE = "benchmarks.phases.run"
QUESTION = "phases"
NUM_LAYERS, WIDTH, BATCH_SIZE, NUM_MICRO_BATCHES = 8, 1024, 256, 2
ALWAYS_LIVE = "AlwaysLive"
OFF_CHIP = ["OffChipAfterFwd", "OffChipAfterFwdNoOverlap", "OffChipAfterEachPhase"]
MOST_BYTES = 0.2  # of those with everything on the device


class PeakBytes:
    """Watches runs for the most bytes that live arrays take in devices' memory.

    Attributes:
      peak: over all devices, in bytes.
    """

    def __init__(self) -> None:

        self.peak = 0

    def sample(self) -> None:
        """Looks at what lives now."""
        import jax

        self.peak = max(self.peak, sum(a.nbytes for a in jax.live_arrays() if _is_on_device(a)))

    def run(self, launch: Any, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        """Starts a program, and looks while its arguments and results live."""
        del launch
        results = function(*arguments)
        self.sample()
        return results

    @contextlib.contextmanager
    def rehearsing(self, runner: Any) -> Iterator[bool]:
        """As `Watcher` wants it."""
        del runner
        yield False

    @contextlib.contextmanager
    def waiting(self, *_told: Any) -> Iterator[None]:
        """As `Watcher` wants it."""
        yield

    def introduce(self, *_told: Any) -> None:
        """As `Watcher` wants it."""

    moved = outfed = spanned = introduce


def _is_on_device(array: Any) -> bool:
    return bool(array.sharding.memory_kind == "device")


def serve_phases(name: str) -> None:
    """A model that trains with a liveness."""
    import jax
    import torch

    import ipu_pipeline.poptorch as poptorch
    from ipu_pipeline.engine import watching

    torch.set_num_threads(1)
    torch.manual_seed(0)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList([torch.nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)])

        def forward(self, x: Any, target: Any) -> Any:
            for number, layer in enumerate(self.layers):
                with poptorch.Block(str(number)):
                    x = torch.tanh(layer(x))
                    if number == NUM_LAYERS - 1:
                        x = torch.nn.functional.mse_loss(x, target)
            return x

    model = Model()
    strategy = poptorch.SerialPhasedExecution(*map(str, range(NUM_LAYERS)))
    options = poptorch.Options().showCompilationProgressBar(False)
    options.setExecutionStrategy(strategy.setTensorsLiveness(poptorch.Liveness[name]))
    options.Training.gradientAccumulation(NUM_MICRO_BATCHES)
    optimizer = poptorch.optim.Adam(model.parameters(), lr=1e-3)
    training = poptorch.trainingModel(model, options, optimizer)
    batch = torch.randn(2, NUM_MICRO_BATCHES * BATCH_SIZE, WIDTH)
    losses = [float(training(*batch).sum())]
    watcher = PeakBytes()
    with watching.watching(watcher):
        losses.append(float(training(*batch).sum()))
    found = jax.devices()[0].memory_stats() or {}
    harness.serve(
        lambda: training(*batch),
        lambda _loss: jax.block_until_ready(jax.live_arrays()),
        {"losses": losses, "peak": found.get("peak_bytes_in_use", watcher.peak)},
    )


def make_rows(taken: dict[str, list[float]], peaks: dict[str, int]) -> list[Row]:
    """Each liveness against everything on the device."""
    rows = []
    for name in OFF_CHIP:
        ratio = peaks[name] / peaks[ALWAYS_LIVE]
        mebibytes = [f"{peaks[side] / 2**20:.1f} MiB" for side in (name, ALWAYS_LIVE)]
        case = f"{name}: bytes on the device at their peak, against {ALWAYS_LIVE}"
        rows.append(Row(QUESTION, case, *mebibytes, ratio, None, MOST_BYTES))
    for name in OFF_CHIP:
        case = f"{name}: time per call, against {ALWAYS_LIVE}"
        rows.append(harness.compare(QUESTION, case, taken[name], taken[ALWAYS_LIVE]))
    return rows


def main() -> None:
    parser = harness.make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="Rounds that count.")
    args = parser.parse_args()
    if args.side:
        serve_phases(args.side)
        return
    with harness.start_sides(MODULE, [ALWAYS_LIVE, *OFF_CHIP]) as sides:
        facts = {name: side.facts for name, side in sides.items()}
        if any(found["losses"] != facts[ALWAYS_LIVE]["losses"] for found in facts.values()):
            sys.exit(f"The losses differ: { {name: found['losses'] for name, found in facts.items()} }")
        taken = harness.take_turns(sides, 3 if args.short else args.rounds, 1.0)
    peaks = {name: int(found["peak"]) for name, found in facts.items()}
    harness.report(make_rows(taken, peaks), args.json)


if __name__ == "__main__":
    main()

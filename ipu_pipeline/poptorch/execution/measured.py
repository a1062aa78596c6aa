"""How long the calls of a wrapped model took: times by the host's clock, and JAX's profile."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import jax

from ipu_pipeline.engine.fronts import Collected
from ipu_pipeline.poptorch.logs import logger
from ipu_pipeline.poptorch.options import Options

__all__ = ["CallTimes", "Latency", "Profile"]

Latency = tuple[float, float, float]


@dataclass(eq=False)
class CallTimes:
    """Times of the last call, in seconds of `time.perf_counter`, one per micro-batch.

    The micro-batches of all replicas count, in the order in which they run.

    Attributes:
      input: when the call with the micro-batch began.
      input_complete: when the micro-batch was on its way to the devices.
      output: when its outputs were asked for.
      output_complete: when they were on the host. The micro-batches of one program arrive together.
    """

    input: list[float] = field(default_factory=list)
    input_complete: list[float] = field(default_factory=list)
    output: list[float] = field(default_factory=list)
    output_complete: list[float] = field(default_factory=list)

    def begin(self, moment: float, number: int) -> None:
        """Notes that a call of `number` micro-batches began at `moment`."""
        self.input = [moment] * number

    def note_placed(self) -> None:
        """Notes that the next micro-batch is on its way."""
        self.input_complete.append(time.perf_counter())

    def wait_for(self, collected: Sequence[Collected]) -> None:
        """Waits for the outputs of the call, and notes when they come; a sum counts for all it adds up."""
        number = len(self.input)
        # Synthetic data are not placed one by one.
        self.input_complete += [time.perf_counter()] * (number - len(self.input_complete))
        share = number // max(1, sum(part.size or 1 for part in collected))
        for part in collected:
            count = share * (part.size or 1)
            self.output += [time.perf_counter()] * count
            jax.block_until_ready(part.outputs)
            self.output_complete += [time.perf_counter()] * count
        # Without outputs there is nothing to wait for.
        self.output += [time.perf_counter()] * (number - len(self.output))
        self.output_complete += [time.perf_counter()] * (number - len(self.output_complete))

    def latency(self, start: str, end: str) -> Latency:
        """The least, greatest and mean time, in s, between two points, given by the names of attributes."""
        spans = [last - first for first, last in zip(getattr(self, start), getattr(self, end), strict=True)]
        if not spans:
            return (0.0, 0.0, 0.0)
        return (min(spans), max(spans), sum(spans) / len(spans))


class Profile:
    """Writes a profile of a model's first call, if its options ask for one."""

    def __init__(self, options: Options, trains: bool) -> None:
        """Takes the model's options. `trains` is for the name of the directory."""
        self._options = options
        self._name = (
            options.model_name if options.is_set("model_name") else "training" if trains else "inference"
        )
        self._is_wanted = options.profiling

    @contextlib.contextmanager
    def of_first_call(self) -> Iterator[None]:
        """Records the first call that runs inside; later ones are not recorded."""
        if not self._is_wanted:
            yield
            return
        self._is_wanted = False
        directory = Path(self._options.profile_dir or ".") / self._name
        distributed = self._options.Distributed
        if distributed.numProcesses > 1:
            directory /= f"process_{distributed.processId}"
        with jax.profiler.trace(str(directory)):
            yield
        logger.info("The profile of a call is in %s", directory)

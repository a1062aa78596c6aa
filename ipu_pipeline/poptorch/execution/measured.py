"""What compiling and calls of a wrapped model took: times by the host's clock, and JAX's profile."""

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

    With several replicas, those of all replicas count, in the order in which they run.

    Attributes:
      input: when the tensors of each micro-batch were handed over.
      input_complete: when it was on its way to the devices.
      output: when its outputs were asked for.
      output_complete: when they were there. What one program handles is there at once.
    """

    input: list[float] = field(default_factory=list)
    input_complete: list[float] = field(default_factory=list)
    output: list[float] = field(default_factory=list)
    output_complete: list[float] = field(default_factory=list)

    def begin(self, moment: float, number: int) -> None:
        """Notes that a call began.

        Args:
          moment: when.
          number: how many micro-batches it has.
        """
        self.input = [moment] * number

    def note_placed(self) -> None:
        """Notes that the next micro-batch is on its way."""
        self.input_complete.append(time.perf_counter())

    def wait_for(self, collected: Sequence[Collected]) -> None:
        """Waits for the outputs of a call, which has been started, and notes when they come.

        Args:
          collected: what the last stage gives; what is summed up over micro-batches counts for all of them.
        """
        number = len(self.input)
        # Of what goes nowhere, as synthetic data, all has been placed by now.
        self.input_complete += [time.perf_counter()] * (number - len(self.input_complete))
        share = number // max(1, sum(part.size or 1 for part in collected))
        for part in collected:
            count = share * (part.size or 1)
            self.output += [time.perf_counter()] * count
            jax.block_until_ready(part.outputs)
            self.output_complete += [time.perf_counter()] * count
        # Where nothing is returned, it is as good as there.
        self.output += [time.perf_counter()] * (number - len(self.output))
        self.output_complete += [time.perf_counter()] * (number - len(self.output_complete))

    def latency(self, start: str, end: str) -> Latency:
        """The least, the greatest and the mean time of a micro-batch from one point to another.

        Args:
          start: the name of the first point, an attribute.
          end: likewise, of the second.
        """
        spans = [last - first for first, last in zip(getattr(self, start), getattr(self, end), strict=True)]
        if not spans:
            return (0.0, 0.0, 0.0)
        return (min(spans), max(spans), sum(spans) / len(spans))


class Profile:
    """Writes a profile of a model's first call, if its options ask for one."""

    def __init__(self, options: Options, trains: bool) -> None:
        """Takes what the options say.

        Args:
          options: of the model.
          trains: whether it trains, for the name of the directory.
        """
        self._options = options
        self._name = (
            options.model_name if options.is_set("model_name") else "training" if trains else "inference"
        )
        self._is_wanted = options.profiling

    @contextlib.contextmanager
    def of_first_call(self) -> Iterator[None]:
        """Around each call; all but the first are left alone."""
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

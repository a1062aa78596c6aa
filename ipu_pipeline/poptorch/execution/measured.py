"""How long compiling and calls of a wrapped model took."""

from __future__ import annotations

import abc
from datetime import timedelta

from ipu_pipeline.poptorch.errors import Error
from ipu_pipeline.poptorch.execution.progress import CompileProgress
from ipu_pipeline.poptorch.execution.timing import CallTimes, Latency
from ipu_pipeline.poptorch.options import Options

__all__ = ["Measured"]


class Measured(abc.ABC):
    """The part of a wrapped model that tells of times."""

    def __init__(self) -> None:
        """Starts with nothing measured."""
        self._progress: CompileProgress | None = None
        self._times = CallTimes()
        self._call_ns: int | None = None

    @property
    @abc.abstractmethod
    def options(self) -> Options:
        """The model's options, frozen."""

    def compilationTime(self) -> timedelta:
        """How long compiling took.

        Raises:
          Error: the model has not been compiled; or `Options.showCompilationProgressBar` is off.
        """
        if not self.options.show_compilation_progress_bar:
            raise Error("Please set showCompilationProgressBar option to obtain compilation time.")
        if self._progress is None or self._progress.time is None:
            raise Error("Please compile the model before obtaining compilation time.")
        return self._progress.time

    def getLatency(self) -> Latency:
        """Least, greatest and mean seconds of the last call's micro-batches, from input to output."""
        return self._times.latency("input", "output_complete")

    def getHostIpuLatency(self) -> Latency:
        """The same until a micro-batch was handed to the devices."""
        return self._times.latency("input", "input_complete")

    def getComputeLatency(self) -> Latency:
        """The same from there until outputs were asked for."""
        return self._times.latency("input_complete", "output")

    def getIpuHostLatency(self) -> Latency:
        """The same from there until outputs were there."""
        return self._times.latency("output", "output_complete")

    def getPerfCounters(self) -> dict[str, list[float]]:
        """Seconds at which the micro-batches of the last call were at four points."""
        return {name: list(times) for name, times in vars(self._times).items()}

    def cycleCount(self) -> int:
        """Nanoseconds that the last call took: JAX devices count no cycles.

        Raises:
          Error: `Options.logCycleCount` is off, or there was no call.
        """
        if not self.options.log_cycle_count:
            raise Error(
                "Cycle count logging is disabled. Please set option logCycleCount to True to enable."
            )
        if self._call_ns is None:
            raise Error("Please run the model at least once before obtaining cycle count.")
        return self._call_ns

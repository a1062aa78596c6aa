"""Options of what a model reports: logs, names, profiles, and inner values."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

from ipu_pipeline.poptorch import logs
from ipu_pipeline.poptorch.enums import OutputMode
from ipu_pipeline.poptorch.operations import checks
from ipu_pipeline.poptorch.options.base import Option, OptionGroup, configurable

__all__ = ["AnchoredTensor", "DiagnosticOptions", "check_output_mode"]


class AnchoredTensor(NamedTuple):
    """An inner value of a model that is kept.

    Attributes:
      long_name: the name of the value in `getTensorNames`.
      output_mode: which micro-batches it is kept for; None for those whose outputs are returned.
      output_return_period: the N of `OutputMode.EveryN`.
    """

    long_name: str
    output_mode: OutputMode | None
    output_return_period: int


_anchored: checks.Check[dict[str, AnchoredTensor]] = checks.Check(
    "a dict of AnchoredTensor, as anchorTensor makes it",
    lambda value: (
        isinstance(value, dict) and all(isinstance(one, AnchoredTensor) for one in value.values())
    ),
)


def check_output_mode(name: str, output_mode: Any, period: Any) -> int:
    """Returns the period of an output mode: required for `EveryN`, else 1. Warns if it is given in vain."""
    mode = checks.member(OutputMode)(f"{name}: output_mode", output_mode)
    if mode is OutputMode.EveryN:
        if period is None:
            raise AssertionError(f"{name}: OutputMode.EveryN needs output_return_period, a number from 1.")
        return int(checks.integer(1)(f"{name}: output_return_period", period))
    if period not in (None, 1):
        logs.warn_once(f"{name}: output_return_period has no effect: it is for OutputMode.EveryN.")
    return 1


class DiagnosticOptions(OptionGroup):
    """The part of `Options` about what a model reports."""

    path = "poptorch.Options()"

    log_dir = Option(
        checks.directory,
        ".",
        no_effect="no files of logs are written: what there is to tell goes to Python's logging.",
    )

    @log_dir.setter
    def logDir(self, log_dir: str) -> None:
        """Has no effect: no files of logs are written. Directories other than "." warn."""

    max_repeat_logs = Option(
        checks.optional(checks.integer(0)),
        4,
        no_effect="there is no log of Poplar, and a warning of this front is logged once.",
    )

    @max_repeat_logs.setter
    def maxRepeatLogs(self, max_lines: int | None) -> None:
        """Has no effect: it is about Poplar's log. Values other than 4 warn.

        Args:
          max_lines: the number; None for no limit.
        """

    anchored_tensors = Option(_anchored, {}, doc="Values to keep, by their short names.")

    @configurable
    def anchorTensor(
        self,
        short_name: str,
        long_name: str,
        output_mode: OutputMode | None = None,
        output_return_period: int = 1,
    ) -> Self:
        """Keeps an inner value of the model at each call, for `getAnchoredTensor`.

        Args:
          short_name: the name that `getAnchoredTensor` takes.
          long_name: one of `getTensorNames`. "Gradient___" before it keeps the value's gradient: one per
            micro-batch, of its loss times `loss_scaling`, not averaged.
          output_mode: which micro-batches it is kept for; None for those whose outputs are returned.
          output_return_period: the N of `OutputMode.EveryN`.

        Raises:
          AssertionError: an argument is of a wrong type.
          ValueError: the period is below 1.
        """
        name = f"{self.path}.anchorTensor"
        short = checks.string(f"{name}: short_name", short_name)
        long = checks.string(f"{name}: long_name", long_name)
        mode = OutputMode.Default if output_mode is None else output_mode
        anchored = AnchoredTensor(long, output_mode, check_output_mode(name, mode, output_return_period))
        return self.set(anchored_tensors={**self.anchored_tensors, short: anchored})

    log_cycle_count = Option(checks.boolean, False)

    @log_cycle_count.setter
    def logCycleCount(self, log_cycle_count: bool) -> None:
        """Whether each call measures how long it takes, for `cycleCount`."""

    profiling = Option(checks.boolean, False, doc="Whether a profile is written.")
    profile_dir = Option(
        checks.optional(checks.directory), None, doc="Where it is written; None: where the program runs."
    )

    @configurable
    def enableProfiling(self, profile_dir: str | None = None) -> Self:
        """Writes a profile of the model's first call after it was compiled.

        It is JAX's profile: TensorBoard's profiler and Perfetto show it. Its directory is named after
        `modelName`, or else "training" or "inference"; several processes write to `process_0`, `process_1`
        and so on in it.

        Args:
          profile_dir: the directory to write in; None for the directory where the program runs.

        Raises:
          AssertionError: it is not a path.
        """
        return self.set(profile_dir=profile_dir, profiling=True)

    module_namescope = Option(checks.boolean, True, doc="Whether names of values contain modules' names.")

    @configurable
    def disableModuleNamescope(self) -> Self:
        """Leaves the names of modules out of the names of a model's values."""
        return self.set(module_namescope=False)

    source_location_excludes = Option(checks.list_of_strings, [])

    @source_location_excludes.setter
    def sourceLocationExcludes(self, excludes: list[str]) -> None:
        """The files that are passed over when an error names the line of the model that it comes from.

        Args:
          excludes: parts of their paths. torch and this package are always passed over.
        """

    @configurable
    def appendToLocationExcludes(self, *excludes: str) -> Self:
        """Adds to what `sourceLocationExcludes` set.

        Raises:
          AssertionError: one is not a string.
        """
        return self.set(source_location_excludes=[*self.source_location_excludes, *excludes])

    show_compilation_progress_bar = Option(checks.boolean, True)

    @show_compilation_progress_bar.setter
    def showCompilationProgressBar(self, show: bool = True) -> None:
        """Whether a bar shows the progress of compiling."""

    model_name = Option(checks.string)

    @model_name.setter
    def modelName(self, name: str) -> None:
        """The name of the directory that the model's profile is written to."""

"""Options of a model, with those of its devices and of what it reports."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, Self

import torch

from ipu_pipeline.engine import schedules
from ipu_pipeline.ground.checks import is_real
from ipu_pipeline.poptorch import logs
from ipu_pipeline.poptorch.enums import AutoStage, CommGroupType, ConnectionType, OutputMode, SyncPattern
from ipu_pipeline.poptorch.operations import checks
from ipu_pipeline.poptorch.options import option_texts
from ipu_pipeline.poptorch.options.base import Option, OptionGroup, configurable
from ipu_pipeline.poptorch.options.inner_groups import (
    DistributedOptions,
    JitOptions,
    PopartOptions,
    PrecisionOptions,
    TensorLocationOptions,
    TrainingOptions,
)
from ipu_pipeline.poptorch.options.strategies import PipelinedExecution, Strategy


def _check_proportions(name: str, value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise checks.fail(name, 'a dict as {"IPU0": 0.5}', value)
    proportions: dict[int, float] = {}
    for key, proportion in value.items():
        number = re.fullmatch(r"IPU(\d+)", key) if isinstance(key, str) else None
        if number is None:
            raise checks.fail(name, 'a dict with keys as "IPU0"', key)
        if not is_real(proportion):
            raise checks.fail(f"{name}[{key!r}]", "a number", proportion)
        if not 0 <= proportion <= 1:
            raise ValueError(f"{name}[{key!r}] must be from 0 to 1; got {proportion}.")
        proportions[int(number[1])] = float(proportion)
    return proportions


class DeviceOptions(OptionGroup):
    """The options of devices and replicas in `Options`."""

    path = "poptorch.Options()"

    replication_factor = Option(checks.integer(1), 1, doc="Copies of the model.")
    input_group_size = Option(checks.integer(1), 1, doc="How many replicas get the same inputs.")
    input_cgt = Option(
        checks.member(CommGroupType), CommGroupType.Consecutive, doc="How these replicas are chosen."
    )
    broadcast_buffers = Option(checks.boolean, True, doc="Whether replicas start from the same buffers.")

    @configurable
    def replicationFactor(self, replication_factor: int) -> Self:
        """Sets the number of copies of the model, each with its own devices and micro-batches.

        Replica r of a model on S IPUs has devices r * S to r * S + S - 1.

        Raises:
          AssertionError: it is not an integer.
          ValueError: it is below 1, or not a multiple of the group size of `inputReplicaGrouping`.
        """
        number = checks.integer(1)(f"{self.path}.replicationFactor", replication_factor)
        if number % self.input_group_size:
            raise ValueError(
                f"{self.path}.replicationFactor must be a multiple of input_group_size, "
                f"{self.input_group_size}; got {number}. Set inputReplicaGrouping(1, "
                "poptorch.CommGroupType.Consecutive) before."
            )
        return self.set(replication_factor=number)

    @configurable
    def inputReplicaGrouping(self, input_group_size: int, input_group_type: CommGroupType) -> Self:
        """Gives groups of replicas the same inputs. It has an effect only with `replicationFactor` above 1.

        Args:
          input_group_size: the number of replicas in a group.
          input_group_type: the grouping: `Consecutive`, `Orthogonal`, or `NoGrouping` with groups of 1.

        Raises:
          AssertionError: an argument has a wrong type.
          ValueError: the type is `All`, or the size is not a factor of the replication factor.
        """
        name = f"{self.path}.inputReplicaGrouping"
        size = checks.integer(1)(f"{name}: input_group_size", input_group_size)
        kind = checks.member(CommGroupType)(f"{name}: input_group_type", input_group_type)
        if kind is CommGroupType.All:
            raise ValueError(
                f"{name}: input_group_type must not be poptorch.CommGroupType.All: all replicas would get "
                "the same inputs. Use Consecutive or Orthogonal."
            )
        if kind is CommGroupType.NoGrouping and size > 1:
            raise ValueError(
                f"{name}: input_group_size must be 1 with poptorch.CommGroupType.NoGrouping; got {size}."
            )
        if self.replication_factor % size:
            raise ValueError(
                f"{name}: input_group_size must be a factor of replication_factor, "
                f"{self.replication_factor}; got {size}. Call replicationFactor before."
            )
        return self.set(input_group_size=size, input_cgt=kind)

    @configurable
    def broadcastBuffers(self, broadcast_buffers: bool = True) -> None:
        """Sets whether replicas must have the same buffers. It returns nothing.

        With True, the default, writing a buffer is an error in models with several replicas. With False,
        each replica keeps its own buffers from call to call. They start from the host's buffers, again
        after `copyWeightsToDevice` and `attachToDevice`, and the host gets the first replica's.

        Raises:
          AssertionError: it is not a boolean.
        """
        self.set(broadcast_buffers=broadcast_buffers)

    auto_round_num_ipus = Option(checks.boolean, False)

    @auto_round_num_ipus.setter
    def autoRoundNumIPUs(self, auto_round_num_ipus: bool = True) -> None:
        """Sets whether the number of reserved IPUs is rounded up to a power of two."""

    connection_type = Option(checks.member(ConnectionType), ConnectionType.Always)

    @connection_type.setter
    def connectionType(self, connection_type: ConnectionType) -> None:
        """Sets whether a model is attached to its devices when compiled. With `Never` it cannot run."""

    sync_pattern = Option(
        checks.member(SyncPattern),
        SyncPattern.Full,
        no_effect="devices wait for the values that they need, and for nothing else.",
    )

    @sync_pattern.setter
    def syncPattern(self, sync_pattern: SyncPattern) -> None:
        """Has no effect: devices wait only for values that they need. Patterns other than `Full` warn."""

    available_memory_proportion = Option(
        _check_proportions, {}, no_effect="XLA decides how much memory an operation takes while it runs."
    )

    @available_memory_proportion.setter
    def setAvailableMemoryProportion(self, available_memory_proportion: dict[str, float]) -> None:
        """Has no effect: XLA decides how much memory an operation takes. Non-empty dicts warn.

        Args:
          available_memory_proportion: as {"IPU0": 0.5}; it is kept as {0: 0.5}.

        Raises:
          AssertionError: it is not a dict of numbers with such keys.
          ValueError: a number is not from 0 to 1.
        """

    use_model = Option(checks.boolean)

    @use_model.setter
    def useIpuModel(self, use_model: bool) -> None:
        """Sets whether CPU devices are the IPUs, even if there are accelerators."""

    ipu_id = Option(checks.integer(0))

    @ipu_id.setter
    def useIpuId(self, ipu_id: int) -> None:
        """Sets the number of the model's first device."""

    ipu_version = Option(
        checks.integer(1),
        no_effect="there is no IPU, and so no generation of it.",
        neutral=2,
        doc="Has no effect: there is no IPU.",
    )

    @configurable
    def useOfflineIpuTarget(self, ipu_version: int = 2) -> Self:
        """Compiles without devices: sets `ConnectionType.Never`.

        Args:
          ipu_version: has no effect. Values other than 2 warn.

        Raises:
          AssertionError: the version is not an integer.
          ValueError: it is below 1.
        """
        return self.set(ipu_version=ipu_version, connection_type=ConnectionType.Never)


class AnchoredTensor(NamedTuple):
    """An inner value of a model that is kept, by the arguments of `DiagnosticOptions.anchorTensor`."""

    long_name: str
    output_mode: OutputMode | None
    output_return_period: int


_anchored: checks.Check[dict[str, AnchoredTensor]] = checks.Check(
    "a dict of AnchoredTensor, as anchorTensor makes it",
    lambda value: (
        isinstance(value, dict) and all(isinstance(tensor, AnchoredTensor) for tensor in value.values())
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


_strategy: checks.Check[Strategy] = checks.Check(
    "a strategy, as poptorch.PipelinedExecution, or a poptorch.AutoStage",
    lambda value: isinstance(value, (AutoStage, Strategy)),
    lambda _name, value: PipelinedExecution(value) if isinstance(value, AutoStage) else value.clone(),
)


def _check_schedule(name: str, value: Any) -> schedules.Schedule:
    # The path of a file stays: it is read when a model is compiled.
    return schedules.check_schedule(value, name)


class Options(DeviceOptions, DiagnosticOptions):
    """Options of a model: iterations per call, devices, schedule and returned outputs.

    Setters return the options, so that calls can be chained. docs/poptorch_options.md has a table of
    them. New options take values from the environment variables POPTORCH_DEFAULT_OPTIONS and
    POPTORCH_CACHE_DIR. A data loader and a wrapped model freeze their options.

    Attributes:
      Training: accumulation and reduction of gradients.
      Precision: arithmetic.
      Jit: capture.
      Distributed: processes.
      TensorLocations: host memory or device memory.
    """

    Training: TrainingOptions
    Precision: PrecisionOptions
    Jit: JitOptions
    Distributed: DistributedOptions
    TensorLocations: TensorLocationOptions

    groups: ClassVar[Mapping[str, type[OptionGroup]]] = {
        "Training": TrainingOptions,
        "Precision": PrecisionOptions,
        "Jit": JitOptions,
        "Distributed": DistributedOptions,
        "TensorLocations": TensorLocationOptions,
    }

    def __init__(self) -> None:
        """Starts with the defaults and the values from the environment.

        Raises:
          ValueError: an environment variable is malformed.
        """
        super().__init__()
        self._Popart = PopartOptions()
        option_texts.apply_environment(self)

    @property
    def _popart(self) -> PopartOptions:
        return self._Popart

    def freeze(self) -> None:
        """Forbids further changes, here and in the inner groups."""
        super().freeze()
        self._Popart.freeze()

    device_iterations = Option(checks.integer(1), 1)

    @device_iterations.setter
    def deviceIterations(self, device_iterations: int) -> None:
        """Sets the number of weight updates per call; in inference, of micro-batches."""

    execution_strategy = Option(_strategy, PipelinedExecution())

    @execution_strategy.setter
    def setExecutionStrategy(self, strategy: Strategy | AutoStage) -> None:
        """Sets the stage of each block, and whether stages work at the same time.

        Args:
          strategy: the strategy. It is copied, so later changes to it have no effect. An `AutoStage`
            stands for `PipelinedExecution(auto_stage)`.
        """

    num_split_ipus = Option(checks.optional(checks.integer(1)), None)

    @num_split_ipus.setter
    def splitAutomatically(self, num_ipus: int | None) -> None:
        """Partitions a model without blocks automatically into stages, one per IPU. Not in PopTorch.

        The cuts are chosen for the shortest predicted call with the schedule: the model's parts are
        measured on the devices, equal parts once. The log (INFO) has the stages and the reasons. Results do
        not depend on the cuts. It cannot be combined with blocks, phases, `allowNewShapes`, anchored
        gradients or `checkIndices`.

        Args:
          num_ipus: the number of IPUs; None: blocks place the model.
        """

    pipeline_schedule = Option(_check_schedule, "grouped")

    @pipeline_schedule.setter
    def setPipelineSchedule(self, schedule: schedules.Schedule) -> None:
        """Sets the order in which pipelined stages run forwards and backwards. Not in PopTorch.

        Args:
          schedule: a name of `ipu_pipeline.engine.schedules.named_schedules`, by default "grouped", or a
            name in another library ("1f1b"); `ipu_pipeline.engine.SearchedSchedule()`, an order made for
            the costs of the stages; a function like `ipu_pipeline.engine.schedules.grouped`; or the path of
            a CSV file in PyTorch's format. See docs/schedules.md. Functions and files are checked for a
            model's stages and counts when the model is compiled. `PipelinedExecution(schedule=...)` has
            precedence. With "grouped", "interleaved" and "sequential", consecutive stages on one IPU are
            joined; with other schedules, stages given by `Stage` or `AutoIncrement` stay separate.

        Raises:
          ValueError: there is no such schedule.
          TypeError: it is not a function of the four arguments of `grouped`.
        """

    output_mode = Option(
        checks.member(OutputMode), OutputMode.Default, doc="Which micro-batches' outputs are returned."
    )
    output_return_period = Option(checks.integer(1), 1, doc="The N of `OutputMode.EveryN`.")

    @configurable
    def outputMode(self, output_mode: OutputMode, output_return_period: int | None = None) -> Self:
        """Selects the micro-batches whose outputs are returned.

        Args:
          output_mode: the default is `Final` in training, `All` in inference.
          output_return_period: the N of `OutputMode.EveryN`, for this mode only.

        Raises:
          AssertionError: an argument has a wrong type, or the period is missing.
          ValueError: the period is below 1.
        """
        period = check_output_mode(f"{self.path}.outputMode", output_mode, output_return_period)
        return self.set(output_mode=output_mode, output_return_period=period)

    def defaultOutputMode(self) -> bool:
        """Whether the output mode is `OutputMode.Default`."""
        return self.output_mode == OutputMode.Default

    random_seed = Option(checks.integer(0), doc="The seed of the model's random numbers.")

    @configurable
    def randomSeed(self, random_seed: int) -> Self:
        """Sets the seed of random numbers: the model's, and torch's in this process.

        Raises:
          AssertionError: it is not an integer.
          ValueError: it is negative.
        """
        self.set(random_seed=random_seed)
        torch.manual_seed(self.random_seed)
        return self

    executable_cache_path = Option(checks.optional(checks.directory), None)

    @executable_cache_path.setter
    def enableExecutableCaching(self, path: str | os.PathLike[str] | None) -> None:
        """Keeps compiled programs in a directory, so that later processes need not compile them.

        Args:
          path: the directory, made if it does not exist; None to keep nothing.
        """

    synthetic_data = Option(checks.truth, False)

    @synthetic_data.setter
    def enableSyntheticData(self, enabled: bool | int) -> None:
        """Sets whether inputs are generated on the devices, to measure a model without its data.

        Only the shapes and dtypes of a call's tensors are used. An integer, as for PopART's modes, is also
        accepted: 0 turns it off, other values turn it on.
        """

    stable_norm = Option(
        checks.boolean,
        False,
        no_effect="norms are always computed in the stable way: from differences to the mean, and "
        "float16 in float32.",
    )

    @stable_norm.setter
    def enableStableNorm(self, enabled: bool) -> None:
        """Has no effect: norms are always computed in a stable way. True warns."""

    allow_new_shapes = Option(
        checks.boolean, False, doc="Whether calls may have other shapes than the first."
    )
    max_shapes = Option(checks.integer(1), 8, doc="How many shapes there may be.")

    @configurable
    def allowNewShapes(self, allow: bool = True, max_shapes: int = 8) -> Self:
        """Allows calls with other shapes than the first call's. Not in PopTorch.

        The model is compiled for each new shape. All programs share weights, buffers, random numbers and
        optimizer state, so shapes may change from call to call as in plain torch. Each call still has the
        same number of micro-batches, all of one shape. The trained parameters, and the IPU of each, must be
        the same for all shapes. A shape that fails to compile changes nothing.

        Args:
          allow: whether other shapes are allowed. False: another shape is an error, as in PopTorch.
          max_shapes: the most shapes, including the first. One more is an error.

        Raises:
          AssertionError: an argument has a wrong type.
          ValueError: `max_shapes` is below 1.
        """
        number = checks.integer(1)(f"{self.path}.max_shapes", max_shapes)
        return self.set(allow_new_shapes=allow, max_shapes=number)

    updatable_named_buffers = Option(checks.list_of_strings, [])

    @updatable_named_buffers.setter
    def updatableNamedBuffers(self, buffers: list[str]) -> None:
        """The buffers that `copyNamedBuffersToDevice` copies."""

    relax_optimizer_attributes_checks = Option(checks.boolean, False)

    @relax_optimizer_attributes_checks.setter
    def relaxOptimizerAttributesChecks(self, relax: bool = True) -> None:
        """Sets whether unexpected attributes of optimizers are ignored without a warning."""

    value_branches = Option(checks.boolean, False)

    @value_branches.setter
    def allowValueBranches(self, allow: bool) -> None:
        """Sets whether forward may ask for values of tensors that inputs determine, as in `if mask.any()`.

        PopTorch does not have this. Forward gets the values of the first micro-batch, for which the model
        is compiled. A call in which one differs ends with an error that names the line, before the update.
        Values that only buffers and parameters determine may be asked for without it.
        """

    index_checks = Option(checks.boolean, False)

    @index_checks.setter
    def checkIndices(self, enabled: bool = True) -> None:
        """Sets whether an index out of range is an error, for debugging. Not in PopTorch.

        By default, reading out of range gives NaN (for integers the lowest value), and writing out of range
        does nothing. With this option, the host checks the indices of each embedding, gather, scatter,
        index_select and advanced index, and the classes of losses. This takes time, and needs two copies of
        the weights during an update. If an index is wrong, the weights stay as they were before the update.
        It needs a single process.
        """

    def loadFromFile(self, filepath: str | os.PathLike[str]) -> Self:
        """Sets options from a file with a call on each line, such as `deviceIterations(4)`.

        Args:
          filepath: the file; see `ipu_pipeline.poptorch.options.option_texts`.

        Raises:
          AttributeError: the options are frozen.
          ConfigFileError: a line cannot be read, or its option cannot be set. The lines before it have been
            applied.
          OSError: the file cannot be read.
        """
        self.check_not_frozen()
        option_texts.load_file(self, filepath)
        return self

    def from_json(self, string: str) -> Self:
        """Sets options from JSON.

        Args:
          string: an object such as {"deviceIterations": 4, "Precision.enableStochasticRounding": false}:
            names of setters, each with its argument or a list of its arguments. Strings such as
            "OutputMode.All" stand for members of enumerations.

        Raises:
          AttributeError: the options are frozen, or a setter does not exist.
          AssertionError: a value has a wrong type.
          ValueError: the string is not such an object, or a value is out of range.
        """
        self.check_not_frozen()
        option_texts.load_json(self, string)
        return self

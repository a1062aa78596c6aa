"""`Options`: all settings of a model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch

from ipu_pipeline.engine import schedules
from ipu_pipeline.poptorch.enums import AutoStage, OutputMode
from ipu_pipeline.poptorch.operations import checks
from ipu_pipeline.poptorch.options import config_file, environment
from ipu_pipeline.poptorch.options.base import Option, OptionGroup, configurable
from ipu_pipeline.poptorch.options.devices import DeviceOptions
from ipu_pipeline.poptorch.options.diagnostics import DiagnosticOptions, check_output_mode
from ipu_pipeline.poptorch.options.distributed import DistributedOptions
from ipu_pipeline.poptorch.options.jit import JitOptions
from ipu_pipeline.poptorch.options.popart import PopartOptions
from ipu_pipeline.poptorch.options.precision import PrecisionOptions
from ipu_pipeline.poptorch.options.strategies import PipelinedExecution, Strategy
from ipu_pipeline.poptorch.options.tensor_locations import TensorLocationOptions
from ipu_pipeline.poptorch.options.training import TrainingOptions

__all__ = ["Options"]


def _check_strategy(name: str, value: Any) -> Strategy:
    if isinstance(value, AutoStage):
        return PipelinedExecution(value)
    if not isinstance(value, Strategy):
        raise checks.fail(
            name, "a strategy, as poptorch.PipelinedExecution, or a poptorch.AutoStage", value
        )
    return value.clone()


def _check_schedule(name: str, value: Any) -> schedules.Schedule:
    # The path of a file stays: it is read when a model is compiled.
    return schedules.check_schedule(value, name)


class Options(DeviceOptions, DiagnosticOptions):
    """Options of a model: iterations per call, devices, schedule and returned outputs.

    Setters return the options, so that calls can be chained. docs/poptorch_options.md has a table of
    them. New options take values from the environment variables POPTORCH_DEFAULT_OPTIONS and
    POPTORCH_CACHE_DIR; see `environment`. A data loader and a wrapped model freeze their options.

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
        environment.apply(self)

    def freeze(self) -> None:
        """Forbids further changes, here and in the inner groups."""
        super().freeze()
        self._Popart.freeze()

    device_iterations = Option(checks.integer(1), 1)

    @device_iterations.setter
    def deviceIterations(self, device_iterations: int) -> None:
        """Sets the number of weight updates per call; in inference, of micro-batches."""

    execution_strategy = Option(_check_strategy, PipelinedExecution())

    @execution_strategy.setter
    def setExecutionStrategy(self, strategy: Strategy | AutoStage) -> None:
        """Sets the stage of each block, and whether stages work at the same time.

        Args:
          strategy: the strategy. It is copied, so later changes to it have no effect. An `AutoStage`
            stands for `PipelinedExecution(auto_stage)`.

        Raises:
          AssertionError: it is not a strategy.
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

        Raises:
          AssertionError: it is not an integer.
          ValueError: it is below 1.
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
          filepath: the file; see `config_file`.

        Raises:
          AttributeError: the options are frozen.
          ConfigFileError: a line cannot be read, or its option cannot be set. The lines before it have been
            applied.
          OSError: the file cannot be read.
        """
        self.check_not_frozen()
        config_file.load(self, filepath)
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
        environment.load_json(self, string)
        return self

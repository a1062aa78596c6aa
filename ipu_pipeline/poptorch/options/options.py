"""All that is said of a model besides its layers."""

from __future__ import annotations

import inspect
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


def _check_schedule(name: str, value: Any) -> str | schedules.ScheduleFunction:
    known = schedules.named_schedules()
    if isinstance(value, str):
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}, or a function; got {value!r}.")
    elif not callable(value):
        raise TypeError(f"{name} must be one of {', '.join(known)}, or a function; got {value!r}.")
    else:
        try:
            inspect.signature(value).bind(1, 1, (0,), True)
        except TypeError as error:
            raise TypeError(
                f"{name} must take (num_stages, num_micro_batches, device_mapping, training), but "
                f"{value!r} cannot: {error}."
            ) from None
        except ValueError:
            pass  # it does not say what it takes
    return value


class Options(DeviceOptions, DiagnosticOptions):
    """Options of a model: how often it runs per call, on which devices, how, and what comes back.

    Setters return the options, so that they can be chained. docs/poptorch_options.md has them all in a
    table. At first options are as the environment variables POPTORCH_DEFAULT_OPTIONS and POPTORCH_CACHE_DIR
    say; see `environment`. A data loader and a wrapped model freeze the options that they are given.

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
        """Starts with the defaults, and what the environment says.

        Raises:
          ValueError: an environment variable is malformed.
        """
        super().__init__()
        self._Popart = PopartOptions()
        environment.apply(self)

    def freeze(self) -> None:
        """Lets nothing be changed any more, here and in the groups within."""
        super().freeze()
        self._Popart.freeze()

    device_iterations = Option(checks.integer(1), 1)

    @device_iterations.setter
    def deviceIterations(self, device_iterations: int) -> None:
        """How many weight updates, or in inference micro-batches, there are per call."""

    execution_strategy = Option(_check_strategy, PipelinedExecution())

    @execution_strategy.setter
    def setExecutionStrategy(self, strategy: Strategy | AutoStage) -> None:
        """Which stage each block is in, and whether stages work at the same time.

        Args:
          strategy: it is copied, so that changing it afterwards changes nothing here. An `AutoStage`
            stands for `PipelinedExecution` with it.

        Raises:
          AssertionError: it is something else.
        """

    pipeline_schedule = Option(_check_schedule, "grouped")

    @pipeline_schedule.setter
    def setPipelineSchedule(self, schedule: str | schedules.ScheduleFunction) -> None:
        """In which order stages take forwards and backwards, if pipelined. Ours, not PopTorch's.

        Args:
          schedule: "grouped", the default, "interleaved" or "sequential"; or a function like
            `ipu_pipeline.engine.schedules.grouped`, which is checked for a model's stages and counts when
            the model is compiled.

        Raises:
          ValueError: there is no such schedule.
          TypeError: it is no function of the four arguments of `grouped`.
        """

    output_mode = Option(
        checks.member(OutputMode), OutputMode.Default, doc="Which micro-batches' outputs are returned."
    )
    output_return_period = Option(checks.integer(1), 1, doc="The N of `OutputMode.EveryN`.")

    @configurable
    def outputMode(self, output_mode: OutputMode, output_return_period: int | None = None) -> Self:
        """Which micro-batches' outputs are returned.

        Args:
          output_mode: the default is `Final` in training, `All` in inference.
          output_return_period: the N of `OutputMode.EveryN`; only for it.

        Raises:
          AssertionError: an argument is of a wrong type, or the period is missing.
          ValueError: the period is below 1.
        """
        period = check_output_mode(f"{self.path}.outputMode", output_mode, output_return_period)
        return self.set(output_mode=output_mode, output_return_period=period)

    def defaultOutputMode(self) -> bool:
        """Whether the output mode is `OutputMode.Default`."""
        return self.output_mode == OutputMode.Default

    random_seed = Option(checks.integer(0), doc="Where the model's random numbers start.")

    @configurable
    def randomSeed(self, random_seed: int) -> Self:
        """Where random numbers start: the model's, and torch's in this process.

        Raises:
          AssertionError: it is no integer.
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
          path: it is made if it does not exist; None: nothing is kept.
        """

    synthetic_data = Option(checks.boolean, False)

    @synthetic_data.setter
    def enableSyntheticData(self, enabled: bool) -> None:
        """Whether the model's inputs are made up on the devices, to measure a model without its data.

        Tensors that a call is given are looked at only for their shapes and dtypes.
        """

    stable_norm = Option(
        checks.boolean,
        False,
        no_effect="norms are always computed in the stable way: from differences to the mean, and "
        "float16 in float32.",
    )

    @stable_norm.setter
    def enableStableNorm(self, enabled: bool) -> None:
        """Has no effect: norms are always computed in the stable way. True warns."""

    allow_new_shapes = Option(
        checks.boolean, False, doc="Whether calls may have other shapes than the first."
    )
    max_shapes = Option(checks.integer(1), 8, doc="How many shapes there may be.")

    @configurable
    def allowNewShapes(self, allow: bool = True, max_shapes: int = 8) -> Self:
        """Lets calls have other shapes than the first. Ours, not PopTorch's.

        The model is compiled for each when it comes. All programs have the same weights, buffers, random
        numbers and optimizer state: shapes may change from call to call as they do in plain torch. Each
        call still has the same number of micro-batches, which are of one shape.

        Args:
          allow: False: another shape is an error, as in PopTorch.
          max_shapes: how many shapes there may be, with the first; one more is an error.

        Raises:
          AssertionError: an argument is of a wrong type.
          ValueError: `max_shapes` is below 1.
        """
        number = checks.integer(1)(f"{self.path}.max_shapes", max_shapes)
        return self.set(allow_new_shapes=allow, max_shapes=number)

    updatable_named_buffers = Option(checks.list_of_strings, [])

    @updatable_named_buffers.setter
    def updatableNamedBuffers(self, buffers: list[str]) -> None:
        """Which buffers `copyNamedBuffersToDevice` copies."""

    relax_optimizer_attributes_checks = Option(checks.boolean, False)

    @relax_optimizer_attributes_checks.setter
    def relaxOptimizerAttributesChecks(self, relax: bool = True) -> None:
        """Whether unexpected attributes of optimizers are passed over without a warning."""

    index_checks = Option(checks.boolean, False)

    @index_checks.setter
    def checkIndices(self, enabled: bool = True) -> None:
        """Whether an index that a tensor does not have is an error, for debugging. Ours, not PopTorch's.

        Without it reading there gives NaN (of integers the least one), and nothing is written there. With
        it the host looks at the indices of each embedding, gather, scatter, index_select and advanced
        index, and at the classes of losses, which takes time; and the weights are there twice while they
        are updated. It is for one process.
        """

    def loadFromFile(self, filepath: str | os.PathLike[str]) -> Self:
        """Sets options from a file with a call on each line, as `deviceIterations(4)`.

        Args:
          filepath: the file; see `config_file`.

        Raises:
          AttributeError: the options are frozen.
          ConfigFileError: a line cannot be read, or sets what cannot be set. The lines before it are set.
          OSError: the file cannot be read.
        """
        self.check_not_frozen()
        config_file.load(self, filepath)
        return self

    def from_json(self, string: str) -> Self:
        """Sets options from JSON.

        Args:
          string: an object as {"deviceIterations": 4, "Precision.enableStochasticRounding": false}: names
            of setters, each with its argument, or a list of its arguments. "OutputMode.All" and the like
            stand for members of enumerations.

        Raises:
          AttributeError: the options are frozen, or a setter does not exist.
          AssertionError: a value is of a wrong type.
          ValueError: it is no such object, or a value is out of range.
        """
        self.check_not_frozen()
        environment.load_json(self, string)
        return self

"""Groups within `Options`: training, precision, capture, places of tensors, processes, and PopART's."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, Literal, Self

import torch

from ipu_pipeline.engine import processes
from ipu_pipeline.ground.checks import is_int, list_members
from ipu_pipeline.poptorch import logs
from ipu_pipeline.poptorch.enums import HalfFloatCastingBehavior, MeanReductionStrategy, ReductionType
from ipu_pipeline.poptorch.logs import warn_once
from ipu_pipeline.poptorch.operations import checks
from ipu_pipeline.poptorch.options.base import Option, OptionGroup, configurable
from ipu_pipeline.processes.launcher import COUNT_VARIABLE, INDEX_VARIABLE
from ipu_pipeline.processes.rendezvous import is_in_environment

# Options of training: the accumulation and reduction of gradients.


_reduction: checks.Check[ReductionType] = checks.Check(
    "poptorch.ReductionType.Sum or poptorch.ReductionType.Mean",
    lambda value: isinstance(value, ReductionType) and value is not ReductionType.NoReduction,
    error=ValueError,
)


class TrainingOptions(OptionGroup):
    """`Options.Training`."""

    path = "poptorch.Options().Training"

    gradient_accumulation = Option(checks.integer(1), 1)

    @gradient_accumulation.setter
    def gradientAccumulation(self, gradient_accumulation: int) -> None:
        """Sets the number of micro-batches per weight update."""

    accumulation_and_replication_reduction_type = Option(_reduction, ReductionType.Mean)

    @accumulation_and_replication_reduction_type.setter
    def accumulationAndReplicationReductionType(self, reduction_type: ReductionType) -> None:
        """Sets the reduction of the gradients over micro-batches and replicas."""

    meanAccumulationAndReplicationReductionStrategy = Option(
        checks.member(MeanReductionStrategy), MeanReductionStrategy.Post
    )

    @meanAccumulationAndReplicationReductionStrategy.setter
    def setMeanAccumulationAndReplicationReductionStrategy(
        self, mean_reduction_strategy: MeanReductionStrategy
    ) -> None:
        """Sets the time of division in a mean of gradients.

        The default is `Post`, or `Running` if the optimizer accumulates in float16 (its `accum_type`)
        without combined accumulation.

        Args:
          mean_reduction_strategy: `Running`: when each micro-batch is added, so that sums stay small.
            `Post` and `PostAndLoss`: at the end. Means over replicas are always taken at the end.
        """

    automatic_loss_scaling = Option(checks.boolean, False)

    @automatic_loss_scaling.setter
    def setAutomaticLossScaling(self, enabled: bool) -> None:
        """Sets whether the loss is scaled, so that float16 gradients neither vanish nor overflow.

        The scale starts at the optimizer's `loss_scaling`. An update with gradients that are not finite is
        skipped, and halves the scale, down to 1. After 100 updates without a skip the scale doubles. All
        replicas have the same scale.
        """

    convolution_dithering = Option(
        checks.boolean,
        False,
        no_effect="it spreads convolutions over the tiles of an IPU, and other devices have none.",
    )

    @convolution_dithering.setter
    def setConvolutionDithering(self, enabled: bool) -> None:
        """Has no effect: it concerns the tiles of an IPU. True warns."""


# Options of arithmetic: exceptions, rounding, and the dtype of partial results.


_partials: checks.Check[torch.dtype] = checks.Check(
    "torch.float16 or torch.float32",
    lambda value: value in (torch.float16, torch.float32),
    error=ValueError,
)


class PrecisionOptions(OptionGroup):
    """`Options.Precision`."""

    path = "poptorch.Options().Precision"

    floating_point_exceptions = Option(checks.boolean, False)

    @floating_point_exceptions.setter
    def enableFloatingPointExceptions(self, enabled: bool) -> None:
        """Whether a NaN or an infinity among a call's results is an error."""

    stochastic_rounding = Option(
        checks.boolean, False, no_effect="XLA rounds float16 to the nearest number."
    )

    @stochastic_rounding.setter
    def enableStochasticRounding(self, enabled: bool) -> None:
        """Has no effect: float16 results are rounded to the nearest number. True warns."""

    partials_type = Option(
        _partials,
        no_effect="XLA decides in which type a matrix product or convolution is summed up.",
    )

    @partials_type.setter
    def setPartialsType(self, dtype: torch.dtype) -> None:
        """Has no effect, and warns: XLA decides the dtype of sums in matrix products and convolutions."""

    def autocastEnabled(self, enabled: bool) -> Self:
        """Has no effect: only `torch.autocast` in forward casts. False warns.

        Raises:
          AssertionError: it is not a boolean.
        """
        if not checks.boolean("autocastEnabled", enabled):
            _warn(
                "autocastEnabled",
                "torch.autocast(enabled=False) in forward switches casts off.",
            )
        return self

    def autocastPolicy(self, policy: Any) -> Self:
        """Has no effect, and warns: `torch.autocast` uses torch's own lists of operations."""
        del policy
        _warn("autocastPolicy", "torch.autocast goes by torch's own lists of operations.")
        return self

    def halfFloatCasting(self, half_float_casting: HalfFloatCastingBehavior) -> Self:
        """Has no effect: float16 with float32 gives float32, as in torch. `FloatDowncastToHalf` warns.

        Raises:
          AssertionError: it is not a `HalfFloatCastingBehavior`.
        """
        rule = f"given one of {list_members(HalfFloatCastingBehavior)}"
        checks.instance(HalfFloatCastingBehavior, rule)("halfFloatCasting", half_float_casting)
        if half_float_casting is HalfFloatCastingBehavior.FloatDowncastToHalf:
            _warn("halfFloatCasting", "float16 and float32 together are float32, as in torch.")
        return self


def _warn(name: str, reason: str) -> None:
    warn_once(f"poptorch.Options().Precision.{name} has no effect: {reason}")


# Options of how a model is captured.


def _refuse_trace(name: str, value: bool) -> bool:
    if value:
        raise ValueError(
            f"{name} must be False; got True. Models are captured by torch.export, not by torch.jit.trace."
        )
    return False


class JitOptions(OptionGroup):
    """`Options.Jit`."""

    path = "poptorch.Options().Jit"

    trace_model = Option(dataclasses.replace(checks.boolean, keep=_refuse_trace, refuses="True"), False)

    @trace_model.setter
    def traceModel(self, trace_model: bool) -> None:
        """Whether torch.jit.trace captures the model. It must be False, as in PopTorch's last versions."""


# Options of the place of tensors: device memory or host memory.

_IO_TILES = "tiles for input and output are parts of an IPU."
_ALL_SHARED_OUT = "what can be divided by the number of replicas is shared out, whatever its size."

_flag = checks.Check(checks.boolean.rule, checks.boolean.accepts, lambda _name, value: int(value))


class TensorLocationSettings(OptionGroup):
    """The place where tensors of one kind are kept.

    Example:
      options.TensorLocations.setOptimizerLocation(
          poptorch.TensorLocationSettings().useOnChipStorage(False)
      )
    """

    path = "poptorch.TensorLocationSettings()"

    onChip = Option(_flag)

    @onChip.setter
    def useOnChipStorage(self, use: bool) -> None:
        """Sets whether tensors stay in device memory. False: they are in host memory while unused."""

    @Option(
        checks.integer(0), no_effect="all tensors of a kind lie off the device, or none.", neutral=0
    ).setter
    def minElementsForOffChip(self, min_elements: int) -> None:
        """Has no effect: all tensors of a kind are off the device, or none. Values above 0 warn."""

    @Option(checks.integer(0), no_effect=_ALL_SHARED_OUT, neutral=0).setter
    def minElementsForReplicatedTensorSharding(self, min_elements: int) -> None:
        """Has no effect: tensors that can be divided are, whatever their size. Values above 0 warn."""

    @Option(_flag).setter
    def useReplicatedTensorSharding(self, use: bool) -> None:
        """Sets whether each replica keeps only a part of tensors, for the optimizer's state and weights.

        A tensor is divided along the first dimension whose size is a multiple of the number of replicas. A
        tensor without such a dimension stays whole. It has no effect with one replica, nor for activations
        and sums of gradients, which differ between replicas: models that are wrapped with it warn.
        """

    @Option(_flag, no_effect=_IO_TILES, neutral=0).setter
    def useIOTilesToLoad(self, use: bool) -> None:
        """Has no effect: other devices have no such tiles. True warns."""

    @Option(_flag, no_effect=_IO_TILES, neutral=0).setter
    def useIOTilesToStore(self, use: bool) -> None:
        """Has no effect: other devices have no such tiles. True warns."""

    def to_dict(self) -> dict[str, int]:
        """Returns the settings, with PopTorch's keys. Booleans are 0 and 1."""
        return dict(self._values)


_location: checks.Check[dict[str, int]] = checks.Check(
    "a poptorch.TensorLocationSettings",
    lambda value: isinstance(value, TensorLocationSettings),
    lambda _name, value: value.to_dict(),
)


def _check_tiles(name: str, value: Any) -> int:
    if not is_int(value) or value % 2 or not 32 <= value <= 192:
        raise AssertionError(f"numIOTiles must be an even number between 32 and 192. {name} got {value!r}.")
    return value


_SHARED_OUT: dict[str, Literal["optimizer_state", "weights"]] = {
    "location_weight": "weights",
    "location_optimizer": "optimizer_state",
}


class TensorLocationOptions(OptionGroup):
    """`Options.TensorLocations`. The attributes hold what `TensorLocationSettings.to_dict` gave."""

    path = "poptorch.Options().TensorLocations"

    location_activation = Option(_location, {})

    @location_activation.setter
    def setActivationLocation(self, location: TensorLocationSettings) -> None:
        """Sets the location of the tensors that a stage keeps between its forward and its backward."""

    location_weight = Option(_location, {})

    @location_weight.setter
    def setWeightLocation(self, location: TensorLocationSettings) -> None:
        """Sets the location of parameters while no stage uses them."""

    location_optimizer = Option(_location, {})

    @location_optimizer.setter
    def setOptimizerLocation(self, location: TensorLocationSettings) -> None:
        """Sets the location of the optimizer's state between weight updates."""

    location_accumulator = Option(_location, {})

    @location_accumulator.setter
    def setAccumulatorLocation(self, location: TensorLocationSettings) -> None:
        """Sets the location of the sums of gradients while no stage uses them."""

    num_io_tiles = Option(_check_tiles, no_effect=_IO_TILES)

    @num_io_tiles.setter
    def numIOTiles(self, num_tiles: int) -> None:
        """Has no effect, and warns: other devices have no tiles for input and output.

        Raises:
          AssertionError: it is not an even number from 32 to 192.
        """

    @property
    def shard(self) -> list[Literal["optimizer_state", "weights"]]:
        """Returns what replicas divide among them, as the argument `shard` of `engine.Pipeline`."""
        return [kind for name, kind in _SHARED_OUT.items() if name in self.asked_to_shard]

    @property
    def asked_to_shard(self) -> list[str]:
        """The locations that ask for replicated tensor sharding."""
        return [
            name
            for name in self.settings
            if name != "num_io_tiles" and self._values[name].get("useReplicatedTensorSharding")
        ]

    def find_offloaded(self, is_on_chip: bool) -> list[str]:
        """Returns what is kept in the host's memory, as the argument `offload` of `engine.Pipeline`.

        Args:
          is_on_chip: whether tensors without a location of their own are kept in the devices' memory.
        """
        kinds = {
            "location_activation": "activations",
            "location_weight": "weights",
            "location_optimizer": "weight_update_variables",
            "location_accumulator": "gradient_accumulation_buffers",
        }
        return [kind for name, kind in kinds.items() if not self._values[name].get("onChip", is_on_chip)]


# Options of several processes that train one model: their number, and which one this is.


class DistributedOptions(OptionGroup):
    """`Options.Distributed`.

    At first they describe the run that this process has joined (`ipu_pipeline.distributed`), or the run in
    the environment variables IPU_PIPELINE_NUM_PROCESSES and IPU_PIPELINE_PROCESS_ID, or else in Open MPI's
    variables. Without any of these there is one process.
    """

    path = "poptorch.Options().Distributed"

    num_distributed_processes = Option(checks.integer(1), 1, doc="How many processes there are.")
    distributed_process_id = Option(checks.integer(0), 0, doc="Which process this is, from 0.")

    def __init__(self) -> None:
        """Determines which process this is.

        Raises:
          ValueError: the environment variables are not numbers that fit each other.
        """
        super().__init__()
        peers = processes.current()
        if peers is not None:
            self.configureProcessId(peers.index, peers.count)
        elif is_in_environment():
            self.setEnvVarNames(COUNT_VARIABLE, INDEX_VARIABLE)
        else:
            self.setEnvVarNames("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")
        self._explicit.clear()

    @property
    def processId(self) -> int:
        """Returns the number of this process, from 0."""
        return self.distributed_process_id

    @property
    def numProcesses(self) -> int:
        """Returns the number of processes."""
        return self.num_distributed_processes

    @configurable
    def configureProcessId(self, process_id: int, num_processes: int) -> Self:
        """Sets the number of processes, and which one this is.

        Args:
          process_id: the number of this process, from 0.
          num_processes: the number of processes.

        Raises:
          AssertionError: one is not an integer.
          ValueError: one is out of range.
        """
        number = checks.integer(1)(f"{self.path}.configureProcessId: num_processes", num_processes)
        this = checks.integer(0)(f"{self.path}.configureProcessId: process_id", process_id)
        if this >= number:
            raise ValueError(
                f"{self.path}.configureProcessId: process_id must be below num_processes, {number}; "
                f"got {this}."
            )
        return self.set(num_distributed_processes=number, distributed_process_id=this)

    @configurable
    def disable(self) -> Self:
        """Sets a single process, whatever the environment says."""
        return self.configureProcessId(0, 1)

    @configurable
    def setEnvVarNames(self, var_num_processes: str, var_process_id: str) -> Self:
        """Reads from environment variables which process this is. Without them it is the only one.

        Args:
          var_num_processes: the variable with the number of processes.
          var_process_id: the variable with the number of this process.

        Raises:
          AssertionError: a name is not a string.
          ValueError: they are not numbers that fit each other.
        """
        numbers = []
        for name, missing in ((var_num_processes, "1"), (var_process_id, "0")):
            checks.string(f"{self.path}.setEnvVarNames: a variable's name", name)
            text = os.environ.get(name, missing)
            if not text.strip().isdecimal():
                raise ValueError(f"The environment variable {name} must be a number; it is {text!r}.")
            numbers.append(int(text))
        number, this = numbers
        if this >= number:
            raise ValueError(
                f"The environment variable {var_process_id} must be below {var_num_processes}, {number}; "
                f"it is {this}."
            )
        return self.configureProcessId(this, number)


# `Options._Popart`: settings of PopTorch's compiler, which is not used here.


class PopartOptions:
    """Accepts any option of PopART. The first one warns that none has an effect, as XLA compiles."""

    def __init__(self) -> None:
        """Starts unfrozen."""
        self._frozen = False

    def freeze(self) -> None:
        """Forbids further settings."""
        self._frozen = True

    def set(self, key: str, value: Any) -> Self:
        """Has no effect; the first call warns."""
        return self._tell(f"set({key!r}, {value!r})")

    def setPatterns(self, patterns: Mapping[str, bool], level: int = 2) -> Self:
        """Has no effect; the first call warns."""
        return self._tell(f"setPatterns({dict(patterns)!r}, {level!r})")

    def _tell(self, call: str) -> Self:
        if self._frozen:
            raise AttributeError("Can't modify frozen Options")
        logs.warn_once(
            f"poptorch.Options()._Popart.{call} has no effect, like all settings of _Popart: models are "
            "compiled by XLA, not by PopART.",
            kind="_Popart",
        )
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> PopartOptions:
        return PopartOptions()  # a copy of the options is not frozen

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    __hash__ = None  # type: ignore[assignment]  # as other groups of options

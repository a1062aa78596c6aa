"""Options of the place of tensors: device memory or host memory."""

from __future__ import annotations

from typing import Any, Literal

from ipu_pipeline.ground.checks import is_int
from ipu_pipeline.poptorch.operations import checks
from ipu_pipeline.poptorch.options.base import Option, OptionGroup

__all__ = ["TensorLocationOptions", "TensorLocationSettings"]

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

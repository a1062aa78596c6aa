"""Options of where tensors lie: in a device's memory, or in the host's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from ipu_pipeline.poptorch.options import checks
from ipu_pipeline.poptorch.options.base import OptionGroup, Setting, configurable

__all__ = ["TensorLocationOptions", "TensorLocationSettings"]

_IO_TILES = "tiles for input and output are parts of an IPU."
_ALL_SHARED_OUT = "what can be divided by the number of replicas is shared out, whatever its size."


def _flag(name: str, value: Any) -> int:
    return int(checks.boolean(name, value))


class TensorLocationSettings(OptionGroup):
    """Where tensors of one kind lie.

    Example:
      options.TensorLocations.setOptimizerLocation(
          poptorch.TensorLocationSettings().useOnChipStorage(False)
      )
    """

    path = "poptorch.TensorLocationSettings()"
    settings: ClassVar[Mapping[str, Setting]] = {
        "onChip": Setting(_flag),
        "minElementsForOffChip": Setting(
            checks.integer(0),
            no_effect="all tensors of a kind lie off the device, or none.",
            neutral=0,
        ),
        "minElementsForReplicatedTensorSharding": Setting(
            checks.integer(0), no_effect=_ALL_SHARED_OUT, neutral=0
        ),
        "useReplicatedTensorSharding": Setting(_flag),
        "useIOTilesToLoad": Setting(_flag, no_effect=_IO_TILES, neutral=0),
        "useIOTilesToStore": Setting(_flag, no_effect=_IO_TILES, neutral=0),
    }

    @configurable
    def useOnChipStorage(self, use: bool) -> Self:
        """Whether they always lie in the device's memory; False: in the host's while nothing uses them.

        Raises:
          AssertionError: it is no boolean.
        """
        return self.set(onChip=use)

    @configurable
    def minElementsForOffChip(self, min_elements: int) -> Self:
        """Has no effect: all tensors of a kind lie off the device, or none. Above 0 it warns.

        Raises:
          AssertionError: it is no integer.
          ValueError: it is negative.
        """
        return self.set(minElementsForOffChip=min_elements)

    @configurable
    def minElementsForReplicatedTensorSharding(self, min_elements: int) -> Self:
        """Has no effect: what can be divided is shared out, whatever its size. Above 0 it warns.

        Raises:
          AssertionError: it is no integer.
          ValueError: it is negative.
        """
        return self.set(minElementsForReplicatedTensorSharding=min_elements)

    @configurable
    def useReplicatedTensorSharding(self, use: bool) -> Self:
        """Whether each of several replicas keeps a part of them: of the optimizer's state, and of weights.

        A tensor is divided along the first dimension whose size is a multiple of the number of replicas;
        one without such a dimension stays whole. With one replica it has no effect, and for activations and
        sums of gradients, which are each replica's own, it has none either: models that are wrapped with it
        warn.

        Raises:
          AssertionError: it is no boolean.
        """
        return self.set(useReplicatedTensorSharding=use)

    @configurable
    def useIOTilesToLoad(self, use: bool) -> Self:
        """Has no effect: other devices have no such tiles. True warns.

        Raises:
          AssertionError: it is no boolean.
        """
        return self.set(useIOTilesToLoad=use)

    @configurable
    def useIOTilesToStore(self, use: bool) -> Self:
        """Has no effect: other devices have no such tiles. True warns.

        Raises:
          AssertionError: it is no boolean.
        """
        return self.set(useIOTilesToStore=use)

    def to_dict(self) -> dict[str, int]:
        """What was set, by PopTorch's names of the keys; booleans are 0 and 1."""
        return dict(self._values)


def _check_location(name: str, value: Any) -> dict[str, int]:
    if not isinstance(value, TensorLocationSettings):
        raise checks.fail(name, "a poptorch.TensorLocationSettings", value)
    return value.to_dict()


def _check_tiles(name: str, value: Any) -> int:
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if not is_integer or value % 2 or not 32 <= value <= 192:
        raise AssertionError(f"numIOTiles must be an even number between 32 and 192. {name} got {value!r}.")
    number: int = value
    return number


_SHARED_OUT = {"location_weight": "weights", "location_optimizer": "optimizer_state"}


class TensorLocationOptions(OptionGroup):
    """`Options.TensorLocations`.

    Attributes:
      location_activation: what `TensorLocationSettings.to_dict` gave for what a stage keeps between its
        forward and its backward.
      location_weight: for parameters.
      location_optimizer: for the optimizer's state.
      location_accumulator: for the sums of gradients.
      num_io_tiles: without effect; it has no value until it is set.
    """

    location_activation: dict[str, int]
    location_weight: dict[str, int]
    location_optimizer: dict[str, int]
    location_accumulator: dict[str, int]
    num_io_tiles: int

    path = "poptorch.Options().TensorLocations"
    settings: ClassVar[Mapping[str, Setting]] = {
        "location_activation": Setting(_check_location, {}),
        "location_weight": Setting(_check_location, {}),
        "location_optimizer": Setting(_check_location, {}),
        "location_accumulator": Setting(_check_location, {}),
        "num_io_tiles": Setting(_check_tiles, no_effect=_IO_TILES),
    }

    @configurable
    def setActivationLocation(self, location: TensorLocationSettings) -> Self:
        """Where lies what a stage keeps between its forward and its backward.

        Raises:
          AssertionError: it is no `TensorLocationSettings`.
        """
        return self.set(location_activation=location)

    @configurable
    def setWeightLocation(self, location: TensorLocationSettings) -> Self:
        """Where parameters lie while no stage uses them.

        Raises:
          AssertionError: it is no `TensorLocationSettings`.
        """
        return self.set(location_weight=location)

    @configurable
    def setOptimizerLocation(self, location: TensorLocationSettings) -> Self:
        """Where the optimizer's state lies between weight updates.

        Raises:
          AssertionError: it is no `TensorLocationSettings`.
        """
        return self.set(location_optimizer=location)

    @configurable
    def setAccumulatorLocation(self, location: TensorLocationSettings) -> Self:
        """Where the sums of gradients lie while no stage uses them.

        Raises:
          AssertionError: it is no `TensorLocationSettings`.
        """
        return self.set(location_accumulator=location)

    @configurable
    def numIOTiles(self, num_tiles: int) -> Self:
        """Has no effect: other devices have no tiles for input and output. Warns.

        Raises:
          AssertionError: it is no even number from 32 to 192.
        """
        return self.set(num_io_tiles=num_tiles)

    @property
    def shard(self) -> list[str]:
        """What replicas are to share out, as the argument `shard` of `engine.Pipeline`."""
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
        """What is to lie in the host's memory, as the argument `offload` of `engine.Pipeline`.

        Args:
          is_on_chip: whether what has no location of its own lies in the devices' memory.
        """
        kinds = {
            "location_activation": "activations",
            "location_weight": "weights",
            "location_optimizer": "weight_update_variables",
            "location_accumulator": "gradient_accumulation_buffers",
        }
        return [kind for name, kind in kinds.items() if not self._values[name].get("onChip", is_on_chip)]

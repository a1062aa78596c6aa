"""Options of devices and replicas."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Self

from ipu_pipeline.ground.checks import is_real
from ipu_pipeline.poptorch.enums import CommGroupType, ConnectionType, SyncPattern
from ipu_pipeline.poptorch.operations import checks
from ipu_pipeline.poptorch.options.base import Option, OptionGroup, configurable

__all__ = ["DeviceOptions"]


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

"""How many replicas a pipeline has, and on which IPUs: known when devices are selected.

There is more than one only where somebody says so: an optimizer that averages over replicas, and then as
many as fit the IPUs that `IPUConfig` selects; or `IPURunConfig.num_replicas`. That more IPUs are selected
does not do it.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ipu_pipeline import config
from ipu_pipeline.config_categories import warn_once

__all__ = ["Asked", "Replication", "asking_for"]


@dataclass(frozen=True)
class Asked:
    """What an estimator is told.

    Attributes:
      num_replicas: how many replicas.
      num_ipus: how many IPUs each of them has, some of which may be idle.
    """

    num_replicas: int
    num_ipus: int


_asked: contextvars.ContextVar[Asked | None] = contextvars.ContextVar("asked", default=None)


@contextlib.contextmanager
def asking_for(num_replicas: int, num_ipus: int) -> Iterator[None]:
    """Has pipelines that are compiled in a `with` block have so many replicas; see `Asked`."""
    token = _asked.set(Asked(num_replicas, num_ipus))
    try:
        yield
    finally:
        _asked.reset(token)


@dataclass(frozen=True)
class Replication:
    """What decides how many replicas a pipeline or loop has.

    Attributes:
      ipu_device: the n of its `/device:IPU:<n>`.
      num_ipus: how many IPUs one replica uses.
      averages: whether its optimizer averages gradients over replicas.
      asked: what an estimator was told.
      norm_group_size: how many replicas share statistics of batch normalization, by the configuration when
        it was traced.
      sharded: names of the arguments by which something is spread over replicas.
    """

    ipu_device: int
    num_ipus: int
    averages: bool = False
    asked: Asked | None = field(default_factory=_asked.get)
    norm_group_size: int = field(default_factory=config.norm_group_size)
    sharded: tuple[str, ...] = ()

    @property
    def may_be_several(self) -> bool:
        """Whether there may be more than one replica."""
        return self.averages if self.asked is None else self.asked.num_replicas > 1

    def check(self, trains: bool) -> None:
        """Raises if gradients of several replicas would not be averaged.

        Args:
          trains: whether there is an optimizer.

        Raises:
          ValueError: `num_replicas` is above 1, and there is no optimizer that averages over them.
        """
        if self.asked is not None and self.asked.num_replicas > 1 and trains and not self.averages:
            raise ValueError(
                f"This is not a valid replicated pipeline: num_replicas is {self.asked.num_replicas}, but "
                "no optimizer averages the gradients over the replicas. Wrap the optimizer in "
                "ipu.optimizers.CrossReplicaOptimizer."
            )

    def count(self) -> int:
        """How many replicas there are, by the devices that are selected now.

        Raises:
          ValueError: the number of IPUs that were configured is not a multiple of those of a replica.
        """
        if self.asked is not None:
            return self.asked.num_replicas
        configured = config.num_configured(self.ipu_device)
        if not self.averages or configured is None or configured < self.num_ipus:
            return 1
        if configured % self.num_ipus:
            fitting = configured // self.num_ipus * self.num_ipus
            raise ValueError(
                f"IPUConfig selects {configured} IPUs for /device:IPU:{self.ipu_device}, but the pipeline "
                f"has {self.num_ipus} IPUs and a cross-replica optimizer: the number must be a multiple of "
                f"{self.num_ipus}, one for each replica. Set IPUConfig.auto_select_ipus to {fitting} or "
                f"{fitting + self.num_ipus} (with require_power_of_two = False where that is no power of "
                "two), or leave the cross-replica optimizer out."
            )
        return configured // self.num_ipus

    def settle(self, name: str, trains: bool) -> int:
        """How many replicas a pipeline that is to run has; warns of arguments that do nothing there.

        Args:
          name: the pipeline's.
          trains: whether there is an optimizer.

        Raises:
          ValueError: as `count`; or replicas would share statistics otherwise than was traced.
        """
        number = self.count()
        if trains:
            self._check_norms(number, name)
        for argument in self.sharded if number == 1 else ():
            warn_once(
                f"{name}.{argument}",
                f"{argument} of the pipeline {name!r} has no effect: there is one replica, and nothing is "
                "sharded.",
            )
        return number

    def _check_norms(self, num_replicas: int, name: str) -> None:
        setting = "IPUConfig.norms.experimental.distributed_batch_norm_replica_group_size"
        configured = config.norm_group_size()
        if configured != self.norm_group_size:
            raise ValueError(
                f"{setting} is {configured}, but was {self.norm_group_size} when the pipeline {name!r} was "
                "compiled, which depends on it. Call configure_ipu_system() before ipu_compiler.compile."
            )
        if configured not in (1, num_replicas):
            raise ValueError(
                f"{setting} must be 1, for statistics of each replica, or the number of replicas, for those"
                f" of all; the pipeline {name!r} has {num_replicas}. It is {configured}."
            )

    def refuse(self, name: str) -> None:
        """Raises a NotImplementedError if there are several replicas, as of a loop.

        Args:
          name: the loop's.
        """
        if (number := self.count()) > 1:
            raise NotImplementedError(
                f"The loop {name!r} has a cross-replica optimizer and {self.num_ipus} IPU(s), and "
                f"IPUConfig selects IPUs for {number} replicas; loops of ipu.loops have one. Use "
                f"pipelining_ops.pipeline, or set IPUConfig.auto_select_ipus to {self.num_ipus}."
            )

    def name_devices(self) -> tuple[tuple[str, ...], ...]:
        """What the devices of each replica are called; nothing for one replica.

        Raises:
          ValueError: as `count` and `choose_devices`.
        """
        number, devices = self.count(), config.selected_devices(self.ipu_device)
        if number == 1 or not devices:
            return ()
        chosen = list(map(str, self.choose_devices(devices, number)))
        size = self.num_ipus
        return tuple(tuple(chosen[start : start + size]) for start in range(0, len(chosen), size))

    def choose_devices(self, devices: Sequence[Any], num_replicas: int) -> list[Any]:
        """The devices of the replicas, one replica's after the other's.

        Args:
          devices: all that are selected.
          num_replicas: what `count` says.

        Raises:
          ValueError: there are too few.
        """
        num_each = self.num_ipus if self.asked is None else max(self.asked.num_ipus, self.num_ipus)
        if len(devices) < (num_replicas - 1) * num_each + self.num_ipus:
            raise ValueError(
                f"{num_replicas} replicas of {num_each} IPUs need {num_replicas * num_each} IPUs, but "
                f"there are {len(devices)}."
            )
        starts = [replica * num_each for replica in range(num_replicas)]
        if num_replicas == 1:
            return list(devices)
        return [device for start in starts for device in devices[start : start + self.num_ipus]]

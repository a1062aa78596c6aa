"""The number of replicas of a pipeline or loop, and their IPUs, which are known when devices are selected.

There are several replicas only if something asks for them: the `replication_factor` of a queue;
`IPURunConfig.num_replicas`; an optimizer that averages over replicas; or, without an optimizer, a
computation with other replicas. In the last two cases there are as many as fit the IPUs that `IPUConfig`
selects. Selecting more IPUs does not create replicas by itself.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ipu_pipeline.ground.warned import warn_once
from ipu_pipeline.processes import selection
from ipu_pipeline.queues.infeed import IPUInfeedQueue
from ipu_pipeline.queues.outfeed import IPUOutfeedQueue

__all__ = ["Asked", "Replication", "asking_for", "make_replication"]


@dataclass(frozen=True)
class Asked:
    """The numbers that an estimator is given."""

    num_replicas: int  # how many replicas
    num_ipus: int  # how many IPUs each of them has, some of which may be idle


_asked: contextvars.ContextVar[Asked | None] = contextvars.ContextVar("asked", default=None)


@contextlib.contextmanager
def asking_for(num_replicas: int, num_ipus: int) -> Iterator[None]:
    """Sets the number of replicas of pipelines compiled inside this `with` block; see `Asked`."""
    token = _asked.set(Asked(num_replicas, num_ipus))
    try:
        yield
    finally:
        _asked.reset(token)


def make_replication(
    ipu_device: int,
    num_ipus: int,
    uses_replicas: bool,
    queues: Sequence[Any],
    *,
    trains: bool,
    averages: bool,
    sharded: Sequence[str] = (),
) -> Replication:
    """Makes the replication of a pipeline or loop that has been traced."""
    known = [queue for queue in queues if isinstance(queue, IPUInfeedQueue | IPUOutfeedQueue)]
    factors = [queue.replication_factor for queue in known]
    made = Replication(
        ipu_device,
        num_ipus,
        trains,
        averages,
        uses_replicas,
        tuple(factor for factor in factors if factor is not None),
        sharded=tuple(sharded),
    )
    made.check()
    return made


@dataclass(frozen=True)
class Replication:
    """The facts that decide how many replicas a pipeline or loop has."""

    ipu_device: int  # the n of its `/device:IPU:<n>`
    num_ipus: int  # how many IPUs one replica uses
    trains: bool  # whether it has an optimizer
    averages: bool = False  # whether the optimizer averages gradients over replicas
    # whether its stages compute with other replicas, or with the number of their own
    communicates: bool = False
    factors: tuple[int, ...] = ()  # the numbers of replicas that its queues give
    asked: Asked | None = field(default_factory=_asked.get)  # an estimator's numbers
    # how many replicas share statistics of batch normalization, in the configuration when it was traced
    norm_group_size: int = field(default_factory=selection.norm_group_size)
    sharded: tuple[str, ...] = ()  # names of the arguments by which something is spread over replicas

    @property
    def may_be_several(self) -> bool:
        """Whether there may be more than one replica on the selected IPUs."""
        return self.averages or (self.communicates and not self.trains)

    @property
    def is_said(self) -> bool:
        """Whether an estimator or a queue gives the number of replicas."""
        return self.may_be_several or self.asked is not None or bool(self.factors)

    def check(self) -> None:
        """Raises if the number of replicas is contradictory, or their gradients would not be averaged."""
        said = {*self.factors, *([] if self.asked is None else [self.asked.num_replicas])}
        if len(said) > 1:
            raise ValueError(
                "The replication_factor of all queues of a program, and num_replicas, must be the same; "
                f"got {', '.join(map(str, sorted(said)))}."
            )
        number = max(said, default=1)
        if number > 1 and self.trains and not self.averages:
            argument = "replication_factor of a queue" if self.asked is None else "num_replicas"
            raise ValueError(
                f"This is not a valid replicated pipeline or loop: {argument} is {number}, but no "
                "optimizer averages the gradients over the replicas. Wrap the optimizer in "
                "ipu.optimizers.CrossReplicaOptimizer."
            )

    def count(self) -> int:
        """The number of replicas on the devices that are selected now."""
        if self.asked is not None:
            return self.asked.num_replicas
        configured = selection.num_configured(self.ipu_device)
        number = 1
        if self.may_be_several and configured is not None and configured >= self.num_ipus:
            number = configured // self.num_ipus
        wanted = self.factors[0] if self.factors else number
        if wanted != number and self.may_be_several:
            needed = wanted * self.num_ipus
            raise ValueError(
                f"A queue has replication_factor={wanted}, but IPUConfig selects IPUs for {number} "
                f"replica(s) of {self.num_ipus} IPU(s): set IPUConfig.auto_select_ipus to {needed}, or "
                "leave replication_factor out."
            )
        is_uneven = configured is not None and configured > self.num_ipus and configured % self.num_ipus
        if is_uneven and (self.averages or number > 1):
            fitting = number * self.num_ipus
            reason = "a cross-replica optimizer" if self.averages else "stages that use other replicas"
            raise ValueError(
                f"IPUConfig selects {configured} IPUs for /device:IPU:{self.ipu_device}, but the pipeline "
                f"or loop has {self.num_ipus} IPUs and {reason}: the number must be a multiple of "
                f"{self.num_ipus}, one for each replica. Set IPUConfig.auto_select_ipus to {fitting} or "
                f"{fitting + self.num_ipus} (with require_power_of_two = False where that is no power of "
                "two), or leave the cross-replica optimizer out."
            )
        return wanted

    def settle(self, name: str) -> int:
        """The number of replicas of a pipeline or loop to run; warns of arguments without effect."""
        number = self.count()
        configured = selection.num_configured(self.ipu_device)
        if self.trains and self.communicates and not self.averages and number == 1 and self.asked is None:
            possible = 1 if configured is None else configured // self.num_ipus
            if possible > 1:
                raise ValueError(
                    f"{name!r} trains and computes with other replicas (cross_replica_ops, "
                    f"replication_index), and IPUConfig selects IPUs for {possible} of them, but no "
                    "optimizer averages the gradients over the replicas. Wrap the optimizer in "
                    f"ipu.optimizers.CrossReplicaOptimizer, or select {self.num_ipus} IPU(s)."
                )
        if self.trains:
            self._check_norms(number, name)
        for argument in self.sharded if number == 1 else ():
            warn_once(
                f"{name}.{argument}",
                f"{argument} of {name!r} has no effect: there is one replica, and nothing is sharded.",
            )
        return number

    def _check_norms(self, num_replicas: int, name: str) -> None:
        setting = "IPUConfig.norms.experimental.distributed_batch_norm_replica_group_size"
        configured = selection.norm_group_size()
        if configured != self.norm_group_size:
            raise ValueError(
                f"{setting} is {configured}, but was {self.norm_group_size} when the pipeline {name!r} was "
                "compiled, which depends on it. Call configure_ipu_system() before ipu_compiler.compile."
            )
        if configured not in (1, num_replicas):
            raise ValueError(
                f"{setting} must be 1, for statistics of each replica, or the number of replicas, for "
                f"statistics of all; the pipeline {name!r} has {num_replicas}. It is {configured}."
            )

    def deal_devices(self, devices: Sequence[Any], num_replicas: int) -> list[Sequence[Any]]:
        """The devices of each replica."""
        num_each = self.num_ipus if self.asked is None else max(self.asked.num_ipus, self.num_ipus)
        starts = [replica * num_each for replica in range(num_replicas)]  # some may be idle
        if len(devices) < starts[-1] + self.num_ipus:
            raise ValueError(
                f"{num_replicas} replicas of {num_each} IPUs need {num_replicas * num_each} IPUs, but "
                f"there are {len(devices)}."
            )
        return [devices[start : start + self.num_ipus] for start in starts]

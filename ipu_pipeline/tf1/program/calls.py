"""The pipelines and loops of a program, their replicas, and the builder that collects them."""

from __future__ import annotations

import abc
import contextlib
import contextvars
import dataclasses
import functools
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from ipu_pipeline.engine import Pipeline, Recomputation, VariableSpec
from ipu_pipeline.engine.fronts import Enqueued, Loop, ProgramNames, Progress, find_leaves, mark_call
from ipu_pipeline.engine.inspect import PipelineDetails, PipelineSummary, find_facts, summarize
from ipu_pipeline.engine.planning import with_recomputation
from ipu_pipeline.ground.checks import MAX_INT32
from ipu_pipeline.ground.context_variables import bound
from ipu_pipeline.ground.user_warnings import warn_once
from ipu_pipeline.processes import device_selection
from ipu_pipeline.queues.infeed import IPUInfeedQueue
from ipu_pipeline.queues.outfeed import IPUOutfeedQueue
from ipu_pipeline.tf1.graph import Placeholder, is_internal


@dataclass(frozen=True)
class ReplicaRequest:
    """How many replicas an estimator asks for, and of how many IPUs."""

    num_replicas: int
    num_ipus: int  # of each replica; some may be idle


_request: contextvars.ContextVar[ReplicaRequest | None] = contextvars.ContextVar(
    "replica_request", default=None
)


def asking_for(num_replicas: int, num_ipus: int) -> contextlib.AbstractContextManager[None]:
    """Sets the number of replicas of pipelines compiled inside this `with` block.

    `pipeline` has no argument for it, so a context variable passes it on.
    """
    return bound(_request, ReplicaRequest(num_replicas, num_ipus))


@dataclass(frozen=True)
class Replication:
    """The facts that decide how many replicas a pipeline or loop has, once devices are selected.

    There are several only if something asks for them: the `replication_factor` of a queue;
    `IPURunConfig.num_replicas`; an optimizer that averages over replicas; or, without an optimizer, a
    computation with other replicas. In the last two cases there are as many as fit the IPUs that
    `IPUConfig` selects.
    """

    ipu_device: int  # the n of its `/device:IPU:<n>`
    num_ipus: int  # how many IPUs one replica uses
    trains: bool  # whether it has an optimizer
    averages: bool = False  # whether the optimizer averages gradients over replicas
    # whether its stages compute with other replicas, or with the number of their own
    communicates: bool = False
    factors: tuple[int, ...] = ()  # the numbers of replicas that its queues give
    request: ReplicaRequest | None = field(default_factory=_request.get)  # an estimator's
    # how many replicas share statistics of batch normalization, in the configuration when it was traced
    norm_group_size: int = field(default_factory=device_selection.norm_group_size)
    sharded: tuple[str, ...] = ()  # names of the arguments by which something is spread over replicas

    @property
    def may_be_several(self) -> bool:
        """Whether there may be more than one replica on the selected IPUs."""
        return self.averages or (self.communicates and not self.trains)

    @property
    def is_given(self) -> bool:
        """Whether an estimator or a queue gives the number of replicas."""
        return self.may_be_several or self.request is not None or bool(self.factors)

    def check(self) -> None:
        """Raises if the number of replicas is contradictory, or their gradients would not be averaged."""
        requested = [] if self.request is None else [self.request.num_replicas]
        numbers = {*self.factors, *requested}
        if len(numbers) > 1:
            raise ValueError(
                "The replication_factor of all queues of a program, and num_replicas, must be the same; "
                f"got {', '.join(map(str, sorted(numbers)))}."
            )
        number = max(numbers, default=1)
        if number > 1 and self.trains and not self.averages:
            argument = "replication_factor of a queue" if self.request is None else "num_replicas"
            raise ValueError(
                f"This is not a valid replicated pipeline or loop: {argument} is {number}, but no "
                "optimizer averages the gradients over the replicas. Wrap the optimizer in "
                "ipu.optimizers.CrossReplicaOptimizer."
            )

    def count(self) -> int:
        """The number of replicas on the devices that are selected now."""
        if self.request is not None:
            return self.request.num_replicas
        # Devices that were selected automatically, or only rounded up to, make no replicas: another
        # program's needs would otherwise change the effective batch of this one.
        configured = device_selection.num_configured(self.ipu_device)
        number = 1
        if self.may_be_several and configured is not None and configured >= self.num_ipus:
            number = configured // self.num_ipus
        num_replicas = self.factors[0] if self.factors else number
        if num_replicas != number and self.may_be_several:
            num_needed = num_replicas * self.num_ipus
            raise ValueError(
                f"A queue has replication_factor={num_replicas}, but IPUConfig selects IPUs for {number} "
                f"replica(s) of {self.num_ipus} IPU(s): set IPUConfig.auto_select_ipus to {num_needed}, or "
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
        return num_replicas

    def settle(self, name: str) -> int:
        """The number of replicas of a pipeline or loop to run; warns of arguments without effect."""
        number = self.count()
        configured = device_selection.num_configured(self.ipu_device)
        if self.trains and self.communicates and not self.averages and number == 1 and self.request is None:
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
        configured = device_selection.norm_group_size()
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
        num_each = self.num_ipus if self.request is None else max(self.request.num_ipus, self.num_ipus)
        starts = [replica * num_each for replica in range(num_replicas)]  # some may be idle
        if len(devices) < starts[-1] + self.num_ipus:
            raise ValueError(
                f"{num_replicas} replicas of {num_each} IPUs need {num_replicas * num_each} IPUs, but "
                f"there are {len(devices)}."
            )
        return [devices[start : start + self.num_ipus] for start in starts]


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
    feeds = [queue for queue in queues if isinstance(queue, IPUInfeedQueue | IPUOutfeedQueue)]
    factors = [queue.replication_factor for queue in feeds]
    replication = Replication(
        ipu_device,
        num_ipus,
        trains,
        averages,
        uses_replicas,
        tuple(factor for factor in factors if factor is not None),
        sharded=tuple(sharded),
    )
    replication.check()
    return replication


# Pipelines and loops.


class Outfeed(NamedTuple):
    """A queue that a pipeline or loop enqueues to.

    Attributes:
      queue: the queue.
      tree: the structure of an element.
      avals: shapes and dtypes of its leaves, in a replica.
      is_of_replicas: whether each replica enqueues; False in a weight update, which is the same in all.
    """

    queue: IPUOutfeedQueue
    tree: Any
    avals: tuple[jax.ShapeDtypeStruct, ...]
    is_of_replicas: bool = True


class _Call(abc.ABC):
    """The base of pipelines and loops in a program."""

    @property
    @abc.abstractmethod
    def runner(self) -> Pipeline:
        """The engine's pipeline or loop."""

    @property
    def num_ipus(self) -> int:
        """The number of IPUs that it needs."""
        return self.runner.num_devices

    @property
    def variables(self) -> dict[str, VariableSpec]:
        """All its variables by full name."""
        return self.runner.traced.variables

    @functools.cached_property
    def trains(self) -> bool:
        """Whether there is an optimizer."""
        return self.runner.built.updates is not None

    @property
    @abc.abstractmethod
    def outfeeds(self) -> list[Outfeed]:
        """The queues that it enqueues to."""

    @property
    @abc.abstractmethod
    def accumulated(self) -> set[str]:
        """The full names of the variables whose gradients it takes, internal ones included."""

    @property
    def internal(self) -> list[str]:
        """The full names of its internal variables."""
        return [name for name in self.variables if is_internal(name)]

    @property
    def trained(self) -> set[str]:
        """The full names of the variables that it trains."""
        return {name for name in self.accumulated if not is_internal(name)}

    @property
    @abc.abstractmethod
    def updated_every(self) -> int | None:
        """The number of a replica's micro-batches in a weight update; None if each run gives it."""

    @property
    def state_tree(self) -> Any:
        """The structure of the optimizer's state; only available with training."""
        assert self.runner.built.updates is not None
        return self.runner.built.updates.state_tree

    @functools.cached_property
    def optimizer_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes and dtypes of the optimizer's state by path; empty without training."""
        updates = self.runner.built.updates
        return {} if updates is None else {leaf.path: leaf.aval for leaf in updates.state_leaves}


@dataclass(frozen=True, eq=False)
class PipelineCall(_Call):
    """A pipeline in a program.

    Attributes:
      name: the pipeline's name, under which optimizer state is kept.
      pipeline: the engine's pipeline.
      repeat_count: how often it runs in one `run`.
      infeed_queue: its feed.
      outfeed_queue: where its outputs or losses go.
      outfeeds_loss: whether the loss is enqueued, not the outputs.
      outfeed_tree: the structure of what is enqueued.
      has_count_operand: whether the first operand is the number of micro-batches per weight update.
      begin_input: the position among the inputs of the number of weight updates before the run; None: they
        do not have it.
      recompute: what stages keep if recomputation is allowed.
      asks_for_recomputation: whether the user asked for recomputation, and so expects it.
      replication: how many replicas it has, and where.
    """

    name: str
    pipeline: Pipeline
    repeat_count: int
    infeed_queue: IPUInfeedQueue | None
    outfeed_queue: IPUOutfeedQueue | None
    outfeeds_loss: bool
    outfeed_tree: Any
    has_count_operand: bool
    begin_input: int | None
    recompute: Recomputation
    asks_for_recomputation: bool
    replication: Replication

    @property
    def runner(self) -> Pipeline:
        """The pipeline."""
        return self.pipeline

    @property
    def updated_every(self) -> int | None:
        """The number of its micro-batches, if that is not an operand."""
        return None if self.has_count_operand else self.pipeline.updated_every(None)

    @property
    def accumulated(self) -> set[str]:
        """The full names of the variables with accumulators."""
        return set(self.pipeline.built.accumulator_dtypes)

    @property
    def outfeeds(self) -> list[Outfeed]:
        """The queues that it enqueues to."""
        outfeeds: list[Outfeed] = []
        if self.outfeed_queue is not None:
            outfeeds.append(
                Outfeed(self.outfeed_queue, self.outfeed_tree, self.pipeline.built.collecting.avals)
            )
        outfeeds += [Outfeed(entry.target, entry.tree, entry.avals) for entry, _leaves in self._enqueued]
        outfeeds += [
            Outfeed(entry.target, entry.tree, entry.avals, False) for entry, _leaves in self._updated
        ]
        return outfeeds

    @functools.cached_property
    def _enqueued(self) -> list[tuple[Enqueued, slice]]:
        """The values that stages enqueue to outfeeds, with the positions of their leaves."""
        return find_leaves(self.pipeline.traced.enqueued, IPUOutfeedQueue)

    @functools.cached_property
    def _updated(self) -> list[tuple[Enqueued, slice]]:
        """The values that weight updates enqueue to outfeeds, with the positions of their leaves."""
        updates = self.pipeline.built.updates
        return [] if updates is None else find_leaves(updates.enqueued, IPUOutfeedQueue)

    def hand_out(self, progress: Progress) -> None:
        """Enqueues the results of a pipeline for some weight updates."""
        if self.outfeed_queue is not None:
            for part in progress.collected:
                leaves = [part.loss] if self.outfeeds_loss else part.outputs
                self.outfeed_queue.extend(leaves, part.size)
        for entries, parts in ((self._enqueued, progress.enqueued), (self._updated, progress.updated)):
            for entry, places in entries:
                for handed in parts:
                    entry.target.extend(handed.leaves[places], handed.size)

    def check_count(self, value: Any) -> int:
        """Checks a number of micro-batches per weight update that is only known when the program runs."""
        count, num_serialized = int(value), self.pipeline.options.num_serialized
        if not 1 <= count * num_serialized <= MAX_INT32:
            raise ValueError(
                "gradient_accumulation_count must be from 1 to "
                f"{MAX_INT32 // num_serialized}; the value in this run is {count}."
            )
        return count

    def find_recomputation(self) -> Recomputation | None:
        """Finds what stages keep in the configured system. Warns if the user's mode has no effect."""
        if device_selection.allows_recomputation():
            return self.recompute
        if self.asks_for_recomputation:
            warnings.warn(
                f"The recomputation_mode of the pipeline {self.name!r} has no effect, since "
                "IPUConfig.allow_recompute is not set in the configured system.",
                stacklevel=2,
            )
        return None

    def placement(self) -> PipelineDetails:
        """The placement of its parts."""
        return dataclasses.replace(find_facts(self.pipeline), name=self.name)

    def summary(self) -> PipelineSummary:
        """The needs and work of its stages, as it will run in the configured system."""
        pipeline = self.pipeline
        if self.trains:
            allowed = device_selection.allows_recomputation()
            pipeline = with_recomputation(pipeline, self.recompute if allowed else None)
        return dataclasses.replace(
            summarize(pipeline, left_out=self.internal), name=self.name, device_word="IPU"
        )


@dataclass(frozen=True, eq=False)
class LoopCall(_Call):
    """A loop in a program. Its operands are the count, if there is one, then inputs as `Loop` takes them.

    Attributes:
      loop: the engine's loop.
      count: the number of iterations, or the largest number if it has a condition; None if an operand, or
        only the condition, determines it.
      has_count_operand: whether the first operand is the count.
      infeed_queue: its feed.
      replication: how many replicas it has, and where.
    """

    loop: Loop
    count: int | None
    has_count_operand: bool
    infeed_queue: IPUInfeedQueue | None
    replication: Replication

    @property
    def runner(self) -> Loop:
        """The loop."""
        return self.loop

    @property
    def updated_every(self) -> int:
        """The number of its mini-batches per weight update."""
        return self.loop.updated_every()

    @property
    def accumulated(self) -> set[str]:
        """The full names of the variables with accumulators."""
        training = self.loop.body.training
        return set() if training is None else set(training.accumulator_dtypes)

    @property
    def name(self) -> str:
        """The name under which counts and optimizer state are kept."""
        training = self.loop.body.training
        return "Loop" if training is None else training.name

    @functools.cached_property
    def settings(self) -> str:
        """Describes which gradients are accumulated, and how; other settings cannot go on with them."""
        training = self.loop.body.training
        if training is None:
            return "no training"
        variables = training.optimizer.trained
        described = ", ".join(
            f"{name} {np.dtype(dtype).name}{list(variables[name].shape)}"
            for name, dtype in sorted(training.accumulator_dtypes.items())
        )
        return f"{training.num_mini_batches} mini-batches, {training.reduction.name} of {described}"

    @property
    def outfeeds(self) -> list[Outfeed]:
        """The queues that it enqueues to."""
        enqueued = self.loop.body.enqueued
        return [Outfeed(entry.target, entry.tree, entry.avals) for entry, _places in enqueued]

    def placement(self) -> PipelineDetails:
        """The placement of its parts."""
        return dataclasses.replace(find_facts(self.loop), name=self.name)

    def summary(self) -> PipelineSummary:
        """The needs and work of its parts."""
        return dataclasses.replace(
            summarize(self.loop, left_out=self.internal), name=self.name, device_word="IPU"
        )


Call: TypeAlias = PipelineCall | LoopCall


def find_num_replicas(call: Call) -> int:
    """The number of replicas of a pipeline or loop on the selected devices."""
    number = call.replication.settle(call.name)
    for outfeed in call.outfeeds:
        outfeed.queue.expect_replicas(number if outfeed.is_of_replicas else 1)
    return number


@dataclass(eq=False)
class ProgramBuilder:
    """A program while its function is traced.

    Attributes:
      ipu_device: the number in `/device:IPU:<n>`.
      names: the names that the program gives out.
      inputs: the function's arguments, as (value, name).
      placeholders: all existing placeholders, each with the traced value that it is used as.
      captured: the placeholders that were used as arrays.
      calls: the pipelines and loops.
    """

    ipu_device: int
    names: ProgramNames = field(default_factory=ProgramNames)
    inputs: list[tuple[Any, str]] = field(default_factory=list)
    placeholders: dict[Placeholder, Any] = field(default_factory=dict)
    captured: dict[Placeholder, None] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)

    def add(
        self, call: Call, operands: Sequence[Any], results: Sequence[jax.ShapeDtypeStruct] = ()
    ) -> list[Any]:
        """Adds a pipeline or loop at this point of the program.

        Returns:
          Its results, traced.
        """
        queues = [outfeed.queue for other in self.calls for outfeed in other.outfeeds]
        for outfeed in call.outfeeds:
            queue = outfeed.queue
            if any(queue is queue_before for queue_before in queues):
                raise ValueError(
                    "An IPUOutfeedQueue can be enqueued to only once in a program; give each pipeline, "
                    "loop and call of enqueue its own."
                )
            queues.append(queue)
        for other in self.calls:
            is_same = call.optimizer_shapes == other.optimizer_shapes
            if call.name == other.name and call.trains and other.trains and not is_same:
                raise ValueError(
                    f"Two pipelines of the program are named {call.name!r}, under which optimizer state is "
                    "kept, but their optimizer states have different structures. Give one another `name`."
                )
        self.calls.append(call)
        return mark_call(len(self.calls) - 1, operands, results)

    def capture(self, placeholder: Placeholder) -> Any:
        """Returns the traced value of a placeholder, which is an input of the program from now on."""
        if placeholder not in self.placeholders:
            raise ValueError(
                f"Trying to capture the tensor {placeholder.name} ({placeholder!r}), which was made by the "
                "function that is being compiled. Make placeholders outside of it."
            )
        self.captured[placeholder] = None
        return self.placeholders[placeholder]

    def forget_values(self) -> None:
        """Releases placeholders and traced values, because pipelines keep the builder."""
        self.inputs.clear()
        self.placeholders.clear()
        self.captured.clear()

    def find_captured(self, values: Sequence[Any]) -> list[Placeholder]:
        """The placeholders that captured values stand for."""
        return [
            next(symbol for symbol in self.captured if self.placeholders[symbol] is value)
            for value in values
        ]

    @contextlib.contextmanager
    def rebinding(self, placeholders: Sequence[Placeholder], values: Sequence[Any]) -> Iterator[None]:
        """Uses placeholders as other values inside a `with` block: a pipeline is traced once more."""
        self.placeholders.update(zip(placeholders, values, strict=True))
        try:
            yield
        finally:
            self.forget_values()

    def is_captured_placeholder(self, value: Any) -> bool:
        """Whether a traced value stands for a placeholder that was used as an array."""
        return any(self.placeholders[symbol] is value for symbol in self.captured)

    def describe_input(self, value: Any) -> str | None:
        """The name of an argument of the function; None if the value is not one."""
        return next((name for argument, name in self.inputs if argument is value), None)


_builder: contextvars.ContextVar[ProgramBuilder | None] = contextvars.ContextVar(
    "program_builder", default=None
)


def current_builder() -> ProgramBuilder | None:
    """The program whose function is being traced."""
    return _builder.get()


def building(builder: ProgramBuilder) -> contextlib.AbstractContextManager[None]:
    """Makes a program the current one for a `with` block."""
    return bound(_builder, builder)

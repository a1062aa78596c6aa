"""The contract of runners: all that `Pipeline`, `Loop` and the session know of what runs a step.

A runner is made for one traced pipeline or loop and its devices. It takes a state and gives a new one, in
two calls: `fetch` gets micro-batches and does all that leaves the state as it is, `run` does the rest.
A caller whose state must survive an interrupt holds interrupts back during `run`.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import jax

from ipu_pipeline.engine import jaxprs
from ipu_pipeline.engine.devices.feeds import Take
from ipu_pipeline.engine.devices.state_placement import StatePlacement
from ipu_pipeline.engine.execution.compilation import KeptPrograms
from ipu_pipeline.engine.plan.lowering import Layout
from ipu_pipeline.engine.plan.maker import FirstState
from ipu_pipeline.engine.plan.memory import find_fed, plan_ipus
from ipu_pipeline.engine.planning.memory_records import Brought, IpuMemory, StageMemory
from ipu_pipeline.engine.programs.stage_programs import StagePrograms
from ipu_pipeline.engine.state import PipelineState, Progress, of_replica
from ipu_pipeline.engine.tracing.stages import Source
from ipu_pipeline.ground.pytrees import num_bytes


@dataclass(frozen=True, eq=False)
class Iterated:
    """A pipeline's part as the body of a loop.

    Its micro-batches are iterations; their first leaves are carried from one to the next. Accumulators stay
    from run to run.
    """

    carried: tuple[Source, ...]  # where the carried values of the next iteration come from
    # whether the loop goes on, from the inputs' leaves and the carried values; None: always
    condition: Callable[[list[Any], list[Any]], Any] | None


@dataclass(frozen=True, eq=False)
class Request:
    """A request to run micro-batches."""

    # the leaves of the inputs that stay the same. Here and in `carried`, a value that differs between
    # replicas is an `OfReplicas`.
    inputs: Sequence[Any]
    every: int  # micro-batches per weight update
    limit: int  # micro-batches to run in this call at most; a pipeline runs whole updates
    total: int  # micro-batches of the run, which the sizes of blocks depend on
    carried: Sequence[Any] = ()  # in a loop, the values that the first iteration takes
    iteration: int = 0  # in a loop, the iterations of the run so far; else the step's micro-batches

    def of_replica(self, replica: int) -> Request:
        """The request with the values of one replica."""
        return dataclasses.replace(
            self,
            inputs=[of_replica(value, replica) for value in self.inputs],
            carried=[of_replica(value, replica) for value in self.carried],
        )


class Pending(Protocol):
    """The result of `Runner.fetch`, for `Runner.run`; each kind of runner has its own."""

    @property
    def count(self) -> int:
        """The number of micro-batches that will run, unless a condition ends the loop before."""


PendingT = TypeVar("PendingT", bound=Pending)


class Runner(abc.ABC, Generic[PendingT]):
    """Runs micro-batches and weight updates.

    Attributes:
      placement: where the state lives.
      homes: where each replica's part of it lives; with one replica, `placement` alone.
      iterated: for the body of a loop; None for a pipeline.
      programs: the programs of the stages, for one micro-batch.
      temporary_bytes: the most that a program takes besides its arguments and results, by device; empty as
        long as nothing is compiled.
      residual_bytes: what each device holds of a micro-batch's residuals, by stage; only for stages that
        several devices compute together, and empty as long as nothing is compiled.
      assigned: full names of the variables that stages assign.
      needs_outputs: whether the optimizer's state at the start depends on the last stage's outputs.
      has_callbacks: whether a program calls back into Python.
      has_run: whether `run` has been called.
      waits_for_python: whether `run` may wait for Python that its programs call back into. Then it leaves
        the memory of variables and optimizer state alone.
      kept: has compiled programs of earlier pipelines; None if they are not kept.
      shapes: the number of the shapes of micro-batches that its programs are for; 0 for the first ones. The
        runner for these leads, see `PlanRunner`.
      note: what is told about its programs while they compile.
      of_shapes: the runners of the pipeline, by the number of the shapes of micro-batches; all have this
        list.
      make_single: returns the runner by plans for the same shapes whose programs handle one micro-batch.
    """

    kept: KeptPrograms | None = None
    shapes: int = 0
    note: str = ""
    make_single: Callable[[], Any]

    def __init__(
        self,
        placement: StatePlacement,
        programs: Sequence[StagePrograms],
        iterated: Iterated | None,
        homes: Sequence[StatePlacement] | None = None,
    ) -> None:
        """Sets the attributes that all kinds of runners have."""
        self.placement = placement
        self.homes = (placement,) if homes is None else tuple(homes)
        platform = placement.groups[0].devices[0].platform
        self.programs = tuple(stage_programs.on(platform) for stage_programs in programs)
        self.iterated = iterated
        self.temporary_bytes: dict[int, int] = {}
        self.residual_bytes: dict[int, int] = {}
        self.has_run = False
        self.of_shapes: list[Any] = [self]
        stages, updates = placement.traced.stages, placement.updates
        self.assigned = frozenset(spec.name for stage in stages for spec in stage.assigned)
        self.needs_outputs = updates is not None and updates.init_needs_outputs
        # Python may raise within a program, so the values that go into a step must outlive it.
        self.has_callbacks = any(jaxprs.has_callbacks(stage.flat) for stage in stages) or (
            updates is not None and updates.has_callbacks
        )
        self.waits_for_python = self.has_callbacks

    def describe_start(self, places: Sequence[str]) -> str:
        """The program that the host starts, or started last; "" where all stages are one program."""
        del places
        return ""

    @property
    def takes_elements(self) -> bool:
        """Whether this process gives the runner micro-batches, as it does if its stages read some."""
        return True

    @abc.abstractmethod
    def place_element(self, leaves: Sequence[Any]) -> Any:
        """Makes a micro-batch into what `fetch` takes; in a loop, from the leaves behind the carried ones.

        Safe to call from another thread; shares no memory with NumPy arrays that are given.
        """

    @abc.abstractmethod
    def place_ahead(self, elements: Sequence[Any]) -> list[Any]:
        """Puts the micro-batches of one update, from `place_element`, on the devices that read them."""

    @abc.abstractmethod
    def num_fetched(self, total: int, every: int) -> int:
        """The least number of micro-batches to fetch ahead; `fetch` takes no more at once.

        Args:
          total: micro-batches of the run.
          every: micro-batches per weight update.
        """

    @abc.abstractmethod
    def num_waiting(self, total: int, every: int) -> int:
        """The number of micro-batches on the devices before their turn; arguments as for `num_fetched`."""

    def make_accumulators(
        self, dtypes: Mapping[str, Any], initial: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Makes a state's accumulators; see `StatePlacement.make_accumulators`."""
        return self.placement.make_accumulators(dtypes, initial)

    @abc.abstractmethod
    def compile(self, state: PipelineState, request: Request) -> None:
        """Compiles what `fetch` and `run` will call for a request. Runs nothing.

        Args:
          state: placed, see `place`; it stays as it is.
          request: what is to be run.
        """

    @abc.abstractmethod
    def fetch(self, state: PipelineState, request: Request, take: Take) -> PendingT:
        """Gets micro-batches, and does all that leaves the state as it is.

        Args:
          state: placed, see `place`.
          request: what is to be run.
          take: returns micro-batches from `place_element`, at least one and at most the number asked for;
            what it raises ends the run.
        """

    @abc.abstractmethod
    def run(self, state: PipelineState, pending: PendingT) -> Progress:
        """Runs the pending micro-batches. Takes the memory of accumulators, and of all state if allowed.

        Args:
          state: as for `fetch`.
          pending: what that returned.
        """

    def settle(self, state: PipelineState) -> PipelineState:
        """The state at the end of a loop's run, with the replicas' separate values joined."""
        return state

    def plan_memory(
        self, accumulator_dtypes: Mapping[str, Any], stages: Sequence[StageMemory], every: int
    ) -> tuple[IpuMemory, ...]:
        """Plans the memory that each device takes while weight updates are done.

        Args:
          accumulator_dtypes: the dtype of each trained variable's accumulators, by full name.
          stages: what the stages hold of micro-batches in flight.
          every: micro-batches per weight update.
        """
        ipus = [group.ipu for group in self.placement.groups]
        activations: Counter[int] = Counter()
        for stage in stages:
            activations[stage.ipu] += stage.num_live_bytes
        first = 0 if self.iterated is None else len(self.iterated.carried)
        fed = find_fed(self.placement.traced, self.programs, ipus, first)
        feeds = {ipu: self.num_waiting(every, every) * num_bytes(leaves) for ipu, leaves in fed.items()}
        brought = self.find_brought(every)
        return plan_ipus(
            self.placement, accumulator_dtypes, activations, feeds, self.temporary_bytes, brought
        )

    def find_ipus(self) -> dict[Any, int]:
        """The number of each device in the pipeline; the second replica's follow the first's.

        With tensor parallelism, only the first device of each number is listed.
        """
        groups = self.placement.groups
        num_ipus = max(group.ipu for group in groups) + 1
        return {
            device: replica * num_ipus + group.ipu
            for group in groups
            for replica, device in enumerate(group.first_devices)
        }

    def observe_held(self) -> Sequence[list[int]]:
        """Begins to measure what stages hold between forwards and backwards.

        Returns:
          The largest number of bytes so far, per replica and stage; steps that follow update it.

        Raises:
          TypeError: all stages are one program, which has no buffers between them.
        """
        raise TypeError(
            "LiveBytes observes pipelines whose stages are programs of their own; got a "
            f"{type(self).__name__}."
        )

    def find_brought(self, every: int) -> Mapping[int, Brought]:
        """The memory that execution phases bring, by device, with `every` micro-batches per replica."""
        del every
        return {}

    def place(self, state: PipelineState, dtypes: Mapping[str, Any]) -> PipelineState:
        """Puts a state on the devices of its stages, with zeros for accumulators that are missing.

        Args:
          state: from anywhere.
          dtypes: the dtype of each trained variable's accumulators, by full name.
        """
        is_trained = self.placement.updates is not None
        accumulators = self.make_accumulators(dtypes, state.accumulators) if is_trained else {}
        return dataclasses.replace(self.place_state(state), accumulators=accumulators)

    def place_state(self, state: PipelineState) -> PipelineState:
        """Puts variables and optimizer state on the devices of their stages."""
        placement, updates = self.placement, self.placement.updates
        optimizer_state = state.optimizer_state
        if updates is not None and optimizer_state is not None:
            leaves = placement.place_optimizer_state(jax.tree.leaves(optimizer_state))
            optimizer_state = updates.state_tree.unflatten(leaves)
        return dataclasses.replace(
            state,
            variables=placement.place_variables(state.variables),
            optimizer_state=optimizer_state,
        )

    def init_optimizer_state(
        self, variables: Mapping[str, Any], outputs: Sequence[Mapping[int, Any]]
    ) -> Any:
        """The optimizer's state at the start, of placed variables; `outputs` as in `with_optimizer`."""
        assert self.placement.updates is not None
        leaves = self._first_state.make(variables, outputs)
        return self.placement.updates.state_tree.unflatten(leaves)

    @functools.cached_property
    def _first_state(self) -> FirstState:
        return FirstState(Layout(self.placement, self.homes))

    def with_optimizer(self, state: PipelineState, outputs: Sequence[Mapping[int, Any]]) -> PipelineState:
        """Adds the optimizer's state to a state.

        Args:
          state: placed.
          outputs: by replica and place, leaves that the last stage returned for the first micro-batch, if
            they are needed.
        """
        if self.placement.updates is None or state.optimizer_state is not None:
            return state
        optimizer_state = self.init_optimizer_state(state.variables, outputs)
        return dataclasses.replace(state, optimizer_state=optimizer_state)

    def advance(
        self,
        state: PipelineState,
        variables: Mapping[str, Any],
        state_leaves: Sequence[Any],
        accumulators: Mapping[str, Any],
        count: int,
        every: int,
    ) -> PipelineState:
        """Makes the state after some micro-batches.

        Args:
          state: the state before them.
          variables: the variables that changed, by full name.
          state_leaves: the leaves of the optimizer's state.
          accumulators: the accumulators, by key.
          count: the number of micro-batches that ran.
          every: micro-batches per weight update.
        """
        updates = self.placement.updates
        self.has_run = True
        num_updates, num_accumulated = divmod(state.num_accumulated + count, every)
        changes: dict[str, Any] = {"variables": {**state.variables, **variables}}
        if self.iterated is None:  # a loop counts whole runs
            changes["execution_count"] = int(state.execution_count) + num_updates
        if updates is not None:
            changes |= {
                "optimizer_state": updates.state_tree.unflatten(state_leaves),
                "update_count": int(state.update_count) + num_updates,
                "accumulators": dict(accumulators),
                "num_accumulated": num_accumulated,
            }
        return dataclasses.replace(state, **changes)

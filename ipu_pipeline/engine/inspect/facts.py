"""What is known of a pipeline or loop, as data. Imports no JAX.

`StageFacts` and `PipelineFacts` are what a profile keeps, so they may also come from a file. The details
are known only of a pipeline that is at hand: `Pipeline.facts` makes them. Tables, profiles and pages are
made from these classes, and from nothing else that the engine knows.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from ipu_pipeline.engine.planning.memory_plans import Flow, IpuMemory

if TYPE_CHECKING:
    from ipu_pipeline.engine.schedules.costs import Costs
    from ipu_pipeline.engine.tracing.specs import VariableSpec

__all__ = [
    "Edge",
    "Layer",
    "LayerFacts",
    "Part",
    "PipelineDetails",
    "PipelineFacts",
    "Sent",
    "SharedVariables",
    "StageDetails",
    "StageFacts",
    "select_fields",
]

FactsT = TypeVar("FactsT")


@dataclass(frozen=True)
class LayerFacts:
    """The variables of a layer.

    Attributes:
      name: the common beginning of their names, up to a slash or dot; empty for variables in no scope.
      num_parameters: the number of elements of the variables.
      num_bytes: the bytes that they take.
      operations: its part of the stage's forward, in estimated operations; None if not known.
    """

    name: str
    num_parameters: int
    num_bytes: int
    operations: float | None = None


@dataclass(frozen=True)
class Layer(LayerFacts):
    """A scope of variables, or several equal ones.

    Attributes:
      name: its full name, with `{3..5}` in place of the number in which equal ones differ. Variables that
        stand beside scopes are one layer, `scope/(one, other)`.
      num_parameters: the number of elements of the variables, of all equal layers together.
      num_bytes: the bytes that they take.
      count: the number of equal layers.
      parts: the layers that it consists of: scopes, and variables without parts.
    """

    count: int = 1
    parts: tuple[Layer, ...] = ()

    @property
    def has_scopes(self) -> bool:
        """Whether it contains more than variables."""
        return any(part.parts for part in self.parts)


@dataclass(frozen=True)
class Edge:
    """What goes from one device to another per micro-batch, in bytes.

    Attributes:
      source: the device that sends; None for the host's feed. What a loop carries into the next iteration
        comes from the last stage's device.
      target: the device that receives.
      num_forward_bytes: values for later stages.
      num_backward_bytes: gradients for earlier ones.
    """

    source: int | None
    target: int
    num_forward_bytes: int
    num_backward_bytes: int


@dataclass(frozen=True)
class Sent:
    """What a weight update sends from one device to another.

    Example:
      >>> shared = engine.Shared("w", np.ones([4, 4], np.float32))
      >>> pipeline = engine.Pipeline(
      ...     [lambda w, x: x @ w, lambda w, x: jnp.mean(x @ w)],
      ...     parameters=[shared, shared],
      ...     num_micro_batches=2,
      ...     optimizer=optax.sgd(0.1),
      ... )
      >>> pipeline.trace(np.ones([2, 4], np.float32))
      >>> pipeline.facts().sent  # what a weight update sends
      (Sent(source=0, target=1, what='w', num_bytes=64, primitive='stage 1'),
       Sent(source=1, target=0, what='gradient of w', num_bytes=64, primitive='the sum at its owner'))

    Attributes:
      source: the device that sends.
      target: the device that receives.
      what: in words: the variable, gradient or leaf of the optimizer's state; dtype and shape of a value
        that the update makes. Scalars are counted together.
      num_bytes: its size in bytes.
      primitive: its reader there: a JAX primitive or a stage; empty for scalars.
    """

    source: int
    target: int
    what: str
    num_bytes: int
    primitive: str


@dataclass(frozen=True)
class SharedVariables:
    """Variables that the same stages share; the first of these stages owns them.

    Attributes:
      stages: the stages' numbers.
      variables: the variables that they share.
    """

    stages: tuple[int, ...]
    variables: tuple[VariableSpec, ...]


@dataclass(frozen=True)
class Part:
    """What lies where a stage runs.

    Attributes:
      index: the stage's number.
      ipu: the device that it runs on.
      num_operations: JAX operations of its forward, those inside loops and conditionals not counted.
      variables: full names of the variables that live there, and of shared ones that are copied there.
      num_variable_bytes: the bytes that these take.
    """

    index: int
    ipu: int
    num_operations: int
    variables: tuple[str, ...]
    num_variable_bytes: int


@dataclass(frozen=True)
class StageFacts:
    """A stage; in a loop, a run of operations of one shard.

    Attributes:
      index: its number.
      name: what errors call it, with the name of its function.
      ipu: the device that it runs on.
      level: its level; stages of the same level are parallel.
      layers: its layers in the order in which it runs them, with its variables, but for those that it
        shares with an earlier stage.
      forward_operations: estimated floating-point operations of its forward for a micro-batch.
      backward_operations: the same estimate for its backward, of which both halves count; 0 without one.
      is_fused: whether one program does both, or the forward and the first half of the backward.
      num_held_bytes: what it holds of a micro-batch from its forward to its backward, or the first half.
      in_flight: the most micro-batches of which it does so at a time, also between the halves.
      is_halved: whether its backward is done in halves.
      weight_operations: estimated operations of the second half; 0 without one.
      num_between_bytes: what it holds of a micro-batch between the halves.
    """

    index: int
    name: str
    ipu: int
    level: int
    layers: tuple[LayerFacts, ...]
    forward_operations: float
    backward_operations: float
    is_fused: bool
    num_held_bytes: int
    in_flight: int
    is_halved: bool = False
    weight_operations: float = 0.0
    num_between_bytes: int = 0

    @property
    def num_parameters(self) -> int:
        """The number of elements of its variables."""
        return sum(layer.num_parameters for layer in self.layers)

    @property
    def num_parameter_bytes(self) -> int:
        """The bytes that its variables take."""
        return sum(layer.num_bytes for layer in self.layers)


@dataclass(frozen=True)
class PipelineFacts:
    """A pipeline or loop.

    Attributes:
      name: its name.
      kind: "training", "inference" or "loop".
      schedule: the name of the schedule, or of the user's function.
      num_micro_batches: micro-batches of each replica per weight update, or without training per execution;
        None if the number is known only at run time. In a profile it is the number that was seen, and 1
        for a loop.
      num_serialized: the number of micro-batches that a stage handles before the next one starts.
      chunk_size: micro-batches per program.
      is_one_program: whether all stages are on one device.
      micro_batch_size: samples in a micro-batch; None if its arrays have no first axis in common.
      stages: its stages.
      edges: what goes from device to device, without empty edges.
      flows: what goes from stage to stage, also on one device.
      memory: what the devices of each replica take by the plan; empty if not asked for, or if it could not
        be found.
      num_replicas: the number of replicas; a file without it has one. The devices here are those of the
        first replica. In events, device i of replica r is r times `num_ipus_each` plus i, and micro-batches
        are the elements of all replicas: the k-th one of replica r is number k times `num_replicas` plus r.
      cuts: where its stages begin, and why, in lines, if the engine cut it; else empty.
      costs: what programs, transfers and updates take alone, in seconds, as splits and dispatch plans are
        chosen by, with an assumption about the host; None where that was not measured.
    """

    name: str
    kind: str
    schedule: str
    num_micro_batches: int | None
    num_serialized: int
    chunk_size: int
    is_one_program: bool
    micro_batch_size: int | None
    stages: tuple[StageFacts, ...]
    edges: tuple[Edge, ...]
    flows: tuple[Flow, ...]
    memory: tuple[IpuMemory, ...]
    num_replicas: int = 1
    cuts: str = ""
    costs: Costs | None = None

    @functools.cached_property
    def num_ipus_each(self) -> int:
        """The number of devices of a replica, including those without a stage."""
        return max(stage.ipu for stage in self.stages) + 1

    @property
    def ipus(self) -> tuple[int, ...]:
        """The devices with stages, in all replicas."""
        own, size = sorted({stage.ipu for stage in self.stages}), self.num_ipus_each
        return tuple(replica * size + ipu for replica in range(self.num_replicas) for ipu in own)

    def stages_on(self, ipu: int) -> list[int]:
        """The stages on a device of any replica."""
        return [stage.index for stage in self.stages if stage.ipu == ipu % self.num_ipus_each]

    def element(self, number: int, ipu: int) -> int:
        """The number of a replica's micro-batch among all replicas', given a device of the replica."""
        return number * self.num_replicas + ipu // self.num_ipus_each

    @property
    def trains(self) -> bool:
        """Whether there are weight updates."""
        return any(stage.backward_operations for stage in self.stages)


@dataclass(frozen=True, eq=False, kw_only=True)
class StageDetails(StageFacts):
    """A stage of a pipeline at hand.

    Example:
      >>> pipeline = engine.Pipeline([layers.Dense(4), layers.Dense(2)], num_micro_batches=2)
      >>> pipeline.trace(np.ones([2, 8], np.float32))
      >>> stage = pipeline.facts().stages[0]
      >>> stage.ipu, stage.in_flight, stage.num_held_bytes, stage.forward_operations
      (0, 1, 0, 248.0)

    Attributes:
      layers: its variables as a tree, in which equal neighbours stand once.
      whole_layers: the layers that another stage could have, in the order in which it runs them.
      variables: the variables that it owns.
      num_live_bytes: what it holds of all micro-batches in flight, at most.
      num_trained: the number of elements of its trained variables.
      part: what lies where it runs.
      num_sent_bytes: the bytes that it sends forwards to other devices per micro-batch.
      num_returned_bytes: the bytes of gradients that it sends backwards to other devices per micro-batch.
      num_forward_flop: estimated operations of its forward program per micro-batch. If the pipeline
        trains, the last stage's includes its backward.
      num_backward_flop: estimated operations of its backward program per micro-batch; 0 where the forward
        does it, or nothing is trained.
      uncounted: calls whose operations are not known.
    """

    layers: tuple[Layer, ...]
    whole_layers: tuple[LayerFacts, ...]
    variables: tuple[VariableSpec, ...]
    num_live_bytes: int
    num_trained: int
    part: Part
    num_sent_bytes: int
    num_returned_bytes: int
    num_forward_flop: float
    num_backward_flop: float
    uncounted: frozenset[str]

    @property
    def num_flop(self) -> float:
        """The number of operations of forward and backward."""
        return self.num_forward_flop + self.num_backward_flop


@dataclass(frozen=True, eq=False, kw_only=True)
class PipelineDetails(PipelineFacts):
    """A pipeline or loop that is at hand.

    Example:
      >>> pipeline = engine.Pipeline(
      ...     [layers.Dense(4), lambda x: jnp.mean(layers.Dense(2)(x))],
      ...     num_micro_batches=2,
      ...     optimizer=optax.sgd(0.1),
      ... )
      >>> pipeline.trace(np.ones([2, 8], np.float32))
      >>> details = pipeline.facts()
      >>> details.edges[1]
      Edge(source=0, target=1, num_forward_bytes=32, num_backward_bytes=0)
      >>> details.flows[0]
      Flow(stage=0, is_backward=False, target=1, readers=(1,), holders=(), num_bytes=32)
      >>> details.stages[0].part
      Part(index=0, ipu=0, num_operations=3, variables=('dense/kernel', 'dense/bias'), ...)
      >>> details.stages[0].whole_layers[0]
      LayerFacts(name='dense', num_parameters=36, num_bytes=144, operations=248.0)
      >>> pipeline.plan_memory()[0]
      StageMemory(stage=0, ipu=0, in_flight=2, num_residual_bytes=0, num_input_bytes=64, ...)

    Attributes:
      stages: its stages.
      shared: variables that several stages have.
      sent: what crosses from device to device per weight update.
      dispatch: over several devices, the number of micro-batches that a program handles, and why.
      num_devices_per_ipu: the number of devices that compute a stage together.
      divided: full names of the variables of which each of these devices has a part.
    """

    stages: tuple[StageDetails, ...]
    shared: tuple[SharedVariables, ...]
    sent: tuple[Sent, ...]
    dispatch: str
    num_devices_per_ipu: int
    divided: tuple[str, ...]

    @property
    def unit(self) -> str:
        """What its stages handle: a "micro-batch" or, in a loop, an "iteration"."""
        return "iteration" if self.kind == "loop" else "micro-batch"

    @property
    def parts(self) -> tuple[Part, ...]:
        """What lies where each stage runs."""
        return tuple(stage.part for stage in self.stages)

    @property
    def num_ipus(self) -> int:
        """The number of devices that its stages are on."""
        return len({stage.ipu for stage in self.stages})

    @property
    def num_parameters(self) -> int:
        """The number of elements of all its variables."""
        return sum(stage.num_parameters for stage in self.stages)

    @property
    def num_parameter_bytes(self) -> int:
        """The bytes that its variables take, each counted once."""
        return sum(stage.num_parameter_bytes for stage in self.stages)

    @property
    def num_trained(self) -> int:
        """The number of elements of its trained variables."""
        return sum(stage.num_trained for stage in self.stages)


def select_fields(kind: type[FactsT], facts: Any, **changed: Any) -> FactsT:
    """Makes facts of another kind from the fields that it shares with `facts`, some changed or added."""
    names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return kind(**{**{name: value for name, value in vars(facts).items() if name in names}, **changed})

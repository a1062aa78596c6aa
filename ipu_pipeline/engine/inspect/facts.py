"""What is known of a pipeline or loop, as data. It imports no JAX.

`StageFacts` and `PipelineFacts` are what a profile keeps, so that they may come from a file as well. The
details are known besides of a pipeline that is at hand: `Pipeline.facts` makes them. Tables, profiles and
pages are made of these classes, and of nothing else that the engine knows.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from ipu_pipeline.engine.planning.memory_plans import Flow, IpuMemory

if TYPE_CHECKING:
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
      name: what their names have in common up to a slash or a dot; empty of variables outside of any scope.
      num_parameters: elements of the variables.
      num_bytes: how much they take.
    """

    name: str
    num_parameters: int
    num_bytes: int


@dataclass(frozen=True)
class Layer(LayerFacts):
    """A scope of variables, or several equal ones.

    Attributes:
      name: its full name, with `{3..5}` in place of the number in which equal ones differ. Variables that
        stand beside scopes are one layer, `scope/(one, other)`.
      num_parameters: elements of the variables, of all equal ones together.
      num_bytes: how much they take.
      count: how many equal ones there are.
      parts: what it consists of, of which the same holds: scopes, and variables without parts.
    """

    count: int = 1
    parts: tuple[Layer, ...] = ()

    @property
    def has_scopes(self) -> bool:
        """Whether it has more in it than variables."""
        return any(part.parts for part in self.parts)


@dataclass(frozen=True)
class Edge:
    """What goes from one IPU to another per micro-batch, in bytes.

    Attributes:
      source: the IPU that sends; None for the host's feed. What a loop carries into the next iteration
        comes from the last stage's IPU.
      target: the IPU that receives.
      num_forward_bytes: values for later stages.
      num_backward_bytes: gradients for earlier ones.
    """

    source: int | None
    target: int
    num_forward_bytes: int
    num_backward_bytes: int


@dataclass(frozen=True)
class Sent:
    """What a weight update sends from one IPU to another.

    Attributes:
      source: the IPU that sends.
      target: the IPU that receives.
      what: in words: the variable, gradient or leaf of the optimizer's state; dtype and shape of a value
        that the update makes. Scalars are counted together.
      num_bytes: how much it is.
      primitive: what reads it there: a JAX primitive, or a stage; empty for scalars.
    """

    source: int
    target: int
    what: str
    num_bytes: int
    primitive: str


@dataclass(frozen=True)
class SharedVariables:
    """Variables that the same stages share; the first of these owns them.

    Attributes:
      stages: their numbers.
      variables: what they share.
    """

    stages: tuple[int, ...]
    variables: tuple[VariableSpec, ...]


@dataclass(frozen=True)
class Part:
    """What lies where a stage runs.

    Attributes:
      index: the stage's number.
      ipu: the IPU that it runs on.
      num_operations: JAX operations of its forward, those inside loops and conditionals not counted.
      variables: full names of the variables that live there, and of shared ones that are copied there.
      num_variable_bytes: how much they take.
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
      ipu: the IPU that it runs on.
      level: stages of the same one are parallel.
      layers: its variables; those that it shares with an earlier stage are that one's.
      forward_operations: estimated floating-point operations of its forward for a micro-batch.
      backward_operations: likewise of its backward; 0 without one.
      is_fused: whether one program does both.
      num_held_bytes: what it holds of a micro-batch between its forward and its backward.
      in_flight: of how many micro-batches it does so at most.
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

    @property
    def num_parameters(self) -> int:
        """Elements of its variables."""
        return sum(layer.num_parameters for layer in self.layers)

    @property
    def num_parameter_bytes(self) -> int:
        """How much its variables take."""
        return sum(layer.num_bytes for layer in self.layers)

    @property
    def num_live_bytes(self) -> int:
        """What it holds of all micro-batches in flight."""
        return self.in_flight * self.num_held_bytes


@dataclass(frozen=True)
class PipelineFacts:
    """A pipeline or loop.

    Attributes:
      name: its name.
      kind: "training", "inference" or "loop".
      schedule: the name of the schedule, or of the user's function.
      num_micro_batches: of each replica per weight update, or without training per execution; None if that
        is known at run only. In a profile it is the number that was seen, and 1 for a loop.
      num_serialized: how many of them a stage handles before the next one starts.
      chunk_size: micro-batches per program.
      is_one_program: whether all stages are on one device.
      micro_batch_size: samples in a micro-batch; None if its arrays have no first axis in common.
      stages: its stages.
      edges: what goes from IPU to IPU, those with anything on them.
      flows: what goes from stage to stage, also on one IPU.
      memory: what the IPUs of each replica take by the plan; empty where that was not asked for, or could
        not be found.
      num_replicas: how many there are; a file without it has one. IPUs are those of the first replica
        here. In events IPU i of replica r is r times `num_ipus_each` plus i, and micro-batches are the
        elements of all replicas: the k-th one of replica r is number k times `num_replicas` plus r.
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

    @functools.cached_property
    def num_ipus_each(self) -> int:
        """How many IPUs a replica has, with those that have no stage."""
        return max(stage.ipu for stage in self.stages) + 1

    @property
    def ipus(self) -> tuple[int, ...]:
        """The IPUs with stages, in all replicas."""
        own, size = sorted({stage.ipu for stage in self.stages}), self.num_ipus_each
        return tuple(replica * size + ipu for replica in range(self.num_replicas) for ipu in own)

    def stages_on(self, ipu: int) -> list[int]:
        """The stages on an IPU of any replica."""
        return [stage.index for stage in self.stages if stage.ipu == ipu % self.num_ipus_each]

    def element(self, number: int, ipu: int) -> int:
        """The number of a replica's micro-batch among those of all replicas, by an IPU of it."""
        return number * self.num_replicas + ipu // self.num_ipus_each

    @property
    def trains(self) -> bool:
        """Whether there are weight updates."""
        return any(stage.backward_operations for stage in self.stages)


@dataclass(frozen=True, eq=False, kw_only=True)
class StageDetails(StageFacts):
    """A stage of a pipeline at hand.

    Attributes:
      layers: its variables as a tree, in which neighbours that are equal stand once.
      variables: those that it owns.
      num_trained: elements of those that are trained.
      part: what lies where it runs.
      num_sent_bytes: per micro-batch, what it sends to other IPUs forwards.
      num_returned_bytes: likewise gradients, backwards.
      num_forward_flop: estimated operations of its forward program per micro-batch; that of the last stage
        of a pipeline that trains does its backward, too.
      num_backward_flop: likewise of its backward; 0 where the forward does it, or nothing is trained.
      uncounted: what it calls whose operations are not known.
    """

    layers: tuple[Layer, ...]
    variables: tuple[VariableSpec, ...]
    num_trained: int
    part: Part
    num_sent_bytes: int
    num_returned_bytes: int
    num_forward_flop: float
    num_backward_flop: float
    uncounted: frozenset[str]

    @property
    def num_flop(self) -> float:
        """Operations of forward and backward."""
        return self.num_forward_flop + self.num_backward_flop


@dataclass(frozen=True, eq=False, kw_only=True)
class PipelineDetails(PipelineFacts):
    """A pipeline or loop that is at hand.

    Attributes:
      stages: its stages.
      shared: variables that several stages have.
      sent: what crosses from IPU to IPU per weight update.
      dispatch: over several IPUs, how many micro-batches a program handles, and why.
      num_devices_per_ipu: how many devices compute a stage together.
      divided: full names of the variables of which each of these has a part.
    """

    stages: tuple[StageDetails, ...]
    shared: tuple[SharedVariables, ...]
    sent: tuple[Sent, ...]
    dispatch: str
    num_devices_per_ipu: int
    divided: tuple[str, ...]

    @property
    def unit(self) -> str:
        """What its stages handle: a "micro-batch", or of a loop an "iteration"."""
        return "iteration" if self.kind == "loop" else "micro-batch"

    @property
    def parts(self) -> tuple[Part, ...]:
        """What lies where each stage runs."""
        return tuple(stage.part for stage in self.stages)

    @property
    def num_ipus(self) -> int:
        """How many IPUs its stages are on."""
        return len({stage.ipu for stage in self.stages})

    @property
    def num_parameters(self) -> int:
        """Elements of all its variables."""
        return sum(stage.num_parameters for stage in self.stages)

    @property
    def num_parameter_bytes(self) -> int:
        """How much they take, each counted once."""
        return sum(stage.num_parameter_bytes for stage in self.stages)

    @property
    def num_trained(self) -> int:
        """Elements of those that are trained."""
        return sum(stage.num_trained for stage in self.stages)


def select_fields(kind: type[FactsT], facts: Any, **changed: Any) -> FactsT:
    """What one kind of facts has of another kind, with some of it changed or added."""
    names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return kind(**{**{name: value for name, value in vars(facts).items() if name in names}, **changed})

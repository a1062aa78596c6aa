"""Facts about a pipeline or loop, as data. Imports no JAX.

`StageFacts` and `PipelineFacts` are stored in profiles, so they may also come from a file. Details need the
pipeline itself: `find_facts` makes them. Tables, profiles and pages are made from these classes only.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from ipu_pipeline.engine.planning.memory_records import Flow, IpuMemory

if TYPE_CHECKING:
    from ipu_pipeline.engine.schedules.scenarios import Costs
    from ipu_pipeline.engine.tracing.specs import VariableSpec

FactsT = TypeVar("FactsT")


@dataclass(frozen=True)
class LayerFacts:
    """The variables of a layer.

    Attributes:
      name: the common prefix of their names, up to a slash or dot; empty for variables in no scope.
      num_parameters: the number of elements of the variables.
      num_bytes: the size of the variables.
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
      name: its full name, with `{3..5}` in place of the number in which equal scopes differ. Variables
        beside scopes form one layer, `scope/(one, other)`.
      num_parameters: the number of elements of the variables, of all equal layers together.
      num_bytes: the size of these variables.
      count: the number of equal layers.
      parts: its inner layers: scopes, and variables, which have no parts.
    """

    count: int = 1
    parts: tuple[Layer, ...] = ()

    @property
    def has_scopes(self) -> bool:
        """Whether it contains more than variables."""
        return any(part.parts for part in self.parts)


@dataclass(frozen=True)
class Edge:
    """The bytes that go from one device to another per micro-batch.

    Attributes:
      source: the device that sends; None for the host's feed. Values that a loop carries to the next
        iteration come from the last stage's device.
      target: the device that receives.
      num_forward_bytes: the bytes of values for later stages.
      num_backward_bytes: the bytes of gradients for earlier stages.
    """

    source: int | None
    target: int
    num_forward_bytes: int
    num_backward_bytes: int


@dataclass(frozen=True)
class Sent:
    """A value that a weight update sends from one device to another.

    Example:
      >>> shared = engine.Shared("w", np.ones([4, 4], np.float32))
      >>> pipeline = engine.Pipeline(
      ...     [lambda w, x: x @ w, lambda w, x: jnp.mean(x @ w)],
      ...     parameters=[shared, shared],
      ...     num_micro_batches=2,
      ...     optimizer=optax.sgd(0.1),
      ... )
      >>> pipeline.trace(np.ones([2, 4], np.float32))
      >>> engine.inspect.find_facts(pipeline).sent  # what a weight update sends
      (Sent(source=0, target=1, what='w', num_bytes=64, primitive='stage 1'),
       Sent(source=1, target=0, what='gradient of w', num_bytes=64, primitive='the sum at its owner'))

    Attributes:
      source: the device that sends.
      target: the device that receives.
      what: its description: the variable, gradient or leaf of the optimizer's state; or dtype and shape of
        a value that the update computes. Scalars are counted together.
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
    """The variables on a stage's device, and the stage's operations.

    Attributes:
      index: the stage's number.
      ipu: the device that it runs on.
      num_operations: the number of JAX operations of its forward, without those inside loops and
        conditionals.
      variables: full names of the variables that are stored there, and of shared ones copied there.
      num_variable_bytes: the size of these variables.
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
      name: its name in errors, with the name of its function.
      ipu: the device that it runs on.
      level: its level; stages of the same level are parallel.
      layers: its layers in the order in which it runs them, with its variables except those shared with an
        earlier stage.
      forward_operations: estimated floating-point operations of its forward for a micro-batch.
      backward_operations: the same estimate for its backward, including weight gradients; 0 without one.
      is_fused: whether forward and backward are one program (with a split backward: forward and input
        gradients).
      num_held_bytes: the bytes that it holds per micro-batch from its forward to its backward, or to its
        input gradients if the backward is split.
      in_flight: the most micro-batches that it holds at a time, including those before weight gradients.
      is_halved: whether its backward is split into input and weight gradients.
      weight_operations: estimated operations of the weight gradients; 0 if the backward is not split.
      num_between_bytes: the bytes that it holds per micro-batch between input and weight gradients.
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
        """The size of its variables in bytes."""
        return sum(layer.num_bytes for layer in self.layers)


@dataclass(frozen=True)
class PipelineFacts:
    """A pipeline or loop.

    Attributes:
      name: its name.
      kind: "training", "inference" or "loop".
      schedule: the name of the schedule, or of the user's function.
      num_micro_batches: micro-batches of each replica per weight update, or without training per execution;
        None if the number is only known at run time. In a profile it is the observed number, and 1 for a
        loop.
      num_serialized: the number of micro-batches that a stage handles before the next one starts.
      chunk_size: micro-batches per program.
      is_one_program: whether all stages are on one device.
      micro_batch_size: samples in a micro-batch; None if its arrays have no first axis in common.
      stages: its stages.
      edges: the bytes that go from device to device, without empty edges.
      flows: the values that go from stage to stage, also on one device.
      memory: the planned memory of each replica's devices; empty if not requested or not known.
      num_replicas: the number of replicas; a file without it has one. The devices here are the first
        replica's. In events, device i of replica r is r times `num_ipus_each` plus i, and micro-batches are
        the elements of all replicas: the k-th one of replica r is number k times `num_replicas` plus r.
      cuts: the places of the cuts and their reasons, in lines, if the engine cut it; otherwise empty.
      costs: the measured times of programs, transfers and updates, each alone, in seconds, with an
        assumption about the host; None if they were not measured.
      device_word: the word for a device: "IPU" in TF1's and PopTorch's interfaces, else "device".
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
    device_word: str = "device"

    @functools.cached_property
    def num_ipus_each(self) -> int:
        """The number of devices of a replica, including those without a stage."""
        return max(stage.ipu for stage in self.stages) + 1

    @property
    def ipus(self) -> tuple[int, ...]:
        """The devices with stages, in all replicas."""
        ipus, size = sorted({stage.ipu for stage in self.stages}), self.num_ipus_each
        return tuple(replica * size + ipu for replica in range(self.num_replicas) for ipu in ipus)

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
    """A stage, with details that need the pipeline itself.

    Example:
      >>> pipeline = engine.Pipeline([layers.Dense(4), layers.Dense(2)], num_micro_batches=2)
      >>> pipeline.trace(np.ones([2, 8], np.float32))
      >>> stage = engine.inspect.find_facts(pipeline).stages[0]
      >>> stage.ipu, stage.in_flight, stage.num_held_bytes, stage.forward_operations
      (0, 1, 0, 248.0)

    Attributes:
      layers: its variables as a tree, in which equal neighbours are listed once.
      whole_layers: the layers that could be moved to another stage, in the order in which it runs them.
      variables: the variables that it owns.
      num_live_bytes: the most bytes that it holds for all micro-batches in flight.
      num_trained: the number of elements of its trained variables.
      part: the variables on its device, and its operations.
      num_sent_bytes: the bytes that it sends forwards to other devices per micro-batch.
      num_returned_bytes: the bytes of gradients that it sends backwards to other devices per micro-batch.
      num_forward_flop: estimated operations of its forward program per micro-batch. If the pipeline
        trains, the last stage's includes its backward.
      num_backward_flop: estimated operations of its backward program per micro-batch; 0 if the forward
        program includes it, or nothing is trained.
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
    """A pipeline or loop, with details that need the pipeline itself.

    Example:
      >>> pipeline = engine.Pipeline(
      ...     [layers.Dense(4), lambda x: jnp.mean(layers.Dense(2)(x))],
      ...     num_micro_batches=2,
      ...     optimizer=optax.sgd(0.1),
      ... )
      >>> pipeline.trace(np.ones([2, 8], np.float32))
      >>> details = engine.inspect.find_facts(pipeline)
      >>> details.edges[1]
      Edge(source=0, target=1, num_forward_bytes=32, num_backward_bytes=0)
      >>> details.flows[0]
      Flow(stage=0, is_backward=False, target=1, readers=(1,), holders=(), num_bytes=32)
      >>> details.stages[0].part
      Part(index=0, ipu=0, num_operations=3, variables=('dense/kernel', 'dense/bias'), ...)
      >>> details.stages[0].whole_layers[0]
      LayerFacts(name='dense', num_parameters=36, num_bytes=144, operations=248.0)
      >>> engine.planning.plan_memory(pipeline)[0]
      StageMemory(stage=0, ipu=0, in_flight=2, num_residual_bytes=0, num_input_bytes=64, ...)

    Attributes:
      stages: its stages.
      shared: variables that several stages have.
      sent: the values that go from device to device per weight update.
      dispatch: on several devices, the number of micro-batches per program, and the reason.
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
        """The unit that its stages handle: a "micro-batch" or, in a loop, an "iteration"."""
        return "iteration" if self.kind == "loop" else "micro-batch"

    @property
    def parts(self) -> tuple[Part, ...]:
        """The variables on each stage's device, and the stage's operations."""
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
        """The size of all its variables in bytes, each counted once."""
        return sum(stage.num_parameter_bytes for stage in self.stages)

    @property
    def num_trained(self) -> int:
        """The number of elements of its trained variables."""
        return sum(stage.num_trained for stage in self.stages)


def select_fields(kind: type[FactsT], facts: Any, **changed: Any) -> FactsT:
    """Makes facts of another kind from the fields in common with `facts`, some changed or added."""
    names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return kind(**{**{name: value for name, value in vars(facts).items() if name in names}, **changed})

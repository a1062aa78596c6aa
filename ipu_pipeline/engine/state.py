"""The state and the outputs of a step, and what a state must be to be used."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.engine.mesh_isolation import apart
from ipu_pipeline.ground import jax_compat
from ipu_pipeline.ground.pytrees import as_plain, is_readable


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class OfReplicas:
    """A value that differs between replicas, as what a replicated loop carries does; a pytree.

    Attributes:
      values: the values, in the order of the replicas.
    """

    values: tuple[Any, ...]


def of_replica(value: Any, replica: int) -> Any:
    """A replica's own value, or the one that is the same for all."""
    return value.values[replica] if isinstance(value, OfReplicas) else value


@dataclass(frozen=True)
class PipelineState:
    """Everything that training changes, a pytree.

    Example:
      >>> pipeline = engine.Pipeline([lambda w, x: x @ w], parameters=[np.eye(4)], num_micro_batches=1)
      >>> state = pipeline.init(jax.random.key(0), np.ones([2, 4]))
      >>> list(state.variables), state.update_count
      (['stage0/parameter'], 0)

    Attributes:
      variables: full name -> array.
      optimizer_state: the result of the optimizer's `init` for the trained variables, a flat dict. None
        without training, and until the first step if it depends on the last stage's outputs.
      update_count: an int, the weight updates so far.
      execution_count: an int, the steps so far, including steps without training; it is folded into
        random keys, modulo 2**32.
      key: the random key from which all others are derived.
      accumulators: sums or means of gradients since the last weight update, by key. Empty between two
        steps, where they are zeros; the pytree then has no part for them.
      num_accumulated: an int, the micro-batches in the accumulators; no leaf of the pytree.
    """

    variables: dict[str, Any]
    optimizer_state: Any
    update_count: int
    execution_count: int
    key: Any
    accumulators: dict[str, Any] = field(default_factory=dict)
    num_accumulated: int = 0

    def __setstate__(self, attributes: dict[str, Any]) -> None:
        """Also reads what version 0.1.0 pickled, which had no accumulators."""
        vars(self).update({"accumulators": {}, "num_accumulated": 0, **attributes})


# Not `register_dataclass`: Orbax stores empty dicts, and would refuse states that were saved without them.
_PARTS = ("variables", "optimizer_state", "update_count", "execution_count", "key")


def _flatten_state(state: PipelineState) -> tuple[list[tuple[Any, Any]], tuple[tuple[str, ...], int]]:
    names = (*_PARTS, "accumulators") if state.accumulators else _PARTS
    children = [(jax.tree_util.GetAttrKey(name), getattr(state, name)) for name in names]
    return children, (names, state.num_accumulated)


def _unflatten_state(aux: tuple[tuple[str, ...], int], children: Iterable[Any]) -> PipelineState:
    names, num_accumulated = aux
    return PipelineState(**dict(zip(names, children, strict=True)), num_accumulated=num_accumulated)


jax.tree_util.register_pytree_with_keys(PipelineState, _flatten_state, _unflatten_state)


def leaves_by_path(optimizer_state: Any) -> dict[str, Any] | None:
    """The leaves of an optimizer's state by their paths; None if there is no state."""
    if optimizer_state is None:
        return None
    with_paths = jax.tree_util.tree_leaves_with_path(optimizer_state)
    return {jax.tree_util.keystr(path): leaf for path, leaf in with_paths}


@dataclass(frozen=True)
class StepOutputs:
    """The outputs of a step: the last stage's results, losses and metrics.

    Example:
      >>> pipeline = engine.Pipeline([lambda x: 2 * x], num_micro_batches=2)
      >>> batches = [np.float32(1), np.float32(2)]
      >>> _, outputs = pipeline.step(pipeline.init(jax.random.key(0), batches[0]), batches)
      >>> [float(output) for output in outputs.outputs]
      [2.0, 4.0]

    Attributes:
      collected: the leaves of the results, stacked if one program handled several micro-batches.
      unflatten: makes an output from its leaves; None if outputs are not collected.
      read_metrics: reads the metrics of stages and the optimizer, by full name, one value each.
    """

    collected: Sequence[Collected]
    unflatten: Callable[[list[Any]], Any] | None
    read_metrics: Callable[[], dict[str, Any]] = dict

    @property
    def is_here(self) -> bool:
        """Whether this process has the collected results, as the last stage's process does."""
        return all(
            map(is_readable, jax.tree.leaves([(part.outputs, part.loss) for part in self.collected]))
        )

    def block_until_ready(self) -> StepOutputs:
        """Waits until the collected results are computed. `jax.block_until_ready` calls it."""
        jax.block_until_ready([(part.outputs, part.loss) for part in self.collected])
        return self

    @functools.cached_property
    def outputs(self) -> list[Any]:
        """The last stage's results, one entry per micro-batch; empty in processes without that stage.

        With several replicas, an entry has a first axis for them.
        """
        if self.unflatten is None or not self.is_here:
            return []
        results: list[Any] = []
        for part in self.collected:
            if part.size is None:
                results.append(self.unflatten(part.outputs))
                continue
            leaves = [_unstack(leaf, part.size) for leaf in part.outputs]
            results += [self.unflatten([leaf[number] for leaf in leaves]) for number in range(part.size)]
        return results

    @functools.cached_property
    def losses(self) -> list[Any]:
        """The loss of each micro-batch, a scalar; empty without training, or without the last stage here.

        With several replicas, an entry is a vector of their losses.
        """
        losses: list[Any] = []
        if not self.is_here:
            return losses
        for part in self.collected:
            if part.loss is not None:
                losses += [part.loss] if part.size is None else _unstack(part.loss, part.size)
        return losses

    @functools.cached_property
    def metrics(self) -> dict[str, Any]:
        """The metrics of stages and the optimizer (see `metric`): NumPy scalars by full name."""
        return {name: values[0] for name, values in self.read_metrics().items()}


@dataclass(frozen=True, eq=False)
class Collected:
    """The results of the last stage for one micro-batch, or for several in a row.

    Attributes:
      outputs: the leaves of the stage's outputs.
      loss: the loss; None without training.
      size: None for one micro-batch. For several, their number: outputs and loss are then stacked on a
        first axis, which may be longer; entries beyond `size` are meaningless.
    """

    outputs: list[Any]
    loss: Any
    size: int | None


@dataclass(frozen=True, eq=False)
class Handed:
    """Values that were enqueued together, for one micro-batch or weight update or for several in a row.

    Attributes:
      leaves: the values, by the number of the leaf.
      size: as in `Collected`.
    """

    leaves: list[Any]
    size: int | None


@dataclass(frozen=True, eq=False)
class Progress:
    """The results of some micro-batches, still being computed.

    Attributes:
      state: the new state.
      carried: in a loop, the values that the next iteration takes.
      collected: what was to be collected, in the order of the micro-batches.
      count: the number of micro-batches that ran.
      enqueued: what stages enqueued, in the same order.
      updated: what weight updates enqueued, in their order.
      num_ahead: the number of micro-batches that have been taken for the next update already.
    """

    state: PipelineState
    carried: list[Any]
    collected: list[Collected]
    count: int
    enqueued: list[Handed]
    updated: list[Handed]
    num_ahead: int = 0


@apart
def _unstack(stack: Any, size: int) -> list[Any]:
    # The whole stack, whose length does not depend on the number of micro-batches, so it compiles once.
    return list(stack)[:size]


# Checks.

# What errors say of states that lack variables.
MOVES = (
    "A state of another split of the same layers is moved by engine.resplit(state, pipeline). "
    "Pipeline.adopt(state) takes the variables that a state has, and begins the others anew."
)
_MENDS = {
    "Pipeline.init": "Pipeline.trace(micro_batch) finds shapes and dtypes without it, Pipeline.variables.",
    "Pipeline.step": "A step computes the gradients by itself: what is differentiated belongs into the "
    "stages and the loss.",
}


def check_state(caller: str, state: Any, *, may_be_traced: bool = False, is_known: bool = False) -> None:
    """Raises if a value is no state, or one that a step has destroyed."""
    if not isinstance(state, PipelineState):
        message = f"{caller}: state must be what init or step returned; got {type(state).__name__}."
        if isinstance(state, tuple) and any(isinstance(part, PipelineState) for part in state):
            message += " step returns a pair: `state, outputs = pipeline.step(state, micro_batches)`."
        raise TypeError(message)
    if not may_be_traced:
        check_not_traced(caller, state)
    deleted = next((name for name, value in state.variables.items() if _is_deleted(value)), None)
    if deleted is not None:
        raise _make_deleted_error(f"{caller}: the state's variable {deleted}")
    if not is_known:
        check_exists(f"{caller}: the state's optimizer_state", state.optimizer_state)


def as_plain_state(state: PipelineState) -> PipelineState:
    """The state with NumPy arrays as JAX takes them, in the byte order of this machine."""

    def plain(path: Any, value: Any) -> Any:
        label = f"The state's optimizer_state{jax.tree_util.keystr(path)}"
        return as_plain(value, label) if isinstance(value, np.ndarray) else value

    variables = {}
    for name, value in state.variables.items():
        if not hasattr(value, "dtype"):
            raise ValueError(f"Variable {name} must be an array; the state has {type(value).__name__}.")
        variables[name] = as_plain(value, f"Variable {name}") if isinstance(value, np.ndarray) else value
    optimizer_state = jax.tree_util.tree_map_with_path(plain, state.optimizer_state)
    return dataclasses.replace(state, variables=variables, optimizer_state=optimizer_state)


def without_aliases(state: PipelineState) -> PipelineState:
    """The placed state, with a copy of each array that occurs twice: a step donates a buffer once."""
    pointers: set[int] = set()

    def unshared(value: Any) -> Any:
        if not isinstance(value, jax.Array) or value.size == 0:
            return value
        value_pointers = {shard.data.unsafe_buffer_pointer() for shard in value.addressable_shards}
        if value_pointers & pointers:
            return jax.device_put(value, value.sharding, may_alias=False)
        pointers.update(value_pointers)
        return value

    variables = {name: unshared(value) for name, value in state.variables.items()}
    return dataclasses.replace(
        state, variables=variables, optimizer_state=jax.tree.map(unshared, state.optimizer_state)
    )


def check_exists(name: str, tree: Any) -> None:
    """Raises a ValueError if an array of a pytree has been deleted."""
    if any(map(_is_deleted, jax.tree.leaves(tree))):
        leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
        path = next(path for path, leaf in leaves if _is_deleted(leaf))
        raise _make_deleted_error(name + jax.tree_util.keystr(path))


def _is_deleted(value: Any) -> bool:
    return isinstance(value, jax.Array) and not jax_compat.is_traced(value) and value.is_deleted()


def _make_deleted_error(name: str) -> ValueError:
    return ValueError(
        f"{name} has been deleted. With donate=True a step destroys the state that it is given, as the new "
        "one takes its memory. Go on with the state that the step returned, "
        "`state, outputs = pipeline.step(state, micro_batches)`, or make the pipeline without donate."
    )


def check_not_traced(caller: str, *values: Any) -> None:
    """Raises a TypeError if JAX is tracing the function that calls, or values are traced ones."""
    if jax_compat.is_outside_of_traces():
        return
    if jax_compat.is_traced(jnp.zeros(())) or any(map(jax_compat.is_traced, jax.tree.leaves(values))):
        raise TypeError(
            f"{caller} was called in a function that JAX traces, as for jax.jit, jax.grad, jax.vmap or "
            "jax.eval_shape. It runs programs of its own, on the devices of the stages, so call it outside "
            f"of such functions, in plain Python. {_MENDS.get(caller, '')}".rstrip()
        )


def check_elements(caller: str, micro_batches: Iterable[Any]) -> Iterable[Any]:
    """The micro-batches; traced ones raise a TypeError when they come."""
    if jax_compat.is_outside_of_traces():
        return micro_batches

    def check() -> Iterator[Any]:
        for micro_batch in micro_batches:
            check_not_traced(caller, micro_batch)
            yield micro_batch

    return check()

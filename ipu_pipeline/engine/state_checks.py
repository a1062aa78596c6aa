"""What a state must be to be used: whole, and not in the middle of a trace."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.engine.state import PipelineState
from ipu_pipeline.ground import jax_compat
from ipu_pipeline.ground.values import as_plain

__all__ = [
    "MOVES",
    "as_plain_state",
    "check_elements",
    "check_exists",
    "check_not_traced",
    "check_state",
    "without_aliases",
]

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
        what = f"The state's optimizer_state{jax.tree_util.keystr(path)}"
        return as_plain(value, what) if isinstance(value, np.ndarray) else value

    variables = {}
    for name, value in state.variables.items():
        if not hasattr(value, "dtype"):
            raise ValueError(f"Variable {name} must be an array; the state has {type(value).__name__}.")
        variables[name] = as_plain(value, f"Variable {name}") if isinstance(value, np.ndarray) else value
    optimizer_state = jax.tree_util.tree_map_with_path(plain, state.optimizer_state)
    return dataclasses.replace(state, variables=variables, optimizer_state=optimizer_state)


def without_aliases(state: PipelineState) -> PipelineState:
    """The placed state with copies of what it has in a second place: a step gives memory away once."""
    seen: set[int] = set()

    def own(value: Any) -> Any:
        if not isinstance(value, jax.Array) or value.size == 0:
            return value
        found = {shard.data.unsafe_buffer_pointer() for shard in value.addressable_shards}
        if found & seen:
            return jax.device_put(value, value.sharding, may_alias=False)
        seen.update(found)
        return value

    variables = {name: own(value) for name, value in state.variables.items()}
    return dataclasses.replace(
        state, variables=variables, optimizer_state=jax.tree.map(own, state.optimizer_state)
    )


def check_exists(what: str, tree: Any) -> None:
    """Raises a ValueError if an array of a pytree has been deleted."""
    if any(map(_is_deleted, jax.tree.leaves(tree))):
        leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
        path = next(path for path, leaf in leaves if _is_deleted(leaf))
        raise _make_deleted_error(what + jax.tree_util.keystr(path))


def _is_deleted(value: Any) -> bool:
    return isinstance(value, jax.Array) and not jax_compat.is_traced(value) and value.is_deleted()


def _make_deleted_error(what: str) -> ValueError:
    return ValueError(
        f"{what} has been deleted. With donate=True a step destroys the state that it is given, as the new "
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

"""States of the engine's pipelines as snapshots, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.checkpointing.in_memory import parts_of, rows_of
from ipu_pipeline.checkpointing.session_state import KeptOptimizer, Record, SessionState
from ipu_pipeline.checkpointing.snapshots import Snapshot
from ipu_pipeline.engine import Pipeline, PipelineState, processes
from ipu_pipeline.engine.fronts import move_state
from ipu_pipeline.engine.inspect import find_separate_variables
from ipu_pipeline.ground.errors import CheckpointError

__all__ = ["first_rows", "place_state", "take_parts", "take_state"]

_NAME = "Pipeline"
# In `Snapshot.extra`: the data of the state's random key, and the variables with a row for each replica.
_KEY, _ROWS = "engine_key", "engine_rows"


def take_state(state: PipelineState, prepare: Callable[[list[Any]], list[Any]]) -> Snapshot:
    """A snapshot of a state."""
    leaves = jax.tree_util.tree_flatten_with_path(state.optimizer_state)[0]
    named = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
    prepared = prepare([*state.variables.values(), *named.values()])
    variables = dict(zip(state.variables, prepared, strict=False))
    kept = None
    if state.optimizer_state is not None:
        shapes = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in named.items()}
        kept = KeptOptimizer(shapes, prepared[len(variables) :])
    record = Record(kept, int(state.update_count), int(state.execution_count))
    data = np.asarray(jax.random.key_data(state.key)).tolist()
    implementation = str(jax.random.key_impl(state.key))
    return Snapshot(SessionState(variables, {_NAME: record}), 0, implementation, extra={_KEY: data})


def take_parts(state: PipelineState, separate: Set[str], extra: Mapping[str, Any]) -> Snapshot:
    """A snapshot of this process's parts of a state."""
    own = {name: value for name, value in state.variables.items() if name in separate}
    others = {name: value for name, value in state.variables.items() if name not in separate}
    snapshot = take_state(dataclasses.replace(state, variables=others), parts_of)
    snapshot.state.variables.update(zip(own, rows_of(list(own.values())), strict=True))
    snapshot.extra.update({_ROWS: list(own), **extra})
    return snapshot


def place_state(snapshot: Snapshot, what: str, pipeline: Pipeline) -> PipelineState:
    """The state that a snapshot is of, on the devices of a pipeline."""
    records = list(snapshot.state.pipelines.values())
    if len(records) > 1 or any(record.accumulated is not None for record in records):
        names = ", ".join(map(repr, snapshot.state.pipelines))
        raise CheckpointError(
            f"{what} is of a session with {names}, and not of one pipeline between two updates."
        )
    record = records[0] if records else Record()
    data = snapshot.extra.get(_KEY)
    if data is None:
        key = jax.random.key(snapshot.seed, impl=snapshot.key_implementation)
    else:
        key = jax.random.wrap_key_data(jnp.asarray(data, jnp.uint32), impl=snapshot.key_implementation)
    leaves = None
    if record.optimizer is not None:
        leaves = dict(zip(record.optimizer.shapes, jax.tree.leaves(record.optimizer.tree), strict=True))
    variables = first_rows(snapshot)
    state = PipelineState(variables, None, record.update_count, record.execution_count, key)
    placed = move_state(state, leaves, pipeline)
    for name in find_separate_variables(pipeline) & set(snapshot.extra.get(_ROWS, ())):
        rows = snapshot.state.variables[name]
        if len(rows) == pipeline.num_replicas:
            placed.variables[name] = processes.spread_rows(rows, placed.variables[name])
    return placed


def first_rows(snapshot: Snapshot) -> dict[str, Any]:
    """The variables of a snapshot; where each replica has its own values, the first one's."""
    rows = snapshot.extra.get(_ROWS, ())
    return {name: value[0] if name in rows else value for name, value in snapshot.state.variables.items()}

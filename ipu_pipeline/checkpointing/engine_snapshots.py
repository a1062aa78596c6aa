"""States of the engine's pipelines as snapshots, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.checkpointing.session_state import KeptOptimizer, Record, SessionState
from ipu_pipeline.checkpointing.snapshots import Snapshot
from ipu_pipeline.engine import Pipeline, PipelineState
from ipu_pipeline.engine.fronts import move_state
from ipu_pipeline.ground.errors import CheckpointError

__all__ = ["place_state", "take_state"]

_NAME = "Pipeline"
_KEY = "engine_key"  # in `Snapshot.extra`: the data of the state's random key


def take_state(
    state: PipelineState,
    prepare: Callable[[list[Any]], list[Any]],
    extra: Mapping[str, Any] | None = None,
) -> Snapshot:
    """A snapshot of a state.

    Args:
      state: the state.
      prepare: makes of its arrays what a snapshot has of them.
      extra: what else belongs to it, as JSON.
    """
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
    own = SessionState(variables, {_NAME: record})
    return Snapshot(own, 0, implementation, extra={_KEY: data, **(extra or {})})


def place_state(snapshot: Snapshot, what: str, pipeline: Pipeline) -> PipelineState:
    """The state that a snapshot is of, on the devices of a pipeline.

    Args:
      snapshot: the snapshot.
      what: where it is from, for the error; the beginning of a sentence.
      pipeline: traced.

    Raises:
      CheckpointError: it is of a session with several pipelines, or within an update.
      ValueError: the pipeline has other variables, or another optimizer.
      RuntimeError: the pipeline has not been traced.
    """
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
    state = PipelineState(snapshot.state.variables, None, record.update_count, record.execution_count, key)
    return move_state(state, leaves, pipeline)

"""States of the engine's pipelines on disk: `engine.save` and `engine.restore`."""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.checkpointing.checkpoints import read_same_checkpoint, write_checkpoint
from ipu_pipeline.checkpointing.session_state import KeptOptimizer, Record, SessionState
from ipu_pipeline.checkpointing.snapshots import Snapshot
from ipu_pipeline.engine import Pipeline, PipelineState, processes
from ipu_pipeline.engine.fronts import check_pipeline, check_state, move_state
from ipu_pipeline.ground.errors import CheckpointError

__all__ = ["restore", "save"]

_NAME = "Pipeline"
_KEY = "engine_key"  # in `Snapshot.extra`: the data of the state's random key


@processes.one_thread("saving a state")
def save(path: str | os.PathLike[str], state: PipelineState) -> None:
    """Saves a state of a pipeline, to the last bit. In several processes, all call it with the same path.

    Arrays are written by Orbax, each by a process that has it. It returns when the checkpoint is complete;
    one that was there is then replaced, and stays if this ends in an error, or the process is killed.

    Example:
      >>> pipeline = engine.Pipeline([layers.Dense(4)], num_micro_batches=1)
      >>> state = pipeline.init(jax.random.key(0), np.ones([2, 8], np.float32))
      >>> engine.save("state", state)
      >>> restored = engine.restore("state", pipeline)
      >>> bool((restored.variables["dense/kernel"] == state.variables["dense/kernel"]).all())
      True

    Args:
      path: a directory, which all processes reach; its parents are made.
      state: from `init` or a step.

    Raises:
      TypeError: an argument is of another type, or it is called within a transformation such as `jax.jit`.
      ValueError: a step with `donate` has destroyed the state. Or there is something else at the path, or
        processes name different paths.
      OSError: it cannot be written.
      RuntimeError: JAX has joined several processes, and this library has not.
    """
    check_state("engine.save", state)
    _check_path("save", path)
    processes.check_joined("engine.save")
    kept = None
    if state.optimizer_state is not None:
        leaves = jax.tree_util.tree_flatten_with_path(state.optimizer_state)[0]
        named = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
        shapes = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in named.items()}
        kept = KeptOptimizer(shapes, [processes.only_if_written_here(leaf) for leaf in named.values()])
    variables = {name: processes.only_if_written_here(value) for name, value in state.variables.items()}
    record = Record(kept, int(state.update_count), int(state.execution_count))
    data = np.asarray(jax.random.key_data(state.key)).tolist()
    implementation = str(jax.random.key_impl(state.key))
    own = SessionState(variables, {_NAME: record})
    write_checkpoint(path, Snapshot(own, 0, implementation, extra={_KEY: data}))


@processes.one_thread("restoring a state")
def restore(path: str | os.PathLike[str], pipeline: Pipeline) -> PipelineState:
    """Restores a state that `save` saved, for a pipeline that cuts the same layers in any way.

    In several processes, all call it; their number, the devices and the replicas may be others than when it
    was saved. Where stages are others, parameters move as by `resplit`. A checkpoint of a `Session` with
    one pipeline can be restored, too, with the random key of its seed.

    Args:
      path: the directory.
      pipeline: traced, by `trace` or `init`.

    Returns:
      The state, on the pipeline's devices.

    Raises:
      TypeError: an argument is of another type.
      CheckpointError: there is none, it is damaged, or it is of a session with several pipelines.
      ValueError: the pipeline has other variables, or another optimizer.
      RuntimeError: the pipeline has not been traced, or as for `save`.
    """
    _check_path("restore", path)
    check_pipeline("engine.restore", pipeline)
    processes.check_joined("engine.restore")
    snapshot = read_same_checkpoint(path)
    records = list(snapshot.state.pipelines.values())
    if len(records) > 1 or any(record.accumulated is not None for record in records):
        names = ", ".join(map(repr, snapshot.state.pipelines))
        raise CheckpointError(
            f"The checkpoint {os.fspath(path)} is of a session with {names}, and not of one pipeline "
            "between two updates."
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


def _check_path(caller: str, path: object) -> None:
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"{caller}: path must be a string or a path; got {path!r}.")

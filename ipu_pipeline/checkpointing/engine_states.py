"""States of the engine's pipelines on disk: `engine.save` and `engine.restore`."""

from __future__ import annotations

import os

from ipu_pipeline.checkpointing.checkpoints import read_same_checkpoint, write_checkpoint
from ipu_pipeline.checkpointing.engine_snapshots import place_state, take_state
from ipu_pipeline.engine import Pipeline, PipelineState, processes
from ipu_pipeline.engine.fronts import check_pipeline, check_state

__all__ = ["restore", "save"]


@processes.one_thread("saving a state")
def save(path: str | os.PathLike[str], state: PipelineState) -> None:
    """Saves a state of a pipeline, to the last bit. In several processes, all call it with the same path.

    Arrays are written by Orbax, each by a process that has it; of values that differ between replicas, the
    first one's. It returns when the checkpoint is complete; one that was there is then replaced, and stays
    if this ends in an error, or the process is killed. (Orbax's own `StandardCheckpointer` takes a state,
    too, in one process only.)

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
    write_checkpoint(
        path, take_state(state, lambda leaves: list(map(processes.only_if_written_here, leaves)))
    )


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
    return place_state(read_same_checkpoint(path), f"The checkpoint {os.fspath(path)}", pipeline)


def _check_path(caller: str, path: object) -> None:
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"{caller}: path must be a string or a path; got {path!r}.")

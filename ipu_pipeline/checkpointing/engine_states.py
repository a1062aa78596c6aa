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
    """Saves a state of a pipeline exactly. With several processes, all call it with the same path.

    Orbax writes the arrays, each from a process that has it. If values differ between replicas, the first
    replica's are written. The function returns when the checkpoint is complete. It then replaces an
    existing one, which is kept if saving fails or the process is killed. (Orbax's own
    `StandardCheckpointer` can also save a state, in one process only.)

    Example:
      >>> pipeline = engine.Pipeline([layers.Dense(4)], num_micro_batches=1)
      >>> state = pipeline.init(jax.random.key(0), np.ones([2, 8], np.float32))
      >>> engine.save("state", state)
      >>> restored = engine.restore("state", pipeline)
      >>> bool((restored.variables["dense/kernel"] == state.variables["dense/kernel"]).all())
      True

    Args:
      path: a directory that all processes can reach; its parents are created.
      state: from `init` or a step.

    Raises:
      TypeError: an argument has a wrong type, or it is called within a transformation such as `jax.jit`.
      ValueError: a step with `donate` has destroyed the state. Or something else is at the path, or
        processes give different paths.
      OSError: the checkpoint cannot be written.
      RuntimeError: JAX has joined several processes, but this library has not.
    """
    check_state("engine.save", state)
    _check_path("save", path)
    processes.check_joined("engine.save")
    write_checkpoint(
        path, take_state(state, lambda leaves: list(map(processes.only_if_written_here, leaves)))
    )


@processes.one_thread("restoring a state")
def restore(path: str | os.PathLike[str], pipeline: Pipeline) -> PipelineState:
    """Restores a saved state, for a pipeline with any split of the same layers.

    With several processes, all call it. The numbers of processes, devices and replicas may differ from
    those of the saved run. If the stages differ, parameters are moved as by `resplit`. A checkpoint of a
    `Session` with one pipeline can be restored, too, with the random key of its seed.

    Args:
      path: the directory.
      pipeline: a pipeline traced by `trace` or `init`.

    Returns:
      The state, on the pipeline's devices.

    Raises:
      TypeError: an argument has a wrong type.
      CheckpointError: there is no checkpoint, it is damaged, or it belongs to a session with several
        pipelines.
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

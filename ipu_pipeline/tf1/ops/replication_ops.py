"""The number of the replica that runs a stage, as in Graphcore's `ipu.replication_ops`."""

from __future__ import annotations

import jax

from ipu_pipeline import engine
from ipu_pipeline.graphcore.sdk_names import explain_missing

__all__ = ["replication_index"]


def replication_index(name: str | None = None) -> jax.Array:
    """Returns the number of the replica that runs the stage being traced.

    Example:
      >>> def stage(x):
      ...     return x + ipu.replication_ops.replication_index()
      >>> x = np.zeros(2, np.float32)
      >>> pipeline = engine.Pipeline([stage], num_micro_batches=1, num_replicas=2)
      >>> state = pipeline.init(jax.random.key(0), x)
      >>> _, outputs = pipeline.step(state, [x, x])  # a micro-batch for each replica
      >>> np.asarray(outputs.outputs[0])  # [replica, ...]
      array([[0., 0.],
             [1., 1.]], dtype=float32)

    Args:
      name: the name of an operation in TensorFlow; not used here.

    Returns:
      An int32 scalar from 0; 0 if there is one replica.

    Raises:
      RuntimeError: not called within a stage.
    """
    del name
    return engine.replica_index()


explain_missing(__name__)

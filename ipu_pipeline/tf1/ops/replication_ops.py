"""The number of the replica that runs a stage, as in Graphcore's `ipu.replication_ops`."""

from __future__ import annotations

import jax

from ipu_pipeline import engine
from ipu_pipeline.graphcore.importing import explain_missing

__all__ = ["replication_index"]


def replication_index(name: str | None = None) -> jax.Array:
    """Returns the number of the replica that runs the stage being traced.

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

"""`ipu.ops`: the modules of operations, where Graphcore's programs look for them.

`ipu_pipeline.ops.rand_ops` is `ipu_pipeline.rand_ops` itself; `graphcore.importing` finds it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ipu_pipeline.graphcore.importing import explain_missing

if TYPE_CHECKING:
    from ipu_pipeline import (
        cross_replica_ops,
        embedding_ops,
        functional_ops,
        nn_ops,
        normalization_ops,
        pipelining_ops,
        rand_ops,
        replication_ops,
        rnn_ops,
    )

__all__ = [
    "cross_replica_ops",
    "embedding_ops",
    "functional_ops",
    "nn_ops",
    "normalization_ops",
    "pipelining_ops",
    "rand_ops",
    "replication_ops",
    "rnn_ops",
]


def __dir__() -> list[str]:
    return sorted(__all__)


explain_missing(__name__)

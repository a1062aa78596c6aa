"""Modules of operations. Each can be imported from the package itself: `ipu_pipeline.rand_ops`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ipu_pipeline.graphcore.sdk_names import explain_missing

if TYPE_CHECKING:
    from ipu_pipeline.tf1.ops import (
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

"""`ipu.ops`: the modules of operations, where Graphcore's programs look for them."""

from ipu_pipeline import (
    embedding_ops,
    functional_ops,
    nn_ops,
    normalization_ops,
    pipelining_ops,
    rand_ops,
    rnn_ops,
)

__all__ = [
    "embedding_ops",
    "functional_ops",
    "nn_ops",
    "normalization_ops",
    "pipelining_ops",
    "rand_ops",
    "rnn_ops",
]

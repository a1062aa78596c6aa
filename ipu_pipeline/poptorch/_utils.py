"""Names that programs import from PopTorch's private module of this name."""

from collections.abc import Iterator, Sequence

import torch


def combine_batch_tensors_gen(tensors: Sequence[Sequence[torch.Tensor]]) -> Iterator[torch.Tensor]:
    """Yields for each field of batches the tensors of all batches, joined along their first axis.

    Args:
      tensors: the batches, each with its fields in the same order.
    """
    for fields in zip(*tensors, strict=True):
        yield torch.cat(fields)

"""Names that programs import from PopTorch's private module of this name."""

import torch


def unwrapModelIfNecessary(model: torch.nn.Module) -> None:
    """Does nothing: PopTorch marks the tensors of a wrapped model, and here they stay as they are."""
    del model


def rewrapModelIfNecessary(model: torch.nn.Module) -> None:
    """Does nothing, see `unwrapModelIfNecessary`."""
    del model

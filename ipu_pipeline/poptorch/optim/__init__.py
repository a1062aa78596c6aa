"""Optimizers: PopTorch's attributes, and torch's formulas."""

from ipu_pipeline.poptorch.optim.optimizers import (
    LAMB,
    SGD,
    Adam,
    AdamW,
    Optimizer,
    RMSprop,
    VariableAttributes,
)

__all__ = ["LAMB", "SGD", "Adam", "AdamW", "Optimizer", "RMSprop", "VariableAttributes"]

"""Optimizers: PopTorch's attributes, and torch's formulas."""

from ipu_pipeline.poptorch.optim.adam import Adam, AdamW
from ipu_pipeline.poptorch.optim.attributes import VariableAttributes
from ipu_pipeline.poptorch.optim.base import Optimizer
from ipu_pipeline.poptorch.optim.lamb import LAMB
from ipu_pipeline.poptorch.optim.rmsprop import RMSprop
from ipu_pipeline.poptorch.optim.sgd import SGD

__all__ = ["LAMB", "SGD", "Adam", "AdamW", "Optimizer", "RMSprop", "VariableAttributes"]

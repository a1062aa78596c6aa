"""The description of an optimizer: what its update is compiled for, and the values that may change."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

__all__ = ["GroupStructure", "Kind", "LossScaling", "OptimizerSpec", "Structure", "Value"]

Value: TypeAlias = "float | tuple[float, ...]"


class Kind(enum.Enum):
    """The formula of an update. AdamW is Adam with decoupled weight decay."""

    SGD = "SGD"
    ADAM = "Adam"
    RMSPROP = "RMSprop"
    LAMB = "LAMB"
    ADAGRAD = "Adagrad"
    ADADELTA = "Adadelta"
    ADAMAX = "Adamax"
    NADAM = "NAdam"
    RADAM = "RAdam"
    ASGD = "ASGD"
    RPROP = "Rprop"
    ADAFACTOR = "Adafactor"
    MUON = "Muon"


class LossScaling(enum.Enum):
    """How the loss is scaled: not at all, by a factor that the user gives, or by one that adapts."""

    NONE = "none"
    MANUAL = "manual"
    AUTOMATIC = "automatic"


@dataclass(frozen=True)
class GroupStructure:
    """The properties that the update of a group's variables is compiled for.

    Attributes:
      nesterov: whether momentum is Nesterov's.
      maximize: whether the loss is maximized.
      centered: whether the squared mean of the gradients is subtracted from the mean of their squares.
      decouples_decay: whether weights decay apart from the gradients.
      decays: whether weights may decay.
      has_momentum: whether there may be momentum.
      num_iterations: the number of Muon's Newton-Schulz iterations.
      adjustment: how Muon's learning rate depends on a matrix's shape.
    """

    nesterov: bool
    maximize: bool
    centered: bool
    decouples_decay: bool
    decays: bool
    has_momentum: bool
    num_iterations: int = 0
    adjustment: str = ""


@dataclass(frozen=True)
class Structure:
    """The properties that an update is compiled for.

    Attributes:
      kind: the formula.
      groups: the structures of the groups of parameters.
      corrects_bias: whether averages are corrected for starting at 0.
      uses_tf_variant: whether RMSprop's formula is TensorFlow's.
      scales_velocity: whether momentum buffers are kept multiplied by a factor.
      clips: whether gradients are scaled down to a norm.
      loss_scaling: how the loss is scaled.
      accum_type: the dtype that gradients accumulate in: "float32", "float16", or None for the variable's.
      first_order_type: the same for averages of gradients and for momentum.
      second_order_type: the same for averages of squares.
    """

    kind: Kind
    groups: tuple[GroupStructure, ...]
    corrects_bias: bool
    uses_tf_variant: bool
    scales_velocity: bool
    clips: bool
    loss_scaling: LossScaling
    accum_type: str | None
    first_order_type: str | None
    second_order_type: str | None


@dataclass(frozen=True, eq=False)
class OptimizerSpec:
    """An optimizer as it was when it was described.

    Attributes:
      name: the name of its class in torch or PopTorch.
      structure: what an update is compiled for. Specs with equal structures share it.
      values: the values of each group's hyperparameters, by torch's names.
      loss_scaling: the factor; the initial one if it adapts.
      max_grad_norm: the limit of the gradients' norm; infinite without clipping.
      constants: which hyperparameters of which group are constant; group None for the two above.
      extras: the unused attributes and keys of groups: `(group, name)`, or `(None, name)` for an attribute.
    """

    name: str
    structure: Structure
    values: tuple[Mapping[str, Value], ...]
    loss_scaling: float
    max_grad_norm: float
    constants: frozenset[tuple[int | None, str]]
    extras: frozenset[tuple[int | None, str]]

    @property
    def accumulator_dtype(self) -> Callable[[Any], np.dtype[Any] | None]:
        """For the engine: finds the dtype that a variable's gradients accumulate in; None for its own."""
        wanted = self.structure.accum_type

        def find(variable: Any) -> np.dtype[Any] | None:
            if wanted == "float16":
                return np.dtype(np.float16)
            is_narrow = np.dtype(variable.dtype).itemsize < np.dtype(np.float32).itemsize
            return np.dtype(np.float32) if wanted == "float32" and is_narrow else None

        return find

    @property
    def needs_running_mean(self) -> bool:
        """Whether a mean of gradients is kept, because float16 may not hold their sum."""
        return self.structure.accum_type == "float16"

    def with_values_of(self, other: OptimizerSpec) -> OptimizerSpec:
        """Returns this spec's structure with the values of another spec."""
        return dataclasses.replace(
            self, values=other.values, loss_scaling=other.loss_scaling, max_grad_norm=other.max_grad_norm
        )

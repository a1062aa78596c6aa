"""The base class of the optimizers of `poptorch.optim`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from ipu_pipeline.poptorch.optim.attributes import VariableAttributes
from ipu_pipeline.poptorch.optim.device_state import DeviceState, SavedState

__all__ = ["AVERAGES_TYPES", "AveragingOptimizer", "Optimizer"]

_GLOBAL_VARIABLES = ("loss_scaling",)  # attributes of an optimizer, not of its groups, that may be variable
_ACCUMULATION_TYPES = (torch.float32, torch.float16)


class Optimizer(torch.optim.Optimizer):
    """An optimizer with a state on the devices.

    Attributes:
      variable_attrs: which attributes `setOptimizer` may change.
      device_state: the state on the devices, or what is left of it.
      loss_scaling: the loss is multiplied by it and gradients are divided by it; may be set.
    """

    # The attributes that PopTorch adds and all groups share, with their defaults.
    own_defaults: ClassVar[Mapping[str, Any]] = {}

    variable_attrs: VariableAttributes
    device_state: DeviceState
    loss_scaling: float

    def sort_given(self, arguments: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Sorts a constructor's arguments; None stands for an argument's default.

        Args:
          arguments: the constructor's local variables, before it makes any of its own.

        Returns:
          The arguments for all groups, and those that set the attributes in `own_defaults`.
        """
        names = [name for name in arguments if name not in ("self", "params")]
        given = {name: arguments[name] for name in names if arguments[name] is not None}
        own = {name: given.pop(name) for name in self.own_defaults if name in given}
        return given, own

    def set_up(self, of_groups: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        """Completes construction after torch's constructor.

        Args:
          of_groups: the arguments that were given for all groups.
          own: the arguments that set attributes, as `sort_given` returned them.

        Raises:
          AssertionError: an accumulation type is neither torch.float32 nor torch.float16.
        """
        for name, value in {**self.own_defaults, **own}.items():
            if name.endswith("accum_type") and value not in _ACCUMULATION_TYPES:
                raise AssertionError("Accumulation types must be either torch.float32 or torch.float16")
            setattr(self, name, value)
        allowed = (*self.defaults, *_GLOBAL_VARIABLES)
        self.variable_attrs = VariableAttributes({"lr", *of_groups, *own}, allowed)
        self.device_state = DeviceState()

    @property
    def all_parameters(self) -> list[torch.Tensor]:
        """The parameters of all groups, in the order of their numbers in torch's `state_dict`."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that torch keeps, and the state on the devices.

        Returns:
          torch's keys, and `ipu_state` and `ipu_param`, see `SavedState`. Both are None if no model has
          been compiled with the optimizer. A name that models have for two parameters is followed by "#"
          and the parameter's number.
        """
        saved = self.device_state.read(self.all_parameters)
        if saved is None:
            return {**super().state_dict(), "ipu_state": None, "ipu_param": None}
        return {
            **super().state_dict(),
            "ipu_state": dict(saved.ipu_state),
            "ipu_param": dict(saved.ipu_param),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` returned, in place of the present state, before the next call of a model.

        What it lacks for a parameter starts from nothing, as in torch.

        Raises:
          RuntimeError: it has no `ipu_state`.
        """
        if "ipu_state" not in state_dict or "ipu_param" not in state_dict:
            raise RuntimeError(
                "Only IPU optimizer states can be loaded onto the IPU. The state must have the keys "
                "ipu_state and ipu_param, as state_dict() of an optimizer in poptorch.optim gives; it has "
                f"{sorted(state_dict)}."
            )
        super().load_state_dict(state_dict)
        saved = None
        if state_dict["ipu_state"] is not None:
            saved = SavedState(state_dict["ipu_state"], dict(state_dict["ipu_param"] or {}))
        self.device_state.load(saved, self.all_parameters)

    def __getstate__(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in (*self.own_defaults, "variable_attrs")}
        return {**super().__getstate__(), **own, "device_state": self.device_state.snapshot()}


AVERAGES_TYPES: Mapping[str, Any] = {
    "accum_type": torch.float32,
    "first_order_momentum_accum_type": torch.float32,
    "second_order_momentum_accum_type": torch.float32,
}


class AveragingOptimizer(Optimizer):
    """An optimizer that averages gradients and their squares, in the dtypes of `AVERAGES_TYPES`."""

    accum_type: torch.dtype
    first_order_momentum_accum_type: torch.dtype
    second_order_momentum_accum_type: torch.dtype

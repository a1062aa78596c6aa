"""Optimizers of `poptorch.optim`: torch's, with what PopTorch adds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch.optim.optimizer import ParamsT

from ipu_pipeline.poptorch import logs
from ipu_pipeline.poptorch.optim.device_state import DeviceState, SavedState


class VariableAttributes:
    """Knows which attributes are constant and which variable. An optimizer has one, as `variable_attrs`.

    Arguments given to the optimizer are variable, and so is the learning rate. Other attributes are
    constant at their defaults. `setOptimizer` changes variable attributes and compiles nothing.
    """

    def __init__(self, variable_attributes: Iterable[str], allowed_attributes: Iterable[str]) -> None:
        """Takes names.

        Args:
          variable_attributes: the names of the variable attributes.
          allowed_attributes: the names of all attributes.
        """
        self._allowed = tuple(allowed_attributes)
        self._variable = frozenset(variable_attributes)

    @property
    def variable(self) -> list[str]:
        """The names of the variable attributes, sorted."""
        return sorted(self._variable)

    def isConstant(self, attr: str) -> bool:
        """Whether an attribute is constant.

        Raises:
          AssertionError: there is no such attribute. The other methods raise this, too.
        """
        self._check(attr)
        return attr not in self._variable

    def markAsConstant(self, attr: str) -> None:
        """Makes an attribute constant."""
        self._check(attr)
        self._variable -= {attr}

    def markAsVariable(self, attr: str) -> None:
        """Makes an attribute variable."""
        self._check(attr)
        self._variable |= {attr}

    def _check(self, attr: str) -> None:
        if attr not in self._allowed:
            raise AssertionError(f"Unknown attribute {attr}, allowed values: {list(self._allowed)}")


_GLOBAL_VARIABLES = ("loss_scaling",)  # attributes of an optimizer, not of its groups, that may be variable
_ACCUMULATION_TYPES = (torch.float32, torch.float16)


class Optimizer(torch.optim.Optimizer):
    """An optimizer with a state on the devices.

    A constructor takes torch's arguments, and values for the attributes below. None stands for an
    argument's default. Signatures show which of the attributes an optimizer has.

    Attributes:
      variable_attrs: which attributes `setOptimizer` may change; not an argument.
      device_state: the state on the devices, or what is left of it; not an argument.
      loss_scaling: the loss is multiplied by it and the gradients are divided by it, so that small
        gradients survive float16; by default 1. It may be set.
      accum_type: the dtype that gradients accumulate in: torch.float32, the default, or torch.float16.
      first_order_momentum_accum_type: the same choice, for averages of gradients and momentum buffers.
      second_order_momentum_accum_type: the same choice, for averages of squared gradients.
      bias_correction: whether averages are corrected for starting at 0; by default True.
      max_grad_norm: gradients are scaled down to this norm over all of them; by default infinite.

    Raises:
      AssertionError: a type is neither torch.float32 nor torch.float16.
      ValueError: a value is out of its range.
    """

    # The attributes that PopTorch adds and all groups share, with their defaults.
    own_defaults: ClassVar[Mapping[str, Any]] = {}

    variable_attrs: VariableAttributes
    device_state: DeviceState
    loss_scaling: float

    def sort_arguments(self, arguments: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Sorts a constructor's arguments; None stands for an argument's default.

        Args:
          arguments: the constructor's local variables, before it makes any of its own.

        Returns:
          The arguments for all groups, and those that set the attributes in `own_defaults`.
        """
        names = [name for name in arguments if name not in ("self", "params")]
        settings = {name: arguments[name] for name in names if arguments[name] is not None}
        attributes = {name: settings.pop(name) for name in self.own_defaults if name in settings}
        return settings, attributes

    def set_up(self, of_groups: Mapping[str, Any], attributes: Mapping[str, Any]) -> None:
        """Completes construction after torch's constructor.

        Args:
          of_groups: the arguments that were given for all groups.
          attributes: the arguments that set attributes, as `sort_arguments` returned them.

        Raises:
          AssertionError: an accumulation type is neither torch.float32 nor torch.float16.
        """
        for name, value in {**self.own_defaults, **attributes}.items():
            if name.endswith("accum_type") and value not in _ACCUMULATION_TYPES:
                raise AssertionError("Accumulation types must be either torch.float32 or torch.float16")
            setattr(self, name, value)
        allowed = (*self.defaults, *_GLOBAL_VARIABLES)
        self.variable_attrs = VariableAttributes({"lr", *of_groups, *attributes}, allowed)
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
        attributes = {name: getattr(self, name) for name in (*self.own_defaults, "variable_attrs")}
        return {**super().__getstate__(), **attributes, "device_state": self.device_state.snapshot()}


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


class SGD(Optimizer, torch.optim.SGD):
    """torch's SGD with what PopTorch adds.

    Example:
      optimizer = poptorch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, loss_scaling=1024.0)
    """

    own_defaults: ClassVar[Mapping[str, Any]] = {
        "loss_scaling": 1.0,
        "use_combined_accum": False,
        "accum_type": torch.float32,
        "velocity_accum_type": torch.float32,
        "max_grad_norm": float("inf"),
    }

    use_combined_accum: bool
    accum_type: torch.dtype
    velocity_accum_type: torch.dtype
    max_grad_norm: float

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor | None = None,
        momentum: float | None = None,
        dampening: float | None = None,
        weight_decay: float | torch.Tensor | None = None,
        nesterov: bool | None = None,
        maximize: bool | None = None,
        foreach: bool | None = None,
        differentiable: bool | None = None,
        loss_scaling: float | None = None,
        velocity_scaling: float | None = None,
        use_combined_accum: bool | None = None,
        accum_type: torch.dtype | None = None,
        velocity_accum_type: torch.dtype | None = None,
        max_grad_norm: float | None = None,
        *,
        fused: bool | None = None,
    ) -> None:
        """Takes its own arguments; all others are `torch.optim.SGD`'s, or attributes of `Optimizer`.

        Args:
          velocity_scaling: in the combined variant, the momentum buffers are kept multiplied by it; by
            default 1. It may differ per group.
          use_combined_accum: if True, gradients are accumulated and momentum buffers kept in the dtype of
            the parameter, and the two types are ignored. By default False.
          velocity_accum_type: the same choice as for `accum_type`, for the momentum buffers.
        """
        of_groups, attributes = self.sort_arguments(locals())
        of_torch = {name: value for name, value in of_groups.items() if name != "velocity_scaling"}
        torch.optim.SGD.__init__(self, params, **of_torch)
        if use_combined_accum:
            scaling = 1.0 if velocity_scaling is None else velocity_scaling
            self.defaults["velocity_scaling"] = scaling
            for group in self.param_groups:
                group.setdefault("velocity_scaling", scaling)
        elif velocity_scaling is not None:
            logs.warn_once(
                "velocity_scaling value ignored when using the separate variant "
                "(use_combined_accum=False): its momentum buffers are float32, or what velocity_accum_type "
                "says, and not scaled."
            )
        if use_combined_accum and not (accum_type is None and velocity_accum_type is None):
            logs.warn_once(
                "accum_type and velocity_accum_type are ignored when using the combined variant "
                "(use_combined_accum=True): it has one tensor, in the dtype of the parameter."
            )
        self.set_up(of_groups, attributes)


class Adam(AveragingOptimizer, torch.optim.Adam):
    """torch's Adam with what PopTorch adds."""

    own_defaults: ClassVar[Mapping[str, Any]] = {
        "loss_scaling": 1.0,
        **AVERAGES_TYPES,
        "max_grad_norm": float("inf"),
    }

    max_grad_norm: float

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        amsgrad: bool | None = None,
        foreach: bool | None = None,
        maximize: bool | None = None,
        capturable: bool | None = None,
        differentiable: bool | None = None,
        fused: bool | None = None,
        loss_scaling: float | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
        max_grad_norm: float | None = None,
        *,
        decoupled_weight_decay: bool | None = None,
    ) -> None:
        """Takes arguments that are `torch.optim.Adam`'s, or attributes of `Optimizer`.

        A model can only be trained without `amsgrad`.
        """
        of_torch, attributes = self.sort_arguments(locals())
        torch.optim.Adam.__init__(self, params, **of_torch)
        self.set_up(of_torch, attributes)


class AdamW(AveragingOptimizer, torch.optim.AdamW):
    """torch's AdamW with what PopTorch adds."""

    own_defaults: ClassVar[Mapping[str, Any]] = {
        "loss_scaling": 1.0,
        "bias_correction": True,
        **AVERAGES_TYPES,
        "max_grad_norm": float("inf"),
    }

    bias_correction: bool
    max_grad_norm: float

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        amsgrad: bool | None = None,
        maximize: bool | None = None,
        foreach: bool | None = None,
        capturable: bool | None = None,
        differentiable: bool | None = None,
        fused: bool | None = None,
        loss_scaling: float | None = None,
        bias_correction: bool | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        """Takes arguments that are `torch.optim.AdamW`'s, or attributes of `Optimizer`.

        A model can only be trained without `amsgrad`.
        """
        of_torch, attributes = self.sort_arguments(locals())
        torch.optim.AdamW.__init__(self, params, **of_torch)
        self.set_up(of_torch, attributes)


class RMSprop(AveragingOptimizer, torch.optim.RMSprop):
    """torch's RMSprop with what PopTorch adds."""

    own_defaults: ClassVar[Mapping[str, Any]] = {
        "loss_scaling": 1.0,
        **AVERAGES_TYPES,
        "use_tf_variant": False,
    }

    use_tf_variant: bool

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor | None = None,
        alpha: float | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        momentum: float | None = None,
        centered: bool | None = None,
        foreach: bool | None = None,
        maximize: bool | None = None,
        differentiable: bool | None = None,
        loss_scaling: float | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
        use_tf_variant: bool | None = None,
        *,
        capturable: bool | None = None,
    ) -> None:
        """Takes its own argument; all others are `torch.optim.RMSprop`'s, or attributes of `Optimizer`.

        Args:
          use_tf_variant: if True, TensorFlow's formula. The average of squares starts at 1, `eps` is inside
            the root, and the momentum buffer takes in the learning rate. By default False.
        """
        of_torch, attributes = self.sort_arguments(locals())
        torch.optim.RMSprop.__init__(self, params, **of_torch)
        self.set_up(of_torch, attributes)


class LAMB(AveragingOptimizer):
    """LAMB: Adam whose step per parameter is as large as the parameter.

    `step` computes an update on the CPU, for comparisons.

    Source: You et al., Large Batch Optimization for Deep Learning (arXiv:1904.00962), algorithm 2, with the
    function phi(z) = min(z, max_weight_norm).
    """

    own_defaults: ClassVar[Mapping[str, Any]] = {
        "loss_scaling": 1.0,
        "bias_correction": True,
        **AVERAGES_TYPES,
    }

    bias_correction: bool

    def __init__(
        self,
        params: ParamsT,
        lr: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        bias_correction: bool | None = None,
        loss_scaling: float | None = None,
        max_weight_norm: float | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
    ) -> None:
        """Takes its own arguments; all others are attributes of `Optimizer`.

        Args:
          params: parameters, or dicts with groups of them.
          lr: the learning rate; by default 0.001.
          betas: how much is kept of the averages of gradients and of their squares; (0.9, 0.999) by
            default.
          eps: added to the denominator; by default 1e-8.
          weight_decay: the share of the weights that is added to the update; by default 0.01.
          max_weight_norm: a parameter counts as no larger than this; by default 65500.
        """
        of_groups, attributes = self.sort_arguments(locals())
        defaults: dict[str, Any] = {
            "lr": 1e-3,
            "betas": (0.9, 0.999),
            "eps": 1e-8,
            "weight_decay": 1e-2,
            "max_weight_norm": 65500.0,  # about the largest float16
        }
        defaults |= of_groups
        for name in ("lr", "eps", "weight_decay", "max_weight_norm"):
            if not defaults[name] >= 0:
                raise ValueError(f"LAMB: {name} must be at least 0; got {defaults[name]}.")
        if len(defaults["betas"]) != 2 or not all(0 <= beta < 1 for beta in defaults["betas"]):
            raise ValueError(f"LAMB: betas must be two numbers from 0 to below 1; got {defaults['betas']}.")
        torch.optim.Optimizer.__init__(self, params, defaults)
        self.set_up(of_groups, attributes)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Makes an update on the CPU.

        Args:
          closure: computes the loss and the gradients again.

        Returns:
          What the closure returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state.update(
                step=0, exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter)
            )
        state["step"] += 1
        beta1, beta2 = group["betas"]
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        corrections = (1.0, 1.0)
        if self.bias_correction:
            corrections = (1 - beta1 ** state["step"], 1 - beta2 ** state["step"])
        update = (mean / corrections[0]) / (square.sqrt() / math.sqrt(corrections[1]) + group["eps"])
        update += group["weight_decay"] * parameter
        weight_norm = min(float(parameter.norm()), group["max_weight_norm"])
        update_norm = float(update.norm())
        ratio = weight_norm / update_norm if weight_norm > 0 and update_norm > 0 else 1.0
        parameter.sub_(update, alpha=group["lr"] * ratio)

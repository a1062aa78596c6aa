"""Matrix products that are computed part by part, and convolutions side by side."""

from __future__ import annotations

from typing import Any, Self

import torch

from ipu_pipeline.ground.checks import is_int, is_real
from ipu_pipeline.poptorch import markers
from ipu_pipeline.poptorch.enums import MatMulSerializationMode, MultiConvPlanType
from ipu_pipeline.poptorch.errors import Error
from ipu_pipeline.poptorch.logs import warn_once
from ipu_pipeline.poptorch.operations.checks import check_int, check_tensor, fail, instance, member

# Matrix products.

SERIALIZED = f"{markers.NAMESPACE}::serialized_matmul"

_mode = member(MatMulSerializationMode)
_factor = instance(int, "an integer")
_flag = instance(bool, "a bool")


def serializedMatMul(
    lhs: torch.Tensor,
    rhs: torch.Tensor,
    mode: MatMulSerializationMode,
    factor: int = 0,
    keep_precision: bool = False,
) -> torch.Tensor:
    """Computes `torch.matmul(lhs, rhs)`, on the devices in parts, which needs less memory.

    The backward has the same parts. On the CPU the product is computed in one piece. Parts save memory that
    XLA needs besides the operands and the result: on CPU devices, copies of float16 operands in float32.
    Cut the longest dimension, because the others stay whole.

    Args:
      lhs: a tensor of shape (..., m, n).
      rhs: a tensor of shape (..., n, p).
      mode: the dimension to cut: `InputChannels` m, `ReducingDim` n, `OutputChannels` p; `Disabled` none.
      factor: the number of parts, which must divide the dimension. Not used for `Disabled`.
      keep_precision: whether parts of float16 and bfloat16 are added in float32 where they are added up,
        by `ReducingDim` and in the backward.

    Returns:
      A tensor of shape (..., m, p).

    Raises:
      AssertionError: the mode, the factor or keep_precision is of a wrong type.
      Error: the factor does not divide the dimension, or there is no such dimension.
    """
    for tensor in (lhs, rhs):
        check_tensor(tensor, "serializedMatMul must take torch.tensor arguments.")
    _mode("serializedMatMul: mode", mode)
    _factor("serializedMatMul: factor", factor)
    _flag("serializedMatMul: keep_precision", keep_precision)
    if mode is MatMulSerializationMode.Disabled:
        return torch.matmul(lhs, rhs)
    cut = rhs if mode is MatMulSerializationMode.OutputChannels else lhs
    if cut.dim() < (1 if mode is MatMulSerializationMode.ReducingDim else 2):
        raise Error(
            f"serializedMatMul: {mode} needs a matrix; {'rhs' if cut is rhs else 'lhs'} has "
            f"{cut.dim()} dimensions."
        )
    length = cut.shape[-2 if mode is MatMulSerializationMode.InputChannels else -1]
    check_int(factor, "serializedMatMul: factor is the number of parts.")
    if length % factor:
        raise Error(
            f"serializedMatMul: factor must divide the dimension that {mode} cuts, {length}; got {factor}."
        )
    product: torch.Tensor = _OPERATIONS.serialized_matmul(lhs, rhs, mode.value, factor, keep_precision)
    return product


class SerializedLinear(torch.nn.Linear):
    """`torch.nn.Linear`, whose product is a `serializedMatMul`."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        factor: int,
        bias: bool = False,
        mode: MatMulSerializationMode = MatMulSerializationMode.OutputChannels,
    ) -> None:
        """Makes the layer.

        Args:
          in_features: the size of the input's last dimension.
          out_features: the size of the output's last dimension.
          factor: the number of parts; see `serializedMatMul`.
          bias: whether a bias is added.
          mode: the dimension to cut.
        """
        super().__init__(in_features, out_features, bias)
        self.mode, self.factor = mode, factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Computes the product, of shape (..., out_features), plus the bias.

        Raises:
          AssertionError, Error: as `serializedMatMul`.
        """
        product = serializedMatMul(x, self.weight.t(), self.mode, self.factor)
        return product if self.bias is None else product + self.bias


def _product(
    lhs: torch.Tensor, rhs: torch.Tensor, mode: str, factor: int, keep_precision: bool
) -> torch.Tensor:
    del mode, factor, keep_precision
    return torch.matmul(lhs, rhs)


_library = torch.library.Library(markers.NAMESPACE, "FRAGMENT")
_library.define(
    "serialized_matmul(Tensor lhs, Tensor rhs, str mode, int factor, bool keep_precision) -> Tensor"
)
_library.impl("serialized_matmul", _product, "CompositeImplicitAutograd")
_OPERATIONS = getattr(torch.ops, markers.NAMESPACE)


# Convolutions.


class MultiConv:
    """A context manager whose convolutions are one operation in PopTorch.

    On JAX devices XLA plans the convolutions, and they are computed as without it. The methods' arguments
    are checked, also against the number of convolutions, and warn that they have no effect. On the CPU it
    does nothing.

    Example:
      with poptorch.MultiConv().planType(poptorch.MultiConvPlanType.Parallel):
          y, z = self.first(x), self.second(x)
    """

    def __init__(self) -> None:
        """Starts without settings."""
        self._counts: dict[str, int] = {}

    def availableMemoryProportions(self, value: float | list[float]) -> Self:
        """Has no effect.

        Args:
          value: one number for all convolutions, or one for each, from 0 to 1.

        Raises:
          AssertionError: it is not such a number.
        """
        for proportion in self._note("availableMemoryProportions", value):
            if not is_real(proportion) or not 0 <= proportion <= 1:
                raise fail("MultiConv.availableMemoryProportions:", "floats from 0 to 1", proportion)
        return self

    def partialsTypes(self, value: torch.dtype | list[torch.dtype]) -> Self:
        """Has no effect.

        Args:
          value: `torch.float32` or `torch.float16`, for all convolutions, or one for each.

        Raises:
          ValueError: it is neither.
        """
        for dtype in self._note("partialsTypes", value):
            if dtype not in (torch.float32, torch.float16):
                raise ValueError(
                    f"MultiConv.partialsTypes: must be torch.float32 or torch.float16; got {dtype!r}."
                )
        return self

    def planType(self, value: MultiConvPlanType) -> Self:
        """Has no effect.

        Args:
          value: whether they run at the same time.

        Raises:
          AssertionError: it is not a plan.
        """
        member(MultiConvPlanType)("MultiConv.planType:", value)
        return self._tell("planType")

    def perConvReservedTiles(self, value: int) -> Self:
        """Has no effect.

        Args:
          value: a number of tiles.

        Raises:
          AssertionError: it is not such a number.
        """
        if not is_int(value) or value < 0:
            raise fail("MultiConv.perConvReservedTiles:", "an integer from 0", value)
        return self._tell("perConvReservedTiles")

    def cycleBackOff(self, value: float) -> Self:
        """Has no effect.

        Args:
          value: a proportion, from 0 to 1.

        Raises:
          AssertionError: it is not such a number.
        """
        if not is_real(value) or not 0 <= value <= 1:
            raise fail("MultiConv.cycleBackOff:", "from 0 to 1", value)
        return self._tell("cycleBackOff")

    def enableConvDithering(self, value: bool | list[bool]) -> Self:
        """Has no effect.

        Args:
          value: one boolean for all convolutions, or one for each.

        Raises:
          ValueError: it is not a boolean.
        """
        for flag in self._note("enableConvDithering", value):
            if not isinstance(flag, bool):
                raise ValueError(f"MultiConv.enableConvDithering: must be booleans; got {flag!r}.")
        return self

    def __enter__(self) -> Self:
        """Begins the `MultiConv`."""
        if markers.is_traced():
            markers.begin_multi_conv()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        """Ends the `MultiConv`."""
        if markers.is_traced() and kind is None:
            markers.end_multi_conv(self._counts)

    def _note(self, name: str, value: Any) -> list[Any]:
        self._tell(name)
        if isinstance(value, (list, tuple)):
            self._counts[name] = len(value)
            return list(value)
        self._counts.pop(name, None)
        return [value]

    def _tell(self, name: str) -> Self:
        warn_once(f"poptorch.MultiConv.{name} has no effect: XLA plans convolutions by itself.")
        return self

"""Prints tensors and their gradients on the standard error while a model runs."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch

from ipu_pipeline.poptorch import markers
from ipu_pipeline.poptorch.errors import Error
from ipu_pipeline.poptorch.operations.checks import Check, check_int, check_tensor, instance

PRINT = f"{markers.NAMESPACE}::print_tensor"

FloatFormat: TypeAlias = Literal["auto", "fixed", "scientific", "none"]
_FORMATS = get_args(FloatFormat)
_format: Check[FloatFormat] = Check(
    f"one of {', '.join(_FORMATS)}", lambda value: value in _FORMATS, error=Error
)
_string = instance(str, "a string", Error)
_flag = instance(bool, "a bool", Error)


@dataclass(frozen=True)
class Layout:
    """The format of printed arrays, by the arguments of `ipu_print_tensor`."""

    summarise_threshold: int = 1000
    edge_items: int = 3
    max_line_width: int = 75
    digits: int = 4
    float_format: FloatFormat = "auto"
    separator: str = " "
    open_bracket: str = "["
    close_bracket: str = "]"

    def __post_init__(self) -> None:
        """Checks the values."""
        for name in ("summarise_threshold", "edge_items", "max_line_width", "digits"):
            minimum = 1 if name == "edge_items" else 0
            check_int(getattr(self, name), f"ipu_print_tensor: {name} is a number.", minimum)
        _format("ipu_print_tensor: float_format", self.float_format)
        for name in ("separator", "open_bracket", "close_bracket"):
            _string(f"ipu_print_tensor: {name}", getattr(self, name))

    def write(self, array: np.ndarray[Any, Any]) -> str:
        """Writes an array as text; a scalar as a number."""
        array = array.astype(np.float32) if array.dtype.kind == "V" else array  # bfloat16
        is_abridged = array.size > self.summarise_threshold
        elements = _edges(array, self.edge_items) if is_abridged else array
        texts = iter(self._write_numbers(elements.ravel()))
        return self._nest(array.shape, texts, is_abridged, 0)

    def _write_numbers(self, values: np.ndarray[Any, Any]) -> list[str]:
        if values.dtype.kind != "f":
            texts = [str(value) for value in values.tolist()]
        else:
            form = self._form(values.astype(np.float64))
            texts = [format(value, form) for value in values.tolist()]
        width = max(map(len, texts), default=0)
        return [text.rjust(width) for text in texts]

    def _form(self, values: np.ndarray[Any, Any]) -> str:
        letter = {"fixed": "f", "scientific": "e", "none": "g"}.get(self.float_format)
        if letter is None:
            sizes = np.abs(values[np.isfinite(values) & (values != 0)])
            is_wide = sizes.size and (sizes.max() >= 1e8 or sizes.min() < 10.0**-self.digits)
            letter = "e" if is_wide or (sizes.size and sizes.max() / sizes.min() > 1e8) else "f"
        return f".{max(self.digits, 1) if letter == 'g' else self.digits}{letter}"

    def _nest(self, shape: tuple[int, ...], texts: Any, is_abridged: bool, depth: int) -> str:
        if not shape:
            return str(next(texts))
        length, inner = shape[0], shape[1:]
        cut = is_abridged and length > 2 * self.edge_items
        count = 2 * self.edge_items if cut else length
        parts = [self._nest(inner, texts, is_abridged, depth + 1) for _number in range(count)]
        if cut:
            parts.insert(self.edge_items, "...")
        indent = "\n" + " " * ((depth + 1) * len(self.open_bracket))
        between = self.separator.rstrip() + indent
        body = between.join(parts) if inner else self._fill(parts, indent)
        return f"{self.open_bracket}{body}{self.close_bracket}"

    def _fill(self, parts: list[str], indent: str) -> str:
        lines, line = [], ""
        for part in parts:
            joined = f"{line}{self.separator}{part}" if line else part
            if line and self.max_line_width and len(indent) - 1 + len(joined) > self.max_line_width:
                lines.append(line + self.separator.rstrip())
                line = part
            else:
                line = joined
        return indent.join([*lines, line])


def _edges(array: np.ndarray[Any, Any], edge: int) -> np.ndarray[Any, Any]:
    for axis, length in enumerate(array.shape):
        if length > 2 * edge:
            array = np.take(array, [*range(edge), *range(length - edge, length)], axis)
    return array


def print_array(title: str, layout: Layout, array: Any) -> None:
    """Prints an array on the standard error."""
    text = layout.write(np.asarray(array))
    before = f"{title}:{chr(10) if chr(10) in text else ' '}" if title else ""
    sys.stderr.write(
        f"{before}{text}\n"
    )  # in one piece, because several devices may print at the same time
    sys.stderr.flush()


def ipu_print_tensor(
    tensor: torch.Tensor,
    title: str = "",
    print_gradient: bool = True,
    summarise_threshold: int = 1000,
    edge_items: int = 3,
    max_line_width: int = 75,
    digits: int = 4,
    float_format: FloatFormat = "auto",
    separator: str = " ",
    open_bracket: str = "[",
    close_bracket: str = "]",
) -> torch.Tensor:
    """Prints a tensor on the standard error, once per micro-batch, and in training its gradient.

    With several devices, lines come in the order in which the devices compute them. A call of a wrapped
    model returns when everything has been printed. The gradient is of the micro-batch's loss, times the
    loss scaling, and not yet averaged over micro-batches.

    Args:
      tensor: the tensor, of any shape and dtype.
      title: text before it; "<title>_gradient" stands before its gradient.
      print_gradient: whether the gradient is printed.
      summarise_threshold: tensors with more elements are abridged.
      edge_items: the number of elements that an abridged tensor has at both ends of each dimension.
      max_line_width: the number of characters in a line; 0 for no limit.
      digits: digits behind the decimal point, or significant ones if `float_format` is "none".
      float_format: "auto" (fixed, or scientific where numbers are very large or very different), "fixed",
        "scientific", "none" (the shorter one for each number).
      separator: text between elements.
      open_bracket: text before the elements of a dimension.
      close_bracket: text behind them.

    Returns:
      The same values. Use these from here on: values that are not used are not printed.

    Raises:
      Error: it is not a tensor, or an argument of the layout is invalid.
    """
    check_tensor(tensor, "ipu print tensor must take a torch.tensor argument.")
    _string("ipu_print_tensor: title", title)
    _flag("ipu_print_tensor: print_gradient", print_gradient)
    layout = (
        summarise_threshold,
        edge_items,
        max_line_width,
        digits,
        float_format,
        separator,
        open_bracket,
        close_bracket,
    )
    Layout(*layout)  # checks them
    printed: torch.Tensor = _OPERATIONS.print_tensor(tensor, title, print_gradient, *layout)
    return printed


def _print(tensor: torch.Tensor, title: str, print_gradient: bool, *layout: Any) -> torch.Tensor:
    del print_gradient
    plain = tensor.detach()
    plain = plain.float() if plain.dtype is torch.bfloat16 else plain
    print_array(title, Layout(*layout), plain.numpy())
    return tensor.clone()


def _shape(tensor: torch.Tensor, *arguments: Any) -> torch.Tensor:
    del arguments
    return torch.empty_like(tensor)


def _note(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    del output
    ctx.arguments = inputs[1:]


def _print_gradient(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    title, print_gradient, *layout = ctx.arguments
    if print_gradient:
        gradient = _OPERATIONS.print_tensor(gradient, f"{title}_gradient", False, *layout)
    return gradient, *[None] * len(ctx.arguments)


_library = torch.library.Library(markers.NAMESPACE, "FRAGMENT")
_library.define(
    "print_tensor(Tensor tensor, str title, bool print_gradient, int summarise_threshold, int edge_items, "
    "int max_line_width, int digits, str float_format, str separator, str open_bracket, str close_bracket) "
    "-> Tensor"
)
_library.impl("print_tensor", _print, "CPU")
_library.impl("print_tensor", _shape, "Meta")
torch.library.register_autograd(PRINT, _print_gradient, setup_context=_note, lib=_library)
_OPERATIONS = getattr(torch.ops, markers.NAMESPACE)

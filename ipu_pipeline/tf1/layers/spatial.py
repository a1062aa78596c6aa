"""What layers with a window that moves over height and width share: arguments and checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax

from ipu_pipeline.ground.checks import is_integer

__all__ = ["Pair", "check_data_format", "check_images", "find_one", "find_padding", "find_pair"]

Pair: TypeAlias = int | Sequence[int]


def find_pair(layer: str, argument: str, value: Any) -> tuple[int, int]:
    """The sizes along height and width.

    Args:
      layer: the class of the layer, for the error.
      argument: what the argument is called.
      value: two positive integers, or one for both.

    Raises:
      ValueError: it is something else.
    """
    sizes = tuple(value) if isinstance(value, Sequence) else (value, value)
    is_usable = len(sizes) == 2 and all(is_integer(size, 1) for size in sizes)
    if not is_usable:
        raise ValueError(
            f"{layer}: {argument} must be a positive integer or two of them, (height, width); got "
            f"{value!r}."
        )
    return int(sizes[0]), int(sizes[1])


def find_one(layer: str, argument: str, value: Any) -> tuple[int]:
    """The size along one axis.

    Args:
      layer: the class of the layer, for the error.
      argument: what the argument is called.
      value: a positive integer, or one in a sequence.

    Raises:
      ValueError: it is something else.
    """
    sizes = tuple(value) if isinstance(value, Sequence) else (value,)
    if len(sizes) != 1 or not is_integer(sizes[0]):
        raise ValueError(f"{layer}: {argument} must be a positive integer; got {value!r}.")
    if sizes[0] < 1:
        raise ValueError(f"{layer}: {argument} must be a positive integer; got {value!r}.")
    return (int(sizes[0]),)


def find_padding(layer: str, padding: Any) -> str:
    """The padding in lower case.

    Args:
      layer: the class of the layer, for the error.
      padding: "valid" or "same", in any case.

    Raises:
      ValueError: it is something else.
    """
    if not isinstance(padding, str) or padding.lower() not in ("valid", "same"):
        raise ValueError(f"{layer}: padding must be 'valid' or 'same'; got {padding!r}.")
    return padding.lower()


def check_data_format(layer: str, data_format: Any) -> None:
    """Lets None and "channels_last" pass.

    Args:
      layer: the class of the layer, for the error.
      data_format: in any case.

    Raises:
      ValueError: it is something else.
    """
    is_known = data_format is None or str(data_format).lower() == "channels_last"
    if not is_known:
        raise ValueError(
            f"{layer}: data_format must be 'channels_last' (or None, which is the same); got "
            f"{data_format!r}. jnp.moveaxis(x, 1, -1) puts the channels last."
        )


def check_images(full_name: str, inputs: jax.Array, window: Sequence[int], padding: str) -> None:
    """Checks that inputs are [batch, height, width, channels], and large enough for one window.

    Args:
      full_name: what the error calls the layer.
      inputs: the inputs.
      window: the extent of the window along height and width.
      padding: "valid" or "same".

    Raises:
      ValueError: they are not.
    """
    if inputs.ndim != 4:
        raise ValueError(
            f"{full_name} needs inputs of rank 4, [batch, height, width, channels]; got shape "
            f"{inputs.shape}."
        )
    needed = window if padding == "valid" else (1, 1)
    if any(size < least for size, least in zip(inputs.shape[1:3], needed, strict=True)):
        raise ValueError(
            f"{full_name} with padding {padding!r} needs inputs of at least {needed[0]} by {needed[1]}, "
            f"[batch, height, width, channels]; got shape {inputs.shape}. Give larger inputs, a smaller "
            "window, or padding='same'."
        )

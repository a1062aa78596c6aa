"""What layers with a window that moves over height and width share: attributes, arguments and checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import jax

from ipu_pipeline.ground.checks import is_integer
from ipu_pipeline.tf1.layers.arguments import argument
from ipu_pipeline.tf1.layers.base import Layer

__all__ = [
    "Padding",
    "Pair",
    "Windowed",
    "check_images",
    "data_format",
    "find_one",
    "find_padding",
    "find_pair",
]

Padding: TypeAlias = Literal["valid", "same", "VALID", "SAME"]
Pair: TypeAlias = int | Sequence[int]


class Windowed(Layer):
    """A layer with a window, whose sizes are kept as tuples, whatever they were given as."""

    kernel_size: tuple[int, ...]
    pool_size: tuple[int, ...]
    strides: tuple[int, ...]
    dilation_rate: tuple[int, ...]


def find_pair(layer: str, argument: str, value: Any) -> tuple[int, int]:
    """The sizes along height and width."""
    sizes = tuple(value) if isinstance(value, Sequence) else (value, value)
    is_usable = len(sizes) == 2 and all(is_integer(size, 1) for size in sizes)
    if not is_usable:
        raise ValueError(
            f"{layer}: {argument} must be a positive integer or two of them, (height, width); got "
            f"{value!r}."
        )
    return int(sizes[0]), int(sizes[1])


def find_one(layer: str, argument: str, value: Any) -> tuple[int]:
    """The size along one axis."""
    sizes = tuple(value) if isinstance(value, Sequence) else (value,)
    if len(sizes) != 1 or not is_integer(sizes[0], 1):
        raise ValueError(f"{layer}: {argument} must be a positive integer; got {value!r}.")
    return (int(sizes[0]),)


def find_padding(layer: str, argument: str, value: Any) -> str:
    """The padding in lower case."""
    if not isinstance(value, str) or value.lower() not in ("valid", "same"):
        raise ValueError(f"{layer}: {argument} must be 'valid' or 'same'; got {value!r}.")
    return value.lower()


def data_format() -> Any:
    """The argument `data_format`, which is None or "channels_last", in any case."""
    return argument(
        'only "channels_last", which None stands for.', _check_data_format, default=None, attribute=""
    )


def _check_data_format(layer: str, argument: str, value: Any) -> None:
    is_known = value is None or str(value).lower() == "channels_last"
    if not is_known:
        raise ValueError(
            f"{layer}: {argument} must be 'channels_last' (or None, which is the same); got "
            f"{value!r}. jnp.moveaxis(x, 1, -1) puts the channels last."
        )


def check_images(full_name: str, inputs: jax.Array, window: Sequence[int], padding: str) -> None:
    """Checks that inputs are [batch, height, width, channels], and large enough for one window."""
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

from __future__ import annotations

import copy
import dataclasses
import inspect
import typing

import jax.numpy as jnp
import pytest

from ipu_pipeline import layers
from ipu_pipeline.tf1.layers import arguments, base

LAYERS = [
    kind for name, kind in vars(layers).items() if name in layers.__all__ and kind is not layers.Layer
]
COMMON = {"name", "dtype", "param_dtype", "trainable"}


@pytest.mark.parametrize("kind", LAYERS)
def test_help_says_what_each_argument_is(kind):
    described = inspect.getdoc(kind.__init__)
    parameters = inspect.signature(kind).parameters
    for name, parameter in parameters.items():
        assert f"\n  {name}: " in described
        assert isinstance(parameter.annotation, str)
        assert "InitVar" not in parameter.annotation
    keyword_only = {name for name, one in parameters.items() if one.kind is one.KEYWORD_ONLY}
    assert COMMON & parameters.keys() <= keyword_only
    assert set(typing.get_type_hints(kind.__init__)) == {*parameters, "return"}


def test_what_is_no_attribute():
    dense = layers.Dense(3, "relu")
    assert vars(dense).keys() >= {"units", "use_bias", "name", "trainable"}
    for owner in (dense, layers.Dense):
        for name in ("activation", "kernel_initializer", "arguments"):
            assert not hasattr(owner, name)
    assert not hasattr(layers.Dense, "units")
    assert not dataclasses.is_dataclass(dense)
    assert copy.copy(dense).units == 3
    assert layers.Conv2D(3, 2).strides == layers.Conv2DTranspose(3, 2).dilation_rate == (1, 1)


def test_python_s_own_errors():
    for make, message in (
        (lambda: layers.Dense(), r"Dense.__init__\(\) missing 1 required positional argument: 'units'"),
        (lambda: layers.Dense(3, unit=3), r"Dense.__init__\(\) got an unexpected keyword argument 'unit'"),
        (
            lambda: layers.Dense(*range(6)),
            r"Dense.__init__\(\) takes from 2 to 6 positional arguments but 7",
        ),
        (lambda: layers.Flatten("a"), r"Flatten.__init__\(\) takes 1 positional argument but 2"),
    ):
        with pytest.raises(TypeError, match=message):
            make()


def test_classes_of_a_user_take_arguments_of_their_own():
    class Wide(layers.Dense):
        scale: float = 2.0
        activation = "mine"

        def __init__(self, factor, **options):
            super().__init__(4 * factor, "relu", **options)
            self.kernel_initializer = factor

    wide = Wide(2, dtype=jnp.float16, name="wide")
    assert (wide.units, wide.name, wide.dtype, wide.scale) == (8, "wide", jnp.float16, 2.0)
    assert (wide.activation, wide.kernel_initializer) == ("mine", 2)
    with pytest.raises(TypeError, match="Wide: use_bias must be True or False; got 1"):
        Wide(2, use_bias=1)


def test_arguments_are_inherited_and_said_anew():
    @arguments.with_arguments
    class First(base.PlainLayer):
        size: int = arguments.argument("the size.", arguments.check_positive_integer)
        rate: float = arguments.argument("the rate.", default=0.5, attribute="_{}")

        def _apply(self, inputs):
            return inputs

    @arguments.with_arguments
    class Second(First):
        rate: float = arguments.argument("another rate.", default=1.5, attribute="_{}")
        more: int = arguments.argument("more.", default=2)

        def _complete(self, given):
            self.sum = given["size"] + given["more"]

    assert str(inspect.signature(Second)) == (
        "(size: 'int', rate: 'float' = 1.5, more: 'int' = 2, *, name: 'str | None' = None) -> None"
    )
    second = Second(3, name="b")
    assert (second.size, second._rate, second.sum, second.name) == (3, 1.5, 5, "b")
    assert First(3)._rate == 0.5
    assert "rate: another rate." in Second.__init__.__doc__
    with pytest.raises(ValueError, match="Second: size must be a positive integer; got 0"):
        Second(0)

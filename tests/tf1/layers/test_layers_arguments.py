from __future__ import annotations

import copy
import dataclasses
import inspect
import typing

import jax.numpy as jnp
import numpy as np
import pytest

from ipu_pipeline import engine, layers

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


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: layers.Dense(), TypeError, r"Dense.__init__\(\) missing 1 required positional argument"),
        (lambda: layers.Dense(3, unit=3), TypeError, "got an unexpected keyword argument 'unit'"),
        (lambda: layers.Dense(*range(6)), TypeError, r"takes from 2 to 6 positional arguments but 7"),
        (lambda: layers.Flatten("a"), TypeError, "takes 1 positional argument but 2"),
        (lambda: layers.Dense(0), ValueError, "units must be a positive integer; got 0"),
        (lambda: layers.Dense(2, activation="rellu"), ValueError, "no activation 'rellu'"),
        (lambda: layers.Dense(2, kernel_initializer="x"), ValueError, "no initializer 'x'"),
        (lambda: layers.Dense(2, use_bias="no"), TypeError, "use_bias must be True or False"),
        (lambda: layers.Dense(2, dtype="int32"), ValueError, "Dense: dtype must be a floating-point one"),
        (lambda: layers.Dense(4, trainable="no"), TypeError, "trainable must be True or False; got 'no'"),
        (lambda: layers.Dropout(1.0), ValueError, "rate must be at least 0 and below 1"),
        (lambda: layers.Dropout(0.5, seed=True), TypeError, "seed must be an integer or None"),
        (lambda: layers.Dropout(0.5, seed=2**32), ValueError, "seed must have 32 bits"),
        (lambda: layers.Embedding(0, 2), ValueError, "Embedding: input_dim must be a positive integer"),
        (lambda: layers.Embedding(2, 2.0), ValueError, "output_dim must be a positive integer; got 2.0"),
        (lambda: layers.Conv2D(True, 3), ValueError, "filters must be a positive integer; got True"),
        (lambda: layers.Conv2D(2, (3, 0)), ValueError, r"positive integer or two of them.*got \(3, 0\)"),
        (lambda: layers.Conv2D(2, (3, 3, 3)), ValueError, r"kernel_size must be .* got \(3, 3, 3\)"),
        (lambda: layers.Conv2D(2, "33"), ValueError, "kernel_size must be .* got '33'"),
        (lambda: layers.Conv2D(2, 3, strides=1.0), ValueError, "strides must be a positive integer"),
        (lambda: layers.Conv2D(2, 3, dilation_rate=-1), ValueError, "dilation_rate must be a positive"),
        (lambda: layers.Conv2D(4, 3, groups=0), ValueError, "groups must be a positive integer; got 0"),
        (lambda: layers.Conv2D(4, 3, groups=3), ValueError, "divide filters; got groups=3 and filters=4"),
        (lambda: layers.Conv2D(2, 3, padding="causal"), ValueError, "'valid' or 'same'; got 'causal'"),
        (lambda: layers.Conv2D(2, 3, padding=1), ValueError, "padding must be 'valid' or 'same'; got 1"),
        (lambda: layers.Conv2D(2, 3, data_format="channels_first"), ValueError, "must be 'channels_last'"),
        (lambda: layers.Conv1D(3, (2, 2)), ValueError, "kernel_size must be a positive integer"),
        (lambda: layers.Conv1D(3, 0), ValueError, "kernel_size must be a positive integer; got 0"),
        (lambda: layers.Conv1D(3, 2, padding="full"), ValueError, "padding must be"),
        (lambda: layers.DepthwiseConv2D(2, depth_multiplier=0), ValueError, "depth_multiplier must be"),
        (lambda: layers.Conv2DTranspose(2, 2, output_padding=1), NotImplementedError, "must be None"),
        (lambda: layers.MaxPooling2D(0), ValueError, "Pooling2D: pool_size must be a positive integer or"),
        (lambda: layers.AveragePooling2D(strides=(1, 0)), ValueError, r"strides must be .* got \(1, 0\)"),
        (lambda: layers.MaxPooling2D(padding="full"), ValueError, "'valid' or 'same'; got 'full'"),
        (lambda: layers.GlobalAveragePooling2D(keepdims=1), TypeError, "must be True or False"),
        (lambda: layers.BatchNormalization((1, 2)), ValueError, r"axis must be an integer; got \(1, 2\)"),
        (lambda: layers.BatchNormalization(momentum=1.5), ValueError, "momentum must be from 0 to 1; got"),
        (lambda: layers.BatchNormalization(epsilon=-1), ValueError, "epsilon must be at least 0; got -1"),
        (lambda: layers.LayerNormalization(axis=()), ValueError, "axis must name at least one axis; got"),
        (lambda: layers.LayerNormalization(axis=(1, None)), ValueError, "axis must be an integer; got"),
        (lambda: layers.LayerNormalization(epsilon=float("nan")), ValueError, "at least 0; got nan"),
        (lambda: layers.GroupNormalization(0), ValueError, "GroupNormalization: groups must be a positive"),
        (lambda: layers.GroupNormalization(-2), ValueError, "groups must be a positive integer; got -2"),
        (lambda: layers.Dense(2)(np.zeros((2, 2), "f4")), RuntimeError, "called outside of a program"),
    ],
)
def test_wrong_arguments(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("layer", "shape", "dtype", "error", "message"),
    [
        (layers.Dense(2), (2, 3), "int32", TypeError, "Dense dense needs floating-point"),
        (layers.Dense(2), (3,), "f4", ValueError, "rank 2 or more"),
        (layers.Embedding(2, 3), (2, 3), "f4", TypeError, r"integer inputs; got float32\[2"),
        (layers.Embedding(2, 3), (2,), "bool", TypeError, "needs integer inputs; got bool"),
        (layers.Conv2D(4, 3), (2, 7, 6), "f4", ValueError, r"Conv2D conv2d needs .* rank 4.*\(2, 7, 6\)"),
        (layers.Conv2D(4, 3), (2, 7, 6, 4), "int32", TypeError, "Conv2D conv2d needs floating-point"),
        (layers.Conv2D(4, 3, groups=4), (2, 7, 6, 6), "f4", ValueError, "groups must divide the channels"),
        (layers.Conv2D(4, 3), (2, 7, 2, 4), "f4", ValueError, "needs inputs of at least 3 by 3"),
        (layers.Conv2D(4, 3, dilation_rate=4), (2, 9, 8, 4), "f4", ValueError, "at least 9 by 9"),
        (layers.Conv2D(4, 3, padding="same"), (2, 0, 2, 4), "f4", ValueError, "at least 1 by 1"),
        (layers.Conv1D(2, 3), (2, 2, 1), "f4", ValueError, "at least 3 long"),
        (layers.Conv1D(2, 3), (2, 7, 6, 4), "f4", ValueError, "needs inputs of rank 3"),
        (layers.Conv1D(2, 1, groups=2), (2, 2, 1), "f4", ValueError, "groups must divide"),
        (layers.DepthwiseConv2D(9), (2, 7, 6, 4), "f4", ValueError, "needs inputs of at least 9 by 9"),
        (layers.GlobalAveragePooling2D(), (2, 9, 4), "f4", ValueError, "needs inputs of rank 4"),
        (layers.MaxPooling2D(), (2, 3), "f4", ValueError, "MaxPooling2D max_pooling2d needs"),
        (layers.MaxPooling2D(), (2, 4, 4, 1), "int32", TypeError, "needs floating-point inputs"),
        (layers.AveragePooling2D(3), (2, 4, 2, 1), "f4", ValueError, "with padding 'valid' needs .* 3 by"),
        (layers.BatchNormalization(2), (3, 4), "f4", ValueError, r"batch_normalization: axis .* got \[2\]"),
        (layers.LayerNormalization((-1, 1)), (3, 4), "f4", ValueError, r"different axes .*; got \[-1, 1\]"),
        (layers.LayerNormalization(-3), (3, 4), "f4", ValueError, "axis must name different axes"),
        (layers.LayerNormalization(), (3, 4), "int32", TypeError, "needs floating-point inputs"),
        (layers.GroupNormalization(4), (3, 6), "f4", ValueError, "divide .* groups=4 and 6 channels"),
        (layers.GroupNormalization(1, axis=-2), (3, 6), "f4", ValueError, "the batch; got -2"),
    ],
)
def test_wrong_inputs(layer, shape, dtype, error, message):
    with pytest.raises(error, match=message):
        engine.Pipeline([layer], num_micro_batches=1).trace(np.zeros(shape, dtype))


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
    """Those of Conv1D that are numbers, and its padding, in their places among those of Conv2D."""
    one, two = (inspect.signature(kind).parameters for kind in (layers.Conv1D, layers.Conv2D))
    assert list(one) == list(two)
    changed = {name for name in one if one[name] != two[name]} - {"padding"}
    assert changed == {"kernel_size", "strides", "dilation_rate"}
    assert {one[name].annotation for name in changed} == {"int"}
    assert one["strides"].default == one["dilation_rate"].default == 1
    assert "causal" in layers.Conv1D.__init__.__doc__
    assert "causal" not in layers.Conv2D.__init__.__doc__

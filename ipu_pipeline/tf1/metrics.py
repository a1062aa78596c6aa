"""Metrics of evaluation over a whole data set, in place of TensorFlow 1's `tf.metrics`.

Each function returns a pair (value, update), as in TensorFlow. The value is the metric of the given arrays.
The update holds sums, from which an estimator computes the value over everything that it evaluates: over
all micro-batches, runs and replicas, weighted as one large batch would be. Formulas, defaults and the
thresholds of `auc` are from the documentation of `tf.metrics` in TensorFlow 1.15.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.graphcore.sdk_names import explain_missing
from ipu_pipeline.ground import jax_compat

__all__ = ["Metric", "Update", "accuracy", "auc", "mean", "precision", "recall"]

Array = Any  # NumPy's, in float64; or JAX's, where a function is traced, in float32
_EPSILON = 1e-6  # as in TensorFlow's auc, so that no rate is 0 / 0


@dataclass(frozen=True, eq=False)
class Update:
    """Sums of a metric, to be added to the sums of other data.

    Example:
      >>> update = ipu.metrics.mean(np.array([1.0, 2.0])).update
      >>> {name: float(total) for name, total in update.sums.items()}
      {'total': 3.0, 'count': 2.0}

    Attributes:
      kind: which metric, with its settings; only sums of one kind are added.
      sums: the sums by name.
      finish: computes the metric's value from them.
    """

    kind: str
    sums: Mapping[str, Array]
    finish: Callable[[Mapping[str, Array]], Array]

    def __add__(self, other: Update) -> Update:
        """Returns the sums over the data of both."""
        if not isinstance(other, Update):
            return NotImplemented
        if self.kind != other.kind:
            raise ValueError(
                f"Sums of different metrics cannot be added: {self.kind} and {other.kind}. A function that "
                "returns metrics must return the same ones under the same names in each call."
            )
        return Update(
            self.kind, {name: self.sums[name] + other.sums[name] for name in self.sums}, self.finish
        )

    def result(self) -> Array:
        """Returns the metric over all data whose sums it has."""
        return self.finish(self.sums)


class Metric(NamedTuple):
    """A metric of some data: its value, and the update that is added to others.

    Example:
      >>> metric = ipu.metrics.mean(np.array([1.0, 2.0]))
      >>> value, update = metric
      >>> value
      array(1.5)
    """

    value: Array
    update: Update


def mean(
    values: Array,
    weights: Array = None,
    metrics_collections: None = None,
    updates_collections: None = None,
    name: str | None = None,
) -> Metric:
    """The weighted mean of all elements.

    Example:
      >>> losses, weights = np.array([0.5, 0.1, 9.0]), np.array([1, 1, 0])
      >>> ipu.metrics.mean(losses, weights).value
      array(0.3)

    Args:
      values: numbers, of any shape.
      weights: None for 1; of the shape of `values`, or one that is broadcast to it.
      metrics_collections: only None, there for TensorFlow 1 code.
      updates_collections: only None, there for TensorFlow 1 code.
      name: of no meaning here.

    Returns:
      The pair (value, update). The value is 0 where the weights add up to 0.

    Raises:
      ValueError: shapes do not fit, or a collection is given.
    """
    _check_collections("mean", metrics_collections, updates_collections)
    del name
    xp, (values,) = _as_arrays(values, weights)
    values = values.astype(_float(xp))
    weights = _weights_like("mean", weights, values, xp)
    return _make("mean", {"total": xp.sum(values * weights), "count": xp.sum(weights)}, _total_by_count)


def accuracy(
    labels: Array,
    predictions: Array,
    weights: Array = None,
    metrics_collections: None = None,
    updates_collections: None = None,
    name: str | None = None,
) -> Metric:
    """The share of predictions that equal their labels.

    Example:
      >>> labels, predictions = np.array([7, 2, 1, 0]), np.array([7, 2, 1, 4])
      >>> ipu.metrics.accuracy(labels, predictions).value
      array(0.75)

    Args:
      labels: the right classes.
      predictions: the predicted classes, such as `np.argmax(logits, -1)`, of the same shape; one of the
        two may have a last axis of size 1 more. They are cast to the labels' dtype.

    The other arguments are those of `mean`.

    Returns:
      The pair (value, update).

    Raises:
      ValueError: shapes do not fit, or a collection is given.
    """
    _check_collections("accuracy", metrics_collections, updates_collections)
    del name
    xp, labels, predictions = _as_alike_arrays("accuracy", labels, predictions, weights)
    is_right = (predictions.astype(labels.dtype) == labels).astype(_float(xp))
    weights = _weights_like("accuracy", weights, is_right, xp)
    sums = {"total": xp.sum(is_right * weights), "count": xp.sum(weights)}
    return _make("accuracy", sums, _total_by_count)


def precision(
    labels: Array,
    predictions: Array,
    weights: Array = None,
    metrics_collections: None = None,
    updates_collections: None = None,
    name: str | None = None,
) -> Metric:
    """The share of positive examples among those that were predicted positive.

    Example:
      >>> labels, predictions = np.array([1, 0, 1, 1]), np.array([1, 1, 0, 1])
      >>> ipu.metrics.precision(labels, predictions).value
      array(0.66666667)

    Args:
      labels: true or false; of numbers, all but 0 are true.
      predictions: the same, of the same shape.

    The other arguments are those of `mean`.

    Returns:
      The pair (value, update). The value is 0 where nothing was predicted positive.

    Raises:
      ValueError: shapes do not fit, or a collection is given.
    """
    _check_collections("precision", metrics_collections, updates_collections)
    del name
    true, counted, _positive = _count_positives("precision", labels, predictions, weights)
    return _make("precision", {"total": true, "count": counted}, _total_by_count)


def recall(
    labels: Array,
    predictions: Array,
    weights: Array = None,
    metrics_collections: None = None,
    updates_collections: None = None,
    name: str | None = None,
) -> Metric:
    """The share of positive examples that were predicted positive; same arguments as `precision`.

    Example:
      >>> labels, predictions = np.array([1, 0, 0, 1]), np.array([1, 1, 0, 0])
      >>> ipu.metrics.recall(labels, predictions).value
      array(0.5)

    Returns:
      The pair (value, update). The value is 0 where nothing is positive.

    Raises:
      ValueError: shapes do not fit, or a collection is given.
    """
    _check_collections("recall", metrics_collections, updates_collections)
    del name
    true, _predicted, counted = _count_positives("recall", labels, predictions, weights)
    return _make("recall", {"total": true, "count": counted}, _total_by_count)


def auc(
    labels: Array,
    predictions: Array,
    weights: Array = None,
    num_thresholds: int = 200,
    metrics_collections: None = None,
    updates_collections: None = None,
    curve: Literal["ROC", "PR"] = "ROC",
    name: str | None = None,
    summation_method: Literal["trapezoidal", "minoring", "majoring"] = "trapezoidal",
) -> Metric:
    """The area under the curve, approximated with evenly spaced thresholds, as in TensorFlow.

    Example:
      >>> labels, scores = np.array([0, 0, 1, 1]), np.array([0.1, 0.4, 0.35, 0.8])
      >>> round(float(ipu.metrics.auc(labels, scores).value), 2)
      0.75

    Args:
      labels: true or false; of numbers, all but 0 are true.
      predictions: probabilities, from 0 to 1, of the same shape.
      num_thresholds: the number of thresholds; more of them come closer to the exact area.
      curve: "ROC" or "PR".
      summation_method: "trapezoidal", "minoring" or "majoring".

    The other arguments are those of `mean`.

    Returns:
      The pair (value, update).

    Raises:
      ValueError: an argument is not usable, or, unless it is traced, a prediction is out of range.
    """
    _check_collections("auc", metrics_collections, updates_collections)
    del name
    if not _is_integer(num_thresholds) or num_thresholds < 2:
        raise ValueError(f"metrics.auc: num_thresholds must be an integer from 2; got {num_thresholds!r}.")
    _check_one_of("curve", curve, ("ROC", "PR"))
    _check_one_of("summation_method", summation_method, ("trapezoidal", "minoring", "majoring"))
    xp, labels, predictions = _as_alike_arrays("auc", labels, predictions, weights)
    predictions = predictions.astype(np.float32)
    weights = xp.ravel(_weights_like("auc", weights, predictions, xp))
    labels, predictions = xp.ravel(labels.astype(bool)), xp.ravel(predictions)
    inner = np.arange(1, num_thresholds - 1, dtype=np.float32) / np.float32(num_thresholds - 1)
    edge = np.float32(1e-7)
    thresholds = np.concatenate([[-edge], inner, [1 + edge]]).astype(np.float32)
    # The number of thresholds that each prediction is above: it counts as positive for these.
    numbers = xp.searchsorted(xp.asarray(thresholds), predictions, side="left")
    if xp is np and predictions.size and not (predictions.min() >= 0 and predictions.max() <= 1):
        raise ValueError(
            f"metrics.auc: predictions must be probabilities, from 0 to 1; they are from "
            f"{predictions.min()} to {predictions.max()}."
        )

    def count(chosen: Array) -> Array:
        heights = xp.bincount(numbers, weights=weights * chosen, **_length(xp, num_thresholds + 1))
        return xp.flip(xp.cumsum(xp.flip(heights)))[1:].astype(weights.dtype)  # [thresholds]

    is_true, is_false = labels.astype(weights.dtype), (~labels).astype(weights.dtype)
    sums = {
        "true_positives": count(is_true),
        "false_positives": count(is_false),
        "positives": xp.sum(weights * is_true),
        "negatives": xp.sum(weights * is_false),
    }

    def finish(sums: Mapping[str, Array]) -> Array:
        return _area(sums, curve, summation_method)

    return _make(f"auc ({curve}, {summation_method}, {num_thresholds} thresholds)", sums, finish)


def _area(sums: Mapping[str, Array], curve: str, summation_method: str) -> Array:
    true, false = sums["true_positives"], sums["false_positives"]
    share = (true + _EPSILON) / (sums["positives"] + _EPSILON)  # recall, or the rate of true positives
    if curve == "ROC":
        x, y = false / (sums["negatives"] + _EPSILON), share
    else:
        x, y = share, (true + _EPSILON) / (true + false + _EPSILON)
    xp = np if isinstance(true, np.ndarray) else jnp
    heights = {
        "trapezoidal": lambda: (y[:-1] + y[1:]) / 2,
        "minoring": lambda: xp.minimum(y[:-1], y[1:]),
        "majoring": lambda: xp.maximum(y[:-1], y[1:]),
    }[summation_method]()
    return xp.sum((x[:-1] - x[1:]) * heights)


def _make(kind: str, sums: Mapping[str, Array], finish: Callable[[Mapping[str, Array]], Array]) -> Metric:
    update = Update(kind, sums, finish)
    return Metric(update.result(), update)


def _total_by_count(sums: Mapping[str, Array]) -> Array:
    total, count = sums["total"], sums["count"]
    xp = jnp if isinstance(total, jax.Array) else np
    return xp.where(
        count == 0, xp.zeros_like(total), total / xp.where(count == 0, xp.ones_like(count), count)
    )


def _count_positives(
    name: str, labels: Array, predictions: Array, weights: Array
) -> tuple[Array, Array, Array]:
    """Returns how many examples are true positives, predicted positives, and positives."""
    xp, labels, predictions = _as_alike_arrays(name, labels, predictions, weights)
    is_true, is_predicted = (value.astype(bool).astype(_float(xp)) for value in (labels, predictions))
    weights = _weights_like(name, weights, is_true, xp)
    products = (is_true * is_predicted, is_predicted, is_true)
    true, predicted, positive = (xp.sum(product * weights) for product in products)
    return true, predicted, positive


def _as_arrays(*values: Array, number: int = 1) -> tuple[Any, list[Array]]:
    """NumPy or jax.numpy, whichever the values need, and the values as its arrays."""
    xp: Any = jnp if any(jax_compat.is_traced(value) for value in values) else np
    return xp, [xp.asarray(value) for value in values[:number]]


def _float(xp: Any) -> Any:
    return np.float64 if xp is np else np.float32


def _length(xp: Any, length: int) -> dict[str, int]:
    return {"minlength": length} if xp is np else {"length": length}


def _weights_like(name: str, weights: Array, values: Array, xp: Any) -> Array:
    dtype = _float(xp)
    if weights is None:
        return xp.ones(values.shape, dtype)
    weights = xp.asarray(weights).astype(dtype)
    if weights.ndim not in (0, values.ndim) or any(
        weight_size not in (1, value_size)
        for weight_size, value_size in zip(weights.shape, values.shape, strict=False)
    ):
        raise ValueError(
            f"metrics.{name}: weights must be a scalar, or have as many axes as the values, each of size 1 "
            f"or of theirs; the shapes are {weights.shape} and {values.shape}."
        )
    return xp.broadcast_to(weights, values.shape)


def _as_alike_arrays(
    name: str, labels: Array, predictions: Array, weights: Array
) -> tuple[Any, Array, Array]:
    """NumPy or jax.numpy, and labels and predictions of the same shape as its arrays."""
    xp, (labels, predictions) = _as_arrays(labels, predictions, weights, number=2)
    if labels.ndim == predictions.ndim + 1 and labels.shape[-1] == 1:
        labels = labels[..., 0]
    elif predictions.ndim == labels.ndim + 1 and predictions.shape[-1] == 1:
        predictions = predictions[..., 0]
    if labels.shape != predictions.shape:
        raise ValueError(
            f"metrics.{name}: labels and predictions must have the same shape; got {labels.shape} and "
            f"{predictions.shape}. For logits, take the argmax first."
        )
    return xp, labels, predictions


def _check_collections(name: str, *collections: None) -> None:
    if any(collection is not None for collection in collections):
        raise ValueError(
            f"metrics.{name}: metrics_collections and updates_collections must be None, since there are no "
            "collections of a graph. Return the pair from eval_metrics_fn."
        )


def _check_one_of(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"metrics.auc: {name} must be one of {', '.join(choices)}; got {value!r}.")


def _is_integer(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


explain_missing(__name__)

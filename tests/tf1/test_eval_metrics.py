"""`ipu.metrics`: values over a whole evaluation, against statements of NumPy."""

import itertools

import jax
import numpy as np
import pytest

import ipu_pipeline as ipu
from ipu_pipeline.ipu_pipeline_estimator import IPUPipelineEstimator, IPUPipelineEstimatorSpec
from ipu_pipeline.ipu_run_config import IPURunConfig, RunConfig
from tests.support import front

RNG = np.random.default_rng(2)
SIZE = 5


def make_data(num_batches=11):
    """Labels that get rarer, so that means of batches are other numbers than those of all."""
    scores = RNG.uniform(size=(num_batches, SIZE)).astype(np.float32)
    bounds = np.linspace(0.2, 0.9, num_batches)[:, None]
    labels = (0.7 * scores + 0.3 * RNG.uniform(size=scores.shape) > bounds).astype(np.int32)
    return scores, labels


SCORES, LABELS = make_data()


def exact_auc(labels, scores):
    """How often a positive has a higher score than a negative."""
    positive, negative = scores[labels == 1], scores[labels == 0]
    return np.mean((positive[:, None] > negative) + 0.5 * (positive[:, None] == negative))


def area_by_thresholds(labels, scores, num_thresholds=200, curve="ROC"):
    """TensorFlow's approximation, threshold by threshold."""
    thresholds = [-1e-7, *[n / (num_thresholds - 1) for n in range(1, num_thresholds - 1)], 1 + 1e-7]
    points = []
    for threshold in np.float32(thresholds):
        predicted = scores > threshold
        true, false = np.sum(predicted & (labels == 1)), np.sum(predicted & (labels == 0))
        share = (true + 1e-6) / (np.sum(labels == 1) + 1e-6)
        points.append(
            (false / (np.sum(labels == 0) + 1e-6), share)
            if curve == "ROC"
            else (share, (true + 1e-6) / (true + false + 1e-6))
        )
    return sum((x - u) * (y + v) / 2 for (x, y), (u, v) in itertools.pairwise(points))


def statements(scores, labels):
    predicted = scores > 0.5
    return {
        "loss": np.mean((scores - labels) ** 2, dtype=np.float64),
        "accuracy": np.mean(predicted == labels),
        "precision": np.sum(predicted & (labels == 1)) / np.sum(predicted),
        "recall": np.sum(predicted & (labels == 1)) / np.sum(labels == 1),
        "auc": area_by_thresholds(labels.ravel(), scores.ravel()),
        "pr": area_by_thresholds(labels.ravel(), scores.ravel(), curve="PR"),
    }


def metrics_of(scores, labels):
    predicted = scores > 0.5
    return {
        "loss": ipu.metrics.mean((scores - labels.astype(np.float32)) ** 2),
        "accuracy": ipu.metrics.accuracy(labels, predicted),
        "precision": ipu.metrics.precision(labels, predicted),
        "recall": ipu.metrics.recall(labels, predicted),
        "auc": ipu.metrics.auc(labels, scores),
        "pr": ipu.metrics.auc(labels, scores, curve="PR"),
    }


def test_values_and_sums():
    wanted = statements(SCORES, LABELS)
    assert abs(wanted["auc"] - exact_auc(LABELS, SCORES)) < 0.01
    for name, (value, update) in metrics_of(SCORES, LABELS).items():
        np.testing.assert_allclose(value, wanted[name], rtol=1e-6, err_msg=name)
        np.testing.assert_allclose(update.result(), value, rtol=1e-12)
    parts = [metrics_of(SCORES[part], LABELS[part]) for part in (slice(0, 4), slice(4, 9), slice(9, 11))]
    for name in wanted:
        first, second, third = (part[name].update for part in parts)
        np.testing.assert_allclose((first + second + third).result(), wanted[name], rtol=1e-6)


def test_weights():
    weights = RNG.uniform(size=(len(SCORES), 1))
    whole = np.broadcast_to(weights, SCORES.shape)
    predicted = SCORES > 0.5
    precision = np.average(LABELS[predicted], weights=whole[predicted])
    for (found, _update), expected in (
        (ipu.metrics.accuracy(LABELS, predicted, weights), np.average(predicted == LABELS, weights=whole)),
        (ipu.metrics.mean(SCORES, weights), np.average(SCORES, weights=whole)),
        (ipu.metrics.precision(LABELS, predicted, weights=whole), precision),
        (ipu.metrics.recall(LABELS, predicted, weights=2.0), np.mean(predicted[LABELS == 1])),
    ):
        np.testing.assert_allclose(found, expected)
    repeated = ipu.metrics.auc(np.repeat(LABELS, 3), np.repeat(SCORES, 3)).value
    np.testing.assert_allclose(ipu.metrics.auc(LABELS, SCORES, 3).value, repeated, rtol=1e-5)
    assert ipu.metrics.precision(LABELS, np.zeros_like(LABELS)).value == 0
    assert ipu.metrics.mean(SCORES, 0.0).value == 0


@pytest.mark.parametrize("method", ["minoring", "majoring"])
def test_areas_from_below_and_above(method):
    found = ipu.metrics.auc(LABELS, SCORES, num_thresholds=50, summation_method=method).value
    exact = exact_auc(LABELS, SCORES)
    assert (found < exact) == (method == "minoring")
    np.testing.assert_allclose(found, exact, atol=0.1)


def test_traced():
    """As an IPUEstimator's model computes them; sums are those of the host."""

    @jax.jit
    def traced(scores, labels):
        return {name: (value, update.sums) for name, (value, update) in metrics_of(scores, labels).items()}

    host = metrics_of(SCORES, LABELS)
    for name, (value, sums) in traced(SCORES, LABELS).items():
        np.testing.assert_allclose(value, host[name].value, rtol=1e-5, err_msg=name)
        for key, total in sums.items():
            np.testing.assert_allclose(total, host[name].update.sums[key], rtol=1e-6)


def model_fn(mode, params):
    def stage(scores, labels):
        return scores * ipu.get_variable("w", [], initializer=1.0), labels

    return IPUPipelineEstimatorSpec(mode, [stage], 2, eval_metrics_fn=params["metrics"])


def make_estimator(directory, metrics=metrics_of, num_replicas=1):
    options = front.ipu_config(num_replicas)
    config = RunConfig(IPURunConfig(4, options, num_replicas=num_replicas))
    return IPUPipelineEstimator(model_fn, directory, config, {"metrics": metrics})


def dataset(num_batches=11):
    return lambda: list(zip(SCORES, LABELS, strict=True))[:num_batches]


@pytest.mark.filterwarnings("ignore:There is no checkpoint")
@pytest.mark.parametrize(("num_replicas", "num_batches"), [(1, 8), (1, 3), (2, 11)])
def test_an_evaluation_is_one_large_batch(num_replicas, num_batches, tmp_path):
    """Runs of four micro-batches, of which the last one has fewer."""
    estimator = make_estimator(tmp_path, num_replicas=num_replicas)
    found = estimator.evaluate(dataset(num_batches))
    wanted = statements(SCORES[:num_batches], LABELS[:num_batches])
    assert found.keys() == {*wanted, "global_step"}
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)


@pytest.mark.filterwarnings("ignore:There is no checkpoint")
def test_pairs_beside_numbers(tmp_path):
    def metrics(scores, labels):
        value, update = ipu.metrics.precision(labels, scores > 0.5)
        return {"loss": np.mean(scores), "largest": scores.max(), "precision": (value, update)}

    found = make_estimator(tmp_path, metrics).evaluate(dataset())
    wanted = statements(SCORES, LABELS)
    np.testing.assert_allclose(found["precision"], wanted["precision"])
    np.testing.assert_allclose(found["loss"], SCORES.mean(), rtol=1e-5)
    largest = [SCORES[begin : begin + 4].max() for begin in (0, 4, 8)]
    np.testing.assert_allclose(found["largest"], np.average(largest, weights=[4, 4, 3]), rtol=1e-6)


@pytest.mark.filterwarnings("ignore:There is no checkpoint")
def test_metrics_that_change(tmp_path):
    calls = []

    def renamed(scores, labels):
        calls.append(labels)
        return {"loss": scores, f"metric {len(calls)}": scores}

    def other(scores, labels):
        calls.append(labels)
        kind = ipu.metrics.accuracy if len(calls) == 1 else ipu.metrics.recall
        return {"loss": scores, "metric": kind(labels, scores > 0.5)}

    message = "the same metrics in each call; it returned 'loss', 'metric 1', then"
    with pytest.raises(ValueError, match=message):
        make_estimator(tmp_path, renamed).evaluate(dataset())
    calls.clear()
    with pytest.raises(ValueError, match="cannot be added: accuracy and recall"):
        make_estimator(tmp_path, other).evaluate(dataset())
    with pytest.raises(TypeError, match="The metric 'loss' .* must be a number, an array .* got 'low'"):
        make_estimator(tmp_path, lambda _scores, _labels: {"loss": "low"}).evaluate(dataset())


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda m: m.accuracy(LABELS, SCORES[:, :, None].repeat(3, -1)), "same shape; got .* the argmax"),
        (
            lambda m: m.recall(LABELS, LABELS[1:]),
            "metrics.recall: labels and predictions must have the same",
        ),
        (
            lambda m: m.mean(SCORES, np.ones(SIZE)),
            "metrics.mean: weights must be a scalar, or have as many",
        ),
        (
            lambda m: m.auc(LABELS, SCORES * 3),
            "predictions must be probabilities, from 0 to 1; they are from",
        ),
        (lambda m: m.auc(LABELS, SCORES, num_thresholds=1), "must be an integer from 2; got 1"),
        (lambda m: m.auc(LABELS, SCORES, curve="roc"), "curve must be one of ROC, PR; got 'roc'"),
        (lambda m: m.mean(SCORES, None, ["c"]), "and updates_collections must be None"),
    ],
)
def test_wrong_arguments(use, message):
    with pytest.raises(ValueError, match=message):
        use(ipu.metrics)


def test_a_last_axis_of_one():
    found = ipu.metrics.accuracy(LABELS[..., None], SCORES > 0.5).value
    assert found == ipu.metrics.accuracy(LABELS, (SCORES > 0.5)[..., None]).value

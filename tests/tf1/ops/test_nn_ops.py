"""The losses of `nn_ops` and their gradients, against TensorFlow's formulas in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipu_pipeline import nn_ops

LOGITS = np.array([[1, 2, -1], [0.5, 0, 3], [90, -90, 0]], np.float32)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def test_labels_that_do_not_sum_to_1():
    """The gradient is softmax - labels, by TensorFlow's kernel; that of the formula differs."""
    labels = np.array([[0.2, 0.3, 0.5], [0, 2, 0], [0, 0, 0]], np.float32)
    shifted = LOGITS - LOGITS.max(-1, keepdims=True)
    logarithms = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    for function, of_labels in (
        (nn_ops.softmax_cross_entropy_with_logits_v2, -logarithms),
        (nn_ops.softmax_cross_entropy_with_logits, 0 * logarithms),
    ):

        def loss(labels, logits, function=function):
            losses = function(labels=labels, logits=logits)
            return losses.sum(), losses

        gradients, losses = jax.grad(loss, (0, 1), has_aux=True)(labels, LOGITS)
        np.testing.assert_allclose(losses, -(labels * logarithms).sum(-1), rtol=1e-6)
        np.testing.assert_allclose(gradients[0], of_labels, rtol=1e-6)
        np.testing.assert_allclose(gradients[1], softmax(LOGITS) - labels, atol=1e-6)
    turned = nn_ops.softmax_cross_entropy_with_logits(labels=labels.T, logits=LOGITS.T, dim=0)
    np.testing.assert_allclose(turned, losses, rtol=1e-6)


def test_labels_that_are_no_classes():
    """They are NaN, with their gradients; -1 would be the last class to NumPy."""

    def loss(logits, labels):
        losses = nn_ops.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
        return losses.sum(), losses

    gradients, losses = jax.grad(loss, has_aux=True)(LOGITS, np.array([-1, 2, 3], np.int32))
    np.testing.assert_allclose(losses, [np.nan, -np.log(softmax(LOGITS)[1, 2]), np.nan], rtol=1e-6)
    np.testing.assert_allclose(gradients[1], softmax(LOGITS)[1] - [0, 0, 1], atol=1e-6)
    assert np.isnan(np.asarray(gradients)[[0, 2]]).all()
    assert loss(LOGITS.astype("bfloat16"), np.array([0, 1, 2]))[1].dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("labels", "logits", "error", "message"),
    [
        (np.zeros(3, np.int32), LOGITS, ValueError, "sparse_softmax.* takes the numbers of classes"),
        (LOGITS, LOGITS.astype(int), TypeError, "logits must be floating-point"),
    ],
)
def test_wrong_arguments(labels, logits, error, message):
    with pytest.raises(error, match=message):
        nn_ops.softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    with pytest.raises((TypeError, ValueError), match="sparse_softmax_cross_entropy_with_logits: "):
        nn_ops.sparse_softmax_cross_entropy_with_logits(labels=LOGITS, logits=logits)

import jax
import numpy as np
import pytest

from ipu_pipeline import engine
from ipu_pipeline.engine.generation.sampling import SamplingArrays, choose

LOGITS = np.log(np.array([0.1, 0.4, 0.05, 0.3, 0.15], np.float32))


@jax.jit
def draw(arrays, keys):
    return jax.vmap(lambda key: choose(LOGITS, arrays, key))(keys)


def count(sampling, number=4000):
    """How often each word is chosen, as a part of all."""
    arrays = SamplingArrays(*(x[0] for x in SamplingArrays.of([sampling])))
    chosen = draw(arrays, jax.random.split(jax.random.key(0), number))
    return np.bincount(np.asarray(chosen), minlength=5) / number


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"temperature": 1.0}, [0.1, 0.4, 0.05, 0.3, 0.15]),
        ({"temperature": 0.5}, np.array([0.01, 0.16, 0.0025, 0.09, 0.0225]) / 0.285),
        ({"temperature": 1.0, "top_k": 2}, [0, 4 / 7, 0, 3 / 7, 0]),
        ({"temperature": 1.0, "top_k": 1}, [0, 1, 0, 0, 0]),
        ({"temperature": 1.0, "top_k": 100}, [0.1, 0.4, 0.05, 0.3, 0.15]),
        ({"temperature": 1.0, "top_p": 0.69}, [0, 4 / 7, 0, 3 / 7, 0]),
        ({"temperature": 1.0, "top_p": 0.01}, [0, 1, 0, 0, 0]),
        ({"temperature": 1.0, "top_p": 1}, [0.1, 0.4, 0.05, 0.3, 0.15]),
        # of the three that are left by top_k, which have 8/17, 6/17 and 3/17
        ({"temperature": 1.0, "top_k": 3, "top_p": 0.8}, [0, 4 / 7, 0, 3 / 7, 0]),
        ({}, [0, 1, 0, 0, 0]),
    ],
)
def test_how_often_words_are_drawn(options, expected):
    found = count(engine.Sampling(**options))
    assert (found[np.array(expected) == 0] == 0).all()
    np.testing.assert_allclose(found, expected, atol=0.03)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"temperature": -1.0}, "temperature must be a finite number from 0"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": 1.0, "top_k": 0}, "top_k must be an integer of at least 1"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p must be a number above 0"),
        ({"temperature": 1.0, "top_p": 1.5}, "top_p"),
        ({"top_k": 3}, "temperature is 0"),
    ],
)
def test_wrong_sampling(options, text):
    with pytest.raises(ValueError, match=text):
        engine.Sampling(**options)

"""Weight updates that are guessed and verified later: the same, to the last bit, as those that wait."""

import contextlib

import jax
import numpy as np
import optax
import pytest

from ipu_pipeline import engine
from tests.support import scheduled

COUNT = 2


def clipped(norm):
    return optax.chain(optax.clip_by_global_norm(norm), optax.sgd(0.1))


def make(optimizer, **options):
    options = {"schedule": "zero_bubble", "optimizer": optimizer, **options}
    return engine.Pipeline(scheduled.stages(2), num_micro_batches=COUNT, **options)


def run(pipeline, data):
    """The state after each update, and the number of micro-batches that were taken since."""
    state = pipeline.place(pipeline.init(jax.random.key(3), data[0]))
    runner, waiting, states, ahead = pipeline.prepare(), iter(data), [], []

    def take(_wanted):
        return [runner.place_element([next(waiting)])]

    def keep(progress, _count):
        states.append(jax.tree.map(np.asarray, progress.state.pipeline.variables))
        ahead.append(progress.num_ahead)

    with contextlib.suppress(StopIteration):
        pipeline.run(state, take, [], keep, 4)
    return states, ahead


@pytest.mark.parametrize(("norm", "last"), [(1e9, 1), (1e-3, 0)])  # after one that was clipped, it waits
def test_guesses_change_nothing_and_data_that_end_lose_no_update(norm, last):
    data = list(np.random.default_rng(0).normal(size=(3 * COUNT + 1, 3, 4)).astype("float32"))
    expected, _none_ahead = run(make(clipped(norm)), data)
    found, ahead = run(make(clipped(norm), post_validation=True), data)
    assert len(found) == 3
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert ahead[-1] == last


@pytest.mark.parametrize(
    ("optimizer", "options", "reason"),
    [
        (optax.adam(0.1), {}, "no value that joins the devices can be guessed"),
        (clipped(1.0), {"device_mapping": [0, 0]}, "all stages are on one device"),
    ],
    ids=["nothing joins", "one IPU"],
)
def test_where_it_has_no_effect_it_warns(optimizer, options, reason):
    pipeline = make(optimizer, post_validation=True, **options)
    with pytest.warns(UserWarning, match=f"post_validation has no effect: .*{reason}"):
        pipeline.init(jax.random.key(0), np.ones((3, 4), "float32"))

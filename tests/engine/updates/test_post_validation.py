"""Weight updates that are guessed and verified later: the same, to the last bit, as those that wait."""

import contextlib

import jax
import numpy as np
import optax
import pytest

from ipu_pipeline import engine
from ipu_pipeline.engine.execution.runner import ColumnRunner
from ipu_pipeline.engine.updates.loss_scaling import scale_loss
from tests.support import models

COUNT, NUM_UPDATES = 4, 20


def make(optimizer, **options):
    options = {"num_micro_batches": COUNT, "schedule": "zero_bubble", **options}
    return engine.Pipeline(models.mlp_stages(4), loss=lambda loss: loss, optimizer=optimizer, **options)


def elements(num_updates=NUM_UPDATES, num_replicas=1):
    """Micro-batches, of which some have much larger values."""
    rng = np.random.default_rng(0)
    found = []
    for update in range(num_updates):
        for x, labels in models.mlp_batches(rng, COUNT * num_replicas):
            found.append((x * (30 if update % 5 == 3 else 1), labels))
    return found


def run(pipeline, num_updates=NUM_UPDATES, given=None):
    """The state after each update, as `on_update` gets it, and the losses of each micro-batch."""
    data = elements(num_updates, pipeline.num_replicas) if given is None else given
    state = pipeline.init(jax.random.key(3), data[0])
    runner, waiting = pipeline.prepare(), iter(data)
    states, losses, ahead = [], [], []

    def take(wanted):
        del wanted
        return [runner.place_element(list(next(waiting)))]

    def keep(progress, count):
        assert count == 1
        state = progress.state.pipeline
        states.append(jax.tree.map(np.asarray, (state.variables, state.optimizer_state)))
        losses.extend(np.asarray(loss) for part in progress.collected for loss in [part.loss])
        ahead.append(progress.num_ahead)

    with contextlib.suppress(StopIteration):
        pipeline.run(pipeline.place(state), take, [], keep, num_updates)
    return states, losses, ahead


@pytest.fixture
def counted(monkeypatch):
    """How many updates were guessed, and how many of these were wrong."""
    found = {"guessed": 0, "wrong": 0}
    verify = ColumnRunner.verify

    def counting(self, progress):
        verified = verify(self, progress)
        found["guessed"] += progress.unverified is not None
        found["wrong"] += verified is not progress
        return verified

    monkeypatch.setattr(ColumnRunner, "verify", counting)
    return found


def clipped(norm):
    return optax.chain(optax.clip_by_global_norm(norm), optax.adam(0.01))


def scaled(inner, initial=2.0**10):
    return scale_loss(inner, initial, True, 3, 2.0)


OPTIMIZERS = {
    "never clips": (lambda: clipped(1e9), NUM_UPDATES - 1, 0),
    "sometimes clips": (lambda: clipped(8.0), None, None),
    "always clips": (lambda: clipped(1e-3), 1, 1),
    "scaled": (lambda: scaled(optax.adam(0.01)), None, 0),
    "scaled too much": (lambda: scaled(optax.sgd(0.01), 2.0**127), None, None),
    "scaled and clipped": (lambda: scaled(clipped(8.0), 2.0**126), None, None),
    "clipped twice": (
        lambda: optax.chain(clipped(8.0), optax.clip_by_global_norm(1e9)),
        None,
        None,
    ),
    "every other": (
        lambda: optax.MultiSteps(clipped(8.0), 2).gradient_transformation(),
        None,
        None,
    ),
    "reported": (lambda: engine.with_metrics(clipped(8.0)), None, None),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_same_to_the_last_bit(name, counted):
    make_optimizer, num_guessed, num_wrong = OPTIMIZERS[name]
    expected = run(make(make_optimizer()))
    assert counted == {"guessed": 0, "wrong": 0}
    found = run(make(make_optimizer(), post_validation=True))
    for one, other in zip(found[:2], expected[:2], strict=True):
        assert len(one) == len(other)
        for leaf, wanted in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
            np.testing.assert_array_equal(leaf, wanted)
    assert counted["guessed"] > 0
    if num_guessed is not None:
        assert counted["guessed"] == num_guessed
    if num_wrong is None:
        assert 0 < counted["wrong"] < counted["guessed"]
    else:
        assert counted["wrong"] == num_wrong


@pytest.mark.parametrize(
    "options",
    [
        {"num_replicas": 2},
        {"schedule": "interleaved", "donate": True},
        {"device_mapping": [0, 1, 0, 1], "dispatch_plan": engine.Chunking(2)},
        {"num_micro_batches": COUNT, "recompute": "auto", "reduction": "running_mean"},
    ],
    ids=str,
)
def test_with_other_options(options, counted):
    expected = run(make(clipped(8.0), **options))
    found = run(make(clipped(8.0), post_validation=True, **options))
    for leaf, wanted in zip(jax.tree.leaves(found[:2]), jax.tree.leaves(expected[:2]), strict=True):
        np.testing.assert_array_equal(leaf, wanted)
    assert 0 < counted["wrong"] < counted["guessed"]


@pytest.mark.parametrize(("norm", "last"), [(1e9, 3), (8.0, 0)])  # after one that was clipped, it waits
def test_data_that_end_lose_no_update(norm, last):
    """The update before is verified and handed out, with the micro-batches that were taken since."""
    data = elements(6)[: 5 * COUNT + 3]
    expected, _losses, _ahead = run(make(clipped(norm)), 6, data)
    found, _losses, ahead = run(make(clipped(norm), post_validation=True), 6, data)
    assert len(found) == len(expected) == 5
    assert ahead == [COUNT] * 4 + [last]
    for leaf, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(leaf, wanted)


def test_assigned_variables_and_random_keys_of_a_wrong_guess():
    """A step that is run again has the statistics and keys that it had."""
    results = []
    for post_validation in (False, True):
        pipeline = engine.Pipeline(
            models.VARIOUS_STAGES,
            loss=lambda loss, **_others: loss,
            optimizer=clipped(2.0),
            num_micro_batches=COUNT,
            schedule="zero_bubble",
            post_validation=post_validation,
        )
        data, scale = models.various_batches(np.random.default_rng(1), 6 * COUNT), np.float32(0.9)
        state = pipeline.init(jax.random.key(3), data[0], scale)
        runner, waiting = pipeline.prepare(), iter(data)
        state = pipeline.run(
            pipeline.place(state),
            lambda _wanted: [runner.place_element(list(next(waiting)))],  # noqa: B023
            [scale],
            lambda _progress, _count: None,
            6,
        )
        results.append(jax.tree.map(np.asarray, (state.variables, state.optimizer_state)))
    for leaf, wanted in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_array_equal(leaf, wanted)


@pytest.mark.parametrize(
    ("optimizer", "options", "reason"),
    [
        (optax.adam(0.1), {}, "no choice that joins the IPUs is late"),
        (optax.normalize_by_update_norm(), {}, "no choice that joins the IPUs is late"),
        (clipped(1.0), {"device_mapping": [0, 0, 0, 0]}, "all stages are on one IPU"),
        (clipped(1.0), {"offload": ["weight_update_variables"]}, "are offloaded or shared out"),
    ],
    ids=["nothing joins", "no choice", "one IPU", "offloaded"],
)
def test_where_it_has_no_effect_it_warns(optimizer, options, reason):
    pipeline = make(optimizer, post_validation=True, **options)
    with pytest.warns(UserWarning, match=f"post_validation has no effect: .*{reason}"):
        pipeline.init(jax.random.key(0), elements(1)[0])


def test_steps_one_by_one_wait():
    pipeline = make(clipped(8.0), post_validation=True)
    data = elements(1)
    state = pipeline.init(jax.random.key(3), data[0])
    with pytest.warns(UserWarning, match=r"no effect in Pipeline.step, which does one update") as caught:
        state, _outputs = pipeline.step(state, data)
    assert caught[0].filename == __file__
    plain = make(clipped(8.0))
    other = plain.init(jax.random.key(3), data[0])
    other, _outputs = plain.step(other, data)
    for name, value in other.variables.items():
        np.testing.assert_array_equal(state.variables[name], value)

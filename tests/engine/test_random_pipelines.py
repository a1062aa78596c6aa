"""Random pipelines against a plain loop over the unsplit model; see `random_models`.

`make thorough` compares more of them than `make test`, and `make random EXAMPLES=5000` any number.
"""

import dataclasses
import itertools
import os

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipu_pipeline.engine import reference
from tests.support import models, random_models

NUM_THOROUGH = int(os.environ.get("RANDOM_PIPELINES", "64"))
# How many each part has; processes share the parts. The first is for `make test`.
PARTS = [4, *[-(-NUM_THOROUGH // 4)] * 4]
# Making a failing model smaller takes many minutes, so that is done on demand only.
ON_DEMAND = "RANDOM_PIPELINES" in os.environ
PHASES = list(hypothesis.Phase) if ON_DEMAND else [hypothesis.Phase.generate]
PIPELINES_PER_CASE = random_models.NUM_TRAININGS * random_models.NUM_SPLITS * random_models.NUM_RUNS


TOLERANCES = {"float32": 1e-5, "float64": 1e-12}  # of a leaf's 2-norm


def relative_difference(first, second):
    """The largest 2-norm of a leaf's difference, in 2-norms of the leaf."""

    def one(a, b):
        a, b = (np.asarray(leaf).astype("float64") for leaf in (a, b))
        return np.linalg.norm(a - b) / max(np.linalg.norm(b), np.finfo("float32").tiny)

    return max(jax.tree.leaves(jax.tree.map(one, first, second)), default=0.0)


def find_tolerance(dtype, results, op_by_op):
    """What leaves may differ by.

    With 16 bits, XLA rounds where it does not fuse, which is elsewhere in the stages' programs than in one
    program for all. A gradient has gone through some hundred roundings, of which some differ; several dozen
    independent ones add to 6 to 8 times a single one, in Adam's squares to twice that. Where more becomes
    of it, the plain loop shows that too, if every operation of it is compiled and rounded by itself.

    Args:
      dtype: the model's.
      results: states and outputs of the plain loop.
      op_by_op: gives the same, compiled operation by operation.
    """
    if dtype in TOLERANCES:
        return TOLERANCES[dtype]

    def values(found):
        return [(own.variables, own.optimizer_state, out.losses, out.outputs) for own, out in found]

    difference = relative_difference(values(op_by_op()), values(results))
    return max(16 * random_models.unit_roundoff(dtype), 4 * difference)


def wanted(outputs, run):
    """What a pipeline is to return, of what the plain loop did."""
    collected, losses = outputs.outputs, outputs.losses
    if run.collected == "losses":
        collected = []
    elif run.collected == "some":
        mask = random_models.wanted_outputs(collected[0])
        collected = [list(itertools.compress(jax.tree.leaves(one), mask)) for one in collected]
    elif run.collected == "sums":

        def add(*leaves):
            dtype = random_models.sum_dtype(leaves[0]) or leaves[0].dtype
            return sum(jnp.asarray(leaf).astype(dtype) for leaf in leaves)

        collected, losses = [jax.tree.map(add, *collected)], [add(*losses)]
    return collected, losses


class PlainLoop:
    """The plain loop over a model, with what it gave for each training."""

    def __init__(self, drawn):
        model = drawn.model
        self.scale = random_models.make_scale(model)
        unsplit = random_models.make_pipeline(random_models.unsplit(model, drawn.training))
        micro_batch = random_models.make_steps(model, drawn.training)[0][0]
        start = unsplit.init(jax.random.key(model.seed), micro_batch, self.scale)
        self.start = models.on_one_device(dataclasses.replace(start, optimizer_state=None))
        self.traced = unsplit.traced
        self.results = {}

    def loop(self, training, steps):
        """States and outputs after each update."""
        trained = [name for name, spec in self.traced.variables.items() if spec.trainable]
        options = {
            "optimizer": random_models.make_optimizer(training),
            "reduction": training.reduction,
            "accumulator_dtypes": dict.fromkeys(trained, np.float32)
            if training.wide_accumulators
            else None,
        }
        state, results = self.start, []
        for step in steps:
            state, outputs = reference.step(self.traced, state, step, self.scale, **options)
            results.append((state, outputs))
        return results

    def run(self, model, training):
        """The micro-batches, state and outputs of each update; and the tolerance."""
        if training not in self.results:
            steps = random_models.make_steps(model, training)

            def op_by_op():
                with jax.disable_jit():
                    return self.loop(training, steps)

            results = self.loop(training, steps)
            bound = find_tolerance(model.dtype, results, op_by_op)
            self.results[training] = list(zip(steps, results, strict=True)), bound
        return self.results[training]


def check(drawn, plain):
    """Compares one pipeline."""
    model, training, run = drawn.model, drawn.training, drawn.run
    pipeline = random_models.make_pipeline(drawn)
    steps, bound = plain.run(model, training)
    state = pipeline.init(jax.random.key(model.seed), steps[0][0][0], plain.scale)
    models.assert_trees_close(state.variables, plain.start.variables, 0.0)
    count = training.num_micro_batches // run.num_serialized
    given = {"num_micro_batches": count} if run.count_is_traced else {}
    for micro_batches, (after, outputs) in steps:
        state, actual = pipeline.step(state, micro_batches, plain.scale, **given)
        collected, losses = wanted(outputs, run)
        models.assert_trees_close(actual.losses, losses, bound)
        models.assert_trees_close(actual.outputs, collected, bound)
        models.assert_trees_close(state.variables, after.variables, bound)
        models.assert_trees_close(state.optimizer_state, after.optimizer_state, bound)
    assert state.update_count == state.execution_count == training.num_updates


def check_case(case):
    """Compares several pipelines of one model; which one failed stands with the error."""
    with jax.enable_x64(case[0].model.dtype == "float64"):
        plain = PlainLoop(case[0])
        for drawn in case:
            try:
                check(drawn, plain)
            except BaseException as error:
                error.add_note(f"The pipeline that failed: {drawn}")
                raise


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.thorough) for part in range(1, len(PARTS)))]
)
def test_equal_the_unsplit_model(part):
    goal = PARTS[part]
    done = set()

    @hypothesis.seed(part)
    @hypothesis.settings(
        max_examples=-(-goal // PIPELINES_PER_CASE),
        phases=PHASES,
        deadline=None,
        database=None,
        print_blob=False,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(random_models.cases(part))
    def check_cases(case):
        if part == 0:
            case = case[: PIPELINES_PER_CASE // 2 : 2]  # from one training, with both splits
        check_case(case)
        done.update(case)

    check_cases()
    assert len(done) >= goal, "Some were drawn twice: raise max_examples by one."

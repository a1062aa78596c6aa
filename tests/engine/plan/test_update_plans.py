"""A weight update's place in a plan: who takes whose memory, and what is sent when."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ipu_pipeline import engine
from ipu_pipeline.engine.plan.plan import Op


def update_of(**options):
    pipeline = engine.Pipeline(
        [lambda w, x: jnp.tanh(x @ w)] * 2,
        parameters=[np.eye(2, dtype="float32")] * 2,
        num_micro_batches=2,
        loss=jnp.sum,
        optimizer=optax.adam(0.1),
        **options,
    )
    pipeline.trace(np.ones((2, 2), "float32"))
    return next(b.block.code for b in pipeline.prepare().find_plan(2).blocks if b.block.name == "update")


@pytest.mark.parametrize("donate", [False, True])
def test_results_take_the_memory_of_what_they_replace(donate):
    """JAX gives the first result that fits the first donated argument; XLA copied all that was mixed up."""
    programs = [instruction.program for instruction in update_of(donate=donate) if instruction.op is Op.RUN]
    for program in programs:
        given = [program.binds[place] for place in program.donated]
        assert len(given) == (4 if donate else 1)
        assert program.results[: len(given)] == tuple(given)


def test_counts_are_sent_before_the_first_program():
    assert [instruction.op for instruction in update_of()] == [Op.SEND, Op.RUN, Op.RUN]

"""Plans: frames that micro-batches take over, code that cannot be right, and a weight update's place."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ipu_pipeline import engine
from ipu_pipeline.engine.plan.plan import ALL, Block, Instruction, Laid, Op, Registers, Results, Value

NOTHING = Results({}, (), {}, (), (), (), (), ())


@dataclasses.dataclass(frozen=True)
class Group:
    """As much of a group of devices as a plan needs."""

    ipu: int


HERE, THERE = Group(0), Group(1)


def make(optimizer, **options):
    pipeline = engine.Pipeline(
        [lambda w, x: jnp.tanh(x @ w)] * 3,
        parameters=[np.eye(2, dtype="float32")] * 3,
        num_micro_batches=8,
        loss=jnp.sum,
        optimizer=optimizer,
        dispatch_plan=engine.Chunking(1),
        **options,
    )
    pipeline.trace(np.ones((2, 2), "float32"))
    return pipeline


@pytest.mark.parametrize("schedule", ["grouped", "zero_bubble"])
def test_a_plan_is_as_large_as_what_is_in_flight(schedule):
    pipeline = make(optax.sgd(0.1), schedule=schedule)
    sizes = []
    for count in (16, 128):
        plan = pipeline.prepare().find_plan(count)
        sizes.append((len(plan.names), len(set(plan.blocks))))
        assert len(plan.blocks) > 5 * count
        assert all(plan.names[register].micro_batch == ALL for register in plan.given)
    assert sizes[0] == sizes[1]


def test_what_nothing_has_written_is_not_read():
    own = Value(("made",), HERE, 0, 0)
    read = Instruction(Op.SAME, (own,), (own._replace(copy=1),), HERE, micro_batch=0)
    laid = Laid()
    laid.add(Block("reads", (read,)), 0)
    with pytest.raises(AssertionError, match="which nothing has written"):
        Registers().number(laid, 1, NOTHING)


@pytest.mark.parametrize("changes", [{"group": THERE}, {"is_away": True}])
def test_a_program_reads_what_is_on_its_devices(changes):
    value = Value(("given",), HERE)._replace(**changes)
    run = Instruction(Op.RUN, (value,), (), HERE)
    with pytest.raises(AssertionError, match="which is elsewhere"):
        Registers().number(Laid([Block("runs", (run,))]), 1, NOTHING)


def update_of(pipeline):
    return next(b.block.code for b in pipeline.prepare().find_plan(2).blocks if b.block.name == "update")


@pytest.mark.parametrize("donate", [False, True])
def test_results_take_the_memory_of_what_they_replace(donate):
    """JAX gives the first result that fits the first donated argument; XLA copied all that was mixed up."""
    code = update_of(make(optax.adam(0.1), donate=donate))
    for program in [instruction.program for instruction in code if instruction.op is Op.RUN]:
        given = [program.binds[place] for place in program.donated]
        assert len(given) == (4 if donate else 1)
        assert program.results[: len(given)] == tuple(given)


def test_counts_are_sent_before_the_first_program():
    ops = [instruction.op for instruction in update_of(make(optax.adam(0.1)))]
    assert ops == [Op.SEND] * 2 + [Op.RUN] * 3

"""Sessions in several processes: what they train, read, save and restore is what one process does."""

from pathlib import Path

import numpy as np
import optax
import pytest

import ipu_pipeline as ipu
from ipu_pipeline.checkpointing.checkpoints import DOCUMENT
from tests import joined, models

COUNT, SIZE = 4, 4


def elements():
    """A data set with an order of its own."""
    rng = np.random.default_rng(5)
    while True:
        yield rng.normal(size=(SIZE, 12)).astype("float32"), rng.integers(0, 10, SIZE).astype("int32")


def train(schedule, num_replicas, directory, restore, num_runs, shares_out=False):
    """Trains a model of four stages; what an unchanged program would do.

    Args:
      schedule: the pipeline's.
      num_replicas: how many.
      directory: where it saves.
      restore: a checkpoint to go on from; False for none.
      num_runs: of two weight updates each, after each of which it saves.
      shares_out: whether replicas share out optimizer state and weights.

    Returns:
      The losses that were dequeued, the variables and the optimizer's state.
    """
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = 4 * num_replicas
    config.configure_ipu_system()
    infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(elements)
    outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()

    def optimizer_function(loss):
        optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.01))
        if num_replicas > 1:
            optimizer = ipu.optimizers.CrossReplicaOptimizer(optimizer)
        return ipu.pipelining_ops.OptimizerFunctionOutput(optimizer, loss)

    def model():
        return ipu.pipelining_ops.pipeline(
            models.mlp_stages(4),
            gradient_accumulation_count=COUNT,
            repeat_count=2,
            infeed_queue=infeed,
            outfeed_queue=outfeed,
            optimizer_function=optimizer_function,
            pipeline_schedule=ipu.pipelining_ops.PipelineSchedule[schedule],
            reduction_method="mean",
            replicated_optimizer_state_sharding=shares_out,
            replicated_weight_sharding=shares_out,
        )

    with ipu.scopes.ipu_scope("/device:IPU:0"):
        compiled = ipu.ipu_compiler.compile(model, [])
    losses = []
    with ipu.Session(seed=3) as session:
        session.run(infeed.initializer)
        if restore:
            session.restore(restore)
        for run in range(num_runs):
            session.run(compiled)
            losses.append(session.run(outfeed.dequeue()))
            session.save(f"{directory}/{run}")
        return losses, session.variables, session.optimizer_state()


def train_each(num_replicas, directory, num_runs):
    """What `train` returns under each schedule."""
    found = {}
    for schedule in ("Grouped", "Interleaved", "Sequential"):
        found[schedule] = train(schedule, num_replicas, f"{directory}/{schedule}", None, num_runs)
        ipu.config.reset_ipu_configuration()
    return found


def run(function, num_processes, num_replicas, tmp_path, *arguments):
    """What each process returns, and where the checkpoints are."""
    directory = tmp_path / f"run{sum(1 for _ in tmp_path.glob('run*'))}"
    directory.mkdir()
    given = [directory if one is None else one for one in arguments]
    started = joined.start(
        function,
        num_processes,
        4 * num_replicas // num_processes,
        *(str(one) if isinstance(one, Path) else one for one in given),
        directory=directory,
        joins_itself=True,
    )
    return joined.finish(started, directory, timeout=300), directory


def check_equal(made, expected):
    """Compares what processes returned with what one did."""
    (wanted_losses, wanted_variables, wanted_state) = expected
    has_losses = [all(len(losses) == 2 * COUNT for losses in one[0]) for one in made]
    assert has_losses.count(True) == 1
    for (losses, variables, state), is_here in zip(made, has_losses, strict=True):
        models.assert_trees_close(variables, wanted_variables)
        models.assert_trees_close(state, wanted_state)
        if is_here:
            models.assert_trees_close(losses, wanted_losses)
        else:
            assert [one.shape for one in losses] == [(0, *wanted.shape[1:]) for wanted in wanted_losses]


def test_two_processes_save_and_restore(tmp_path):
    (expected,), directory = run(train, 1, 1, tmp_path, "Grouped", 1, None, False, 2)
    made, own = run(train, 2, 1, tmp_path, "Grouped", 1, None, False, 2)
    check_equal(made, expected)
    assert (own / "1" / DOCUMENT).exists()
    # A checkpoint of several processes is restored by one, and the other way round.
    (after,), _ = run(train, 1, 1, tmp_path, "Grouped", 1, None, own / "0", 1)
    models.assert_trees_close(after[1], expected[1])
    models.assert_trees_close(after[0], expected[0][1:])
    both, _ = run(train, 2, 1, tmp_path, "Grouped", 1, None, directory / "0", 1)
    models.assert_trees_close(both[0][1], expected[1])


@pytest.mark.thorough
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_each_schedule_in_processes(num_replicas, tmp_path):
    (expected,), _directory = run(train_each, 1, num_replicas, tmp_path, num_replicas, None, 1)
    for number in (2, 4):
        made, _directory = run(train_each, number, num_replicas, tmp_path, num_replicas, None, 1)
        for schedule, wanted in expected.items():
            check_equal([one[schedule] for one in made], wanted)


@pytest.mark.thorough
def test_replicas_in_processes_share_out(tmp_path):
    (expected,), _directory = run(train, 1, 2, tmp_path, "Grouped", 2, None, False, 2)
    made, own = run(train, 2, 2, tmp_path, "Grouped", 2, None, False, 2, True)
    check_equal(made, expected)
    made, _own = run(train, 4, 2, tmp_path, "Grouped", 2, None, own / "0", 1, True)
    models.assert_trees_close(made[0][1], expected[1])
    (after,), _directory = run(train, 1, 2, tmp_path, "Grouped", 2, None, own / "0", 1)
    models.assert_trees_close(after[1], expected[1])

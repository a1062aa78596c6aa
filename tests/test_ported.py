"""The programs in `ported`: they run, their losses fall, and they compute what a plain loop computes."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ipu_pipeline as ipu
from ipu_pipeline import config_categories, datasets, utils
from ipu_pipeline.engine import reference
from ipu_pipeline.engine.state import PipelineState
from tests import front, models
from tests.ported import bert, pipelining, resnet, unet_industrial


@pytest.fixture(autouse=True)
def as_in_a_new_process(monkeypatch):
    monkeypatch.setattr(config_categories, "_warned", set())
    monkeypatch.setattr(utils, "_seed", 0)


def plain_loop(program, start, updates, seed=0, is_mean=False, find_weight=None):
    """Weight updates on one device, each from `jax.grad` of one micro-batch after another.

    Args:
      program: of one pipeline; of it only what its stages compute is used.
      start: the variables.
      updates: for each update its micro-batches, the values of the program's inputs, and the optimizer.
      seed: the session's.
      is_mean: whether gradients are divided by the number of micro-batches.
      find_weight: what the gradients are divided by, from what the last stage returned for all micro-batches.

    Returns:
      The losses, and the variables.
    """
    traced = program.calls[0].pipeline.traced
    specs = traced.variables.values()
    hidden = {spec.name: jnp.zeros(spec.shape, spec.dtype) for spec in specs if spec.name not in start}
    trained = [spec.name for spec in specs if spec.trainable and spec.name in start]
    variables = jax.tree.map(jnp.asarray, {**start, **hidden})
    optimizer_state, losses = None, []

    @jax.jit
    def gradients(variables, micro_batch, number, count, inputs):
        state = PipelineState(variables, None, np.int32(0), count, jax.random.key(seed))
        return reference.gradients(traced, state, micro_batch, number, inputs, trained)

    for update, (micro_batches, inputs, optimizer) in enumerate(updates):
        before, total, all_outputs = variables, None, []
        for number, micro_batch in enumerate(micro_batches):
            loss, found, outputs, variables = gradients(
                variables, micro_batch, np.int32(number), np.int32(update), inputs
            )
            total = found if total is None else jax.tree.map(jnp.add, total, found)
            losses.append(loss)
            all_outputs.append(outputs)
        divisor = len(micro_batches) if is_mean else 1 if find_weight is None else find_weight(all_outputs)
        total = jax.tree.map(lambda value, by=divisor: value / by, total)
        parameters = {name: before[name] for name in trained}
        with jax.numpy_dtype_promotion("standard"):
            if optimizer_state is None:
                optimizer_state = optimizer.init(parameters)
            changes, optimizer_state = optimizer.update(total, optimizer_state, parameters)
            variables = {**variables, **optax.apply_updates(parameters, changes)}
    return np.array(losses), {name: np.asarray(variables[name]) for name in start}


def initial_variables(seed):
    """Those of all compiled programs."""
    with ipu.Session(seed) as session:
        session.run(ipu.global_variables_initializer())
        return session.variables


def take(dataset, number):
    return list(itertools.islice(iter(dataset), number))


def groups_of(size, values):
    return [values[first : first + size] for first in range(0, len(values), size)]


# pipelining


def test_pipelining():
    argv = ["--steps", "3", "--filters", "4"]
    with pytest.warns(UserWarning, match="move_variable_initialization_to_cpu has no effect"):
        losses = pipelining.main(argv)
    args = pipelining.parse_args(argv)
    assert len(losses) == 3 * args.repeat_count * args.gradient_accumulation_count
    assert losses[-8:].mean() < losses[:8].mean()
    graph = pipelining.Graph(args)
    micro_batches = groups_of(4, take(pipelining.create_dataset(args), len(losses)))
    rate = np.float32(args.learning_rate)
    updates = [(group, [rate], optax.sgd(rate)) for group in micro_batches]
    expected, _variables = plain_loop(graph.train_op, initial_variables(args.seed), updates)
    models.assert_trees_close(losses, expected)

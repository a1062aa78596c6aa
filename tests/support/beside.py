"""A pipeline beside the plain loop over its model: the same numbers after every weight update."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.engine import reference
from tests.support import models


def copied(state):
    """A state on one device, whose arrays share no memory with the other's."""
    leaves, tree = jax.tree.flatten((state.variables, state.optimizer_state))
    variables, optimizer_state = jax.tree.unflatten(tree, [jnp.array(np.asarray(leaf)) for leaf in leaves])
    return dataclasses.replace(state, variables=variables, optimizer_state=optimizer_state)


def step_plainly(pipeline, state, step, *inputs, **others):
    """What the plain loop makes of a step: the state and the outputs.

    Args:
      pipeline: its optimizer, reduction and number of replicas are the plain loop's.
      state: before; on one device.
      step: the micro-batches.
      *inputs: the pipeline's.
      **others: options of the plain loop that are not to be the pipeline's.
    """
    given = {
        "optimizer": pipeline.options.optimizer,
        "reduction": pipeline.options.reduction,
        "num_replicas": pipeline.num_replicas,
    }
    of_shapes = [pipeline.for_shapes(micro_batch).traced for micro_batch in step]
    return reference.step(of_shapes, state, step, *inputs, **(given | others))


def train(pipeline, steps, *inputs, seed=0, bound=1e-5, change=lambda state: state, **others):
    """Trains a pipeline and the plain loop from the same state, and compares them after each update.

    Args:
      pipeline: one that trains, or only runs forwards.
      steps: the micro-batches of each step.
      *inputs: the pipeline's.
      seed: of the variables' initial values.
      bound: for the difference of each leaf; see `models.assert_trees_close`.
      change: of the state at the start.
      **others: as for `step_plainly`.

    Returns:
      The pipeline's last state and outputs.
    """
    state = change(pipeline.init(jax.random.key(seed), steps[0][0], *inputs))
    expected = copied(state)
    for step in steps:
        state, outputs = pipeline.step(state, step, *inputs)
        expected, wanted = step_plainly(pipeline, expected, step, *inputs, **others)
        models.assert_trees_close(outputs.losses, wanted.losses, bound)
        models.assert_trees_close(outputs.outputs, wanted.outputs, bound)
        models.assert_trees_close(state.variables, expected.variables, bound)
        models.assert_trees_close(state.optimizer_state, expected.optimizer_state, bound)
    return state, outputs

"""What runners tell a watcher; see `engine.watching`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ipu_pipeline.engine import watching
from ipu_pipeline.engine.devices.feeds import Take
from ipu_pipeline.engine.execution.contract import Request, Runner
from ipu_pipeline.engine.state import RunState
from ipu_pipeline.engine.watching import Watcher

__all__ = ["copy_state", "rehearse", "watched_take"]


def rehearse(watcher: Watcher, runner: Runner[Any], state: RunState, request: Request) -> None:
    """Before the first watched step, waits for earlier steps or, if there are none, runs each program once.

    The programs run on copies of the state and on micro-batches of zeros. What they make or raise is
    dropped. Nothing is run if a program calls Python, which would notice.
    """
    with watcher.rehearsing(runner) as is_first:
        if not is_first:
            return
        jax.block_until_ready((state.pipeline.variables, state.pipeline.optimizer_state))
        if runner.has_run or runner.has_callbacks:
            return
        num_carried = 0 if runner.iterated is None else len(runner.iterated.carried)
        fed = jax.tree.leaves(runner.placement.traced.element)[num_carried:]
        zeros = [jnp.zeros(leaf.shape, leaf.dtype) for leaf in fed]  # random keys have one, too

        def take(wanted: int) -> list[Any]:
            return [runner.place_element(zeros) if zeros else () for _number in range(wanted)]

        with contextlib.suppress(Exception):  # such as jax_debug_nans, or too little memory
            copied = copy_state(state)
            progress = runner.run(copied, runner.fetch(copied, request, take))
            after = progress.state
            jax.block_until_ready(
                (after.pipeline.variables, after.pipeline.optimizer_state, after.accumulators)
            )


def copy_state(state: RunState) -> RunState:
    """Copies a state's arrays, where they are."""
    pipeline = state.pipeline
    leaves, tree = jax.tree.flatten((pipeline.variables, pipeline.optimizer_state, state.accumulators))
    copies = jax.device_put(leaves, [leaf.sharding for leaf in leaves], may_alias=False)
    variables, optimizer_state, accumulators = jax.tree.unflatten(tree, copies)
    pipeline = dataclasses.replace(pipeline, variables=variables, optimizer_state=optimizer_state)
    return dataclasses.replace(state, pipeline=pipeline, accumulators=accumulators)


def watched_take(take: Take, step: int, first: int) -> Take:
    """Makes a take, of micro-batches from `first` on, tell a watcher how long it takes."""
    watcher = watching.current()
    if watcher is None:
        return take

    def watched(wanted: int) -> Sequence[Any]:
        nonlocal first
        with watcher.waiting(step, first, wanted):
            elements = take(wanted)
        first += len(elements)
        return elements

    return watched

"""What runners tell a watcher; see `engine.watching`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ipu_pipeline.engine import watching
from ipu_pipeline.engine.devices.constants import Constants
from ipu_pipeline.engine.devices.device_groups import DeviceGroup
from ipu_pipeline.engine.devices.feeds import Take
from ipu_pipeline.engine.devices.links import Tag
from ipu_pipeline.engine.devices.placing import copy_to
from ipu_pipeline.engine.execution.contract import Request, Runner
from ipu_pipeline.engine.execution.steps import Devices
from ipu_pipeline.engine.execution.templates import Template
from ipu_pipeline.engine.execution.weight_updates import WeightUpdate
from ipu_pipeline.engine.state import RunState
from ipu_pipeline.engine.watching import Launch, LaunchKind, Watcher

__all__ = [
    "Counting",
    "WatchedDevices",
    "copy_state",
    "launch_of",
    "rehearse",
    "watched_feed",
    "watched_take",
    "watched_updates",
]


@dataclass(frozen=True)
class Counting:
    """The numbers by which a watcher knows micro-batches."""

    step: int  # the number of the step, or of the run of a loop
    first: int  # the number of the first micro-batch, or of the iteration
    size: int  # the number of micro-batches that a program handles


class WatchedDevices(Devices):
    """The reading that runs a step and reports it to a watcher."""

    def __init__(self, constants: Constants, watcher: Watcher, runner: Any, counting: Counting) -> None:
        """Begins a step."""
        super().__init__(constants)
        self._watcher, self._runner, self._counting = watcher, runner, counting
        self._launch: Launch | None = None

    def launch(self, template: Template, arguments: list[Any], chunk: int) -> Sequence[Any]:
        """Starts a program."""
        self._launch = None
        if not template.group.is_here:
            return super().launch(template, arguments, chunk)
        self._launch = self.describe(template, chunk)
        results: Sequence[Any] = self._watcher.run(self._launch, template.function, arguments)
        return results

    def launch_jointly(
        self, template: Template, group: DeviceGroup, program: Any, arguments: Any, chunk: int
    ) -> Any:
        """Starts a program for all replicas. The transfers of its results are not reported."""
        self._launch = None
        if not group.is_here:
            return super().launch_jointly(template, group, program, arguments, chunk)
        launch = dataclasses.replace(self.describe(template, chunk), devices=group.first_devices)
        return self._watcher.run(launch, program, arguments)

    def forget(self) -> None:
        """Leaves the transfers that follow unreported: they belong to a program of all replicas."""
        self._launch = None

    def describe(self, template: Template, chunk: int) -> Launch:
        """Describes a program to the watcher."""
        counting = self._counting
        first = counting.first + chunk * counting.size
        return launch_of(self._runner, template, counting.step, first, counting.size)

    def copy_to(self, values: Sequence[Any], group: DeviceGroup, tag: Tag | None = None) -> list[Any]:
        """Copies arrays to another group."""
        copies = copy_to(values, group, tag)
        if self._launch is not None:
            self._watcher.moved(self._launch, group.first_devices, copies)
        return copies


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


def launch_of(runner: Runner[Any], template: Template, step: int, first: int, count: int) -> Launch:
    """Describes a dispatch of a template; arguments as in `Launch`."""
    return Launch(
        runner=runner,
        kind=template.kind.words,
        stage=template.stage,
        step=step,
        first=first,
        count=count,
        devices=template.group.first_devices,
        name=template.jitted.__name__,
        is_moved=template.function is not template.jitted,
    )


def watched_updates(
    runner: Runner[Any], weight_update: WeightUpdate, step: int
) -> list[Callable[..., list[Any]]] | None:
    """A function that starts a weight update's programs and tells the watcher; None without a watcher."""
    watcher, updates = watching.current(), runner.placement.updates
    if watcher is None or updates is None:
        return None

    def run(watcher: Watcher, number: int, stage: int, *arguments: Any) -> list[Any]:
        function, jitted = weight_update.functions[number], weight_update.jitted[number]
        if not runner.placement.groups[stage].is_here:
            return list(function(*arguments))
        launch = Launch(
            runner=runner,
            kind=LaunchKind.UPDATE,
            stage=stage,
            step=step,
            first=0,
            count=0,
            devices=runner.placement.groups[stage].first_devices,
            name=jitted.__name__,
            is_moved=function is not jitted,
        )
        made: list[Any] = watcher.run(launch, function, arguments)
        return made

    return [
        functools.partial(run, watcher, number, program.stage)
        for number, program in enumerate(updates.updates)
    ]


def watched_feed(
    watcher: Watcher, step: int, size: int, next_chunk: Callable[[], Sequence[Any]]
) -> Callable[[], Sequence[Any]]:
    """Makes `next_chunk`, of `size` micro-batches, tell the watcher how long it takes."""
    numbers = itertools.count(step=size)

    def watched() -> Sequence[Any]:
        with watcher.waiting(step, next(numbers), size):
            return next_chunk()

    return watched


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

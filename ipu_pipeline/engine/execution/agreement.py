"""Agreements of processes: on the programs, on the micro-batches of a step, on the end of a loop."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ipu_pipeline.engine import peers
from ipu_pipeline.engine.devices.device_groups import absent, is_here
from ipu_pipeline.engine.devices.links import links, naming_peers
from ipu_pipeline.engine.devices.state_placement import StatePlacement
from ipu_pipeline.engine.execution.contract import Runner
from ipu_pipeline.engine.state import RunState
from ipu_pipeline.engine.tracing.stages import TracedPipeline
from ipu_pipeline.engine.updates.update_programs import Updates
from ipu_pipeline.ground import jax_core
from ipu_pipeline.ground.errors import OutOfRangeError, ProcessError

# What the processes of a pipeline or loop agree on: whether there are micro-batches for a step, and more.
#
# Only processes with stages that read the feed take micro-batches. If the data of one of them end, it ends
# the step, and the others would wait for values that never come. So all micro-batches of a step are there
# before it begins: each process that reads some tells all others, and waits for the others that read.


def agree_on_elements(
    placement: StatePlacement, readers: Collection[int], hearers: Collection[int], error: Exception | None
) -> None:
    """Raises in all processes if one did not get the micro-batches of a step. All of them call it.

    An error counts before the end of the data, and of these that of the process with the least number.
    """
    own = None
    if error is not None:
        own = (isinstance(error, OutOfRangeError), f"{type(error).__name__}: {error}")
    told = _tell_all(placement, "micro-batches", readers, hearers, own)
    failed = {process: one for process, one in told.items() if one is not None}
    if not failed:
        return
    first = min(failed, key=lambda process: (failed[process][0], process))
    if error is not None and first == links().process:
        raise error
    is_end, text = failed[first]
    kind = OutOfRangeError if is_end else ProcessError
    raise kind(f"In process {first}, which reads the micro-batches: {text}") from error


def answer_everywhere(placement: StatePlacement, asked: Sequence[Any], homes: Sequence[Any]) -> list[bool]:
    """Waits for the boolean scalars of a condition, in all processes that have a part in a loop."""
    if not placement.has_peers:
        return list(map(bool, asked))
    what = "condition of a loop"
    here = [number for number, home in enumerate(homes) if is_here(home)]
    with peers.waiting(f"the {what}"), naming_peers():
        own = {number: bool(np.asarray(asked[number])) for number in here}
    processes = {home.process_index for home in homes}
    told = _tell_all(placement, what, processes, placement.groups[0].processes, list(own.items()))
    answers = dict(answer for one in told.values() for answer in one)
    return [answers[number] for number in range(len(homes))]


def _tell_all(
    placement: StatePlacement, what: str, tellers: Collection[int], hearers: Collection[int], own: Any
) -> dict[int, Any]:
    """Has some processes tell all others something, as JSON. Returns what each tells."""
    subject, time = placement.name_agreement(what)
    here = links().process
    if here in tellers:
        text = json.dumps([subject, time, own])
        with peers.waiting(f"the {what}"):  # until the others have connected, the first time
            for process in hearers:
                if process != here:
                    links().tell(process, text)

    told = {here: own} if here in tellers else {}
    with peers.waiting(f"the {what}"):
        for process in sorted(set(tellers) - {here}):
            told[process] = _hear(process, subject, time)
    return told


def _hear(process: int, subject: str, time: int) -> Any:
    """Waits for what a process tells. Skips texts of agreements that an error here ended."""
    other, other_time, told = None, -1, None
    while (other, other_time) != (subject, time):
        if other is not None and not (other == subject and other_time < time):
            raise ProcessError(
                f"Process {process} is at another place ({other}, time {other_time}) than this process "
                f"({subject}, time {time}). All must do the same things in the same order."
            )
        other, other_time, told = json.loads(links().hear(process))
    return told


# Checks that several processes have the same programs of a pipeline or loop before they run them.
#
# Functions cannot be compared, but their traces can: which operations, in which order, on which shapes.
# A difference only in numbers that functions hold, such as a learning rate, is not found.


def agree_on(
    what: str,
    traced: TracedPipeline,
    updates: Updates | None,
    told: Mapping[str, str],
    devices: Sequence[Any],
) -> None:
    """Compares stages with the other processes' stages, if there are any; all processes call it."""
    others = peers.current()
    if others is not None:
        where = ", ".join(f"{device.platform} {device.id}" for device in devices)
        others.agree(what, {**told, **describe_programs(traced, updates), "the devices": where})


def describe_programs(traced: TracedPipeline, updates: Updates | None) -> dict[str, str]:
    """Descriptions of stages and an optimizer, by subject."""
    found = {}
    for stage in traced.stages:
        found[f"the variables of {stage.place}"] = ", ".join(map(repr, stage.variables)) or "none"
        lines = list(_describe_operations(stage.flat.equations))
        found[f"the program of {stage.place}"] = f"{len(lines)} operations ({digest(lines)})"
    if updates is not None:
        leaves = [f"{leaf.path}: {leaf.aval.dtype}{list(leaf.aval.shape)}" for leaf in updates.state_leaves]
        found["the optimizer's state"] = ", ".join(leaves) or "none"
        found["the programs of the weight update"] = ", ".join(program.name for program in updates.updates)
    return found


def identify_operations(equations: Iterable[Any]) -> str:
    """A short text that differs where operations do, or what they are told: how often a loop runs, say."""
    return digest(list(_describe_operations(equations, with_numbers=True)))


def _describe_operations(equations: Iterable[Any], *, with_numbers: bool = False) -> Iterator[str]:
    for equation in equations:
        operands = [str(v.val) if isinstance(v, jax_core.Literal) else v.aval for v in equation.invars]
        results = [variable.aval for variable in equation.outvars]
        told = {key: found for key, found in equation.params.items() if with_numbers and _is_plain(found)}
        yield f"{equation.primitive} {[*map(_of_aval, operands)]} {[*map(_of_aval, results)]} {told or ''}"
        for body in jax_core.jaxprs_in_params(equation.params):
            yield from _describe_operations(body.eqns, with_numbers=with_numbers)


def _is_plain(value: Any) -> bool:
    """Whether a parameter is made of words and numbers, which are the same text in every process."""
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str, np.generic))


def _of_aval(value: Any) -> str:
    return (
        value if isinstance(value, str) else f"{getattr(value, 'dtype', '')}{getattr(value, 'shape', '')}"
    )


def digest(lines: Sequence[str]) -> str:
    """A short text that differs where the lines differ."""
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()


# Tells processes without any device of a loop how its run ended, and how much was done.
#
# They cannot go through the iterations beside the others, because the number of iterations depends on data
# and conditions that they do not have. So they wait until the process of the first device reports the end.

_END_OF_LOOP = "the end of a loop"


@dataclass
class Done:
    """Counts the iterations that a run has done so far."""

    count: int = 0


def has_part(runner: Runner[Any]) -> bool:
    """Whether this process has a device of a loop; a process that runs alone does."""
    return any(group.is_here for group in runner.placement.groups)


def _teller(runner: Runner[Any]) -> int:
    return int(runner.placement.groups[0].devices[0].process_index)


@contextlib.contextmanager
def telling_end(runner: Runner[Any], done: Done) -> Iterator[None]:
    """Wraps a run in a process that has a part in it: tells the others how it ends."""
    others = peers.current()
    if others is None:
        yield
        return
    try:
        yield
    except BaseException as error:
        told = [done.count, isinstance(error, OutOfRangeError), f"{type(error).__name__}: {error}"]
        with contextlib.suppress(Exception):  # the first error is the one to tell
            others.tell(_END_OF_LOOP, _teller(runner), json.dumps(told), is_read=False)
        raise
    others.tell(_END_OF_LOOP, _teller(runner), json.dumps([done.count, False, None]), is_read=False)


def hear_end(runner: Runner[Any], done: Done) -> None:
    """Waits for the end of a run in which this process has no part, and takes over what was done."""
    others = peers.current()
    assert others is not None
    teller = _teller(runner)
    done.count, is_end, text = json.loads(others.tell(_END_OF_LOOP, teller))
    if text is not None:
        error = OutOfRangeError if is_end else ProcessError
        raise error(f"In process {teller}, which has a part in the loop: {text}")


def skip_iterations(runner: Runner[Any], state: RunState, count: int, every: int) -> RunState:
    """The state after `count` iterations in other processes."""
    if runner.placement.updates is None or not count:
        return state
    avals = runner.placement.traced.output_avals
    outputs = [
        {n: absent(aval.shape, aval.dtype, home.groups[-1].replicated) for n, aval in enumerate(avals)}
        for home in runner.homes
    ]
    state = runner.with_optimizer(state, outputs)
    num_updates, num_accumulated = divmod(state.num_accumulated + count, every)
    pipeline = dataclasses.replace(
        state.pipeline, update_count=int(state.pipeline.update_count) + num_updates
    )
    return RunState(pipeline, state.accumulators, num_accumulated)

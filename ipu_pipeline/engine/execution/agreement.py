"""Agreements of processes: on the programs, on the micro-batches of a step, on the end of a loop."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ipu_pipeline.engine import peers
from ipu_pipeline.engine.devices.device_groups import absent, is_here
from ipu_pipeline.engine.devices.links import links, naming_peers
from ipu_pipeline.engine.devices.state_placement import StatePlacement
from ipu_pipeline.engine.execution.contract import Runner
from ipu_pipeline.engine.state import PipelineState
from ipu_pipeline.engine.tracing.stages import TracedPipeline
from ipu_pipeline.engine.updates.update_programs import Updates
from ipu_pipeline.ground import jax_core
from ipu_pipeline.ground.errors import OutOfRangeError, ProcessError

# The micro-batches of a step are all there before it begins: if one process's data ended within it, the
# others would wait for values that never come. So each process that reads the feed tells all others.


def agree_on_elements(
    placement: StatePlacement, readers: Collection[int], hearers: Collection[int], error: Exception | None
) -> None:
    """Raises in all processes if one did not get the micro-batches of a step. All of them call it.

    An error takes precedence over the end of the data. If several processes have errors, that of the
    process with the lowest index is raised.
    """
    own_fault = None
    if error is not None:
        own_fault = (isinstance(error, OutOfRangeError), f"{type(error).__name__}: {error}")
    faults = _tell_all(placement, "micro-batches", readers, hearers, own_fault)
    failed = {process: fault for process, fault in faults.items() if fault is not None}
    if not failed:
        return
    first = min(failed, key=lambda process: (failed[process][0], process))
    if error is not None and first == links().process:
        raise error
    is_end, text = failed[first]
    kind = OutOfRangeError if is_end else ProcessError
    raise kind(f"In process {first}, which reads the micro-batches: {text}") from error


def answer_everywhere(
    placement: StatePlacement, conditions: Sequence[Any], homes: Sequence[Any]
) -> list[bool]:
    """Waits for the boolean scalars of a condition, in all processes that have a part in a loop."""
    if not placement.has_peers:
        return list(map(bool, conditions))
    subject = "condition of a loop"
    own_places = [place for place, home in enumerate(homes) if is_here(home)]
    with peers.waiting(f"the {subject}"), naming_peers():
        own_answers = [(place, bool(np.asarray(conditions[place]))) for place in own_places]
    processes = {home.process_index for home in homes}
    messages = _tell_all(placement, subject, processes, placement.groups[0].processes, own_answers)
    answers = dict(answer for pairs in messages.values() for answer in pairs)
    return [answers[place] for place in range(len(homes))]


def _tell_all(
    placement: StatePlacement, name: str, tellers: Collection[int], hearers: Collection[int], message: Any
) -> dict[int, Any]:
    """Exchanges messages, as JSON, from some processes to all. Returns them by process."""
    subject, time = placement.name_agreement(name)
    own_process = links().process
    if own_process in tellers:
        text = json.dumps([subject, time, message])
        with peers.waiting(f"the {name}"):  # until the others have connected, the first time
            for process in hearers:
                if process != own_process:
                    links().tell(process, text)

    messages = {own_process: message} if own_process in tellers else {}
    with peers.waiting(f"the {name}"):
        for process in sorted(set(tellers) - {own_process}):
            messages[process] = _hear(process, subject, time)
    return messages


def _hear(process: int, subject: str, time: int) -> Any:
    """Waits for what a process tells. Skips texts of agreements that an error here ended."""
    subject_there, time_there, message = None, -1, None
    while (subject_there, time_there) != (subject, time):
        if subject_there is not None and not (subject_there == subject and time_there < time):
            raise ProcessError(
                f"Process {process} is at another place ({subject_there}, time {time_there}) than this "
                f"process ({subject}, time {time}). All must do the same things in the same order."
            )
        subject_there, time_there, message = json.loads(links().hear(process))
    return message


# The programs are compared before they run, by their traces, since functions cannot be compared. A
# difference only in numbers that functions hold, such as a learning rate, is not found.


def agree_on(subject: str, describe: Callable[[], Mapping[str, str]], devices: Sequence[Any]) -> None:
    """Compares descriptions with the other processes', if there are any; all processes call it."""
    joined = peers.current()
    if joined is not None:
        where = ", ".join(f"{device.platform} {device.id}" for device in devices)
        joined.agree(subject, {**describe(), "the devices": where})


def describe_programs(traced: TracedPipeline, updates: Updates | None) -> dict[str, str]:
    """Descriptions of stages and an optimizer, by subject."""
    descriptions = {}
    for stage in traced.stages:
        descriptions[f"the variables of {stage.place}"] = ", ".join(map(repr, stage.variables)) or "none"
        lines = list(_describe_operations(stage.flat.equations))
        descriptions[f"the program of {stage.place}"] = f"{len(lines)} operations ({peers.digest(lines)})"
    if updates is not None:
        leaves = [f"{leaf.path}: {leaf.aval.dtype}{list(leaf.aval.shape)}" for leaf in updates.state_leaves]
        descriptions["the optimizer's state"] = ", ".join(leaves) or "none"
        descriptions["the programs of the weight update"] = ", ".join(
            program.name for program in updates.updates
        )
    return descriptions


def identify_operations(equations: Iterable[Any]) -> str:
    """A short text that differs where operations or their parameters do: how often a loop runs, say."""
    return peers.digest(_describe_operations(equations, with_numbers=True))


def _describe_operations(equations: Iterable[Any], *, with_numbers: bool = False) -> Iterator[str]:
    for equation in equations:
        operands = [str(v.val) if isinstance(v, jax_core.Literal) else v.aval for v in equation.invars]
        results = [variable.aval for variable in equation.outvars]
        plain = {key: value for key, value in equation.params.items() if with_numbers and _is_plain(value)}
        yield f"{equation.primitive} {[*map(_text_of, operands)]} {[*map(_text_of, results)]} {plain or ''}"
        for body in jax_core.jaxprs_in_params(equation.params):
            yield from _describe_operations(body.eqns, with_numbers=with_numbers)


def _is_plain(value: Any) -> bool:
    """Whether a parameter is made of words and numbers, which are the same text in every process."""
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str, np.generic))


def _text_of(value: Any) -> str:
    if isinstance(value, str):
        return value
    return f"{getattr(value, 'dtype', '')}{getattr(value, 'shape', '')}"


# The end of a loop's run, for processes without any device of the loop: the number of its iterations
# depends on data and conditions that they do not have, so they wait until another process reports the end.

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
def telling_end(runner: Runner[Any], progress: Done) -> Iterator[None]:
    """Wraps a run in a process that has a part in it: tells the others how it ends."""
    joined = peers.current()
    if joined is None:
        yield
        return
    try:
        yield
    except BaseException as error:
        report = [progress.count, isinstance(error, OutOfRangeError), f"{type(error).__name__}: {error}"]
        with contextlib.suppress(Exception):  # the first error is the one to tell
            joined.tell(_END_OF_LOOP, _teller(runner), json.dumps(report), is_read=False)
        raise
    joined.tell(_END_OF_LOOP, _teller(runner), json.dumps([progress.count, False, None]), is_read=False)


def hear_end(runner: Runner[Any], progress: Done) -> None:
    """Waits for the end of a run in which this process has no part. Sets the number of iterations done."""
    joined = peers.current()
    assert joined is not None
    teller = _teller(runner)
    progress.count, is_end, text = json.loads(joined.tell(_END_OF_LOOP, teller))
    if text is not None:
        error = OutOfRangeError if is_end else ProcessError
        raise error(f"In process {teller}, which has a part in the loop: {text}")


def skip_iterations(runner: Runner[Any], state: PipelineState, count: int, every: int) -> PipelineState:
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
    update_count = int(state.update_count) + num_updates
    return dataclasses.replace(state, update_count=update_count, num_accumulated=num_accumulated)

"""Runs the segments, pipelines and loops of a program on the state of a session.

The state changes after each weight update of a pipeline, and after each iteration of a loop, or block of
iterations.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ipu_pipeline.engine import Pipeline
from ipu_pipeline.engine.fronts import Progress, Take, fit_replicas, read_count
from ipu_pipeline.engine.inspect import Runner, introduce
from ipu_pipeline.processes import announcing, interrupts, selection
from ipu_pipeline.queues.synthetic import make_synthetic, uses_synthetic_data
from ipu_pipeline.tf1 import utils
from ipu_pipeline.tf1.graph.placeholders import Placeholder
from ipu_pipeline.tf1.program.calls import Call, LoopCall, PipelineCall, find_num_replicas
from ipu_pipeline.tf1.program.host_tables import check_tables
from ipu_pipeline.tf1.program.program import Program
from ipu_pipeline.tf1.session.host_rows import HostRows, connected
from ipu_pipeline.tf1.session.resuming import Resumption
from ipu_pipeline.tf1.session.store import Store

__all__ = ["Limit", "check_feeds", "reads_data", "run_program"]

_BLIND_ITERATIONS = 64  # of a while_loop without a feed, before the host checks its condition


@dataclass(frozen=True)
class Limit:
    """The part of their `repeat_count` that pipelines run; see `Session.run_part`."""

    num_done: int = 0
    max_updates: int | None = None
    should_stop: Callable[[], bool] | None = None


def run_program(
    program: Program,
    feed_dict: Mapping[Placeholder, Any],
    store: Store,
    resumption: Resumption,
    limit: Limit,
) -> list[np.ndarray[Any, Any]]:
    """Runs a program; see `Session.run`."""
    values = program.function.begin(program.feed(feed_dict))
    for step in program.function.steps:  # checks a fed count before anything runs
        call = None if step.number is None else program.calls[step.number]
        if step.number is not None and isinstance(call, PipelineCall) and call.has_count_operand:
            value = values.find(step.operands[0])
            if value is not None:
                count = call.check_count(read_count(call.name, value))
                check_tables(program.host_tables, call, call.pipeline.updated_every(count))
    for infeed in program.infeeds:
        infeed.check_initialized()
    with connected(program.host_tables, store) as rows:
        devices = selection.devices_for(program.ipu_device, program.num_ipus)
        for step in program.function.steps:
            if step.number is None:
                variables = [store.variable(spec) for spec in step.reads.values()]
                # Rows of tables are looked up before what follows changes them.
                values.compute(step, variables, devices, waits=bool(rows.tables))
                continue
            call, operands = program.calls[step.number], values.operands(step)
            if isinstance(call, PipelineCall):
                _run_pipeline(call, operands, devices, rows, store, resumption, limit)
            else:
                values.set_results(step, _run_loop(call, operands, devices, rows, store, resumption))
        return values.outputs()


def check_feeds(programs: Sequence[Program], feed_dict: Mapping[Any, Any]) -> None:
    """Raises if a key of the feed is not a placeholder of the programs."""
    known = dict.fromkeys(placeholder for program in programs for placeholder in program.placeholders)
    for key in feed_dict:
        if not isinstance(key, Placeholder):
            raise TypeError(f"feed_dict: keys must be placeholders; got {key!r}.")
        if key not in known:
            raise ValueError(
                f"feed_dict: {key!r} is not an input of this program. Inputs are: "
                f"{', '.join(repr(placeholder) for placeholder in known) or 'none'}."
            )


def _run_pipeline(
    call: PipelineCall,
    operands: Sequence[Any],
    devices: Sequence[Any],
    rows: HostRows,
    store: Store,
    resumption: Resumption,
    limit: Limit,
) -> None:
    pipeline, inputs, count = call.pipeline, operands, None
    if call.has_count_operand:
        count, inputs = call.check_count(read_count(call.name, operands[0])), operands[1:]
    if call.trains:
        pipeline.set_recomputation(call.find_recomputation())
    resumption.before_run(call)
    runner, devices = _prepare(call, devices)
    num_replicas = pipeline.num_replicas
    inputs = fit_replicas(call.name, inputs, num_replicas)
    if call.begin_input is not None:
        begin = store.update_count(call) - limit.num_done
        inputs[call.begin_input] = np.array(begin % 2**32, np.uint32).astype(np.int32)
    introduce(pipeline, call.name)
    take: Take | None = None
    is_synthetic = uses_synthetic_data()
    if call.infeed_queue is not None and is_synthetic:
        fed = jax.tree.leaves(pipeline.traced.element)
        take = make_synthetic(pipeline, fed, pipeline.updated_every(count) * num_replicas)
    elif call.infeed_queue is not None and runner.takes_elements:
        every = pipeline.updated_every(count)
        num_fetched = runner.num_fetched(call.repeat_count * every, every)
        may_vary = pipeline.options.max_shapes > 1
        take = call.infeed_queue.connect(pipeline.place_element, num_fetched, shapes_may_vary=may_vary)
    states = [pipeline.place(store.make_pipeline_state(call))]  # nothing holds on to it while it runs
    wanted = call.repeat_count if limit.max_updates is None else min(call.repeat_count, limit.max_updates)
    micro_batches = pipeline.options.num_micro_batches if count is None else count
    assert micro_batches is not None
    every = pipeline.updated_every(count)
    check_tables(rows.tables, call, every)
    with announcing.running(store, call.name, pipeline, runner, devices, micro_batches) as told:

        def keep(progress: Progress, num_done: int) -> None:
            after = progress.state.pipeline
            with store.lock:
                store.keep(call, after)
                rows.keep(call, is_update=True)
            if not is_synthetic and call.infeed_queue is not None and runner.takes_elements:
                call.infeed_queue.mark(progress.num_ahead)
            call.hand_out(progress)
            last = int(after.update_count if call.trains else after.execution_count)
            store.metrics.add(call, num_done, last, progress)
            told.done(num_done * every * num_replicas, last)

        state = pipeline.run(
            states.pop(),
            take,
            inputs,
            keep,
            wanted,
            call.repeat_count,
            num_micro_batches=count,
            # With synthetic data what is on the devices is one update's. Tables change between updates.
            one_by_one=is_synthetic or bool(rows.trained_by(call)),
            replacing=functools.partial(_replacing, store, pipeline),
            should_stop=limit.should_stop,
        )
        jax.block_until_ready((state.variables, state.optimizer_state))


def _prepare(call: Call, devices: Sequence[Any]) -> tuple[Runner[Any], Sequence[Any]]:
    """Returns the runner of a pipeline or loop, and the selected devices that it uses."""
    num_replicas = find_num_replicas(call)
    dealt = call.replication.deal_devices(devices, num_replicas)
    chosen = [device for own in dealt for device in own]
    call.runner.set_replicas(num_replicas, utils.replicas_are_identical())
    return call.runner.prepare(chosen), chosen


def reads_data(program: Program) -> bool:
    """Whether this process reads micro-batches for a pipeline of the program; not all processes do."""
    devices = selection.devices_for(program.ipu_device, program.num_ipus)
    calls = [call for call in program.calls if isinstance(call, PipelineCall)]
    return any(_takes_elements(call, devices) for call in calls)


def _takes_elements(call: PipelineCall, devices: Sequence[Any]) -> bool:
    return _prepare(call, devices)[0].takes_elements


def _run_loop(
    call: LoopCall,
    operands: Sequence[Any],
    devices: Sequence[Any],
    rows: HostRows,
    store: Store,
    resumption: Resumption,
) -> list[Any]:
    loop, body = call.loop, call.loop.body
    resumption.before_run(call)
    runner, devices = _prepare(call, devices)
    num_replicas = loop.num_replicas
    count = call.count
    if call.has_count_operand:
        count, operands = max(0, read_count(call.name, operands[0])), operands[1:]
    operands = fit_replicas(call.name, operands, num_replicas)
    num_captured = len(body.captured)
    introduce(loop, call.name)
    # Tables in host memory change between iterations.
    total = 1 if rows.trained_by(call) else _block_limit(call, count)
    num_fetched = loop.num_fetched_by(total)
    states = [store.place_loop_state(call)]  # nothing holds on to it while it runs
    rows.resume(call, states[0].num_accumulated)
    take: Take | None = None
    infeed = call.infeed_queue
    if infeed is not None and uses_synthetic_data():
        infeed = None
        take = make_synthetic(
            loop, jax.tree.leaves(body.pipeline.element)[len(body.changing) :], num_fetched
        )
    if not runner.takes_elements or count == 0:
        infeed = None
    if infeed is not None:
        take = infeed.connect(loop.place_element, num_fetched, is_tentative=loop.has_condition)
    has_part = loop.has_part  # a process without any device of the loop announces nothing
    with (
        announcing.running(store, call.name, loop, runner, devices, total)
        if has_part
        else contextlib.nullcontext() as told
    ):

        def keep(progress: Progress, num_unneeded: int) -> None:
            state = progress.state
            with store.lock:
                store.keep_loop(call, state)
                rows.keep(call, is_update=state.num_accumulated == 0)
            if infeed is not None:
                infeed.mark(num_unneeded)
            for part in progress.collected:
                enqueued = loop.split_enqueued(part)
                for (entry, _places), leaves in zip(body.enqueued, enqueued, strict=True):
                    entry.target.extend(leaves, part.size)
            num_updates = state.pipeline.update_count if call.trains else None
            assert told is not None
            told.done(progress.count * num_replicas, num_updates)

        return loop.iterate(
            states.pop(),
            take,
            operands[:num_captured],
            operands[num_captured:],
            keep,
            functools.partial(store.keep_loop, call),
            count,
            total,
            replacing=functools.partial(_replacing, store, loop),
            give_back=(lambda: None) if infeed is None else infeed.give_back,
        )


@contextlib.contextmanager
def _replacing(store: Store, pipeline: Pipeline) -> Iterator[None]:
    """Delays interrupts and holds `Store.lock` while a state is replaced by the next one.

    A program that calls back into Python must not keep that code from reading the session, so for it the
    lock is not held. Its arrays stay readable anyway.
    """
    lock = contextlib.nullcontext() if pipeline.prepare().waits_for_python else store.lock
    with interrupts.deferred(), lock:
        yield


def _block_limit(call: LoopCall, count: int | None) -> int:
    """The number of iterations of a loop that may be run together."""
    if call.loop.has_condition:  # at most those that have been fetched ahead
        most = _BLIND_ITERATIONS if call.infeed_queue is None else call.infeed_queue.prefetch_depth
        return most if count is None else min(most, max(1, count))
    assert count is not None
    # A count that is only known when the program runs must not need a compilation of its own.
    return 1 << (count - 1).bit_length() if call.has_count_operand and count > 0 else count

"""Runs a program: its segments, pipelines and loops, on the state of a session.

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
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core

from ipu_pipeline.engine import peers, watching
from ipu_pipeline.engine.devices.elsewhere import is_here
from ipu_pipeline.engine.devices.everywhere import read_everywhere
from ipu_pipeline.engine.devices.feeds import Take, take_nothing
from ipu_pipeline.engine.devices.links import check_peers, naming_peers
from ipu_pipeline.engine.devices.placing import put_host_copies
from ipu_pipeline.engine.devices.rows import Row, make_rows
from ipu_pipeline.engine.execution.contract import Request, Runner
from ipu_pipeline.engine.execution.watched import rehearse
from ipu_pipeline.engine.state import OfReplicas, Progress, RunState, of_replica
from ipu_pipeline.processes import announcing, interrupts, selection
from ipu_pipeline.queues.synthetic import make_synthetic, uses_synthetic_data
from ipu_pipeline.tf1 import utils
from ipu_pipeline.tf1.graph.placeholders import Placeholder
from ipu_pipeline.tf1.program.calls import Call, LoopCall, PipelineCall, find_num_replicas
from ipu_pipeline.tf1.program.host_tables import check_tables
from ipu_pipeline.tf1.program.program import CallStep, Program, Segment, read_atom
from ipu_pipeline.tf1.session.host_rows import HostRows, connected
from ipu_pipeline.tf1.session.outsiders import Done, has_part, hear_end, skip, telling_end
from ipu_pipeline.tf1.session.resuming import Resumption
from ipu_pipeline.tf1.session.store import Store

__all__ = ["Limit", "check_feeds", "reads_data", "run_program"]

_MEND_REPLICAS = (
    "Let all of them have as many replicas; or return what is the same for all, such as what "
    "cross_replica_ops.cross_replica_mean gives, and feed it to another program."
)
_BLIND_ITERATIONS = 64  # of a while_loop without a feed, before the host looks at its condition


@dataclass(frozen=True)
class Limit:
    """Where pipelines end before their `repeat_count`; see `Session.run_part`."""

    max_updates: int | None = None
    should_stop: Callable[[], bool] | None = None


def run_program(
    program: Program,
    feed_dict: Mapping[Placeholder, Any],
    store: Store,
    resumption: Resumption,
    limit: Limit,
) -> list[np.ndarray[Any, Any]]:
    """Runs a program; see `Session.run`.

    Args:
      program: the program.
      feed_dict: placeholder -> value.
      store: the session's state.
      resumption: what a restored session has still to put back.
      limit: where its pipelines end.

    Returns:
      The leaves of what the compiled function returned, as NumPy arrays.
    """
    values = dict(program.constants)
    for var, value in zip(program.input_vars, program.feed(feed_dict), strict=True):
        values[var] = value
    for step in program.steps:  # a count that is fed is checked before anything runs
        if isinstance(step, CallStep) and isinstance(step.call, PipelineCall):
            for atom in step.operands[: step.call.has_count_operand]:
                if isinstance(atom, jex_core.Literal) or atom in values:
                    count = step.call.check_count(_read_count(step.call, read_atom(values, atom)))
                    check_tables(program.host_tables, step.call, step.call.pipeline.updated_every(count))
    for infeed in program.infeeds:
        infeed.check_initialized()
    with connected(program.host_tables, store) as rows:
        return _run_steps(program, values, rows, store, resumption, limit)


def _run_steps(
    program: Program,
    values: dict[Any, Any],
    rows: HostRows,
    store: Store,
    resumption: Resumption,
    limit: Limit,
) -> list[np.ndarray[Any, Any]]:
    """Runs the steps of a program; of its values those are known that its inputs have."""
    devices = selection.devices_for(program.ipu_device, program.num_ipus)
    row = make_rows([next(filter(is_here, devices), None) or jax.local_devices()[0]], (0,))[0]
    for step in program.steps:
        if not isinstance(step, CallStep):
            read = read_everywhere([store.variable(spec) for spec in step.reads.values()])
            values.update(zip(step.reads, read, strict=True))
            made = _run_segment(step, [values[v] for v in step.arguments], row)
            if rows.tables:  # looked up before what follows changes them
                jax.block_until_ready(made)
            values.update(zip(step.results, _of_every_process(made), strict=True))
            continue
        operands = [read_atom(values, atom) for atom in step.operands]
        if isinstance(step.call, PipelineCall):
            _run_pipeline(step.call, operands, devices, rows, store, resumption, limit)
        else:
            results = _run_loop(step.call, operands, devices, rows, store, resumption)
            values.update(zip(step.results, results, strict=True))
    returned = [of_replica(read_atom(values, atom), 0) for atom in program.result_atoms]
    return [one if _is_key(one) else np.array(one) for one in returned]


def _run_segment(segment: Segment, arguments: Sequence[Any], row: Row) -> list[Any]:
    """What is computed between calls: of what replicas have apart, for each replica."""
    sizes = {len(value.values) for value in arguments if isinstance(value, OfReplicas)}
    if not sizes:
        return segment.function(*put_host_copies(arguments, row))
    if len(sizes) > 1:
        raise ValueError(
            "A computation between loops takes values of loops with different numbers of replicas: "
            f"{', '.join(map(str, sorted(sizes)))}. {_MEND_REPLICAS}"
        )
    made = [
        segment.function(*put_host_copies([of_replica(value, replica) for value in arguments], row))
        for replica in range(sizes.pop())
    ]
    return [OfReplicas(values) for values in zip(*made, strict=True)]


def _fit_replicas(call: Call, operands: Sequence[Any], num_replicas: int) -> list[Any]:
    """Operands for so many replicas; of a call without replicas, those of the first one that has them."""
    if num_replicas == 1:
        return [of_replica(value, 0) for value in operands]
    sizes = {len(value.values) for value in operands if isinstance(value, OfReplicas)} - {num_replicas}
    if sizes:
        raise ValueError(
            f"{call.name!r} has {num_replicas} replicas, and takes a value that a loop of {min(sizes)} "
            f"replicas gave, one for each of them. {_MEND_REPLICAS}"
        )
    return list(operands)


def _read_count(call: Call, value: Any) -> int:
    """The count of a loop or pipeline that is an operand of its call."""
    given = value.values if isinstance(value, OfReplicas) else (value,)
    counts = list(map(int, given))
    if len(set(counts)) > 1:
        raise ValueError(
            f"The count of {call.name!r} must be the same in all replicas, which compute together; a loop "
            f"gave them {counts}. Let it depend on what is the same in all, such as what "
            "cross_replica_ops.cross_replica_mean gives."
        )
    return counts[0]


def check_feeds(programs: Sequence[Program], feed_dict: Mapping[Any, Any]) -> None:
    """Raises if something is fed that is no placeholder of the programs."""
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
        count, inputs = call.check_count(_read_count(call, operands[0])), operands[1:]
    if call.trains:
        pipeline.set_recomputation(call.find_recomputation())
    resumption.before_run(call)
    runner, devices = _prepare(call, devices)
    num_replicas = pipeline.num_replicas
    inputs = _fit_replicas(call, inputs, num_replicas)
    _introduce(call, runner)
    take: Take = take_nothing
    is_synthetic = uses_synthetic_data()
    if call.infeed_queue is not None and is_synthetic:
        fed = jax.tree.leaves(pipeline.traced.element)
        take = make_synthetic(runner, fed, pipeline.updated_every(count) * num_replicas)
    elif call.infeed_queue is not None and runner.takes_elements:
        num_fetched = pipeline.num_fetched(call.repeat_count, count)
        take = call.infeed_queue.connect(runner.place_element, num_fetched)
    states = [pipeline.place(store.make_pipeline_state(call))]  # nothing holds on to it while it runs
    wanted = call.repeat_count if limit.max_updates is None else min(call.repeat_count, limit.max_updates)
    micro_batches = pipeline.num_micro_batches if count is None else count
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
                call.infeed_queue.mark()
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
            replacing=functools.partial(_replacing, store, runner),
            should_stop=limit.should_stop,
        )
        jax.block_until_ready((state.variables, state.optimizer_state))


def _prepare(call: Call, devices: Sequence[Any]) -> tuple[Runner[Any], Sequence[Any]]:
    """What runs a pipeline or loop, and the devices that it takes of those that are selected."""
    num_replicas = find_num_replicas(call)
    call.runner.set_replicas(num_replicas, utils.replicas_are_identical())
    devices = call.replication.choose_devices(devices, num_replicas)
    return call.runner.prepare(devices), devices


def reads_data(program: Program) -> bool:
    """Whether this process gives a pipeline of the program micro-batches; of several, some do not."""
    devices = selection.devices_for(program.ipu_device, program.num_ipus)
    calls = [call for call in program.calls if isinstance(call, PipelineCall)]
    return any(_prepare(call, devices)[0].takes_elements for call in calls)


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
        count, operands = max(0, _read_count(call, operands[0])), operands[1:]
    operands = _fit_replicas(call, operands, num_replicas)
    num_captured = len(body.captured)
    constant, changing = loop.split_carried(operands[num_captured:])
    inputs = [*operands[:num_captured], *constant]
    _introduce(call, runner)
    # Tables in host memory change between iterations.
    total = 1 if rows.trained_by(call) else _block_limit(call, count)
    every = loop.updated_every()
    num_fetched = runner.num_fetched(total, every)  # by all replicas
    most = num_fetched // num_replicas
    state = store.place_loop_state(call)
    rows.resume(call, state.num_accumulated)
    take: Take = take_nothing
    infeed, is_synthetic = call.infeed_queue, uses_synthetic_data()
    if infeed is not None and is_synthetic:
        infeed = None
        take = make_synthetic(runner, jax.tree.leaves(body.pipeline.element)[len(changing) :], num_fetched)
    if not runner.takes_elements or count == 0:
        infeed = None
    if infeed is not None:
        take = infeed.connect(runner.place_element, num_fetched, is_tentative=loop.has_condition)
    done = Done()
    if (watcher := watching.current()) is not None:
        limit = most if count is None else min(most, count)
        rehearse(watcher, runner, state, Request(inputs, every, limit, total, changing))
    if not has_part(runner):
        try:
            hear_end(runner, done)
        finally:
            _settle(call, runner, store, skip(runner, state, done.count, every), done)
        changing = loop.absent_carried() if done.count else changing
        return loop.join_carried(constant, _of_every_process(changing))
    with (
        announcing.running(store, call.name, loop, runner, devices, total) as told,
        telling_end(runner, done),
        naming_peers(),
    ):
        try:
            while (count is None or done.count < count) and loop.goes_on(inputs, changing):
                limit = most if count is None else min(most, count - done.count)
                request = Request(inputs, every, limit, total, changing, done.count)
                pending = runner.fetch(state, request, take)
                with _replacing(store, runner):
                    progress = runner.run(state, pending)
                    state, changing = progress.state, progress.carried
                    num_unneeded = pending.count - progress.count
                    done.count += progress.count
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
                    told.done(progress.count * num_replicas, num_updates)
                if infeed is not None and num_unneeded:
                    infeed.give_back()
        except BaseException as error:
            if not peers.is_of_collective(error):
                with contextlib.suppress(Exception):  # the first error is the one to tell
                    check_peers()  # who has ended does not settle
                    _settle(call, runner, store, state, done)
            raise
        state = _settle(call, runner, store, state, done)
        jax.block_until_ready((state.pipeline.variables, state.pipeline.optimizer_state))
    return loop.join_carried(constant, _of_every_process(changing))


def _settle(call: LoopCall, runner: Runner[Any], store: Store, state: RunState, done: Done) -> RunState:
    """The state at the end of a loop's run, kept; what is still to be joined of replicas is."""
    if not done.count:
        return state
    with _replacing(store, runner):
        state = runner.settle(state)
        store.keep_loop(call, state)
    return state


def _of_every_process(values: Sequence[Any]) -> list[Any]:
    """Values that a segment or a loop gave, such that each process has them; of one process as they are.

    Of several processes they are arrays of NumPy, which a pipeline or loop takes wherever its devices are.
    """
    if peers.current() is None:
        return list(values)
    leaves, tree = jax.tree.flatten(list(values))
    read: list[Any] = jax.tree.unflatten(tree, list(map(_as_numpy, read_everywhere(leaves))))
    return read


def _as_numpy(array: Any) -> Any:
    return array if _is_key(array) else np.asarray(array)


def _is_key(array: Any) -> bool:
    return bool(jnp.issubdtype(array.dtype, jax.dtypes.prng_key))


def _introduce(call: Call, runner: Runner[Any]) -> None:
    """Says who runs, if somebody watches."""
    if (watcher := watching.current()) is not None:
        watcher.introduce(runner, call.runner, call.name)


@contextlib.contextmanager
def _replacing(store: Store, runner: Runner[Any]) -> Iterator[None]:
    """For while a state is replaced by the next one: interrupts wait, and `Store.lock` is held.

    What waits for Python must not keep that from reading the session. Its arrays then stay readable anyway.
    """
    lock = contextlib.nullcontext() if runner.waits_for_python else store.lock
    with interrupts.deferred(), lock:
        yield


def _block_limit(call: LoopCall, count: int | None) -> int:
    """How many iterations of a loop may be run together."""
    if call.loop.has_condition:  # no more than have been fetched ahead
        most = _BLIND_ITERATIONS if call.infeed_queue is None else call.infeed_queue.prefetch_depth
        return most if count is None else min(most, max(1, count))
    assert count is not None
    # A count that is known when the program runs should not be compiled for.
    return 1 << (count - 1).bit_length() if call.has_count_operand and count > 0 else count

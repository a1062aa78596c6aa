"""Runs of programs on a session's state: fetches, threads' turns, tables in host memory, pipelines, loops.

The state changes after each weight update of a pipeline, and after each iteration of a loop, or block of
iterations.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ipu_pipeline.engine import Pipeline, VariableSpec, processes
from ipu_pipeline.engine.fronts import Progress, Take, fit_replicas, read_count
from ipu_pipeline.engine.inspect import Runner, introduce
from ipu_pipeline.ground import jax_compat
from ipu_pipeline.processes import announcements, device_selection, interrupts
from ipu_pipeline.queues.feeder import is_feeding
from ipu_pipeline.queues.infeed import InfeedOperation, IPUInfeedQueue
from ipu_pipeline.queues.outfeed import OutfeedOperation
from ipu_pipeline.queues.synthetic_data import make_synthetic, uses_synthetic_data
from ipu_pipeline.tf1 import utils
from ipu_pipeline.tf1.graph import GlobalStep, HostVariable, InitializerOperation, Placeholder
from ipu_pipeline.tf1.program.calls import Call, LoopCall, PipelineCall, find_num_replicas
from ipu_pipeline.tf1.program.host_tables import HostTable, RowGradients, check_tables
from ipu_pipeline.tf1.program.program import Computed, Fetched, Output, Program
from ipu_pipeline.tf1.session.resumption import Resumption
from ipu_pipeline.tf1.session.store import Store

# The argument `fetch` of `Session.run`.

_OF_THE_HOST = (InfeedOperation, OutfeedOperation, GlobalStep)


def find_runs(fetch: Any) -> list[Any]:
    """Finds the programs and operations to run, in order; each once, however often it occurs."""
    runs: list[Any] = []
    for leaf in _leaves(fetch):
        run = leaf.program if isinstance(leaf, Output) else leaf
        if not isinstance(run, (Program, InitializerOperation, HostVariable, *_OF_THE_HOST)):
            advice = ""
            if isinstance(run, (str, VariableSpec)):
                advice = " Session.variables has the values of variables, by name."
            elif jax_compat.is_traced(run):
                advice = (
                    " A variable, or what is computed from one, has a value while a program runs: the "
                    "function that is compiled returns it, an outfeed takes it, and Session.variables has "
                    "the values of variables, by name."
                )
            raise TypeError(
                "Session.run: fetch must be a compiled program or one of its values, an infeed's "
                "initializer, what an outfeed's dequeue() returned, global_variables_initializer(), "
                "get_global_step(), a host embedding's get_embedding_tensor(), "
                f"or a list or dict of them; got {type(run).__name__}.{advice}"
            )
        if not any(run is run_before for run_before in runs):
            runs.append(run)
    return runs


def give_results(fetch: Any, values: dict[int, Any]) -> Any:
    """Makes the result of `Session.run`: the results in the places of what was run."""
    if isinstance(fetch, dict):
        return {key: give_results(part, values) for key, part in fetch.items()}
    if isinstance(fetch, (list, tuple)):
        results = [give_results(part, values) for part in fetch]
        if isinstance(fetch, list):
            return results
        return type(fetch)(*results) if hasattr(fetch, "_fields") else tuple(results)
    if isinstance(fetch, Output):
        return values[id(fetch.program)][fetch.number]
    if isinstance(fetch, Computed):
        if id(fetch) not in values:
            parts = [
                give_results(part, values) if isinstance(part, Fetched) else part for part in fetch.parts
            ]
            values[id(fetch)] = fetch.function(*parts)
        return values[id(fetch)]
    if isinstance(fetch, Program):
        return fetch.result_tree.unflatten(values[id(fetch)]) if fetch.function.outputs else None
    return values[id(fetch)]


def find_infeeds(fetch: Any) -> list[IPUInfeedQueue]:
    """The infeeds of all programs in a fetch."""
    programs = [leaf.program if isinstance(leaf, Output) else leaf for leaf in _leaves(fetch)]
    return [infeed for program in programs if isinstance(program, Program) for infeed in program.infeeds]


def concerns_devices(fetch: Any) -> bool:
    """Whether a part of a fetch runs on devices; queues and the global step do not."""
    return not all(isinstance(leaf, _OF_THE_HOST) for leaf in _leaves(fetch))


def _leaves(fetch: Any) -> list[Any]:
    return list(_find_leaves(fetch, set()))


def _find_leaves(fetch: Any, computed_ids: set[int]) -> Iterator[Any]:
    """Yields the leaves; for a computed value, once, those that it is computed from."""
    if isinstance(fetch, dict):
        fetch = list(fetch.values())
    if isinstance(fetch, Computed):
        is_new = id(fetch) not in computed_ids
        parts = [part for part in fetch.parts if is_new and isinstance(part, Fetched)]
        computed_ids.add(id(fetch))
        fetch = parts
    if isinstance(fetch, (list, tuple)):
        for part in fetch:
            yield from _find_leaves(part, computed_ids)
    else:
        yield fetch


# Threads use a session one after another; a call that would have to wait for itself is rejected.

_CALLED_BACK = (
    "The session was called within one of its runs, by a function that JAX calls back (jax.debug.callback, "
    "jax.pure_callback) or by a signal's handler. The run would have to wait for itself. Call the session "
    "after the run; `Session.variables` can be read."
)
_FEEDING = (
    "A data set has called the session in the infeed's thread, while a run of the session may be waiting "
    "for its data. Compute what it needs before the run, or with JAX itself; `Session.variables` can be "
    "read."
)


def _in_order(together: str | None) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if together is None else processes.one_thread(together)


class _Stopping:
    """A `with` block after whose Ctrl-C no thread reads data ahead, even if it had hardly begun."""

    def __init__(self, lock: threading.RLock, fetch: Any) -> None:
        self._lock = lock
        self._fetch = fetch

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        # If it is another thread's turn, its data go on.
        if kind is not None and issubclass(kind, KeyboardInterrupt) and self._lock.acquire(blocking=False):
            try:
                for infeed in find_infeeds(self._fetch):
                    infeed.stop()
            finally:
                self._lock.release()


class Turns:
    """A lock for running something, or reading or replacing the whole state; other threads wait."""

    def __init__(self) -> None:
        """Starts without a holder."""
        self._lock = threading.RLock()
        self._running_in: int | None = None  # the thread of a run; Ctrl-C may leave it behind

    def stopping(self, fetch: Any) -> contextlib.AbstractContextManager[None]:
        """Returns a block for a run: if Ctrl-C ends it, the infeeds of `fetch` are stopped."""
        return _Stopping(self._lock, fetch)

    @contextlib.contextmanager
    def alone(self, changes: bool = True, together: str | None = None) -> Iterator[None]:
        """Waits until other threads are done with the session, and makes them wait."""
        # threading.Condition asks in the same way; a note of our own would be wrong after Ctrl-C.
        is_within = self._lock._is_owned()  # type: ignore[attr-defined]  # noqa: SLF001
        if changes and is_within and self._running_in == threading.get_ident():
            raise RuntimeError(_CALLED_BACK)
        # JAX's threads were not started by Python, which calls them "Dummy-1" and so on.
        is_called_back = threading.current_thread().name.startswith("Dummy-")
        may_wait = not (is_feeding() or is_called_back)
        with _in_order(together if may_wait else None):
            if not self._lock.acquire(blocking=may_wait):
                raise RuntimeError(_CALLED_BACK if is_called_back else _FEEDING)
            try:
                if not is_within:
                    self._running_in = None
                with _in_order(together):  # also of threads that did not wait
                    yield
            finally:
                self._lock.release()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Notes that the thread runs something, during its turn."""
        try:
            self._running_in = threading.get_ident()
            yield
        finally:
            self._running_in = None


# Tables in host memory.


def check_registered(program: Program, session: Any) -> None:
    """Raises if a program that is about to run looks up tables that it may not in this session."""
    for table in program.host_tables:
        name = f"The host embedding {table.spec.name!r}"
        if processes.current() is not None:
            raise NotImplementedError(
                f"{name} is in the memory of one process, and this run has several. Run it in one, or make "
                "the table a variable and shard it: pipeline(replicated_weight_sharding=True)."
            )
        if session not in table.sessions:
            raise RuntimeError(
                f"{name} is not registered with this session. Run the program in a block of `with "
                "host_embedding.register(session):`; with an estimator, a hook enters it: "
                "`host_embedding.register(session).__enter__()` in after_create_session."
            )


@contextlib.contextmanager
def connected(tables: Sequence[HostTable], store: Store) -> Iterator[HostRows]:
    """Lets a program look up its tables, for a `with` block."""
    rows = HostRows(tables, store)
    with contextlib.ExitStack() as stack:
        for table in tables:
            stack.enter_context(table.connected(rows, store.host_array(table.spec)))
        yield rows


@dataclasses.dataclass(frozen=True, eq=False)
class HostRows:
    """The tables that a run uses."""

    tables: Sequence[HostTable]  # the program's tables
    store: Store  # the session's store

    def trained_by(self, call: Call) -> list[HostTable]:
        """The tables that a pipeline or loop trains."""
        if not self.tables or not call.trains:
            return []
        accumulated = call.accumulated
        return [table for table in self.tables if table.marker in accumulated]

    def resume(self, call: Call, num_accumulated: int) -> None:
        """Begins a loop's run, which may go on within a weight update."""
        for table in self.trained_by(call):
            name = table.spec.name
            num_known = len(self.store.row_gradients.get((call.name, name), ()))
            if table.num_mini_batches == 1 or num_known == num_accumulated:
                continue
            if num_accumulated:
                raise RuntimeError(
                    f"{call.name!r} is to go on within a weight update, after {num_accumulated} of its "
                    f"iterations. The gradients of the host embedding {name!r} are known for {num_known} "
                    "of them: checkpoints do not have these. Save where an update is complete, after a "
                    "multiple of its mini-batches."
                )
            del self.store.row_gradients[call.name, name]

    def keep(self, call: Call, is_update: bool) -> None:
        """Takes the gradients of a step."""
        for table in self.trained_by(call):
            place = call.name, table.spec.name
            before = self.store.row_gradients.get(place, []) if isinstance(call, LoopCall) else []
            steps = [*before, table.take()]
            if is_update or table.num_mini_batches == 1:
                array = self.store.host_array(table.spec)
                _descend(table, array, [gradients for step in steps for gradients in step])
                steps = []
            if isinstance(call, LoopCall):
                self.store.row_gradients[place] = steps


def _descend(table: HostTable, array: np.ndarray[Any, Any], gradients: Sequence[RowGradients]) -> None:
    """Does SGD on the rows that have gradients, with their sum: in float64, as they come in any order."""
    if not gradients:
        return
    rows, places = np.unique(np.concatenate([part.rows for part in gradients]), return_inverse=True)
    sums = np.zeros((len(rows), array.shape[1]), np.float64)
    np.add.at(sums, places, np.concatenate([part.gradients for part in gradients]).astype(np.float64))
    array[rows] = (array[rows] - table.learning_rate * sums).astype(array.dtype)


# Running a program.

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
        devices = device_selection.devices_for(program.ipu_device, program.num_ipus)
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
    inputs = dict.fromkeys(placeholder for program in programs for placeholder in program.placeholders)
    for key in feed_dict:
        if not isinstance(key, Placeholder):
            raise TypeError(f"feed_dict: keys must be placeholders; got {key!r}.")
        if key not in inputs:
            raise ValueError(
                f"feed_dict: {key!r} is not an input of this program. Inputs are: "
                f"{', '.join(repr(placeholder) for placeholder in inputs) or 'none'}."
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
    # Operands and devices.
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
    # The feed.
    take: Take | None = None
    is_synthetic = uses_synthetic_data()
    if call.infeed_queue is not None and is_synthetic:
        fed = jax.tree.leaves(pipeline.traced.element)
        take = make_synthetic(pipeline, fed, pipeline.updated_every(count) * num_replicas)
    elif call.infeed_queue is not None and runner.takes_elements:
        per_update = pipeline.updated_every(count)
        num_fetched = runner.num_fetched(call.repeat_count * per_update, per_update)
        may_vary = pipeline.options.max_shapes > 1
        take = call.infeed_queue.connect(pipeline.place_element, num_fetched, shapes_may_vary=may_vary)
    # The run.
    states = [pipeline.place(store.make_pipeline_state(call))]  # nothing holds on to it while it runs
    num_updates = call.repeat_count
    if limit.max_updates is not None:
        num_updates = min(num_updates, limit.max_updates)
    micro_batches = pipeline.options.num_micro_batches if count is None else count
    assert micro_batches is not None
    per_update = pipeline.updated_every(count)
    check_tables(rows.tables, call, per_update)
    with announcements.running(store, call.name, pipeline, runner, devices, micro_batches) as announcement:

        def keep(progress: Progress, num_done: int) -> None:
            after = progress.state
            with store.lock:
                store.keep(call, after)
                rows.keep(call, is_update=True)
            if not is_synthetic and call.infeed_queue is not None and runner.takes_elements:
                call.infeed_queue.mark(progress.num_ahead)
            call.hand_out(progress)
            last = int(after.update_count if call.trains else after.execution_count)
            store.metrics.add(call, num_done, last, progress)
            announcement.done(num_done * per_update * num_replicas, last)

        state = pipeline.run(
            states.pop(),
            take,
            inputs,
            keep,
            num_updates,
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
    chosen = [device for group in dealt for device in group]
    call.runner.set_replicas(num_replicas, utils.replicas_are_identical())
    return call.runner.prepare(chosen), chosen


def reads_data(program: Program) -> bool:
    """Whether this process reads micro-batches for a pipeline of the program; not all processes do."""
    devices = device_selection.devices_for(program.ipu_device, program.num_ipus)
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
    # Operands and devices.
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
    states = [loop.place(store.make_pipeline_state(call))]  # nothing holds on to it while it runs
    rows.resume(call, states[0].num_accumulated)
    # The feed.
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
    # The run.
    has_part = loop.has_part  # a process without any device of the loop announces nothing
    with (
        announcements.running(store, call.name, loop, runner, devices, total)
        if has_part
        else contextlib.nullcontext() as announcement
    ):

        def keep(progress: Progress, num_unneeded: int) -> None:
            state = progress.state
            with store.lock:
                store.keep(call, state)
                rows.keep(call, is_update=state.num_accumulated == 0)
            if infeed is not None:
                infeed.mark(num_unneeded)
            for part in progress.collected:
                enqueued = loop.split_enqueued(part)
                for (entry, _places), leaves in zip(body.enqueued, enqueued, strict=True):
                    entry.target.extend(leaves, part.size)
            num_updates = state.update_count if call.trains else None
            assert announcement is not None
            announcement.done(progress.count * num_replicas, num_updates)

        return loop.iterate(
            states.pop(),
            take,
            operands[:num_captured],
            operands[num_captured:],
            keep,
            functools.partial(store.keep, call),
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

"""The session: every variable and optimizer state by name, and the programs run on them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ipu_pipeline.checkpointing import checkpoint_directories
from ipu_pipeline.checkpointing.in_memory import InMemorySeries, name_next, parts_of
from ipu_pipeline.checkpointing.states import State
from ipu_pipeline.engine import processes
from ipu_pipeline.engine.fronts import keep, read_outfeed
from ipu_pipeline.engine.processes import only_if_written_here, read_gathered
from ipu_pipeline.graphcore import sdk_names
from ipu_pipeline.processes import device_selection, executable_cache, interrupts
from ipu_pipeline.queues.infeed import IPUInfeedQueue
from ipu_pipeline.queues.outfeed import OutfeedOperation
from ipu_pipeline.reports.trace_capture import start_automatic_report
from ipu_pipeline.tf1 import utils
from ipu_pipeline.tf1.graph import GlobalStep, HostVariable, InitializerOperation, Placeholder, is_internal
from ipu_pipeline.tf1.program.program import Program, compiled_programs, find_trained
from ipu_pipeline.tf1.session import exported_programs, store
from ipu_pipeline.tf1.session.program_runs import (
    Limit,
    Turns,
    check_feeds,
    check_registered,
    concerns_devices,
    find_runs,
    give_results,
    run_program,
)
from ipu_pipeline.tf1.session.resumption import Resumption, check_snapshot, make_missing
from ipu_pipeline.tf1.session.store import Store, agree_on_run

_OF_TENSORFLOW = {"config": "tf.ConfigProto", "graph": "tf.Graph"}


@dataclass(frozen=True, eq=False)
class _InMemory:
    """The series of in-memory checkpoints, and other data that belongs to each."""

    series: InMemorySeries
    extra: Callable[[], Mapping[str, Any]]


def _trains(program: Program) -> bool:
    return any(call.trains for call in program.calls)


class Session:
    """Holds variables and optimizer state, and runs programs.

    Example:
      >>> def model(x):
      ...     return layers.Dense(1, kernel_initializer="ones")(x)
      >>> with ipu.scopes.ipu_scope("/device:IPU:0"):
      ...     program = ipu.ipu_compiler.compile(model, [np.ones([2, 8], np.float32)])
      >>> with ipu.Session(seed=1) as session:
      ...     session.run(program)
      ...     sorted(session.variables)
      [array([[8.],
             [8.]], dtype=float32)]
      ['dense/bias', 'dense/kernel']
    """

    def __init__(self, seed: int | None = None, **of_tensorflow: Any) -> None:
        """Makes an empty session. It does not start JAX's backend.

        Args:
          seed: the seed of initial values and random keys. None: the seed of `utils.reset_ipu_seed`, or 0.
          **of_tensorflow: not accepted; the error names what replaces `config` and `graph` of
            `tf.Session`.

        Raises:
          TypeError, ValueError: the seed has a wrong value, or there are other arguments.
        """
        seed = _choose_seed(seed, of_tensorflow)
        executable_cache.enable_executable_cache_of_environment()
        start_automatic_report()
        self._store = Store(State(seed))
        self._resumption = Resumption()
        self._limit = Limit()  # the run's, see `run_part`
        self._infeeds: dict[IPUInfeedQueue, object] = {}
        self._is_closed = False
        self._changes: Counter[str] = Counter()  # how often variables were set, by what sets them
        self._turns = Turns()
        self._in_memory: _InMemory | None = None
        self._is_resumed = False  # whether the state is from `resume`, and no run has used it
        utils.reach(self)

    def __enter__(self) -> Session:
        """Returns the session itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Closes the session."""
        self.close()

    def close(self) -> None:
        """Ends the infeeds that the session has initialized. Variables can still be read."""
        self._is_closed = True
        self._resumption.hold()
        for queue, started in self._infeeds.items():
            queue.delete(started)
        self._infeeds.clear()

    @property
    def key(self) -> Any:
        """The random key from which all others are derived. Reading it starts JAX's backend."""
        return self._store.key

    @property
    def seed(self) -> int:
        """The seed."""
        return self._store.seed

    def reset_seed(self, seed: int) -> None:
        """Makes random numbers depend on another seed from now on; see `utils.reset_ipu_seed`."""
        self._store.reset_seed(seed)

    @property
    def variables(self) -> dict[str, np.ndarray[Any, Any]]:
        """Copies of all variables, by full name. With several processes, all must read them."""
        store = self._store
        with store.lock:
            names = sorted(name for name in store.state.variables if not is_internal(name))
            values = read_gathered([store.state.variables[name] for name in names])
            return {name: np.array(value) for name, value in zip(names, values, strict=True)}

    def most_updates(self) -> int:
        """The largest number of weight updates of any pipeline or loop."""
        return self._store.most_updates()

    def count_steps(self, per_update: int, offset: int) -> None:
        """Makes the global step the number of weight updates times `per_update`, plus `offset`."""
        self._store.step_counting = (per_update, offset)

    def variable_value(self, name: str) -> np.ndarray[Any, Any]:
        """Returns a copy of a variable's value.

        Raises:
          KeyError: there is no variable with this full name.
        """
        store = self._store
        with store.lock:
            return np.array(*read_gathered([store.state.variables[name]]))

    def execution_count(self, name: str = "Pipeline") -> int:
        """Returns the number of weight updates, or executions in inference, of pipelines with this name."""
        return self._store.counts(name).execution_count

    def update_count(self, name: str = "Pipeline") -> int:
        """Returns the number of weight updates of the pipelines with this name."""
        return self._store.counts(name).update_count

    def metrics(self, name: str = "Pipeline", *, training: bool = True) -> dict[str, np.ndarray[Any, Any]]:
        """Returns a pipeline's metrics since the last call (`ipu.metric`, `optimizers.with_metrics`).

        It may be called while another thread runs the pipeline. Unread metrics are kept for the last 10,000
        weight updates. They are not saved; restoring or initializing the session discards them.

        Args:
          name: the pipeline's name.
          training: True for pipelines that train, False for those that only infer.

        Returns:
          Arrays with one entry per weight update (per execution, in inference): "update", its number,
          int64, counted from 1; and the metrics by full name, float32 or float64.

        Raises:
          KeyError: pipelines have reported metrics, but none with this name.
        """
        return self._store.metrics.read(name, training)

    def optimizer_state(self, name: str = "Pipeline") -> dict[str, np.ndarray[Any, Any]]:
        """Returns copies of an optimizer state's leaves, by path, such as "[0].mu['encoder/dense/kernel']".

        Args:
          name: the name of the pipeline, or of a loop's optimizer.

        Raises:
          KeyError: no pipeline or loop of this name has trained.
        """
        with self._turns.alone(changes=False):
            return store.read_state(self._store.optimizer(name))

    @contextlib.contextmanager
    def weights_of(self, entry: str, name: str = "Pipeline") -> Iterator[None]:
        """Makes programs use an entry of the optimizer's state as weights, inside a `with` block.

        Use it to evaluate with averages (`optimizers.with_averaged_weights`). Variables that are not
        trained keep their values. Inside the block, training, saving, restoring and loading are errors;
        exporting is allowed. Runs in other threads wait until the block ends; they, too, read the entry's
        values in `variables`.

        Args:
          entry: an entry with an array for each trained variable: its last name, such as "average", or, if
            several have that name, its path, such as "[1].ema" (see `optimizer_state`).
          name: the name of the pipeline, or of a loop's optimizer.

        Raises:
          KeyError: no pipeline or loop of this name has trained.
          RuntimeError: it is called inside such a block.
          ValueError: there is no such entry, or several.
        """
        with self._turns.alone():
            self._store.check_weights("weights_of")
            variables = self._store.state.variables
            optimizer = self._store.optimizer(name)
            weights = store.find_weights(optimizer, entry, variables, find_trained(name, optimizer))
            with self._store.lending(entry, weights):
                yield

    def create_variables(self, program: Program) -> None:
        """Creates the variables of a program that do not exist yet, with their initial values.

        Raises:
          ValueError: a variable exists with another shape or dtype.
        """
        with self._turns.alone():
            for spec in program.variables.values():
                self._store.variable(spec)

    def load(self, mapping: Mapping[str, Any]) -> None:
        """Sets variables.

        Args:
          mapping: full name -> array of numbers or booleans. A variable that does not exist yet gets the
            value when it is created.

        Raises:
          TypeError: a key is not a string, or a value is not such an array.
          ValueError: a variable exists with another shape, or a dtype that the value does not fit; or the
            model has been compiled and has no such variable. If the model has not been compiled, the next
            run raises this.
        """
        with self._turns.alone():
            self._store.check_weights("load")
            self._check_not_resumed("load")
            self._changes["Session.load"] += 1
            self._store.load(mapping, compiled_programs())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a checkpoint with everything needed to continue training. Returns when it is complete.

        It contains all variables, including those described in `Saver.save`, optimizer states, counts,
        accumulated gradients, the seed, and the positions of training data sets. It does not depend on
        stages, schedule or devices: any program with the same variables can use it.

        Args:
          path: a directory to create. An existing checkpoint is replaced once the new one is complete.

        Raises:
          OSError: the checkpoint cannot be written.
          ValueError: there are no variables yet, or `path` exists and is not a checkpoint.
        """
        with self._turns.alone(changes=False, together="saving a session"):
            make_missing(self._store, self._select_devices)
            checkpoint_directories.write_checkpoint(path, self.take_snapshot(is_kept=False))

    def export(
        self,
        path: str | os.PathLike[str],
        program: Program,
        inputs: Mapping[Placeholder, Any] | None = None,
    ) -> None:
        """Exports an inference pipeline as a directory for `ipu.load_program`, without its Python code.

        The directory contains the current values of the program's variables, and its stages as exported by
        JAX, for the kind of device that the program runs on. Metrics, and values that stages enqueue to
        separate outfeeds, are left out.

        Args:
          path: a directory to create; an existing exported program or checkpoint is replaced.
          program: one inference pipeline, whose results go to its outfeed.
          inputs: placeholder -> value, for placeholders with a fixed value in the exported program. The
            loaded program takes values of other placeholders by their names; nothing may be computed from
            these before the pipeline.

        Raises:
          NotImplementedError: the program is not a single inference pipeline.
          OSError: it cannot be written.
          ValueError: a placeholder without a value is used in a computation, or `path` exists and is
            something else.
        """
        with self._turns.alone(changes=False):
            exported_programs.export(
                path,
                program,
                dict(inputs or {}),
                exported_programs.SessionParts(
                    self._store.variable,
                    lambda: self.key,
                    self.seed,
                    self.execution_count,
                    self._store.step_of_weights,
                ),
            )

    def restore(
        self, path: str | os.PathLike[str], *, allow_partial: bool = False, infeeds: bool = True
    ) -> None:
        """Restores a checkpoint, which replaces everything in the session, including its seed.

        In the next run, training infeeds continue at their saved positions, if their pipeline or loop has
        the same name. Initialize them as usual, before or after this call. Their data sets must yield the
        same elements in the same order.

        Args:
          path: a path from `save`, or from `IPUPipelineEstimator.latest_checkpoint`.
          allow_partial: whether the checkpoint may lack variables of the programs, which then get their
            initial values, and may have variables that the programs lack.
          infeeds: whether data sets continue at their saved positions; False: they stay where they are.

        Raises:
          CheckpointError: the checkpoint cannot be read; or, without `allow_partial`, it belongs to another
            model than the compiled programs. Programs that are compiled later raise this when they run. The
            session is not changed.
          RuntimeError: the session is closed.
        """
        if self._is_closed:
            raise RuntimeError("Attempted to use a closed Session.")
        with processes.one_thread("restoring a session"):
            self._select_devices()  # Orbax starts JAX's backend
        self.take_over(
            checkpoint_directories.read_same_checkpoint(path), path, fits=not allow_partial, feeds=infeeds
        )

    def resume(self) -> int:
        """Continues training where it was before `ipu-pipeline launch --restarts` restarted it.

        After this call, the state before each run with a training program is kept in the machines' memory
        during the run; see docs/distributed.md. After a restart, this call restores the state before the
        run in which a process ended, or before the run before that, as `save` would have written it:
        variables, optimizer states, counts and positions of data sets. The contents of outfeeds are lost.
        Call it in all processes, after compiling the programs and setting variables
        (`global_variables_initializer()`, `load`, `restore`), and before the first run. With several
        sessions, all processes must call it in the same order.

        Without a launcher that restarts processes, nothing is kept, and it returns 0.

        Returns:
          The number of finished runs with a training program since the session first called it. A run is a
          call of `run`; runs that end with an error do not count.

        Raises:
          OSError: another user may write to the launcher's directory.
          RuntimeError: the session is closed, or has called it before.

        Example:
          >>> infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(list(np.ones([4, 2, 8], np.float32)))
          >>> def optimizer_function(y):
          ...     return ipu.pipelining_ops.OptimizerFunctionOutput(optax.sgd(0.1), jnp.mean(y**2))
          >>> def model():
          ...     return ipu.pipelining_ops.pipeline(
          ...         [layers.Dense(4), layers.Dense(1)],
          ...         gradient_accumulation_count=2,
          ...         infeed_queue=infeed,
          ...         outfeed_queue=ipu.ipu_outfeed_queue.IPUOutfeedQueue(),
          ...         optimizer_function=optimizer_function,
          ...     )
          >>> with ipu.scopes.ipu_scope("/device:IPU:0"):
          ...     program = ipu.ipu_compiler.compile(model)
          >>> with ipu.Session() as session:
          ...     session.run(infeed.initializer)
          ...     for step in range(session.resume(), 2):
          ...         session.run(program)
          ...     session.update_count()
          2
        """
        if self._is_closed:
            raise RuntimeError("Attempted to use a closed Session.")
        if self._in_memory is not None:
            raise RuntimeError("Session.resume: this session has called it before.")
        self._select_devices()
        series = InMemorySeries.of_environment(name_next("session"))
        if series is None:
            return 0
        snapshot = series.find()
        if snapshot is not None:
            # What it lacks had not been used, and gets the initial values that it would have had.
            self.take_over(snapshot, "in memory", fits=False)
            self._is_resumed = True
            series.say_resumed()
        self.keep_in_memory(series)
        return series.runs

    def keep_in_memory(self, series: InMemorySeries, extra: Callable[[], Mapping[str, Any]] = dict) -> None:
        """Takes an in-memory checkpoint before each run that trains.

        Args:
          series: where they go.
          extra: returns other data that belongs to one, as JSON.
        """
        self._in_memory = _InMemory(series, extra)

    def take_snapshot(
        self, is_kept: bool = True, extra: Mapping[str, Any] | None = None, in_parts: bool = False
    ) -> State:
        """Takes a snapshot of what `save` writes; not while a program runs.

        Args:
          is_kept: whether programs may run before it is used.
          extra: other data that belongs to it, as JSON.
          in_parts: whether arrays are `Parts`; `is_kept` is then True.
        """
        with self._turns.alone(changes=False, together="saving a session"):
            self._store.check_weights("save")
            self._warn_of_row_gradients()
            state = self._store.state
            variables = {name: value for name, value in state.variables.items() if not is_internal(name)}
            if is_kept:
                variables = self._store.with_host_copies(variables)

            def prepare(leaves: list[Any]) -> Sequence[Any]:
                if in_parts:
                    return parts_of(leaves)
                leaves = list(map(only_if_written_here, leaves))
                return keep(leaves) if is_kept else leaves

            return dataclasses.replace(
                state,
                key_implementation=str(jax.random.key_impl(self._store.key)),
                variables=variables,
                feeds=self._resumption.feeds,
                extra=dict(extra or {}),
            ).replace_arrays(prepare)

    def _warn_of_row_gradients(self) -> None:
        """Warns if a snapshot lacks something that training needs to go on."""
        names = {table for (_loop, table), steps in self._store.row_gradients.items() if steps}
        if names:
            warnings.warn(
                "A session is saved within a weight update, without the gradients of rows of the host "
                f"embedding {', '.join(map(repr, sorted(names)))} in it, so training cannot go on from "
                "there. Save where an update is complete, after a multiple of its mini-batches.",
                stacklevel=4,
            )

    def take_over(
        self, snapshot: State, path: str | os.PathLike[str], *, fits: bool = True, feeds: bool = True
    ) -> None:
        """Takes over a snapshot that was read from a path; see `restore`."""
        self._check_not_resumed("restore")
        if fits:
            check_snapshot(snapshot, path, compiled_programs)
        with self._turns.alone(together="restoring a session"):
            self._store.check_weights("restore")
            self._resumption = Resumption.of(snapshot, path, fits=fits, feeds=feeds)
            self._changes["Session.restore"] += 1
            self._store = Store(dataclasses.replace(snapshot, feeds=(), extra={}))

    def run(self, fetch: Any, feed_dict: Mapping[Any, Any] | None = None) -> Any:
        """Runs programs and operations, and returns when they are complete.

        Several threads may call it; their runs follow each other. During a run, `variables` and counts can
        be read.

        Args:
          fetch: a program or one of its values (`program[0]`), an infeed's `initializer` or `deleter`, the
            result of an outfeed's `dequeue`, `global_variables_initializer()`, `get_global_step()`, or a
            list, tuple or dict of them. They run in this order, each once: a program once for all of its
            values.
          feed_dict: placeholder -> value, for programs.

        Returns:
          For a program, the values that the compiled function returns, as NumPy arrays: a list, even for a
          single value; a dict or another pytree if the function returns one; None if it returns only
          operations, such as a pipeline's, or nothing. For one of a program's values, the array. For a
          dequeue, the elements (see `IPUOutfeedQueue.dequeue`); None for initializers. For a list, tuple or
          dict, the same structure with these results.

        Raises:
          OutOfRangeError: an infeed's data ended; completed weight updates are kept.
          RuntimeError: the session is closed, or an infeed is not initialized; or there are several
            processes, and another thread is also running something.
          TypeError: `fetch` cannot be run.
          ValueError: `feed_dict` does not fit the program.
          KeyboardInterrupt: on Ctrl-C; completed weight updates are kept.
        """
        with (
            interrupts.sent_again_if_ignored(),
            interrupts.raised_if_wrapped(),
            self._turns.stopping(fetch),
        ):
            together = "a run of a session" if concerns_devices(fetch) else None
            with self._turns.alone(together=together), self._turns.running():
                return self._run(fetch, feed_dict or {})

    def _run(self, fetch: Any, feed_dict: Mapping[Any, Any]) -> Any:
        if self._is_closed:
            raise RuntimeError("Attempted to use a closed Session.")
        runs = find_runs(fetch)
        programs = [run for run in runs if isinstance(run, Program)]
        outfeeds = [run.queue for run in runs if isinstance(run, OutfeedOperation)]
        try:
            values = self._run_all(runs, programs, feed_dict)
        except BaseException:
            with interrupts.deferred():  # elements dequeued before it failed are not returned
                for outfeed in outfeeds:
                    outfeed.put_back()
            for program in programs:
                for infeed in program.infeeds:
                    infeed.stop()
            raise
        results = {id(run): value for run, value in zip(runs, values, strict=True)}
        try:
            result = give_results(fetch, results)
        except BaseException:
            with interrupts.deferred():
                for outfeed in outfeeds:
                    outfeed.put_back()
            raise
        for outfeed in outfeeds:
            outfeed.drop()
        return result

    def run_part(
        self,
        program: Program,
        feed_dict: Mapping[Any, Any] | None = None,
        *,
        num_done: int,
        max_updates: int,
        should_stop: Callable[[], bool],
    ) -> Any:
        """Runs a program whose pipelines may do fewer weight updates than their `repeat_count`.

        Args:
          program: the program.
          feed_dict: placeholder -> value.
          num_done: how many weight updates other parts of the same run have done.
          max_updates: the largest number of weight updates of each pipeline; executions, in inference.
          should_stop: called after each update, or block of updates: whether the pipeline ends there.
        """
        with self._turns.alone(together="a run of a session"):
            self._limit = Limit(num_done, max_updates, should_stop)
            try:
                return self.run(program, feed_dict)
            finally:
                self._limit = Limit()

    def _run_all(
        self, runs: Sequence[Any], programs: Sequence[Program], feeds: Mapping[Any, Any]
    ) -> list[Any]:
        fault = self._find_fault(runs, programs, feeds)
        if fault is not None and (processes.current() is None or not programs):
            raise fault
        needs_devices = any(isinstance(run, (Program, InitializerOperation, HostVariable)) for run in runs)
        if needs_devices:
            self._select_devices()
        in_memory = self._in_memory if any(map(_trains, programs)) else None
        if in_memory is not None:
            in_memory.series.wait()
        if programs:
            beside = "" if in_memory is None else in_memory.series.tell()
            texts = agree_on_run(programs, feeds, self._changes, fault, beside)
            self._store.agree_on_values(programs)
            if in_memory is not None:
                in_memory.series.hear(texts)
        first = next((run for run in runs if isinstance(run, Program) and _trains(run)), None)
        values: list[Any] = []
        for run in runs:
            if in_memory is not None and run is first and not self._store.has_row_gradients():
                # After the operations before it, such as an infeed's initializer.
                take = functools.partial(self.take_snapshot, extra=in_memory.extra(), in_parts=True)
                in_memory.series.take(take)
            self._is_resumed = self._is_resumed and run is not first
            if isinstance(run, Program):
                one_value: Any = run_program(run, feeds, self._store, self._resumption, self._limit)
            else:
                one_value = self._run_operation(run)
            values.append(one_value)
        if in_memory is not None:
            in_memory.series.note_run(self._store.global_step(), tuple(map(id, programs)))
        return values

    def _find_fault(
        self, runs: Sequence[Any], programs: Sequence[Program], feeds: Mapping[Any, Any]
    ) -> Exception | None:
        """Returns the fault of a run before it begins, so that it can be sent to other processes."""
        try:
            check_feeds(programs, feeds)
            self._resumption.check(programs)
            if programs:
                self._store.check_loaded(compiled_programs())
            for program in programs:
                check_registered(program, self)
            if any(call.trains for program in programs for call in program.calls):
                self._store.check_weights("run")
            if any(isinstance(run, InitializerOperation) for run in runs):
                self._store.check_weights("global_variables_initializer")
        except Exception as error:
            return error
        return None

    def _check_not_resumed(self, caller: str) -> None:
        if self._is_resumed:
            raise RuntimeError(
                f"{caller}: Session.resume has taken back the state of a training that was interrupted, "
                "and this would replace it. Do it before Session.resume."
            )

    def _select_devices(self) -> None:
        if not device_selection.is_selected():
            programs = compiled_programs()
            device_selection.select_automatically(
                [(program.ipu_device, program.num_ipus) for program in programs]
            )
        self._store.agree_on_seed()

    def _run_operation(self, operation: Any) -> Any:
        if isinstance(operation, InitializerOperation):
            self._check_not_resumed("global_variables_initializer")
            programs = compiled_programs()
            self._changes["global_variables_initializer"] += 1
            self._store.initialize(spec for program in programs for spec in program.variables.values())
            self._resumption = Resumption()
            return None
        if isinstance(operation, OutfeedOperation):
            value = read_outfeed(operation.queue.read)
            with interrupts.deferred():
                operation.queue.set_aside()
            return value
        if isinstance(operation, HostVariable):
            return np.array(self._store.variable(operation.spec))
        if isinstance(operation, GlobalStep):
            return np.int64(self._store.global_step())
        if operation.starts:
            self._infeeds[operation.queue] = operation.queue.initialize()
        else:
            operation.queue.delete()
            self._infeeds.pop(operation.queue, None)
        return None


def _choose_seed(seed: int | None, names: Collection[str]) -> int:
    """Checks the arguments, and returns the seed of a session."""
    for name in names:
        text = f"Session() got an unexpected keyword argument {name!r}"
        if name in _OF_TENSORFLOW:
            text += f", which is TensorFlow's. {sdk_names.read_rows()[_OF_TENSORFLOW[name]].why}"
        raise TypeError(text)
    if seed is None:
        return utils.current_seed()
    utils.check_seed(seed, "Session")
    return int(seed)

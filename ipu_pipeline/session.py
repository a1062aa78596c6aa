"""The session: every variable and optimizer state by name, and the programs run on them.

Longer than most modules, as it is the only place where state changes.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import jax
import numpy as np

from ipu_pipeline import checkpoints, config, exporting, interrupts, ipu_compiler
from ipu_pipeline.calls import Call, LoopCall, PipelineCall
from ipu_pipeline.engine import placement
from ipu_pipeline.engine.feeds import Take, take_nothing
from ipu_pipeline.engine.loops import LoopState
from ipu_pipeline.engine.state import PipelineState
from ipu_pipeline.engine.variables import VariableSpec, initial_value
from ipu_pipeline.ipu_infeed_queue import InfeedOperation, IPUInfeedQueue
from ipu_pipeline.ipu_outfeed_queue import OutfeedOperation
from ipu_pipeline.operations import InitializerOperation
from ipu_pipeline.placeholders import Placeholder, cast_exactly
from ipu_pipeline.program import Program
from ipu_pipeline.resuming import Resumption, check_snapshot
from ipu_pipeline.session_state import KeptGradients, KeptOptimizer, Record, SessionState
from ipu_pipeline.snapshots import Snapshot

__all__ = ["Session"]

_BLIND_ITERATIONS = 64  # of a while_loop without a feed, before the host looks at its condition


class Session:
    """Holds variables and optimizer state, and runs programs.

    Example:
      with Session(seed=1) as session:
          session.run(infeed_queue.initializer)
          session.run(program, {learning_rate: 0.01})
          losses = session.run(outfeed_queue.dequeue())
    """

    def __init__(self, seed: int = 0) -> None:
        """Makes an empty session. It does not start JAX's backend.

        Args:
          seed: initial values and random keys depend on it.

        Raises:
          TypeError: the seed is not an integer.
          ValueError: it does not fit 64 bits.
        """
        if not isinstance(seed, (int, np.integer)) or isinstance(seed, bool):
            raise TypeError(f"Session: seed must be an integer; got {seed!r}.")
        if not -(2**63) <= seed < 2**63:
            raise ValueError(f"Session: seed must fit 64 bits; got {seed}.")
        config.enable_executable_cache_of_environment()
        self._seed = int(seed)
        self._key: Any = None
        self._key_implementation: str | None = None  # None: JAX's default
        self._state = SessionState()
        self._resumption = Resumption()
        self._max_updates: int | None = None  # of the run, see `run_part`
        self._should_stop: Callable[[], bool] | None = None
        self._infeeds: dict[IPUInfeedQueue, object] = {}
        self._is_closed = False

    def __enter__(self) -> Session:
        """The session itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Closes the session."""
        self.close()

    def close(self) -> None:
        """Ends the infeeds that were initialized in the session. The variables can still be read."""
        self._is_closed = True
        self._resumption.hold()
        for queue, started in self._infeeds.items():
            queue.delete(started)
        self._infeeds.clear()

    @property
    def key(self) -> Any:
        """The random key that all others are folded from; starts JAX's backend."""
        return self._get_key()

    @property
    def seed(self) -> int:
        """The seed."""
        return self._seed

    @property
    def variables(self) -> dict[str, np.ndarray[Any, Any]]:
        """Copies of all variables, by full name."""
        return {name: np.array(value) for name, value in sorted(self._state.variables.items())}

    def variable_value(self, name: str) -> Any:
        """The value of a variable, where it is.

        Raises:
          KeyError: there is none of this full name.
        """
        return self._state.variables[name]

    def execution_count(self, name: str = "Pipeline") -> int:
        """How often the pipelines of this name have run: weight updates, or executions in inference."""
        return self._state.pipelines.get(name, Record()).execution_count

    def update_count(self, name: str = "Pipeline") -> int:
        """How many weight updates the pipelines of this name have done."""
        return self._state.pipelines.get(name, Record()).update_count

    def load(self, mapping: Mapping[str, Any]) -> None:
        """Sets variables.

        Args:
          mapping: full name -> array. A variable that does not exist yet takes the value when it comes
            into being.

        Raises:
          ValueError: a variable exists with another shape, or a dtype that the value does not fit.
        """
        loaded = {}
        for name, value in mapping.items():
            array = np.array(value)
            known = self._state.variables.get(name)
            if known is not None:
                if array.shape != known.shape:
                    raise ValueError(
                        f"load: variable {name} has shape {known.shape}; the value has {array.shape}."
                    )
                array = cast_exactly(array, known.dtype, f"load: the value of variable {name}")
            loaded[name] = array
        variables = {**self._state.variables, **loaded}
        self._state = dataclasses.replace(self._state, variables=variables)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes everything that training goes on from as a checkpoint, and returns when it is complete.

        That is all variables, optimizer states, counts, gradients that are being accumulated, the seed,
        and where the data sets stand of what trains. None of it depends on how the model is cut into
        stages, on the schedule or on the devices: any program with the same variables can use it.

        Args:
          path: a directory to make. A checkpoint that is there is replaced once the new one is complete.

        Raises:
          OSError: it cannot be written.
          ValueError: there are no variables yet, or `path` exists and is no checkpoint.
        """
        if not self._state.variables:
            raise ValueError("There is nothing to save: no program has run, so there are no variables.")
        checkpoints.write_checkpoint(path, self.take_snapshot(is_kept=False))

    def export(
        self,
        path: str | os.PathLike[str],
        program: Program,
        inputs: Mapping[Placeholder, Any] | None = None,
    ) -> None:
        """Writes an inference pipeline as a directory that `ipu.load_program` runs without its Python code.

        It has the variables that the program uses, as they are now, and its stages as JAX exports them, for
        the kind of device that the program runs on.

        Args:
          path: a directory to make; an exported program or checkpoint that is there is replaced.
          program: one inference pipeline, whose results go to its outfeed.
          inputs: placeholder -> value, for those that are to have this value for ever. The other ones are
            given to the loaded program by their names; before the pipeline nothing may be computed from
            them.

        Raises:
          NotImplementedError: the program is something else than one inference pipeline.
          OSError: it cannot be written.
          ValueError: a placeholder has no value and is computed with, or `path` is something else.
        """
        exporting.export(path, program, self, dict(inputs or {}))

    def restore(
        self, path: str | os.PathLike[str], *, allow_partial: bool = False, infeeds: bool = True
    ) -> None:
        """Takes over a checkpoint, in place of all that the session has; also its seed.

        The infeeds of what trains go on where they stood when it was saved, at the next run, if their
        pipeline or loop has the same name: they are initialized as always, before this or after, and their
        data sets must give the same elements in the same order.

        Args:
          path: from `save`, or from `IPUPipelineEstimator.latest_checkpoint`.
          allow_partial: whether it may lack variables that programs have, which then get their initial
            values, and have others.
          infeeds: whether data sets go on where they stood; False leaves them where they are.

        Raises:
          CheckpointError: it cannot be read; or, without `allow_partial`, it is of another model than the
            programs that are compiled. Programs that are compiled later raise this when they run. The
            session stays as it was.
          RuntimeError: the session is closed.
        """
        if self._is_closed:
            raise RuntimeError("Attempted to use a closed Session.")
        self._select_devices()  # Orbax starts JAX's backend
        self.take_over(checkpoints.read_checkpoint(path), path, fits=not allow_partial, feeds=infeeds)

    def take_snapshot(self, is_kept: bool = True, extra: Mapping[str, Any] | None = None) -> Snapshot:
        """What `save` writes, as it is now; not while a program runs.

        Args:
          is_kept: whether programs may run before it is used.
          extra: what else belongs to it, JSON.
        """
        state = self._state
        if is_kept:
            leaves, tree = jax.tree.flatten(state.arrays)
            state = state.with_arrays(jax.tree.unflatten(tree, placement.keep(leaves)))
        implementation = jax.random.key_impl(self._get_key())
        feeds, plans = self._resumption.feeds, self._resumption.plans
        return Snapshot(state, self._seed, str(implementation), feeds, plans, dict(extra or {}))

    def take_over(
        self, snapshot: Snapshot, path: str | os.PathLike[str], *, fits: bool = True, feeds: bool = True
    ) -> None:
        """What `restore` does with a snapshot that was read from a path."""
        if fits:
            check_snapshot(snapshot, path, ipu_compiler.compiled_programs)
        self._resumption = Resumption.of(snapshot, path, fits=fits, feeds=feeds)
        self._state = snapshot.state
        self._seed, self._key = snapshot.seed, None
        self._key_implementation = snapshot.key_implementation

    def run(self, fetch: Any, feed_dict: Mapping[Any, Any] | None = None) -> Any:
        """Runs something, and returns when it has completed.

        Args:
          fetch: a program, an infeed's `initializer` or `deleter`, what an outfeed's `dequeue` returned,
            `global_variables_initializer()`, or a list of them, which are run in that order.
          feed_dict: placeholder -> value, for programs.

        Returns:
          What the compiled function returned, as NumPy arrays, with None for pipelines; for a dequeue the
          elements (see `IPUOutfeedQueue.dequeue`); None for initializers. For a list, a list.

        Raises:
          OutOfRangeError: an infeed's data ended; completed weight updates stand.
          RuntimeError: the session is closed, or an infeed was not initialized.
          TypeError: `fetch` is nothing that can be run.
          ValueError: `feed_dict` does not fit the program.
          KeyboardInterrupt: on Ctrl-C; completed weight updates stand.
        """
        if self._is_closed:
            raise RuntimeError("Attempted to use a closed Session.")
        fetches, tree = jax.tree.flatten(fetch, is_leaf=lambda node: not isinstance(node, (list, tuple)))
        for one in fetches:
            if not isinstance(one, (Program, InfeedOperation, OutfeedOperation, InitializerOperation)):
                raise TypeError(
                    "Session.run: fetch must be a compiled program, an infeed's initializer, what an "
                    "outfeed's dequeue() returned, global_variables_initializer(), or a list of them; got "
                    f"{type(one).__name__}."
                )
        programs = [one for one in fetches if isinstance(one, Program)]
        try:
            values = self._run_all(fetches, programs, feed_dict or {})
        except BaseException:
            for program in programs:
                for infeed in program.infeeds:
                    infeed.stop()
            raise
        result = jax.tree.unflatten(tree, values)
        return list(result) if isinstance(result, tuple) else result

    def run_part(
        self,
        program: Program,
        feed_dict: Mapping[Any, Any] | None = None,
        *,
        max_updates: int,
        should_stop: Callable[[], bool],
    ) -> Any:
        """Runs a program whose pipelines may do fewer weight updates than their `repeat_count`.

        Args:
          program: the program.
          feed_dict: placeholder -> value.
          max_updates: how many each pipeline does at most; executions, in inference.
          should_stop: asked after each update, or block of updates: whether the pipeline ends there.
        """
        self._max_updates, self._should_stop = max_updates, should_stop
        try:
            return self.run(program, feed_dict)
        finally:
            self._max_updates = self._should_stop = None

    def _run_all(
        self, fetches: Sequence[Any], programs: Sequence[Program], feeds: Mapping[Any, Any]
    ) -> list[Any]:
        _check_feeds(programs, feeds)
        self._resumption.check(programs)
        needs_devices = any(isinstance(one, (Program, InitializerOperation)) for one in fetches)
        if needs_devices:
            self._select_devices()
        return [
            one.run(self, feeds) if isinstance(one, Program) else self._run_operation(one)
            for one in fetches
        ]

    def _select_devices(self) -> None:
        if not config.is_selected():
            known = ipu_compiler.compiled_programs()
            config.select_automatically([(program.ipu_device, program.num_ipus) for program in known])

    def _run_operation(self, operation: Any) -> Any:
        if isinstance(operation, InitializerOperation):
            self._initialize()
            return None
        if isinstance(operation, OutfeedOperation):
            return operation.queue.take()
        if operation.starts:
            self._infeeds[operation.queue] = operation.queue.initialize()
        else:
            operation.queue.delete()
            self._infeeds.pop(operation.queue, None)
        return None

    # For programs.

    def variable(self, spec: VariableSpec) -> Any:
        """The value of a variable, which comes into being if it does not exist.

        Raises:
          ValueError: it exists with another shape or dtype.
        """
        value = self._state.variables.get(spec.name)
        if value is None:
            value = initial_value(spec, self._get_key())
            variables = {**self._state.variables, spec.name: value}
            self._state = dataclasses.replace(self._state, variables=variables)
        if isinstance(value, np.ndarray) and value.shape == spec.shape:  # loaded, and not used yet
            is_cast = value.dtype != spec.dtype
            value = cast_exactly(value, spec.dtype, f"The value loaded for variable {spec.name}")
            if is_cast:
                variables = {**self._state.variables, spec.name: value}
                self._state = dataclasses.replace(self._state, variables=variables)
        if value.shape != spec.shape or value.dtype != spec.dtype:
            raise ValueError(
                f"Variable {spec.name} is {spec.dtype.name}{list(spec.shape)} in this program, but the "
                f"session has {value.dtype.name}{list(value.shape)} under that name."
            )
        return value

    def run_call(self, call: Call, operands: Sequence[Any], devices: Sequence[Any]) -> list[Any]:
        """Runs a pipeline or loop, and returns what it returns.

        The session's state changes after each weight update of a pipeline, and after each iteration or
        block of iterations of a loop.
        """
        if isinstance(call, PipelineCall):
            self._run_pipeline(call, operands, devices)
            return []
        return self._run_loop(call, operands, devices)

    def _run_pipeline(self, call: PipelineCall, operands: Sequence[Any], devices: Sequence[Any]) -> None:
        pipeline, inputs, count = call.pipeline, operands, None
        if call.has_count_operand:
            count, inputs = call.check_count(operands[0]), operands[1:]
        if call.trains:
            pipeline.set_recomputation(call.find_recomputation())
        platform = devices[0].platform
        self._resumption.before_run(call, platform)
        executor = pipeline.prepare(devices)
        self._resumption.note_plan(call, platform)
        take: Take = take_nothing
        if call.infeed_queue is not None:
            num_fetched = pipeline.num_fetched(call.repeat_count, count)
            take = call.infeed_queue.connect(executor.place_element, num_fetched)
        state = pipeline.place(self._make_pipeline_state(call))
        done, wanted = 0, call.repeat_count
        if self._max_updates is not None:
            wanted = min(wanted, self._max_updates)
        while done < wanted:
            left = wanted - done
            pending = pipeline.accumulate(state, take, inputs, left, call.repeat_count, count)
            # From here the old state may be gone (its memory is given to the new one) before the new
            # one is in its place.
            with interrupts.deferred():
                before = int(state.execution_count)
                state, collected = pipeline.update(state, pending)
                done += int(state.execution_count) - before
                self._keep(call, state)
                if call.infeed_queue is not None:
                    call.infeed_queue.mark()
                if call.outfeed_queue is not None:
                    for part in collected:
                        leaves = [part.loss] if call.outfeeds_loss else part.outputs
                        call.outfeed_queue.extend(leaves, part.size)
            if self._should_stop is not None and self._should_stop():
                break
        jax.block_until_ready((state.variables, state.optimizer_state))

    def _run_loop(self, call: LoopCall, operands: Sequence[Any], devices: Sequence[Any]) -> list[Any]:
        loop, body = call.loop, call.loop.body
        count = call.count
        if call.has_count_operand:
            count, operands = max(0, int(operands[0])), operands[1:]
        num_captured = len(body.captured)
        constant, changing = loop.split_carried(operands[num_captured:])
        inputs = [*operands[:num_captured], *constant]
        self._resumption.before_run(call, devices[0].platform)
        loop.prepare(devices)
        capacity = loop.block_size(_block_limit(call, count))
        state = self._place_loop_state(call)
        take: Take = take_nothing
        if call.infeed_queue is not None and count != 0:
            take = call.infeed_queue.connect(loop.place_feed, capacity, is_tentative=count is None)
        done = 0
        while (count is None or done < count) and loop.goes_on(inputs, changing):
            elements = take(capacity if count is None else min(capacity, count - done))
            with interrupts.deferred():  # see _run_pipeline
                result = loop.run(state, inputs, changing, elements, done, capacity)
                state, changing = result.state, result.changing
                done += result.count
                self._keep_loop(call, state)
                if call.infeed_queue is not None:
                    call.infeed_queue.mark(len(elements) - result.count)
                for (entry, _places), leaves in zip(body.enqueued, result.enqueued, strict=True):
                    entry.target.extend(leaves, result.size)
            if call.infeed_queue is not None and result.count < len(elements):
                call.infeed_queue.give_back(len(elements) - result.count)
        jax.block_until_ready((state.pipeline.variables, state.pipeline.optimizer_state))
        return loop.join_carried(constant, changing)

    def _make_pipeline_state(self, call: Call) -> PipelineState:
        """The state of a pipeline or loop, its optimizer's None where it is to be made."""
        record = self._state.pipelines.get(call.name, Record())
        known = record.optimizer
        optimizer_state = None
        if call.trains and known is not None:
            shapes = call.optimizer_shapes
            if known.shapes != shapes:
                different = sorted(
                    path
                    for path in shapes.keys() | known.shapes.keys()
                    if shapes.get(path) != known.shapes.get(path)
                )
                raise ValueError(
                    "The session has optimizer state of another structure under the pipeline name "
                    f"{call.name!r}; it differs in {', '.join(different)}. Give one of the pipelines "
                    "another `name`."
                )
            optimizer_state = call.state_tree.unflatten(jax.tree.leaves(known.tree))
        variables = {name: self.variable(spec) for name, spec in call.variables.items()}
        if optimizer_state is None and isinstance(call, PipelineCall) and call.trains:
            optimizer_state = call.pipeline.init_optimizer_state(variables)
        return PipelineState(
            variables=variables,
            optimizer_state=optimizer_state,
            update_count=np.int32(record.update_count),
            execution_count=np.int32(record.execution_count),
            key=self._get_key(),
        )

    def _place_loop_state(self, call: LoopCall) -> LoopState:
        """The state of a loop on its devices; what an earlier run accumulated is in it."""
        kept = self._state.pipelines.get(call.name, Record()).accumulated
        if not call.trains or (kept is not None and kept.count == 0):
            kept = None
        if kept is not None and kept.settings != call.settings:
            raise ValueError(
                f"The session has the gradients of {kept.count} iterations of {call.name!r}, accumulated "
                f"by {kept.settings}. This program accumulates by {call.settings}, and cannot go on from "
                "there. Run the other one until its weight update is complete, or give this optimizer "
                "another `name`."
            )
        accumulators, count = ({}, 0) if kept is None else (kept.accumulators, kept.count)
        return call.loop.place(LoopState(self._make_pipeline_state(call), accumulators, count))

    def _keep(self, call: Call, state: PipelineState, accumulated: KeptGradients | None = None) -> None:
        record = self._state.pipelines.get(call.name, Record())
        record = dataclasses.replace(record, execution_count=int(state.execution_count))
        if call.trains:
            record = dataclasses.replace(
                record,
                optimizer=KeptOptimizer(call.optimizer_shapes, state.optimizer_state),
                update_count=int(state.update_count),
            )
        if accumulated is not None:
            record = dataclasses.replace(record, accumulated=accumulated)
        self._state = SessionState(
            {**self._state.variables, **state.variables},
            {**self._state.pipelines, call.name: record},
        )

    def _keep_loop(self, call: LoopCall, state: LoopState) -> None:
        # The count of runs goes up with the first iterations: a run that is broken off counts too.
        counted = dataclasses.replace(
            state.pipeline, execution_count=np.int32(state.pipeline.execution_count + 1)
        )
        accumulated = None
        if call.trains:
            accumulated = KeptGradients(call.settings, state.accumulators, state.num_accumulated)
        self._keep(call, counted, accumulated)

    def _initialize(self) -> None:
        specs: dict[str, VariableSpec] = {}
        unclear = set()  # names that programs use for different variables: whichever runs first says
        for program in ipu_compiler.compiled_programs():
            for name, spec in program.variables.items():
                known = specs.setdefault(name, spec)
                if (known.shape, known.dtype) != (spec.shape, spec.dtype):
                    unclear.add(name)
        key = self._get_key()
        self._state = SessionState(
            {name: initial_value(spec, key) for name, spec in specs.items() if name not in unclear}
        )
        self._resumption = Resumption()

    def _get_key(self) -> Any:
        if self._key is None:
            self._key = jax.random.key(self._seed, impl=self._key_implementation)
        return self._key


def _block_limit(call: LoopCall, count: int | None) -> int:
    """How many iterations of a loop may be run together."""
    if count is None:  # by a condition: no more than have been fetched ahead
        return _BLIND_ITERATIONS if call.infeed_queue is None else call.infeed_queue.prefetch_depth
    # A count that is known when the program runs should not be compiled for.
    return 1 << (count - 1).bit_length() if call.has_count_operand and count > 0 else count


def _check_feeds(programs: Sequence[Program], feed_dict: Mapping[Any, Any]) -> None:
    known = dict.fromkeys(placeholder for program in programs for placeholder in program.placeholders)
    for key in feed_dict:
        if not isinstance(key, Placeholder):
            raise TypeError(f"feed_dict: keys must be placeholders; got {key!r}.")
        if key not in known:
            raise ValueError(
                f"feed_dict: {key!r} is not an input of this program. Inputs are: "
                f"{', '.join(repr(placeholder) for placeholder in known) or 'none'}."
            )

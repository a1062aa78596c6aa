"""The store of a session: its state, which is replaced whole, and the key that random numbers come from."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.checkpointing.session_state import KeptGradients, KeptOptimizer, Record, SessionState
from ipu_pipeline.engine import PipelineState, VariableSpec, processes
from ipu_pipeline.engine.fronts import RunState, initial_values
from ipu_pipeline.ground.values import cast_exactly
from ipu_pipeline.processes import interrupts
from ipu_pipeline.tf1.program.calls import Call, LoopCall, PipelineCall
from ipu_pipeline.tf1.program.host_tables import RowGradients
from ipu_pipeline.tf1.program.program import Program
from ipu_pipeline.tf1.session import agreeing
from ipu_pipeline.tf1.session.metrics import MetricLog

__all__ = ["Store"]


class Store:
    """The variables and optimizer state of a session.

    Attributes:
      state: everything that runs change. It is replaced whole.
      lock: held from when the memory of a state may be given to the next one until that is in its place;
        and by other threads that read arrays of the state meanwhile.
      seed: initial values and random keys depend on it.
      metrics: the reports of pipelines, until they are read.
      step_counting: the steps that the global step goes up by in a weight update, and an offset.
      row_gradients: (name of a loop, full name of a table in host memory) -> the gradients of its rows in
        each iteration of a weight update that is not complete; see `host_rows`.
      is_initialized: whether `global_variables_initializer()` was run, so that all variables count as made.
    """

    def __init__(
        self, seed: int, key_implementation: str | None = None, state: SessionState | None = None
    ) -> None:
        """Makes a store, by default an empty one. It does not start JAX's backend."""
        self.state = SessionState() if state is None else state
        self.lock = threading.RLock()
        self.seed = seed
        self.metrics = MetricLog()
        self.row_gradients: dict[tuple[str, str], list[list[RowGradients]]] = {}
        self.is_initialized = False
        self.step_counting = (1, 0)
        self._host_arrays: dict[str, np.ndarray[Any, Any]] = {}  # the arrays that updates write into
        self._lent: str | None = None  # the entry whose values the weights are; see `lending`
        self._key: Any = None
        self._agreed: int | None = None  # the seed that all processes have agreed on
        self._is_own = True  # whether this process has set values that it has not compared with others
        self._key_implementation = key_implementation
        self._unclaimed: set[str] = set()  # full names that were loaded, and that no known program has

    def agree_on_seed(self) -> None:
        """Checks that all processes of the run, if there are several, have the same seed; all call it."""
        others = processes.current()
        if others is not None and self._agreed != self.seed:
            others.agree(
                "session", {"the seed": str(self.seed), "random keys": str(self._key_implementation)}
            )
            self._agreed = self.seed

    def agree_on_values(self, programs: Sequence[Program]) -> None:
        """Checks that all processes of the run have the same initial values for programs."""
        if processes.current() is None:
            return
        fault = None
        try:
            for program in programs:
                for spec in program.variables.values():
                    self.variable(spec)
        except Exception as error:
            fault = error
        if self._is_own or fault is not None:
            agreeing.agree_on_values(self.state, fault)
            self._is_own = False

    def reset_seed(self, seed: int) -> None:
        """Takes another seed, for random numbers and for variables that do not exist yet."""
        self.seed, self._key = seed, None

    @property
    def key(self) -> Any:
        """The random key that all others are folded from; starts JAX's backend."""
        if self._key is None:
            with interrupts.deferred():  # JAX's imports and caches at its start must be whole
                self._key = jax.random.key(self.seed, impl=self._key_implementation)
        return self._key

    def record(self, name: str) -> Record:
        """Returns what is kept under the name of a pipeline, or of a loop's optimizer."""
        return self.state.pipelines.get(name, Record())

    def most_updates(self) -> int:
        """The number of weight updates of the pipeline or loop with the most."""
        return max((record.update_count for record in self.state.pipelines.values()), default=0)

    def step_of_weights(self, name: str) -> int:
        """Returns the global step in inference: the weight updates under its name, or if none, the most."""
        return self.record(name).update_count or self.most_updates()

    def global_step(self) -> int:
        """The global step of the session as a whole: weight updates, unless `step_counting` changes it."""
        per_update, offset = self.step_counting
        return self.most_updates() * per_update + offset

    def load(self, mapping: Mapping[str, Any], programs: Sequence[Program]) -> None:
        """Sets variables; see `Session.load`."""
        before = self.state
        self._set_loaded(mapping)
        known = {*mapping, *before.variables}
        if any(not known.isdisjoint(program.variables) for program in programs):
            try:
                self.check_loaded(programs)
            except ValueError:
                self.state = before
                raise

    def _set_loaded(self, mapping: Mapping[str, Any]) -> None:
        loaded = {}
        for name, value in mapping.items():
            if not isinstance(name, str):
                raise TypeError(f"load: variables are called by their full names; got the key {name!r}.")
            array = np.array(value)
            if not (jnp.issubdtype(array.dtype, jnp.number) or array.dtype == np.bool_):
                raise TypeError(
                    f"load: the value of variable {name} must be an array of numbers or booleans; got "
                    f"{type(value).__name__} ({array.dtype})."
                )
            known = self.state.variables.get(name)
            if known is not None:
                if array.shape != known.shape:
                    raise ValueError(
                        f"load: variable {name} has shape {known.shape}; the value has {array.shape}."
                    )
                array = cast_exactly(array, known.dtype, f"load: the value of variable {name}")
            loaded[name] = array
        self._is_own = True
        self._unclaimed.update(name for name in loaded if name not in self.state.variables)
        variables = {**self.state.variables, **loaded}
        self.state = dataclasses.replace(self.state, variables=variables)

    def check_loaded(self, programs: Sequence[Program]) -> None:
        """Raises if no program has a variable that was loaded, and undoes that load."""
        known = {name for program in programs for name in program.variables}
        wrong = sorted(self._unclaimed - known)
        self._unclaimed.clear()
        if not wrong:
            return
        kept = {name: value for name, value in self.state.variables.items() if name not in wrong}
        self.state = dataclasses.replace(self.state, variables=kept)
        described = []
        for name in wrong:
            similar = difflib.get_close_matches(name, known, 1)
            described.append(repr(name) + (f" (did you mean {similar[0]!r}?)" if similar else ""))
        raise ValueError(
            f"load: no compiled program has a variable {', '.join(described)}. Variables are called by "
            "their full names, such as 'encoder/dense/kernel'; load them after their program has been "
            "compiled."
        )

    def variable(self, spec: VariableSpec) -> Any:
        """Returns the value of a variable, which is created if it does not exist."""
        value = self.state.variables.get(spec.name)
        if value is None:
            with interrupts.deferred():
                value = initial_values([spec], self.key)[spec.name]
            self._is_own = True
            self._set_variables({spec.name: value})
        is_loaded = isinstance(value, np.ndarray) and value.shape == spec.shape  # not used yet
        if is_loaded and not (spec.is_on_host and value.dtype == spec.dtype):
            is_cast = value.dtype != spec.dtype
            value = cast_exactly(value, spec.dtype, f"The value loaded for variable {spec.name}")
            if is_cast:
                self._set_variables({spec.name: value})
        if value.shape != spec.shape or value.dtype != spec.dtype:
            raise ValueError(
                f"Variable {spec.name} is {spec.dtype.name}{list(spec.shape)} in this program, but the "
                f"session has {value.dtype.name}{list(value.shape)} under that name."
            )
        return value

    def host_array(self, spec: VariableSpec) -> np.ndarray[Any, Any]:
        """Returns a variable that stays in host memory, to be written into."""
        own, known = self._host_arrays.get(spec.name), self.state.variables.get(spec.name)
        if own is None or known is not own:
            value = self.variable(spec)
            if known is not None:  # it was loaded or restored: other code may hold it
                value = np.array(value)
                self._set_variables({spec.name: value})
            self._host_arrays[spec.name] = value
        return self._host_arrays[spec.name]

    def with_host_copies(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """Returns variables, with copies of those that updates write into."""
        own = self._host_arrays
        return {
            name: np.array(value) if name in own and own[name] is value else value
            for name, value in variables.items()
        }

    def make_pipeline_state(self, call: Call) -> PipelineState:
        """Makes the state of a pipeline or loop; the optimizer's is None if it is still to be made."""
        record = self.record(call.name)
        known = record.optimizer
        optimizer_state = None
        if call.trains and known is not None:
            if different := known.find_differences(call.optimizer_shapes):
                raise ValueError(
                    "The session has optimizer state of another structure under the pipeline name "
                    f"{call.name!r}; it differs in {', '.join(different)}. Give one of the pipelines "
                    "another `name`."
                )
            optimizer_state = call.state_tree.unflatten(jax.tree.leaves(known.tree))
        variables = {name: self.variable(spec) for name, spec in call.variables.items()}
        if optimizer_state is None and isinstance(call, PipelineCall) and call.trains:
            with interrupts.deferred():
                optimizer_state = call.pipeline.init_optimizer_state(variables)
        return PipelineState(
            variables=variables,
            optimizer_state=optimizer_state,
            update_count=self.update_count(call),
            execution_count=record.execution_count,
            key=self.key,
        )

    def update_count(self, call: Call) -> int:
        """The number of weight updates of the variables of a pipeline."""
        return self.record(call.name).update_count if call.trains else self.step_of_weights(call.name)

    def place_loop_state(self, call: LoopCall) -> RunState:
        """Places the state of a loop on its devices, with the gradients that an earlier run accumulated."""
        kept = self.record(call.name).accumulated
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
        return call.loop.place_run(self.make_pipeline_state(call), accumulators, count)

    def optimizer(self, name: str) -> KeptOptimizer:
        """Returns the optimizer's state under a name."""
        kept = self.record(name).optimizer
        if kept is None:
            records = self.state.pipelines.items()
            known = [other for other, record in records if record.optimizer is not None]
            raise KeyError(
                f"There is no optimizer state under the name {name!r}; the names are: "
                f"{', '.join(known) or 'none'}."
            )
        return kept

    @contextlib.contextmanager
    def lending(self, entry: str, values: Mapping[str, Any]) -> Iterator[None]:
        """Puts values in the places of variables, for a `with` block."""
        own = {name: self.state.variables[name] for name in values}
        try:
            with interrupts.deferred():
                self._lent = entry
                self._set_variables(values)
            yield
        finally:
            with interrupts.deferred():
                self._set_variables(own)
                self._lent = None

    def _set_variables(self, values: Mapping[str, Any]) -> None:
        variables = {**self.state.variables, **values}
        self.state = dataclasses.replace(self.state, variables=variables)

    def has_row_gradients(self) -> bool:
        """Whether a loop is within a weight update of a table in host memory, which checkpoints lack."""
        return any(self.row_gradients.values())

    def check_weights(self, what: str) -> None:
        """Raises a RuntimeError if the weights are not the session's own."""
        if self._lent is not None:
            raise RuntimeError(
                f"{what}: the weights are {self._lent!r} of an optimizer's state, inside "
                "`with session.weights_of(...)`. Leave that block first."
            )

    def keep(self, call: Call, state: PipelineState, accumulated: KeptGradients | None = None) -> None:
        """Keeps the state that a pipeline left."""
        record = self.record(call.name)
        record = dataclasses.replace(record, execution_count=int(state.execution_count))
        if call.trains:
            record = dataclasses.replace(
                record,
                optimizer=KeptOptimizer(call.optimizer_shapes, state.optimizer_state),
                update_count=int(state.update_count),
            )
        if accumulated is not None:
            record = dataclasses.replace(record, accumulated=accumulated)
        self.state = SessionState(
            {**self.state.variables, **state.variables},
            {**self.state.pipelines, call.name: record},
        )

    def keep_loop(self, call: LoopCall, state: RunState) -> None:
        """Keeps the state that iterations of a loop left."""
        # The count of runs goes up with the first iterations, so an aborted run counts, too.
        counted = dataclasses.replace(
            state.pipeline, execution_count=int(state.pipeline.execution_count) + 1
        )
        accumulated = None
        if call.trains:
            accumulated = KeptGradients(call.settings, state.accumulators, state.num_accumulated)
        self.keep(call, counted, accumulated)

    def initialize(self, specs: Iterable[VariableSpec]) -> None:
        """Starts over with the initial values of variables."""
        known: dict[str, VariableSpec] = {}
        unclear = set()
        for spec in specs:
            first = known.setdefault(spec.name, spec)
            if (first.shape, first.dtype) != (spec.shape, spec.dtype):
                unclear.add(spec.name)
        values = initial_values([spec for name, spec in known.items() if name not in unclear], self.key)
        with interrupts.deferred():
            self._is_own = True
            self.metrics = MetricLog()
            self.row_gradients.clear()
            self.is_initialized = True
            self.state = SessionState(values)

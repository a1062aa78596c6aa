"""The store of a session: its state, replaced as a whole, metrics, and agreement between processes."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import difflib
import re
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.checkpointing.states import Counts, State, find_different_leaves
from ipu_pipeline.engine import PipelineState, VariableSpec, processes
from ipu_pipeline.engine.fronts import NUMBERS, Progress, Reported, initial_values
from ipu_pipeline.engine.processes import digest_array, group_sharding, read_gathered
from ipu_pipeline.ground.pytrees import cast_exactly
from ipu_pipeline.processes import interrupts
from ipu_pipeline.tf1.graph import Placeholder
from ipu_pipeline.tf1.program.calls import Call, LoopCall, PipelineCall
from ipu_pipeline.tf1.program.host_tables import RowGradients
from ipu_pipeline.tf1.program.program import Program

# Agreement between processes. They compare before a run, not in `Session.load` and the like: such a call
# would wait for a process that does not make it. Values that each process makes or reads by itself are
# compared once, by digests; values from runs are on devices, and the same for all.

_MOST_SHOWN = 4  # elements of an array that an error shows


def agree_on_run(
    programs: Sequence[Program],
    feeds: Mapping[Placeholder, Any],
    changes: Mapping[str, int],
    fault: Exception | None = None,
    beside: str = "",
) -> list[str]:
    """Compares the next run with the other processes', if there are any; all of them call it.

    Returns:
      What is `beside` in each process.
    """
    peers = processes.current()
    if peers is None:
        return [beside]
    facts = {
        "the programs": "; ".join(
            ", ".join(call.name for call in program.calls) or "no pipeline or loop" for program in programs
        )
    }
    facts |= {f"calls of {way}": str(number) for way, number in changes.items()}
    for program in programs:
        for placeholder in program.placeholders:
            facts[f"the value fed to {placeholder!r}"] = _describe_fed(placeholder, feeds)
    return _agree(peers, "a run of a session", facts, fault, beside)


def _agree(
    peers: processes.Peers,
    event: str,
    facts: Mapping[str, str],
    fault: Exception | None,
    beside: str = "",
) -> list[str]:
    """Compares facts and this process's fault with the others'; raises the fault if all have it."""
    described = "nothing" if fault is None else f"{type(fault).__name__}: {fault}"
    try:
        besides = peers.agree(event, {"what keeps it from running": described, **facts}, beside=beside)
    except ValueError as error:
        raise error from fault
    if fault is not None:
        raise fault
    return besides


def _describe_fed(placeholder: Placeholder, feeds: Mapping[Placeholder, Any]) -> str:
    if placeholder not in feeds:
        return "nothing"
    try:
        return _describe(placeholder.check_value(feeds[placeholder]))
    except ValueError:  # the run raises it, if all processes feed it
        return "a value that does not fit"


def agree_on_state(state: State, fault: Exception | None = None) -> None:
    """Compares the values that each process has made by itself, if there are others; all call it."""
    peers = processes.current()
    if peers is None:
        return
    arrays = dict(_own_arrays(state))
    facts = {name: digest_array(array) for name, array in arrays.items()}
    facts |= {
        f"the number of weight updates of {name!r}": str(counts.update_count)
        for name, counts in state.counts.items()
    }
    together = processes.digest([repr((sorted(facts.items()), repr(fault)))])
    if len(set(peers.exchange("values of a session", together))) > 1 or fault is not None:
        described = {name: _describe(array) for name, array in arrays.items()}
        _agree(peers, "values of a session", {**facts, **described}, fault)


def _own_arrays(state: State) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """The arrays that this process made or read by itself, with their names in errors."""
    named = {f"variable {name}": value for name, value in state.variables.items()}
    for name, leaves in state.optimizers.items():
        named |= {f"{path} of the optimizer's state of {name!r}": leaf for path, leaf in leaves.items()}
    for name, sums in state.accumulators.items():
        named |= {f"gradients of {key} that {name!r} has accumulated": value for key, value in sums.items()}
    for text, value in named.items():
        if group_sharding(value) is None:
            yield text, _as_numpy(value)


def _as_numpy(array: Any) -> np.ndarray[Any, Any]:
    is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(array) if is_key else array)


def _describe(array: np.ndarray[Any, Any]) -> str:
    if array.size <= _MOST_SHOWN:
        return f"{array.tolist()} ({array.dtype})"
    first = ", ".join(map(str, array.flat[:_MOST_SHOWN]))
    return f"{digest_array(array)}, beginning with {first}"


# Metrics.

_MAX_UPDATES = 10_000  # the updates of one pipeline that are kept unread
_MAX_PENDING = 4  # entries that stay on the devices


class _Entry:
    """The metrics of some weight updates, on the devices or, once they have been read, on the host."""

    def __init__(self, numbers: range, reported: Reported) -> None:
        self.numbers = numbers
        self._reported: Reported | None = reported
        self._values: dict[str, np.ndarray[Any, Any]] = {}

    def is_ready(self) -> bool:
        """Whether reading would not wait."""
        reported = self._reported
        return reported is None or reported.is_ready()

    def read(self) -> Mapping[str, np.ndarray[Any, Any]]:
        """Returns the values by name; waits for the devices, which need not keep them any longer."""
        reported = self._reported
        if reported is not None:
            self._values = reported.read(len(self.numbers))
            self._reported = None
        return self._values


class _Log:
    """The unread reports of one pipeline, the oldest first.

    Attributes:
      entries: all entries.
      on_device: the entries that are still on the devices; after an interrupt, some may be missing.
      num_updates: the number of their weight updates.
    """

    def __init__(self, entries: Sequence[_Entry] = ()) -> None:
        self.entries = collections.deque(entries)
        self.on_device: collections.deque[_Entry] = collections.deque()
        self.num_updates = sum(len(entry.numbers) for entry in entries)

    def add(self, entry: _Entry) -> None:
        """Takes one more, moves computed entries to the host, and drops those that are too old."""
        self.entries.append(entry)
        self.on_device.append(entry)
        self.num_updates += len(entry.numbers)
        while len(self.on_device) > _MAX_PENDING and self.on_device[0].is_ready():
            self.on_device.popleft().read()
        while self.num_updates - len(self.entries[0].numbers) >= _MAX_UPDATES:
            self.num_updates -= len(self.entries.popleft().numbers)


class MetricLog:
    """The reports of a session's pipelines.

    It may be read while another thread runs them, and by a signal's handler: no thread waits for the
    devices while it holds the lock, and a handler that interrupts the thread that holds the lock has it,
    too.
    """

    def __init__(self) -> None:
        """Starts without reports."""
        self._lock = threading.RLock()
        self._logs: dict[tuple[str, bool], _Log] = {}

    def add(self, call: PipelineCall, num_updates: int, last: int, progress: Progress) -> None:
        """Takes a report of a pipeline; does not wait for its values."""
        reader = call.pipeline.built.metrics
        if not reader:
            return
        entry = _Entry(range(last - num_updates + 1, last + 1), reader.select(progress))
        with self._lock:
            self._logs.setdefault((call.name, call.trains), _Log()).add(entry)

    def read(self, name: str, training: bool) -> dict[str, np.ndarray[Any, Any]]:
        """Returns what a pipeline reported since the last call; see `Session.metrics`."""
        if not isinstance(name, str):
            raise TypeError(f"metrics: name must be the name of a pipeline; got {name!r}.")
        key = (name, training)
        with self._lock:
            if key not in self._logs:
                reporting = dict.fromkeys(pipeline for pipeline, _training in self._logs)
                if reporting and name not in reporting:
                    raise KeyError(
                        f"metrics: no pipeline named {name!r} has reported anything; these have: "
                        f"{', '.join(reporting)}."
                    )
                return {NUMBERS: np.zeros(0, np.int64)}
            log, self._logs[key] = self._logs[key], _Log()
        try:
            return _join(log.entries)
        except BaseException:  # it was not returned, so the next call returns it
            with self._lock:
                self._logs[key] = _Log([*log.entries, *self._logs[key].entries])
            raise


def _join(entries: Collection[_Entry]) -> dict[str, np.ndarray[Any, Any]]:
    """Joins the values of entries; NaN where a program of that name reports other metrics."""
    parts = [(len(entry.numbers), entry.read()) for entry in entries]
    numbers = [np.asarray(entry.numbers, np.int64) for entry in entries]
    joined = {NUMBERS: np.concatenate([np.zeros(0, np.int64), *numbers])}
    for name in dict.fromkeys(name for _size, values in parts for name in values):
        columns = [values.get(name, np.full(size, np.nan, np.float32)) for size, values in parts]
        joined[name] = np.concatenate(columns)
    return joined


# Entries of an optimizer's state.


def read_state(leaves: Mapping[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Returns copies of all leaves, by path."""
    values = read_gathered(list(leaves.values()))
    return {path: np.array(_as_numpy(value)) for path, value in zip(leaves, values, strict=True)}


def find_weights(
    leaves: Mapping[str, Any], entry: str, variables: Mapping[str, Any], trained: Collection[str] | None
) -> dict[str, Any]:
    """Returns the arrays of an entry that has one for each trained variable, in the variables' dtypes."""
    entries: dict[str, dict[str, Any]] = {}
    for path, leaf in leaves.items():
        for name, variable in variables.items():
            ending = jax.tree_util.keystr((jax.tree_util.DictKey(name),))
            if path.endswith(ending) and leaf.shape == variable.shape:
                entries.setdefault(path.removesuffix(ending), {})[name] = leaf
    if trained is None:
        trained = {name for arrays in entries.values() for name in arrays}
    complete = {path: arrays for path, arrays in entries.items() if arrays.keys() == set(trained)}
    matching = [path for path in complete if entry in (path, _last_name(path))]
    if len(matching) != 1:
        paths = ", ".join(map(repr, sorted(complete))) or "none"
        problem = "is not one of" if not matching else "is the last name of several of"
        raise ValueError(
            f"weights_of: {entry!r} {problem} the entries of the optimizer's state with an array for each "
            f"trained variable. These are, by path: {paths}."
        )
    return {name: leaf.astype(variables[name].dtype) for name, leaf in complete[matching[0]].items()}


def _last_name(path: str) -> str:
    """The last name of a path: `ema` of `[1].ema`, `mu` of `['inner'][0].mu`."""
    match = re.search(r"""(?:\.(\w+)|\['([^']*)'\])$""", path)
    return "" if match is None else match[1] or match[2]


class Store:
    """The variables and optimizer state of a session.

    Attributes:
      state: everything that runs change. Replaced whole, so an error or interrupt leaves the last one.
      lock: held from when the memory of a state may be given to the next one until that is in its place;
        and by other threads that read arrays of the state meanwhile.
      metrics: the reports of pipelines, until they are read.
      step_counting: the steps that the global step goes up by in a weight update, and an offset.
      row_gradients: (name of a loop, full name of a table in host memory) -> the gradients of its rows in
        each iteration of a weight update that is not complete; see `HostRows`.
      is_initialized: whether `global_variables_initializer()` was run, so that all variables count as made.
    """

    def __init__(self, state: State) -> None:
        """Makes a store of a state. It does not start JAX's backend."""
        self.state = state
        self.lock = threading.RLock()
        self.metrics = MetricLog()
        self.row_gradients: dict[tuple[str, str], list[list[RowGradients]]] = {}
        self.is_initialized = False
        self.step_counting = (1, 0)
        self._host_arrays: dict[str, np.ndarray[Any, Any]] = {}  # the arrays that updates write into
        self._lent: str | None = None  # the entry whose values the weights are; see `lending`
        self._key: Any = None
        # The last pipeline that ran, what it left, and the state since then.
        self._left: tuple[PipelineCall, PipelineState, State] | None = None
        self._agreed: int | None = None  # the seed that all processes have agreed on
        self._is_own = True  # whether this process has set values that it has not compared with others
        self._unclaimed: set[str] = set()  # full names that were loaded, and that no known program has

    @property
    def seed(self) -> int:
        """The seed, on which initial values and random keys depend."""
        return self.state.seed

    def agree_on_seed(self) -> None:
        """Checks that all processes of the run, if there are several, have the same seed; all call it."""
        peers = processes.current()
        if peers is not None and self._agreed != self.seed:
            peers.agree(
                "session", {"the seed": str(self.seed), "random keys": str(self.state.key_implementation)}
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
            agree_on_state(self.state, fault)
            self._is_own = False

    def reset_seed(self, seed: int) -> None:
        """Takes another seed, for random numbers and for variables that do not exist yet."""
        with self.lock:  # what a run leaves meanwhile is of the old seed or of the new one
            self._replace(seed=seed)
            self._key = None

    @property
    def key(self) -> Any:
        """The random key that all others are folded from; starts JAX's backend."""
        if self._key is None:
            with interrupts.deferred():  # JAX's imports and caches at its start must be whole
                self._key = jax.random.key(self.seed, impl=self.state.key_implementation)
        return self._key

    def counts(self, name: str) -> Counts:
        """Returns the counts of a pipeline, or of a loop's optimizer, by name."""
        return self.state.counts.get(name, Counts())

    def most_updates(self) -> int:
        """The number of weight updates of the pipeline or loop with the most."""
        return max((counts.update_count for counts in self.state.counts.values()), default=0)

    def step_of_weights(self, name: str) -> int:
        """Returns the global step in inference: the weight updates under its name, or if none, the most."""
        return self.counts(name).update_count or self.most_updates()

    def global_step(self) -> int:
        """The global step of the session as a whole: weight updates, unless `step_counting` changes it."""
        per_update, offset = self.step_counting
        return self.most_updates() * per_update + offset

    def load(self, mapping: Mapping[str, Any], programs: Sequence[Program]) -> None:
        """Sets variables; see `Session.load`."""
        before = self.state.variables
        self._set_loaded(mapping)
        names = {*mapping, *before}
        if any(not names.isdisjoint(program.variables) for program in programs):
            try:
                self.check_loaded(programs)
            except ValueError:
                self._replace(variables=before)
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
            variable = self.state.variables.get(name)
            if variable is not None:
                if array.shape != variable.shape:
                    raise ValueError(
                        f"load: variable {name} has shape {variable.shape}; the value has {array.shape}."
                    )
                array = cast_exactly(array, variable.dtype, f"load: the value of variable {name}")
            loaded[name] = array
        self._is_own = True
        self._unclaimed.update(name for name in loaded if name not in self.state.variables)
        self._set_variables(loaded)

    def check_loaded(self, programs: Sequence[Program]) -> None:
        """Raises if no program has a variable that was loaded, and undoes that load."""
        names = {name for program in programs for name in program.variables}
        wrong = sorted(self._unclaimed - names)
        self._unclaimed.clear()
        if not wrong:
            return
        self._replace(variables={n: value for n, value in self.state.variables.items() if n not in wrong})
        described = []
        for name in wrong:
            similar = difflib.get_close_matches(name, names, 1)
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
        host_array, variable = self._host_arrays.get(spec.name), self.state.variables.get(spec.name)
        if host_array is None or variable is not host_array:
            value = self.variable(spec)
            if variable is not None:  # it was loaded or restored: other code may hold it
                value = np.array(value)
                self._set_variables({spec.name: value})
            self._host_arrays[spec.name] = value
        return self._host_arrays[spec.name]

    def with_host_copies(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """Returns variables, with copies of those that updates write into."""
        host_arrays = self._host_arrays
        return {
            name: np.array(value) if name in host_arrays and host_arrays[name] is value else value
            for name, value in variables.items()
        }

    def make_pipeline_state(self, call: Call) -> PipelineState:
        """Makes the state of a pipeline or loop; the optimizer's is None if it is still to be made.

        For a loop, it has the gradients that an earlier run accumulated. What a pipeline left is given to
        it again as it is, if nothing has changed since: it is known to be on its devices.
        """
        left = self._left  # another thread may set the seed
        if left is not None and left[0] is call and left[2] is self.state:
            return left[1]
        counts, leaves = self.counts(call.name), self.state.optimizers.get(call.name)
        optimizer_state = None
        if call.trains and leaves is not None:
            if different := find_different_leaves(leaves, call.optimizer_shapes):
                raise ValueError(
                    "The session has optimizer state of another structure under the pipeline name "
                    f"{call.name!r}; it differs in {', '.join(different)}. Give one of the pipelines "
                    "another `name`."
                )
            optimizer_state = call.state_tree.unflatten([leaves[path] for path in call.optimizer_shapes])
        variables = {name: self.variable(spec) for name, spec in call.variables.items()}
        if optimizer_state is None and isinstance(call, PipelineCall) and call.trains:
            with interrupts.deferred():
                optimizer_state = call.pipeline.init_optimizer_state(variables)
        state = PipelineState(
            variables=variables,
            optimizer_state=optimizer_state,
            update_count=self.update_count(call),
            execution_count=counts.execution_count,
            key=self.key,
        )
        if not (isinstance(call, LoopCall) and call.trains and counts.num_accumulated):
            return state
        if counts.accumulation != call.settings:
            raise ValueError(
                f"The session has the gradients of {counts.num_accumulated} iterations of {call.name!r}, "
                f"accumulated by {counts.accumulation}. This program accumulates by {call.settings}, and "
                "cannot go on from there. Run the other one until its weight update is complete, or give "
                "this optimizer another `name`."
            )
        accumulators = self.state.accumulators[call.name]
        return dataclasses.replace(state, accumulators=accumulators, num_accumulated=counts.num_accumulated)

    def update_count(self, call: Call) -> int:
        """The number of weight updates of the variables of a pipeline."""
        return self.counts(call.name).update_count if call.trains else self.step_of_weights(call.name)

    def optimizer(self, name: str) -> dict[str, Any]:
        """Returns the leaves of the optimizer's state under a name, by path."""
        leaves = self.state.optimizers.get(name)
        if leaves is None:
            raise KeyError(
                f"There is no optimizer state under the name {name!r}; the names are: "
                f"{', '.join(self.state.optimizers) or 'none'}."
            )
        return leaves

    @contextlib.contextmanager
    def lending(self, entry: str, values: Mapping[str, Any]) -> Iterator[None]:
        """Puts values in the places of variables, for a `with` block."""
        own_values = {name: self.state.variables[name] for name in values}
        try:
            with interrupts.deferred():
                self._lent = entry
                self._set_variables(values)
            yield
        finally:
            with interrupts.deferred():
                self._set_variables(own_values)
                self._lent = None

    def _set_variables(self, values: Mapping[str, Any]) -> None:
        self._replace(variables={**self.state.variables, **values})

    def _replace(self, **changes: Any) -> None:
        with self.lock:  # the seed may be set while another thread runs programs
            self.state, self._left = dataclasses.replace(self.state, **changes), None

    def has_row_gradients(self) -> bool:
        """Whether a loop is within a weight update of a table in host memory, which checkpoints lack."""
        return any(self.row_gradients.values())

    def check_weights(self, caller: str) -> None:
        """Raises a RuntimeError if the weights are not the session's own."""
        if self._lent is not None:
            raise RuntimeError(
                f"{caller}: the weights are {self._lent!r} of an optimizer's state, inside "
                "`with session.weights_of(...)`. Leave that block first."
            )

    def keep(self, call: Call, state: PipelineState) -> None:
        """Keeps the state that a pipeline, or iterations of a loop, left."""
        is_loop = isinstance(call, LoopCall)
        # A loop counts its runs with their first iterations, so an aborted one counts, too.
        counts = dataclasses.replace(
            self.counts(call.name), execution_count=int(state.execution_count) + int(is_loop)
        )
        changes: dict[str, Any] = {"variables": {**self.state.variables, **state.variables}}
        if call.trains:
            leaves = jax.tree.leaves(state.optimizer_state)
            optimizer = dict(zip(call.optimizer_shapes, leaves, strict=True))
            changes["optimizers"] = {**self.state.optimizers, call.name: optimizer}
            counts = dataclasses.replace(counts, update_count=int(state.update_count))
        if isinstance(call, LoopCall) and call.trains:
            changes["accumulators"] = {**self.state.accumulators, call.name: state.accumulators}
            counts = dataclasses.replace(
                counts, num_accumulated=state.num_accumulated, accumulation=call.settings
            )
        with self.lock:
            self._replace(**changes, counts={**self.state.counts, call.name: counts})
            if isinstance(call, PipelineCall) and state.key is self._key:  # else a seed was set meanwhile
                self._left = call, state, self.state

    def initialize(self, specs: Iterable[VariableSpec]) -> None:
        """Starts over with the initial values of variables."""
        first_specs: dict[str, VariableSpec] = {}
        unclear = set()
        for spec in specs:
            first = first_specs.setdefault(spec.name, spec)
            if (first.shape, first.dtype) != (spec.shape, spec.dtype):
                unclear.add(spec.name)
        values = initial_values(
            [spec for name, spec in first_specs.items() if name not in unclear], self.key
        )
        with interrupts.deferred():
            self._is_own = True
            self.metrics = MetricLog()
            self.row_gradients.clear()
            self.is_initialized = True
            self._replace(variables=values, optimizers={}, accumulators={}, counts={})

"""Resumption of a session from a checkpoint: missing variables, positions in data sets, whether it fits."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ipu_pipeline.checkpointing.states import (
    FeedPosition,
    State,
    describe_array,
    find_differences,
    find_different_leaves,
)
from ipu_pipeline.engine import VariableSpec
from ipu_pipeline.ground.errors import CheckpointError
from ipu_pipeline.queues.infeed import IPUInfeedQueue
from ipu_pipeline.tf1.program.calls import Call
from ipu_pipeline.tf1.program.program import Program, compiled_programs
from ipu_pipeline.tf1.session.store import Store


def make_missing(store: Store, select_devices: Callable[[], None]) -> None:
    """Makes the variables that no run has made yet, for a session that is about to be saved.

    After `global_variables_initializer()` these are the variables of all programs in use; after
    `Session.load`, the variables of programs that share one with the session.
    """
    store.check_weights("save")
    if store.is_initialized or (store.state.variables and not store.state.counts):
        variables, takes_all = store.state.variables, store.is_initialized
        missing = find_missing(variables, compiled_programs(), takes_all=takes_all)
        if missing:
            gc.collect()  # programs that are no longer used may be among them
            missing = find_missing(variables, compiled_programs(), takes_all=takes_all)
        if missing:
            select_devices()
        for spec in missing:
            store.variable(spec)
    if not store.state.variables:
        how = (
            "global_variables_initializer() was run, but no program that is still referred to has "
            "variables. Keep what ipu_compiler.compile returns."
            if store.is_initialized
            else "They come into being when a compiled program runs in this session, or when "
            "global_variables_initializer() does."
        )
        raise ValueError(f"There is nothing to save: the session has no variables. {how}")


def find_missing(
    variables: Mapping[str, Any], programs: Sequence[Program], *, takes_all: bool
) -> list[VariableSpec]:
    """Finds the variables to make before a session is saved.

    If programs have variables of one name in different shapes, the program compiled last has replaced the
    others.
    """
    new_specs: dict[str, VariableSpec] = {}
    for program in reversed(programs):
        specs = program.variables
        if not takes_all and specs.keys().isdisjoint(variables):
            continue
        if all(_fits(spec, new_specs.get(name, variables.get(name))) for name, spec in specs.items()):
            new_specs.update(specs)
    return [
        spec
        for name, spec in new_specs.items()
        if name not in variables or variables[name].dtype != spec.dtype
    ]


def _fits(spec: VariableSpec, value: Any) -> bool:
    """Whether a value, or another specification, fits a variable."""
    if value is None:
        return True
    is_loaded = isinstance(value, np.ndarray)  # it is cast when it is first used
    return bool(spec.shape == value.shape and (is_loaded or spec.dtype == value.dtype))


class Resumption:
    """The positions of the data sets of pipelines and loops that train.

    Data sets for inference have no positions here: they are started over for each evaluation.
    """

    def __init__(self) -> None:
        """Starts without positions, for a session that was not restored."""
        self._fed: weakref.WeakKeyDictionary[IPUInfeedQueue, list[str]] = weakref.WeakKeyDictionary()
        self._pending: list[FeedPosition] = []  # the positions of feeds that have not run since
        self._source = ""
        self._names: Mapping[str, str] | None = None  # the checkpoint's, if programs must fit it
        self._checked: weakref.WeakSet[Program] = weakref.WeakSet()

    @classmethod
    def of(cls, snapshot: State, path: str | os.PathLike[str], *, fits: bool, feeds: bool) -> Resumption:
        """Makes the resumption of a session that takes a snapshot."""
        resumption = cls()
        resumption._pending = list(snapshot.feeds) if feeds else []
        resumption._source = os.fspath(path)
        if fits:
            resumption._names = _describe_variables(snapshot)
        return resumption

    def check(self, programs: Iterable[Program]) -> None:
        """Raises if programs that are about to run have variables that differ from the checkpoint's."""
        if self._names is None:
            return
        for program in programs:
            if program in self._checked:
                continue
            expected = {name: describe_array(spec) for name, spec in program.variables.items()}
            saved = {name: text for name, text in self._names.items() if name in expected}
            _refuse(self._source, find_differences(saved, expected))
            self._checked.add(program)

    def before_run(self, call: Call) -> None:
        """Restores the position of the data set of a pipeline or loop."""
        queue = call.infeed_queue
        if queue is None or not call.trains:
            return
        for fed_queue, names in self._fed.items():
            if fed_queue is not queue and call.name in names:
                names.remove(call.name)
        names = self._fed.setdefault(queue, [])
        if call.name not in names:
            names.append(call.name)
        for feed in self._pending:
            if call.name in feed.pipelines:
                if not feed.position.has_ended:  # else the infeed's initializer was to begin it again
                    queue.seek(feed.position)
                self._pending.remove(feed)
                break

    def hold(self) -> None:
        """Notes the positions of the data sets, before their infeeds are ended."""
        self._pending = list(self.feeds)
        self._fed.clear()

    @property
    def feeds(self) -> tuple[FeedPosition, ...]:
        """The positions of the data sets, for a snapshot."""
        running = [
            FeedPosition(tuple(names), position)
            for queue, names in self._fed.items()
            if names and (position := queue.position) is not None
        ]
        return (*running, *self._pending)


def check_snapshot(
    snapshot: State, path: str | os.PathLike[str], programs: Callable[[], Sequence[Program]]
) -> None:
    """Raises if a checkpoint is not of the programs' model.

    A program that shares no variable with the checkpoint is taken for another session's model. A program
    with a variable that differs from a later program's is taken for one that the later one has replaced.
    """
    saved = _describe_variables(snapshot)
    if _compare(saved, programs()):
        gc.collect()  # programs that are no longer used may be among them
        _refuse(path, _compare(saved, programs()))


def check_program(
    snapshot: State, path: str | os.PathLike[str], program: Program, allow_extra: bool
) -> None:
    """Raises if a checkpoint is not of a program's model."""
    saved = _describe_variables(snapshot)
    expected = {name: describe_array(spec) for name, spec in program.variables.items()}
    if allow_extra:
        saved = {name: text for name, text in saved.items() if name in expected}
    _refuse(path, find_differences(saved, expected), "")


def check_optimizers(snapshot: State, path: str | os.PathLike[str], program: Program) -> None:
    """Raises if a program's optimizers cannot go on from a checkpoint's."""
    for call in program.calls:
        leaves = snapshot.optimizers.get(call.name)
        if not call.trains or leaves is None:
            continue
        if different := find_different_leaves(leaves, call.optimizer_shapes):
            raise CheckpointError(
                f"The checkpoint {os.fspath(path)} was trained with another optimizer: its state differs "
                f"in {', '.join(different)}. Train with the same one; or in another model_dir, where "
                "warm_start_from begins with the checkpoint's variables."
            )


def _compare(saved: Mapping[str, str], programs: Sequence[Program]) -> list[str]:
    expected: dict[str, str] = {}
    for program in reversed(programs):
        texts = {name: describe_array(spec) for name, spec in program.variables.items()}
        is_outdated = any(expected.get(name, text) != text for name, text in texts.items())
        if texts.keys() & saved.keys() and not is_outdated:
            expected.update(texts)
    return find_differences(saved, expected) if expected else []


def _describe_variables(snapshot: State) -> dict[str, str]:
    return {name: describe_array(value) for name, value in snapshot.variables.items()}


_ALLOW_PARTIAL = (
    " Restore with allow_partial=True to take those that it has, and initial values for the others."
)


def _refuse(path: str | os.PathLike[str], differences: list[str], advice: str = _ALLOW_PARTIAL) -> None:
    if differences:
        raise CheckpointError(
            f"The checkpoint {os.fspath(path)} is not of this model. Variables "
            f"{' '.join(differences)}{advice}"
        )

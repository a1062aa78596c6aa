"""Makes the variables of compiled programs that a session lacks, before it is saved."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ipu_pipeline.engine import VariableSpec
from ipu_pipeline.tf1.program.program import Program
from ipu_pipeline.tf1.program.registry import compiled_programs
from ipu_pipeline.tf1.session.store import Store

__all__ = ["find_missing", "make_missing"]


def make_missing(store: Store, select_devices: Callable[[], None]) -> None:
    """Makes the variables that no run has made yet, for a session that is about to be saved.

    After `global_variables_initializer()` these are the variables of all programs in use; after
    `Session.load`, the variables of programs that share one with the session.
    """
    store.check_weights("save")
    if store.is_initialized or (store.state.variables and not store.state.pipelines):
        known, takes_all = store.state.variables, store.is_initialized
        missing = find_missing(known, compiled_programs(), takes_all=takes_all)
        if missing:
            gc.collect()  # programs that are no longer used may be among them
            missing = find_missing(known, compiled_programs(), takes_all=takes_all)
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
    known: Mapping[str, Any], programs: Sequence[Program], *, takes_all: bool
) -> list[VariableSpec]:
    """Finds the variables to make before a session is saved.

    If programs have variables of one name in different shapes, the program compiled last has replaced the
    others.
    """
    found: dict[str, VariableSpec] = {}
    for program in reversed(programs):
        own = program.variables
        if not takes_all and own.keys().isdisjoint(known):
            continue
        if all(_fits(spec, found.get(name, known.get(name))) for name, spec in own.items()):
            found.update(own)
    return [spec for name, spec in found.items() if name not in known or known[name].dtype != spec.dtype]


def _fits(spec: VariableSpec, value: Any) -> bool:
    """Whether a value, or another specification, fits a variable."""
    if value is None:
        return True
    is_loaded = isinstance(value, np.ndarray)  # it is cast when it is first used
    return bool(spec.shape == value.shape and (is_loaded or spec.dtype == value.dtype))

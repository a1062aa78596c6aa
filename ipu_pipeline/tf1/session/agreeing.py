"""Compares values between the processes of a run before a session runs, so that all have the same.

All of them run the same programs, with the same feeds, on variables that were set in the same way. Values
that each process makes for itself (initial, loaded or restored values) are compared once, by digests;
values from runs are on devices, and the same for all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.checkpointing.session_state import SessionState
from ipu_pipeline.engine import processes
from ipu_pipeline.engine.processes import group_sharding
from ipu_pipeline.tf1.graph.placeholders import Placeholder
from ipu_pipeline.tf1.program.program import Program

__all__ = ["agree_on_run", "agree_on_values"]

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
    others = processes.current()
    if others is None:
        return [beside]
    told = {
        "the programs": "; ".join(
            ", ".join(call.name for call in program.calls) or "no pipeline or loop" for program in programs
        )
    }
    told |= {f"calls of {way}": str(number) for way, number in changes.items()}
    for program in programs:
        for placeholder in program.placeholders:
            told[f"the value fed to {placeholder!r}"] = _describe_fed(placeholder, feeds)
    return _agree(others, "a run of a session", told, fault, beside)


def _agree(
    others: processes.Peers,
    what: str,
    told: Mapping[str, str],
    fault: Exception | None,
    beside: str = "",
) -> list[str]:
    """Also compares this process's fault, and raises it if it is the same for all."""
    described = "nothing" if fault is None else f"{type(fault).__name__}: {fault}"
    try:
        besides = others.agree(what, {"what keeps it from running": described, **told}, beside=beside)
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


def agree_on_values(state: SessionState, fault: Exception | None = None) -> None:
    """Compares the values that each process has made by itself, if there are others; all call it."""
    others = processes.current()
    if others is None:
        return
    own = dict(_own_arrays(state))
    told = {name: _digest(array) for name, array in own.items()}
    told |= {
        f"the number of weight updates of {name!r}": str(record.update_count)
        for name, record in state.pipelines.items()
    }
    together = hashlib.blake2b(
        repr((sorted(told.items()), repr(fault))).encode(), digest_size=16
    ).hexdigest()
    if len(set(others.exchange("values of a session", together))) > 1 or fault is not None:
        described = {name: _describe(array) for name, array in own.items()}
        _agree(others, "values of a session", {**told, **described}, fault)


def _own_arrays(state: SessionState) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """The arrays that this process made or read by itself, with their names in errors."""
    for name, value in state.variables.items():
        if group_sharding(value) is None:
            yield f"variable {name}", _as_numpy(value)
    for name, record in state.pipelines.items():
        if record.optimizer is not None:
            leaves = jax.tree.leaves(record.optimizer.tree)
            for path, leaf in zip(record.optimizer.shapes, leaves, strict=True):
                if group_sharding(leaf) is None:
                    yield f"{path} of the optimizer's state of {name!r}", _as_numpy(leaf)
        if record.accumulated is not None:
            for key, value in record.accumulated.accumulators.items():
                if group_sharding(value) is None:
                    yield f"gradients of {key} that {name!r} has accumulated", _as_numpy(value)


def _as_numpy(array: Any) -> np.ndarray[Any, Any]:
    is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(array) if is_key else array)


def _digest(array: np.ndarray[Any, Any]) -> str:
    content = np.ascontiguousarray(array).tobytes()
    return f"{array.dtype}{list(array.shape)} {hashlib.blake2b(content, digest_size=8).hexdigest()}"


def _describe(array: np.ndarray[Any, Any]) -> str:
    if array.size <= _MOST_SHOWN:
        return f"{array.tolist()} ({array.dtype})"
    first = ", ".join(map(str, array.flat[:_MOST_SHOWN]))
    return f"{_digest(array)}, beginning with {first}"

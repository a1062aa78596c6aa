"""Checks that several processes have the same programs of a pipeline or loop before they run them.

Functions cannot be compared, but their traces can: which operations, in which order, on which shapes.
A difference only in numbers that functions hold, such as a learning rate, is not found.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ipu_pipeline.engine import peers
from ipu_pipeline.engine.tracing.traced import TracedPipeline
from ipu_pipeline.engine.updates.cutting import Updates
from ipu_pipeline.ground import jax_core

__all__ = ["agree_on", "describe_programs", "digest", "identify_operations"]


def agree_on(
    what: str,
    traced: TracedPipeline,
    updates: Updates | None,
    told: Mapping[str, str],
    devices: Sequence[Any],
) -> None:
    """Compares stages with the other processes' stages, if there are any; all processes call it."""
    others = peers.current()
    if others is not None:
        where = ", ".join(f"{device.platform} {device.id}" for device in devices)
        others.agree(what, {**told, **describe_programs(traced, updates), "the devices": where})


def describe_programs(traced: TracedPipeline, updates: Updates | None) -> dict[str, str]:
    """Descriptions of stages and an optimizer, by subject."""
    found = {}
    for stage in traced.stages:
        found[f"the variables of {stage.place}"] = ", ".join(map(repr, stage.variables)) or "none"
        lines = list(_describe_operations(stage.flat.equations))
        found[f"the program of {stage.place}"] = f"{len(lines)} operations ({digest(lines)})"
    if updates is not None:
        leaves = [f"{leaf.path}: {leaf.aval.dtype}{list(leaf.aval.shape)}" for leaf in updates.state_leaves]
        found["the optimizer's state"] = ", ".join(leaves) or "none"
        found["the programs of the weight update"] = ", ".join(program.name for program in updates.updates)
    return found


def identify_operations(equations: Iterable[Any]) -> str:
    """A short text that differs where operations do, or what they are told: how often a loop runs, say."""
    return digest(list(_describe_operations(equations, with_numbers=True)))


def _describe_operations(equations: Iterable[Any], *, with_numbers: bool = False) -> Iterator[str]:
    for equation in equations:
        operands = [str(v.val) if isinstance(v, jax_core.Literal) else v.aval for v in equation.invars]
        results = [variable.aval for variable in equation.outvars]
        told = {key: found for key, found in equation.params.items() if with_numbers and _is_plain(found)}
        yield f"{equation.primitive} {[*map(_of_aval, operands)]} {[*map(_of_aval, results)]} {told or ''}"
        for body in jax_core.jaxprs_in_params(equation.params):
            yield from _describe_operations(body.eqns, with_numbers=with_numbers)


def _is_plain(value: Any) -> bool:
    """Whether a parameter is made of words and numbers, which are the same text in every process."""
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str, np.generic))


def _of_aval(value: Any) -> str:
    return (
        value if isinstance(value, str) else f"{getattr(value, 'dtype', '')}{getattr(value, 'shape', '')}"
    )


def digest(lines: Sequence[str]) -> str:
    """A short text that differs where the lines differ."""
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()

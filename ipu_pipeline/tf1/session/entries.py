"""Entries of an optimizer's state, by name: to be read, or used as weights."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.checkpointing.session_state import KeptOptimizer
from ipu_pipeline.engine.processes import read_gathered

__all__ = ["find_weights", "read_state"]


def read_state(optimizer: KeptOptimizer) -> dict[str, np.ndarray[Any, Any]]:
    """Returns copies of all leaves, by path."""
    leaves = read_gathered(jax.tree.leaves(optimizer.tree))
    return {path: _as_numbers(leaf) for path, leaf in zip(optimizer.shapes, leaves, strict=True)}


def _as_numbers(leaf: Any) -> np.ndarray[Any, Any]:
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.array(jax.random.key_data(leaf) if is_key else leaf)


def find_weights(
    optimizer: KeptOptimizer, entry: str, variables: Mapping[str, Any], trained: Collection[str] | None
) -> dict[str, Any]:
    """Returns the arrays of an entry that has one for each trained variable, in the variables' dtypes."""
    leaves = dict(zip(optimizer.shapes, jax.tree.leaves(optimizer.tree), strict=True))
    entries: dict[str, dict[str, Any]] = {}
    for path, leaf in leaves.items():
        for name, variable in variables.items():
            ending = jax.tree_util.keystr((jax.tree_util.DictKey(name),))
            if path.endswith(ending) and leaf.shape == variable.shape:
                entries.setdefault(path.removesuffix(ending), {})[name] = leaf
    if trained is None:
        trained = {name for found in entries.values() for name in found}
    whole = {path: found for path, found in entries.items() if found.keys() == set(trained)}
    matching = [path for path in whole if entry in (path, _last_name(path))]
    if len(matching) != 1:
        known = ", ".join(map(repr, sorted(whole))) or "none"
        what = "is not one of" if not matching else "is the last name of several of"
        raise ValueError(
            f"weights_of: {entry!r} {what} the entries of the optimizer's state with an array for each "
            f"trained variable. These are, by path: {known}."
        )
    return {name: leaf.astype(variables[name].dtype) for name, leaf in whole[matching[0]].items()}


def _last_name(path: str) -> str:
    """`ema` of `[1].ema`, and `mu` of `['inner'][0].mu`."""
    found = re.search(r"""(?:\.(\w+)|\['([^']*)'\])$""", path)
    return "" if found is None else found[1] or found[2]

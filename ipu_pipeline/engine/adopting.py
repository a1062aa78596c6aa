"""Makes a state from another pipeline's: common variables are kept, others start from initial values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from ipu_pipeline.engine.tracing.specs import VariableSpec
from ipu_pipeline.engine.updates.cutting import Updates
from ipu_pipeline.engine.updates.loss_weights import without_weights
from ipu_pipeline.ground.shapes import describe
from ipu_pipeline.ground.tables import shorten

__all__ = ["Adoption", "adopt_optimizer_state", "compare"]

_MAX_NAMES = 300  # characters


@dataclass(frozen=True)
class Adoption:
    """The result of comparing two states in `Pipeline.adopt`; `print` shows it.

    Example:
      >>> old = engine.Pipeline([layers.Dense(4)], num_micro_batches=1)
      >>> state = old.init(jax.random.key(0), np.ones([2, 8], np.float32))
      >>> new = engine.Pipeline([layers.Dense(4), layers.Dense(2, name="head")], num_micro_batches=1)
      >>> new.trace(np.ones([2, 8], np.float32))
      >>> state, adoption = new.adopt(state)
      >>> adoption.taken, adoption.new
      (('dense/kernel', 'dense/bias'), ('head/kernel', 'head/bias'))

    Attributes:
      taken: full names of the variables that were kept, in the pipeline's order.
      new: full names of the variables that the state lacked, which have their initial values.
      left: full names of the state's variables that the pipeline does not have.
      takes_optimizer_state: whether the optimizer's state was kept; False: it is a new one. None without an
        optimizer.
    """

    taken: tuple[str, ...]
    new: tuple[str, ...]
    left: tuple[str, ...]
    takes_optimizer_state: bool | None = None

    def __str__(self) -> str:
        """Formats the names."""
        lists = {"taken": self.taken, "new": self.new, "left in the state": self.left}
        lines = [
            f"{what}: {len(names)} variable{'s' * (len(names) != 1)}"
            + (f", {shorten(', '.join(names), _MAX_NAMES)}" if names else "")
            for what, names in lists.items()
        ]
        told = {True: "taken", False: "new", None: "none"}
        return "\n".join([*lines, f"optimizer state: {told[self.takes_optimizer_state]}"])


def compare(known: Mapping[str, Any], wanted: Mapping[str, VariableSpec]) -> Adoption:
    """Compares a state's variables with a pipeline's by name; the pipeline takes those that both have."""
    known = without_weights(known)
    taken = [name for name in wanted if name in known]
    other = [
        f"{name} is {describe(known[name])} there, {describe(wanted[name])} here"
        for name in taken
        if (tuple(known[name].shape), known[name].dtype) != (wanted[name].shape, wanted[name].dtype)
    ]
    if other:
        raise ValueError(
            "Pipeline.adopt: variables of the same names must have the same shapes and dtypes: "
            f"{shorten('; '.join(other), _MAX_NAMES)}. To begin such a variable anew, give it another "
            "name, or leave it out of the state (dataclasses.replace(state, variables=...))."
        )
    if not taken:
        listed = [shorten(", ".join(names), _MAX_NAMES) for names in (known, wanted)]
        raise ValueError(
            f"Pipeline.adopt: the state has none of the pipeline's variables. It has {listed[0]}; the "
            f"pipeline has {listed[1]}. engine.resplit(state, pipeline) moves a state of another split."
        )
    new, left = (name for name in wanted if name not in known), (n for n in known if n not in wanted)
    return Adoption(tuple(taken), tuple(new), tuple(left))


def adopt_optimizer_state(
    known: Any, updates: Updates, new: Collection[str], make: Callable[[], Any]
) -> tuple[Any, bool]:
    """Takes another optimizer state if it fits: all that belongs to no variable, or to one that was taken.

    Returns:
      The state, and whether it was taken.
    """
    made = make()
    if known is None or made is None:
        return made, False
    with_paths = jax.tree_util.tree_leaves_with_path(known)
    leaves = {jax.tree_util.keystr(path): leaf for path, leaf in with_paths}
    found = list(jax.tree.leaves(made))
    has_variables = takes_variables = False
    for number, leaf in enumerate(updates.state_leaves):
        has_variables |= leaf.variable is not None
        if leaf.variable in new:
            continue
        own = leaves.get(leaf.path)
        if own is None or (tuple(own.shape), own.dtype) != (leaf.aval.shape, leaf.aval.dtype):
            return made, False
        found[number] = own
        takes_variables |= leaf.variable is not None
    if has_variables and not takes_variables:  # counts of updates of other variables
        return made, False
    return updates.state_tree.unflatten(found), True

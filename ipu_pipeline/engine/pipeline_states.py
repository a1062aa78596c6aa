"""States of a pipeline: made of initial values or of another pipeline's state, and kept between steps."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from ipu_pipeline.engine.devices.state_placement import StatePlacement
from ipu_pipeline.engine.execution.contract import Runner
from ipu_pipeline.engine.progress import initializing
from ipu_pipeline.engine.state import PipelineState, leaves_by_path
from ipu_pipeline.engine.tracing.specs import VariableSpec, initial_value
from ipu_pipeline.engine.updates.optimizer_wrappers import is_loss_weight, without_weights
from ipu_pipeline.engine.updates.update_programs import Updates
from ipu_pipeline.ground.pytrees import describe
from ipu_pipeline.ground.tables import shorten

# Initial states.


def make_state(runner: Runner[Any], key: Any) -> PipelineState:
    """Makes a state, on the devices of its stages."""
    placement = runner.placement
    variables = make_variables(placement, placement.traced.variables, key)
    return PipelineState(
        variables=variables,
        optimizer_state=make_optimizer_state(runner, variables),
        update_count=0,
        execution_count=0,
        key=key,
    )


def initial_values(specs: Sequence[VariableSpec], key: Any) -> dict[str, Any]:
    """Makes the initial values of variables, by full name."""
    with initializing(len(specs)) as progress:
        values = {}
        for spec in specs:
            values[spec.name] = initial_value(spec, key)
            progress.num_done += 1
    return values


def make_variables(placement: StatePlacement, names: Iterable[str], key: Any) -> dict[str, Any]:
    """Makes the initial values of variables, placed."""
    variables: dict[str, Any] = {}
    names = list(names)
    with initializing(len(names)) as progress:
        for name in names:  # one at a time: all of them may not fit one device
            spec = placement.traced.variables[name]
            value = initial_value(spec, key) if placement.has_variable(name) else spec
            variables |= placement.place_variables({name: value})
            progress.num_done += 1
    return variables


def make_optimizer_state(
    runner: Runner[Any], variables: Mapping[str, Any], outputs: Sequence[Any] | None = None
) -> Any:
    """Makes the optimizer's state; None without training, or if it needs outputs that are not given."""
    updates = runner.placement.updates
    if updates is None or (updates.init_needs_outputs and outputs is None):
        return None
    placed = runner.placement.place_variables(variables)
    return runner.init_optimizer_state(placed, [dict(enumerate(outputs or ()))] * len(runner.homes))


# States of other pipelines, by full names alone: an order means nothing where variables are missing, as a
# layer put in between would shift all that follow. (`resplitting`, which uses the order, needs all.)

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
            f"{title}: {len(names)} variable{'s' * (len(names) != 1)}"
            + (f", {shorten(', '.join(names), _MAX_NAMES)}" if names else "")
            for title, names in lists.items()
        ]
        descriptions = {True: "taken", False: "new", None: "none"}
        return "\n".join([*lines, f"optimizer state: {descriptions[self.takes_optimizer_state]}"])


def compare(variables: Mapping[str, Any], specs: Mapping[str, VariableSpec]) -> Adoption:
    """Compares a state's variables with a pipeline's by name; the pipeline takes those that both have."""
    variables = without_weights(variables)
    taken = [name for name in specs if name in variables]
    faults = [
        f"{name} is {describe(variables[name])} there, {describe(specs[name])} here"
        for name in taken
        if (tuple(variables[name].shape), variables[name].dtype) != (specs[name].shape, specs[name].dtype)
    ]
    if faults:
        raise ValueError(
            "Pipeline.adopt: variables of the same names must have the same shapes and dtypes: "
            f"{shorten('; '.join(faults), _MAX_NAMES)}. To begin such a variable anew, give it another "
            "name, or leave it out of the state (dataclasses.replace(state, variables=...))."
        )
    if not taken:
        listed = [shorten(", ".join(names), _MAX_NAMES) for names in (variables, specs)]
        raise ValueError(
            f"Pipeline.adopt: the state has none of the pipeline's variables. It has {listed[0]}; the "
            f"pipeline has {listed[1]}. engine.resplit(state, pipeline) moves a state of another split."
        )
    new = tuple(name for name in specs if name not in variables)
    return Adoption(tuple(taken), new, tuple(name for name in variables if name not in specs))


def adopt_optimizer_state(
    old_state: Any, updates: Updates, new: Collection[str], make: Callable[[], Any]
) -> tuple[Any, bool]:
    """Takes another optimizer state if it fits: all that belongs to no variable, or to one that was taken.

    Returns:
      The state, and whether it was taken.
    """
    new_state, leaves = make(), leaves_by_path(old_state)
    if leaves is None or new_state is None:
        return new_state, False
    new_leaves = list(jax.tree.leaves(new_state))
    has_variables = takes_variables = False
    for number, leaf in enumerate(updates.state_leaves):
        has_variables |= leaf.variable is not None
        if leaf.variable in new:
            continue
        value = leaves.get(leaf.path)
        if value is None or (tuple(value.shape), value.dtype) != (leaf.aval.shape, leaf.aval.dtype):
            return new_state, False
        new_leaves[number] = value
        takes_variables |= leaf.variable is not None
    if has_variables and not takes_variables:  # counts of updates of other variables
        return new_state, False
    return updates.state_tree.unflatten(new_leaves), True


# Between two steps.


class BetweenSteps:
    """The accumulators that the last update left, zeros, and the last state that is known to be placed."""

    def __init__(self) -> None:
        self.accumulators: dict[str, Any] | None = None
        # The state, and its variables that count weights, which users do not see. One value, as another
        # thread may step the pipeline between two reads.
        self._placed: tuple[Callable[[], PipelineState | None], Mapping[str, Any]] = (lambda: None), {}

    def take_accumulators(self, runner: Runner[Any], dtypes: Mapping[str, Any]) -> dict[str, Any]:
        """Takes the accumulators. If there are none, the runner makes them."""
        accumulators, self.accumulators = self.accumulators, None
        return runner.make_accumulators(dtypes) if accumulators is None else accumulators

    def keep(self, state: PipelineState) -> PipelineState:
        """Keeps the accumulators after an update. Returns the state without them, known to be placed."""
        self.accumulators = state.accumulators
        state = dataclasses.replace(state, accumulators={})
        self._placed = weakref.ref(state), {}
        return state

    def hide_weights(self, state: PipelineState) -> PipelineState:
        """The placed state without the variables that count weights, which are kept here."""
        hidden = {name: value for name, value in state.variables.items() if is_loss_weight(name)}
        if not hidden:
            return state
        visible = dataclasses.replace(state, variables=without_weights(state.variables))
        self._placed = weakref.ref(visible), hidden
        return visible

    def is_placed(self, state: Any) -> bool:
        """Whether a state is the last one that is known to be placed."""
        return state is self._placed[0]()

    def find_placed(self, state: PipelineState) -> PipelineState | None:
        """The last state with the variables that count weights; None if the given one is another."""
        placed, hidden = self._placed
        if state is not placed():
            return None
        return dataclasses.replace(state, variables={**state.variables, **hidden}) if hidden else state

"""The weight update, program by program, each on the device of its variables.

With post-validation devices need not wait for what joins them: see `updates.guessing`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.engine.devices.compiler_options import Options
from ipu_pipeline.engine.devices.device_groups import divided_in_replica
from ipu_pipeline.engine.devices.placing import put
from ipu_pipeline.engine.devices.state_placement import StatePlacement
from ipu_pipeline.engine.execution.templates import jit_update
from ipu_pipeline.engine.updates.accumulators import Accumulator
from ipu_pipeline.engine.updates.cutting import UpdateProgram
from ipu_pipeline.engine.updates.environment import UpdateCounts, UpdateEnvironment
from ipu_pipeline.engine.updates.guessing import Guess
from ipu_pipeline.engine.updates.optimizer_tracing import UpdateKind

__all__ = ["GuessedUpdate", "Updated", "WeightUpdate", "find_read", "zeros_like"]


@dataclass(frozen=True, eq=False)
class Updated:
    """The results of a weight update."""

    variables: dict[str, Any]  # the new values of the variables that it updates, by full name
    state_leaves: list[Any]  # of the optimizer's state
    accumulators: dict[str, Any]  # zeroed, by key
    enqueued: list[Any]  # the leaves of what it enqueues
    # what may be guessed of an update, as it was: scalars, still being computed
    choices: list[Any] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class GuessedUpdate:
    """A weight update that was done with a guess."""

    made: Updated  # its results
    guess: Guess
    choices: list[Any]  # what was guessed, as it was: scalars, still being computed
    is_right: Any  # whether the results are those without a guess: a boolean, still being computed
    again: Callable[[], Updated]  # does the update again, without a guess


class WeightUpdate:
    """Runs the weight updates of one traced pipeline on given devices.

    Attributes:
      placement: where the pipeline's state lives.
      donates: whether an update reuses the memory of the variables and optimizer state before it.
      guessing: what may be guessed; None: nothing, or there is no post-validation.
      jitted: its programs, jitted; none without training.
      functions: the functions to call: these, or what was loaded in their place.
      read: positions of the last stage's outputs that are read to make the optimizer's state at the start,
        and by the update.
    """

    def __init__(
        self,
        placement: StatePlacement,
        donate: bool,
        options: Options,
        may_raise: bool = False,
        guesses: bool = False,
    ) -> None:
        """Jits the programs. What a guessed update replaces must outlive it, so that nothing is donated."""
        self.placement = placement
        self.may_raise = may_raise
        self.donates = donate and not may_raise and not guesses
        self.guessing = None if placement.updates is None or not guesses else placement.updates.guessing
        self.read: tuple[set[Any], set[Any]] = (set(), set())
        self.jitted: tuple[Any, ...] = ()
        programs: Sequence[UpdateProgram] = ()
        if placement.updates is not None:
            programs = placement.updates.updates
            self.read = (find_read(placement.updates.inits), find_read(programs))
            self.jitted = tuple(
                jit_update(
                    program,
                    programs[number + 1 :],
                    donate,
                    may_raise or self.guessing is not None,
                    options,
                    placement.results_of(program),
                )
                for number, program in enumerate(programs)
            )
        self.functions: list[Callable[..., list[Any]]] = [
            placement.groups[program.stage].program(
                jitted, placement.results_of(program).get("out_shardings")
            )
            for program, jitted in zip(programs, self.jitted, strict=True)
        ]

    def run(
        self,
        variables: Mapping[str, Any],
        state_leaves: Sequence[Any],
        accumulators: Mapping[str, Any],
        outputs: Sequence[Any],
        counts: UpdateCounts,
        functions: Sequence[Callable[..., list[Any]]] | None = None,
    ) -> Updated:
        """Runs the weight update."""
        placement = self.placement
        assert placement.updates is not None
        plan = placement.accumulator_plan
        if placement.has_peers:
            placement.begin_step()
        merged = plan.merge(accumulators, self._add_to_home)
        zeros = {key: self._clear(key, accumulators[key]) for key in plan.extra}
        environment = UpdateEnvironment(variables, merged, state_leaves, outputs, counts)
        placement.run_update(placement.updates.updates, functions or self.functions, environment)
        made = Updated(
            environment.variables,
            environment.state_leaves,
            {**environment.accumulators, **zeros},
            [environment.enqueued[number] for number in range(len(environment.enqueued))],
            self._find_choices(environment),
        )
        if self.may_raise:
            jax.block_until_ready(
                (made.variables, made.state_leaves, made.accumulators, made.enqueued, environment.sent)
            )
        return made

    def run_guessed(
        self,
        variables: Mapping[str, Any],
        state_leaves: Sequence[Any],
        accumulators: Mapping[str, Any],
        outputs: Sequence[Any],
        counts: UpdateCounts,
        guess: Guess,
        functions: Sequence[Callable[..., list[Any]]] | None = None,
    ) -> GuessedUpdate:
        """Runs the weight update with a guess that settles it; other arguments as for `run`.

        Each device updates by the programs that it has anyway, with the guess and ones in place of what is
        late. What joins the devices is started behind them, and is compared with the guess.
        """
        placement, guessing, plan = self.placement, self.guessing, self.placement.accumulator_plan
        assert placement.updates is not None
        assert guessing is not None
        programs, functions = placement.updates.updates, functions or self.functions
        merged = plan.merge(accumulators, self._add_to_home)
        extra = {key: accumulators[key] for key in plan.extra}

        def begin() -> UpdateEnvironment:
            return UpdateEnvironment(variables, merged, state_leaves, outputs, counts)

        def end(environment: UpdateEnvironment, leaves: Sequence[Any]) -> Updated:
            zeros = {key: zeros_like(value) for key, value in extra.items()}
            return Updated(
                dict(environment.variables),
                list(leaves),
                {**environment.accumulators, **zeros},
                [environment.enqueued[number] for number in range(len(environment.enqueued))],
            )

        def run_some(environment: UpdateEnvironment, is_joint: bool) -> None:
            numbers = [n for n in range(len(programs)) if (n in guessing.joint) == is_joint]
            placement.run_update(
                [programs[n] for n in numbers], [functions[n] for n in numbers], environment
            )

        environment = begin()
        guessed = [np.asarray(value, dtype) for value, dtype in zip(guess, guessing.dtypes, strict=True)]
        environment.sent.update(zip(guessing.guessed, guessed, strict=True))
        for number, aval in guessing.others:
            environment.sent[number] = np.ones(aval.shape, aval.dtype)
        run_some(environment, is_joint=False)
        leaves = list(environment.state_leaves)
        last_group = placement.groups[-1]
        given = put([environment[value] for value in guessing.state_arguments], last_group)
        found = self._make_state(*given, *put(guessed, last_group)) if guessing.state else []
        for value, leaf in zip(guessing.state, found, strict=True):
            leaves[value.key] = leaf
        run_some(environment, is_joint=True)
        choices = self._find_choices(environment)
        late = [environment.state_leaves[value.key] for value in guessing.state]
        is_right = self._compare(
            put([*choices, *late], last_group), [*put(guessed, last_group), *put(found, last_group)]
        )

        def again() -> Updated:
            own = begin()
            placement.run_update(programs, functions, own)
            return end(own, own.state_leaves)

        return GuessedUpdate(end(environment, leaves), guess, choices, is_right, again)

    def _find_choices(self, environment: UpdateEnvironment) -> list[Any]:
        return [] if self.guessing is None else [environment.sent[n] for n in self.guessing.guessed]

    @functools.cached_property
    def _make_state(self) -> Callable[..., list[Any]]:
        assert self.guessing is not None
        function, group = self.guessing.make_state, self.placement.groups[-1]
        return jax.jit(lambda *values: function(*values), out_shardings=group.replicated)

    @functools.cached_property
    def _compare(self) -> Callable[[list[Any], list[Any]], Any]:
        return jax.jit(_are_same)

    def _add_to_home(self, accumulator: Accumulator, total: Any, part: Any) -> Any:
        home = self.placement.groups[self.placement.traced.owners[accumulator.variable]]
        tag = self.placement.tag(f"{accumulator.variable} of stage {accumulator.stage}")
        partition = divided_in_replica(self.placement.sharding_in_program(accumulator.variable, home))
        total, part = put([total, part], home, tag=tag, partitions=[partition] * 2)
        return home.program(_adding(total.sharding), total.sharding)(total, part)

    def _clear(self, key: str, accumulator: Any) -> Any:
        placement = self.placement
        group = placement.groups[placement.accumulator_plan.extra[key].stage]
        (accumulator,) = put([accumulator], group)
        zeros = group.program(_clearing(accumulator.sharding), accumulator.sharding)(accumulator)
        return put([zeros], group, placement.offloads_accumulators)[0]


def _are_same(found: Sequence[jax.Array], guessed: Sequence[jax.Array]) -> jax.Array:
    """Whether arrays are the same; nan is the same as nan."""
    are_same: jax.Array = jnp.bool_(True)
    for one, other in zip(found, guessed, strict=True):
        are_same &= jnp.array_equal(one, other, equal_nan=jnp.issubdtype(one.dtype, jnp.inexact))
    return are_same


def zeros_like(value: jax.Array) -> jax.Array:
    """Zeros in place of an array, whose memory may be gone."""
    zeros: jax.Array = jnp.zeros(value.shape, value.dtype, device=value.sharding)
    return zeros


def find_read(programs: Sequence[UpdateProgram]) -> set[Any]:
    """Positions of the last stage's outputs that some programs read."""
    return {v.key for program in programs for v in program.arguments if v.kind == UpdateKind.OUTPUT}


# Results have the shardings of what they replace, whose memory they take.


@functools.lru_cache(maxsize=256)
def _adding(sharding: Any) -> Callable[[jax.Array, jax.Array], jax.Array]:
    def add(total: jax.Array, part: jax.Array) -> jax.Array:
        return total + part.astype(total.dtype)

    return jax.jit(add, donate_argnums=0, out_shardings=sharding)


@functools.lru_cache(maxsize=256)
def _clearing(sharding: Any) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(jnp.zeros_like, donate_argnums=0, out_shardings=sharding)

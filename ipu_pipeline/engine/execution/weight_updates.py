"""The weight update, program by program, each on the device of its variables."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ipu_pipeline.engine.devices.compiler_options import Options
from ipu_pipeline.engine.devices.device_groups import divided_in_replica
from ipu_pipeline.engine.devices.placing import put
from ipu_pipeline.engine.devices.state_placement import StatePlacement
from ipu_pipeline.engine.execution.templates import jit_update
from ipu_pipeline.engine.updates.accumulators import Accumulator
from ipu_pipeline.engine.updates.cutting import UpdateProgram
from ipu_pipeline.engine.updates.environment import UpdateCounts, UpdateEnvironment
from ipu_pipeline.engine.updates.optimizer_tracing import UpdateKind

__all__ = ["WeightUpdate", "find_read"]


class WeightUpdate:
    """Runs the weight updates of one traced pipeline on given devices.

    Attributes:
      placement: where the pipeline's state lives.
      donates: whether an update reuses the memory of the variables and optimizer state before it.
      jitted: its programs, jitted; none without training.
      functions: the functions to call: these, or what was loaded in their place.
      read: positions of the last stage's outputs that are read to make the optimizer's state at the start,
        and by the update.
    """

    def __init__(self, placement: StatePlacement, donate: bool, options: Options, may_raise: bool) -> None:
        """Jits the programs."""
        self.placement = placement
        self.may_raise = may_raise
        self.donates = donate and not may_raise
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
                    may_raise,
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
        functions: Sequence[Callable[..., list[Any]]] | None,
    ) -> UpdateEnvironment:
        """Runs the weight update. `functions` are those to call; None: `self.functions`.

        Returns:
          The results, with all accumulators, zeroed, by key.
        """
        placement = self.placement
        assert placement.updates is not None
        plan = placement.accumulator_plan
        if placement.has_peers:
            placement.begin_step()
        merged = plan.merge(accumulators, self._add_to_home)
        zeros = {key: self._clear(key, accumulators[key]) for key in plan.extra}
        environment = UpdateEnvironment(variables, merged, state_leaves, outputs, counts)
        placement.run_update(placement.updates.updates, functions or self.functions, environment)
        environment.accumulators |= zeros
        if self.may_raise:
            made = environment.variables, environment.state_leaves, environment.accumulators
            jax.block_until_ready((made, environment.enqueued, environment.sent))
        return environment

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

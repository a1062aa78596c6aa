"""Jits what a step runs: stage programs, update programs, and what passes put between them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from ipu_pipeline.engine.devices.compiler_options import CompilerOptions, Options
from ipu_pipeline.engine.devices.device_groups import DeviceGroup, over_replicas
from ipu_pipeline.engine.devices.remote import NotRun
from ipu_pipeline.engine.devices.state_placement import StatePlacement
from ipu_pipeline.engine.plan.plan import Program
from ipu_pipeline.engine.programs.accumulation import count_dtype
from ipu_pipeline.engine.programs.bindings import Binding, BindingKind
from ipu_pipeline.engine.programs.stage_programs import StageProgram
from ipu_pipeline.engine.schedules.actions import ActionKind
from ipu_pipeline.engine.tracing.replicas import REPLICA
from ipu_pipeline.engine.updates.accumulators import variable_of
from ipu_pipeline.engine.updates.optimizer_tracing import UpdateKind, UpdateValue

__all__ = [
    "Programs",
    "add",
    "add_collected",
    "clear",
    "first_replica",
    "mean_over_replicas",
    "pick",
    "spread",
]


class Programs:
    """The programs of a pipeline's plans; those that are asked for twice are made once."""

    def __init__(self, options: CompilerOptions, donates_accumulators: bool) -> None:
        """Begins without any. `donates_accumulators`: whether backwards may take their memory."""
        self.options, self.donates_accumulators = options, donates_accumulators
        self._known: dict[Any, Program] = {}

    def of_stage(
        self,
        key: Any,
        kind: ActionKind,
        stage: int,
        source: StageProgram,
        binds: Sequence[Binding],
        results: Sequence[Sequence[Binding]],
        placement: StatePlacement,
        is_joint: bool = False,
    ) -> Program:
        """The program of a stage, on the devices of one replica, or on those of all of them at once."""
        group = placement.groups[stage]
        num_accumulators = sum(own.kind is BindingKind.ACCUMULATOR for own in binds)
        is_forward = kind is ActionKind.FORWARD
        options = (self.options.of_forward if is_forward else self.options.of_backward)(stage)
        function: Callable[..., Any] = source.function
        shardings: Any = group.replicated
        if is_joint:
            function = over_replicas(group.replicated.mesh, source.function)
        elif group.is_divided:
            shardings = [_find_sharding(bound, group, placement) for bound in results]
        return self.add(
            (key, kind, stage, group),
            source.name,
            group,
            function,
            shardings,
            range(num_accumulators if self.donates_accumulators else 0),
            options,
            kind=kind,
            stage=stage,
            binds=tuple(binds),
            results=tuple(map(tuple, results)),
        )

    def of_update(self, number: int, placement: StatePlacement, donate: bool, may_raise: bool) -> Program:
        """A program of the weight update, which may take the memory of what it makes anew."""
        assert placement.updates is not None
        updates = placement.updates.updates
        program, group = updates[number], placement.groups[updates[number].stage]

        def is_donated(value: UpdateValue) -> bool:
            is_read_later = any(value in later.arguments for later in updates[number + 1 :])
            if value not in program.results or is_read_later:
                return False
            return not may_raise and (donate or value.kind == UpdateKind.GRADIENT)

        return self.add(
            ("update", number),
            program.name,
            group,
            program.function,
            placement.results_of(program).get("out_shardings"),
            [place for place, value in enumerate(program.arguments) if is_donated(value)],
            self.options.update,
            stage=program.stage,
            binds=program.arguments,
            results=program.results,
        )

    def of_init(self, number: int, placement: StatePlacement) -> Program:
        """A program that makes a part of the optimizer's first state."""
        assert placement.updates is not None
        program = placement.updates.inits[number]
        return self.add(
            ("init", number),
            program.name,
            placement.groups[program.stage],
            program.function,
            placement.results_of(program).get("out_shardings"),
            stage=program.stage,
            binds=program.arguments,
            results=program.results,
        )

    def between(
        self,
        group: DeviceGroup,
        source: Callable[..., Any],
        name: str,
        shardings: Sequence[Any] | None = None,
        donated: Sequence[int] = (),
    ) -> Program:
        """A program that a pass needs; all pipelines share those of one source and place."""
        given = None if shardings is None else tuple(shardings)
        return self.add((source, group, given), name, group, source, given, donated, is_shared=True)

    def add(
        self,
        key: Any,
        name: str,
        group: DeviceGroup,
        source: Callable[..., Any],
        shardings: Any = None,
        donated: Sequence[int] = (),
        options: Options = MappingProxyType({}),
        is_shared: bool = False,
        **told: Any,
    ) -> Program:
        """Jits a function of arrays that returns a list. Without `shardings`, results lie as JAX finds."""
        if key not in self._known:
            jit = _jit_once if is_shared else _jit
            jitted = jit(source, name, shardings, tuple(donated), tuple(options.items()))
            self._known[key] = program = Program(
                name, group, jitted, jitted, source, shardings, options, tuple(donated), **told
            )
            self.forget_compiled(program)
        return self._known[key]

    @staticmethod
    def forget_compiled(program: Program) -> None:
        """Lets a program be compiled anew: it calls what was jitted, or nothing where it is not run."""
        program.function, program.is_compiled = program.jitted, False
        if not program.group.is_here:
            whole, given = program.group.replicated, program.shardings
            if isinstance(given, (list, tuple)):
                given = [sharding or whole for sharding in given]
            program.function = NotRun(program.jitted, given or whole)

    def keep_stages(self, scope: Any) -> None:
        """Lets go of stages' programs for others than some shapes and size of chunks."""
        self._known = {key: own for key, own in self._known.items() if own.kind is None or key[0] == scope}

    def __iter__(self) -> Iterator[Program]:
        """All that were asked for."""
        return iter(self._known.values())


def _jit(
    source: Callable[..., Any],
    name: str,
    shardings: Any,
    donated: tuple[int, ...],
    options: tuple[tuple[str, Any], ...],
) -> Callable[..., list[Any]]:
    def function(*arguments: Any) -> list[Any]:
        return list(source(*arguments))

    function.__name__ = function.__qualname__ = name
    placed: dict[str, Any] = {} if shardings is None else {"out_shardings": shardings}
    if isinstance(shardings, tuple):
        placed = {"out_shardings": list(shardings)}
    jitted: Callable[..., list[Any]] = jax.jit(
        function, donate_argnums=donated, compiler_options=dict(options), **placed
    )
    return jitted


_jit_once = functools.lru_cache(maxsize=512)(_jit)


def _find_sharding(bound: Sequence[Binding], group: DeviceGroup, placement: StatePlacement) -> Any:
    """How a result lies on the devices of an IPU; residuals as the partitioner chooses."""
    for binding in bound:
        if binding.kind in (BindingKind.ASSIGNED, BindingKind.ACCUMULATOR):
            return placement.sharding_in_program(variable_of(binding.key), group)
    return None if all(one.kind is BindingKind.RESIDUAL for one in bound) else group.replicated


# What passes put between programs. All take and return arrays; accumulators give their memory away.


@functools.lru_cache(maxsize=256)
def mean_over_replicas(mesh: Any, partitions: Sequence[Any], num_accumulators: int) -> Callable[..., Any]:
    """Means of accumulators, means or the first replica's of assigned variables; zeros for accumulators.

    `partitions` says how each lies within a replica.
    """

    def reduce(*values: Any) -> list[Any]:
        accumulators, assigned = values[:num_accumulators], values[num_accumulators:]
        joined = [_mean(v) if jnp.issubdtype(v.dtype, jnp.floating) else _first(v) for v in assigned]
        return [*map(_mean, accumulators), *joined, *map(jnp.zeros_like, accumulators)]

    given = tuple(partitions)
    return over_replicas(mesh, reduce, given, [*given, *given[:num_accumulators]])


@functools.lru_cache(maxsize=256)
def first_replica(mesh: Any) -> Callable[..., Any]:
    """The first replica's values, in all replicas."""
    return over_replicas(mesh, lambda *values: [_first(value) for value in values])


def add(total: Any, part: Any) -> list[Any]:
    """The sum of two accumulators."""
    return [total + part.astype(total.dtype)]


def clear(value: Any) -> list[Any]:
    """Zeros."""
    return [jnp.zeros_like(value)]


def add_collected(*values: Any) -> list[Any]:
    """Adds to sums, which come first, what was collected of a micro-batch or chunk."""
    half = len(values) // 2

    def one(total: Any, part: Any) -> Any:  # the dtype is told, else JAX sums integers in 64 bits
        return total + part.sum(tuple(range(part.ndim - total.ndim)), dtype=total.dtype)

    return list(map(one, values[:half], values[half:]))


@functools.cache
def pick(place: int) -> Callable[..., Any]:
    """A function that returns a micro-batch's values, of a chunk."""
    return lambda *stacks: [stack[place] for stack in stacks]


@functools.lru_cache(maxsize=256)
def spread(size: int) -> Callable[..., Any]:
    """A function that repeats values that all micro-batches of a chunk have, as if each had its own."""
    return lambda *values: [jnp.broadcast_to(value, (size, *value.shape)) for value in values]


def _mean(value: Any) -> Any:
    """The mean over replicas, in at least 32 bits: a sum of 16-bit values may overflow 16 bits."""
    return jax.lax.pmean(value.astype(count_dtype(value.dtype)), REPLICA).astype(value.dtype)


def _first(value: Any) -> Any:
    return jax.lax.all_gather(value, REPLICA)[0]

"""The programs of a stage: one token of each slot of a group, or a chunk of the prompt of one slot."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.engine.generation.sampling import choose
from ipu_pipeline.engine.pipeline import Pipeline
from ipu_pipeline.engine.programs.stage_programs import StageProgram, ValueKind
from ipu_pipeline.engine.tracing.stages import Source, TracedPipeline, TracedStage

# A stage for one request.

TOKENS, POSITION = Source("element", 0), Source("element", 1)  # of what the first stage takes
_COUNT = Source("update_count", 0)


class RequestScalars(NamedTuple):
    """The scalars that a stage gets for a request."""

    position: Any  # the place of the first token, int32
    key: Any  # the request's random key
    update_count: Any  # of the state, int32


@dataclass(frozen=True, eq=False)
class StageRun:
    """A stage for one request. Calling it is pure.

    Attributes:
      place: what errors call it.
      weights: full names of the variables that it reads from the state.
      caches: full names of the variables that it assigns, of which each request has its own.
      inputs: the values that it takes, without `POSITION`.
      input_avals: their shapes and dtypes.
      outputs: the values that it makes for other stages, or that are wanted.
    """

    place: str
    weights: tuple[str, ...]
    caches: tuple[str, ...]
    inputs: tuple[Source, ...]
    input_avals: tuple[jax.ShapeDtypeStruct, ...]
    outputs: tuple[Source, ...]
    _program: StageProgram
    _stage: TracedStage
    _index: int

    def __call__(
        self, caches: Sequence[Any], weights: Sequence[Any], inputs: Sequence[Any], scalars: RequestScalars
    ) -> tuple[list[Any], list[Any]]:
        """Computes the outputs, and the new caches."""
        variables = dict(zip(self.weights, weights, strict=True)) | dict(
            zip(self.caches, caches, strict=True)
        )
        values = dict(zip(self.inputs, inputs, strict=True))
        values |= {POSITION: scalars.position, _COUNT: scalars.update_count}
        names = [spec.name for spec in self._stage.variables]
        by_kind = {
            ValueKind.KEY: lambda: scalars.key,
            ValueKind.EXECUTION_COUNT: lambda: jnp.int32(0),
            ValueKind.MICRO_BATCH: lambda: scalars.position,
            ValueKind.UPDATE_COUNT: lambda: scalars.update_count,
        }
        arguments = []
        for value in self._program.arguments:
            if value.kind is ValueKind.VARIABLE:
                arguments.append(variables[names[value.index]])
            elif value.kind is ValueKind.INPUT:
                arguments.append(values[self._stage.inputs[value.index]])
            elif value.kind is ValueKind.KEY_NUMBER:
                arguments.append(np.uint32(value.index))
            else:
                arguments.append(by_kind[value.kind]())
        new_values: dict[Any, Any] = {}
        try:
            results = self._program.function(*arguments)
        except Exception as error:  # such as a callback that cannot be vmapped
            error.add_note(f"This happened in {self.place}, while its program for a generator was made")
            raise
        for meanings, result in zip(self._program.results, results, strict=True):
            for value in meanings:
                if value.kind is ValueKind.ASSIGNED:
                    new_values[names[value.index]] = result
                elif value.kind is ValueKind.OUTPUT:
                    new_values[Source("output", value.index, self._index)] = result
        return [new_values[source] for source in self.outputs], [new_values[name] for name in self.caches]


def make_runs(pipeline: Pipeline, platform: str) -> list[StageRun]:
    """The stages of a traced pipeline that only runs forwards. The last one takes or makes its output."""
    traced = pipeline.traced
    programs = [stage_programs.on(platform).forward for stage_programs in pipeline.programs]
    takes = [_inputs_of(stage, program) for stage, program in zip(traced.stages, programs, strict=True)]
    (logits,) = traced.outputs
    last = len(programs) - 1
    if logits.stage != last and logits not in takes[last]:
        takes[last] = (*takes[last], logits)
    sources = {logits}.union(*takes)
    return [
        _make_run(traced, index, program, takes[index], sources) for index, program in enumerate(programs)
    ]


def _inputs_of(stage: TracedStage, program: StageProgram) -> tuple[Source, ...]:
    sources = [stage.inputs[value.index] for value in program.arguments if value.kind is ValueKind.INPUT]
    return tuple(dict.fromkeys(source for source in sources if source not in (POSITION, _COUNT)))


def _make_run(
    traced: TracedPipeline,
    index: int,
    program: StageProgram,
    inputs: tuple[Source, ...],
    sources: set[Source],
) -> StageRun:
    stage = traced.stages[index]
    caches = tuple(spec.name for spec in stage.assigned)
    names = [
        stage.variables[value.index].name for value in program.arguments if value.kind is ValueKind.VARIABLE
    ]
    weights = tuple(dict.fromkeys(name for name in names if name not in caches))
    outputs = tuple(
        source
        for position, source in enumerate(stage.outputs)
        if source == Source("output", position, index) and source in sources
    )
    avals = tuple(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in map(traced.aval, inputs))
    return StageRun(stage.place, weights, caches, inputs, avals, outputs, program, stage, index)


def scan_tokens(
    run: StageRun,
    length: int,
    caches: Sequence[Any],
    weights: Sequence[Any],
    inputs: Sequence[Any],
    scalars: RequestScalars,
) -> tuple[list[Any], list[Any]]:
    """Runs a stage that takes one token at a time over a chunk, whose inputs and outputs are stacked."""

    def step(caches: Any, token: Any) -> Any:
        number, inputs = token
        position = scalars.position + number
        outputs, caches = run(caches, weights, inputs, scalars._replace(position=position))
        return caches, outputs

    numbers = jnp.arange(length, dtype=jnp.int32)
    after, stacked = jax.lax.scan(step, list(caches), (numbers, list(inputs)))
    return list(stacked), list(after)


# The programs. They take the caches of a group, whose first axis is the slots, and give their memory to
# the new ones. They do not depend on who is in a slot, so nothing is compiled when requests come and go.
# The last stage's programs also choose tokens: they return the newest token of each slot, [slots].


class SlotNumbers(NamedTuple):
    """Numbers of a request, scalars, or of the requests of all slots, stacked."""

    positions: Any  # the place of the token, or of the first one of a chunk, int32
    seeds: Any  # uint32
    numbers: Any  # of the request among those with its seed, uint32


class StagePrograms:
    """The programs of a stage; each is compiled when it is first called."""

    def __init__(
        self,
        index: int,
        run: StageRun,
        make_run: Callable[[int], StageRun] | None,
        logits: Source | None,
        results: Any,
    ) -> None:
        """Compiles nothing."""
        self.run, self._make_run, self._logits = run, make_run, logits
        self._index, self._results = index, results
        self._decodes: dict[bool, Callable[..., Any]] = {}
        self._chunks: dict[int, Callable[..., Any]] = {}

    def decode(self, is_sampled: bool) -> Callable[..., Any]:
        """The program for one token of each slot.

        It takes caches, weights, inputs (each with a first axis for the slots; `TOKENS` is int32 [slots]),
        `SlotNumbers`, the state's update count, and if tokens are drawn, `SamplingArrays`; it returns the
        outputs and caches. In place of outputs, the last stage returns the tokens that are chosen.
        """
        is_sampled = is_sampled and self._logits is not None
        if is_sampled not in self._decodes:
            self._decodes[is_sampled] = self._make_decode(is_sampled)
        return self._decodes[is_sampled]

    def _make_decode(self, is_sampled: bool) -> Callable[..., Any]:
        run = self.run

        def decode(caches: Any, weights: Any, inputs: Any, numbers: Any, count: Any, sampling: Any) -> Any:
            def decode_slot(caches: Any, inputs: Any, numbers: Any, sampling: Any) -> Any:
                key = _request_key(numbers)
                scalars = RequestScalars(numbers.positions, jax.random.fold_in(key, 0), count)
                args = [x.reshape(1) if s == TOKENS else x for s, x in zip(run.inputs, inputs, strict=True)]
                outputs, caches = run(caches, weights, args, scalars)
                if self._logits is None:
                    return outputs, caches
                logits = self._find_logits(run, args, outputs)
                return _choose(logits, sampling, key, numbers.positions + 1), caches

            return jax.vmap(decode_slot, in_axes=(0, 0, 0, 0 if is_sampled else None))(
                caches, inputs, numbers, sampling
            )

        return self._jit(decode, f"stage{self._index}_decode")

    def chunk(self, length: int) -> Callable[..., Any]:
        """The program for a chunk of a slot's prompt.

        It takes caches, weights, inputs (of the one request), `SlotNumbers` and the update count like
        `decode`, the slot's number, and the initial values of the caches, from which a request starts. The
        last stage also takes the newest tokens of the slots, int32 [slots], and if tokens are drawn
        `SamplingArrays`; it returns the tokens, with that of this slot chosen anew, in place of outputs.
        """
        if length not in self._chunks:
            self._chunks[length] = self._make_chunk(length)
        return self._chunks[length]

    def input_avals(self, length: int, num_slots: int) -> list[jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the inputs of a program: of a chunk, or for length 0 of `decode`."""
        is_whole = self._make_run is not None and length > 1
        run = self._make_run(length) if self._make_run is not None and is_whole else self.run
        axes = [num_slots] if length == 0 else [length] if length > 1 and not is_whole else []
        return [
            jax.ShapeDtypeStruct((length or num_slots,) if s == TOKENS else (*axes, *x.shape), x.dtype)
            for s, x in zip(run.inputs, run.input_avals, strict=True)
        ]

    def _make_chunk(self, length: int) -> Callable[..., Any]:
        run = self.run
        call: Callable[..., Any] = functools.partial(scan_tokens, run, length)
        if self._make_run is not None and length > 1:
            run = call = self._make_run(length)
        elif length == 1:
            call = run
        is_stacked = call is not run

        def chunk(
            caches: Any,
            weights: Any,
            inputs: Any,
            numbers: Any,
            count: Any,
            slot: Any,
            initial: Any,
            tokens: Any,
            sampling: Any,
        ) -> Any:
            key = _request_key(numbers)
            scalars = RequestScalars(numbers.positions, jax.random.fold_in(key, 0), count)
            # A first chunk starts from initial values, and never reads what a former request left.
            rows = [
                jnp.where(
                    numbers.positions == 0, first, jax.lax.dynamic_index_in_dim(cache, slot, 0, False)
                )
                for cache, first in zip(caches, initial, strict=True)
            ]
            args = [
                x.reshape(length, 1) if is_stacked and s == TOKENS else x
                for s, x in zip(run.inputs, inputs, strict=True)
            ]
            outputs, rows = call(rows, weights, args, scalars)
            caches = [
                jax.lax.dynamic_update_index_in_dim(cache, row, slot, 0)
                for cache, row in zip(caches, rows, strict=True)
            ]
            if self._logits is None:
                return outputs, caches
            logits = self._find_logits(run, args, outputs)
            token = _choose(logits, sampling, key, numbers.positions + length)
            return tokens.at[slot].set(token), caches

        return self._jit(chunk, f"stage{self._index}_prompt{length}")

    def _find_logits(self, run: StageRun, inputs: Any, outputs: Any) -> Any:
        """The logits of the last token that a run has read, [words]."""
        pairs = zip((*run.inputs, *run.outputs), (*inputs, *outputs), strict=True)
        logits = next(value for source, value in pairs if source == self._logits)
        return logits.reshape(-1, logits.shape[-1])[-1]

    def _jit(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        function.__name__ = function.__qualname__ = name
        placed = {} if self._results is None else {"out_shardings": self._results}
        return jax.jit(function, donate_argnums=0, **placed)


def _request_key(numbers: Any) -> jax.Array:
    """The key of a request, from its seed and number alone: its answer does not depend on other slots."""
    return jax.random.fold_in(jax.random.key(numbers.seeds), numbers.numbers)


def _choose(logits: Any, sampling: Any, key: Any, position: Any) -> jax.Array:
    """Chooses the token for a place of a request, by a key that depends on the two alone."""
    return choose(logits, sampling, jax.random.fold_in(jax.random.fold_in(key, 1), position))

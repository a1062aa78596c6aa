"""The micro-batches of a step: how they are taken, and the shapes that they may have."""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax

from ipu_pipeline.engine.building import Built
from ipu_pipeline.engine.devices.feeds import NEW_SHAPES, Element, Take, copy_leaves, shapes_of
from ipu_pipeline.engine.execution.contract import Runner
from ipu_pipeline.engine.state import check_elements
from ipu_pipeline.engine.tracing.captures import Captures
from ipu_pipeline.engine.tracing.frames import Surroundings
from ipu_pipeline.engine.tracing.side_outputs import metric_names
from ipu_pipeline.engine.tracing.stages import TracedPipeline
from ipu_pipeline.engine.updates.update_programs import AccumulatorPlan, find_read
from ipu_pipeline.ground.errors import OutOfRangeError
from ipu_pipeline.ground.pytrees import describe, describe_structures

# Taking micro-batches.

Place: TypeAlias = "Callable[[Any, int], Any]"  # of a micro-batch and its number


class StepFeed:
    """Takes micro-batches one by one."""

    def __init__(self, micro_batches: Iterable[Any], count: int, has_peers: Callable[[], bool]) -> None:
        """Takes nothing yet."""
        self._numbers, self._count, self._has_peers = iter(range(count)), count, has_peers
        try:
            self._iterator = _iterate(micro_batches, count)
        except Exception as error:
            if not has_peers():
                raise
            self._iterator = _raise(error)  # in the step, where the other processes are told of it

    def peek(self) -> Any:
        """Returns the first micro-batch without taking it."""
        first = self._next(0)
        self._iterator = itertools.chain([first], self._iterator)
        return first

    def placing(self, place: Place) -> Take:
        """Returns a function that takes micro-batches, which `place` puts on the devices."""
        return functools.partial(self._take, place)

    def _take(self, place: Place, limit: int) -> list[Any]:
        del limit
        number = next(self._numbers)
        try:
            return [place(self._next(number), number)]
        except Exception:
            if self._has_peers():  # the next step begins at the same place in all processes
                for _number in self._numbers:
                    with contextlib.suppress(Exception):
                        next(self._iterator, None)
            raise

    def _next(self, number: int) -> Any:
        try:
            return next(self._iterator)
        except StopIteration:
            raise OutOfRangeError(
                f"The data ended after {number} of the {self._count} micro-batches of a step."
            ) from None


def _iterate(micro_batches: Iterable[Any], count: int) -> Iterator[Any]:
    if isinstance(micro_batches, (list, tuple)) and len(micro_batches) > count:
        raise ValueError(
            f"micro_batches: a step takes {count}; the {type(micro_batches).__name__} has "
            f"{len(micro_batches)}. Give each step its own, or all steps one iterator."
        )
    return iter(check_elements("Pipeline.step", micro_batches))


def _raise(error: Exception) -> Iterator[Any]:
    """An iterator that raises an error."""
    yield from ()
    raise error


# Shapes: those of the first micro-batch have the number 0, and their runner leads. Others come as they are
# met, or were named beforehand. All have the same variables, so there is one state.

ShapesKey: TypeAlias = "tuple[tuple[int, ...], ...]"  # the shapes of a micro-batch's leaves
MakeRunner: TypeAlias = "Callable[[Runner[Any], Any, int], Runner[Any]]"


def find_key(element: Any) -> ShapesKey:
    """The shapes of a micro-batch's leaves."""
    return tuple(tuple(leaf.shape) for leaf in jax.tree.leaves(element))


def describe_shapes(element: Any) -> str:
    """Describes the leaves of a micro-batch."""
    return ", ".join(map(describe, jax.tree.leaves(element))) or "nothing"


def describe_number(element: Any, number: int, max_shapes: int) -> str:
    """The message while programs compile for other shapes than the first micro-batch's."""
    return f"for micro-batches of {describe_shapes(element)} ({number + 1} of at most {max_shapes} shapes)"


def check_number(known_elements: Sequence[Any], element: Any, max_shapes: int) -> None:
    """Raises if a pipeline takes no more shapes of micro-batches."""
    if len(known_elements) < max_shapes:
        return
    raise ValueError(
        f"max_shapes is {max_shapes}, and a micro-batch of {describe_shapes(element)} has shapes number "
        f"{len(known_elements) + 1}. There are programs for "
        f"{'; '.join(map(describe_shapes, known_elements))}. Each of the shapes takes time to compile: pad "
        "micro-batches to a few lengths (datasets.Buckets does), or give the pipeline a larger max_shapes."
    )


def check_alike(first: Built, other: Built, plans: tuple[AccumulatorPlan, AccumulatorPlan]) -> None:
    """Raises if a pipeline for some shapes cannot share the state or a step with that for the first."""
    old, new = describe_shapes(first.traced.element), describe_shapes(other.traced.element)
    where = f"For micro-batches of {new}, in place of {old},"
    _check_variables(first, other, where)
    if first.traced.inputs != other.traced.inputs:
        raise ValueError(
            f"{where} the stages or the optimizer capture other placeholders. Pass these as `inputs`."
        )
    if first.traced.output_tree != other.traced.output_tree:
        before, after = describe_structures(first.traced.output_tree, other.traced.output_tree)
        raise ValueError(f"{where} the last stage returns {after}, in place of {before}. Return the same.")
    if first.collecting.is_summed and _differ(first.collecting.avals, other.collecting.avals):
        raise ValueError(
            f"{where} what is summed over the micro-batches is {_describe_avals(other.collecting.avals)}, "
            f"in place of {_describe_avals(first.collecting.avals)}. Sum values whose shapes do not depend "
            "on the micro-batch's, such as the loss."
        )
    if _find_enqueued(first) != _find_enqueued(other):
        raise ValueError(f"{where} the stages enqueue or report other values. They must be the same.")
    for argument, of_first, of_other in zip(
        ("init", "update"), _read_outputs(first), _read_outputs(other), strict=True
    ):
        if of_first != of_other:
            raise ValueError(
                f"{where} the optimizer's {argument} reads other outputs of the last stage, or other "
                "shapes of them. Let the last stage return what it reads as values of one shape, such as "
                "scalars."
            )
    if plans[0].keys != plans[1].keys or first.accumulator_dtypes != other.accumulator_dtypes:
        raise ValueError(
            f"{where} other variables get gradients, or other stages use them. Stages must use the same "
            "variables for all shapes."
        )


def _check_variables(first: Built, other: Built, where: str) -> None:
    specs, actual = first.traced.variables, other.traced.variables
    missing, new = specs.keys() - actual.keys(), actual.keys() - specs.keys()
    if missing or new:
        parts = [f"missing are {', '.join(sorted(missing))}"] if missing else []
        parts += [f"new are {', '.join(sorted(new))}"] if new else []
        raise ValueError(
            f"{where} the stages have other variables: {'; '.join(parts)}. All shapes share one state."
        )
    for name, spec in specs.items():
        if (spec.shape, spec.dtype) != (actual[name].shape, actual[name].dtype):
            raise ValueError(
                f"{where} variable {name} is {describe(actual[name])}, in place of {describe(spec)}. Its "
                "shape must not depend on the micro-batch's: make it for the longest, and use a part of it."
            )
    if first.traced.owners != other.traced.owners:
        raise ValueError(f"{where} other stages use the variables. All shapes share one state.")


def _read_outputs(built: Built) -> tuple[Any, Any]:
    """The last stage's outputs that the optimizer's init and update read."""
    if built.updates is None:
        return (), ()
    avals = built.traced.output_avals

    def read(programs: Any) -> Any:
        return {place: (avals[place].shape, avals[place].dtype) for place in find_read(programs)}

    return read(built.updates.inits), read(built.updates.updates)


def _find_enqueued(built: Built) -> tuple[Any, Any]:
    """What the stages enqueue, and the names of what they report."""
    entries = built.traced.enqueued
    return [entry.tree for entry in entries], metric_names(entries)


def _differ(first: Sequence[Any], other: Sequence[Any]) -> bool:
    return [(aval.shape, aval.dtype) for aval in first] != [(aval.shape, aval.dtype) for aval in other]


def _describe_avals(avals: Sequence[Any]) -> str:
    return ", ".join(map(describe, avals))


def trace_again(
    first: TracedPipeline,
    element: Any,
    surroundings: Surroundings,
    captures: Captures,
    trace: Callable[..., Any],
) -> Any:
    """Traces a pipeline for other shapes than the first ones, in the surroundings of the first trace."""
    try:
        return surroundings.run(captures.trace_again, first.captured, trace)
    except Exception as error:
        error.add_note(
            f"The micro-batch, {describe_shapes(element)}, has other shapes than the first one, "
            f"{describe_shapes(first.element)}. With max_shapes=1 that is an error by itself."
        )
        raise


class MicroBatchShapes:
    """The pipelines and runners for the shapes of a pipeline's micro-batches.

    Attributes:
      others: the same pipeline for other shapes than the first ones.
      runners: the runner of each of the shapes, once the pipeline is prepared.
    """

    def __init__(self) -> None:
        """Begins without other shapes."""
        self.others: dict[ShapesKey, Any] = {}
        self.runners: RunnersOfShapes | None = None

    def set_runner(self, element: Any, runner: Runner[Any], make: MakeRunner, lock: Any) -> None:
        """Sets the runner for the first shapes, and makes one for each of the others."""
        runners = RunnersOfShapes(element, runner, make, lock)
        for pipeline in self.others.values():
            runners.add(pipeline.traced.element)
        self.runners = runners

    def resolve(self, element: Any) -> Any:
        """A micro-batch from a pipeline's `place_element`, once there is a runner for its shapes."""
        if shapes_of(element) != NEW_SHAPES:
            return element
        assert self.runners is not None
        return self.runners.resolve(element)

    def compile(self, state: Any, request: Any) -> None:
        """Compiles what is run for other shapes than the first ones."""
        assert self.runners is not None
        for runner in self.runners.all[1:]:
            runner.compile(state, request)


class RunnersOfShapes:
    """Numbers the shapes of micro-batches, and has the runner of each. An infeed may hold it for long.

    Attributes:
      all: the runners by number; the list that these share.
    """

    def __init__(self, element: Any, runner: Runner[Any], make: MakeRunner, lock: Any) -> None:
        """Begins with the shapes of the first micro-batch."""
        self.all: list[Runner[Any]] = runner.of_shapes
        self._make, self._lock = weakref.WeakMethod(make), lock
        self._leaves, self._tree = jax.tree.flatten(element)
        self._numbers: Mapping[ShapesKey, int] = {find_key(element): 0}

    def place_element(self, leaves: Sequence[Any]) -> Any:
        """Puts a micro-batch on the devices that read it, if there are programs for its shapes.

        Safe to call from another thread; shares no memory with NumPy arrays that are given.
        """
        number = self._numbers.get(tuple(leaf.shape for leaf in leaves))
        if number is None:
            return Element(None, 0, copy_leaves(leaves), NEW_SHAPES)
        return self.all[number].place_element(leaves)

    def resolve(self, element: Any) -> Any:
        """A micro-batch with new shapes, once there is a runner for them, on its devices."""
        structs = [
            jax.ShapeDtypeStruct(leaf.shape, first_leaf.dtype)
            for leaf, first_leaf in zip(element.leaves, self._leaves, strict=True)
        ]
        self.add(jax.tree.unflatten(self._tree, structs))
        return self.place_element(element.leaves)

    def add(self, element: Any) -> None:
        """Makes the runner for a micro-batch's shapes if there is none; see `resolve`."""
        key = find_key(element)
        with self._lock:
            if key not in self._numbers:
                make, number = self._make(), len(self.all)
                assert make is not None
                self.all.append(make(self.all[0], element, number))
                self._numbers = {**self._numbers, key: number}  # never changed: other threads read it

"""Side outputs of traced functions: what they enqueue, metrics, and errors of checks."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.engine.state import Handed, Progress
from ipu_pipeline.engine.tracing import frames, scopes
from ipu_pipeline.engine.tracing.frames import Enqueued, Frame, OutsideOfBodyError, current_frame
from ipu_pipeline.engine.tracing.specs import serial_numbers
from ipu_pipeline.ground import jax_compat, jax_core
from ipu_pipeline.ground.checks import require
from ipu_pipeline.ground.pytrees import is_readable

# `enqueue` leaves a marker in the jaxpr being traced, as variables do, and notes in the function's frame
# what it marks. What traces the function turns the markers into outputs. These are no values between
# stages: they stay on the stage's device, take no slot and cross nothing.

enqueue_p = jax_core.Primitive("enqueue")


@enqueue_p.def_abstract_eval  # type: ignore[untyped-decorator]  # jax.extend has no annotations
def _enqueue_abstract(*leaves: Any, index: int, serial: int) -> Any:
    del leaves, index, serial
    return jax_compat.shaped_array((), np.dtype(np.int32))  # never read; a marker needs a result


jax_compat.end_derivatives(enqueue_p)


def enqueue(frame: Frame, target: Any, value: Any) -> None:
    """Records what the function being traced enqueues, at this point of its trace."""
    if frame.is_traced_again:
        return
    assert frame.enqueued is not None
    leaves, tree = jax.tree.flatten(value)
    avals = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
    frame.enqueued.append(Enqueued(target, tree, avals))
    leaves = [jax_compat.as_operand(leaf) for leaf in leaves]
    enqueue_p.bind(*leaves, index=len(frame.enqueued) - 1, serial=next(serial_numbers))


def enqueue_to(target: Any, value: Any, caller: str, as_array: Callable[[Any], jax.Array]) -> None:
    """Enqueues to a target that takes one element of each stage, iteration or weight update."""
    frame = current_frame(caller)
    if frame.enqueued is None and not frame.is_traced_again:
        raise OutsideOfBodyError(
            f"{caller} was called in {frame.place}. Call it in a stage of a pipeline, "
            "in the update of its optimizer, or in the body of a loop; ipu.loops.repeat(1, ...) runs a "
            "body once."
        )
    if any(entry.target is target for entry in frame.enqueued or ()):
        raise ValueError(
            f"An {caller.partition('.')[0]} can be enqueued to only once in a program: enqueue a tuple or "
            "dict, or use a queue for each value."
        )
    if not jax.tree.leaves(value):
        raise ValueError(f"{caller}: value has no arrays; there is nothing to enqueue.")
    enqueue(frame, target, jax.tree.map(as_array, value))


def find_leaves(entries: Sequence[Enqueued], kind: type) -> list[tuple[Enqueued, slice]]:
    """The entries for targets of a kind, and the places of their leaves among those of all entries."""
    return [
        (entry, slice(first, first + len(entry.avals)))
        for entry, first in zip(entries, first_leaves(entries), strict=False)
        if isinstance(entry.target, kind)
    ]


def first_leaves(entries: Sequence[Enqueued]) -> list[int]:
    """The number of each entry's first leaf, if leaves are numbered through; last, the number of leaves."""
    return list(itertools.accumulate((len(entry.avals) for entry in entries), initial=0))


# Metrics stay on the devices until they are read. What a stage reports for each micro-batch is then reduced
# on the host to one value per weight update: to reduce it on the devices, all programs would need another
# kind of accumulator, for a few numbers per micro-batch.

NUMBERS = "update"  # the name of the numbers of weight updates, beside metrics

MetricReduction: TypeAlias = Literal["mean", "sum", "min", "max", "last"]

# Each takes an array [weight updates, micro-batches of each].
_REDUCTIONS: dict[MetricReduction, Callable[[Any], Any]] = {
    "mean": lambda values: values.mean(axis=1, dtype=np.float64),
    "sum": lambda values: values.sum(axis=1, dtype=np.float64),
    "min": lambda values: values.min(axis=1),
    "max": lambda values: values.max(axis=1),
    "last": lambda values: values[:, -1],
}


@dataclass(frozen=True)
class Metric:
    """A metric: its full name, and how the values of micro-batches become one."""

    name: str
    reduction: MetricReduction


def metric(name: str, value: Any, reduction: MetricReduction = "mean") -> None:
    """Reports a scalar, which can be read per weight update (in inference, per execution).

    It may be called in a stage, in the loss function, and in the `update` of an Optax transformation. It
    has no gradient, and no micro-batch waits for it. It may be called
    within `jax.jit`, `jax.checkpoint` and `jax.grad`, but not within loops, conditionals, `jax.vmap` and
    functions with custom derivatives.

    Example:
      >>> def stage(x):
      ...     ipu.metric("largest", jnp.max(x), reduction="max")
      ...     return x
      >>> batches = [np.float32([1, 5]), np.float32([3, 2])]
      >>> pipeline = engine.Pipeline([stage], num_micro_batches=2)
      >>> _, outputs = pipeline.step(pipeline.init(jax.random.key(0), batches[0]), batches)
      >>> outputs.metrics["largest"]
      np.float32(5.0)

    Args:
      name: the metric's name. The full name starts with the surrounding variable scopes.
      value: a scalar, real number or boolean. It is reported as float32; as float64 if it has 64 bits.
      reduction: how the values of an update's micro-batches are combined: "mean", "sum", "min", "max" or
        "last". A weight update reports only one value.

    Raises:
      RuntimeError: it is called elsewhere.
      TypeError: the name is not a string, or the value is not an array.
      ValueError: the name is empty or "update", or another metric of the program has it; the value is not a
        numeric scalar; or the reduction is unknown.
    """
    frame = frames.current_frame("metric")
    if not frame.has_metrics and not frame.is_traced_again:
        raise RuntimeError(
            f"metric({name!r}) was called in {frame.place}. Call it in a stage of a pipeline, in its "
            "optimizer_function, or in the update of its optimizer; in a loop, enqueue the value to an "
            "outfeed."
        )
    require(isinstance(name, str), "metric: name must be a string", name, TypeError)
    if not name or name == NUMBERS:
        raise ValueError(
            f"metric: name must not be empty, nor {NUMBERS!r}, as the numbers of weight updates are called "
            f"beside it; got {name!r}."
        )
    rule = f"metric({name!r}): reduction must be one of {', '.join(map(repr, _REDUCTIONS))}"
    require(reduction in _REDUCTIONS, rule, reduction)
    scope = scopes.current_scope()
    full_name = f"{scope}/{name}" if scope else name
    if full_name in metric_names(frame.enqueued or ()):
        advice = "Give this one another name, or call it in a variable_scope."
        if not frame.is_stage:
            advice += " with_metrics goes around transformations that update now and then, as MultiSteps."
        raise ValueError(f"metric: {frame.place} has a metric {full_name!r} already. {advice}")
    try:
        array = jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"metric({name!r}): value must be a scalar; got {value!r}.") from error
    is_number = array.dtype == np.bool_ or any(
        jnp.issubdtype(array.dtype, kind) for kind in (jnp.integer, jnp.floating)
    )
    if array.shape != () or not is_number:
        raise ValueError(
            f"metric({name!r}): value must be a scalar, a real number or boolean; it is "
            f"{array.dtype}{list(array.shape)}. Reduce it, for example with jnp.mean."
        )
    dtype = jnp.float64 if array.dtype.itemsize == 8 else jnp.float32
    enqueue(frame, Metric(full_name, reduction), array.astype(dtype))


def metric_names(entries: Sequence[Enqueued]) -> list[str]:
    """The full names of the metrics among what is enqueued."""
    return [entry.target.name for entry in entries if isinstance(entry.target, Metric)]


@dataclass(frozen=True, eq=False)
class Reported:
    """Values of metrics that have not been read yet, in parts.

    Attributes:
      by_stages: per micro-batch, in the order of `MetricReader.of_stages`.
      by_updates: per weight update, in the order of `MetricReader.of_updates`.
      reader: of the metrics.
    """

    by_stages: list[Handed]
    by_updates: list[Handed]
    reader: MetricReader

    def read(self, num_updates: int) -> dict[str, np.ndarray[Any, Any]]:
        """Reads the values; see `MetricReader.read`."""
        return self.reader.read(self, num_updates)

    def is_ready(self) -> bool:
        """Whether all of it has been computed."""
        leaves = [leaf for part in (*self.by_stages, *self.by_updates) for leaf in part.leaves]
        return all(leaf.is_ready() for leaf in leaves)


@dataclass(frozen=True, eq=False)
class MetricReader:
    """The metrics of a pipeline.

    Attributes:
      of_stages: the metrics of stages, each with the number of its enqueued leaf.
      of_updates: the metrics of weight updates, each with the number of its enqueued leaf.
    """

    of_stages: tuple[tuple[int, Metric], ...]
    of_updates: tuple[tuple[int, Metric], ...]

    @classmethod
    def find(cls, of_stages: Sequence[Enqueued], of_updates: Sequence[Enqueued]) -> MetricReader:
        """Finds the metrics among what stages and weight updates enqueue."""

        def numbered(entries: Sequence[Enqueued]) -> tuple[tuple[int, Metric], ...]:
            with_leaves = zip(first_leaves(entries), entries, strict=False)
            return tuple((leaf, e.target) for leaf, e in with_leaves if isinstance(e.target, Metric))

        return cls(numbered(of_stages), numbered(of_updates))

    def __bool__(self) -> bool:
        """Whether there are any metrics."""
        return bool(self.of_stages or self.of_updates)

    def select(self, progress: Progress) -> Reported:
        """Selects the metrics from a pipeline's progress."""
        return Reported(
            _only(progress.enqueued, [leaf for leaf, _metric in self.of_stages]),
            _only(progress.updated, [leaf for leaf, _metric in self.of_updates]),
            self,
        )

    def read(self, reported: Reported, num_updates: int) -> dict[str, np.ndarray[Any, Any]]:
        """Reads the values of some weight updates, by full name; waits for what is still being computed.

        Where stages are in several processes, each has the metrics of its own.

        Args:
          reported: what `select` returned.
          num_updates: the number of these weight updates; in inference, of executions.
        """
        values_by_name = {}
        for number, (_leaf, entry) in enumerate(self.of_stages):
            if not _are_here(reported.by_stages, number):
                continue
            values = _join(reported.by_stages, number)
            with np.errstate(all="ignore"):  # a sum may be infinite, and NaN stays NaN
                reduced = _REDUCTIONS[entry.reduction](values.reshape(num_updates, -1))
                values_by_name[entry.name] = reduced.astype(values.dtype)
        for number, (_leaf, entry) in enumerate(self.of_updates):
            if not _are_here(reported.by_updates, number):
                continue
            values_by_name[entry.name] = _join(reported.by_updates, number)
        return values_by_name


def _only(parts: Sequence[Handed], leaves: Sequence[int]) -> list[Handed]:
    if not leaves:
        return []
    return [dataclasses.replace(part, leaves=[part.leaves[leaf] for leaf in leaves]) for part in parts]


def _are_here(parts: Sequence[Handed], number: int) -> bool:
    """Whether this process has the values of a metric."""
    return all(is_readable(part.leaves[number]) for part in parts)


def _join(parts: Sequence[Handed], number: int) -> np.ndarray[Any, Any]:
    """The values of one metric, over all parts."""
    arrays = [np.atleast_1d(np.asarray(part.leaves[number]))[: part.size] for part in parts]
    return np.concatenate(arrays)


# `checkify.check` in stages: the errors become values that stages hand out, read when a step has run.
#
# A jaxpr with checks cannot be compiled as it is. JAX makes one of it that returns the error beside the
# results, at any depth of loops and conditionals, and with the derivatives that the results had.


@dataclass(frozen=True)
class UserChecks:
    """Stands for the errors of a stage among what stages hand out."""

    place: str


def with_checks_handed_out(closed_jaxpr: Any, frame: Frame) -> Any:
    """Makes a stage's jaxpr hand out the error of its checks for each micro-batch."""
    checked = jax_compat.with_errors_of_checks(jax_core.jaxpr_as_fun(closed_jaxpr))

    def call(*arguments: Any) -> list[Any]:
        error, results = checked(*arguments)
        enqueue(frame, UserChecks(frame.place), jax.tree.map(jax.numpy.asarray, error))
        return list(results)

    return jax.make_jaxpr(call)(*closed_jaxpr.in_avals)


def hands_out_checks(entries: Sequence[Enqueued]) -> bool:
    """Whether stages hand out errors of checks."""
    return any(isinstance(entry.target, UserChecks) for entry in entries)


def find_failed(
    entries: Sequence[Enqueued], handed: Sequence[Handed], num_replicas: int
) -> Exception | None:
    """Finds the first micro-batch of which a check failed. Waits for the checks.

    Returns:
      The error, which names stage and micro-batch; None if there is none.
    """
    for entry, places in find_leaves(entries, UserChecks):
        number = 0
        for part in handed:
            # One after another as in the data: micro-batches, and within each of them the replicas.
            leaves = [
                np.asarray(leaf).reshape(-1, *aval.shape)[: (part.size or 1) * num_replicas]
                for leaf, aval in zip(part.leaves[places], entry.avals, strict=True)
            ]
            for row in zip(*leaves, strict=True):
                message = entry.tree.unflatten(row).get()
                if message is not None:
                    return jax_compat.make_check_error(
                        f"{message}\nThis happened in {entry.target.place}, micro-batch {number}."
                    )
                number += 1
    return None

"""Takes the micro-batches of a step from what `Pipeline.step` was given."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

from ipu_pipeline.engine.devices.feeds import Take
from ipu_pipeline.engine.state_checks import check_elements
from ipu_pipeline.ground.errors import OutOfRangeError

__all__ = ["StepFeed"]

Place: TypeAlias = "Callable[[Any, int], Any]"  # of a micro-batch and its number


class StepFeed:
    """Takes micro-batches one by one."""

    def __init__(self, micro_batches: Iterable[Any], every: int, has_peers: Callable[[], bool]) -> None:
        """Takes nothing yet."""
        self._numbers, self._every, self._has_peers = iter(range(every)), every, has_peers
        try:
            self._iterator = _iterate(micro_batches, every)
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
        """A take of micro-batches that `place` puts on the devices."""
        return functools.partial(self._take, place)

    def _take(self, place: Place, wanted: int) -> list[Any]:
        del wanted
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
                f"The data ended after {number} of the {self._every} micro-batches of a step."
            ) from None


def _iterate(micro_batches: Iterable[Any], every: int) -> Iterator[Any]:
    if isinstance(micro_batches, (list, tuple)) and len(micro_batches) > every:
        raise ValueError(
            f"micro_batches: a step takes {every}; the {type(micro_batches).__name__} has "
            f"{len(micro_batches)}. Give each step its own, or all steps one iterator."
        )
    return iter(check_elements("Pipeline.step", micro_batches))


def _raise(error: Exception) -> Iterator[Any]:
    """An iterator that raises an error."""
    yield from ()
    raise error

"""Runs a program for training, evaluation and prediction, with its session and hooks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ipu_pipeline.engine.processes import share_stacks
from ipu_pipeline.ground.errors import OutOfRangeError
from ipu_pipeline.ground.values import as_objects
from ipu_pipeline.tf1.estimator.programs import EstimatorProgram, ModeKeys
from ipu_pipeline.tf1.graph.symbols import GlobalStep
from ipu_pipeline.tf1.ipu_session_run_hooks import (
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
)
from ipu_pipeline.tf1.program.calls import PipelineCall
from ipu_pipeline.tf1.session.session import Session

__all__ = ["Run", "Runs"]


@dataclass(frozen=True, eq=False)
class Run:
    """One `Session.run` of an estimator's program.

    Attributes:
      outputs: the outfeed's elements, without logs, stacked over micro-batches in the order of the data, or
        over weight updates and, within each, the replicas. Where shapes of elements differ, arrays of
        objects.
      num_updates: weight updates, or executions, that it did.
      context: the context, as hooks left it.
      data_end: the error with which the data ended in the run, if they did.
    """

    outputs: Any
    num_updates: int
    context: SessionRunContext
    data_end: OutOfRangeError | None = None


class Runs:
    """Runs a program and calls the hooks."""

    def __init__(
        self,
        made: EstimatorProgram,
        session: Session,
        hooks: Sequence[SessionRunHook],
        global_step: int,
        first_step: int | None = None,
    ) -> None:
        """Takes a session that has the program's variables."""
        self.made = made
        self.session = session
        self.hooks = hooks
        # Training counts on from where it begins; earlier updates may have had other counts per update.
        per_update = made.spec.micro_batches_per_update if made.mode is ModeKeys.TRAIN else 0
        offset = global_step - per_update * session.update_count(made.name)
        first = global_step if first_step is None else first_step
        self._first_update = (first - offset) // per_update if per_update else 0
        session.count_steps(per_update, offset)
        self._feeds = made.feed_steps(offset)
        self._fetched: dict[str, Any] = {}

    @contextlib.contextmanager
    def started(self) -> Iterator[None]:
        """Calls the hooks' `after_create_session`, and `end` if there was no error."""
        self.session.create_variables(self.made.program)  # for the hooks to see
        for hook in self.hooks:
            hook.after_create_session(self.session, None)
        yield
        for hook in self.hooks:
            hook.end(self.session)

    def run(
        self,
        global_step: int,
        max_updates: int,
        loss_of: Callable[[Any], float],
        should_stop: Callable[[], bool] = lambda: False,
        num_real: Callable[[int], int] = lambda count: count,
    ) -> Run:
        """Runs the program once; if the data end, as far as they go."""
        made = self.made
        context = SessionRunContext(self.session, global_step)
        asked = [hook.before_run(context) for hook in self.hooks]
        before = self.session.execution_count(made.name)
        data_end, num_done = None, 0
        (call,) = made.program.calls
        # Values that stay the same during a run do so wherever training was interrupted or saved.
        if isinstance(call, PipelineCall) and call.begin_input is not None:
            num_done = (self.session.update_count(made.name) - self._first_update) % call.repeat_count
            max_updates = min(max_updates, call.repeat_count - num_done)
        try:
            self.session.run_part(
                made.program,
                self._feeds,
                num_done=num_done,
                max_updates=max_updates,
                should_stop=should_stop,
            )
        except OutOfRangeError as error:  # updates before the data's end were done
            data_end = error
        num_updates = self.session.execution_count(made.name) - before
        if data_end is not None and num_updates == 0:
            raise data_end
        if made.mode is ModeKeys.TRAIN:
            context.global_step += num_updates * made.spec.micro_batches_per_update
        outputs = jax.tree.map(self._join_replicas, self.session.run(made.outfeed.dequeue()))
        if made.mode is not ModeKeys.TRAIN:  # all processes see the results
            leaves, tree = jax.tree.flatten(outputs)
            outputs = jax.tree.unflatten(tree, share_stacks(leaves))
        count = num_real(len(jax.tree.leaves(outputs)[0]))
        outputs = jax.tree.map(lambda stack: stack[:count], outputs)
        if made.has_logs:
            for logging_hook in made.hooks_that_log:
                logging_hook.receive(outputs["logs"][id(logging_hook)])
            outputs = outputs["outputs" if made.mode is not ModeKeys.TRAIN else "loss"]
        loss = loss_of(outputs)
        for hook, wanted in zip(self.hooks, asked, strict=True):
            results = None if wanted is None else self._fetch(wanted, loss, context.global_step)
            hook.after_run(context, SessionRunValues(results))
        return Run(outputs, num_updates, context, data_end)

    def _join_replicas(self, stack: Any) -> Any:
        """Joins an outfeed's axes of micro-batches and replicas, in the order of the data."""
        if self.made.num_replicas == 1:
            return stack
        if stack.dtype == object:  # elements of different shapes
            return as_objects([value for element in stack for value in element])
        return stack.reshape(stack.shape[0] * stack.shape[1], *stack.shape[2:])

    def _fetch(self, wanted: Any, loss: float, global_step: int) -> Any:
        if not isinstance(wanted, SessionRunArgs):
            raise TypeError(f"before_run must return SessionRunArgs or None; got {wanted!r}.")

        def find(name: Any) -> Any:
            if isinstance(name, GlobalStep) or name == "global_step":
                return global_step
            if name == "loss":
                return loss
            try:
                return np.array(self.session.variable_value(name))
            except KeyError:
                raise ValueError(
                    'SessionRunArgs: fetches must be "loss", "global_step" or names of variables; got '
                    f"{name!r}. The variables are {', '.join(sorted(self.made.program.variables))}."
                ) from None

        return jax.tree.map(find, wanted.fetches, is_leaf=lambda name: isinstance(name, GlobalStep))

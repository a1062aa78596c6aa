"""Evaluation, prediction and export of an estimator, over data sets of any length.

A pipeline runs whole executions. So after its end, a data set goes on with copies of its last element, and
the results for these are dropped.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ipu_pipeline.checkpointing.collective_calls import do_first
from ipu_pipeline.engine import processes
from ipu_pipeline.queues.feeder import DataPass
from ipu_pipeline.queues.synthetic_data import uses_synthetic_data
from ipu_pipeline.tf1.estimator.programs import EstimatorProgram, ModeKeys, Runs, apply_to
from ipu_pipeline.tf1.ipu_session_run_hooks import SessionRunHook
from ipu_pipeline.tf1.metrics import Update
from ipu_pipeline.tf1.session.exported_programs import make_example
from ipu_pipeline.tf1.session.program_runs import reads_data
from ipu_pipeline.tf1.session.session import Session


def check_export(
    export_dir_base: Any,
    serving_input_receiver_fn: Any,
    assets_extra: Any,
    as_text: bool,
    experimental_mode: ModeKeys | str,
) -> Callable[[], Any]:
    """Checks the arguments of `export_saved_model`; returns a maker of an example micro-batch."""
    if not callable(serving_input_receiver_fn):
        raise TypeError(
            "export_saved_model: serving_input_receiver_fn must be a function that returns what a "
            f"micro-batch is like; got {serving_input_receiver_fn!r}."
        )
    os.fspath(export_dir_base)
    for name, value, only, reason in (
        ("assets_extra", assets_extra, None, "copy such files into the folder that is returned"),
        ("as_text", as_text, False, "there is no SavedModel, and what is not an array is JSON already"),
        ("experimental_mode", experimental_mode, ModeKeys.PREDICT, "only inference pipelines are exported"),
    ):
        if value != only:
            raise NotImplementedError(
                f"export_saved_model: {name} must be {only!r}; got {value!r}. Leave it out: {reason}."
            )

    def receive() -> Any:
        received = serving_input_receiver_fn()
        described = getattr(received, "features", received)
        return make_example(described, "export_saved_model: what serving_input_receiver_fn returns")

    return receive


def export_prediction(
    session: Session, program: EstimatorProgram, global_step: int, base: str | os.PathLike[str]
) -> str:
    """Exports a program to a folder that is named by the time.

    Returns:
      The folder.
    """

    def choose() -> str:
        number = int(time.time())
        while (Path(base) / str(number)).exists():
            number += 1
        return str((Path(base) / str(number)).absolute())

    path = do_first(choose)
    session.export(path, program.program, program.feed_steps(global_step))
    return path


# Evaluation and prediction.


class PaddedData:
    """A data set, then copies of its last element without end; iterated over once."""

    def __init__(self, dataset: Any) -> None:
        """Takes the data set; nothing is read from it yet."""
        self._dataset = dataset
        self._condition = threading.Condition()
        self._num_read = 0
        self._has_ended = False

    def __iter__(self) -> Iterator[Any]:
        """Yields the elements, for the infeed's thread."""
        data = DataPass(self._dataset)
        last = None
        while True:
            try:
                last = next(data)
            except StopIteration:
                break
            except BaseException:
                self._note(num_read=1)  # the thread that asks whether there is more gets the error with it
                raise
            self._note(num_read=1)
            yield last
        self._note(has_ended=True)
        while data.count > 0:
            yield last

    def _note(self, num_read: int = 0, has_ended: bool = False) -> None:
        with self._condition:
            self._num_read += num_read
            self._has_ended = has_ended
            self._condition.notify_all()

    def num_left(self, num_done: int, count: int) -> int:
        """Returns how many of the `wanted` elements after the first `done` are to be run.

        Waits until it is known whether there is one. While the end is not known, all of them are to be run.
        """
        with self._condition:
            while not self._has_ended and self._num_read <= num_done:
                self._condition.wait()
            return self._num_real(num_done, count)

    def num_real(self, num_done: int, count: int) -> int:
        """Returns how many of the `count` elements run after the first `done` are not copies."""
        with self._condition:
            return self._num_real(num_done, count)

    def _num_real(self, num_done: int, count: int) -> int:
        return min(count, self._num_read - num_done) if self._has_ended else count


class Inference:
    """Runs a program over a data set, once."""

    def __init__(
        self,
        program: EstimatorProgram,
        data: PaddedData,
        session: Session,
        hooks: Sequence[SessionRunHook],
        global_step: int,
    ) -> None:
        """Takes what it needs."""
        self._program = program
        self._data = data
        self._runs = Runs(program, session, hooks, global_step)
        self._global_step = global_step
        self._num_done = 0
        self._is_stopped = False
        self._reads: bool | None = None  # whether this process reads the data; None: not known yet

    def stop(self) -> None:
        """Ends `predictions` after the last element that it yielded."""
        self._is_stopped = True

    def evaluate(self, steps: int | None, iterations_per_loop: int) -> dict[str, float]:
        """Returns the metrics over `steps` micro-batches of each replica, or over all.

        Updates of `ipu.metrics` are added up: a mean of the runs' values would be another number, except
        for plain means over runs of one size. Of other numbers the means are taken.
        """
        updates: dict[str, Update] = {}

        def loss_of(outputs: Any) -> float:
            nonlocal updates
            updates = {}
            for count, alike in _split_alike(outputs):
                metrics = self._metrics(alike)
                weighed = {
                    name: _weigh(update, count) if update.kind == _PLAIN else update
                    for name, update in metrics.items()
                }
                updates = _add(updates, weighed)
            return float(updates["loss"].result())

        totals: dict[str, Update] = {}
        for _count, _outputs in self._run_all(steps, iterations_per_loop, loss_of):
            totals = _add(totals, updates)
        return {name: float(total.result()) for name, total in totals.items()}

    def predictions(self, iterations_per_loop: int) -> Iterator[Any]:
        """Yields the last stage's results, per micro-batch: an array, or a dict of arrays."""
        for count, outputs in self._run_all(None, iterations_per_loop, lambda _outputs: float("nan")):
            if isinstance(outputs, (list, tuple)):
                if len(outputs) != 1:
                    raise ValueError(
                        "The last computational stage must return exactly one prediction tensor, but got "
                        f"{len(outputs)}: return one array, or a dict of arrays."
                    )
                (outputs,) = outputs
            for number in range(count):
                yield jax.tree.map(lambda stack, n=number: stack[n], outputs)
                if self._is_stopped:
                    break

    def _run_all(
        self, steps: int | None, iterations_per_loop: int, loss_of: Callable[[Any], float]
    ) -> Iterator[tuple[int, Any]]:
        """Yields, for each run, the number of micro-batches, and outputs stacked over them."""
        num_replicas = self._program.num_replicas
        per_update = self._program.spec.micro_batches_per_update * num_replicas
        with self._runs.started():
            while steps is None or self._num_done < steps * num_replicas:
                self._read_for_run(iterations_per_loop * num_replicas)
                num_left = self._agree(self._data.num_left, iterations_per_loop * num_replicas)
                if num_left == 0:
                    break
                run = self._runs.run(
                    self._global_step,
                    -(-num_left // per_update),
                    loss_of,
                    num_real=lambda count: self._agree(self._data.num_real, count),
                )
                count = len(jax.tree.leaves(run.outputs)[0])
                self._num_done += count
                yield count, run.outputs
                if run.context.stop_requested or self._is_stopped:
                    break

    def _read_for_run(self, count: int) -> None:
        """Reads the elements that a run with synthetic data would, to know how many there are."""
        if uses_synthetic_data() and (processes.current() is None or reads_data(self._program.program)):
            self._program.infeed.connect(lambda leaves: leaves, count, shapes_may_vary=True)(count)
            self._program.infeed.mark()

    def _agree(self, count_elements: Callable[[int, int], int], count: int) -> int:
        """Returns what a method of the data counts from here on, in the processes that read the data."""
        peers = processes.current()
        if peers is None:
            return count_elements(self._num_done, count)
        if self._reads is None:
            self._reads = reads_data(self._program.program)
        num_here = count_elements(self._num_done, count) if self._reads else None
        texts = peers.exchange("the data of an estimator", json.dumps(num_here))
        return min(number for number in map(json.loads, texts) if number is not None)

    def _metrics(self, outputs: Any) -> dict[str, Update]:
        function = self._program.spec.eval_metrics_fn
        metrics = apply_to(function, outputs)
        if not isinstance(metrics, dict):
            raise TypeError(f"The `eval_metrics_fn` must return a dict, but got {type(metrics)}.")
        if "loss" not in metrics:
            raise KeyError(
                "The dict returned from `eval_metrics_fn` must contain 'loss'; it has "
                f"{', '.join(map(repr, metrics)) or 'nothing'}."
            )
        return {name: _as_update(name, value) for name, value in metrics.items()}


def _add(totals: dict[str, Update], updates: dict[str, Update]) -> dict[str, Update]:
    """Adds the metrics of some micro-batches to those of others."""
    if totals and totals.keys() != updates.keys():
        raise ValueError(
            "The `eval_metrics_fn` must return the same metrics in each call; it returned "
            f"{', '.join(map(repr, totals))}, then {', '.join(map(repr, updates))}."
        )
    return {name: totals[name] + update if totals else update for name, update in updates.items()}


def _split_alike(outputs: Any) -> Iterator[tuple[int, Any]]:
    """Yields outputs of micro-batches in a row that have the same shapes, stacked, and their number."""
    leaves, tree = jax.tree.flatten(outputs)
    count = len(leaves[0])
    if not any(leaf.dtype == object for leaf in leaves):
        yield count, outputs
        return
    shapes = [[np.shape(leaf[number]) for leaf in leaves] for number in range(count)]
    first = 0
    for end in range(1, count + 1):
        if end == count or shapes[end] != shapes[first]:
            yield (
                end - first,
                jax.tree.unflatten(tree, [np.stack(list(leaf[first:end])) for leaf in leaves]),
            )
            first = end


_PLAIN = "a mean of runs"


def _as_update(name: str, value: Any) -> Update:
    """Returns the update that `ipu.metrics` gave for a run; makes one of a mean for other numbers."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Update):
        return value[1]
    try:
        number = float(np.mean(np.asarray(value)))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"The metric {name!r} that `eval_metrics_fn` returned must be a number, an array of numbers or "
            f"a pair (value, update) of ipu.metrics; got {value!r}."
        ) from error
    return Update(_PLAIN, {"total": number, "count": 1.0}, lambda sums: sums["total"] / sums["count"])


def _weigh(update: Update, count: int) -> Update:
    """The sums of a mean over `count` micro-batches."""
    return replace(update, sums={name: value * count for name, value in update.sums.items()})

"""Updates tables in host memory during a run: takes the gradients of rows, and applies them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ipu_pipeline.engine import processes
from ipu_pipeline.tf1.program.calls import Call, LoopCall
from ipu_pipeline.tf1.program.host_tables import HostTable, RowGradients
from ipu_pipeline.tf1.program.program import Program
from ipu_pipeline.tf1.session.store import Store

__all__ = ["HostRows", "check_registered", "connected"]


def check_registered(program: Program, session: Any) -> None:
    """Raises if a program that is about to run looks up tables that it may not in this session."""
    for table in program.host_tables:
        name = f"The host embedding {table.spec.name!r}"
        if processes.current() is not None:
            raise NotImplementedError(
                f"{name} is in the memory of one process, and this run has several. Run it in one, or make "
                "the table a variable and shard it: pipeline(replicated_weight_sharding=True)."
            )
        if session not in table.sessions:
            raise RuntimeError(
                f"{name} is not registered with this session. Run the program in a block of `with "
                "host_embedding.register(session):`; with an estimator, a hook enters it: "
                "`host_embedding.register(session).__enter__()` in after_create_session."
            )


@contextlib.contextmanager
def connected(tables: Sequence[HostTable], store: Store) -> Iterator[HostRows]:
    """Lets a program look up its tables, for a `with` block."""
    rows = HostRows(tables, store)
    with contextlib.ExitStack() as stack:
        for table in tables:
            stack.enter_context(table.connected(rows, store.host_array(table.spec)))
        yield rows


@dataclasses.dataclass(frozen=True, eq=False)
class HostRows:
    """The tables that a run uses."""

    tables: Sequence[HostTable]  # the program's tables
    store: Store  # the session's store

    def trained_by(self, call: Call) -> list[HostTable]:
        """The tables that a pipeline or loop trains."""
        if not self.tables or not call.trains:
            return []
        accumulated = call.accumulated
        return [table for table in self.tables if table.marker in accumulated]

    def resume(self, call: Call, num_accumulated: int) -> None:
        """Begins a loop's run, which may go on within a weight update."""
        for table in self.trained_by(call):
            name = table.spec.name
            known = len(self.store.row_gradients.get((call.name, name), ()))
            if table.num_mini_batches == 1 or known == num_accumulated:
                continue
            if num_accumulated:
                raise RuntimeError(
                    f"{call.name!r} is to go on within a weight update, after {num_accumulated} of its "
                    f"iterations. The gradients of the host embedding {name!r} are known for {known} of "
                    "them: checkpoints do not have these. Save where an update is complete, after a "
                    "multiple of its mini-batches."
                )
            del self.store.row_gradients[call.name, name]

    def keep(self, call: Call, is_update: bool) -> None:
        """Takes the gradients of a step."""
        for table in self.trained_by(call):
            place = call.name, table.spec.name
            before = self.store.row_gradients.get(place, []) if isinstance(call, LoopCall) else []
            steps = [*before, table.take()]
            if is_update or table.num_mini_batches == 1:
                array = self.store.host_array(table.spec)
                _descend(table, array, [one for step in steps for one in step])
                steps = []
            if isinstance(call, LoopCall):
                self.store.row_gradients[place] = steps


def _descend(table: HostTable, array: np.ndarray[Any, Any], gradients: Sequence[RowGradients]) -> None:
    """Does SGD on the rows that have gradients, with their sum: in float64, as they come in any order."""
    if not gradients:
        return
    rows, places = np.unique(np.concatenate([one.rows for one in gradients]), return_inverse=True)
    sums = np.zeros((len(rows), array.shape[1]), np.float64)
    np.add.at(sums, places, np.concatenate([one.gradients for one in gradients]).astype(np.float64))
    array[rows] = (array[rows] - table.learning_rate * sums).astype(array.dtype)

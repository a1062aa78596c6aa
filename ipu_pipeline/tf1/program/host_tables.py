"""Tables that stay in host memory: programs look rows up there, and return the rows' gradients.

A lookup is a callback from the program into Python, and so is its derivative, which hands over the rows'
gradients; it exists because of an internal variable, always 0, that is trained with the table. So a table
can be as large as the host's memory; a device has only the rows that a micro-batch asked for. `HostRows`
applies the gradients when the step's state is kept, not in the callback: so all lookups of a step see the
same values, recomputed ones too, and a step that fails leaves the table alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from ipu_pipeline.engine import AUTO_REUSE, VariableSpec, get_variable, variable_scope
from ipu_pipeline.engine.fronts import current_frame
from ipu_pipeline.tf1.graph import HOST_TABLES
from ipu_pipeline.tf1.program.calls import Call, LoopCall


class RowGradients(NamedTuple):
    """The gradients that the backward of one lookup hands over."""

    rows: np.ndarray[Any, Any]  # [n], the numbers of the rows
    gradients: np.ndarray[Any, Any]  # [n, columns], in the table's dtype


@dataclasses.dataclass(eq=False)
class HostTable:
    """A table in host memory."""

    spec: VariableSpec  # its name, shape, dtype and initial value; a session has it among its variables
    learning_rate: float  # its SGD's; 0 if it is not trained
    num_mini_batches: int  # the number whose gradients an update takes
    # the sessions that it is registered with
    sessions: weakref.WeakSet[Any] = dataclasses.field(default_factory=weakref.WeakSet)
    # JAX keeps programs, which have the table, for long: so the table has weak references only.
    _array: weakref.ref[np.ndarray[Any, Any]] | None = None  # the last run's
    _user: weakref.ref[Any] | None = None  # the last run
    _row_gradients: list[RowGradients] = dataclasses.field(default_factory=list)
    _lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    @property
    def marker(self) -> str:
        """The full name of the internal variable that is trained wherever the table is."""
        return f"{HOST_TABLES}/{self.spec.name}"

    def lookup(self, indices: Any, clips: bool) -> jax.Array:
        """Looks up rows, in the function that is being traced; see `HostEmbedding.lookup`."""
        tables = current_frame("HostEmbedding.lookup").names.host_tables
        registered = tables.setdefault(self.spec.name, self)
        if registered is not self:
            raise ValueError(
                f"Two host embeddings of the program are named {self.spec.name!r}. Give one another name."
            )
        ids = jnp.asarray(indices)
        if not jnp.issubdtype(ids.dtype, jnp.integer):
            raise TypeError(f"HostEmbedding.lookup: indices must be integers; got {ids.dtype.name}.")
        if ids.dtype.itemsize < np.dtype(np.int32).itemsize:
            ids = ids.astype(np.int32)  # a narrow dtype may not hold the number of the last row
        if clips:
            ids = jnp.clip(ids, 0, self.spec.shape[0] - 1)
        if self.learning_rate == 0:
            return jax.lax.stop_gradient(self._find(ids))
        with variable_scope(HOST_TABLES, reuse=AUTO_REUSE):
            marker = get_variable(self.spec.name, (), self.spec.dtype, jax.nn.initializers.zeros)
        return self._find_trained(marker, ids)

    def _find(self, ids: jax.Array) -> jax.Array:
        shape = jax.ShapeDtypeStruct((*ids.shape, self.spec.shape[1]), self.spec.dtype)
        rows: jax.Array = jax.pure_callback(self._read_rows, shape, ids, vmap_method="expand_dims")
        return rows

    def _find_trained(self, marker: jax.Array, ids: jax.Array) -> jax.Array:
        @jax.custom_vjp
        def find(marker: jax.Array, ids: jax.Array) -> jax.Array:
            del marker
            return self._find(ids)

        def forward(marker: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
            return find(marker, ids), ids

        def backward(ids: jax.Array, cotangents: jax.Array) -> tuple[jax.Array, None]:
            zero = jax.ShapeDtypeStruct((), self.spec.dtype)
            return io_callback(self._receive_gradients, zero, ids, cotangents), None

        find.defvjp(forward, backward)
        rows: jax.Array = find(marker, ids)
        return rows

    def _read_rows(self, ids: Any) -> np.ndarray[Any, Any]:
        array = None if self._array is None else self._array()
        if array is None:
            raise RuntimeError(f"The host embedding {self.spec.name!r} is looked up outside of a run.")
        return np.take(array, self._checked(ids), axis=0)

    def _checked(self, ids: Any) -> np.ndarray[Any, Any]:
        rows, number = np.asarray(ids), self.spec.shape[0]
        outside = (rows < 0) | (rows >= number)
        if outside.any():
            raise IndexError(
                f"The host embedding {self.spec.name!r} has {number} rows, and row {rows[outside][0]} was "
                "looked up. Mend the data, or look up with clip_indices=True."
            )
        return rows

    def _receive_gradients(self, ids: Any, cotangents: Any) -> np.ndarray[Any, Any]:
        # The arguments may be the program's memory, so they are copied. XLA leaves out a lookup whose rows
        # are not used, so they are checked here, too.
        rows = self._checked(np.array(ids)).reshape(-1)
        gradients = np.array(cotangents).reshape(len(rows), self.spec.shape[1])
        with self._lock:
            self._row_gradients.append(RowGradients(rows, gradients))
        return np.zeros((), self.spec.dtype)

    @contextlib.contextmanager
    def connected(self, user: Any, array: np.ndarray[Any, Any]) -> Iterator[None]:
        """Lets programs look rows up, for a `with` block."""
        with self._lock:
            user_before = None if self._user is None else self._user()
            if user_before is not None:
                raise RuntimeError(
                    f"The host embedding {self.spec.name!r} is used by a run of another session. Let one "
                    "run after the other, or make another HostEmbedding for the second one's programs."
                )
            self._user, self._array, self._row_gradients = weakref.ref(user), weakref.ref(array), []
        try:
            yield
        except BaseException:
            with contextlib.suppress(Exception):
                jax.effects_barrier()  # callbacks that are still running would come in the next run
            raise
        finally:
            self._user = None

    def take(self) -> list[RowGradients]:
        """Returns the gradients since the last call."""
        with self._lock:
            row_gradients, self._row_gradients = self._row_gradients, []
        return row_gradients


def check_tables(tables: Sequence[HostTable], call: Call, count: int | None) -> None:
    """Raises if a pipeline or loop cannot train tables in host memory as these specify."""
    if not tables or not call.trains:
        return
    accumulated = call.accumulated
    for table in tables:
        if table.marker not in accumulated:
            continue
        name, num_mini_batches = f"The host embedding {table.spec.name!r}", table.num_mini_batches
        assert call.runner.built.updates is not None
        if call.runner.built.updates.loss_scale is not None:
            raise NotImplementedError(
                f"{name} is trained by {call.name!r}, whose optimizer scales the loss; the gradients of "
                "its rows would be scaled, too. Use an optimizer without loss scaling."
            )
        if num_mini_batches == 1 and isinstance(call, LoopCall):
            continue
        if count is None or num_mini_batches == count:
            continue
        raise ValueError(
            f"{name} has the gradients of {num_mini_batches} mini-batches in an update, but {call.name!r} "
            f"has {count}. "
            "Give it optimizer_spec=HostEmbeddingSGDGAOptimizerSpec("
            f"{table.learning_rate!r}, {count})."
        )

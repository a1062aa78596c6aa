"""Looks up rows of tables by number, on devices or on the host, as in Graphcore's `ipu.embedding_ops`."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.engine.fronts import find_initializer, make_spec
from ipu_pipeline.graphcore.sdk_names import explain_missing
from ipu_pipeline.ground.checks import check_name, is_integer
from ipu_pipeline.ground.user_warnings import warn_once
from ipu_pipeline.tf1.graph import HostVariable
from ipu_pipeline.tf1.program.host_tables import HostTable
from ipu_pipeline.tf1.session.session import Session

__all__ = [
    "HostEmbedding",
    "HostEmbeddingOptimizerSpec",
    "HostEmbeddingSGDGAOptimizerSpec",
    "create_host_embedding",
    "embedding_lookup",
]

PartitionStrategy: TypeAlias = Literal["TOKEN", "ENCODING"]


def embedding_lookup(
    params: Any,
    ids: Any,
    name: str | None = None,
    serialization_factor: int = 1,
    indices_are_sorted: bool = False,
    *,
    one_hot_threshold: int | None = None,
    min_encoding_size: int | None = None,
) -> jax.Array:
    """Looks up rows of a table.

    Example:
      >>> table = np.arange(6, dtype=np.float32).reshape(3, 2)
      >>> ipu.embedding_ops.embedding_lookup(table, np.array([2, 0]))
      Array([[4., 5.], [0., 1.]], dtype=float32)

    Args:
      params: [rows, ...], the table.
      ids: integers of any shape, from 0 and less than the number of rows. The result for other numbers is
        undefined.
      name: the name of an operation in TensorFlow; not used here.
      serialization_factor: into how many parts IPUs cut the lookup to save memory; above 1 warns.
      indices_are_sorted: whether the numbers ascend, which XLA may use.
      one_hot_threshold: how IPUs looked rows up, in SDKs before 2.0; warns.
      min_encoding_size: same as `one_hot_threshold`.

    Returns:
      [*ids.shape, *params.shape[1:]].

    Raises:
      TypeError: the numbers are not integers.
      ValueError: the factor does not divide the number of rows.
    """
    del name
    params, ids = jnp.asarray(params), jnp.asarray(ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"embedding_lookup: ids must be integers; got {ids.dtype.name}.")
    if params.ndim < 1:
        raise ValueError("embedding_lookup: params must be a table, [rows, ...]; got a scalar.")
    if serialization_factor < 1 or params.shape[0] % serialization_factor:
        older = " SDKs before 2.0 had one_hot_threshold there: pass it by name, or leave it out."
        raise ValueError(
            f"embedding_lookup: serialization_factor must divide the {params.shape[0]} rows; got "
            f"{serialization_factor}.{older if serialization_factor == 0 else ''}"
        )
    for option, is_passed in (
        ("one_hot_threshold", one_hot_threshold is not None),
        ("min_encoding_size", min_encoding_size is not None),
        ("serialization_factor", serialization_factor > 1),
    ):
        if is_passed:
            warn_once(
                f"embedding_lookup.{option}",
                f"embedding_lookup: {option} has no effect: XLA looks rows up where they are.",
            )
    return jnp.take(params, ids, axis=0, mode="clip", indices_are_sorted=indices_are_sorted)


class HostEmbeddingOptimizerSpec:
    """The training of a table in host memory: by SGD, after every mini-batch.

    Example:
      >>> training = ipu.embedding_ops.HostEmbeddingOptimizerSpec(learning_rate=0.1)
      >>> embedding = ipu.embedding_ops.create_host_embedding(
      ...     "words", [1000, 4], np.float32, optimizer_spec=training
      ... )
    """

    def __init__(self, learning_rate: float, optimizer_name: str | None = None) -> None:
        """Takes the settings of the training.

        Args:
          learning_rate: at least 0; 0 does not train it.
          optimizer_name: None or "SGD", the only one.

        Raises:
          TypeError, ValueError: the rate is not such a number, or the name is another optimizer's.
        """
        kind = type(self).__name__
        is_number = isinstance(learning_rate, (int, float, np.floating, np.integer))
        if isinstance(learning_rate, bool) or not is_number:
            raise TypeError(
                f"{kind}: learning_rate must be a number, as the host computes the update; got "
                f"{type(learning_rate).__name__}."
            )
        if not (math.isfinite(learning_rate) and learning_rate >= 0):
            raise ValueError(f"{kind}: learning_rate must be finite and at least 0; got {learning_rate}.")
        if optimizer_name not in (None, "SGD"):
            raise ValueError(
                f"{kind}: optimizer_name must be None or 'SGD'; got {optimizer_name!r}. "
                "HostEmbeddingSGDGAOptimizerSpec accumulates gradients."
            )
        self._learning_rate = float(learning_rate)

    def get_learning_rate(self) -> float:
        """The learning rate."""
        return self._learning_rate

    def get_accumulation_factor(self) -> int:
        """The number of mini-batches whose gradients an update takes."""
        return 1


class HostEmbeddingSGDGAOptimizerSpec(HostEmbeddingOptimizerSpec):
    """The training of a table in host memory with accumulated gradients: by SGD, with their sum.

    A table that a pipeline uses needs it, with the pipeline's `gradient_accumulation_count`.
    """

    def __init__(self, learning_rate: float, accumulation_factor: int) -> None:
        """Takes the settings of the training.

        Args:
          learning_rate: at least 0. It is multiplied with the sum of the gradients of all mini-batches and
            replicas, whatever `reduction_method` the optimizer of the other variables has.
          accumulation_factor: the number of mini-batches in an update, the same as for that optimizer.

        Raises:
          TypeError, ValueError: the rate or the factor is not such a number.
        """
        super().__init__(learning_rate)
        if not is_integer(accumulation_factor):
            raise TypeError(
                "HostEmbeddingSGDGAOptimizerSpec: accumulation_factor must be an integer; got "
                f"{accumulation_factor!r}."
            )
        if accumulation_factor < 1:
            raise ValueError(
                "HostEmbeddingSGDGAOptimizerSpec: accumulation_factor must be at least 1; got "
                f"{accumulation_factor}."
            )
        self._accumulation_factor = int(accumulation_factor)

    def get_accumulation_factor(self) -> int:
        """The number of mini-batches whose gradients an update takes."""
        return self._accumulation_factor


@dataclasses.dataclass(frozen=True, eq=False)
class _Registration:
    """A `with` block in which a session runs programs that look up rows of a table in host memory.

    Attributes:
      embedding: the embedding.
      table: its table.
      session: the session.
    """

    embedding: HostEmbedding
    table: HostTable
    session: Session

    def __enter__(self) -> HostEmbedding:
        """Registers the embedding."""
        if self.session in self.table.sessions:
            raise RuntimeError(
                f"The host embedding {self.table.spec.name!r} is registered with this session already, "
                "in a block that has not ended."
            )
        self.table.sessions.add(self.session)
        return self.embedding

    def __exit__(self, *error: object) -> None:
        """Ends the registration."""
        self.table.sessions.discard(self.session)


class HostEmbedding:
    """A table in host memory: devices only get the rows that they look up.

    A session has the table among its variables, as a NumPy array under the embedding's name: it is saved,
    restored and loaded with them. It is trained on the host, by SGD, once a step is done on the devices, so
    all lookups of a step see the same values. It is in one process.

    Example:
      >>> embedding = ipu.embedding_ops.create_host_embedding("words", [1000, 4], np.float32)
      >>> def model(ids):
      ...     return embedding.lookup(ids)
      >>> with ipu.scopes.ipu_scope("/device:IPU:0"):
      ...     program = ipu.ipu_compiler.compile(model, [np.array([7, 999])])
      >>> with ipu.Session() as session, embedding.register(session):
      ...     (rows,) = session.run(program)
      >>> rows.shape
      (2, 4)
    """

    def __init__(
        self,
        name: str,
        embedding_tensor: Any,
        partition_strategy: PartitionStrategy = "TOKEN",
        optimizer_spec: HostEmbeddingOptimizerSpec | None = None,
    ) -> None:
        """Takes a table; `create_host_embedding` makes one from a shape.

        Args:
          name: the full name of the table among the session's variables.
          embedding_tensor: [rows, columns], its initial values, of a floating-point dtype.
          partition_strategy: "TOKEN" or "ENCODING", the way in which IPUs divided a table in their remote
            memory; the latter warns.
          optimizer_spec: how it is trained. None: it is not trained.

        Raises:
          ValueError: an argument is not usable.
        """
        check_name("HostEmbedding: name", name)
        if isinstance(embedding_tensor, HostVariable):
            spec = embedding_tensor.spec
        else:
            array = np.array(embedding_tensor)
            spec = make_spec(name, array.shape, array.dtype, None, True)
            initializer: Any = lambda *_arguments: array  # noqa: E731
            spec = dataclasses.replace(spec, initializer=initializer)
        if len(spec.shape) != 2 or 0 in spec.shape or not jnp.issubdtype(spec.dtype, jnp.floating):
            raise ValueError(
                "HostEmbedding: the table must be [rows, columns] of floating-point numbers, with at least "
                f"one of each; got {spec.dtype.name}{list(spec.shape)}."
            )
        if partition_strategy not in get_args(PartitionStrategy):
            raise ValueError(
                "HostEmbedding: partition_strategy must be 'TOKEN' or 'ENCODING'; got "
                f"{partition_strategy!r}."
            )
        if partition_strategy == "ENCODING":
            warn_once(
                "HostEmbedding.partition_strategy",
                "HostEmbedding: partition_strategy has no effect: the table is whole, in host memory.",
            )
        if optimizer_spec is None:
            optimizer_spec = HostEmbeddingOptimizerSpec(0)
        elif not isinstance(optimizer_spec, HostEmbeddingOptimizerSpec):
            raise ValueError(
                "HostEmbedding: optimizer_spec must be a HostEmbeddingOptimizerSpec or None; got "
                f"{type(optimizer_spec).__name__}."
            )
        self._table = HostTable(
            dataclasses.replace(spec, name=name, is_on_host=True),
            optimizer_spec.get_learning_rate(),
            optimizer_spec.get_accumulation_factor(),
        )

    def get_embedding_tensor(self) -> HostVariable:
        """Returns an operation for `Session.run`, which gets a copy of the table."""
        return HostVariable(self._table.spec)

    def register(self, session: Session | None = None) -> _Registration:
        """Lets a session run programs that look rows up, for a `with` block.

        Args:
          session: the session.

        Returns:
          A context manager for a `with` statement, which gives the embedding. A hook of an estimator enters
          it by `__enter__()` in `after_create_session`; it then lasts as long as the session, or until its
          `__exit__`.

        Raises:
          ValueError: `session` is not a session. Entering raises RuntimeError if the embedding is
            registered with the session already.
        """
        if not isinstance(session, Session):
            raise ValueError(f"HostEmbedding.register requires an ipu_pipeline.Session; got {session!r}.")
        return _Registration(self, self._table, session)

    def lookup(self, indices: Any, clip_indices: bool = True) -> jax.Array:
        """Looks up rows of the table, in a function that is being compiled.

        Args:
          indices: integers of any shape.
          clip_indices: whether numbers below 0 or beyond the last row stand for the first and last row. If
            not, such a number ends the run with an error that names it.

        Returns:
          [*indices.shape, columns].

        Raises:
          RuntimeError: nothing is being compiled.
          TypeError: the indices are not integers.
          ValueError: another host embedding or variable of the program has the name.
        """
        return self._table.lookup(indices, clip_indices)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Not available; the first SDKs had it.

        Raises:
          NotImplementedError: always.
        """
        raise NotImplementedError(
            "HostEmbedding.__call__ is not supported. Run programs in a block of "
            "`with host_embedding.register(session):`, and read the table by "
            "session.run(host_embedding.get_embedding_tensor())."
        )


def create_host_embedding(
    name: str,
    shape: Any,
    dtype: Any,
    partition_strategy: PartitionStrategy = "TOKEN",
    optimizer_spec: HostEmbeddingOptimizerSpec | None = None,
    initializer: Any = None,
) -> HostEmbedding:
    """Makes a table in host memory.

    Example:
      >>> training = ipu.embedding_ops.HostEmbeddingSGDGAOptimizerSpec(0.1, accumulation_factor=8)
      >>> embedding = ipu.embedding_ops.create_host_embedding(
      ...     "words", [1000, 4], np.float32, optimizer_spec=training
      ... )

    Args:
      name: the full name of the table among the session's variables.
      shape: [rows, columns].
      dtype: a floating-point dtype.
      partition_strategy: see `HostEmbedding`.
      optimizer_spec: how it is trained. None: it is not trained.
      initializer: same as for `get_variable`; None: Glorot uniform. It runs on the CPU.

    Raises:
      ValueError: an argument is not usable.
    """
    initializer = find_initializer(initializer) if initializer is not None else None
    spec = make_spec(name, shape, dtype, initializer, True)
    return HostEmbedding(name, HostVariable(spec), partition_strategy, optimizer_spec)


explain_missing(__name__)

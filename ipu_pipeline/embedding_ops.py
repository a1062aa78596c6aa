"""Rows of a table by their numbers, as Graphcore's `ipu.embedding_ops` has them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ipu_pipeline.config_categories import warn_once
from ipu_pipeline.graphcore.importing import explain_missing

__all__ = ["embedding_lookup"]


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
    """The rows of a table.

    Args:
      params: [rows, ...], the table.
      ids: integers of any shape, each from 0 and less than the number of rows. Beyond, what comes is
        undefined.
      name: of an operation in TensorFlow; nothing is called so here.
      serialization_factor: into how many parts IPUs cut the lookup to save memory; above 1 warns.
      indices_are_sorted: whether the numbers ascend, which XLA may use.
      one_hot_threshold: of SDKs before 2.0: how IPUs looked rows up; warns.
      min_encoding_size: likewise.

    Returns:
      [*ids.shape, *params.shape[1:]].

    Raises:
      TypeError: the numbers are no integers.
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
    for option, value in (
        ("one_hot_threshold", one_hot_threshold),
        ("min_encoding_size", min_encoding_size),
    ):
        if value is not None:
            warn_once(
                f"embedding_lookup.{option}",
                f"embedding_lookup: {option} has no effect: XLA looks rows up where they are.",
            )
    if serialization_factor > 1:
        warn_once(
            "embedding_lookup.serialization_factor",
            "embedding_lookup: serialization_factor has no effect: XLA looks rows up where they are.",
        )
    return jnp.take(params, ids, axis=0, mode="clip", indices_are_sorted=indices_are_sorted)


explain_missing(__name__)

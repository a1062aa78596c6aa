"""Snapshots of a training for checkpoints: records of its state, as arrays by name and a JSON document."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.ground.pytrees import is_readable
from ipu_pipeline.queues.feeder import Position


@dataclass(frozen=True, eq=False)
class KeptOptimizer:
    """An optimizer's state: its leaves by path, and the pytree that they are the leaves of."""

    shapes: dict[str, jax.ShapeDtypeStruct]
    tree: Any

    def find_differences(self, shapes: Mapping[str, jax.ShapeDtypeStruct]) -> list[str]:
        """The paths at which another optimizer's state, given by its `shapes`, differs from this one."""
        paths = shapes.keys() | self.shapes.keys()
        return sorted(path for path in paths if shapes.get(path) != self.shapes.get(path))


@dataclass(frozen=True, eq=False)
class KeptGradients:
    """Gradients of a loop's iterations since its last weight update, and how they were accumulated."""

    settings: str
    accumulators: dict[str, Any]
    count: int


@dataclass(frozen=True, eq=False)
class Record:
    """The state that the session keeps under the name of a pipeline, or of a loop's optimizer."""

    optimizer: KeptOptimizer | None = None
    update_count: int = 0
    execution_count: int = 0
    accumulated: KeptGradients | None = None


@dataclass(frozen=True, eq=False)
class SessionState:
    """Everything that runs change. Replaced whole, so that an interrupt finds the old or the new one."""

    variables: dict[str, Any] = field(default_factory=dict)
    pipelines: dict[str, Record] = field(default_factory=dict)

    @property
    def arrays(self) -> Any:
        """All arrays, as a pytree."""
        return self.variables, [_arrays_of(record) for record in self.pipelines.values()]

    def with_arrays(self, arrays: Any) -> SessionState:
        """A copy with other arrays, in the structure of `arrays`."""
        variables, new_arrays = arrays
        records = map(_with_arrays, self.pipelines.values(), new_arrays)
        return SessionState(variables, dict(zip(self.pipelines, records, strict=True)))


def _arrays_of(record: Record) -> tuple[Any, Any]:
    """The optimizer's state and the accumulators."""
    return (
        None if record.optimizer is None else record.optimizer.tree,
        None if record.accumulated is None else record.accumulated.accumulators,
    )


def _with_arrays(record: Record, arrays: tuple[Any, Any]) -> Record:
    """The inverse of `_arrays_of`."""
    tree, accumulators = arrays
    optimizer, accumulated = record.optimizer, record.accumulated
    if optimizer is not None:
        optimizer = dataclasses.replace(optimizer, tree=tree)
    if accumulated is not None:
        accumulated = dataclasses.replace(accumulated, accumulators=accumulators)
    return dataclasses.replace(record, optimizer=optimizer, accumulated=accumulated)


# Nothing in a checkpoint depends on how a model is cut into stages, on schedules or on devices. Variables
# go by their full names; optimizer state by the pipeline's name and its path in the Optax state, where
# parameters are one flat dict by full name.

_KEY = "key "
FORMAT = "ipu_pipeline checkpoint"
VERSION = 1


@dataclass(frozen=True)
class FeedPosition:
    """The position of a data set, with the names of the pipelines that share its infeed."""

    pipelines: tuple[str, ...]
    position: Position


@dataclass(frozen=True, eq=False)
class Parts:
    """The parts of an array that a process writes, and their places in it.

    Attributes:
      shape, dtype: the array's.
      described: the array, as `describe_array` has it.
      begins: the places in the array at which the parts begin.
      parts: arrays that nothing else changes; for random keys, their data.
      are_rows: whether the parts lack the first axis, along which each has one row.
    """

    shape: tuple[int, ...]
    dtype: Any
    described: str
    begins: tuple[tuple[int, ...], ...]
    parts: tuple[Any, ...]
    are_rows: bool = False


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The state of a session, and the positions of its data sets."""

    # Variables and optimizer states: NumPy arrays, or JAX arrays that nothing else holds. In a process that
    # does not write an array, its shape and dtype.
    state: SessionState
    seed: int  # the session's
    key_implementation: str  # the kind of its random keys
    feeds: tuple[FeedPosition, ...] = ()  # the positions of the data sets
    extra: dict[str, Any] = field(default_factory=dict)  # other data that belongs to it, as JSON

    def arrays(self) -> dict[str, Any]:
        """All arrays, in nested dicts: variables; optimizer and accumulated, both by pipeline."""
        pipelines = self.state.pipelines.items()
        optimizers = {
            name: dict(zip(optimizer.shapes, jax.tree.leaves(optimizer.tree), strict=True))
            for name, record in pipelines
            if (optimizer := record.optimizer) is not None
        }
        accumulated = {
            name: dict(record.accumulated.accumulators)
            for name, record in pipelines
            if record.accumulated is not None
        }
        return {
            "variables": dict(self.state.variables),
            "optimizer": optimizers,
            "accumulated": accumulated,
        }

    def describe_feeds(self) -> list[dict[str, Any]]:
        """The positions of the data sets, as JSON."""
        return [
            {"pipelines": list(feed.pipelines), **dataclasses.asdict(feed.position)} for feed in self.feeds
        ]

    def document(self) -> dict[str, Any]:
        """Everything else, as JSON."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "seed": self.seed,
            "key_implementation": self.key_implementation,
            "arrays": jax.tree.map(describe_array, self.arrays()),
            "pipelines": {name: _describe_record(record) for name, record in self.state.pipelines.items()},
            "feeds": self.describe_feeds(),
            "extra": self.extra,
        }

    @classmethod
    def of(cls, document: Mapping[str, Any], arrays: Mapping[str, Any]) -> Snapshot:
        """The inverse of `document` and `arrays`.

        Raises:
          ValueError: it is from another library, or from a later version of this one.
        """
        if document.get("format") != FORMAT:
            raise ValueError(
                f"it is no checkpoint of this library: its format is {document.get('format')!r}."
            )
        if document["version"] != VERSION:
            raise ValueError(
                f"it has version {document['version']} of the format; this library reads version {VERSION}."
            )
        records = {
            name: _make_record(
                described, arrays["optimizer"].get(name, {}), arrays["accumulated"].get(name, {})
            )
            for name, described in document["pipelines"].items()
        }
        feeds = [
            FeedPosition(tuple(feed.pop("pipelines")), Position(**feed))
            for feed in map(dict, document["feeds"])
        ]
        return cls(
            SessionState(dict(arrays["variables"]), records),
            document["seed"],
            document["key_implementation"],
            tuple(feeds),
            document["extra"],
        )


def is_own(value: Any) -> bool:
    """Whether this process has an array and writes it. If several processes have it, one writes it."""
    return not isinstance(value, jax.ShapeDtypeStruct) and is_readable(value)


def describe_array(value: Any) -> str:
    """Dtype and shape, such as float32[3, 4]; for random keys their kind, such as "key threefry2x32[]"."""
    if isinstance(value, Parts):
        return value.described
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return f"{_KEY}{jax.random.key_impl(value)}{list(value.shape)}"
    return f"{np.dtype(value.dtype).name}{list(value.shape)}"


def parse_array(text: str) -> jax.ShapeDtypeStruct:
    """The inverse of `describe_array`, for arrays other than random keys."""
    dtype, _bracket, shape = text.partition("[")
    return jax.ShapeDtypeStruct(tuple(json.loads("[" + shape)), np.dtype(dtype))


def to_numpy(value: Any) -> np.ndarray[Any, Any]:
    """An array as it is stored in files; for random keys, their data."""
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return np.asarray(value)


def from_numpy(stored: Any, described: str) -> Any:
    """The inverse of `to_numpy` and `describe_array`; an array that is not stored has size 0."""
    if stored is None:
        shape = parse_array(described)
        return np.zeros(shape.shape, shape.dtype)
    if described.startswith(_KEY):
        kind = described.removeprefix(_KEY).partition("[")[0]
        return jax.random.wrap_key_data(jnp.asarray(stored), impl=kind)
    array = np.asarray(stored)
    # NumPy's files do not know the dtypes that JAX adds, such as bfloat16, only their bytes.
    return array.view(parse_array(described).dtype) if array.dtype.kind == "V" else array


def furthest(feeds: Iterable[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The furthest position of each data set that any process reports; only processes that read it know."""
    feeds_by_pipelines: dict[tuple[str, ...], dict[str, Any]] = {}
    for feed in itertools.chain(*feeds):
        furthest_feed = feeds_by_pipelines.setdefault(tuple(feed["pipelines"]), feed)
        if (feed["count"], feed["has_ended"]) > (furthest_feed["count"], furthest_feed["has_ended"]):
            feeds_by_pipelines[tuple(feed["pipelines"])] = feed
    return list(feeds_by_pipelines.values())


def find_differences(saved: Mapping[str, str], expected: Mapping[str, str]) -> list[str]:
    """Says, in sentences, how a checkpoint's variables differ from the programs'."""
    missing = sorted(name for name in expected if name not in saved)
    surplus = sorted(name for name in saved if name not in expected)
    different = [
        f"{name} is {saved[name]}, not {expected[name]}"
        for name in sorted(saved.keys() & expected.keys())
        if saved[name] != expected[name]
    ]
    lists: Sequence[tuple[str, list[str]]] = (
        ("missing in the checkpoint", missing),
        ("extra in the checkpoint", surplus),
        ("of another shape or dtype", different),
    )
    return [f"{kind}: {', '.join(names)}." for kind, names in lists if names]


def _describe_record(record: Record) -> dict[str, Any]:
    accumulated = record.accumulated
    return {
        "update_count": record.update_count,
        "execution_count": record.execution_count,
        "optimizer": None if record.optimizer is None else list(record.optimizer.shapes),  # in order
        "accumulated": None
        if accumulated is None
        else {"settings": accumulated.settings, "count": accumulated.count},
    }


def _make_record(
    described: Mapping[str, Any], optimizer: Mapping[str, Any], accumulators: Mapping[str, Any]
) -> Record:
    kept_optimizer = gradients = None
    if described["optimizer"] is not None:
        leaves = {path: optimizer[path] for path in described["optimizer"]}
        shapes = {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in leaves.items()}
        kept_optimizer = KeptOptimizer(shapes, list(leaves.values()))
    if described["accumulated"] is not None:
        gradients = KeptGradients(**described["accumulated"], accumulators=dict(accumulators))
    return Record(kept_optimizer, described["update_count"], described["execution_count"], gradients)

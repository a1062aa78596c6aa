"""States by name: what a session keeps, and what a checkpoint has, on disk or in memory."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.ground.pytrees import is_readable
from ipu_pipeline.queues.feeder import Position

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


@dataclass(frozen=True)
class Counts:
    """The counts of a pipeline, or of a loop's optimizer.

    Attributes:
      update_count: the weight updates.
      execution_count: the runs.
      num_accumulated: the iterations of a loop since its last weight update.
      accumulation: how their gradients were accumulated.
    """

    update_count: int = 0
    execution_count: int = 0
    num_accumulated: int = 0
    accumulation: str = ""


@dataclass(frozen=True, eq=False)
class State:
    """Everything that training changes, by name. Replaced whole: an interrupt finds the old or the new one.

    Nothing in it depends on how a model is cut into stages, on schedules or on devices. In a snapshot,
    arrays are NumPy's, or JAX's that nothing else holds, or `Parts`; in a process that does not write one,
    its shape and dtype.

    Attributes:
      seed: the session's.
      key_implementation: the kind of its random keys; None for JAX's default.
      variables: full name -> array.
      optimizers: name of a pipeline, or of a loop's optimizer -> path in the Optax state, in which
        parameters are one flat dict by full name -> array.
      accumulators: such a name -> key -> sums or means of gradients since the last weight update.
      counts: such a name -> its counts.
      feeds: in a snapshot, the positions of the data sets.
      extra: in a snapshot, other data that belongs to it, as JSON.
    """

    seed: int
    key_implementation: str | None = None
    variables: dict[str, Any] = field(default_factory=dict)
    optimizers: dict[str, dict[str, Any]] = field(default_factory=dict)
    accumulators: dict[str, dict[str, Any]] = field(default_factory=dict)
    counts: dict[str, Counts] = field(default_factory=dict)
    feeds: tuple[FeedPosition, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)

    def arrays(self) -> dict[str, Any]:
        """All arrays, in nested dicts."""
        return {
            "variables": self.variables,
            "optimizer": self.optimizers,
            "accumulated": self.accumulators,
        }

    def replace_arrays(self, change: Callable[[list[Any]], Iterable[Any]]) -> State:
        """The state with the arrays that a function makes of the list of all."""
        groups = [self.variables, *self.optimizers.values(), *self.accumulators.values()]
        new_arrays = iter(change([array for group in groups for array in group.values()]))

        def refill(group: dict[str, Any]) -> dict[str, Any]:
            return dict(zip(group, new_arrays, strict=False))

        return dataclasses.replace(
            self,
            variables=refill(self.variables),
            optimizers={name: refill(group) for name, group in self.optimizers.items()},
            accumulators={name: refill(group) for name, group in self.accumulators.items()},
        )

    def describe_feeds(self) -> list[dict[str, Any]]:
        """The positions of the data sets, as JSON."""
        return [
            {"pipelines": list(feed.pipelines), **dataclasses.asdict(feed.position)} for feed in self.feeds
        ]

    def document(self) -> dict[str, Any]:
        """Everything but the arrays, as JSON."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "seed": self.seed,
            "key_implementation": self.key_implementation,
            "arrays": jax.tree.map(describe_array, self.arrays()),
            "pipelines": {name: self._describe_pipeline(name) for name in self.counts},
            "feeds": self.describe_feeds(),
            "extra": self.extra,
        }

    def _describe_pipeline(self, name: str) -> dict[str, Any]:
        counts, optimizer = self.counts[name], self.optimizers.get(name)
        accumulated = {"settings": counts.accumulation, "count": counts.num_accumulated}
        return {
            "update_count": counts.update_count,
            "execution_count": counts.execution_count,
            "optimizer": None if optimizer is None else list(optimizer),  # in order
            "accumulated": accumulated if name in self.accumulators else None,
        }

    @classmethod
    def of(cls, document: Mapping[str, Any], arrays: Mapping[str, Any]) -> State:
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
        optimizers, accumulators, counts = {}, {}, {}
        for name, described in document["pipelines"].items():
            if (paths := described["optimizer"]) is not None:
                leaves = arrays["optimizer"].get(name, {})
                optimizers[name] = {path: leaves[path] for path in paths}
            if (accumulated := described["accumulated"]) is not None:
                accumulators[name] = dict(arrays["accumulated"].get(name, {}))
            accumulated = accumulated or {"count": 0, "settings": ""}
            counts[name] = Counts(
                described["update_count"],
                described["execution_count"],
                accumulated["count"],
                accumulated["settings"],
            )
        feeds = [
            FeedPosition(tuple(feed.pop("pipelines")), Position(**feed))
            for feed in map(dict, document["feeds"])
        ]
        return cls(
            document["seed"],
            document["key_implementation"],
            dict(arrays["variables"]),
            optimizers,
            accumulators,
            counts,
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


def find_different_leaves(
    leaves: Mapping[str, Any], shapes: Mapping[str, jax.ShapeDtypeStruct]
) -> list[str]:
    """The paths at which an optimizer's state differs from another one, given by its shapes and dtypes."""
    different = leaves.keys() ^ shapes.keys()
    for path in leaves.keys() & shapes.keys():
        leaf, shape = leaves[path], shapes[path]
        if leaf.shape != shape.shape or leaf.dtype != shape.dtype:
            different.add(path)
    return sorted(different)


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

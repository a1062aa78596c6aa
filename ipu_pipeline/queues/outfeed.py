"""The outfeed: copies enqueued values to the host, and keeps them until they are dequeued."""

from __future__ import annotations

import collections
import enum
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipu_pipeline.engine.fronts import enqueue_to
from ipu_pipeline.ground.checks import check_int, check_member
from ipu_pipeline.ground.pytrees import as_objects, describe, describe_structure, is_readable
from ipu_pipeline.queues.queue_arguments import take_arguments
from ipu_pipeline.queues.synthetic_data import uses_synthetic_data


class Operation:
    """The result of `pipeline`, `minimize` and `enqueue`: it can be run, and has no value."""

    def __init__(self, name: str) -> None:
        """Names the operation."""
        self.name = name


class IPUOutfeedMode(enum.Enum):
    """ALL keeps every element until it is dequeued; LAST keeps only the last one.

    Example:
      >>> mode = ipu.ipu_outfeed_queue.IPUOutfeedMode.LAST
      >>> outfeed_queue = ipu.ipu_outfeed_queue.IPUOutfeedQueue(outfeed_mode=mode)
    """

    ALL = "all"
    LAST = "get_last"


class OutfeedOperation:
    """An operation for `Session.run` that empties an outfeed.

    Example:
      >>> outfeed_queue = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
      >>> isinstance(outfeed_queue.dequeue(), ipu.ipu_outfeed_queue.OutfeedOperation)
      True
    """

    def __init__(self, queue: IPUOutfeedQueue) -> None:
        """Is called by `IPUOutfeedQueue.dequeue`."""
        self.queue = queue


@dataclass(frozen=True, eq=False)
class _Part:
    """Elements that were enqueued together; see `IPUOutfeedQueue.extend`."""

    leaves: list[Any]
    size: int | None

    @property
    def num_elements(self) -> int:
        return 1 if self.size is None else self.size

    def copy_async(self) -> None:
        for leaf in self.leaves:
            if isinstance(leaf, jax.Array):
                leaf.copy_to_host_async()

    def is_ready(self) -> bool:
        return all(map(_is_ready, self.leaves))

    def on_host(self) -> _Part:
        return _Part([np.asarray(leaf) for leaf in self.leaves], self.size)

    def stacked(self) -> list[Any]:
        """The leaves with a first axis over elements, even if there is only one."""
        if self.size is None:
            return [leaf[np.newaxis] for leaf in self.leaves]
        return [leaf[: self.size] for leaf in self.leaves]


class IPUOutfeedQueue:
    """Collects a pipeline's results or losses, or the values that stages and loops enqueue.

    Example:
      >>> outfeed_queue = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
      >>> def body(number):
      ...     return 2 * number, outfeed_queue.enqueue(number)
      >>> def model():
      ...     return ipu.loops.repeat(4, body, [np.float32(1)])
      >>> with ipu.scopes.ipu_scope("/device:IPU:0"):
      ...     program = ipu.ipu_compiler.compile(model)
      >>> with ipu.Session() as session:
      ...     _ = session.run(program)
      ...     session.run(outfeed_queue.dequeue())  # all since the last dequeue
      array([1., 2., 4., 8.], dtype=float32)
    """

    def __init__(
        self,
        *positions: Any,
        outfeed_mode: IPUOutfeedMode | None = None,
        buffer_depth: int | None = None,
        feed_name: str | None = None,
        device_ordinal: int | None = None,
        outfeed_all: bool | None = None,
        replication_factor: int | None = None,
        io_batch_size: int | None = None,
        optimise_latency: bool | None = None,
    ) -> None:
        """Makes an empty queue. All other arguments are those of `IPUInfeedQueue`.

        Args:
          *positions: Graphcore's positional arguments: `outfeed_mode`, `device_ordinal`, `buffer_depth`,
            `optimise_latency`; or, if the first one is a string, the arguments of its first SDKs:
            `feed_name`, `outfeed_mode`, `outfeed_all`, `device_ordinal`, `replication_factor`,
            `io_batch_size`.
          outfeed_mode: see `IPUOutfeedMode`; None: ALL.
          buffer_depth: the number of enqueued elements that stay on the device before they are copied to
            the host; None: 3. Elements of an incomplete weight update stay there, too.
          outfeed_all: the older way to give the mode: True for ALL, False for LAST.
          io_batch_size: other than 1 has no effect and warns.

        Raises:
          TypeError: the mode is not an `IPUOutfeedMode`, or an argument is given twice.
          ValueError: `buffer_depth` or `replication_factor` is below 1.
        """
        arguments = take_arguments(
            "IPUOutfeedQueue",
            positions,
            outfeed_mode=outfeed_mode,
            buffer_depth=buffer_depth,
            feed_name=feed_name,
            device_ordinal=device_ordinal,
            outfeed_all=outfeed_all,
            replication_factor=replication_factor,
            io_batch_size=io_batch_size,
            optimise_latency=optimise_latency,
        )
        buffer_depth = 3 if arguments["buffer_depth"] is None else arguments["buffer_depth"]
        outfeed_mode, outfeed_all = arguments["outfeed_mode"], arguments["outfeed_all"]
        if outfeed_all is not None and not isinstance(outfeed_all, (bool, np.bool_)):
            raise TypeError(f"outfeed_all must be True or False; got {outfeed_all!r}.")
        if outfeed_all is not None and outfeed_mode is not None:
            raise TypeError(
                "Give either outfeed_mode or outfeed_all; outfeed_all is the older way to say it."
            )
        if outfeed_mode is None:
            is_last = outfeed_all is not None and not outfeed_all
            outfeed_mode = IPUOutfeedMode.LAST if is_last else IPUOutfeedMode.ALL
        check_member("outfeed_mode", outfeed_mode, IPUOutfeedMode)
        check_int("buffer_depth", buffer_depth, 1)
        self._mode = outfeed_mode
        self._buffer_depth = int(buffer_depth)
        self._replication_factor: int | None = arguments["replication_factor"]
        self._name = "outfeed" if arguments["feed_name"] is None else f"outfeed {arguments['feed_name']!r}"
        self._structure: tuple[Any, tuple[jax.ShapeDtypeStruct, ...]] | None = None
        self._count_replicas: Callable[[], int] | None = None  # for the program that was compiled last
        self._num_replicas: int | None = None  # in the last run
        self._on_device: collections.deque[_Part] = collections.deque()
        self._on_host: list[_Part] = []
        self._is_elsewhere = False  # whether the enqueued elements are in another process
        self._unreturned: list[_Part] = []  # read by a run that has not returned yet

    @property
    def outfeed_mode(self) -> IPUOutfeedMode:
        """The mode."""
        return self._mode

    @property
    def replication_factor(self) -> int | None:
        """The number of replicas that programs using it must have; None: any number."""
        return self._replication_factor

    @property
    def enqueued(self) -> bool:
        """Whether a program that enqueues to it has been compiled."""
        return self._structure is not None

    def check(self, tree: Any, avals: Sequence[jax.ShapeDtypeStruct]) -> None:
        """Called before `bind`, with the same arguments, for all queues of a program.

        Args:
          tree: the structure of an element.
          avals: shapes and dtypes of its leaves.

        Raises:
          ValueError: another program enqueues elements of another structure.
        """
        structure = (tree, tuple(avals))
        if self._structure is not None and self._structure != structure:
            raise ValueError(
                "An IPUOutfeedQueue holds elements of one structure, but two programs enqueue "
                f"{_describe(*self._structure)} and {_describe(*structure)}. Give each its own queue."
            )

    def bind(
        self,
        tree: Any,
        avals: Sequence[jax.ShapeDtypeStruct],
        count_replicas: Callable[[], int] | None = None,
    ) -> None:
        """Called when a program that enqueues has been compiled; see `check`.

        Args:
          tree: the structure of an element.
          avals: shapes and dtypes of its leaves, in a replica.
          count_replicas: returns the number of replicas, by the devices that are selected when it is
            called; None: elements do not come from replicas.
        """
        self._structure = (tree, tuple(avals))
        self._count_replicas = count_replicas
        if self._is_empty:
            self._num_replicas = None

    def expect_replicas(self, number: int) -> None:
        """Sets how many replicas enqueue. Called before a program runs.

        Raises:
          ValueError: there are elements of another number of replicas, which cannot be stacked with these.
        """
        is_kept = self._mode is IPUOutfeedMode.ALL and not self._is_empty
        if is_kept and self._num_replicas not in (None, number):
            raise ValueError(
                f"The {self._name} has elements of {self._num_replicas} replica(s) that were not "
                f"dequeued, and the program that is to run has {number}. Dequeue them first."
            )
        self._num_replicas = number

    @property
    def _is_empty(self) -> bool:
        return not (self._on_device or self._on_host)

    @property
    def _replica_axis(self) -> tuple[int, ...]:
        """The axis that each leaf has in front of an element's shape: none for one replica."""
        number = self._num_replicas
        if number is None:
            number = 1 if self._count_replicas is None else self._count_replicas()
        return (number,) if number > 1 else ()

    def extend(self, leaves: Sequence[Any], size: int | None) -> None:
        """Enqueues one element, or several in a row, which may still be computed; does not wait for them.

        Args:
          leaves: the leaves of one element, or of several, stacked on a first axis, which may be longer.
            With synthetic data zeros take their place, and they stay where they are.
          size: the number of elements; None for one element that is not stacked.
        """
        if size == 0:
            return
        if not all(map(is_readable, leaves)):  # another process has it
            self._is_elsewhere = True
            return
        if self._mode is IPUOutfeedMode.LAST:
            self._on_device.clear()
            self._on_host.clear()
        if uses_synthetic_data():
            leaves = [np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape) for leaf in leaves]
        self._on_device.append(_Part(list(leaves), size))
        num_on_device = 0
        for part in reversed(self._on_device):
            num_on_device += part.num_elements
            if num_on_device > self._buffer_depth:
                part.copy_async()
        while num_on_device > self._buffer_depth and self._on_device[0].is_ready():
            part = self._on_device.popleft()
            num_on_device -= part.num_elements
            self._on_host.append(part.on_host())

    def enqueue(self, value: Any) -> Operation:
        """Enqueues a value at this point of a stage, for every micro-batch.

        In the body of a loop it enqueues for every iteration, and in the `update` of an Optax
        transformation for every weight update. The operation runs whether or not the compiled function
        returns it; a stage must return arrays only. The results of a pipeline's last stage, or the losses,
        go to the pipeline's `outfeed_queue`. Each call needs a separate queue.

        Args:
          value: an array, or a tuple, list or dict of arrays, or a pytree of them. Its gradient is not
            taken.

        Returns:
          The operation.

        Raises:
          RuntimeError: it is called elsewhere.
          TypeError: a leaf is not an array.
          ValueError: another call enqueues to this queue already, or the value is empty.
        """
        enqueue_to(self, value, "IPUOutfeedQueue.enqueue", _as_array)
        return Operation("enqueue")

    def dequeue(self, wait_for_completion: bool = False) -> OutfeedOperation:
        """Returns the operation that empties the queue. The program need not be compiled yet.

        Args:
          wait_for_completion: True has no effect and warns: `run` has completed when it returns.

        Returns:
          The operation. When it runs, it returns the element's structure, with a list in place of a tuple.
          In mode ALL each leaf has a new first axis over the elements since the last dequeue, of size 0 if
          there were none; in mode LAST it returns the last element. With several replicas an element has
          one value per replica, on the next axis (in mode LAST the first axis). If the elements of a leaf
          have different shapes, as micro-batches may have, the leaf is an array of objects with one axis,
          whose entries are the elements' arrays. With synthetic data, elements are zeros of the same number
          and shapes, as nothing comes back from devices.
        """
        if wait_for_completion:
            warnings.warn(
                "dequeue(wait_for_completion=True) has no effect: Session.run returns when the program "
                "has completed.",
                stacklevel=2,
            )
        return OutfeedOperation(self)

    def read(self) -> Any:
        """Returns the operation's result; waits for what is still being computed. It changes nothing.

        Raises:
          ValueError: no program enqueues to the queue; or, in mode LAST, nothing was enqueued yet.
        """
        if self._structure is None:
            raise ValueError(
                f"The {self._name} was dequeued before any program that enqueues to it was compiled."
            )
        tree, avals = self._structure
        parts = [*self._on_host, *self._on_device]
        if self._mode is IPUOutfeedMode.LAST:
            if not parts and self._is_elsewhere:
                shapes = [(*self._replica_axis, *aval.shape) for aval in avals]
                zeros = [np.zeros(shape, a.dtype) for shape, a in zip(shapes, avals, strict=True)]
                return self._unflatten(tree, zeros)
            if not parts:
                raise ValueError(f"The {self._name} is in mode LAST and nothing has been enqueued yet.")
            arrays = [np.array(leaf[-1]) for leaf in parts[-1].on_host().stacked()]
        else:
            stacks = [part.on_host().stacked() for part in parts]
            arrays = [
                _concatenate([stack[place] for stack in stacks])
                if stacks
                else np.empty((0, *self._replica_axis, *aval.shape), aval.dtype)
                for place, aval in enumerate(avals)
            ]
        return self._unflatten(tree, arrays)

    @staticmethod
    def _unflatten(tree: Any, arrays: Sequence[Any]) -> Any:
        value = tree.unflatten(arrays)
        return list(value) if isinstance(value, tuple) else value

    def set_aside(self) -> None:
        """Sets aside what `read` returned, so that the next `read` does not; in mode LAST it does again."""
        if self._mode is IPUOutfeedMode.ALL:
            self._unreturned += [*self._on_host, *self._on_device]
            self._on_host, self._on_device = [], collections.deque()

    def put_back(self) -> None:
        """Undoes `set_aside`: what was read did not reach the caller."""
        self._on_host, self._unreturned = [*self._unreturned, *self._on_host], []

    def drop(self) -> None:
        """Releases what was set aside."""
        self._unreturned = []


def _concatenate(stacks: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """One stack of all elements; where their shapes differ, an array of objects."""
    if len({stack.shape[1:] for stack in stacks}) == 1:
        return np.concatenate(stacks)
    return as_objects([element for stack in stacks for element in stack])


def _as_array(leaf: Any) -> jax.Array:
    try:
        array = jnp.asarray(leaf)
    except TypeError as error:
        raise TypeError(
            f"IPUOutfeedQueue.enqueue: value must have arrays only; got {type(leaf).__name__}."
        ) from error
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):
        raise TypeError(
            "IPUOutfeedQueue.enqueue: value must have arrays only; got a random key. "
            "jax.random.key_data makes an array of it."
        )
    return array


def _describe(tree: Any, avals: Sequence[jax.ShapeDtypeStruct]) -> str:
    return f"{describe_structure(tree)} ({', '.join(map(describe, avals))})"


def _is_ready(leaf: Any) -> bool:
    """Whether an array has been computed."""
    return not isinstance(leaf, jax.Array) or bool(leaf.is_ready())  # type: ignore[attr-defined]  # JAX's stub lacks it

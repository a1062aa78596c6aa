"""The infeed: a data set, fetched ahead and placed on the devices by a thread."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ipu_pipeline.engine.fronts import Take, find_calling_line
from ipu_pipeline.ground.checks import is_int
from ipu_pipeline.ground.pytrees import as_shape, describe
from ipu_pipeline.queues.feeder import DataPass, Feeder, Place, Position, as_array, is_factory, is_sequence
from ipu_pipeline.queues.queue_arguments import take_arguments

_MAX_COLUMNS = 4  # arrays of a data set that are taken for samples' features and labels


class InfeedOperation:
    """An operation for `Session.run` that starts an infeed from the beginning, or ends it.

    Example:
      >>> infeed_queue = ipu.ipu_infeed_queue.IPUInfeedQueue([np.float32([1, 2])])
      >>> isinstance(infeed_queue.initializer, ipu.ipu_infeed_queue.InfeedOperation)
      True
    """

    def __init__(self, queue: IPUInfeedQueue, starts: bool) -> None:
        """Is called by `IPUInfeedQueue`."""
        self.queue = queue
        self.starts = starts


class IPUInfeedQueue:
    """Feeds the elements of a data set to pipelines, one per micro-batch.

    Example:
      >>> batches = [np.float32([1, 2]), np.float32([3, 4])]
      >>> infeed_queue = ipu.ipu_infeed_queue.IPUInfeedQueue(batches)
      >>> def model():
      ...     return ipu.loops.repeat(2, lambda total, x: total + jnp.sum(x), [np.float32(0)], infeed_queue)
      >>> with ipu.scopes.ipu_scope("/device:IPU:0"):
      ...     program = ipu.ipu_compiler.compile(model)
      >>> with ipu.Session() as session:
      ...     session.run(infeed_queue.initializer)
      ...     session.run(program)
      [array(10., dtype=float32)]
    """

    def __init__(
        self,
        dataset: Any,
        *positions: Any,
        prefetch_depth: int | None = None,
        feed_name: str | None = None,
        device_ordinal: int | None = None,
        replication_factor: int | None = None,
        data_to_prefetch: int | None = None,
        optimise_latency: bool | None = None,
    ) -> None:
        """Takes the data set. Nothing is read yet.

        Args:
          dataset: an object that can be iterated over repeatedly, or indexed from 0 to its length, or a
            callable that returns an iterator: a tensorflow-datasets data source, a grain data set or
            loader, a tf.data.Dataset, a torch DataLoader. Its elements are pytrees of arrays (or of values
            that NumPy converts to arrays), all with the same structure and dtypes; in loops also with the
            same shapes, see `max_shapes` of `pipelining_ops.pipeline`. A tuple or list becomes positional
            arguments of the first stage, a dict keyword arguments.
          *positions: Graphcore's positional arguments: `device_ordinal`, `prefetch_depth`,
            `optimise_latency`; or, if the first one is a string, the arguments of its first SDKs:
            `feed_name`, `device_ordinal`, `replication_factor`, `data_to_prefetch`, `prefetch_depth`.
          prefetch_depth: the number of elements to fetch ahead, 1..255; None: 3. A program on one device
            takes blocks of elements; if a block is larger, one block is fetched ahead. For programs that
            handle chunks of several elements, four chunks are fetched ahead.
          feed_name: the queue's name in errors.
          device_ordinal: other than 0 has no effect and warns.
          replication_factor: the number of replicas of the programs that use the queue; None: any number.
          data_to_prefetch: the older name of `prefetch_depth`.
          optimise_latency: True has no effect and warns.

        Raises:
          TypeError: the data set cannot be iterated over, or only once; it is a dict, or a tuple of arrays
            of different shapes, instead of elements; or an argument is given twice.
          ValueError: `prefetch_depth` or `replication_factor` is out of range.
        """
        arguments = take_arguments(
            "IPUInfeedQueue",
            positions,
            prefetch_depth=prefetch_depth,
            feed_name=feed_name,
            device_ordinal=device_ordinal,
            replication_factor=replication_factor,
            data_to_prefetch=data_to_prefetch,
            optimise_latency=optimise_latency,
        )
        depths = [arguments[name] for name in ("prefetch_depth", "data_to_prefetch")]
        prefetch_depth = next((depth for depth in depths if depth is not None), 3)
        if not is_int(prefetch_depth) or not 1 <= prefetch_depth <= 255:
            raise ValueError(f"prefetch_depth must be an integer from 1 to 255; got {prefetch_depth!r}.")
        if hasattr(dataset, "__next__") and not isinstance(dataset, type):
            kind = type(dataset).__name__
            called = (
                " Calling it may return the iterator itself: pass a function that makes a new one, "
                f"`lambda: {kind}(...)`."
                if callable(dataset)
                else " Pass what it was made from, or a callable that returns a new iterator, for "
                "example a function that yields elements."
            )
            raise TypeError(
                "IPUInfeedQueue: dataset must be something that can be iterated over again, but it is an "
                f"iterator ({kind}).{called}"
            )
        if not is_factory(dataset) and not hasattr(dataset, "__iter__") and not is_sequence(dataset):
            raise TypeError(
                "IPUInfeedQueue: dataset must be iterable, or a callable that returns an iterator; got "
                f"{type(dataset).__name__}."
            )
        _check_columns(dataset)
        self._dataset = dataset
        self._prefetch_depth = int(prefetch_depth)
        self._replication_factor: int | None = arguments["replication_factor"]
        self._name = "infeed" if arguments["feed_name"] is None else f"infeed {arguments['feed_name']!r}"
        self._peeked: DataPass | None = None
        self._last_pass: Callable[[], Any] | None = None
        self._element: Any = None
        self._feeder: Feeder | None = None
        self._started: object = None
        self._finalizer: weakref.finalize[..., IPUInfeedQueue] | None = None
        self._initializer_line: str | None = None  # where the initializer was read; None: it was not
        self._deleted = False

    @property
    def prefetch_depth(self) -> int:
        """The number of elements that are fetched ahead."""
        return self._prefetch_depth

    @property
    def replication_factor(self) -> int | None:
        """The number of replicas that programs using it must have; None: any number."""
        return self._replication_factor

    @property
    def dequeued(self) -> bool:
        """Whether a program that takes its elements has been traced."""
        return self._element is not None

    @property
    def initializer(self) -> InfeedOperation:
        """The operation that starts the infeed at the beginning of the data set. It can be read only once.

        Raises:
          ValueError: it was read before.
        """
        if self._initializer_line is not None:
            raise ValueError(
                "The IPUInfeedQueue `initializer` function can only be accessed once, and it was"
                f"{self._initializer_line or ' before'}. Keep what it returned there, initializer = "
                "infeed_queue.initializer, and run that as often as you like: session.run(initializer)."
            )
        line = find_calling_line()
        self._initializer_line = line and f" at {line}"
        return InfeedOperation(self, starts=True)

    @property
    def deleter(self) -> InfeedOperation:
        """The operation that ends the infeed and releases its memory."""
        return InfeedOperation(self, starts=False)

    @property
    def element(self) -> Any:
        """The shapes and dtypes of an element. The first access reads the first element, and keeps it.

        Raises:
          ValueError: the data set is empty, or a leaf of an element is not an array.
        """
        if self._element is None:
            # A program may be traced meanwhile; what the data set does with JAX is no part of it.
            with jax.ensure_compile_time_eval():
                data = self._begin_pass()
                try:
                    first = data.peek()
                except StopIteration:
                    raise ValueError(f"The dataset of the {self._name} is empty.") from None
            name = f"Element 0 of the dataset of the {self._name}"
            self._element = jax.tree.map(lambda leaf: as_shape(as_array(leaf, name)), first)
            self._peeked = data
        return self._element

    @property
    def number_of_tuple_elements(self) -> int:
        """The number of arrays of an element."""
        return len(jax.tree.leaves(self.element))

    def initialize(self) -> object:
        """Starts over at the beginning of the data set. Returns what identifies this pass for `delete`."""
        element = self.element
        data, self._peeked = self._peeked or self._begin_pass(), None
        self._start(Feeder(data, element))
        self._started = object()
        return self._started

    def seek(self, position: Position) -> None:
        """Goes to a position of the data set; the infeed must be initialized."""
        element = self.element
        self._start(Feeder(self._begin_pass(position), element))

    def _begin_pass(self, position: Position | None = None) -> DataPass:
        self.stop()  # passes may share what they read from, a random generator for example
        data = DataPass(self._dataset, position)
        before, now = self._last_pass, data.reference
        self._last_pass = now
        if before is not None and now is not None and before() is now():
            raise TypeError(
                f"The dataset of the {self._name} returned the same {type(now()).__name__} for a second "
                "pass over the data, but its first elements are gone. Pass a callable that makes a new "
                "iterator each time, as `lambda: iter(samples)` does, or a function that yields."
            )
        return data

    def _start(self, feeder: Feeder) -> None:
        if self._feeder is not None:
            self._feeder.discard()
        self._feeder = feeder
        self._deleted = False
        if self._finalizer is not None:
            self._finalizer.detach()
        self._finalizer = weakref.finalize(self, self._feeder.stop)  # also when Python ends

    def delete(self, only: object = None) -> None:
        """Ends the infeed; it can be initialized again.

        Args:
          only: what `initialize` returned: nothing happens if the infeed was initialized again since.
        """
        if only is not None and only is not self._started:
            return
        if self._feeder is not None:
            self._feeder.discard()
        self._feeder = None
        self._deleted = True
        if not isinstance(self._last_pass, weakref.ref):
            self._last_pass = None

    def stop(self) -> None:
        """Ends the thread. Fetched elements are kept, and the next `connect` goes on from there."""
        if self._feeder is not None:
            self._feeder.stop()

    def check_initialized(self) -> None:
        """Raises if the infeed cannot be connected.

        Raises:
          RuntimeError: it was not initialized, or was ended by its deleter.
        """
        if self._feeder is None:
            state = (
                "was ended, by its `deleter` or with its session"
                if self._deleted
                else "has not been initialized"
            )
            if self._initializer_line is None:
                mend = "session.run(infeed_queue.initializer)."
            else:
                mend = (
                    "session.run(initializer), where initializer is what infeed_queue.initializer returned "
                    f"when it was read{self._initializer_line or ''}."
                )
            raise RuntimeError(f"The {self._name} {state}. Run its initializer first: {mend}")

    def connect(
        self,
        place: Place,
        num_taken: int = 1,
        is_tentative: bool = False,
        *,
        shapes_may_vary: bool = False,
    ) -> Take:
        """Starts the thread.

        Args:
          place: puts the leaves of an element on devices. Called in the thread.
          num_taken: how many elements will be taken at once; at least this number is fetched ahead.
          is_tentative: whether some of the elements taken may not be needed. Then the fetched elements are
            taken without waiting for more, and kept for `give_back`.
          shapes_may_vary: whether elements may have other shapes than the first one.

        Returns:
          A function that takes up to a given number of elements, at least one, and returns what `place`
          made of them. It waits for the whole number, unless the data end. It raises OutOfRangeError at
          the end of the data, and what the data set raised.

        Raises:
          RuntimeError: the infeed was not initialized.
        """
        self.check_initialized()
        assert self._feeder is not None
        depth = max(self._prefetch_depth, num_taken)
        self._feeder.start(place, depth, is_tentative, shapes_may_vary)
        return self._feeder.take

    def give_back(self) -> None:
        """Gives back the elements that `mark` was told are not needed: they come again."""
        if self._feeder is not None:
            self._feeder.give_back()

    def mark(self, num_unneeded: int = 0) -> None:
        """Notes that the elements taken so far have been used, except the last ones; see `position`."""
        if self._feeder is not None:
            self._feeder.mark(num_unneeded)

    @property
    def position(self) -> Position | None:
        """The position of the data set at the last `mark`; None if the infeed is not initialized."""
        return None if self._feeder is None else self._feeder.position


def _check_columns(dataset: Any) -> None:
    """Raises if a data set is a dict or a few whole arrays, not micro-batches."""
    if isinstance(dataset, dict):
        description, elements = "a dict", "keys"
        row = "{name: array[i : i + n] for name, array in data.items()}"
    elif isinstance(dataset, (list, tuple)):
        is_few = 2 <= len(dataset) <= _MAX_COLUMNS
        if not is_few or not all(isinstance(c, (np.ndarray, jax.Array)) and c.ndim for c in dataset):
            return
        shapes = [as_shape(column) for column in dataset]
        sizes = {shape.shape[0] for shape in shapes}
        are_alike = len({(shape.shape, shape.dtype) for shape in shapes}) == 1
        if are_alike or len(sizes) > 1 or sizes == {1}:
            return  # micro-batches; the last may be smaller
        description = (
            f"a {type(dataset).__name__} of {len(dataset)} arrays ({', '.join(map(describe, shapes))})"
        )
        elements, row = "arrays", "tuple(array[i : i + n] for array in data)"
    else:
        return
    raise TypeError(
        f"IPUInfeedQueue: dataset is {description}. A queue takes what it iterates over as micro-batches, "
        f"which would be its {elements}. Pass a function that yields micro-batches, here of n samples: "
        f"`for i in range(0, num_samples, n): yield {row}`."
    )

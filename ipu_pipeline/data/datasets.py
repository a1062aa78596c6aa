"""Images to learn on: (Fashion-)MNIST or the embedded digits; batches for an infeed, also of lengths."""

from __future__ import annotations

import bisect
import importlib.resources
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from numpy.typing import NDArray

from ipu_pipeline.data import mnist
from ipu_pipeline.ground.checks import check_positive, is_integer
from ipu_pipeline.ground.pytrees import cast_exactly, describe

__all__ = [
    "CLOTHES",
    "DATA_DIR_VARIABLE",
    "DIGITS",
    "FASHION_DIR_VARIABLE",
    "Buckets",
    "EvaluationBatches",
    "ImageData",
    "TrainingBatches",
    "load",
    "load_digits",
    "load_fashion",
    "load_mnist",
]


DATA_DIR_VARIABLE = "IPU_PIPELINE_DATA_DIR"
FASHION_DIR_VARIABLE = "IPU_PIPELINE_FASHION_DIR"

DIGITS = tuple("0123456789")
CLOTHES = (
    *("T-shirt", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)

_WAYS_TO_MNIST = (
    f"Give --data-dir, or set {DATA_DIR_VARIABLE}, to a folder with the four files "
    f"{', '.join(mnist.IDX_FILES)}, or with the {mnist.TFDS_DATASET} that scripts/prepare_mnist.py makes "
    "from them; or use --dataset digits, which needs no files."
)
_WAYS_TO_FASHION = (
    f"Give --data-dir, or set {FASHION_DIR_VARIABLE}, to a folder with Fashion-MNIST's four files "
    f"{', '.join(mnist.IDX_FILES)}, with or without .gz; or use --dataset digits, which needs no files."
)
_SHUFFLE_SEED = 0  # seed of the embedded digits' split, which is part of the data set


@dataclass(frozen=True, eq=False)
class ImageData:
    """Images of ten classes.

    Example:
      >>> digits = datasets.load_digits()
      >>> digits.classes[int(digits.train_labels[0])] == str(digits.train_labels[0])
      True

    Attributes:
      name: what the data set is called.
      train_images: float32 [examples, 28, 28], in [0, 1].
      train_labels: int32 [examples], in 0..9.
      test_images: as `train_images`, held out.
      test_labels: as `train_labels`, held out.
      classes: what each label stands for.
    """

    name: str
    train_images: NDArray[np.float32]
    train_labels: NDArray[np.int32]
    test_images: NDArray[np.float32]
    test_labels: NDArray[np.int32]
    classes: tuple[str, ...] = DIGITS


class TrainingBatches:
    """Batches of shuffled examples, the same in every epoch, without end.

    The order is drawn once, as where a data set is shuffled, cached and then repeated: on MNIST at these
    programs' learning rate, drawing it anew every epoch ends some runs in a loss of 0.02 instead of 0.001.
    The examples that do not fill the last batch are left out. Iterating again gives the same batches.

    Example:
      >>> digits = datasets.load_digits()
      >>> batches = datasets.TrainingBatches(digits.train_images, digits.train_labels, batch_size=32)
      >>> images, labels = next(iter(batches))
      >>> images.shape, labels.shape
      ((32, 28, 28), (32,))
    """

    def __init__(
        self, images: NDArray[np.float32], labels: NDArray[np.int32], batch_size: int, seed: int = 0
    ) -> None:
        """Takes the examples.

        Args:
          images: float32 [examples, ...].
          labels: int32 [examples].
          batch_size: examples per batch.
          seed: seed of the order, at least 0.

        Raises:
          ValueError: there are fewer examples than one batch needs, or an argument is too
            small.
        """
        if not 1 <= batch_size <= len(images):
            raise ValueError(
                f"batch_size must be from 1 to the number of examples, {len(images)}; got {batch_size}."
            )
        self._images = images
        self._labels = labels
        self._batch_size = batch_size
        if seed < 0:
            raise ValueError(f"seed must be at least 0; got {seed}.")
        self._seed = seed

    def __iter__(self) -> Iterator[tuple[NDArray[np.float32], NDArray[np.int32]]]:
        """Yields (images [batch, ...], labels [batch]); can say where it is, and go there."""
        return _TrainingIterator(self._images, self._labels, self._batch_size, self._seed)


class _TrainingIterator:
    """Iterates over training batches, starting at any of them."""

    def __init__(
        self, images: NDArray[np.float32], labels: NDArray[np.int32], batch_size: int, seed: int
    ) -> None:
        self._images = images
        self._labels = labels
        order = np.random.default_rng(seed).permutation(len(images))
        num_batches = len(images) // batch_size
        self._batches = order[: num_batches * batch_size].reshape(num_batches, batch_size)
        self._next = 0

    def __iter__(self) -> _TrainingIterator:
        return self

    def __next__(self) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        rows = self._batches[self._next]
        self._next = (self._next + 1) % len(self._batches)
        return self._images[rows], self._labels[rows]

    def get_state(self) -> int:
        """The number of the next batch in the epoch."""
        return self._next

    def set_state(self, state: int) -> None:
        """Goes to where `get_state` was called."""
        self._next = state


class EvaluationBatches:
    """Every example once, in order; the last batch is padded with examples that the mask leaves out.

    Example:
      >>> digits = datasets.load_digits()
      >>> batches = datasets.EvaluationBatches(digits.test_images, digits.test_labels, batch_size=32)
      >>> *_, (images, labels, mask) = batches
      >>> images.shape, int(mask.sum())  # 360 examples: 11 full batches, and 8 more
      ((32, 28, 28), 8)
    """

    def __init__(self, images: NDArray[np.float32], labels: NDArray[np.int32], batch_size: int) -> None:
        """Takes the examples.

        Args:
          images: float32 [examples, ...], at least one.
          labels: int32 [examples].
          batch_size: examples per batch, padding included.

        Raises:
          ValueError: there are no examples, or `batch_size` is below 1.
        """
        if len(images) == 0 or batch_size < 1:
            raise ValueError(
                "EvaluationBatches needs at least one example and a batch_size of at least 1; got "
                f"{len(images)} and {batch_size}."
            )
        self._images = images
        self._labels = labels
        self._batch_size = batch_size

    def __len__(self) -> int:
        """The number of batches."""
        return -(-len(self._images) // self._batch_size)

    def __iter__(
        self,
    ) -> Iterator[tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.bool_]]]:
        """Yields (images [batch, ...], labels [batch], mask bool [batch]); padding is False."""
        num_examples, size = len(self._images), self._batch_size
        for start in range(0, num_examples, size):
            indices = np.arange(start, start + size)
            mask = indices < num_examples
            indices = np.minimum(indices, num_examples - 1)
            yield self._images[indices], self._labels[indices], mask


def load(
    selection: Literal["auto", "mnist", "digits"], data_dir: str | None = None
) -> tuple[ImageData, str]:
    """The data set of a program's `--dataset` and `--data-dir`.

    Example:
      >>> digits, note = datasets.load("digits")
      >>> digits.name
      'digits'

    Args:
      selection: "auto": MNIST if there is one, else the embedded digits; "mnist" or "digits".
      data_dir: MNIST's folder, in one of the two forms of `load_mnist`. None: the folder in the environment
        variable IPU_PIPELINE_DATA_DIR; without it, the folder in which tensorflow-datasets keeps data
        (TFDS_DATA_DIR, else ~/tensorflow_datasets), if MNIST in array_record form is there.

    Returns:
      The data, and one line that says which it is and why.

    Raises:
      ValueError: `selection` is none of the three; it is "digits", and a folder is given; MNIST is wanted,
        and there is none; or the contents of the given folder are not as they should be.
      FileNotFoundError: the given folder has no MNIST.
    """
    if selection not in ("auto", "mnist", "digits"):
        raise ValueError(f"--dataset must be auto, mnist or digits; got {selection!r}.")
    if selection == "digits":
        return _digits_option(data_dir)
    given_by = "--data-dir"
    if data_dir is None:
        data_dir, given_by = os.environ.get(DATA_DIR_VARIABLE) or None, DATA_DIR_VARIABLE
    why = "as --dataset mnist asks:" if selection == "mnist" else "since"
    if data_dir is not None:
        data, form = _load_mnist(Path(data_dir))
        return data, f"Data set: MNIST, {why} {given_by} gives the folder {data_dir} with {form}"
    folder = mnist.default_folder()
    try:
        data = _as_image_data(mnist.read_tfds(folder))
    except (ValueError, OSError) as error:  # not the user's choice: a fault there stops no program
        if selection == "mnist":
            raise ValueError(
                f"--dataset mnist: no folder was given, and tensorflow-datasets' {error} {_WAYS_TO_MNIST}"
            ) from error
        reason = f"neither --data-dir nor {DATA_DIR_VARIABLE} gives a folder with MNIST, and {error}"
        return load_digits(), f"Data set: the embedded 8x8 digits, since {reason.removesuffix('.')}"
    return data, f"Data set: MNIST, {why} tensorflow-datasets' folder {folder} has {mnist.TFDS_DATASET}"


def load_fashion(selection: str, data_dir: str | None = None) -> tuple[ImageData, str]:
    """The data set of a program's `--dataset` and `--data-dir`, for programs about clothes.

    Example:
      >>> data, note = datasets.load_fashion("digits")
      >>> data.name
      'digits'

    Args:
      selection: "auto": Fashion-MNIST if a folder is given, else the embedded digits; "fashion"; "digits".
      data_dir: the folder with Fashion-MNIST's four idx files. None: the folder in the environment variable
        IPU_PIPELINE_FASHION_DIR.

    Returns:
      The data, and one line that says which it is and why.

    Raises:
      ValueError: `selection` is none of the three; it is "digits", and a folder is given; Fashion-MNIST is
        wanted, and there is no folder; or the folder's contents are not as they should be.
      FileNotFoundError: the folder lacks a file.
    """
    if selection not in ("auto", "fashion", "digits"):
        raise ValueError(f"--dataset must be auto, fashion or digits; got {selection!r}.")
    if selection == "digits":
        return _digits_option(data_dir)
    given_by = "--data-dir"
    if data_dir is None:
        data_dir, given_by = os.environ.get(FASHION_DIR_VARIABLE) or None, FASHION_DIR_VARIABLE
    if data_dir is None:
        if selection == "fashion":
            raise ValueError(f"--dataset fashion: no folder was given. {_WAYS_TO_FASHION}")
        reason = f"neither --data-dir nor {FASHION_DIR_VARIABLE} gives a folder with Fashion-MNIST"
        return load_digits(), f"Data set: the embedded 8x8 digits, since {reason}"
    try:
        splits = mnist.read_idx(Path(data_dir), "Fashion-MNIST")
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error} {_WAYS_TO_FASHION}") from None
    why = "as --dataset fashion asks:" if selection == "fashion" else "since"
    line = f"Data set: Fashion-MNIST, {why} {given_by} gives the folder {data_dir}"
    return _as_image_data(splits, "Fashion-MNIST", CLOTHES), line


def load_digits() -> ImageData:
    """The embedded digits: 1,437 to train on and 360 held out.

    Each pixel of the 8x8 images becomes 3x3 pixels, and a border of 2 makes them 28x28. The split is a
    fixed shuffle: the last images of the file are by other writers than the first.

    Example:
      >>> digits = datasets.load_digits()
      >>> digits.train_images.shape, digits.test_images.shape
      ((1437, 28, 28), (360, 28, 28))

    Returns:
      The data.
    """
    file = importlib.resources.files("ipu_pipeline") / "data" / "digits.npz"
    with file.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
        small, labels = archive["images"], archive["labels"]
    large = small.repeat(3, axis=1).repeat(3, axis=2).astype(np.float32) / 16
    images = np.pad(large, ((0, 0), (2, 2), (2, 2)))
    order = np.random.default_rng(_SHUFFLE_SEED).permutation(len(images))
    images, labels = images[order], labels[order].astype(np.int32)
    num_train = len(images) * 4 // 5
    return ImageData(
        "digits", images[:num_train], labels[:num_train], images[num_train:], labels[num_train:]
    )


def load_mnist(data_dir: str | os.PathLike[str]) -> ImageData:
    """MNIST: 60,000 images to train on and 10,000 held out.

    Example:
      >>> mnist = datasets.load_mnist("no_such_folder")
      Traceback (most recent call last):
          ...
      FileNotFoundError: ...

    Args:
      data_dir: a folder with the four idx files under their usual names, gzipped or plain; or else with
        mnist/3.0.1 as tensorflow-datasets keeps it in array_record form. Both give the same examples, in
        the same order if scripts/prepare_mnist.py made the second from the first.

    Returns:
      The data.

    Raises:
      FileNotFoundError: the folder has neither.
      ValueError: a file is not what its name says.
    """
    return _load_mnist(Path(data_dir))[0]


def _digits_option(data_dir: str | None) -> tuple[ImageData, str]:
    """The data of `--dataset digits`."""
    if data_dir is not None:
        raise ValueError(
            f"--data-dir {data_dir} has no use with --dataset digits, as the digits are embedded: "
            "leave one of the two out."
        )
    return load_digits(), "Data set: the embedded 8x8 digits, as --dataset digits asks"


def _load_mnist(folder: Path) -> tuple[ImageData, str]:
    """The data, and the form in which the folder has it."""
    missing = mnist.missing_files(folder)
    if not missing:
        return _as_image_data(mnist.read_idx(folder)), "its idx files"
    try:
        return _as_image_data(mnist.read_tfds(folder)), f"tensorflow-datasets' {mnist.TFDS_DATASET}"
    except FileNotFoundError:
        raise FileNotFoundError(
            f"MNIST: the folder {folder} has no {', '.join(missing)}, and no {mnist.TFDS_DATASET}. "
            f"{_WAYS_TO_MNIST}"
        ) from None


def _as_image_data(
    splits: mnist.Splits, name: str = "MNIST", classes: tuple[str, ...] = DIGITS
) -> ImageData:
    (train_images, train_labels), (test_images, test_labels) = splits["train"], splits["test"]
    return ImageData(
        name,
        train_images.astype(np.float32) / np.float32(255),
        train_labels.astype(np.int32),
        test_images.astype(np.float32) / np.float32(255),
        test_labels.astype(np.int32),
        classes,
    )


# Examples of different lengths.


class Buckets:
    """Puts examples of about the same length together in micro-batches.

    An example goes to the first bucket that is long enough for it. A bucket with enough examples gives a
    micro-batch. Pipelines compile for each length once; see `max_shapes`. The order is that of the
    examples, always the same.

    Example:
      >>> texts = [np.array([5, 2, 7]), np.array([1, 3])]  # or, for example, a data set of grain
      >>> for tokens, mask in datasets.Buckets(texts, lengths=[4, 8], batch_size=2):
      ...     print(tokens.shape, mask.sum())
      (2, 4) 5.0
    """

    def __init__(
        self,
        examples: Any,
        lengths: Sequence[int],
        batch_size: int,
        *,
        in_a_row: int = 1,
        remainder: Literal["fill", "drop"] = "fill",
        too_long: Literal["raise", "cut", "drop"] = "raise",
        padding: Any = 0,
        length_of: Callable[[Any], int] | None = None,
    ) -> None:
        """Takes the examples; nothing is read yet.

        Args:
          examples: can be iterated over, again for each pass, or is a function that returns an iterator.
            Yields pytrees of arrays, such as the tokens of a text. A leaf whose first axis has the
            example's length is padded along that axis; other leaves have the same shape in all examples.
          lengths: the lengths of the buckets, rising.
          batch_size: examples of a micro-batch.
          in_a_row: how many micro-batches of one length follow each other. Give the number of replicas,
            which need the same shapes at the same time, or the number of micro-batches of a step, so that
            a step has one length.
          remainder: what is done with examples that do not fill their bucket at the end: "fill" adds
            examples of padding only, "drop" leaves them out.
          too_long: what is done with an example that is longer than all buckets: "raise" an error, "cut"
            what does not fit, or "drop" it.
          padding: what is added; a number, or a pytree of numbers like an example.
          length_of: a function from an example to its length. None: the size of the first axis of the
            first leaf that has one.

        Raises:
          ValueError: an argument is not usable.
        """
        rising = list(lengths) if np.iterable(lengths) else []
        if (
            not rising
            or not all(is_integer(length, 1) for length in rising)
            or rising != sorted(set(rising))
        ):
            raise ValueError(
                f"lengths must be at least one integer from 1, in rising order; got {rising or lengths}."
            )
        self._lengths = list(map(int, rising))
        for name, number in (("batch_size", batch_size), ("in_a_row", in_a_row)):
            check_positive(name, number)
        for name, choice, choices in (
            ("remainder", remainder, ("fill", "drop")),
            ("too_long", too_long, ("raise", "cut", "drop")),
        ):
            if choice not in choices:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}; got {choice!r}.")
        if hasattr(examples, "__next__"):
            raise ValueError(
                "examples must be something that can be iterated over again, for each pass; got an "
                f"iterator ({type(examples).__name__}). Pass what it was made from, or a function that "
                "returns one."
            )
        self._examples, self._batch_size, self._in_a_row = examples, int(batch_size), int(in_a_row)
        self._remainder, self._too_long, self._padding = remainder, too_long, padding
        self._length_of = length_of

    def __iter__(self) -> Iterator[Any]:
        """Yields micro-batches of one pass over the examples.

        Each has the leaves of `batch_size` examples, padded and stacked on a first axis, and a mask,
        float32 [batch_size, length], 1 for what is in an example and 0 for padding. The mask is the last
        one of a tuple or list, the entry "mask" of a dict, and second in a pair with anything else.

        A micro-batch of padding only, of which there may be some at the end, has a mask of zeros: what
        divides by the sum of the mask should divide by at least 1.
        """
        full = self._batch_size * self._in_a_row
        buckets: list[list[_Example]] = [[] for _length in self._lengths]
        first: _Example | None = None
        is_padded: list[bool] = []  # by leaf
        paddings: list[Any] = []  # by leaf
        has_made = False  # whether there has been a micro-batch
        examples = self._examples() if callable(self._examples) else self._examples
        for number, example in enumerate(examples):
            leaves, tree = jax.tree.flatten(example)
            arrays = [np.asarray(leaf) for leaf in leaves]
            current = _Example(arrays, self._find_length(example, arrays, number), tree)
            fits = [array.ndim > 0 and len(array) == current.length for array in arrays]
            if first is None:
                first, is_padded, paddings = current, fits, self._find_paddings(arrays)
            was_padded = is_padded
            is_padded = [old and new for old, new in zip(was_padded, fits, strict=False)]
            current.check_like(first, is_padded, number)
            if has_made and is_padded != was_padded:
                place = next(leaf for leaf, old in enumerate(was_padded) if old and not fits[leaf])
                raise ValueError(
                    f"Example {number} has the length {current.length} and a leaf "
                    f"{describe(arrays[place])}. In all examples before it, this leaf's first axis had the "
                    "example's length, so that it was padded. Give a leaf that is not to be padded a first "
                    "axis of size 1."
                )
            place = bisect.bisect_left(self._lengths, current.length)
            if place == len(self._lengths):
                if self._too_long == "drop":
                    continue
                place -= 1
            buckets[place].append(current)
            if len(buckets[place]) == full:
                yield from self._make(buckets[place], self._lengths[place], is_padded, paddings)
                buckets[place], has_made = [], True
        for length, bucket in zip(self._lengths, buckets, strict=True):
            if bucket and self._remainder == "fill":
                yield from self._make(bucket, length, is_padded, paddings)

    def _find_length(self, example: Any, arrays: Sequence[Any], number: int) -> int:
        if self._length_of is not None:
            length = int(self._length_of(example))
        else:
            sizes = [array.shape[0] for array in arrays if array.ndim]
            if not sizes:
                raise ValueError(f"Example {number} has no array with an axis; got {example!r}.")
            length = sizes[0]
        if length > self._lengths[-1] and self._too_long == "raise":
            raise ValueError(
                f"Example {number} has the length {length}, and the longest bucket {self._lengths[-1]}. "
                'Give a longer one, or too_long="cut" or "drop".'
            )
        return length

    def _find_paddings(self, arrays: Sequence[Any]) -> list[Any]:
        """The padding of each leaf of an example."""
        values = jax.tree.leaves(self._padding)
        values = values * len(arrays) if len(values) == 1 else values
        if len(values) != len(arrays):
            raise ValueError(
                "padding must be a number, or a pytree of numbers like an example, which has "
                f"{len(arrays)} leaves; got {self._padding!r}."
            )
        pairs = zip(values, arrays, strict=True)
        return [cast_exactly(np.asarray(value), array.dtype, "padding") for value, array in pairs]

    def _make(
        self, bucket: Sequence[_Example], length: int, is_padded: Sequence[bool], paddings: Sequence[Any]
    ) -> Iterator[Any]:
        """The micro-batches of one bucket."""
        size, template = self._batch_size, bucket[0]
        for first in range(0, size * self._in_a_row, size):
            mask = np.zeros((size, length), np.float32)
            stacks = []
            for array, is_long, padding in zip(template.arrays, is_padded, paddings, strict=True):
                shape = (length, *array.shape[1:]) if is_long else array.shape
                stacks.append(np.full((size, *shape), padding, array.dtype))
            for row, example in enumerate(bucket[first : first + size]):
                mask[row, : example.length] = 1
                for stack, array, is_long in zip(stacks, example.arrays, is_padded, strict=True):
                    if is_long:
                        stack[row, : example.length] = array[:length]
                    else:
                        stack[row] = array
            yield _with_mask(jax.tree.unflatten(template.tree, stacks), mask)


@dataclass(frozen=True, eq=False)
class _Example:
    arrays: list[Any]  # its leaves
    length: int
    tree: Any

    def check_like(self, first: _Example, is_padded: Sequence[bool], number: int) -> None:
        """Raises a ValueError if this example cannot be stacked with the first one."""
        if self.tree != first.tree:
            raise ValueError(f"Example {number} has the structure {self.tree}, in place of {first.tree}.")
        for array, first_array, is_long in zip(self.arrays, first.arrays, is_padded, strict=True):
            start = 1 if is_long else 0
            if array.shape[start:] != first_array.shape[start:] or array.dtype != first_array.dtype:
                raise ValueError(
                    f"Example {number} has a leaf {describe(array)}, and the first one "
                    f"{describe(first_array)}. Only the first axis may differ, where it has the example's "
                    "length."
                )


def _with_mask(examples: Any, mask: Any) -> Any:
    if isinstance(examples, dict):
        if "mask" in examples:
            raise ValueError('An example must not have an entry "mask", which is the one that is added.')
        return {**examples, "mask": mask}
    if isinstance(examples, (tuple, list)) and not hasattr(examples, "_fields"):
        return type(examples)([*examples, mask])
    return examples, mask

"""Digits to learn on: MNIST from a folder, or the embedded 8x8 digits, as batches for an infeed."""

from __future__ import annotations

import gzip
import importlib.resources
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "DATA_DIR_VARIABLE",
    "EvaluationBatches",
    "ImageData",
    "TrainingBatches",
    "load",
    "load_digits",
    "load_mnist",
]

DATA_DIR_VARIABLE = "IPU_PIPELINE_DATA_DIR"

_MNIST_FILES = {
    "train_images": "train-images-idx3-ubyte.gz",
    "train_labels": "train-labels-idx1-ubyte.gz",
    "test_images": "t10k-images-idx3-ubyte.gz",
    "test_labels": "t10k-labels-idx1-ubyte.gz",
}
_WAYS_TO_MNIST = (
    f"Give --data-dir, or set {DATA_DIR_VARIABLE}, to a folder with the four files "
    f"{', '.join(_MNIST_FILES.values())}; or use --dataset digits, which needs no files."
)
_SHUFFLE_SEED = 0  # of the embedded digits' split, which is part of the data set


@dataclass(frozen=True, eq=False)
class ImageData:
    """Images of digits.

    Attributes:
      name: what the data set is called.
      train_images: float32 [examples, 28, 28], in [0, 1].
      train_labels: int32 [examples], in 0..9.
      test_images: as `train_images`, held out.
      test_labels: as `train_labels`, held out.
    """

    name: str
    train_images: NDArray[np.float32]
    train_labels: NDArray[np.int32]
    test_images: NDArray[np.float32]
    test_labels: NDArray[np.int32]


class TrainingBatches:
    """Batches of shuffled examples, the same in every epoch, without end.

    The order is drawn once, as where a data set is shuffled, cached and then repeated: on MNIST at these
    programs' learning rate, drawing it anew every epoch ends some runs in a loss of 0.02 instead of 0.001.
    The examples that do not fill the last batch are left out. Iterating again gives the same batches.
    """

    def __init__(
        self, images: NDArray[np.float32], labels: NDArray[np.int32], batch_size: int, seed: int = 0
    ) -> None:
        """Takes the examples.

        Args:
          images: float32 [examples, ...].
          labels: int32 [examples].
          batch_size: examples per batch.
          seed: of the order, at least 0.

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
        """Yields (images [batch, ...], labels [batch])."""
        order = np.random.default_rng(self._seed).permutation(len(self._images))
        size = self._batch_size
        while True:
            for start in range(0, len(order) - size + 1, size):
                chosen = order[start : start + size]
                yield self._images[chosen], self._labels[chosen]


class EvaluationBatches:
    """Every example once, in order; the last batch is padded with examples that the mask leaves out."""

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
        """How many batches there are."""
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


def load(selection: str, data_dir: str | None = None) -> tuple[ImageData, str]:
    """The data set of a program's `--dataset` and `--data-dir`.

    Args:
      selection: "auto": MNIST if a folder is given, else the embedded digits; "mnist" or "digits".
      data_dir: MNIST's folder; None: the environment variable IPU_PIPELINE_DATA_DIR.

    Returns:
      The data, and one line that says which it is and why.

    Raises:
      ValueError: `selection` is none of the three; or MNIST is wanted without a folder.
      FileNotFoundError: the folder lacks MNIST's files.
    """
    given_by = "--data-dir"
    if data_dir is None:
        data_dir, given_by = os.environ.get(DATA_DIR_VARIABLE) or None, DATA_DIR_VARIABLE
    if selection == "digits":
        return load_digits(), "Data set: the embedded 8x8 digits, as --dataset digits asks"
    if selection == "mnist":
        if data_dir is None:
            raise ValueError(f"--dataset mnist: no folder was given. {_WAYS_TO_MNIST}")
        return load_mnist(data_dir), f"Data set: MNIST, as --dataset mnist asks, from {data_dir}"
    if selection != "auto":
        raise ValueError(f"--dataset must be auto, mnist or digits; got {selection!r}.")
    if data_dir is None:
        why = f"neither --data-dir nor {DATA_DIR_VARIABLE} gives a folder with MNIST"
        return load_digits(), f"Data set: the embedded 8x8 digits, since {why}"
    return load_mnist(data_dir), f"Data set: MNIST, since {given_by} gives the folder {data_dir}"


def load_digits() -> ImageData:
    """The embedded digits: 1,437 to train on and 360 held out.

    Each pixel of the 8x8 images becomes 3x3 pixels, and a border of 2 makes them 28x28. The split is a
    fixed shuffle: the last images of the file are by other writers than the first.

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

    Args:
      data_dir: a folder with the four gzipped idx files under their usual names.

    Returns:
      The data.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file is not what its name says.

    Source of the idx format: Y. LeCun, C. Cortes, C. Burges, "The MNIST database of handwritten digits".
    """
    folder = Path(data_dir)
    missing = [name for name in _MNIST_FILES.values() if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(f"MNIST: the folder {folder} has no {', '.join(missing)}. {_WAYS_TO_MNIST}")
    arrays = {part: _read_idx(folder / name) for part, name in _MNIST_FILES.items()}
    for split in ("train", "test"):
        images, labels = arrays[f"{split}_images"], arrays[f"{split}_labels"]
        if images.shape != (len(labels), 28, 28) or labels.ndim != 1:
            raise ValueError(
                f"MNIST: {folder} has {split} images of shape {images.shape} and labels of shape "
                f"{labels.shape}; they should be [examples, 28, 28] and [examples]."
            )
    return ImageData(
        "MNIST",
        arrays["train_images"].astype(np.float32) / np.float32(255),
        arrays["train_labels"].astype(np.int32),
        arrays["test_images"].astype(np.float32) / np.float32(255),
        arrays["test_labels"].astype(np.int32),
    )


def _read_idx(path: Path) -> NDArray[Any]:
    """An idx file of unsigned bytes: 0, 0, 8, rank; then sizes, big-endian int32; then the bytes."""
    try:
        with gzip.open(path) as stream:
            content = stream.read()
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"MNIST: {path} is not a complete gzip file: {error}.") from error
    if len(content) < 4 or content[:3] != b"\0\0\x08":
        raise ValueError(f"MNIST: {path} is not an idx file of unsigned bytes.")
    start = 4 + 4 * content[3]
    if len(content) < start:
        raise ValueError(f"MNIST: {path} ends within its header.")
    shape = struct.unpack(f">{content[3]}I", content[4:start])
    if len(content) != start + int(np.prod(shape)):
        raise ValueError(
            f"MNIST: {path} should have {int(np.prod(shape))} bytes of data for shape {shape}; it has "
            f"{len(content) - start}."
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)

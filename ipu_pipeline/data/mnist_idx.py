"""MNIST as its authors publish it, and data sets made like it: four idx files in a folder, gzipped or not.

Source of the idx format: Y. LeCun, C. Cortes, C. Burges, "The MNIST database of handwritten digits".
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["FILES", "NUM_CLASSES", "Splits", "missing_files", "read"]

FILES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)

NUM_CLASSES = 10

# "train" and "test": images uint8 [examples, 28, 28], labels uint8 [examples] in 0..9.
Splits = dict[str, tuple[NDArray[np.uint8], NDArray[np.uint8]]]


def missing_files(folder: Path) -> list[str]:
    """Returns which of the four files the folder has neither gzipped nor plain."""
    return [name for name in FILES if not _path_of(folder, name).is_file()]


def read(folder: Path, name: str = "MNIST") -> Splits:
    """Reads the four files."""
    missing = missing_files(folder)
    if missing:
        raise FileNotFoundError(f"{name}: the folder {folder} has no {', '.join(missing)}.")
    try:
        arrays = [_read_idx(_path_of(folder, file)) for file in FILES]
        splits = {"train": (arrays[0], arrays[1]), "test": (arrays[2], arrays[3])}
        for split, (images, labels) in splits.items():
            _check(folder, split, images, labels)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    return splits


def _path_of(folder: Path, name: str) -> Path:
    """The file's path, which has no ".gz" if there is only a plain one."""
    plain = folder / name.removesuffix(".gz")
    return plain if plain.is_file() and not (folder / name).is_file() else folder / name


def _check(folder: Path, split: str, images: NDArray[Any], labels: NDArray[Any]) -> None:
    if images.shape != (len(labels), 28, 28) or labels.ndim != 1:
        raise ValueError(
            f"{folder} has {split} images of shape {images.shape} and labels of shape {labels.shape}; they "
            "should be [examples, 28, 28] and [examples]."
        )
    if len(labels) == 0:
        raise ValueError(f"{folder} has {split} files without examples.")
    if labels.max() >= NUM_CLASSES:
        raise ValueError(
            f"{folder} has {split} labels up to {labels.max()}; they should be from 0 to {NUM_CLASSES - 1}."
        )


def _read_idx(path: Path) -> NDArray[Any]:
    """An idx file of unsigned bytes: 0, 0, 8, rank; then sizes, big-endian int32; then the bytes."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            content = stream.read()
    except (OSError, EOFError, zlib.error) as error:
        kind = "a complete gzip file" if path.suffix == ".gz" else "a file that can be read"
        raise ValueError(f"{path} is not {kind}: {error}.") from error
    if len(content) < 4 or content[:3] != b"\0\0\x08" or content[3] == 0:
        raise ValueError(f"{path} is not an idx file of unsigned bytes.")
    start = 4 + 4 * content[3]
    if len(content) < start:
        raise ValueError(f"{path} ends within its header.")
    shape = struct.unpack(f">{content[3]}I", content[4:start])
    if len(content) != start + math.prod(shape):
        raise ValueError(
            f"{path} should have {math.prod(shape)} bytes of data for shape {shape}; it has "
            f"{len(content) - start}."
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)

"""MNIST as its authors publish it: four gzipped idx files in a folder.

Source of the idx format: Y. LeCun, C. Cortes, C. Burges, "The MNIST database of handwritten digits".
"""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["FILES", "Splits", "missing_files", "read"]

FILES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)

# "train" and "test": images uint8 [examples, 28, 28], labels uint8 [examples].
Splits = dict[str, tuple[NDArray[np.uint8], NDArray[np.uint8]]]


def missing_files(folder: Path) -> list[str]:
    """Those of the four files that the folder lacks."""
    return [name for name in FILES if not (folder / name).is_file()]


def read(folder: Path) -> Splits:
    """Reads the four files.

    Args:
      folder: where they are.

    Returns:
      Images and labels in the order of the files.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file is not what its name says.
    """
    missing = missing_files(folder)
    if missing:
        raise FileNotFoundError(f"MNIST: the folder {folder} has no {', '.join(missing)}.")
    arrays = [_read_idx(folder / name) for name in FILES]
    splits = {"train": (arrays[0], arrays[1]), "test": (arrays[2], arrays[3])}
    for split, (images, labels) in splits.items():
        if images.shape != (len(labels), 28, 28) or labels.ndim != 1:
            raise ValueError(
                f"MNIST: {folder} has {split} images of shape {images.shape} and labels of shape "
                f"{labels.shape}; they should be [examples, 28, 28] and [examples]."
            )
    return splits


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

"""Small idx files under MNIST's names."""

import gzip
import struct

import numpy as np


def write_idx(path, array):
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    with gzip.open(path, "wb") as stream:
        stream.write(header + array.tobytes())


def write_mnist(folder, rng, num_train=12, num_test=5):
    folder.mkdir(exist_ok=True)
    for prefix, count in (("train", num_train), ("t10k", num_test)):
        images = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        images[:, 20:] = 0  # as there: an image ends in zeros
        write_idx(folder / f"{prefix}-images-idx3-ubyte.gz", images)
        labels = rng.integers(0, 10, count, dtype=np.uint8)
        write_idx(folder / f"{prefix}-labels-idx1-ubyte.gz", labels)

"""MNIST in two forms: its authors' idx files, and array_record files of tensorflow-datasets."""

from __future__ import annotations

import contextlib
import gzip
import math
import os
import shutil
import struct
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Four idx files in a folder, as MNIST's authors publish them, gzipped or not. Source of the format:
# Y. LeCun, C. Cortes, C. Burges, "The MNIST database of handwritten digits".

IDX_FILES = (
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
    return [name for name in IDX_FILES if not _path_of(folder, name).is_file()]


def read_idx(folder: Path, name: str = "MNIST") -> Splits:
    """Reads the four files."""
    missing = missing_files(folder)
    if missing:
        raise FileNotFoundError(f"{name}: the folder {folder} has no {', '.join(missing)}.")
    try:
        arrays = [_read_idx_file(_path_of(folder, file)) for file in IDX_FILES]
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


def _read_idx_file(path: Path) -> NDArray[Any]:
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


# The array_record form of tensorflow-datasets (tfds), without TensorFlow.
#
# tfds is imported where it is used: this takes half a second, which programs with other data should not
# pay. Nothing here touches the network: without one, tfds's downloader takes minutes to give up. As tfds
# needs TensorFlow to prepare MNIST, `write_tfds` brings a builder of its own, which differs from tfds's in
# two ways: the examples keep the order of the idx files, so that a run is the same with either, and an
# image is stored as its bytes, which is read three times faster than a PNG.

_NAME, _VERSION = "mnist", "3.0.1"
TFDS_DATASET = f"{_NAME}/{_VERSION}"  # in tfds's folder
_FORMAT = "array_record"
_SHAPES = {"image": (28, 28, 1), "label": ()}
_CHUNK = 4096  # examples read at once: tfds takes five times as long for one after another
_WAY_OUT = (
    "`python scripts/prepare_mnist.py --idx-dir FOLDER --data-dir TARGET` writes one that can be read"
)


def default_folder() -> Path:
    """The folder in which tfds keeps data by default."""
    return Path(os.path.expanduser(os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"))


@contextlib.contextmanager
def needing_the_extra() -> Iterator[None]:
    """Raises a ValueError if a package of the extra `datasets` is imported and is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{TFDS_DATASET} is read and written by {error.name}, which is not installed; install the "
            "extra: pip install 'ipu_pipeline[datasets]'."
        ) from error


@needing_the_extra()
def read_tfds(folder: Path) -> Splits:
    """Reads what `write_tfds` wrote, or what tfds's own builder prepared in array_record form elsewhere."""
    path = folder / TFDS_DATASET
    if not path.is_dir():
        if any(path.parent.glob("incomplete.*")):  # tfds renames it when it is complete
            raise ValueError(f"{path} is not completely prepared; {_WAY_OUT}.")
        raise FileNotFoundError(f"{folder} has no {TFDS_DATASET}.")
    lacking = [name for name in ("dataset_info.json", "features.json") if not (path / name).is_file()]
    if lacking:
        raise ValueError(f"{path} is not completely prepared, it has no {', '.join(lacking)}; {_WAY_OUT}.")
    import tensorflow_datasets as tfds

    try:
        # Not tfds.data_source("mnist"): it takes the features of tfds's own builder, and looks for PNGs.
        builder = tfds.builder_from_directory(path)
        formats = sorted(form.value for form in builder.info.available_file_formats())
        shapes = dict(builder.info.features.shape)
    except ModuleNotFoundError:
        raise
    except Exception as error:  # json, protobuf and tfds have no common class of errors
        raise ValueError(f"{path} is damaged ({_first_line(error)}); {_WAY_OUT}.") from error
    if _FORMAT not in formats:
        raise ValueError(
            f"{path} is in {' and '.join(formats)} form, and only {_FORMAT} is read here; {_WAY_OUT}."
        )
    if shapes != _SHAPES:
        raise ValueError(f"{path} has the features {shapes} instead of {_SHAPES}; {_WAY_OUT}.")
    try:
        return {split: _read_split(builder.as_data_source(split)) for split in ("train", "test")}
    except ModuleNotFoundError:
        raise
    except Exception as error:  # raised by tfds, array_record or the decoder of images
        raise ValueError(f"{path} is incomplete or damaged ({_first_line(error)}); {_WAY_OUT}.") from error


def _read_split(source: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    images = np.empty((len(source), 28, 28), np.uint8)
    labels = np.empty(len(source), np.uint8)
    for start in range(0, len(source), _CHUNK):
        indices = range(start, min(start + _CHUNK, len(source)))
        for index, example in zip(indices, source.__getitems__(indices), strict=True):
            images[index] = example["image"][:, :, 0]
            labels[index] = example["label"]
    return images, labels


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0].removesuffix(".")


@needing_the_extra()
def write_tfds(splits: Splits, folder: Path, overwrite: bool = False) -> Path:
    """Writes MNIST in the form that `read_tfds` expects."""
    path = folder / TFDS_DATASET
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} exists already.")
    import tensorflow_datasets as tfds

    # Registered, it would stand in the way of tfds's own. (mypy knows no base class, hence no keyword.)
    class Mnist(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # type: ignore[call-arg]
        """A builder under the name and version of tfds's own, whose directory readers look for."""

        name = _NAME
        VERSION = tfds.core.Version(_VERSION)

        def _info(self) -> Any:
            image = tfds.features.Tensor(
                shape=_SHAPES["image"], dtype=np.uint8, encoding=tfds.features.Encoding.BYTES
            )
            label = tfds.features.ClassLabel(num_classes=NUM_CLASSES)
            return tfds.core.DatasetInfo(
                builder=self,
                description="MNIST in the order of its idx files, an image being its bytes.",
                features=tfds.features.FeaturesDict({"image": image, "label": label}),
                supervised_keys=("image", "label"),
                disable_shuffling=True,
            )

        def _split_generators(self, dl_manager: Any) -> dict[str, Iterator[Any]]:
            del dl_manager
            return {split: self._generate_examples(split) for split in splits}

        def _generate_examples(self, split: str) -> Iterator[tuple[int, dict[str, Any]]]:
            for index, (image, label) in enumerate(zip(*splits[split], strict=True)):
                yield index, {"image": image[:, :, None], "label": int(label)}

    folder.mkdir(parents=True, exist_ok=True)
    # Asked to overwrite, tfds deletes what is there before it has anything better.
    with tempfile.TemporaryDirectory(dir=folder, prefix="preparing-") as temporary:
        Mnist(data_dir=temporary, file_format=_FORMAT).download_and_prepare(
            download_config=tfds.download.DownloadConfig(try_download_gcs=False)
        )
        if path.exists():
            shutil.rmtree(path)
        path.parent.mkdir(exist_ok=True)
        (Path(temporary) / TFDS_DATASET).rename(path)
    return path

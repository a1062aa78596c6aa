"""MNIST as tensorflow-datasets keeps it. Nothing here may touch the network."""

import io
import json
import os
import runpy
import shutil
import socket
import sys
from pathlib import Path

import numpy as np
import pytest

from ipu_pipeline import datasets
from ipu_pipeline.data import mnist
from tests.support.idx_files import write_mnist

SCRIPT = Path(__file__).parents[2] / "scripts" / "prepare_mnist.py"
ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError(f"the network was used: {arguments}")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture(autouse=True)
def given_folder(monkeypatch):
    """What the environment variable gives, which is not set while the test runs."""
    given = os.environ.get(datasets.DATA_DIR_VARIABLE)
    monkeypatch.delenv(datasets.DATA_DIR_VARIABLE, raising=False)
    return given


@pytest.fixture
def idx_folder(tmp_path, rng):
    write_mnist(tmp_path / "idx", rng)
    return tmp_path / "idx"


@pytest.fixture
def tfds_folder(tmp_path, idx_folder):
    mnist.write_tfds(mnist.read_idx(idx_folder), tmp_path / "tfds")
    return tmp_path / "tfds"


def assert_same(data, expected):
    for name in ARRAYS:
        array, wanted = getattr(data, name), getattr(expected, name)
        assert array.dtype == wanted.dtype
        assert array.shape == wanted.shape
        assert array.tobytes() == wanted.tobytes(), name


@pytest.mark.thorough
def test_real_mnist(tmp_path, given_folder):
    if given_folder is None:
        pytest.skip(f"{datasets.DATA_DIR_VARIABLE} is not set")
    folder = Path(given_folder)
    if mnist.missing_files(folder):
        pytest.skip(f"{datasets.DATA_DIR_VARIABLE} has no idx files")
    mnist.write_tfds(mnist.read_idx(folder), tmp_path)
    assert_same(datasets.load_mnist(tmp_path), datasets.load_mnist(folder))


def test_as_any_reader_of_tfds_finds_it(tfds_folder, idx_folder):
    import tensorflow_datasets as tfds

    source = tfds.data_source("mnist:3.0.1", split="train", data_dir=tfds_folder, download=False)
    images, labels = mnist.read_idx(idx_folder)["train"]
    assert len(source) == len(labels)
    np.testing.assert_array_equal(source[3]["image"][:, :, 0], images[3])
    assert source[3]["label"] == labels[3]


def test_selection(tfds_folder, idx_folder, monkeypatch):
    data, line = datasets.load("auto", str(tfds_folder))
    assert data.name == "MNIST"
    given = f"--data-dir gives the folder {tfds_folder}"
    assert line == f"Data set: MNIST, since {given} with tensorflow-datasets' mnist/3.0.1"
    monkeypatch.setenv(datasets.DATA_DIR_VARIABLE, str(tfds_folder))
    assert "since IPU_PIPELINE_DATA_DIR gives the folder" in datasets.load("auto")[1]
    shutil.copytree(tfds_folder, idx_folder, dirs_exist_ok=True)
    given = f"--data-dir gives the folder {idx_folder}"
    line = datasets.load("mnist", str(idx_folder))[1]
    assert line == f"Data set: MNIST, as --dataset mnist asks: {given} with its idx files"


def test_where_tfds_keeps_data(tfds_folder, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tfds_folder))
    data, line = datasets.load("auto")
    assert data.train_images.shape == (12, 28, 28)
    assert line == f"Data set: MNIST, since tensorflow-datasets' folder {tfds_folder} has mnist/3.0.1"
    assert "as --dataset mnist asks: tensorflow-datasets' folder" in datasets.load("mnist")[1]
    assert datasets.load("digits")[0].name == "digits"
    monkeypatch.delenv("TFDS_DATA_DIR")
    monkeypatch.setenv("HOME", str(tfds_folder.parent))
    assert mnist.default_folder() == tfds_folder.parent / "tensorflow_datasets"
    assert datasets.load("auto")[0].name == "digits"
    tfds_folder.rename(tfds_folder.parent / "tensorflow_datasets")
    assert datasets.load("auto")[0].name == "MNIST"


def edit_info(path, **changes):
    info = json.loads((path / "dataset_info.json").read_text())
    (path / "dataset_info.json").write_text(json.dumps({**info, **changes}))


def make_tfrecord(path):
    edit_info(path, fileFormat="tfrecord")
    for shard in path.glob("*array_record*"):
        shard.rename(str(shard).replace("array_record", "tfrecord"))


def make_narrow(path):
    text = (path / "features.json").read_text()
    (path / "features.json").write_text(text.replace('"28"', '"27"'))


def cut_shard(path):
    (shard,) = path.glob("mnist-test.array_record*")
    shard.write_bytes(shard.read_bytes()[:-70_000])


FAULTS = {
    "another format": (make_tfrecord, "mnist/3.0.1 is in tfrecord form, and only array_record is read"),
    "no information": (
        lambda path: (path / "dataset_info.json").unlink(),
        "mnist/3.0.1 is not completely prepared, it has no dataset_info.json",
    ),
    "no features": (lambda path: (path / "features.json").unlink(), "it has no features.json"),
    "interrupted": (
        lambda path: path.rename(path.parent / "incomplete.ABC123_3.0.1"),
        "mnist/3.0.1 is not completely prepared",
    ),
    "no json": (lambda path: (path / "dataset_info.json").write_text("{"), "is damaged .ParseError"),
    "no splits": (lambda path: edit_info(path, splits=[]), "is incomplete or damaged .KeyError"),
    "other features": (make_narrow, r"has the features .*\(27, 27, 1\)"),
    "no shard": (
        lambda path: next(path.glob("mnist-train.array_record*")).unlink(),
        "is incomplete or damaged .*No such file",
    ),
    "cut shard": (cut_shard, "is incomplete or damaged"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_cannot_be_read(fault, tfds_folder, monkeypatch):
    damage, message = FAULTS[fault]
    damage(tfds_folder / "mnist" / "3.0.1")
    way_out = (
        "python scripts/prepare_mnist.py --idx-dir FOLDER --data-dir TARGET` writes one that can be read"
    )
    with pytest.raises(ValueError, match=f"{message}.*{way_out}") as caught:
        datasets.load("auto", str(tfds_folder))
    assert "\n" not in str(caught.value)
    # Where nobody asked for it, it is only said.
    monkeypatch.setenv("TFDS_DATA_DIR", str(tfds_folder))
    data, line = datasets.load("auto")
    assert data.name == "digits"
    assert line == (
        "Data set: the embedded 8x8 digits, since neither --data-dir nor IPU_PIPELINE_DATA_DIR gives a "
        f"folder with MNIST, and {caught.value}".removesuffix(".")
    )
    with pytest.raises(ValueError, match=f"--dataset mnist: no folder was given.*{message}"):
        datasets.load("mnist")


def test_what_is_not_there(tfds_folder, monkeypatch):
    (tfds_folder / "mnist" / "3.0.1").rename(tfds_folder / "mnist" / "1.0.0")
    with pytest.raises(FileNotFoundError, match="has no train-images.*, and no mnist/3.0.1. Give --data"):
        datasets.load("auto", str(tfds_folder))
    monkeypatch.setenv("TFDS_DATA_DIR", str(tfds_folder))
    assert datasets.load("auto")[1].endswith(f"and {tfds_folder} has no mnist/3.0.1")


def test_several_formats(tfds_folder, idx_folder):
    formats = {"fileFormat": "tfrecord", "alternativeFileFormats": ["array_record"]}
    edit_info(tfds_folder / "mnist" / "3.0.1", **formats)
    assert_same(datasets.load_mnist(tfds_folder), datasets.load_mnist(idx_folder))


def test_what_its_own_builder_prepared(tmp_path, idx_folder):
    """tfds's MNIST with its PNGs made by Pillow, which without TensorFlow it cannot make itself."""
    import tensorflow_datasets as tfds
    from PIL import Image
    from tensorflow_datasets.image_classification import mnist as official

    splits = mnist.read_idx(idx_folder)

    class Mnist(official.MNIST, skip_registration=True):
        name = "mnist"

        def _split_generators(self, dl_manager):
            del dl_manager
            return {split: self._generate_examples(split) for split in splits}

        def _generate_examples(self, split):
            for index, (image, label) in enumerate(zip(*splits[split], strict=True)):
                stream = io.BytesIO()
                Image.fromarray(image).save(stream, "png")
                yield index, {"image": stream.getvalue(), "label": int(label)}

    tfds.disable_progress_bar()
    Mnist(data_dir=tmp_path, file_format="array_record").download_and_prepare()
    features = json.loads((tmp_path / "mnist" / "3.0.1" / "features.json").read_text())
    assert "image_feature.Image" in json.dumps(features)
    data, expected = datasets.load_mnist(tmp_path), datasets.load_mnist(idx_folder)
    order = [  # a shuffled one
        next(i for i, image in enumerate(expected.train_images) if np.array_equal(image, found))
        for found in data.train_images
    ]
    assert sorted(order) == list(range(12))
    assert order != sorted(order)
    np.testing.assert_array_equal(data.train_labels, expected.train_labels[order])
    assert data.train_images.dtype == np.float32
    assert sorted(data.test_labels) == sorted(expected.test_labels)


def run_script(monkeypatch, capsys, *options):
    """What it prints, or its error."""
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, options)])
    try:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    except SystemExit as error:
        return str(error)
    return capsys.readouterr().out


def test_script(idx_folder, tmp_path, rng, monkeypatch, capsys):
    target = tmp_path / "new" / "target"
    options = ("--idx-dir", idx_folder, "--data-dir", target)
    path = target / "mnist" / "3.0.1"
    wrote = f"Wrote {path}: 12 images to train on, 5 held out\n"
    assert run_script(monkeypatch, capsys, *options) == wrote
    before = datasets.load_mnist(idx_folder)
    write_mnist(idx_folder, rng)
    assert run_script(monkeypatch, capsys, *options) == (
        f"Error: {path} exists already. Give --overwrite to replace it."
    )
    assert_same(datasets.load_mnist(target), before)
    assert run_script(monkeypatch, capsys, *options, "--overwrite") == wrote
    assert_same(datasets.load_mnist(target), datasets.load_mnist(idx_folder))
    (idx_folder / mnist.IDX_FILES[0]).write_bytes(b"nothing")
    assert "is not a complete gzip file" in run_script(monkeypatch, capsys, *options, "--overwrite")
    assert len(datasets.load_mnist(target).train_images) == 12  # what was there is still there


def test_script_without_files(tmp_path, monkeypatch, capsys):
    error = run_script(monkeypatch, capsys, "--idx-dir", tmp_path, "--data-dir", tmp_path / "target")
    assert error.startswith(f"Error: MNIST: the folder {tmp_path} has no train-images")
    assert "\n" not in error
    assert not (tmp_path / "target").exists()


def test_a_failure_while_writing_leaves_what_was_there(tfds_folder, idx_folder):
    """Which is the examples of the idx files, in their order."""
    splits = mnist.read_idx(idx_folder)
    images, labels = splits["train"]
    with pytest.raises(ValueError, match="zip"):
        mnist.write_tfds({**splits, "train": (images, labels[:-1])}, tfds_folder, overwrite=True)
    assert_same(datasets.load_mnist(tfds_folder), datasets.load_mnist(idx_folder))
    assert sorted(path.name for path in tfds_folder.iterdir()) == ["mnist"]


@pytest.mark.parametrize("name", ["importlib_resources", "PIL"])
def test_with_a_part_of_the_extra(name, tmp_path, monkeypatch):
    """tfds imports them when it first needs them."""

    def without(*_arguments):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(mnist, "_read_split", without)
    split = np.zeros((2, 28, 28), np.uint8), np.zeros(2, np.uint8)
    mnist.write_tfds({"train": split, "test": split}, tmp_path)
    with pytest.raises(ValueError, match=rf"by {name}, which is not installed; .*\[datasets\]"):
        mnist.read_tfds(tmp_path)


def test_without_the_extra(tmp_path, monkeypatch):
    folder = tmp_path / mnist.TFDS_DATASET
    folder.mkdir(parents=True)
    for name in ("dataset_info.json", "features.json"):
        (folder / name).write_text("{}")
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(ValueError, match=r"not installed; install the extra: .*\[datasets\]"):
        datasets.load_mnist(tmp_path)
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    data, why = datasets.load("auto")
    assert data.name == "digits"
    assert "not installed" in why

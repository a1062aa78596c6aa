import gzip
import itertools
import os

import numpy as np
import pytest

from ipu_pipeline import datasets
from tests.support.idx_files import write_idx, write_mnist


def test_digits():
    data = datasets.load_digits()
    assert data.train_images.shape == (1437, 28, 28)
    assert data.test_images.shape == (360, 28, 28)
    assert data.train_images.dtype == data.test_images.dtype == np.float32
    assert data.train_labels.dtype == data.test_labels.dtype == np.int32
    images = np.concatenate([data.train_images, data.test_images])
    assert images.min() == 0
    assert images.max() == 1
    assert not images[:, [0, 1, 26, 27]].any()
    assert not images[:, :, [0, 1, 26, 27]].any()
    inner = images[:, 2:26, 2:26].reshape(-1, 8, 3, 8, 3)
    assert (inner == inner[:, :, :1, :, :1]).all()  # every pixel three times in each direction
    labels = np.concatenate([data.train_labels, data.test_labels])
    np.testing.assert_array_equal(np.bincount(labels), [178, 182, 177, 183, 181, 182, 181, 179, 174, 180])
    again = datasets.load_digits()
    np.testing.assert_array_equal(again.test_images, data.test_images)
    assert np.bincount(data.test_labels).min() > 20  # shuffled


def test_training_batches():
    images = np.arange(10, dtype=np.float32)[:, None]
    batches = datasets.TrainingBatches(images, np.arange(10, dtype=np.int32), 3, seed=1)
    taken = list(itertools.islice(batches, 7))
    for batch_images, labels in taken:
        assert batch_images.shape == (3, 1)
        assert labels.dtype == np.int32
        np.testing.assert_array_equal(batch_images[:, 0], labels)
    epoch = np.concatenate([labels for _images, labels in taken[:3]])
    assert len(set(epoch)) == 9  # the remainder is dropped
    assert list(epoch) != sorted(epoch)
    np.testing.assert_array_equal(taken[3][1], taken[0][1])
    np.testing.assert_array_equal(next(iter(batches))[1], taken[0][1])
    other = datasets.TrainingBatches(images, np.arange(10, dtype=np.int32), 3, seed=2)
    assert not np.array_equal(next(iter(other))[1], taken[0][1])
    with pytest.raises(ValueError, match="from 1 to the number of examples, 10; got 11"):
        datasets.TrainingBatches(images, np.arange(10, dtype=np.int32), 11)


@pytest.mark.parametrize(("num_examples", "num_batches"), [(8, 2), (9, 3), (1, 1)])
def test_evaluation_batches_cover_everything_once(num_examples, num_batches):
    images = np.arange(num_examples, dtype=np.float32)[:, None]
    batches = datasets.EvaluationBatches(images, np.arange(num_examples, dtype=np.int32), 4)
    taken = list(batches)
    assert len(taken) == len(batches) == num_batches
    assert all(part.shape[0] == 4 for batch in taken for part in batch)
    kept = np.concatenate([labels[mask] for _images, labels, mask in taken])
    np.testing.assert_array_equal(kept, np.arange(num_examples))


@pytest.fixture
def mnist_folder(tmp_path, rng):
    write_mnist(tmp_path, rng)
    return tmp_path


def test_broken_mnist(mnist_folder, tmp_path):
    path = mnist_folder / "t10k-labels-idx1-ubyte.gz"
    whole = path.read_bytes()
    for content, message in (
        (whole[:-10], "t10k-labels.*not a complete gzip file"),
        (gzip.compress(b"no idx"), "not an idx file"),
        (gzip.compress(gzip.decompress(whole)[:-1]), "should have 5 bytes.*has 4"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            datasets.load_mnist(mnist_folder)
    write_idx(path, np.zeros(6, np.uint8))
    with pytest.raises(ValueError, match="test images of shape"):
        datasets.load_mnist(mnist_folder)
    path.unlink()
    with pytest.raises(FileNotFoundError, match="has no t10k-labels-idx1-ubyte.gz.*--data-dir"):
        datasets.load_mnist(mnist_folder)


def test_plain_files(mnist_folder):
    expected = datasets.load_mnist(mnist_folder)
    assert (expected.train_images.shape, expected.test_labels.shape) == ((12, 28, 28), (5,))
    assert expected.train_images.dtype == np.float32
    assert 0 <= expected.train_images.min() < expected.train_images.max() <= 1
    for path in list(mnist_folder.iterdir())[:3]:
        path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()
    data = datasets.load_mnist(mnist_folder)
    np.testing.assert_array_equal(data.train_images, expected.train_images)
    np.testing.assert_array_equal(data.test_labels, expected.test_labels)
    path = mnist_folder / "t10k-labels-idx1-ubyte"
    (mnist_folder / f"{path.name}.gz").unlink(missing_ok=True)
    path.write_bytes(gzip.compress(b"no plain one"))
    with pytest.raises(ValueError, match="MNIST: .*t10k-labels-idx1-ubyte is not an idx file"):
        datasets.load_mnist(mnist_folder)


def test_what_is_no_set_of_ten_classes(mnist_folder):
    path = mnist_folder / "t10k-labels-idx1-ubyte.gz"
    write_idx(path, np.array([1, 2, 10, 4, 5], np.uint8))
    with pytest.raises(ValueError, match="MNIST: .* has test labels up to 10; they should be from 0 to 9"):
        datasets.load_mnist(mnist_folder)
    write_idx(path, np.zeros(0, np.uint8))
    write_idx(mnist_folder / "t10k-images-idx3-ubyte.gz", np.zeros((0, 28, 28), np.uint8))
    with pytest.raises(ValueError, match="has test files without examples"):
        datasets.load_mnist(mnist_folder)
    write_idx(path, np.array(3, np.uint8))
    with pytest.raises(ValueError, match="is not an idx file of unsigned bytes"):
        datasets.load_mnist(mnist_folder)


def test_selection_of_clothes(mnist_folder, monkeypatch, tmp_path):
    monkeypatch.delenv(datasets.FASHION_DIR_VARIABLE, raising=False)
    data, line = datasets.load_fashion("auto")
    assert (data.name, data.classes) == ("digits", tuple("0123456789"))
    neither = "neither --data-dir nor IPU_PIPELINE_FASHION_DIR gives a folder with Fashion-MNIST"
    assert line.endswith(f"since {neither}")
    with pytest.raises(ValueError, match="--dataset fashion: no folder was given. Give --data-dir, or set"):
        datasets.load_fashion("fashion")
    data, line = datasets.load_fashion("auto", str(mnist_folder))
    assert (data.name, data.classes) == ("Fashion-MNIST", datasets.CLOTHES)
    assert line == f"Data set: Fashion-MNIST, since --data-dir gives the folder {mnist_folder}"
    monkeypatch.setenv(datasets.FASHION_DIR_VARIABLE, str(mnist_folder))
    line = datasets.load_fashion("fashion")[1]
    assert "as --dataset fashion asks: IPU_PIPELINE_FASHION_DIR gives" in line
    assert datasets.load_fashion("digits")[0].name == "digits"
    with pytest.raises(ValueError, match="--data-dir x has no use with --dataset digits"):
        datasets.load_fashion("digits", "x")
    with pytest.raises(ValueError, match="must be auto, fashion or digits; got 'mnist'"):
        datasets.load_fashion("mnist")
    (mnist_folder / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(FileNotFoundError, match=r"^Fashion-MNIST: .* has no t10k-labels.*with or without"):
        datasets.load_fashion("auto")


def test_selection(mnist_folder, monkeypatch):
    monkeypatch.delenv(datasets.DATA_DIR_VARIABLE, raising=False)
    data, line = datasets.load("auto")
    assert data.name == "digits"
    assert "since neither --data-dir nor IPU_PIPELINE_DATA_DIR" in line
    data, line = datasets.load("auto", str(mnist_folder))
    assert data.name == "MNIST"
    assert "since --data-dir gives" in line
    with pytest.raises(ValueError, match=r"no folder was given.*Give --data-dir.*--dataset digits"):
        datasets.load("mnist")
    monkeypatch.setenv(datasets.DATA_DIR_VARIABLE, str(mnist_folder))
    data, line = datasets.load("auto")
    assert data.name == "MNIST"
    assert f"since {datasets.DATA_DIR_VARIABLE} gives" in line
    assert datasets.load("mnist")[0].name == "MNIST"
    assert datasets.load("digits")[0].name == "digits"
    assert "\n" not in line
    with pytest.raises(ValueError, match="must be auto, mnist or digits; got 'cifar'"):
        datasets.load("cifar")


@pytest.mark.skipif("IPU_PIPELINE_DATA_DIR" not in os.environ, reason="IPU_PIPELINE_DATA_DIR is not set")
def test_real_mnist():
    data = datasets.load_mnist(os.environ["IPU_PIPELINE_DATA_DIR"])
    assert len(data.train_images) == 60_000
    np.testing.assert_array_equal(
        np.bincount(data.test_labels), [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    )

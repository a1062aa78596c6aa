"""Data sets of other libraries, as an infeed's: each goes through a pipeline and comes out again."""

import numpy as np
import pytest

import ipu_pipeline as ipu
from ipu_pipeline.data import mnist_tfds
from ipu_pipeline.ipu_infeed_queue import IPUInfeedQueue
from tests.support import front

IMAGES = np.arange(32, dtype=np.uint8).reshape(8, 2, 2)
LABELS = np.arange(8)
EXAMPLES = [{"image": image, "label": label} for image, label in zip(IMAGES, LABELS, strict=True)]


def pass_images_and_labels(image, label):
    return image, label


def through_a_pipeline(dataset, stage=pass_images_and_labels, count=4):
    """What an outfeed has after `count` micro-batches; on one IPU, from the beginning again, the same."""
    infeed_queue = IPUInfeedQueue(dataset)
    initializer = infeed_queue.initializer

    def run(session, device_mapping):
        outfeed_queue = ipu.ipu_outfeed_queue.IPUOutfeedQueue()

        def model():
            return ipu.pipelining_ops.pipeline(
                [stage, lambda *values: values],
                gradient_accumulation_count=count,
                infeed_queue=infeed_queue,
                outfeed_queue=outfeed_queue,
                device_mapping=device_mapping,
            )

        program = front.compile_program(model)
        session.run(initializer)
        session.run(program)
        return session.run(outfeed_queue.dequeue())

    with ipu.Session() as session:
        found = run(session, [0, 1])
        again = run(session, [0, 0])
    for first, second in zip(found, again, strict=True):
        np.testing.assert_array_equal(first, second)
    return found


@pytest.fixture
def source(tmp_path):
    """A data source of tensorflow-datasets."""
    import tensorflow_datasets as tfds

    images = np.random.default_rng(0).integers(0, 256, (8, 28, 28), dtype=np.uint8)
    split = (images, LABELS.astype(np.uint8))
    mnist_tfds.write({"train": split, "test": split}, tmp_path)
    return tfds.builder_from_directory(tmp_path / mnist_tfds.DATASET).as_data_source("train"), images


def test_tfds_data_source(source):
    source, images = source
    found = through_a_pipeline(source)
    assert [array.dtype for array in found] == [np.uint8, np.int32]
    np.testing.assert_array_equal(found[0][..., 0], images[:4])
    np.testing.assert_array_equal(found[1], LABELS[:4])


@pytest.fixture
def grain():
    return pytest.importorskip("grain", reason="grain is not installed")


def test_grain_map_dataset(grain, source):
    whole = grain.MapDataset.source(EXAMPLES)
    images, labels = through_a_pipeline(whole, count=8)
    np.testing.assert_array_equal(images, IMAGES)
    np.testing.assert_array_equal(labels, LABELS)
    images, labels = through_a_pipeline(whole.repeat().batch(4))
    np.testing.assert_array_equal(images, np.tile(IMAGES, (2, 1, 1)).reshape(4, 4, 2, 2))
    np.testing.assert_array_equal(labels, np.tile(LABELS, 2).reshape(4, 4))
    source, images = source
    scaled = grain.MapDataset.source(source).map(
        lambda example: (example["image"].astype(np.float32) / 255, example["label"])
    )
    found, labels = through_a_pipeline(scaled.batch(2))
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found.reshape(8, 28, 28), images.astype(np.float32) / 255)
    np.testing.assert_array_equal(labels.reshape(8), LABELS)


def test_grain_iter_dataset(grain):
    dataset = grain.MapDataset.source(EXAMPLES).to_iter_dataset().batch(2)
    images, labels = through_a_pipeline(dataset)
    np.testing.assert_array_equal(images, IMAGES.reshape(4, 2, 2, 2))
    np.testing.assert_array_equal(labels, LABELS.reshape(4, 2))


def test_grain_data_loader(grain):
    sampler = grain.samplers.IndexSampler(
        8, shard_options=grain.sharding.NoSharding(), shuffle=True, num_epochs=1, seed=1
    )
    loader = grain.DataLoader(
        data_source=EXAMPLES, sampler=sampler, operations=[grain.transforms.Batch(2, drop_remainder=True)]
    )
    images, labels = through_a_pipeline(loader)
    assert sorted(labels.ravel()) == list(LABELS)
    np.testing.assert_array_equal(images.reshape(8, 2, 2), IMAGES[labels.ravel()])


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="torch is not installed")


def torch_loader(torch, *arrays, **options):
    dataset = torch.utils.data.TensorDataset(*map(torch.as_tensor, arrays))
    return torch.utils.data.DataLoader(dataset, batch_size=2, **options)


def test_torch_tensors(torch):
    images, labels = through_a_pipeline(torch_loader(torch, IMAGES, LABELS))
    np.testing.assert_array_equal(images, IMAGES.reshape(4, 2, 2, 2))
    np.testing.assert_array_equal(labels, LABELS.reshape(4, 2))
    assert labels.dtype == np.int32


def test_torch_dicts_shuffled(torch):
    generator = torch.Generator()

    def loader():
        generator.manual_seed(3)
        return torch.utils.data.DataLoader(EXAMPLES, batch_size=2, shuffle=True, generator=generator)

    images, labels = through_a_pipeline(loader)
    assert sorted(labels.ravel()) == list(LABELS)
    np.testing.assert_array_equal(images.reshape(8, 2, 2), IMAGES[labels.ravel()])


def test_torch_dtypes(torch):
    dtypes = {"bool": np.bool_, "int64": np.int32, "float64": np.float32}
    dtypes |= {name: np.dtype(name) for name in ("uint8", "int8", "int32", "float16", "float32")}
    tensors = [torch.arange(8).to(getattr(torch, name)) for name in dtypes]
    found = through_a_pipeline(torch_loader(torch, *tensors), stage=lambda *values: values)
    for array, tensor, expected in zip(found, tensors, dtypes.values(), strict=True):
        assert array.dtype == expected
        np.testing.assert_array_equal(array.ravel(), tensor.numpy())


def test_torch_tensors_that_numpy_cannot_read(torch):
    with pytest.raises(ValueError, match="Element 0 .*a leaf of type Tensor; .*BFloat16"):
        _shapes = IPUInfeedQueue(torch_loader(torch, torch.zeros(2, dtype=torch.bfloat16))).element
    with pytest.raises(ValueError, match="Use tensor.detach"):
        _shapes = IPUInfeedQueue([torch.zeros(2, requires_grad=True)]).element


def test_torch_remainder(torch):
    queue = IPUInfeedQueue(torch_loader(torch, np.zeros(3, np.float32)))
    queue.initialize()
    take_some = queue.connect(list)
    take_some(1)
    with pytest.raises(ValueError, match=r"element 1 .*float32\[2\]; got float32\[1\]. .*drop_remainder"):
        take_some(1)
    queue.delete()


class EagerTensor:
    """As much of TensorFlow's as is used: it iterates and is indexed like an array, but is none."""

    def __init__(self, array):
        self._array = np.asarray(array)

    def numpy(self):
        return self._array

    def __array__(self, dtype=None, copy=None):
        return np.array(self._array, dtype)

    def __len__(self):
        return len(self._array)

    def __getitem__(self, index):
        return EagerTensor(self._array[index])


class TFDataset:
    """Behaves like a batched tf.data.Dataset of (image, label)."""

    def __iter__(self):
        for images, labels in self.as_numpy_iterator():
            yield EagerTensor(images), EagerTensor(labels)

    def as_numpy_iterator(self):
        return zip(IMAGES.reshape(4, 2, 2, 2), LABELS.reshape(4, 2), strict=True)

    def __len__(self):
        return 4


def test_tf_data():
    dataset = TFDataset()
    for given in (dataset, dataset.as_numpy_iterator):
        images, labels = through_a_pipeline(given)
        np.testing.assert_array_equal(images, IMAGES.reshape(4, 2, 2, 2))
        np.testing.assert_array_equal(labels, LABELS.reshape(4, 2))
        assert [images.dtype, labels.dtype] == [np.uint8, np.int32]
    with pytest.raises(TypeError, match="it is an iterator .zip.*a callable"):
        IPUInfeedQueue(dataset.as_numpy_iterator())

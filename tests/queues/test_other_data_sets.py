"""Data sets of other libraries, as an infeed's: each goes through a pipeline and comes out again."""

import grain
import numpy as np
import pytest
import torch

import ipu_pipeline as ipu
from ipu_pipeline.data import mnist
from ipu_pipeline.ipu_infeed_queue import IPUInfeedQueue
from tests.support import front

IMAGES = np.arange(32, dtype=np.uint8).reshape(8, 2, 2)
LABELS = np.arange(8)
EXAMPLES = [{"image": image, "label": label} for image, label in zip(IMAGES, LABELS, strict=True)]


def pass_images_and_labels(image, label):
    return image, label


def through_a_pipeline(dataset, stage=pass_images_and_labels, count=4):
    """What an outfeed has after `count` micro-batches; from the beginning again, the same."""
    infeed_queue, outfeed_queue = IPUInfeedQueue(dataset), ipu.ipu_outfeed_queue.IPUOutfeedQueue()
    initializer = infeed_queue.initializer
    program = front.compile_pipeline([stage], count, infeed_queue=infeed_queue, outfeed_queue=outfeed_queue)
    with ipu.Session() as session:
        found, again = (
            session.run([initializer, program, outfeed_queue.dequeue()])[-1] for _time in range(2)
        )
    for first, second in zip(found, again, strict=True):
        np.testing.assert_array_equal(first, second)
    return found


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


class NotEager:
    """Behaves like a tf.data.Dataset after tf.disable_v2_behavior()."""

    def __iter__(self):
        raise RuntimeError(
            "__iter__() is only supported inside of tf.function or when eager execution is on"
        )


def test_a_set_of_tensorflow_without_eager_execution():
    with pytest.raises(RuntimeError, match=r"a NotEager, .* which tf.disable_v2_behavior\(\).* Leave them"):
        through_a_pipeline(NotEager())


def grain_loader():
    sampler = grain.samplers.IndexSampler(
        8, shard_options=grain.sharding.NoSharding(), shuffle=True, num_epochs=1, seed=1
    )
    batch = grain.transforms.Batch(2, drop_remainder=True)
    return grain.DataLoader(data_source=EXAMPLES, sampler=sampler, operations=[batch])


def torch_loader(*arrays, **options):
    dataset = torch.utils.data.TensorDataset(*map(torch.as_tensor, arrays))
    return torch.utils.data.DataLoader(dataset, batch_size=2, **options)


def torch_dicts_shuffled():
    generator = torch.Generator()

    def loader():
        generator.manual_seed(3)
        return torch.utils.data.DataLoader(EXAMPLES, batch_size=2, shuffle=True, generator=generator)

    return loader


@pytest.mark.parametrize(
    "make",
    [
        lambda: grain.MapDataset.source(EXAMPLES).repeat().batch(2),
        lambda: grain.MapDataset.source(EXAMPLES).to_iter_dataset().batch(2),
        grain_loader,
        lambda: torch_loader(IMAGES, LABELS),
        torch_dicts_shuffled,
        TFDataset,
        lambda: TFDataset().as_numpy_iterator,
    ],
    ids=["grain mapped", "grain iterated", "grain loader", "torch", "torch shuffled", "tf", "tf arrays"],
)
def test_images_and_labels(make):
    images, labels = through_a_pipeline(make())
    assert (images.dtype, labels.dtype) == (np.uint8, np.int32)
    assert (images.shape, labels.shape) == ((4, 2, 2, 2), (4, 2))
    assert sorted(labels.ravel()) == list(LABELS)
    np.testing.assert_array_equal(images.reshape(8, 2, 2), IMAGES[labels.ravel()])


def test_tfds_data_source(tmp_path):
    import tensorflow_datasets as tfds

    images = np.random.default_rng(0).integers(0, 256, (8, 28, 28), dtype=np.uint8)
    split = (images, LABELS.astype(np.uint8))
    mnist.write_tfds({"train": split, "test": split}, tmp_path)
    source = tfds.builder_from_directory(tmp_path / mnist.TFDS_DATASET).as_data_source("train")
    found = through_a_pipeline(source)
    assert [array.dtype for array in found] == [np.uint8, np.int32]
    np.testing.assert_array_equal(found[0][..., 0], images[:4])
    np.testing.assert_array_equal(found[1], LABELS[:4])


def test_torch_dtypes():
    dtypes = {"bool": np.bool_, "int64": np.int32, "float64": np.float32}
    dtypes |= {name: np.dtype(name) for name in ("uint8", "int8", "int32", "float16", "float32")}
    tensors = [torch.arange(8).to(getattr(torch, name)) for name in dtypes]
    found = through_a_pipeline(torch_loader(*tensors), stage=lambda *values: values)
    for array, tensor, expected in zip(found, tensors, dtypes.values(), strict=True):
        assert array.dtype == expected
        np.testing.assert_array_equal(array.ravel(), tensor.numpy())


def test_what_cannot_be_read():
    with pytest.raises(ValueError, match="Element 0 .*a leaf of type Tensor; .*BFloat16"):
        _shapes = IPUInfeedQueue(torch_loader(torch.zeros(2, dtype=torch.bfloat16))).element
    with pytest.raises(ValueError, match="Use tensor.detach"):
        _shapes = IPUInfeedQueue([torch.zeros(2, requires_grad=True)]).element
    with pytest.raises(TypeError, match="it is an iterator .zip.*a callable"):
        IPUInfeedQueue(TFDataset().as_numpy_iterator())
    queue = IPUInfeedQueue(torch_loader(np.zeros(3, np.float32)))  # whose last batch is smaller
    queue.initialize()
    take_some = queue.connect(list)
    take_some(1)
    with pytest.raises(ValueError, match=r"element 1 .*float32\[2\]; got float32\[1\]. .*drop_remainder"):
        take_some(1)
    queue.delete()

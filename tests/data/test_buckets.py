"""Buckets: examples of different lengths as micro-batches of a few lengths."""

import grain
import numpy as np
import pytest

from ipu_pipeline.data.datasets import Buckets


def texts(*lengths):
    return [np.arange(1, n + 1) for n in lengths]


def shapes(batches):
    return [tokens.shape for tokens, _mask in batches]


def test_each_example_is_in_the_first_bucket_that_is_long_enough():
    batches = list(Buckets(texts(3, 5, 4, 8, 1, 2), [4, 8], 2, padding=-1))
    assert shapes(batches) == [(2, 4), (2, 8), (2, 4)]
    tokens, mask = batches[0]
    np.testing.assert_array_equal(tokens, [[1, 2, 3, -1], [1, 2, 3, 4]])
    np.testing.assert_array_equal(mask, [[1, 1, 1, 0], [1, 1, 1, 1]])
    assert mask.dtype == np.float32
    assert tokens.dtype == texts(1)[0].dtype


def test_examples_that_do_not_fill_a_bucket():
    filled = list(Buckets(texts(3, 3, 2), [4], 2))
    assert shapes(filled) == [(2, 4), (2, 4)]
    np.testing.assert_array_equal(filled[1][1], [[1, 1, 0, 0], [0, 0, 0, 0]])
    assert shapes(Buckets(texts(3, 3, 2), [4], 2, remainder="drop")) == [(2, 4)]


def test_micro_batches_of_one_length_in_a_row():
    batches = Buckets(texts(3, 7, 3, 7, 3, 7, 3, 6), [4, 8], 1, in_a_row=2)
    assert shapes(batches) == [(1, 4), (1, 4), (1, 8), (1, 8)] * 2
    left = list(Buckets(texts(3), [4], 1, in_a_row=2))
    assert [mask.sum() for _tokens, mask in left] == [3, 0]


def test_structures_and_what_has_no_length():
    examples = [
        {"x": np.ones((n, 2), "float32"), "ids": np.arange(n), "label": np.int32(n), "pair": np.arange(2)}
        for n in (3, 4, 1, 3)
    ]
    batch, _other = Buckets(examples, [4], 2, length_of=lambda example: len(example["ids"]))
    expected = {"x": (2, 4, 2), "ids": (2, 4), "label": (2,), "pair": (2, 2), "mask": (2, 4)}
    assert {name: leaf.shape for name, leaf in batch.items()} == expected
    np.testing.assert_array_equal(batch["label"], [3, 4])
    ids, labels, mask = next(iter(Buckets([(np.arange(2), 7), (np.arange(3), 8)], [4], 2)))
    assert (ids.shape, labels.tolist(), mask.sum()) == ((2, 4), [7, 8], 5)


def test_long_examples():
    with pytest.raises(ValueError, match=r'Example 1 has the length 9, and the longest bucket 8.*"cut"'):
        list(Buckets(texts(3, 9), [4, 8], 1))
    assert shapes(Buckets(texts(3, 9), [4, 8], 1, too_long="drop")) == [(1, 4)]
    _short, (tokens, mask) = Buckets(texts(3, 9), [4, 8], 1, too_long="cut")
    np.testing.assert_array_equal(tokens, [np.arange(1, 9)])
    assert mask.sum() == 8


def test_each_pass_is_the_same_and_functions_make_iterators():
    of_grain = grain.MapDataset.source(texts(3, 5, 4)).to_iter_dataset()
    for data in (lambda: iter(texts(3, 5, 4)), of_grain):
        buckets = Buckets(data, [4, 8], 2)
        assert shapes(buckets) == shapes(buckets) == [(2, 4), (2, 8)]


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"lengths": [8, 4]}, r"lengths must be .* in rising order; got \[8, 4\]"),
        ({"lengths": []}, "lengths must be at least one"),
        ({"lengths": [4, 8.5]}, r"lengths must be at least one integer.* got \[4, 8.5\]"),
        ({"lengths": 8}, "lengths must be at least one integer.* got 8"),
        ({"batch_size": 0}, "batch_size must be an integer of at least 1; got 0"),
        ({"in_a_row": 1.5}, "in_a_row must be an integer"),
        ({"remainder": "pad"}, "remainder must be one of 'fill', 'drop'; got 'pad'"),
        ({"too_long": "fold"}, "too_long must be one of"),
        ({"examples": iter([])}, "examples must be something that can be iterated over again"),
    ],
)
def test_wrong_arguments(changed, error):
    with pytest.raises(ValueError, match=error):
        Buckets(**{"examples": texts(1), "lengths": [4], "batch_size": 1} | changed)


@pytest.mark.parametrize(
    ("examples", "error"),
    [
        ([np.arange(2), (np.arange(2),)], "Example 1 has the structure"),
        ([np.ones((2, 3)), np.ones((2, 4))], r"Example 1 has a leaf float64\[2, 4\], and the first one"),
        ([np.arange(2), np.ones(2)], "Only the first axis may differ"),
        ([np.int32(1)], "Example 0 has no array with an axis"),
        ([{"mask": np.arange(2)}], 'must not have an entry "mask"'),
    ],
)
def test_wrong_examples(examples, error):
    with pytest.raises(ValueError, match=error):
        list(Buckets(examples, [4], 1))


def test_padding_that_does_not_fit():
    with pytest.raises(ValueError, match="padding must be .* like an example, which has 2 leaves; got"):
        list(Buckets([(np.arange(2), np.ones(2))], [4], 1, padding=(0, 1, 2)))
    with pytest.raises(ValueError, match="padding"):
        list(Buckets(texts(3), [4], 1, padding=0.5))


def test_a_leaf_that_happened_to_have_the_example_s_length():
    """It must not be padded in some micro-batches and not in others."""
    examples = [(np.arange(n), np.ones(3)) for n in (3, 4)]
    ((ids, features, _mask),) = Buckets(examples, [6], 2)
    assert (ids.shape, features.shape) == ((2, 6), (2, 3))
    with pytest.raises(ValueError, match=r"Example 1 has the length 4 and a leaf float64\[3\]\. In all"):
        list(Buckets(examples, [6], 1))

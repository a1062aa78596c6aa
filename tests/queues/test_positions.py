import json

import grain
import numpy as np
import pytest

from ipu_pipeline.ipu_infeed_queue import IPUInfeedQueue
from ipu_pipeline.queues.feeder import DataPass, Position


class Sequence:
    """Indexed, without __iter__; notes what was read."""

    def __init__(self, length):
        self.length, self.read = length, []

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.read.append(index)
        return np.float32(index)


class Stateful:
    """Its iterators can say where they are, and go there."""

    def __init__(self, length, wrap=lambda number: {"next": number}, unwrap=lambda state: state["next"]):
        self.length, self.wrap, self.unwrap = length, wrap, unwrap
        self.read = []

    def __iter__(self):
        return StatefulIterator(self)


class StatefulIterator:
    def __init__(self, data):
        self.data, self.number = data, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.number == self.data.length:
            raise StopIteration
        self.number += 1
        self.data.read.append(self.number - 1)
        return np.float32(self.number - 1)

    def get_state(self):
        return self.data.wrap(self.number)

    def set_state(self, state):
        self.number = self.data.unwrap(state)


@pytest.mark.parametrize(
    ("make", "counts"),
    [
        (lambda: [np.float32(number) for number in range(50)], (0, 1, 40)),
        (lambda: lambda: (np.float32(number) for number in range(50)), (0, 1, 40)),
        (lambda: Sequence(50), (0, 1, 40)),
        (lambda: Stateful(50), (0, 1, 15, 16, 17, 40)),
        (lambda: grain.MapDataset.range(50).map(np.float32).to_iter_dataset(), (0, 17)),
        (lambda: grain.MapDataset.range(25).shuffle(seed=1).map(np.float32).repeat(2), (40,)),
    ],
    ids=["list", "callable", "indexed", "stateful", "grain's iterated", "grain's mapped"],
)
def test_a_pass_goes_on_from_a_position(make, counts):
    for count in counts:
        data = DataPass(make())
        before = [float(next(data)) for _number in range(count)]
        position = data.position(count)
        assert position.count == count
        rest = list(map(float, data))
        assert [*map(float, DataPass(make()))] == before + rest
        stored = Position(**json.loads(json.dumps(vars(position))))
        assert stored == position
        assert list(map(float, DataPass(make(), stored))) == rest


def test_elements_before_a_position_are_read_only_where_they_must_be():
    indexed = Sequence(50)
    next(DataPass(indexed, Position(30)))
    assert indexed.read == [30]
    stateful = Stateful(50)
    data = DataPass(stateful)
    for _number in range(45):
        next(data)
    position = data.position(40)
    assert (position.count, position.state_count) == (40, 32)
    stateful.read.clear()
    assert next(DataPass(stateful, position)) == 40
    assert stateful.read == list(range(32, 41))


def test_an_element_that_was_looked_at_comes_again():
    data = DataPass(Stateful(50))
    assert (data.peek(), data.peek(), next(data), next(data)) == (0, 0, 0, 1)
    position = data.position(1)
    assert next(DataPass(Stateful(50), position)) == 1


@pytest.mark.parametrize(
    "state",
    [
        b"\x00bytes",
        (1, [2.5, None, True], {"key": "text", 3: b"x"}),
        np.arange(6, dtype=np.int16).reshape(2, 3),
        np.float64(0.1),
        {"bytes in base64": 1},  # a key of our own
    ],
)
def test_states_are_stored_exactly(state):
    found = []
    data = DataPass(Stateful(9, wrap=lambda number: state))
    next(data)
    DataPass(Stateful(9, unwrap=lambda state: found.append(state) or 0), data.position(0))
    (restored,) = found
    assert type(restored) is type(state) or isinstance(state, np.generic)
    np.testing.assert_equal(restored, state)


def test_a_state_that_cannot_be_stored():
    data = DataPass(Stateful(9, wrap=lambda number: {"generator": object()}))
    next(data)
    with pytest.warns(UserWarning, match="state of the data set's iterator has a object.* read the el"):
        assert data.position(0) == Position(0)
    assert data.position(1) == Position(1)


def test_a_state_that_changes_afterwards_is_kept_as_it_was():
    shared = {"next": 0}

    def wrap(number):
        shared["next"] = number
        return shared

    data = DataPass(Stateful(50, wrap=wrap))
    for _number in range(20):
        next(data)
    assert next(DataPass(Stateful(50), data.position(3))) == 3


def test_an_infeeds_position_is_what_was_used():
    infeed = IPUInfeedQueue(Sequence(50), prefetch_depth=8)
    assert infeed.position is None
    infeed.initialize()
    take = infeed.connect(list, is_tentative=False)
    assert infeed.position == Position(0)
    take(5)
    assert infeed.position == Position(0)
    infeed.mark()
    assert infeed.position == Position(5)
    take(6)
    infeed.mark(num_unneeded=2)
    assert infeed.position == Position(9)
    infeed.stop()
    infeed.seek(infeed.position)
    assert infeed.position == Position(9)
    assert infeed.connect(list)(1) == [[np.float32(9)]]
    infeed.delete()


def test_an_infeeds_position_with_what_was_given_back():
    infeed = IPUInfeedQueue(Sequence(50))
    infeed.initialize()
    take = infeed.connect(list, num_taken=4, is_tentative=True)
    taken = take(4)
    infeed.mark(len(taken))
    infeed.give_back()
    assert infeed.position == Position(0)
    assert take(1) == [[np.float32(0)]]
    infeed.mark()
    assert infeed.position == Position(1)
    infeed.delete()

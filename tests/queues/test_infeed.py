import contextlib
import gc
import itertools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ipu_pipeline as ipu
from ipu_pipeline.errors import OutOfRangeError
from ipu_pipeline.ground.pytrees import as_own
from ipu_pipeline.ipu_infeed_queue import IPUInfeedQueue
from ipu_pipeline.ipu_outfeed_queue import IPUOutfeedMode, IPUOutfeedQueue
from ipu_pipeline.pipelining_ops import Chunking
from ipu_pipeline.queues import feeder
from ipu_pipeline.queues import outfeed as outfeed_module
from tests.support import front


def dequeue(queue):
    value = queue.read()
    queue.set_aside()
    queue.drop()
    return value


def same(leaves):
    return list(leaves)


def take(queue, count):
    take_some = queue.connect(same)
    taken = [take_some(1)[0][0].item() for _ in range(count)]
    queue.mark()
    return taken


def scalars(count):
    return [np.float32(number) for number in range(count)]


def telling(count, events):
    """Scalars of which some set an event before they are made, when the infeed has those before them."""
    for number in range(count):
        if number in events:
            events[number].set()
        yield np.float32(number)


@contextlib.contextmanager
def begun(dataset, **options):
    """An initialized infeed, which is deleted in the end."""
    queue = IPUInfeedQueue(dataset, **options)
    try:
        queue.initialize()
        yield queue
    finally:
        queue.delete()


def test_the_element_looked_at_is_not_lost_and_iterables_start_over():
    queue = IPUInfeedQueue(scalars(4))
    assert queue.element.shape == ()
    assert queue.number_of_tuple_elements == 1
    queue.initialize()
    assert take(queue, 4) == [0, 1, 2, 3]
    with pytest.raises(OutOfRangeError, match="ended after 4 elements"):
        take(queue, 1)
    queue.initialize()
    assert take(queue, 2) == [0, 1]
    queue.delete()


def test_a_pass_has_ended_when_the_next_one_begins(monkeypatch):
    """They may share a random generator, as the passes of torch's loaders do."""
    told, is_reading, is_stopping = [], threading.Event(), threading.Event()
    stop = feeder.Feeder.stop

    def noted_stop(one):
        is_stopping.set()
        stop(one)

    def read():
        yield np.float32(0)
        is_reading.set()
        is_stopping.wait()
        told.append("end")

    def data():
        told.append("begin")
        return read()

    queue = IPUInfeedQueue(data)
    queue.initialize()
    assert take(queue, 1) == [0]
    is_reading.wait()
    monkeypatch.setattr(feeder.Feeder, "stop", noted_stop)
    monkeypatch.setattr(feeder, "_JOIN_SECONDS", None)  # as long as it takes
    queue.initialize()
    assert take(queue, 1) == [0]
    queue.delete()
    assert told[:3] == ["begin", "end", "begin"]


def test_callables_sequences_and_structures():
    class Indexed:
        def __len__(self):
            return 3

        def __getitem__(self, index):
            if index >= 3:
                raise IndexError
            return {"a": np.float32(index), "b": [1, 2.0]}

    queue = IPUInfeedQueue(Indexed())
    assert queue.number_of_tuple_elements == 3
    assert queue.element["b"][0].dtype == np.int32

    class WithoutEnd(Indexed):
        def __getitem__(self, index):
            return np.float32(index)

    with begun(WithoutEnd()) as queue:
        assert take(queue, 3) == [0, 1, 2]
        with pytest.raises(OutOfRangeError, match="ended after 3 elements"):
            take(queue, 1)


class Numbers:
    """An iterator without end."""

    def __init__(self):
        self.number = -1

    def __iter__(self):
        return self

    def __next__(self):
        self.number += 1
        return np.float32(self.number)


def test_classes_are_called():
    class Iterable:
        def __iter__(self):
            return iter(scalars(9))

    for dataset in (Numbers, Iterable):
        with begun(dataset) as queue:
            assert take(queue, 3) == [0, 1, 2]
            queue.initialize()
            assert take(queue, 3) == [0, 1, 2]
    with pytest.raises(TypeError, match=r"it is an iterator \(Numbers\)"):
        IPUInfeedQueue(Numbers())


def test_prefetch_depth_bounds_what_is_read_ahead():
    read, has_read_six = [], threading.Event()

    def iterate():
        for number in range(100):
            read.append(number)
            if number == 5:
                has_read_six.set()
            yield np.float32(number)

    with begun(iterate, prefetch_depth=5) as queue:
        assert take(queue, 1) == [0]
        has_read_six.wait()
        queue.stop()
        assert len(read) == 6  # one taken, five ahead
        assert take(queue, 8) == list(range(1, 9))  # nothing is lost by stopping


def test_an_infeed_that_is_dropped_ends_its_thread():
    queue = IPUInfeedQueue(lambda: iter(scalars(100)))
    queue.initialize()
    take(queue, 1)
    thread = next(t for t in threading.enumerate() if t.name == "ipu-infeed")
    del queue
    gc.collect()
    thread.join()
    assert not thread.is_alive()


def test_wrong_data_sets():
    for dataset, message in (
        (iter(scalars(1)), "it is an iterator .*a callable that returns a new iterator"),
        (3, "must be iterable, or a callable.*got int"),
    ):
        with pytest.raises(TypeError, match=message):
            IPUInfeedQueue(dataset)
    one = np.float32(1)
    for elements, message in (
        ([], "The dataset of the infeed is empty"),
        (["text"], "leaf of type str"),
        ([np.zeros(2, [("a", np.int32)])], r"Element 0 .*its dtype is \[\('a', '<i4'\)\]"),
        ([jax.random.key(0)], "must be pytrees of numeric arrays"),
        ([np.zeros(1), np.array(["text"])], "element 1 .*leaf of type ndarray; .*its dtype is <U4"),
        ([(one, one), one], "element 1 of the dataset must be a tuple of 2 .*as the first one; got an"),
    ):
        with pytest.raises(ValueError, match=message):
            take_all(elements, 2)
    queue = IPUInfeedQueue([one])
    assert queue.initializer
    with pytest.raises(ValueError, match="`initializer` function can only be accessed once"):
        assert queue.initializer


def test_wrong_settings():
    for depth in (0, 256, 1.5, True, "3"):
        with pytest.raises(ValueError, match=f"must be an integer from 1 to 255; got {depth!r}"):
            IPUInfeedQueue(scalars(1), prefetch_depth=depth)
    for depth in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="integer of at least 1"):
            IPUOutfeedQueue(buffer_depth=depth)
    message = "must be one of IPUOutfeedMode.ALL, IPUOutfeedMode.LAST; got 'all'"
    with pytest.raises(TypeError, match=message):
        IPUOutfeedQueue(outfeed_mode="all")


def test_outfeed_copies_to_the_host_beyond_its_depth():
    queue = IPUOutfeedQueue(buffer_depth=2)
    queue.bind(jax.tree.structure(0), [jax.ShapeDtypeStruct((), jnp.float32)])
    for number in range(5):
        queue.extend([jax.block_until_ready(jnp.float32(number))], None)
    assert [type(part.leaves[0]) for part in queue._on_host] == [np.ndarray] * 3
    np.testing.assert_array_equal(dequeue(queue), range(5))
    assert dequeue(queue).shape == (0,)


@pytest.mark.parametrize("mode", list(IPUOutfeedMode))
def test_outfeed_of_stacked_elements(mode):
    queue = IPUOutfeedQueue(mode, buffer_depth=4)
    queue.bind(jax.tree.structure((0, 0)), [jax.ShapeDtypeStruct((), jnp.float32)] * 2)
    stack = jax.block_until_ready(jnp.arange(6.0))
    queue.extend([stack, -stack], 4)  # what is beyond four means nothing
    queue.extend([stack[5], -stack[5]], None)
    queue.extend([stack, -stack], 0)
    first, second = dequeue(queue)
    expected = [0, 1, 2, 3, 5] if mode is IPUOutfeedMode.ALL else 5
    np.testing.assert_array_equal(first, expected)
    np.testing.assert_array_equal(second, np.negative(expected))


def test_elements_given_back_come_again():
    """As many are taken at once as there are just then, at most four."""
    has_four = threading.Event()
    queue = IPUInfeedQueue(lambda: telling(6, {4: has_four}), prefetch_depth=6)
    queue.initialize()
    take_some = queue.connect(same, num_taken=4, is_tentative=True)
    has_four.wait()
    found, numbers = [], []
    while len(found) < 6:
        taken = [leaf.item() for (leaf,) in take_some(4)]
        queue.mark(len(taken) - 1)
        queue.give_back()
        found += taken[:1]
        numbers.append(len(taken))
    assert found == [0, 1, 2, 3, 4, 5]
    assert numbers[0] == max(numbers) == 4
    with pytest.raises(OutOfRangeError, match="ended after 6 elements"):
        take_some(4)


@pytest.mark.parametrize("is_other_program", [False, True])
def test_what_was_taken_and_not_used_comes_again(is_other_program):
    with begun(scalars(8)) as queue:
        assert take(queue, 2) == [0, 1]
        take_some = queue.connect(same)
        assert [take_some(1)[0][0].item() for _ in range(3)] == [2, 3, 4]
        assert queue.position.count == 2
        other = queue.connect(list if is_other_program else same)  # the run ended before `mark`
        assert [other(2)[0][0].item() for _ in range(2)] == [2, 4]
        queue.mark(1)
        assert queue.position.count == 5
        assert take(queue, 3) == [5, 6, 7]
        with pytest.raises(OutOfRangeError, match="ended after 8 elements"):
            take(queue, 1)


def test_of_very_large_updates_nothing_is_kept(monkeypatch):
    monkeypatch.setattr(feeder, "_MAX_KEPT_BYTES", 12)  # three of these elements
    with begun(scalars(20)) as queue:
        take_some = queue.connect(same)
        assert [take_some(1)[0][0].item() for _ in range(5)] == [0, 1, 2, 3, 4]
        queue.mark()
        assert [take_some(1)[0][0].item() for _ in range(5)] == [5, 6, 7, 8, 9]
        assert queue.position.count == 5
        with pytest.warns(UserWarning, match="The 5 elements of the data set .* are lost"):
            assert take(queue, 2) == [10, 11]
        assert queue.position.count == 12


@pytest.mark.parametrize("mapping", [[0, 0], pytest.param([0, 1], marks=pytest.mark.thorough)])
def test_a_run_that_fails_within_an_update_loses_nothing(mapping):
    """It is as if it had not been: whatever called back raises, the run after it has the same elements."""
    calls = []

    def fail_once(x):
        calls.append(float(x[0, 0]))
        if len(calls) == 8:
            raise RuntimeError("for once")
        return x

    def stage(rate, x, labels):
        x = jax.pure_callback(fail_once, jax.ShapeDtypeStruct(x.shape, x.dtype), jax.lax.stop_gradient(x))
        return front.first_stage(rate, x, labels)

    stages = [stage, front.second_stage]
    model = front.Model(computational_stages=stages, device_mapping=mapping, repeat_count=2)
    plain = front.Model(device_mapping=mapping, repeat_count=2)
    with front.session_of(model, seed=1) as session, front.session_of(plain, seed=1) as other:
        with pytest.raises(Exception, match="for once"):
            while True:
                session.run(model.program, {model.rate: 0.1})
        while session.update_count() < 6:
            session.run(model.program, {model.rate: 0.1})
        losses = session.run(model.outfeed.dequeue())
        expected = [loss for _run in range(3) for loss in plain.run(other)]
        np.testing.assert_allclose(losses, expected[: len(losses)], rtol=1e-6)
    data = [x[0, 0] for x, _labels in itertools.islice(front.data()(), len(losses))]
    assert set(calls) >= {float(value) for value in data}


def test_a_slow_data_set_holds_up_nobody(monkeypatch):
    """A thread that is in the data set while it is stopped goes on when the infeed is wanted again."""
    monkeypatch.setattr(feeder, "_JOIN_SECONDS", 0)
    wake = threading.Event()

    def iterate():
        for number in range(50):
            if number == 5:
                wake.wait()
            yield np.float32(number)

    queue = IPUInfeedQueue(iterate)
    queue.initialize()
    assert take(queue, 5) == [0, 1, 2, 3, 4]
    queue.stop()  # and does not wait for the data set
    queue.stop()
    take_some = queue.connect(same)
    wake.set()
    assert [take_some(1)[0][0].item() for _ in range(5)] == [5, 6, 7, 8, 9]
    assert sum(thread.name == "ipu-infeed" for thread in threading.enumerate()) == 1
    queue.delete()
    assert front.no_infeed_runs()
    with pytest.raises(RuntimeError, match="The infeed was stopped"):
        take_some(1)
    queue.initialize()
    assert take(queue, 2) == [0, 1]
    queue.delete()


def refilling(fetched, as_jax):
    """Elements of one array that is filled again for each, beside another one."""
    buffer = np.empty(3, "float32")
    for number, event in enumerate(fetched):
        event.set()
        buffer[...] = number
        other = np.full((), number, "float32")
        yield buffer, jnp.asarray(other) if as_jax else other
        buffer[...] = -1


@pytest.mark.parametrize(
    ("first", "second", "as_jax"),
    [
        ({"device_mapping": [0, 1], "dispatch_plan": Chunking(2)}, {"device_mapping": [0, 0]}, False),
        ({"device_mapping": [0, 1]}, {"device_mapping": [0, 1], "dispatch_plan": Chunking(2)}, True),
    ],
)
def test_a_refilled_buffer_is_shared_by_two_programs(first, second, as_jax):
    """What was fetched ahead for one program goes to the other one as it was when it was fetched."""
    fetched = [threading.Event() for _element in range(12)]
    infeed, found = IPUInfeedQueue(lambda: refilling(fetched, as_jax)), []
    stages = [lambda x, y: (x, y), lambda x, y: (x, y * 1.0)]
    first, second = (front.Pipelined(stages, 4, infeed_queue=infeed, **one) for one in (first, second))
    with ipu.Session() as session:
        session.run(infeed.initializer)
        for number, model in enumerate((first, second, first)):
            if number:
                fetched[4 * number + 1].wait()  # the element before it is ahead, for the other program
            found.append(model.run(session))
    expected = np.arange(12, dtype="float32")
    x, y = (np.concatenate(parts) for parts in zip(*found, strict=True))
    np.testing.assert_array_equal(y, expected)
    np.testing.assert_array_equal(x, np.repeat(expected[:, None], 3, 1))


@pytest.mark.parametrize("has_started", [False, True])
def test_ctrl_c_while_the_thread_starts(has_started, monkeypatch):
    """The interrupt arrives as such, and the next connection goes on with the next element."""
    queue = IPUInfeedQueue(scalars(20))
    queue.initialize()
    start = threading.Thread.start

    def interrupted(thread):
        if has_started:
            start(thread)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            queue.connect(same)
    queue.stop()
    take_some = queue.connect(same, num_taken=4)
    for number in range(0, 20, 4):
        assert [float(*one) for one in take_some(4)] == list(range(number, number + 4))
    assert front.no_infeed_runs()  # nor does that of the connection that was interrupted


def interrupt(*_arguments):
    raise KeyboardInterrupt


@pytest.mark.parametrize("mode", list(IPUOutfeedMode))
def test_what_nobody_got_is_dequeued_again(mode, monkeypatch):
    """By a run that is interrupted while it dequeues, and by one in which something later fails."""
    infeed = IPUInfeedQueue([(np.full(2, number, "float32"),) for number in range(8)])
    outfeed = IPUOutfeedQueue(outfeed_mode=mode)
    assert not outfeed.enqueued
    queues = {"infeed_queue": infeed, "outfeed_queue": outfeed}
    program, other = (
        front.compile_pipeline([lambda x: x, lambda x: x * 2.0], 4, **queues) for _program in range(2)
    )
    assert outfeed.enqueued
    with ipu.Session() as session:
        session.run([infeed.initializer, program])
        with monkeypatch.context() as patch:
            patch.setattr(outfeed_module._Part, "on_host", interrupt)
            with pytest.raises(KeyboardInterrupt):
                session.run(outfeed.dequeue())
        with pytest.raises(OutOfRangeError):
            session.run([outfeed.dequeue(), program, outfeed.dequeue(), other])
        found = session.run(outfeed.dequeue())
        expected = 2 * np.repeat(np.arange(8, dtype="float32")[:, None], 2, 1)
        np.testing.assert_array_equal(found, expected if mode is IPUOutfeedMode.ALL else expected[-1])
        if mode is IPUOutfeedMode.ALL:
            found = session.run(outfeed.dequeue())
            assert found.shape == (0, 2)


def test_advice_about_the_initializer_works():
    """It said to read `initializer` again, which raises."""
    queue = IPUInfeedQueue(scalars(1))
    with pytest.raises(
        RuntimeError, match=r"initializer first: session.run\(infeed_queue.initializer\)\.$"
    ):
        queue.check_initialized()
    _kept = queue.initializer  # read here
    for call in (queue.check_initialized, lambda: queue.initializer):
        with pytest.raises((RuntimeError, ValueError)) as caught:
            call()
        assert "session.run(initializer)" in str(caught.value)
        assert f" at {__file__}, line " in str(caught.value)
        assert ": _kept = queue.initializer  # read here" in str(caught.value)


X, Y = np.zeros((6, 2), "f4"), np.zeros(6, "i4")


@pytest.mark.parametrize(
    ("dataset", "told"),
    [
        ((X, Y), r"a tuple of 2 arrays \(float32\[6, 2\], int32\[6\]\)\..* be its arrays\."),
        ([X, Y.astype("f4")], "a list of 2 arrays"),
        ({"x": X.astype("f8"), "y": Y.astype("f8")}, r"a dict\..* be its keys\."),
    ],
)
def test_arrays_of_all_samples_are_no_micro_batches(dataset, told):
    with pytest.raises(TypeError, match=rf"dataset is {told}.*range\(0, num_samples, n\): yield"):
        IPUInfeedQueue(dataset)


def test_lists_of_micro_batches():
    smaller = np.ones((5, 2), "f4")  # is told when it comes
    for dataset in ([X, X + 1], (X, X.astype("f8")), [X, smaller], [(X, Y)]):
        assert IPUInfeedQueue(dataset).element is not None


def test_an_iterator_is_not_used_for_two_passes():
    """The second pass went on where the first one had stopped."""
    message = "the same (generator|list_iterator) for a second pass"
    for iterator in ((x for x in scalars(8)), iter(scalars(8))):
        with begun(lambda same=iterator: same) as queue, pytest.raises(TypeError, match=message):
            queue.initialize()

    class Own(Numbers):  # may begin again when it is called
        pass

    own = Own()
    for dataset in (lambda: iter(scalars(8)), lambda: own):
        with begun(dataset) as queue:
            queue.initialize()
    Own.__call__ = lambda self: self
    with pytest.raises(TypeError, match="makes a new one, .lambda: Own"):
        IPUInfeedQueue(own)


def take_all(dataset, number):
    with begun(dataset) as queue:
        take_some = queue.connect(same) if queue.element else None
        return [take_some(1)[0] for _ in range(number)]


def test_arrays_in_the_other_byte_order():
    """JAX said that they were 'not a valid dtype for JAX type promotion', without naming the infeed."""
    dataset = [
        {"x": np.arange(3, dtype=order + kind)} for kind in ("f4", "f8", "i4", "i8") for order in "<>"
    ]
    for little, big in zip(dataset[::2], dataset[1::2], strict=True):
        for (leaf,) in take_all([big, little, big], 3):
            np.testing.assert_array_equal(leaf, np.arange(3))
            assert leaf.dtype == little["x"].astype(f"{little['x'].dtype.kind}4").dtype


def test_masked_arrays():
    """Their masks were dropped."""
    plain, masked = np.ma.masked_array(np.arange(3.0)), np.ma.masked_array(np.arange(3.0), [0, 1, 0])
    ((leaf,),) = take_all([plain], 1)
    assert type(leaf) is np.ndarray
    for number in (0, 1):
        message = rf"lement {number} of .*a leaf is a masked array: 1 of its 3 elements are"
        with pytest.raises(ValueError, match=message):
            take_all([plain] * number + [masked], 2)


def test_numbers_that_float32_does_not_have():
    """They became inf."""
    values = np.array([1.0, 1e300, np.inf])
    message = r"element 1 of the dataset, at \['x'\], of dtype float64, does not fit float32: .*1e\+300"
    with pytest.raises(ValueError, match=message):
        take_all([{"x": np.ones(3)}, {"x": values}], 2)
    with pytest.raises(ValueError, match="of dtype complex128, does not fit complex64"):
        take_all([values.astype("c16")], 1)
    ((leaf,),) = take_all([np.array([np.inf, np.nan, -np.inf])], 1)
    np.testing.assert_array_equal(leaf, np.array([np.inf, np.nan, -np.inf], "f4"))
    assert leaf.dtype == np.float32


def test_arrays_of_the_right_dtype_are_not_looked_at(monkeypatch):
    monkeypatch.setattr("ipu_pipeline.ground.pytrees.cast_exactly", None)
    array = np.array([1.0, np.inf], "f4")
    assert as_own(array, "It") is array
    assert as_own(jax.numpy.asarray(array), "It").dtype == np.float32
    ((leaf,),) = take_all([array], 1)
    assert leaf is array

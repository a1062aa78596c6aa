"""poptorch's data loader and asynchronous accessor: the batches of torch's loader, and no process left."""

import collections
import dataclasses
import functools
import gc
import itertools
import multiprocessing
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from multiprocessing import resource_sharer, util

import numpy as np
import pytest
import torch

from ipu_pipeline.poptorch.data import AsynchronousDataAccessor, DataLoader, loading_process
from ipu_pipeline.poptorch.data.shared_memory import put_together, take_apart
from ipu_pipeline.poptorch.data.worker import rebatch
from ipu_pipeline.poptorch.enums import CommGroupType, DataLoaderMode, SharingStrategy
from ipu_pipeline.poptorch.errors import Error

# This module is imported in the processes that it starts: what imports JAX must not stand at the top.

pytestmark = [
    pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning"),  # by JAX, for torch's workers
    # By torch, on a machine of one core.
    pytest.mark.filterwarnings("ignore:This DataLoader will create .* worker processes:UserWarning"),
]

SYNC, ASYNC, REBATCHED = DataLoaderMode
FORK = {"sharing_strategy": SharingStrategy.Fork}
ROOT = pathlib.Path(__file__).parents[3]

torch.set_num_threads(1)


def list_shared_memory():
    """The named memory of this process; torch's names have its number."""
    return {name for name in os.listdir("/dev/shm") if f"_{os.getpid()}_" in name}  # noqa: S108  # Linux's


@pytest.fixture(autouse=True, scope="module")
def fork_server():
    """Starts it before the first test, as it stays. Its folder is needed longer than that of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", os.path.dirname(tempfile.gettempdir()))
        util.get_temp_dir()
    AsynchronousDataAccessor([]).terminate()


@pytest.fixture(autouse=True)
def no_process_and_no_memory_left():
    """Those of a loader or an accessor that is not used any more have ended, also without `terminate`."""
    before = list_shared_memory()
    yield
    gc.collect()  # a failed test's traceback
    resource_sharer.stop()  # a thread that torch's way of sending tensors starts
    assert multiprocessing.active_children() == []
    assert list_shared_memory() <= before


def make_options(iterations=2, accumulation=2, process=0, num_processes=1, seed=None):
    from ipu_pipeline.poptorch.options import Options

    options = Options().deviceIterations(iterations)
    options.Training.gradientAccumulation(accumulation)
    options.Distributed.configureProcessId(process, num_processes)
    return options if seed is None else options.randomSeed(seed)


def make_rows(count=103):
    return torch.utils.data.TensorDataset(torch.arange(float(count)), torch.arange(count) * 2)


def as_lists(batches):
    return [[part.tolist() for part in batch] for batch in batches]


def read(loader, times=1):
    """The batches of some iterations, as lists of numbers."""
    return [as_lists(loader) for _time in range(times)]


def read_rows(loader):
    return [row for batch in loader for row in batch[0].tolist()]


class Rows(torch.utils.data.Dataset):
    """Numbers; at one of them something happens."""

    def __init__(self, length=8, at=None, what=None):
        self.length, self.at, self.what = length, at, what

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index == self.at:
            self.what()
        return torch.tensor([float(index)])


def exit_now():
    os._exit(7)


def kill_this():
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for_good():
    while True:
        signal.pause()


def fail():
    raise KeyError("row 3 is missing")


def fail_strangely():
    raise StrangeError(1, 2)


def append(path):
    with path.open("a") as file:
        file.write("x")


class Stream(torch.utils.data.IterableDataset):
    """As many rows as said, in each worker its share."""

    def __init__(self, length, has_length=True):
        self.length = length
        self.has_length = has_length

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for index in range(first, self.length, step):
            yield torch.tensor(float(index))

    def __len__(self):
        if not self.has_length:
            raise TypeError("'Stream' has no len()")
        return self.length


class StrangeError(Exception):
    """Pickles, and then does not load."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


# The data loader


@pytest.mark.parametrize(
    ("mode", "drop_last", "num_workers", "worker_size"),
    [(SYNC, False, 0, None), (ASYNC, True, 0, None), (REBATCHED, False, 1, 5)],
)
def test_batches_are_those_of_torch(mode, drop_last, num_workers, worker_size):
    arguments = {"shuffle": True, "num_workers": num_workers, "drop_last": drop_last}
    torch.manual_seed(3)
    ours = {"mode": mode, "rebatched_worker_size": worker_size}
    loader = DataLoader(make_options(), make_rows(), 4, **ours, **arguments)
    given = read(loader, times=2)
    assert loader.combinedBatchSize == 16
    torch.manual_seed(3)
    arguments["persistent_workers"] = num_workers > 0  # as ours are, if nothing else is said
    expected = torch.utils.data.DataLoader(make_rows(), 16, **arguments)
    assert given == read(expected, times=2)
    assert len(loader) == len(expected) == len(given[0]) == (6 if drop_last else 7)


def test_arguments_of_torch_go_to_the_other_process():
    arguments = {"shuffle": True, "collate_fn": torch.stack}
    of_workers = {"num_workers": 1, "multiprocessing_context": "fork", "prefetch_factor": 1}
    first, second = (torch.Generator().manual_seed(7) for _time in range(2))
    loader = DataLoader(make_options(), Rows(20), mode=ASYNC, generator=first, **of_workers, **arguments)
    given = [batch.tolist() for batch in loader]
    expected = torch.utils.data.DataLoader(Rows(20), 4, generator=second, **arguments)
    assert given == [batch.tolist() for batch in expected]


def test_combined_batch_size_and_options():
    options = make_options(iterations=3, accumulation=5)
    options.replicationFactor(4)
    options.inputReplicaGrouping(2, CommGroupType.Consecutive)
    loader = DataLoader(options, make_rows(), batch_size=2)
    assert loader.combinedBatchSize == 2 * 3 * 5 * 2
    assert loader.options is options
    assert isinstance(loader, torch.utils.data.DataLoader)
    for change in (options.deviceIterations, options.Training.gradientAccumulation):
        with pytest.raises(AttributeError, match="Can't modify frozen Options"):
            change(2)


def test_without_batch_size():
    forked = {"mode": ASYNC, "async_options": FORK}
    loader = DataLoader(make_options(), Rows(5), batch_size=None, drop_last=False, **forked)
    assert loader.combinedBatchSize is None
    assert [row.tolist() for row in loader] == [[0.0], [1.0], [2.0], [3.0], [4.0]]


def test_batch_sampler():
    sampler = torch.utils.data.BatchSampler(range(9, -1, -1), 4, drop_last=False)
    for options, drop_last, combined, expected, mode in [
        (make_options(1, 1), True, 4, [[9, 8, 7, 6], [5, 4, 3, 2], [1, 0]], SYNC),
        (make_options(2, 1), True, 8, [[9, 8, 7, 6, 5, 4, 3, 2]], SYNC),
        (make_options(1, 2), False, 8, [[9, 8, 7, 6, 5, 4, 3, 2], [1, 0]], ASYNC),
    ]:
        given = {"batch_sampler": sampler, "drop_last": drop_last, "async_options": FORK if mode else None}
        loader = DataLoader(options, make_rows(10), mode=mode, **given)
        assert [batch[0].tolist() for batch in loader] == expected
        assert loader.combinedBatchSize == combined
        assert len(loader) == len(expected)


def fill_up(rows):
    """The first elements of one to three rows, with zeros up to three."""
    assert len(rows) <= 3
    first = [float(row[0]) for row in rows]
    return {"x": torch.tensor(first + [0.0] * (3 - len(first))), "names": [f"{x:.0f}" for x in first]}


def test_own_collate_fn_makes_each_micro_batch_of_a_batch_sampler():
    """It was given the rows of all micro-batches of a call at once."""
    packs = [[0, 1], [2], [3, 4, 5], [6, 7], [8]]
    for mode, drop_last in [(SYNC, True), (ASYNC, False)]:
        options = {"mode": mode, "async_options": FORK if mode else None, "drop_last": drop_last}
        given = {"batch_sampler": packs, "collate_fn": fill_up, **options}
        loader = DataLoader(make_options(1, 2), make_rows(9), **given)
        batches = list(loader)
        expected = [[0.0, 1, 0, 2, 0, 0], [3, 4, 5, 6, 7, 0], [8, 0, 0]][: 2 if drop_last else 3]
        assert [batch["x"].tolist() for batch in batches] == expected
        assert [batch["names"] for batch in batches][:2] == [["0", "1", "2"], ["3", "4", "5", "6", "7"]]
        assert len(loader) == len(expected)


def test_workers_are_forked_without_a_warning():
    import jax

    jax.numpy.ones(3).block_until_ready()  # which starts the threads that JAX warns of
    loader = DataLoader(make_options(), make_rows(8), num_workers=1)
    with warnings.catch_warnings(action="error"):
        assert len(list(loader)) == 2


REBATCHING = {"mode": REBATCHED, "async_options": FORK, "rebatched_worker_size": 3, "num_workers": 2}


@pytest.mark.parametrize(
    ("arguments", "sizes"), [({"mode": SYNC}, [8, 8]), ({**REBATCHING, "drop_last": False}, [8, 8, 6])]
)
def test_iterable_data_set(arguments, sizes, log):
    loader = DataLoader(make_options(1, 1), Stream(22), batch_size=8, **arguments)
    for _time in range(2):
        batches = [batch.tolist() for batch in loader]
        assert [len(batch) for batch in batches] == sizes
        rows = list(itertools.chain(*batches))
        assert sorted(rows) == list(range(len(rows)))
    warned = ["each of the 2 workers iterates over the whole IterableDataset" in line for line in log]
    assert warned == [True] * ("num_workers" in arguments)


def test_arguments(log):
    rows = make_rows(10)
    with pytest.raises(Error, match=r"Invalid type: 'options' is of type .* \(Expected poptorch.Options\)"):
        DataLoader({}, rows)
    excluded = "`batch_sampler` option is mutually exclusive with batch_size, shuffle."
    for given in ({"batch_size": 2}, {"shuffle": True}):
        with pytest.raises(Error, match=excluded):
            DataLoader(make_options(), rows, batch_sampler=[[0, 1]], **given)
    too_large = r"The rebatched_worker_size \(5\) must be <= to the combined batch size \(4\)"
    for given, text in [
        ({"rebatched_worker_size": 5}, too_large),
        ({"rebatched_worker_size": 0}, r"The rebatched_worker_size \(0\) must be at least 1"),
        ({"batch_size": None, "drop_last": False}, "AsyncRebatched needs batch_size"),
    ]:
        with pytest.raises(AssertionError, match=text):
            DataLoader(make_options(), rows, mode=REBATCHED, **given)
    with pytest.raises(TypeError, match="async_options are buffer_size, .*; got rebatched_size, size"):
        DataLoader(make_options(), rows, mode=ASYNC, async_options={"size": 3, "rebatched_size": 4})
    assert log == []
    DataLoader(make_options(), rows, async_options={"buffer_size": 2}, rebatched_worker_size=2)
    assert log == [
        "DataLoader: async_options has no effect in mode Sync.",
        "DataLoader: rebatched_worker_size has no effect in mode Sync.",
    ]


# Several processes


def parts(num_processes=3, times=1, seed=None, rows=50, **arguments):
    """For each iteration, the rows that each of the processes gets."""
    loaders = [
        DataLoader(make_options(1, 2, process, num_processes, seed), make_rows(rows), 4, **arguments)
        for process in range(num_processes)
    ]
    assert len({len(loader) for loader in loaders}) == 1
    return [[read_rows(loader) for loader in loaders] for _time in range(times)]


def test_parts_are_contiguous_and_equal():
    assert parts() == [[list(range(16)), list(range(16, 32)), list(range(32, 48))]]
    assert parts(rows=51, drop_last=False) == [[list(range(17)), list(range(17, 34)), list(range(34, 51))]]
    assert parts(auto_distributed_partitioning=False)[0] == [list(range(48))] * 3


def test_shuffled_parts_are_those_of_one_permutation():
    first, second = parts(times=2, seed=5, shuffle=True)
    generator = torch.Generator().manual_seed(5)
    for given in (first, second):
        permutation = torch.randperm(50, generator=generator).tolist()
        assert given == [permutation[0:16], permutation[16:32], permutation[32:48]]
    assert first != second


def test_parts_that_cannot_be_had():
    indivisible = r"\(50\) is not divisible by the number of processes \(3\) and"
    with pytest.raises(AssertionError, match="you must set poptorch.Options.*randomSeed"):
        parts(shuffle=True)
    with pytest.raises(AssertionError, match=indivisible):
        parts(drop_last=False)
    with pytest.raises(AssertionError, match="IterableDatasets not supported for distributed execution"):
        DataLoader(make_options(process=1, num_processes=2), Stream(8))
    for given in ({"sampler": range(4)}, {"batch_sampler": [[1]]}):
        with pytest.raises(ValueError, match="ampler and the automatic partition .* exclude each other"):
            DataLoader(make_options(process=1, num_processes=2), make_rows(), **given)


# The accessor


class Mixed:
    """Batches of several kinds. Says whether the process that iterates has imported JAX."""

    def __iter__(self):
        yield from (torch.arange(3.0), {"a": (torch.tensor(True), "text")}, "jax" in sys.modules)
        yield [np.arange(2), 5]


def test_accessor_over_what_can_be_iterated_over():
    accessor = AsynchronousDataAccessor(Mixed(), buffer_size=1)
    for _time in range(2):
        first, second, has_jax, last = [
            batch.clone() if isinstance(batch, torch.Tensor) else batch for batch in accessor
        ]
        assert first.tolist() == [0, 1, 2]
        assert list(second) == ["a"]
        assert second["a"][1] == "text"
        assert not has_jax  # it need not
        assert last[1] == 5
        assert isinstance(last[0], np.ndarray)
        assert last[0].tolist() == [0, 1]  # the last one is still valid


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ([], []),
        # A fork server takes no more than 254 open files, of which torch would need one for each tensor.
        ([torch.tensor(n) for n in range(400)], list(range(400))),
    ],
    ids=["nothing", "many tensors"],
)
def test_accessor_over_other_things(data, expected):
    accessor = AsynchronousDataAccessor(data)
    assert len(accessor) == len(expected)
    for _time in range(2):
        assert [row.item() for row in accessor] == expected


def test_arguments_of_the_accessor(log):
    loader = torch.utils.data.DataLoader(make_rows(10), 4)
    with pytest.raises(
        AssertionError, match="'drop_last=False' .* only works if 'rebatched_size' is specified"
    ):
        AsynchronousDataAccessor(loader)
    with pytest.raises(AssertionError, match="rebatched_size must be None or greater than 1; got 1"):
        AsynchronousDataAccessor(loader, rebatched_size=1)
    with pytest.raises(ValueError, match="buffer_size must be 1 or more; got 0"):
        AsynchronousDataAccessor(Rows(), buffer_size=0)
    with pytest.raises(TypeError, match="dataset must be something that can be iterated over, .* got int"):
        AsynchronousDataAccessor(3)
    used = DataLoader(make_options(), make_rows(16), mode=ASYNC, async_options=FORK)
    with pytest.raises(Error, match="The DataLoader already uses an AsynchronousDataAccessor internally."):
        AsynchronousDataAccessor(used)
    assert log == []
    AsynchronousDataAccessor(Rows(), miss_sleep_time_in_ms=0, **FORK).terminate()
    assert len(log) == 1
    assert "miss_sleep_time_in_ms has no effect" in log[0]


def test_accessor_rebatches():
    """The rows of batches of 4 joined to batches of 6; both drop what is left over, or none."""
    for drop_last, strategy in ((True, SharingStrategy.ForkServer), (False, SharingStrategy.Fork)):
        loader = DataLoader(make_options(1, 4), make_rows(31), drop_last=drop_last)
        accessor = AsynchronousDataAccessor(loader, rebatched_size=6, sharing_strategy=strategy)
        given = [batch[0].tolist() for batch in accessor]
        assert list(itertools.chain(*given)) == list(range(24 if drop_last else 31))
        assert [len(batch) for batch in given] == ([6] * 4 if drop_last else [6] * 5 + [1])
        assert len(accessor) == len(given)


def test_length_after_rebatching_may_be_unknown():
    for data in (Rows(), torch.utils.data.DataLoader(Stream(9, has_length=False), 2)):
        accessor = AsynchronousDataAccessor(data, rebatched_size=2, **FORK)
        with pytest.raises(TypeError, match="known only for a DataLoader of a known length and batch size"):
            len(accessor)


def test_shapes_may_change():
    """A slot gets other memory when a batch does not fit; the batch before stays what it was."""
    sizes = [3, 1000, 0, 5000, 20, 5000, 9000, 1]
    accessor = AsynchronousDataAccessor([torch.full((n, 2), n) for n in sizes], buffer_size=2)
    for _time in range(2):
        for size, batch in zip(sizes, accessor, strict=True):
            assert batch.shape == (size, 2)
            assert bool((batch == size).all())
    accessor.terminate()
    assert batch.tolist() == [[1, 1]]  # the memory is there as long as the tensor


def test_batches_lie_in_a_ring():
    accessor = AsynchronousDataAccessor([torch.full((5,), n) for n in range(20)], buffer_size=3, **FORK)
    assert len({batch.data_ptr() for batch in accessor}) <= 4


def test_batches_that_are_kept_stay_as_they_are():
    """Also of an array and a part of a tensor, over the end of an iteration, and after the process."""
    data = [(torch.full((5,), n), np.full(3, n)) for n in range(9)]
    accessor = AsynchronousDataAccessor(data, buffer_size=2, **FORK)
    kept = [tensor[1:3] if n % 2 else array for n, (tensor, array) in enumerate(accessor)]
    kept += [tensor for tensor, _array in accessor]
    for _batch in accessor:
        pass
    accessor.terminate()
    assert [one.tolist() for one in kept[:9]] == [[n] * (2 if n % 2 else 3) for n in range(9)]
    assert [one.tolist() for one in kept[9:]] == [[n] * 5 for n in range(9)]


def test_kept_batches_cost_no_descriptors_and_hold_no_neighbours():
    """Each one had a descriptor of its own, of which a process has 1024, and a kept label its batch."""
    data = [(torch.full((99,), n), torch.tensor([n]), np.full(3, n)) for n in range(20)]
    accessor = AsynchronousDataAccessor(data, buffer_size=2, **FORK)
    before = len(os.listdir("/proc/self/fd"))
    kept = [batch[1:] for batch in accessor]
    assert len(os.listdir("/proc/self/fd")) <= before + 5  # a ring of three slots, and two kept ones
    accessor.terminate()
    assert all((label == n).all() and (array == n).all() for n, (label, array) in enumerate(kept))
    assert [label.untyped_storage().nbytes() for label, _array in kept[3:]] == [8] * 17


def test_iterating_again_starts_over():
    torch.manual_seed(3)
    loader = DataLoader(make_options(1, 4), make_rows(30), shuffle=True, mode=ASYNC)
    expected = torch.utils.data.DataLoader(make_rows(30), 4, shuffle=True, drop_last=True)
    given = []
    for count in (1, 7, 2, 0, 7, 7):
        iterator = iter(loader)
        given.append(as_lists(next(iterator) for _number in range(count)))
    for _time in range(2):
        with pytest.raises(StopIteration):
            next(iterator)
    first = iter(loader)
    next(first)
    second = iter(loader)
    with pytest.raises(Error, match="Another iteration over the same data has begun"):
        next(first)
    assert len(list(second)) == 7
    torch.manual_seed(3)
    for batches in given:
        # Here as there, an iteration draws one permutation, however far it goes.
        iterator = iter(expected)
        wanted = as_lists(next(iterator) for _number in range(max(len(batches), 1)))
        assert batches == wanted[: len(batches)]


class Draws:
    """Random numbers of the three generators."""

    def __iter__(self):
        for _number in range(4):
            of_python, of_numpy = random.random(), np.random.random()  # noqa: NPY002, S311
            yield torch.tensor([of_python, of_numpy, torch.rand(()).item()])


def test_random_numbers_go_on_from_those_of_the_process():
    def seed():
        random.seed(1)
        np.random.seed(2)  # noqa: NPY002
        torch.manual_seed(3)

    seed()
    accessor = AsynchronousDataAccessor(Draws())
    given = [batch.clone() for _time in range(2) for batch in accessor]
    accessor.terminate()
    others = [batch.clone() for batch in accessor]
    accessor.terminate()
    assert not torch.equal(torch.stack(given[:4])[:, 2], torch.stack(others)[:, 2])
    seed()
    expected = [batch for _time in range(2) for batch in Draws()]
    assert torch.equal(torch.stack(given), torch.stack(expected))


def wait_until(is_so):
    guard = time.monotonic() + 300
    while not is_so():
        assert time.monotonic() < guard
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("option", "before", "after"), [("load_indefinitely", 0, 2), ("early_preload", 1, 1), (None, 0, 1)]
)
def test_when_an_iteration_begins_to_load(tmp_path, option, before, after):
    """How often the first row was loaded, before and after one iteration while no other has begun."""
    path = tmp_path / "loaded"
    path.touch()
    options = {"load_indefinitely": False, **({} if option is None else {option: True})}
    accessor = AsynchronousDataAccessor(Rows(9, at=0, what=functools.partial(append, path)), **options)
    wait_until(lambda: path.stat().st_size >= before)
    assert len(list(accessor)) == 9
    wait_until(lambda: path.stat().st_size >= after)
    assert path.stat().st_size == after
    assert [row.item() for row in accessor] == list(range(9))


# What goes wrong


def test_an_error_comes_with_its_traceback():
    accessor = AsynchronousDataAccessor(Rows(8, at=3, what=fail))
    for _time in range(2):
        given = []
        with pytest.raises(KeyError, match="row 3 is missing") as raised:
            given.extend(row.item() for row in accessor)
        assert "in __getitem__" in "".join(raised.value.__notes__)
        iterator = iter(accessor)
        assert [next(iterator).item() for _number in range(3)] == [0, 1, 2]
    accessor = AsynchronousDataAccessor(Rows(8, at=3, what=fail_strangely), **FORK)
    with pytest.raises(RuntimeError, match="StrangeError: 1 and 2"):  # it does not pickle
        list(accessor)


def test_an_error_of_a_worker():
    options = {"num_workers": 1, "mode": REBATCHED, "rebatched_worker_size": 1}
    told = "DataLoader worker process 0(.|\n)*in __getitem__(.|\n)*row 3 is missing"
    with pytest.raises(KeyError, match=told):
        list(DataLoader(make_options(), Rows(8, at=3, what=fail), **options))


@pytest.mark.parametrize(
    ("what", "code", "strategy"),
    [(exit_now, "7", SharingStrategy.Fork), (kill_this, r"-9 \(SIGKILL\)", SharingStrategy.ForkServer)],
)
def test_a_process_that_dies(what, code, strategy):
    accessor = AsynchronousDataAccessor(Rows(8, at=3, what=what), sharing_strategy=strategy)
    for _time in range(2):  # another one is started
        given = []
        with pytest.raises(Error, match=f"the process that loads the data ended, with exit code {code}"):
            for row in accessor:
                given.append(row.item())
        assert given == [0, 1, 2][: len(given)]


def test_terminated_in_the_middle():
    accessor = AsynchronousDataAccessor(Rows())
    iterator = iter(accessor)
    row = next(iterator)
    accessor.terminate()
    assert multiprocessing.active_children() == []
    assert row.item() == 0
    with pytest.raises(Error, match="was ended. Iterate again to start another one"):
        next(iterator)
    assert len(list(accessor)) == 8
    del iterator, accessor  # the second process ends with its owner


def test_ended_while_it_loads(monkeypatch):
    """Else the test would never end."""
    monkeypatch.setattr(loading_process, "_STOP_SECONDS", 0.1)
    accessor = AsynchronousDataAccessor(Rows(8, at=2, what=wait_for_good), **FORK)
    iterator = iter(accessor)
    next(iterator)
    del accessor
    assert len(multiprocessing.active_children()) == 1
    del iterator
    assert multiprocessing.active_children() == []


def test_what_cannot_be_pickled():
    with pytest.raises(TypeError, match=r"cannot be sent .*lambda(.|\n)*SharingStrategy.Fork"):
        DataLoader(make_options(), Rows(), collate_fn=lambda rows: torch.stack(rows), mode=ASYNC)

    class Local(Rows):
        pass

    with pytest.raises(TypeError, match=r"cannot be sent .*Local(.|\n)*at the top of a module"):
        AsynchronousDataAccessor(Local())
    accessor = AsynchronousDataAccessor(Local(3), **FORK)
    assert [row.item() for row in accessor] == [0, 1, 2]
    loader = DataLoader(make_options(), make_rows(16), mode=ASYNC, async_options=FORK)
    with pytest.raises(TypeError, match="in mode Async has a process, and cannot be pickled"):
        take_apart(loader)


class Unloadable:
    """Pickles, and then does not load."""

    def __init__(self, what):
        self.what = what

    def __iter__(self):
        yield torch.ones(1)

    def __setstate__(self, state):
        state["what"]()


def find_no_disk():
    raise FileNotFoundError("no such disk here")


def test_a_data_set_that_does_not_load():
    accessor = AsynchronousDataAccessor(Unloadable(find_no_disk))
    for _time in range(2):
        with pytest.raises(FileNotFoundError, match="no such disk here"):
            list(accessor)


def test_a_program_without_a_guard_is_told_to_have_one(monkeypatch):
    """The process that imports it may start no other, and ends before it has the data set."""
    guard = 'must do so under `if __name__ == "__main__":`'
    with pytest.raises(Error, match=f"ended before it had the data set, with exit code 7.*{guard}"):
        list(AsynchronousDataAccessor(Unloadable(exit_now)))
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(Error, match=f"started to load data, and is importing the program.*{guard}"):
        AsynchronousDataAccessor([])


def test_no_file_stays_open():
    def use(strategy):
        accessor = AsynchronousDataAccessor(make_rows(4), sharing_strategy=strategy)
        first = next(iter(accessor))
        accessor.terminate()
        return first[0].item()

    for strategy in (SharingStrategy.Fork, SharingStrategy.ForkServer):
        assert use(strategy) == 0
        gc.collect()
        before = len(os.listdir("/proc/self/fd"))
        assert use(strategy) == 0
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) <= before


def use_data_and_end(connection, how):
    """Leaves an iteration unfinished at the end of the process, which loads data in another."""
    os.setsid()  # as a terminal starts a program
    accessor = AsynchronousDataAccessor(Rows(10**9), **FORK)
    iterator = iter(accessor)
    next(iterator)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # for the traceback
    connection.send([child.pid for child in multiprocessing.active_children()])
    globals()["kept"] = iterator
    if how == "interrupted":
        for _row in iterator:
            pass
    if how == "killed":
        signal.pause()


def has_ended(pid):
    """Whether there is no such process, or it is a zombie that waits for its parent."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize(("how", "code"), [("returns", 0), ("interrupted", 1), ("killed", -signal.SIGKILL)])
def test_the_process_ends_with_the_one_that_uses_it(how, code):
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    program = context.Process(target=use_data_and_end, args=(there, how))
    program.start()
    (loader,) = here.recv()
    if how == "interrupted":
        os.killpg(program.pid, signal.SIGINT)
    if how == "killed":
        program.kill()
    program.join()
    assert program.exitcode == code
    for resource in (program, here, there):
        resource.close()
    wait_until(lambda: has_ended(loader))


# Whole programs


PROGRAM = """
import torch
from ipu_pipeline.poptorch.data import AsynchronousDataAccessor

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 1000000

    def __getitem__(self, index):
        return torch.tensor(index)

if __name__ == "__main__":
    accessor = AsynchronousDataAccessor(torch.utils.data.DataLoader(Rows(), batch_size=None, num_workers=1))
    iterator = iter(accessor)
    next(iterator)
    print("runs", flush=True)
    for row in iterator:
        pass
"""


@pytest.mark.thorough
def test_an_interrupted_program_ends_with_its_fork_server_and_workers(tmp_path):
    from tests.support.programs import Started

    (tmp_path / "program.py").write_text(PROGRAM)
    program = Started(
        [sys.executable, tmp_path / "program.py"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert program.stdout.readline() == "runs\n"
    os.killpg(program.pid, signal.SIGINT)  # as a terminal does
    _output, errors = program.communicate()  # when all that have its pipes are gone
    assert program.returncode == -signal.SIGINT
    assert errors.count("Traceback") == 1


@pytest.mark.thorough
def test_processes_that_are_spawned():
    torch.manual_seed(3)
    options = {"sharing_strategy": SharingStrategy.FileSystem}
    loader = DataLoader(
        make_options(), make_rows(), shuffle=True, num_workers=1, mode=ASYNC, async_options=options
    )
    given = read(loader)
    torch.manual_seed(3)
    assert given == read(torch.utils.data.DataLoader(make_rows(), 4, shuffle=True, drop_last=True))


# Parcels and batches


Point = collections.namedtuple("Point", ["x", "y"])


@dataclasses.dataclass
class Sample:
    image: torch.Tensor
    name: str


def through_memory(value, whole_storages=False):
    parcel = take_apart(value, whole_storages)
    memory = torch.zeros(parcel.num_bytes, dtype=torch.uint8)
    parcel.write(memory)
    return put_together(parcel.pickled, parcel.buffers, memory), memory


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # torch's own way of sending them
@pytest.mark.parametrize("whole_storages", [False, True])
def test_tensors_taken_apart_and_put_together(whole_storages):
    tensors = [
        torch.arange(6).reshape(2, 3),
        torch.arange(6.0).reshape(2, 3).T,
        torch.arange(24).reshape(2, 3, 4)[:, 1:, ::2],
        torch.tensor(3, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]),
        torch.empty(0, 3),
        torch.ones(1).expand(4),
        torch.arange(7, dtype=torch.uint8)[1:],
        torch.ones(2, requires_grad=True),
        torch.eye(3).to_sparse(),
        torch.nn.Parameter(torch.ones(2)),
    ]
    for tensor in tensors:
        (made,), _memory = through_memory([tensor], whole_storages)
        assert type(made) is type(tensor)
        assert made.dtype == tensor.dtype
        assert made.shape == tensor.shape
        assert torch.equal(made.to_dense(), tensor.to_dense())


def test_structures_taken_apart_and_put_together():
    value = {
        "point": Point(torch.ones(2), [1, None]),
        3: (Sample(torch.zeros(3), "zero"), collections.OrderedDict(a=np.arange(6).reshape(2, 3).T)),
    }
    made, memory = through_memory(value)
    assert list(made) == ["point", 3]
    assert made["point"] == Point(pytest.approx(torch.ones(2)), [1, None])
    assert made[3][0].name == "zero"
    assert isinstance(made[3][1], collections.OrderedDict)
    assert np.array_equal(made[3][1]["a"], value[3][1]["a"])
    memory.zero_()
    assert made["point"].x.tolist() == [0, 0]
    assert not made[3][1]["a"].any()


def test_a_generator_goes_on_where_it_was():
    """torch ignores the offset of a state within its storage: what lay before it was read, or nothing."""
    generator = torch.Generator().manual_seed(5)
    torch.rand(3, generator=generator)
    ((_rows, made), _memory) = through_memory([torch.ones(100), generator], whole_storages=True)
    assert torch.equal(torch.rand(3, generator=made), torch.rand(3, generator=generator))


def test_tensors_that_share_memory():
    whole = torch.arange(1000.0)
    views = [whole[n:] for n in range(1000)]
    (made, memory) = through_memory(views, whole_storages=True)
    assert len(memory) < 5000
    made[0][999] = -1
    assert made[999].item() == -1
    (made, memory) = through_memory(views[990:])
    assert len(memory) == 10 * 64
    made[0][9] = -1
    assert made[9].item() == 999


def test_rebatch():
    batches = [
        {"a": torch.arange(n)[:, None] + 10 * n, "b": [["x"] * n, (np.arange(n), 7)]}
        for n in (3, 1, 4, 2, 9)
    ]
    rows = torch.cat([batch["a"] for batch in batches])
    given = list(rebatch(batches, 4, drop_last=False))
    assert [len(batch["a"]) for batch in given] == [4, 4, 4, 4, 3]
    assert torch.equal(torch.cat([batch["a"] for batch in given]), rows)
    for batch in given:
        names, (numbers, constant) = batch["b"]
        assert names == ["x"] * len(batch["a"])
        assert numbers.tolist() == [row % 10 for row in batch["a"].flatten().tolist()]
        assert constant == 7
    assert len(list(rebatch(batches, 4, drop_last=True))) == 4
    points = list(rebatch([Point(torch.ones(1), torch.ones(1, 2))] * 3, 2, drop_last=True))
    assert isinstance(points[0], Point)
    assert points[0].y.shape == (2, 2)


@pytest.mark.parametrize(
    ("batches", "text"),
    [
        (
            [torch.tensor(1.0)],
            r"all tensors of a batch must have the same number of rows.* a Tensor .*\[\(\)\]",
        ),
        ([(torch.ones(2), torch.ones(3, 1))], r"shapes \[\(2,\), \(3, 1\)\]"),
        ([["a", "b"]], r"a list with tensors of the shapes \[\]"),
        (
            [(torch.ones(1), n) for n in range(2)],
            "what is not by row is the same in all of them; got 0 and 1",
        ),
    ],
)
def test_what_cannot_be_rebatched(batches, text):
    with pytest.raises(TypeError, match=text):
        list(rebatch(batches, 4, drop_last=False))

"""What programs take is measured once, and kept."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipu_pipeline.engine.devices.device_groups import make_groups
from ipu_pipeline.engine.execution import measured_costs
from ipu_pipeline.engine.execution.measured_costs import (
    ProgramTime,
    TimedProgram,
    find_directory,
    time_copy,
    time_programs,
    time_shortest,
)
from ipu_pipeline.ground.host import count_cores

FOUND = ProgramTime(0.5, 1.5, 8)


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """Where times are kept; nothing is known of earlier tests."""
    monkeypatch.setattr(measured_costs, "_measured", {})
    monkeypatch.setattr(measured_costs, "find_directory", lambda: tmp_path / "times")
    monkeypatch.setattr(measured_costs, "_PASSES", 1)
    return tmp_path / "times"


@pytest.fixture
def timed(monkeypatch):
    """Of each program that was timed its size and the number of copies; each takes half a second."""
    seen = []

    def time(program, compiled, num_copies):
        assert compiled is not None
        seen.append((*program.arguments[0].shape, num_copies))
        return FOUND

    monkeypatch.setattr(measured_costs, "_time", time)
    return seen


def make(factor=2.0, shape=(4,), carried=None, device=None):
    device = device or jax.devices()[0]
    (group,) = make_groups([device], [0])
    struct = jax.ShapeDtypeStruct(shape, np.float32, sharding=group.replicated)
    jitted = jax.jit(lambda x: [x * factor], donate_argnums=(0,) if carried else ())
    return TimedProgram(jitted, [struct], carried or {}, device, {})


def test_equal_programs_are_timed_once_whatever_their_device(directory, timed):
    other = jax.devices()[1]
    assert time_programs([make(), make(), make(device=other), make(3.0), make(shape=(5,))]) == [FOUND] * 5
    assert len(timed) == 3
    time_programs([make(3.0)])
    assert len(timed) == 3
    assert len(list(directory.iterdir())) == 3


def test_what_disturbs_one_measurement_does_not_count(directory, monkeypatch):
    """All programs are timed before any is timed again."""
    order, times = [], iter([3.0, 1.0, 2.0, 5.0])

    def time(program, _compiled, _num_copies):
        order.append(program.arguments[0].shape)
        return FOUND._replace(seconds=next(times))

    monkeypatch.setattr(measured_costs, "_time", time)
    monkeypatch.setattr(measured_costs, "_PASSES", 2)
    assert [found.seconds for found in time_programs([make(), make(shape=(5,))])] == [2.0, 1.0]
    assert order == [(4,), (5,)] * 2


def test_programs_that_read_much_together_run_on_copies(directory, timed):
    """So each finds as little in the caches as in a step; the number is part of what is kept."""
    mega = 1 << 18  # floats in 1 MiB
    time_programs([make(shape=(mega,)), make(3.0)])
    assert timed == [(mega, 2), (4, 64)]  # a bit more than 1 MiB; and as many as there may be
    time_programs([make(shape=(mega,)), make(shape=(100 * mega,)), make(shape=(5 * mega,))])
    assert timed[2:] == [(mega, 64), (100 * mega, 1), (5 * mega, 16)]  # 64 MiB are enough
    time_programs([make(shape=(mega,))])
    assert timed[5:] == [(mega, 1)]
    time_programs([make(shape=(mega,)), make(3.0)])
    assert len(timed) == 6


def test_later_processes_find_what_was_kept(directory, timed, monkeypatch):
    time_programs([make()])
    monkeypatch.setattr(measured_costs, "_measured", {})
    assert time_programs([make()]) == [FOUND]
    assert len(timed) == 1
    (path,) = directory.iterdir()
    assert json.loads(path.read_text()) == FOUND._asdict()
    assert directory.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"seconds": 1}',
        '{"seconds": -1, "cores": 1, "num_temporary_bytes": 0}',
        '{"seconds": 1, "cores": 0, "num_temporary_bytes": 0}',
        '{"seconds": NaN, "cores": 1, "num_temporary_bytes": 0}',
        '{"seconds": "1", "cores": 1, "num_temporary_bytes": 0}',
    ],
)
def test_a_file_that_says_nothing_usable_is_replaced(directory, timed, text, monkeypatch):
    time_programs([make()])
    (path,) = directory.iterdir()
    path.write_text(text)
    monkeypatch.setattr(measured_costs, "_measured", {})
    assert time_programs([make()]) == [FOUND]
    assert len(timed) == 2
    assert json.loads(path.read_text()) == FOUND._asdict()
    assert list(directory.iterdir()) == [path]


def test_what_another_process_wrote_meanwhile_counts(directory, timed, monkeypatch):
    keep, other = measured_costs._keep, ProgramTime(7.0, 1.0, 0)

    def keep_second(key, found, where):
        keep(key, other, where)
        return keep(key, found, where)

    monkeypatch.setattr(measured_costs, "_keep", keep_second)
    assert time_programs([make()]) == [other]


@pytest.mark.parametrize("is_file", [True, False])
def test_a_place_that_is_none(directory, timed, is_file, monkeypatch):
    if is_file:
        directory.write_text("not a directory")
    else:
        monkeypatch.setattr(measured_costs, "find_directory", lambda: None)
    assert time_programs([make()]) == [FOUND]
    assert time_programs([make()]) == [FOUND]
    assert len(timed) == 1


def test_where_times_are_kept(monkeypatch, tmp_path):
    jax_directory = jax.config.jax_compilation_cache_dir
    own = Path("ipu_pipeline", "program_times")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    try:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path))
        assert find_directory() == tmp_path / "program_times"
        for elsewhere in (None, "gs://bucket/cache"):
            jax.config.update("jax_compilation_cache_dir", elsewhere)
            monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
            assert find_directory() == tmp_path / "cache" / own
            monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which the specification says to ignore
            assert find_directory() == tmp_path / "home" / ".cache" / own
    finally:
        jax.config.update("jax_compilation_cache_dir", jax_directory)


def test_programs_run_on_zeros_and_take_over_what_they_may_destroy(directory):
    (found,) = time_programs([make(shape=(256, 256), carried={0: 0})])
    assert found.seconds > 0
    assert 0 < found.cores <= count_cores()
    (shortest,) = make_groups(jax.devices()[:1], [0])
    assert time_shortest(shortest) > 0


@pytest.mark.parametrize("num_copies", [1, 3])  # four runs at least
def test_copies_take_turns(num_copies, directory):
    """Each may be destroyed by its own run only."""
    program = make(shape=(256,), carried={0: 0})
    compiled = jax.jit(lambda x: [x * 2.0], donate_argnums=(0,))
    given = []

    def run(x):
        given.append(x.unsafe_buffer_pointer())
        return compiled(x)

    run.memory_analysis = lambda: None
    found = measured_costs._time(program, run, num_copies)
    assert found.num_temporary_bytes == 0
    assert len(set(given[:num_copies])) == num_copies
    assert len(given) > num_copies


@pytest.mark.parametrize(
    ("function", "struct"),
    [
        (lambda key: [jax.random.normal(key, (3,))], jax.eval_shape(jax.random.key, 0)),
        (lambda x: [x / x], jax.ShapeDtypeStruct((3,), np.float32)),  # nan, as the arguments are zeros
    ],
    ids=["key", "nan"],
)
def test_random_keys_may_be_arguments_and_nan_checks_do_not_count(function, struct, directory):
    (group,) = make_groups(jax.devices()[:1], [0])
    given = jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=group.replicated)
    with jax.debug_nans(True):
        (found,) = time_programs([TimedProgram(jax.jit(function), [given], {}, jax.devices()[0], {})])
    assert found.seconds > 0


def test_transfers_are_timed_once(directory, monkeypatch):
    groups = make_groups(jax.devices()[:3], [0, 1, 2])
    avals = [jax.ShapeDtypeStruct((8, 8), np.float32)]
    first = time_copy(avals, groups[0], groups[1])
    assert first > 0
    monkeypatch.setattr(measured_costs, "_repeat", lambda _call: pytest.fail("It was timed again."))
    assert time_copy(avals, groups[1], groups[2]) == first


def test_a_transfer_to_the_same_device_is_not_timed(directory, monkeypatch):
    """It would say nothing of others, under whose name it would be kept."""
    monkeypatch.setattr(measured_costs, "_repeat", lambda _call: pytest.fail("It was timed."))
    source, target = make_groups(jax.devices()[:1] * 2, [0, 1])
    small, large = (
        time_copy([jax.ShapeDtypeStruct((size,), np.float32)], source, target) for size in (8, 2**20)
    )
    assert 0 < small < large
    assert not directory.exists()


def test_while_a_function_is_traced(directory):
    """As in a function that ipu_compiler.compile traces: what is measured does not become a part of it."""

    def function(x):
        (found,) = time_programs([make(5.0)])
        assert found.seconds > 0
        (source, target) = make_groups(jax.devices()[:2], [0, 1])
        assert time_copy([jax.ShapeDtypeStruct((8,), np.float32)], source, target) > 0
        return jnp.sin(x)

    jaxpr = jax.make_jaxpr(function)(1.0)
    assert [equation.primitive.name for equation in jaxpr.eqns] == ["sin"]


def test_an_interrupt_leaves_nothing_behind(directory, monkeypatch):
    def interrupt(_call):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(measured_costs, "_repeat", interrupt)
        with pytest.raises(KeyboardInterrupt):
            time_programs([make()])
    assert not directory.exists()
    time_programs([make()])
    assert len(list(directory.iterdir())) == 1


def test_threads_time_one_program_at_a_time(directory, monkeypatch):
    running, most = [], []
    repeat = measured_costs._repeat

    def counted(call):
        running.append(1)
        most.append(len(running))
        found = repeat(call)
        running.pop()
        return found

    monkeypatch.setattr(measured_costs, "_repeat", counted)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(time_programs, ([make(float(n))] for n in range(3))))
    assert most == [1, 1, 1]

"""What a terminal shows while programs compile, and what the log says then."""

import contextlib
import io
import logging
import re
import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tqdm import tqdm

from ipu_pipeline import engine
from ipu_pipeline.engine import progress
from ipu_pipeline.poptorch.execution.instrumentation import CompileProgress
from tests.support.front import Model, session_of
from tests.support.terminals import Screen, shown


@pytest.fixture
def screen(monkeypatch):
    """The module's standard error as a terminal. (pytest puts its own in place when a test begins.)"""
    made = Screen()
    monkeypatch.setattr(progress, "sys", types.SimpleNamespace(stderr=made, modules=sys.modules))
    monkeypatch.setattr(progress, "_DELAY", 0)
    monkeypatch.setattr(progress, "_INTERVAL", 0.01)
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    return made


def wait_for(screen, text, seconds=300):
    deadline = time.monotonic() + seconds
    while text not in screen.getvalue():
        assert time.monotonic() < deadline, screen.getvalue()
        time.sleep(0.01)


def no_thread_is_left():
    return not [thread for thread in threading.enumerate() if thread.name == "ipu-progress"]


def compile_alone():
    with progress.compiling(1) as compilation, compilation.program():
        return compilation


def test_the_line_counts_and_is_cleared(screen, caplog, monkeypatch):
    caplog.set_level(logging.INFO, "ipu_pipeline")
    now = [100.0]
    monkeypatch.setattr(progress, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))

    def compile_one(_number):
        with compilation.program():
            pass

    with progress.compiling(3) as compilation:
        wait_for(screen, "Compiling: 0 of 3 programs")
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(compile_one, range(2)))
        compilation.note_loaded(1)
        now[0] += 0.7
        wait_for(screen, "Compiling: 3 of 3 programs, 0.7 s")
    lines = re.findall(r"Compiling: (\d) of 3 programs, \d+\.\d s", screen.getvalue())
    assert lines[0] == "0"
    assert lines[-1] == "3"
    assert lines == sorted(lines)
    assert shown(screen.getvalue()) == [""]
    assert no_thread_is_left()
    (message,) = caplog.messages
    assert message == "Compiled 3 programs in 0.7 s (1 like others, loaded for their devices)"


def test_what_compiles_at_once_shows_nothing(screen, monkeypatch):
    monkeypatch.setattr(progress, "_DELAY", 600)

    thread = threading.Thread(target=compile_alone, daemon=True)
    thread.start()
    thread.join(300)
    assert not thread.is_alive()  # it has not waited for the line
    assert screen.getvalue() == ""


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_leaves_no_line(error, screen, caplog):
    caplog.set_level(logging.INFO, "ipu_pipeline")
    with pytest.raises(error), progress.compiling(2) as compilation:
        with compilation.program():
            pass
        wait_for(screen, "Compiling: 1 of 2 programs")
        raise error
    assert shown(screen.getvalue()) == [""]
    assert no_thread_is_left()
    assert caplog.messages == []
    compilation = compile_alone()  # the next one counts by itself
    assert compilation.num_done == compilation.total == 1


def test_a_line_while_stages_are_traced(screen):
    def stage(x):
        wait_for(screen, "Tracing: ")
        return x

    engine.Pipeline([stage], num_micro_batches=1).trace(np.ones(2, np.float32))
    assert re.search(r"\rTracing: \d+\.\d s", screen.getvalue())
    assert shown(screen.getvalue()) == [""]
    assert no_thread_is_left()


@pytest.mark.parametrize("fault", [None, ValueError, KeyboardInterrupt])
def test_initial_values_are_counted(fault, screen):
    def initializer(key, shape, dtype):
        if made and fault is not None:
            wait_for(screen, "Initial values: 1 of 2 variables")
            raise fault
        made.append(shape)
        wait_for(screen, f"Initial values: {len(made) - 1} of 2 variables")
        return jnp.full(shape, len(made), dtype)

    def stage(x):
        weights = [engine.get_variable(name, (2,), initializer=initializer) for name in "ab"]
        return x + sum(weights)

    made = []
    pipeline = engine.Pipeline([stage], num_micro_batches=1)
    with contextlib.nullcontext() if fault is None else pytest.raises(fault):
        state = pipeline.init(jax.random.key(0), jnp.ones(2))
        np.testing.assert_array_equal(state.variables["b"], [2, 2])
    assert shown(screen.getvalue()) == [""]
    assert no_thread_is_left()


def test_within_another_one_programs_count_with_it(caplog):
    caplog.set_level(logging.INFO, "ipu_pipeline")
    with progress.compiling(2) as outer:
        for _ in range(2):
            with progress.compiling(1) as inner, inner.program():
                assert inner is outer
    assert [message.split(" in ")[0] for message in caplog.messages] == ["Compiled 2 programs"]
    with progress.compiling(2):
        pass  # all were there already
    assert len(caplog.messages) == 1


def test_a_terminal_that_goes_away_hinders_nothing(screen):
    with progress.compiling(1) as compilation, compilation.program():
        wait_for(screen, "Compiling: ")
        screen.close()
    assert compilation.num_done == 1
    assert no_thread_is_left()


def test_where_progress_is_shown(monkeypatch):
    assert progress.is_shown_on(Screen())
    for stream in (io.StringIO(), None, open(__file__)):  # noqa: SIM115  # closed below
        assert not progress.is_shown_on(stream)
    stream.close()
    assert not progress.is_shown_on(stream)
    assert progress.is_shown_on(type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})())
    monkeypatch.setenv("TQDM_DISABLE", "1")
    assert not progress.is_shown_on(Screen())
    monkeypatch.setenv("TQDM_DISABLE", "")
    assert progress.is_shown_on(Screen())


def test_bars_are_drawn_again_below_what_is_printed(capsys):
    with progress.between_bars():
        sys.stderr.write("before\n")
    with tqdm(total=2, desc="bar", ncols=40) as bar:
        bar.update()
        bar.refresh()
        with progress.between_bars():
            sys.stderr.write("said\n")
    lines = shown(capsys.readouterr().err)
    assert lines[:2] == ["before", "said"]
    assert lines[2].startswith("bar:  50%")


@pytest.mark.parametrize("mapping", [(0, 1), (0, 0)])
@pytest.mark.usefixtures("no_cache")
def test_a_first_run_tells_of_its_programs_once(mapping, screen, caplog, monkeypatch):
    """Over two IPUs, and as one program."""
    caplog.set_level(logging.INFO, "ipu_pipeline")
    begin = progress.Compilation.program

    def begin_once_the_line_is_there(compilation):
        wait_for(screen, "Compiling: ")
        return begin(compilation)

    monkeypatch.setattr(progress.Compilation, "program", begin_once_the_line_is_there)
    model = Model(device_mapping=list(mapping), repeat_count=1)
    with session_of(model) as session:
        model.run(session)
        counts = {int(n) for n in re.findall(r"Compiling: \d+ of (\d+) program", screen.getvalue())}
        (message,) = caplog.messages
        told = int(re.match(r"Compiled (\d+) programs? in \d+\.\d s", message)[1])
        assert counts == {told}
        assert told == 1 if mapping == (0, 0) else told > 2
        assert "from the cache" not in message
        assert shown(screen.getvalue()) == [""]
        model.run(session)
        assert len(caplog.messages) == 1


def test_what_the_cache_has_is_told(caplog, capfd):
    """In the log; there is nothing on a standard error that is no terminal."""
    if jax.config.jax_compilation_cache_dir is None:
        pytest.skip("these tests run without a cache")
    caplog.set_level(logging.INFO, "ipu_pipeline")
    for _ in range(2):
        model = Model(device_mapping=[0, 1], repeat_count=1)
        with session_of(model) as session:
            model.run(session)
    number = re.match(r"Compiled (\d+) programs", caplog.messages[-1])[1]
    assert caplog.messages[-1].endswith(f"s ({number} from the cache)")
    assert capfd.readouterr() == ("", "")


def test_poptorchs_bar_counts_the_programs_in_place_of_the_line(screen, capsys, monkeypatch):
    with CompileProgress(shows_bar=True) as told:
        assert "capturing the model" in capsys.readouterr().err
        told.done("trace")
        with progress.compiling(4) as compilation:
            for _ in range(3):
                with compilation.program():
                    pass
            assert no_thread_is_left()  # there is none that would show the line
        told._bar.refresh()
        assert re.search("90%.*3 of 4 programs", capsys.readouterr().err)
        told.end()
    assert "100%" in capsys.readouterr().err
    assert screen.getvalue() == ""
    monkeypatch.setenv("TQDM_DISABLE", "1")
    with CompileProgress(shows_bar=True) as told:
        told.end()
    assert capsys.readouterr().err == ""

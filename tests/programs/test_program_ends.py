"""How the tutorial's programs end, on a terminal and in this process, and their flags."""

import argparse
import re
import runpy
import sys

import pytest

import ipu_pipeline as ipu
from ipu_pipeline import tutorial_support
from tests.support.programs import ESTIMATOR, ROOT, STEP1, STEP2, STEP3, STEP4
from tests.support.terminals import Terminal

# Each compilation takes two seconds more: a fast machine has compiled all before there is a line.
_SLOW_TO_COMPILE = """
import runpy, sys, time
import jax
compile = jax.stages.Lowered.compile
def slow(*arguments, **options):
    compiled = compile(*arguments, **options)
    time.sleep(2)
    return compiled
jax.stages.Lowered.compile = slow
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def end_of(main, capsys):
    """How a program ends that does this: its exit code, and what it says on the standard error."""
    with pytest.raises(SystemExit) as ended:
        tutorial_support.exit_on_error(main)
    return ended.value.code, capsys.readouterr().err


def raising(error):
    def main():
        raise error

    return main


def interrupted(program, after, *options, **variables):
    """Interrupts a program when it has written something; returns its exit code and lines."""
    terminal = Terminal(*program, "--dataset", "digits", "--steps", "5000", *options, **variables)
    terminal.read_until(after)
    terminal.interrupt()
    return terminal.finish()


@pytest.mark.thorough
def test_ctrl_c_in_training_on_a_terminal():
    code, lines = interrupted([STEP3], "Step 10,")
    assert code == 130
    *before, last, end = lines
    assert end == ""
    step = int(re.fullmatch(r"Interrupted after step (\d+)\.", last)[1])
    assert 10 <= step < 5000
    assert not [line for line in before if "Traceback" in line or "Compiling" in line]
    printed = [line for line in before if line.startswith("Step ")]
    assert re.fullmatch(r"Step 0, Epoch 0.0, Mean loss: \d\.\d{3}", printed[0])
    assert abs(len(printed) - (step // 10 + 1)) <= 1  # it may come between a step and its line
    assert re.search(r" \d+/5000 \[", before[-1])  # the bar


@pytest.mark.thorough
def test_ctrl_c_while_programs_compile():
    program = ("-c", _SLOW_TO_COMPILE, STEP3)
    code, lines = interrupted(program, "Compiling: ", JAX_ENABLE_COMPILATION_CACHE="false")
    assert code == 130
    assert lines[-2:] == ["Interrupted before the first step was done.", ""]
    assert not [line for line in lines if "Traceback" in line or "Compiling" in line]


@pytest.mark.thorough
def test_ctrl_c_in_the_estimators_program(tmp_path):
    model = ("--model-dir", tmp_path / "model")
    code, lines = interrupted([ESTIMATOR], "Step 10,", *model)
    assert code == 130
    step = int(re.fullmatch(r"Training ends at step (\d+) by signal 2\.", lines[-2])[1])
    assert (tmp_path / "model" / "checkpoints" / str(step) / "checkpoint.json").exists()
    assert not [line for line in lines if "Traceback" in line]
    assert re.search(r"Training: +\d+%.* \d+/800000 .*loss", lines[-3])  # the bar


@pytest.mark.thorough
def test_a_terminal_shows_nothing_that_is_disabled():
    terminal = Terminal(STEP3, "--dataset", "digits", "--steps", "2", TQDM_DISABLE="1")
    code, lines = terminal.finish()
    assert code == 0
    assert "\r" not in terminal.output.replace("\r\n", "")
    begins = [line.split()[0] for line in lines if line]
    assert begins == ["Data", "Steps", "Step", "Step", "Elapsed", "Test", "Program"]


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (KeyboardInterrupt(), 130, "Interrupted."),
        (KeyboardInterrupt("after step 3"), 130, "Interrupted after step 3."),
        (ValueError("no"), 1, "Error: no"),
        (FloatingPointError("The loss is nan."), 1, "Error: The loss is nan."),
        (OSError(28, "no place"), 1, "Error: no place"),
        (BrokenPipeError(32, "Broken pipe"), 1, None),
        (
            ValueError("4 IPUs are needed. Set IPUConfig.ipu_model = True to use CPU devices."),
            1,
            "Error: 4 IPUs are needed. Set IPUConfig.ipu_model = True to use CPU devices. For this program "
            "that is --ipu-model.",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_one_line_and_an_exit_code(error, code, line, capsys, monkeypatch):
    handlers, pipes = [], []
    monkeypatch.setattr(tutorial_support.signal, "signal", lambda *given: handlers.append(given))
    monkeypatch.setattr(tutorial_support.os, "dup2", lambda *given: pipes.append(given))
    monkeypatch.setattr(sys.stdout, "fileno", lambda: 1)
    assert end_of(raising(error), capsys) == (code, "" if line is None else f"{line}\n")
    signals = tutorial_support.signal
    assert handlers == ([(signals.SIGINT, signals.SIG_DFL)] if code == 130 else [])
    assert len(pipes) == (line is None)


def test_other_errors_keep_their_traceback():
    with pytest.raises(ZeroDivisionError):
        tutorial_support.exit_on_error(raising(ZeroDivisionError()))


def test_training_says_where_it_was_interrupted_and_which_loss_is_not_finite(capsys, monkeypatch):
    monkeypatch.setattr(tutorial_support.signal, "signal", lambda *_given: None)

    def make(what):
        steps = iter([[1.0, 2.0]] * 3)

        def run_step():
            losses = next(steps, None)
            if losses is None and isinstance(what, BaseException):
                raise what
            return what if losses is None else losses

        return lambda: tutorial_support.train(run_step, 30, 32, 100)

    assert end_of(make(KeyboardInterrupt()), capsys) == (130, "Interrupted after step 2.\n")
    error = "Error: The loss of step 3 is inf, not a finite number. A smaller --learning-rate may help.\n"
    assert end_of(make([1.0, float("inf"), float("nan")]), capsys) == (1, error)


def test_rounded_figures(capsys):
    tutorial_support.print_speed(15360, 4.3011)
    assert capsys.readouterr().out == "Elapsed 4.30 s, 3,571 samples/sec\n"


@pytest.mark.parametrize("name", ["grouped", "Grouped", "GROUPED", "inTerleaved", "sequential"])
def test_schedules_in_any_case(name):
    parser = argparse.ArgumentParser()
    tutorial_support.add_schedule_argument(parser)
    chosen = tutorial_support.schedule_of(parser.parse_args(["--schedule", name]))
    assert chosen.name == name.capitalize()
    with pytest.raises(SystemExit):
        parser.parse_args(["--schedule", "group"])


@pytest.mark.parametrize(
    ("program", "options", "expected"),
    [
        (STEP1, [], (1, False, False)),
        *((program, ["--ipu-model"], (2, True, False)) for program in (STEP2, STEP3, STEP4, ESTIMATOR)),
        (STEP4, ["--splits", "dense128", "dense32", "--auto-round-num-ipus"], (3, False, True)),
    ],
)
def test_flags_for_what_messages_about_the_number_of_ipus_advise(
    program, options, expected, monkeypatch, capsys
):
    class ConfiguredError(Exception):
        pass

    def configure(config):
        raise ConfiguredError(config.auto_select_ipus, bool(config.ipu_model), config.auto_round_num_ipus)

    monkeypatch.setattr(ipu.config.IPUConfig, "configure_ipu_system", configure)
    monkeypatch.setattr(sys, "argv", [program, "--dataset", "digits", *options])
    with pytest.raises(ConfiguredError) as found:
        runpy.run_path(str(ROOT / program), run_name="__main__")
    assert found.value.args == expected


@pytest.mark.parametrize("place", ["below a file", "a file"])
def test_a_model_dir_that_cannot_be_written_is_found_first(place, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "model" if place == "below a file" else tmp_path / "file"
    options = f"--dataset digits --steps 1 --model-dir {path}".split()
    monkeypatch.setattr(sys, "argv", [ESTIMATOR, *options])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / ESTIMATOR), run_name="__main__")
    assert ended.value.code == 1
    assert capsys.readouterr().err == (
        f"Error: train: checkpoints and scalars cannot be written to {path}: {tmp_path / 'file'}: Not a "
        "directory. Give another path.\n"
    )

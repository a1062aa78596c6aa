"""The PopTorch tutorial: its program with all options, and what its page says.

The page's fences: `python` blocks are one program together, `text` is what the block above prints,
`console` has a command and what it prints. Classes are the program's.
"""

import dataclasses
import os
import re
import shlex
import sys

import numpy as np
import pytest
import torch

import ipu_pipeline.poptorch as poptorch
from ipu_pipeline import datasets
from tests.support import pages
from tests.support.programs import start
from tests.support.tutorial_modules import POPTORCH, imported, run_main

FOLDER = POPTORCH
PROGRAM = FOLDER / "mnist_pipeline.py"
PAGE = (FOLDER / "README.md").read_text()
FENCES = pages.find_fences(PAGE)
EPOCH = re.compile(
    r"^Epoch (\d+): loss (\S+), accuracy (\S+)% at its end; [\d.]+ calls/s, [\d,]+ images/s$"
)
NUMBERS = {  # and how far they may be from the page's
    re.compile(r"(?<=loss )\d+\.\d+"): 0.02,
    re.compile(r"\d+\.\d+(?=%)"): 2,
    re.compile(r"(?<=\()\d+(?= of \d+ images)"): 7,
}
torch.set_num_threads(1)  # as the program does


@pytest.fixture(scope="module")
def program():
    """The program as a module."""
    with imported(FOLDER, PROGRAM.stem) as (found,):
        yield found


def losses(printed):
    found = [EPOCH.fullmatch(line) for line in printed.splitlines()]
    return [float(match[2]) for match in found if match]


SHORT = shlex.split(
    "--dataset digits --batch-size 12 --device-iterations 6 --epochs 1 --learning-rate 0.005 "
    "--test-batch-size 4"
)


@pytest.mark.thorough
def test_the_program(tmp_path):
    """As a user starts it, in another directory."""
    options = [*SHORT, "--offload-optimiser", "--profile", "--debug"]
    result = start("-W", "error", PROGRAM, *options, as_tests=True, folder=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "Data set: the embedded 8x8 digits, as --dataset digits asks"
    counts = "Calls per epoch: 1; weight updates per call: 6; micro-batches per weight update: 10"
    assert lines[1] == f"{counts}, each of 12 images"
    assert EPOCH.fullmatch(lines[2])[1] == "1"
    percent, num_right = re.fullmatch(r"Test accuracy: (\S+)% \((\d+) of 360 images\)", lines[3]).groups()
    assert float(percent) == pytest.approx(int(num_right) / 3.6, abs=0.005)
    assert lines[4:] == ["Program ran successfully"]
    assert losses(result.stdout)[0] < 2.1  # ten equally likely digits: 2.30
    assert float(percent) > 50
    for kind in ("training", "inference"):
        profile = tmp_path / "profile" / kind
        assert [path.suffix for path in sorted(profile.rglob("*.*"))] == [".gz", ".pb"]
    for ipu in range(4):  # training and inference
        assert len(re.findall(rf"IPU {ipu}: block B{ipu + 1}, \d+ operations", result.stderr)) == 2


def parse(program, patch, arguments):
    patch.setattr(sys, "argv", [PROGRAM.name, *arguments.split()])
    return program.parse_arguments()


def test_options(program, monkeypatch):
    def options_of(arguments):
        args = parse(program, monkeypatch, arguments)
        return args, program.make_training_options(args, 7)

    args, options = options_of("")
    assert (args.batch_size, args.test_batch_size, args.epochs, args.learning_rate) == (40, 8, 3, 0.001)
    assert program.find_device_iterations(args, 60_000) == 10
    assert (args.profile, args.profile_dir, args.debug) == (False, "./profile", False)
    assert (options.device_iterations, options.Training.gradient_accumulation) == (7, 10)
    assert options.output_mode is poptorch.OutputMode.All
    assert type(options.execution_strategy) is poptorch.PipelinedExecution
    assert options.TensorLocations.location_optimizer == {}
    assert options.random_seed == 0
    inference = program.make_inference_options(options)
    assert (inference.device_iterations, inference.Training.gradient_accumulation) == (100, 1)
    assert inference.execution_strategy == options.execution_strategy
    _args, options = options_of("--strategy sharded --offload-optimiser --seed 5")
    assert type(options.execution_strategy) is poptorch.ShardedExecution
    assert options.TensorLocations.location_optimizer == {"onChip": 0}
    assert options.random_seed == 5


def test_device_iterations_fit_the_data(program, monkeypatch):
    def find(num_images, arguments=""):
        return program.find_device_iterations(parse(program, monkeypatch, arguments), num_images)

    assert find(60_000) == 10
    assert find(1_437) == 3
    assert find(1_437, "--batch-size 4") == 10
    assert find(1_437, "--device-iterations 2") == 2
    with pytest.raises(ValueError, match="--device-iterations 4 x 10 .* --batch-size 40 = 1,600 .* 1,437"):
        find(1_437, "--device-iterations 4")
    with pytest.raises(ValueError, match="--device-iterations 1 x 10 .* --batch-size 40 = 400 .* 399"):
        find(399)


def test_what_is_refused_is_said_without_a_traceback(program, monkeypatch, capsys, tmp_path):
    for arguments, message in [
        ("--batch-size 0", "--batch-size: must be at least 1; got 0"),
        ("--epochs half", "--epochs: invalid positive_int value: 'half'"),
        ("--learning-rate -1", "--learning-rate: must be a finite number above 0; got -1"),
        ("--strategy phased", "--strategy: invalid choice: 'phased'"),
        ("--seed -1", "--seed: must be from 0 to"),
        ("--offload-optimizers", "unrecognized arguments: --offload-optimizers"),
        ("--dataset digits --batch-size 144", "Error: A call takes --device-iterations 1 x 10"),
        (f"--data-dir {tmp_path}", f"Error: MNIST: the folder {tmp_path} has no train-images"),
    ]:
        with pytest.raises(SystemExit) as exited:
            program.exit_on_error(lambda given=arguments: run_main(program, monkeypatch, *given.split()))
        error = capsys.readouterr().err
        assert exited.value.code == (1 if message.startswith("Error") else 2)
        assert error.startswith(message) if message.startswith("Error") else message in error
        assert "Traceback" not in error


def test_images_are_normalized(program):
    images = np.zeros((3, 28, 28), np.float32)
    images[1] = 1
    pixels, labels = program.make_dataset(images, np.array([4, 5, 6], np.int32)).tensors
    assert pixels.shape == (3, 1, 28, 28)
    assert pixels[:, 0, 0, 0].numpy() == pytest.approx(
        [-0.1307 / 0.3081, 0.8693 / 0.3081, -0.1307 / 0.3081]
    )
    assert labels.dtype == torch.int64
    assert labels.tolist() == [4, 5, 6]


def test_fences_have_known_languages():
    assert {fence.language for fence in FENCES} == {"python", "text", "console"}


def test_the_page_has_the_classes_of_the_program():
    text = PROGRAM.read_text()
    blocks = ["\n".join(fence.lines) for fence in FENCES if fence.language == "python"]
    classes = re.findall(r"^class .*?(?=\n\n\n|\Z)", "\n\n\n".join(blocks), re.MULTILINE | re.DOTALL)
    names = ["ConvLayer", "Network", "NetworkWithLoss"]
    assert [definition.split("(")[0] for definition in classes] == [f"class {name}" for name in names]
    for definition in classes:
        assert f"\n\n\n{definition}\n\n\n" in text


def test_links_of_the_page():
    pages.check_links(FOLDER / "README.md")
    drawn = {path.name for path in (FOLDER / "figures").glob("*.svg")}
    assert set(re.findall(r"!\[[^\]]+\]\(figures/([^)]+)\)", PAGE)) == drawn


@pytest.mark.soak
@pytest.mark.skipif(datasets.DATA_DIR_VARIABLE not in os.environ, reason="IPU_PIPELINE_DATA_DIR is not set")
def test_part_of_an_epoch_of_mnist(program, monkeypatch, optimized):
    data = datasets.load_mnist(os.environ[datasets.DATA_DIR_VARIABLE])
    sizes = {"train_images": 20_000, "train_labels": 20_000, "test_images": 2_000, "test_labels": 2_000}
    part = dataclasses.replace(data, **{name: getattr(data, name)[:size] for name, size in sizes.items()})
    monkeypatch.setattr(program.datasets, "load", lambda *_selection: (part, "Data set: part of MNIST"))
    printed = run_main(program, monkeypatch, "--epochs", "1")
    assert "Calls per epoch: 5; weight updates per call: 10;" in printed
    assert losses(printed)[0] < 0.5
    right = int(re.search(r"Test accuracy: \S+% \((\d+) of 2000 images\)", printed)[1])
    assert right > 1_600

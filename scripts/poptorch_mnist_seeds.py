"""Trains tutorial/poptorch/mnist_pipeline.py on MNIST from several seeds, and plain torch beside it.

    python scripts/poptorch_mnist_seeds.py --data-dir FOLDER

Plain torch begins with the same weights and takes the same images in the same order; what is a call's
micro-batches there is one batch for each weight update here, whose mean loss has the same gradient. The
median accuracy of the program must be at least 98.2%, and from each seed it must be within 0.2 points of
plain torch's. It takes about a minute and a half a seed.
"""

import argparse
import importlib.util
import re
import statistics
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch

from ipu_pipeline.data import datasets

PROGRAM = Path(__file__).resolve().parent.parent / "tutorial" / "poptorch" / "mnist_pipeline.py"
LEAST_MEDIAN, GREATEST_DIFFERENCE = 98.2, 0.2  # percent, points


def run_program(options: list[str]) -> tuple[list[float], float]:
    """The loss at the end of each epoch, and the test accuracy in percent."""
    command = [sys.executable, str(PROGRAM), *options]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    accuracy = re.search(r"Test accuracy: (\S+)%", output)
    assert accuracy is not None
    assert "Program ran successfully" in output
    return [float(loss) for loss in re.findall(r": loss (\S+),", output)], float(accuracy.group(1))


def load_program() -> ModuleType:
    spec = importlib.util.spec_from_file_location(PROGRAM.stem, PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[PROGRAM.stem] = module
    spec.loader.exec_module(module)
    return module


def run_plainly(program: ModuleType, options: list[str]) -> tuple[list[float], float]:
    """What `run_program` returns, of plain torch."""
    with mock.patch.object(sys, "argv", [PROGRAM.name, *options]):
        args = program.parse_arguments()
    data = datasets.load(args.dataset, args.data_dir)[0]
    device_iterations = program.find_device_iterations(args, len(data.train_images))
    loader = program.make_training_loader(
        args, program.make_training_options(args, device_iterations), data
    )
    model = program.NetworkWithLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    losses = []
    for _epoch in range(args.epochs):
        for images, labels in loader:
            of_call = []
            for some_images, some_labels in zip(
                images.chunk(device_iterations), labels.chunk(device_iterations), strict=True
            ):
                loss = model(some_images, some_labels)[1]
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                of_call.append(loss.item())
        losses.append(statistics.mean(of_call))
    loader.terminate()
    with torch.no_grad():
        images, labels = program.make_dataset(data.test_images, data.test_labels).tensors
        return losses, 100 * program.count_right(model(images), labels) / len(labels)


def describe(losses: list[float], accuracy: float) -> str:
    return f"losses {' / '.join(f'{loss:.3f}' for loss in losses)}, accuracy {accuracy:.2f}%"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)  # as in the program
    program = load_program()
    accuracies, differences = [], []
    for seed in range(args.seeds):
        options = ["--data-dir", args.data_dir, "--seed", str(seed)]
        losses, accuracy = run_program(options)
        print(f"seed {seed}, pipelined: {describe(losses, accuracy)}", flush=True)
        plain_losses, plain_accuracy = run_plainly(program, options)
        print(f"seed {seed}, plain torch: {describe(plain_losses, plain_accuracy)}", flush=True)
        accuracies.append(accuracy)
        differences.append(abs(accuracy - plain_accuracy))
    median, difference = statistics.median(accuracies), max(differences)
    print(f"Median accuracy {median:.2f}%, greatest difference from plain torch {difference:.2f} points")
    is_good = median >= LEAST_MEDIAN and difference <= GREATEST_DIFFERENCE
    print("All within bounds" if is_good else "Out of bounds")
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    main()

"""The shared parts of the tutorial's programs: arguments, data, the training loop and the evaluation.

The reader turns one program into the next, so each is complete in itself, with its layers; here is what the
reader does not change.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from ipu_pipeline import engine
from ipu_pipeline.data import datasets
from ipu_pipeline.ground.tables import between_bars, is_shown_on
from ipu_pipeline.queues.infeed import IPUInfeedQueue
from ipu_pipeline.queues.outfeed import IPUOutfeedQueue
from ipu_pipeline.queues.synthetic_data import uses_synthetic_data
from ipu_pipeline.tf1.ops import pipelining_ops
from ipu_pipeline.tf1.session.session import Session

__all__ = [
    "add_arguments",
    "add_fashion_arguments",
    "add_ipu_model_argument",
    "add_schedule_argument",
    "check_loss",
    "count_steps",
    "emulate",
    "evaluate",
    "exit_on_error",
    "is_shown_on",
    "make_evaluation_feeds",
    "positive_float",
    "positive_int",
    "print_speed",
    "print_step",
    "schedule_of",
    "seed",
    "train",
    "uses_synthetic_data",
]

_PRINT_EVERY = 10  # steps
_INTERRUPTED = 130  # the exit code of programs that Ctrl-C ends: 128 and the signal's number
_ERRNO = re.compile(r"^\[Errno \d+\] ")
_FLAGS = {  # of this program, for the advice of messages about the number of IPUs
    "IPUConfig.auto_round_num_ipus = True": "--auto-round-num-ipus",
    "IPUConfig.ipu_model = True": "--ipu-model",
}


def positive_int(text: str) -> int:
    """An argument that must be an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1; got {value}")
    return value


def positive_float(text: str) -> float:
    """An argument that must be a finite number above 0."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a finite number above 0; got {text}")
    return value


def seed(text: str) -> int:
    """An argument that must be an integer from 0 that fits 63 bits."""
    value = int(text)
    if not 0 <= value < 2**63:
        raise argparse.ArgumentTypeError(f"must be from 0 to 2**63-1; got {text}")
    return value


def add_arguments(parser: argparse.ArgumentParser, repeat_count: int) -> None:
    """Adds the arguments that all programs have."""
    parser.add_argument("--batch-size", type=positive_int, default=32, help="Examples per micro-batch.")
    parser.add_argument(
        "--repeat-count",
        type=positive_int,
        default=repeat_count,
        help="How often the loop's body, or the pipeline with its weight update, runs in each step.",
    )
    parser.add_argument("--epochs", type=positive_float, default=50, help="Epochs to train for.")
    parser.add_argument(
        "--steps", type=positive_int, default=None, help="Steps to train for, instead of --epochs."
    )
    parser.add_argument("--learning-rate", type=positive_float, default=0.01, help="The learning rate.")
    parser.add_argument(
        "--batches-to-accumulate",
        type=positive_int,
        default=16,
        help="Micro-batches whose gradients are accumulated for a weight update.",
    )
    parser.add_argument(
        "--dataset",
        choices=["auto", "mnist", "digits"],
        default="auto",
        help="auto: MNIST if a folder is given or tensorflow-datasets has it, else the embedded digits.",
    )
    parser.add_argument(
        "--data-dir",
        default=None,
        help="A folder with MNIST's four idx .gz files, or with the mnist/3.0.1 that "
        "scripts/prepare_mnist.py makes from them; by default that of the environment variable "
        f"{datasets.DATA_DIR_VARIABLE}, else where tensorflow-datasets keeps data.",
    )
    parser.add_argument(
        "--seed", type=seed, default=0, help="Of the initial variables and the order of the examples."
    )
    _Emulate.milliseconds = 0.0  # not those of a program that ran before in this process
    parser.add_argument(
        "--emulate",
        action=_Emulate,
        type=positive_float,
        metavar="MS",
        help="Let each layer take so many milliseconds of its IPU, twice as many backwards, and no core: "
        "the virtual IPUs of a laptop then overlap as real ones do.",
    )
    add_ipu_model_argument(parser)


def add_fashion_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that all programs about Fashion-MNIST have, with their defaults."""
    parser.add_argument("--batch-size", type=positive_int, default=16, help="Images per micro-batch.")
    parser.add_argument("--epochs", type=positive_int, default=5, help="Epochs to train for.")
    parser.add_argument("--learning-rate", type=positive_float, default=0.001, help="The learning rate.")
    parser.add_argument(
        "--dataset",
        choices=["auto", "fashion", "digits"],
        default="auto",
        help="auto: Fashion-MNIST if a folder is given, else the 8x8 digits that come with the library.",
    )
    parser.add_argument(
        "--data-dir",
        help="The folder with Fashion-MNIST's four idx files, gzipped or not; by default that of the "
        f"environment variable {datasets.FASHION_DIR_VARIABLE}.",
    )
    parser.add_argument(
        "--seed", type=seed, default=0, help="Of the initial weights and the order of the images."
    )


def emulate(x: Any) -> Any:
    """A layer's result, which takes the time of `--emulate`, and twice as long backwards."""
    return engine.emulate(x, _Emulate.milliseconds)


class _Emulate(argparse.Action):
    """Notes how long each layer takes."""

    milliseconds = 0.0

    def __call__(self, _parser: Any, _namespace: Any, values: Any, _option: Any = None) -> None:
        _Emulate.milliseconds = values


def add_ipu_model_argument(parser: argparse.ArgumentParser) -> None:
    """Adds the argument for machines with fewer accelerators than a program has IPUs."""
    parser.add_argument(
        "--ipu-model",
        action="store_true",
        help="Use CPU devices as IPUs, also where there are accelerators.",
    )


def add_schedule_argument(parser: argparse.ArgumentParser) -> None:
    """Adds the argument that programs with a pipeline have."""
    names = {schedule.name.lower(): schedule.name for schedule in pipelining_ops.PipelineSchedule}
    parser.add_argument(
        "--schedule",
        type=lambda text: names.get(text.lower(), text),
        choices=list(names.values()),
        default="Grouped",
        help="The pipeline schedule, in upper or lower case.",
    )


def schedule_of(arguments: argparse.Namespace) -> pipelining_ops.PipelineSchedule:
    """The schedule that `--schedule` names."""
    return pipelining_ops.PipelineSchedule[arguments.schedule]


def exit_on_error(main: Callable[[], None]) -> None:
    """Runs a program, and ends it without a traceback if the user, not the author, can mend the error.

    An error in its arguments, a file that cannot be written or a loss that is not finite is printed on the
    standard error, and the exit code is 1. Ctrl-C prints one line, and the exit code is 130.
    """
    try:
        main()
    except KeyboardInterrupt as interrupt:
        # Python waits for XLA's running compilations; a second Ctrl-C does not wait, and needs no message.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        print(" ".join(["Interrupted", *map(str, interrupt.args)]) + ".", file=sys.stderr)
        sys.exit(_INTERRUPTED)
    except BrokenPipeError:  # the program that read the output has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would try again
        sys.exit(1)
    except (ValueError, OSError, FloatingPointError) as error:
        flags = [flag for advice, flag in _FLAGS.items() if advice in str(error)]
        advised = f" For this program that is {flags[0]}." if flags else ""
        print(f"Error: {_ERRNO.sub('', str(error))}{advised}", file=sys.stderr)
        sys.exit(1)


def count_steps(arguments: argparse.Namespace, examples_per_step: int, num_examples: int) -> int:
    """Computes how long to train, and prints it.

    Returns:
      The number of steps.
    """
    if not math.isfinite(arguments.epochs * num_examples):
        raise ValueError(f"--epochs is too large: {arguments.epochs}.")
    num_requested = int(arguments.epochs * num_examples)
    steps = arguments.steps if arguments.steps is not None else -(-num_requested // examples_per_step)
    steps = max(steps, 1)
    total = steps * examples_per_step
    print(
        f"Steps {steps} x examples per step {examples_per_step} (== {total} training examples, "
        f"{total / num_examples} epochs of {num_examples} examples)"
    )
    return steps


def train(
    run_step: Callable[[], Sequence[float]], steps: int, examples_per_step: int, num_examples: int
) -> None:
    """The training loop: prints the mean loss every 10 steps and at the last, and the speed at the end.

    The speed leaves out the first step, which compiles, unless it is the only one.
    """
    begin = measured_from = time.perf_counter()
    last_step = None
    try:
        with tqdm(
            total=steps, unit="step", file=sys.stdout, disable=not is_shown_on(sys.stdout)
        ) as progress:
            for step in range(steps):
                losses = run_step()
                last_step = step
                if step == 0 < steps - 1:
                    measured_from = time.perf_counter()
                print_step(step, steps, examples_per_step, num_examples, losses)
                progress.update()
    except KeyboardInterrupt:
        when = "before the first step was done" if last_step is None else f"after step {last_step}"
        raise KeyboardInterrupt(when) from None
    end = time.perf_counter()
    speed = max(1, steps - 1) * examples_per_step / (end - measured_from)
    when = " after the first step" if steps > 1 else ""  # which compiles
    print(f"Elapsed {end - begin:.2f} s, {speed:,.0f} samples/sec{when}")


def print_step(step: int, steps: int, examples_per_step: int, num_examples: int, losses: Any) -> None:
    """Prints the mean loss of every tenth step and of the last one."""
    check_loss(f"step {step}", losses)
    if step % _PRINT_EVERY == 0 or step == steps - 1:
        epoch = examples_per_step * step / num_examples
        is_known = np.size(losses) and not uses_synthetic_data()
        loss = f"{np.mean(losses):.3f}" if is_known else "none, as synthetic data bring none back"
        with between_bars():
            print(f"Step {step}, Epoch {epoch:.1f}, Mean loss: {loss}", flush=True)


def check_loss(when: str, losses: Any) -> None:
    """Ends training if its losses are no longer finite."""
    values = np.ravel(np.asarray(losses))
    wrong = values[~np.isfinite(values)]
    if len(wrong):
        raise FloatingPointError(
            f"The loss of {when} is {wrong[0]}, not a finite number. A smaller --learning-rate may help."
        )


def print_speed(num_examples: int, seconds: float) -> None:
    """Prints how long training took, and how many examples it trained on per second."""
    print(f"Elapsed {seconds:.2f} s, {num_examples / seconds:,.0f} samples/sec")


def make_evaluation_feeds(
    data: datasets.ImageData, batch_size: int
) -> tuple[int, IPUInfeedQueue, IPUOutfeedQueue]:
    """The queues of a pipeline that evaluates: it takes images, labels and a mask, and returns a count.

    Returns:
      The number of micro-batches, the infeed and the outfeed.
    """
    batches = datasets.EvaluationBatches(data.test_images, data.test_labels, batch_size)
    return len(batches), IPUInfeedQueue(batches), IPUOutfeedQueue()


def evaluate(
    session: Session,
    program: Any,
    infeed_queue: IPUInfeedQueue,
    outfeed_queue: IPUOutfeedQueue,
    num_examples: int,
) -> float:
    """Runs a program that enqueues the number of right answers per micro-batch, and prints the accuracy.

    Returns:
      The accuracy. With synthetic data, which bring nothing back, nothing is run and it is not a number.
    """
    if uses_synthetic_data():
        print("Test accuracy: none, as synthetic data bring nothing back")
        return float("nan")
    session.run(infeed_queue.initializer)
    session.run(program)
    num_right = int(np.sum(session.run(outfeed_queue.dequeue())))
    accuracy = num_right / num_examples
    print(f"Test accuracy: {accuracy:.4f} ({num_right} of {num_examples} images)")
    return accuracy

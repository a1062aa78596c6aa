"""Trains the tutorial's programs on MNIST from several seeds, and checks losses and accuracy.

    python scripts/mnist_seeds.py --data-dir FOLDER

The bounds are wide around what plain JAX gives on the same model (12 seeds: mean loss 0.31-0.48 at step 10,
0.0008-0.0028 at the end, accuracy 0.977-0.980). It takes about two minutes a run.
"""

import argparse
import re
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUNS = {
    "step1": ("tutorial/step1_single_ipu.py", []),
    "step2": ("answers/step2_sharding.py", []),
    "step3": ("answers/step3_pipelining.py", []),
    "step4": ("answers/step4_configurable_stages.py", []),
    "four stages": (
        "answers/step4_configurable_stages.py",
        ["--splits", "dense128", "dense64", "dense32"],
    ),
}


def run(program: str, options: list[str]) -> tuple[dict[int, float], float]:
    """The printed mean losses by step, and the test accuracy."""
    command = [sys.executable, str(ROOT / program), *options]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    losses = {int(step): float(loss) for step, loss in re.findall(r"Step (\d+),.*loss: (\S+)", output)}
    accuracy = re.search(r"Test accuracy: (\S+)", output)
    assert accuracy is not None
    assert "Program ran successfully" in output
    return losses, float(accuracy.group(1))


def check(what: str, value: float, low: float, high: float) -> bool:
    """Prints a bound that does not hold."""
    if not low <= value <= high:
        print(f"  FAILED: {what} is {value}, not within [{low}, {high}]")
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", choices=list(RUNS), nargs="+", default=list(RUNS))
    args = parser.parse_args()
    is_good = True
    for name in args.only:
        program, options = RUNS[name]
        at_10, accuracies = [], []
        for seed in range(args.seeds):
            options_here = [*options, "--data-dir", args.data_dir, "--seed", str(seed)]
            losses, accuracy = run(program, options_here)
            last = max(losses)
            print(
                f"{name}, seed {seed}: loss {losses[0]:.3f} at step 0, {losses[10]:.3f} at step 10, "
                f"{losses[last]:.3f} at step {last}; accuracy {accuracy:.4f}",
                flush=True,
            )
            is_good &= check("the loss at step 0", losses[0], 2.1, 2.3)
            is_good &= check("the loss at step 10", losses[10], 0.25, 0.60)
            is_good &= check(f"the loss at step {last}", losses[last], 0.0, 0.005)
            is_good &= last == 585
            at_10.append(losses[10])
            accuracies.append(accuracy)
        is_good &= check("the median loss at step 10", statistics.median(at_10), 0.25, 0.45)
        is_good &= check("the median accuracy", statistics.median(accuracies), 0.975, 1.0)
    print("All within bounds" if is_good else "Out of bounds")
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    main()

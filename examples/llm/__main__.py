"""Runs the example from beginning to end: python examples/llm.

It trains in four stages, stops, goes on in two, and asks the model. README.md says more.
"""

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
QUESTIONS = [
    "What is a pipeline?",
    "How do I save a model?",
    "What is the bubble?",
    "Why is my loss nan?",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--directory", type=Path, default=Path("llm_run"), help="a new one (default: llm_run)"
    )
    directory = parser.parse_args().directory
    if directory.exists():
        sys.exit(f"Error: {directory} is there already. Delete it, or give another --directory.")
    rest = ["--directory", str(directory)]
    for name, *arguments in (
        ["train.py", "--stages", "4", "--stop-at", "60", "--report", str(directory / "report")],
        ["train.py", "--stages", "2"],
        ["chat.py", "--evaluate", *QUESTIONS],
    ):
        command = [sys.executable, str(HERE / name), *arguments, *rest]
        print(f"$ python {shlex.join(command[1:])}", flush=True)
        code = subprocess.run(command, check=False).returncode  # noqa: S603  # its own programs
        if code:
            sys.exit(code)


if __name__ == "__main__":
    main()

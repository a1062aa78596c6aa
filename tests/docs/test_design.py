"""The exercises of docs/design.md work as they stand there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.programs import environment

ROOT = Path(__file__).parents[2]
DEVICES = "import jax\njax.config.update('jax_num_cpu_devices', 4)\n"


@pytest.mark.thorough
def test_the_exercises(tmp_path):
    _before, exercises = (ROOT / "docs" / "design.md").read_text().split("## Exercises\n")
    blocks = re.findall(r"```python\n(.*?)```", exercises, re.DOTALL)
    assert len(blocks) == 3
    done = subprocess.run(
        [sys.executable, "-c", DEVICES + "\n".join(blocks)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        env=environment() | {"PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stderr

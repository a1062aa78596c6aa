"""The exercises of docs/design.md work as they stand there."""

import re

import pytest

from tests.support.programs import ROOT, run_each


@pytest.mark.thorough
def test_the_exercises(tmp_path):
    _before, exercises = (ROOT / "docs" / "design.md").read_text().split("## Exercises\n")
    blocks = re.findall(r"```python\n(.*?)```", exercises, re.DOTALL)
    assert len(blocks) == 3
    run_each({"exercises": "\n".join(blocks)}, tmp_path, as_tests=True)

"""The exercises of docs/design.md work as they stand there."""

import re

import pytest

from tests.support.programs import ROOT, run


@pytest.mark.thorough
def test_the_exercises(tmp_path):
    _before, exercises = (ROOT / "docs" / "design.md").read_text().split("## Exercises\n")
    blocks = re.findall(r"```python\n(.*?)```", exercises, re.DOTALL)
    assert len(blocks) == 3
    run("-c", "\n".join(blocks), folder=tmp_path)

"""A pipeline's options: each is described in their docstring, and named in the table of docs/engine.md."""

import dataclasses
import inspect
import re
from pathlib import Path

from ipu_pipeline.engine.pipeline_options import PipelineOptions

PAGE = (Path(__file__).parents[2] / "docs" / "engine.md").read_text()
FIELDS = [field.name for field in dataclasses.fields(PipelineOptions)]


def test_the_docstring_describes_each_option_in_the_order_of_the_signature():
    attributes = inspect.cleandoc(PipelineOptions.__doc__).split("\nAttributes:\n")[1]
    entries = re.findall(r"^  (\w+): (.+(?:\n    .+)*)", attributes, re.MULTILINE)
    assert [name for name, _text in entries] == FIELDS
    for name, text in entries:
        assert len(text.split()) > 8, name


def test_the_page_names_each_option_once():
    table = PAGE.split("\n## Options\n")[1].split("\n## ")[0]
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| `")]
    names = [name for _, options, *_rest in rows for name in re.findall(r"`(\w+)`", options)]
    assert sorted([*names, "hooks"]) == sorted(FIELDS)  # which are not for users
    assert all(text.strip() for _, _options, text, _ in rows)

"""docs/engine_options.md: an entry for each option of a pipeline, with an example that uses it."""

import dataclasses
import re
from pathlib import Path

import pytest

from ipu_pipeline.engine.pipeline_options import PipelineOptions

PAGE = (Path(__file__).parents[2] / "docs" / "engine_options.md").read_text()
FIELDS = [field.name for field in dataclasses.fields(PipelineOptions)]
ENTRIES = re.findall(r"^### `(\w+)`\n\n(.*?)(?=^##)", f"{PAGE}\n##", re.DOTALL | re.MULTILINE)
FOR_FRONTS = {"captures", "gradient_targets"}  # of which the page says what to use instead


def test_the_entries_are_the_options():
    assert sorted(name for name, _text in ENTRIES) == sorted(FIELDS)


def test_the_table_leads_to_each_entry_once():
    links = re.findall(r"\[(\w+)\]\(#(\w+)\)", PAGE.split("\n\n```")[0])
    assert all(name == anchor for name, anchor in links)
    assert sorted(name for name, _anchor in links) == sorted(FIELDS)


@pytest.mark.parametrize(("name", "text"), [pytest.param(*entry, id=entry[0]) for entry in ENTRIES])
def test_an_entry_has_words_and_an_example(name, text):
    words, code, printed = re.fullmatch(
        r"(.*?)```python\n(.*?)```\n\n```text\n(.+?)```\n+", text, re.DOTALL
    ).groups()
    assert words
    assert printed
    if name in FOR_FRONTS:
        assert "Of no use to others" in words
    else:
        assert re.search(rf'\b{name}=|"{name}"', code)

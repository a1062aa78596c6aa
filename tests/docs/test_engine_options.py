"""docs/engine_options.md: an entry for each option of a pipeline, with an example that uses it."""

import dataclasses
import re
from pathlib import Path

from ipu_pipeline.engine.pipeline_options import PipelineOptions

PAGE = (Path(__file__).parents[2] / "docs" / "engine_options.md").read_text()
FIELDS = [field.name for field in dataclasses.fields(PipelineOptions)]
ENTRIES = re.findall(r"^### `(\w+)`\n\n(.*?)(?=^##)", f"{PAGE}\n##", re.DOTALL | re.MULTILINE)
FOR_FRONTS = {"captures", "gradient_targets"}  # of which the page says what to use instead


def test_the_entries_and_the_links_of_the_table_are_the_options():
    assert sorted(name for name, _text in ENTRIES) == sorted(FIELDS)
    links = re.findall(r"\[(\w+)\]\(#(\w+)\)", PAGE.split("\n\n```")[0])
    assert all(name == anchor for name, anchor in links)
    assert sorted(name for name, _anchor in links) == sorted(FIELDS)


def test_each_entry_has_words_and_an_example_that_uses_it():
    for name, text in ENTRIES:
        match = re.fullmatch(r"(.+?)```python\n(.*?)```\n\n```text\n(.+?)```\n+", text, re.DOTALL)
        assert match, name
        if name in FOR_FRONTS:
            assert "Of no use to others" in match[1]
        else:
            assert re.search(rf'\b{name}=|"{name}"', match[2]), name

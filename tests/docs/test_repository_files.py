"""What a repository's host reads: the citation, issue templates and workflows."""

import re

import yaml

from tests.support.programs import ROOT

FILES = [ROOT / "CITATION.cff", *sorted((ROOT / ".github").rglob("*.yml"))]


def test_they_are_yaml():
    for path in FILES:
        assert isinstance(yaml.safe_load(path.read_text()), dict), path


def test_workflows_do_what_the_makefile_has():
    makefile = (ROOT / "Makefile").read_text()
    for path in (ROOT / ".github/workflows").iterdir():
        (job,) = yaml.safe_load(path.read_text())["jobs"].values()
        commands = [step["run"] for step in job["steps"] if "run" in step]
        assert commands
        for command in commands:
            if command.startswith("make "):
                assert re.search(rf"^{command.removeprefix('make ')}:", makefile, re.MULTILINE)
            else:
                assert command == ".ci/run" or "apt-get" in command
        assert job["timeout-minutes"] <= 120


def test_templates_ask_for_what_is_there():
    text = (ROOT / ".github/ISSUE_TEMPLATE/fault.yml").read_text()
    for name in re.findall(r"docs/\w+\.md", text):
        assert (ROOT / name).exists()
    assert "ipu-pipeline doctor" in text

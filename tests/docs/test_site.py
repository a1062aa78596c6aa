"""The site of `make docs`: it is built without a warning, its pages fit, and its programs are tested."""

import dataclasses
import importlib
import re
import subprocess
import sys
import types

import pytest
from sphinx.util.inventory import InventoryFile

from ipu_pipeline.command_line import main
from ipu_pipeline.engine.pipeline_options import PipelineOptions
from tests.docs import test_notebooks, test_readme
from tests.support import browsers, pages
from tests.support.examples import reference
from tests.support.programs import ROOT

PATTERNS = "*.md", "docs/**/*.md", "tutorial/**/*.md", "examples/**/*.md", "benchmarks/README.md"
PAGES = sorted(path for pattern in PATTERNS for path in ROOT.glob(pattern))
TESTED_BY = {  # other pages than those of test_readme, and of the tutorial
    "README.md": "docs/test_readme.py",
    "docs/design.md": "docs/test_design.py",
    "docs/distributed.md": "docs/test_distributed_page.py",
    "docs/how_to/train_with_other_losses.md": "docs/test_other_losses.py",
    "docs/poptorch.md": "docs/test_poptorch_listings.py",
    "docs/poptorch_operations.md": "poptorch/operations/test_poptorch_calls.py",
    "docs/poptorch_options.md": "poptorch/options/test_poptorch_options.py",
    "docs/replicas.md": "tf1/test_replicas_front.py",
    "benchmarks/README.md": "docs/test_benchmarks.py",
}


def test_a_program_is_run_by_a_test_or_says_why_not():
    found = {f"docs/{name}" for name in (*test_readme.PAGES, "porting.md")}
    found |= {*test_notebooks.write_notebooks.PAGES.values(), *test_notebooks.WITHOUT}
    untested = set(TESTED_BY)
    for path in PAGES:
        name, text = str(path.relative_to(ROOT)), path.read_text()
        programs = pages.PROGRAM.findall(text)
        assert len(programs) == len(re.findall(r"^ *```python$", text, re.MULTILINE)), name
        if any(not comment for comment, _code, _text in programs) and name not in found:
            assert path.name in (ROOT / "tests" / TESTED_BY[name]).read_text(), name
            untested.remove(name)
    assert not untested


def test_what_commands_of_how_to_pages_print(capsys):
    """Three dots stand for lines that are left out."""
    (path,) = (path for path in (ROOT / "docs/how_to").glob("*.md") if "```console" in path.read_text())
    text = re.sub(r"^   ", "", path.read_text(), flags=re.M)
    ((command, expected),) = pages.find_commands(pages.find_fences(text))
    program, *arguments = command.split()
    assert program == "ipu-pipeline"
    assert main.main(arguments) == 0
    printed = capsys.readouterr().out
    for part in "\n".join(expected).split("\n...\n"):
        assert part.strip("\n") in printed


@pytest.mark.thorough
def test_the_site(tmp_path):
    """Built once, since that takes half a minute."""
    site = build(tmp_path)
    check_that_each_public_name_is_documented(site)
    check_plain_text(site)
    if browsers.MISSING is not None:
        pytest.skip("it is built, but not looked at: there is no chromium with its chromedriver")
    with browsers.browser() as driver:
        check_search_and_the_front_door(site, driver)
        check_that_pages_fit_without_a_network(site, driver)


def build(target):
    """Where the site is: `make docs` with another place."""
    options = f"-b html --fail-on-warning --keep-going --quiet --doctree-dir {target}/trees".split()
    command = [sys.executable, "-m", "sphinx", *options, "-c", "docs/site", ".", target / "html"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return target / "html"


def check_that_each_public_name_is_documented(site):
    """With the first public module that has it. That documented names exist, the build itself has shown."""
    found = InventoryFile.loads((site / "objects.inv").read_bytes(), uri="")
    documented = {name for kind, names in found.data.items() if kind.startswith("py:") for name in names}
    public = reference.PUBLIC + reference.POPTORCH
    homes = reference.find_homes(public)
    assert set(homes.values()) == set(map(reference.full_name, public))
    for (module, name), home in homes.items():
        if not isinstance(getattr(importlib.import_module(module), name), types.ModuleType):
            assert f"{home}.{name}" in documented, (module, name)
    assert "ipu_pipeline.engine.Pipeline.step" in documented
    assert "ipu_pipeline.engine.Pipeline.accumulate" not in documented
    assert not [page for page in site.rglob("*.html") if "Alias for field number" in page.read_text()]


def check_plain_text(site):
    listed = re.findall(r"^- \[.+\]\((.+)\)$", (site / "llms.txt").read_text(), re.MULTILINE)
    assert len(listed) > 60
    for path in listed:
        assert (site / path).read_text().strip(), path
    assert (site / "docs/engine.md").read_text() == (ROOT / "docs/engine.md").read_text()
    assert "scopes.stochastic_rounding" in (site / "docs/api/names.txt").read_text()
    reference_text = (site / "docs/api/engine.txt").read_text()
    for option in dataclasses.fields(PipelineOptions):
        assert re.search(rf"^{option.name} \(.+\) . \w", reference_text, re.MULTILINE), option.name


_WHAT_IS_WRONG = """
const width = document.documentElement.clientWidth;
const isCut = element => element && element.tagName !== "ARTICLE"
  && (getComputedStyle(element).overflowX !== "visible" || isCut(element.parentElement));
const sticksOut = [...document.querySelectorAll("article *:not(.headerlink)")].filter(
  element => element.getBoundingClientRect().right > width + 1 && !isCut(element.parentElement));
return [
  ...sticksOut.map(element => "sticks out: " + element.outerHTML.slice(0, 99)),
  ...[...document.images].filter(image => image.complete && !image.naturalWidth).map(image => image.src),
  ...performance.getEntriesByType("resource").map(entry => entry.name).filter(name => !/^file:/.test(name)),
];
"""
# A telephone, a laptop, a desktop.
SIZES = [(390, 844), (1024, 768), (1600, 1000)]


def check_that_pages_fit_without_a_network(site, driver):
    """On a telephone, which is the narrowest; on wider screens those that have the widest tables.

    Of the reference, which has a page for each name, a few.
    """
    reference_pages = sorted((site / "build/api").glob("*.html"))
    found = sorted({*site.rglob("*.html")} - {*reference_pages}) + reference_pages[::20]
    assert len(found) > len(PAGES)
    widest = {"comparison", "arguments", "engine", "index"}
    for width, height in SIZES:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        for path in found:
            if width == SIZES[0][0] or path.stem in widest:
                driver.get(path.as_uri())
                assert driver.execute_script(_WHAT_IS_WRONG) == [], (path, width)


def check_search_and_the_front_door(site, driver):
    driver.get((site / "index.html").as_uri())
    browsers.wait(driver, "return document.title.startsWith('ipu_pipeline')")
    browsers.wait(driver, "return [...document.querySelectorAll('.sd-card a')].length === 3")
    driver.get((site / "search.html").as_uri() + "?q=recomputation")
    is_found = "[...document.querySelectorAll('.search a')].some(a => a.href.includes('memory.html'))"
    browsers.wait(driver, f"return {is_found}")

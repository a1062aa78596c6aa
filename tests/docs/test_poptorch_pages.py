"""The pages about PopTorch: what they print; of the first model and of porting also changes and links.

Fences are as in PopTorch's tutorial: all `python` blocks of a page are one program, `text` is what the
block above prints, `console` has commands and what they print. In the page of porting, each `diff` is a
change, and all of them together make one program the other.
"""

import re

import pytest
import torch

from tests.support import pages
from tests.support.programs import run_each
from tests.support.tutorial_modules import POPTORCH, imported, run_main

PAGES = {name: POPTORCH / name / "README.md" for name in ("fashion_mnist", "porting")}
FENCES = {name: pages.find_fences(path.read_text()) for name, path in PAGES.items()}
PORTING = POPTORCH / "porting"
torch.set_num_threads(1)  # its threads and XLA's would fight for the cores


@pytest.mark.thorough
def test_what_the_program_of_porting_prints(tmp_path):
    """Those of the other pages are run as notebooks."""
    blocks = pages.PROGRAM.findall(PAGES["porting"].read_text())
    codes = {"page": "\n".join(code for _comment, code, _text in blocks)}
    printed = run_each(codes, tmp_path, as_tests=True)["page"]
    numbers = {re.compile(r"(?<=loss )\d+\.\d+"): 0.02, re.compile(r"\d+\.\d+(?=%)"): 2}
    wanted = "".join(text for _comment, _code, text in blocks).splitlines()
    pages.assert_printed(printed, wanted, numbers, re.compile(r"\Z"))


def test_the_first_page_has_the_model_of_the_programs():
    fences = [fence for fence in FENCES["fashion_mnist"] if fence.language == "python"]
    code = "\n\n\n".join("\n".join(fence.lines) for fence in fences)
    (definition,) = re.findall(r"^class .*?(?=\n\n\n|\Z)", code, re.MULTILINE | re.DOTALL)
    assert f"\n\n\n{definition}\n\n" in (PAGES["fashion_mnist"].parent / "classifier.py").read_text()


def test_changes_of_the_page_make_one_program_the_other():
    lines = (PORTING / "pytorch_gpu.py").read_text().split("\n")
    removed = added = 0
    for fence in FENCES["porting"]:
        if fence.language == "diff":
            change = pages.parse_change(fence._replace(heading="1A. Change"))
            ((before, after),) = change.pieces
            assert before != after
            lines = pages.apply_change(lines, change)
            removed += sum(line.startswith("-") for line in fence.lines)
            added += sum(line.startswith("+") for line in fence.lines)
    assert "\n".join(lines) == (PORTING / "pytorch_ipu.py").read_text()
    assert (removed, added) == (15, 32)  # of 95: what must change, and nothing else


def test_both_programs_have_the_same_model():
    model = re.compile(r"^class ClassificationModel.*?(?=\n\n\n)", re.MULTILINE | re.DOTALL)
    first, second = (model.findall((PORTING / f"pytorch_{name}.py").read_text()) for name in ("gpu", "ipu"))
    assert len(first) == 1
    assert first == second


@pytest.mark.thorough
def test_both_programs_have_the_same_losses(monkeypatch, optimized):
    """From the same seed, in the same order: three updates are an epoch."""
    found, accuracies = {}, {}
    for name in ("pytorch_gpu", "pytorch_ipu"):
        with imported(PORTING, name) as (program,):
            losses = found[name] = []
            monkeypatch.setattr(program, "check_loss", lambda _when, loss, to=losses: to.append(loss))
            options = ["--dataset", "digits", "--batch-size", 400, "--epochs", 4, "--seed", 3]
            printed = run_main(program, monkeypatch, *options, "--learning-rate", 0.01)
            accuracies[name] = printed.splitlines()[-1]
            assert re.findall(r"mean loss (\S+)", printed) == [f"{loss:.4f}" for loss in losses]
    assert found["pytorch_ipu"] == pytest.approx(found["pytorch_gpu"], rel=1e-5)
    assert found["pytorch_ipu"][3] < 1.5 < 2 < found["pytorch_ipu"][0]
    assert accuracies["pytorch_ipu"] == accuracies["pytorch_gpu"]


def test_too_few_images(monkeypatch, capsys):
    options = ["--dataset", "digits", "--batch-size", "1438"]
    for name in ("pytorch_gpu", "pytorch_ipu"):
        with imported(PORTING, name) as (program,), pytest.raises(SystemExit) as ended:
            program.exit_on_error(lambda run=program: run_main(run, monkeypatch, *options))
        assert ended.value.code == 1
        error = capsys.readouterr().err
        assert error == "Error: There are 1437 images, fewer than the 1438 of a batch.\n"


@pytest.mark.parametrize("name", PAGES)
def test_links_of_the_page(name):
    page, folder = PAGES[name].read_text(), PAGES[name].parent
    pages.check_links(PAGES[name])
    shown = set(re.findall(r"!\[[^\]]+\]\(pictures/([^)]+)\)", page))
    named = set(re.findall(r"pictures/(\w+\.\w+)", page))
    assert named == {path.name for path in (folder / "pictures").glob("*")}
    assert shown <= named
    for path in (folder / "pictures").glob("*"):
        assert path.stat().st_size < 60_000

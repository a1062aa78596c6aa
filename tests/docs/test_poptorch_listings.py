"""The programs of PopTorch's user guide, chapter "Features", and the examples of docs/poptorch.md.

The page names a test for each program: those that are not here are in the room that they are about.
"""

import re
from pathlib import Path

import pytest
import torch

import ipu_pipeline.poptorch as poptorch
from tests.support import lowered, pages
from tests.support.poptorch_front import assert_close, make_options
from tests.support.programs import ROOT


def test_4_float16():
    model = torch.nn.Linear(1, 10).half()
    x = torch.tensor([[0.5]]).half()
    output = poptorch.inferenceModel(model, make_options())(x)
    assert output.dtype == torch.float16
    assert_close([output], [model(x).detach()], 1e-3)


def test_6_another_branch_on_the_devices():
    model = lowered.Call(lambda x: x + 1 if poptorch.isRunningOnIpu() else x - 1)
    assert poptorch.inferenceModel(model, make_options())(torch.ones(1)).item() == 2
    assert model(torch.ones(1)).item() == 0


class SquareOfProduct(torch.nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.W = torch.nn.Parameter(weight.clone())

    def forward(self, x):
        z = x @ self.W
        return z, poptorch.identity_loss(z**2, reduction="mean")


@pytest.mark.thorough
def test_16_groups_of_replicas():
    generator = torch.Generator().manual_seed(100)
    x = torch.randn(24, 40, generator=generator)
    weight = torch.randn(40, 56, generator=generator) * (5 * 8) ** -0.5
    plain = SquareOfProduct(weight)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    model = SquareOfProduct(weight.reshape(40, 4, 14).permute(1, 0, 2).contiguous())
    options = make_options().replicationFactor(8)
    options.inputReplicaGrouping(4, poptorch.CommGroupType.Consecutive)
    executor = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.01))
    executor.W.replicaGrouping(
        poptorch.CommGroupType.Orthogonal, 2, poptorch.VariableRetrievalMode.OnePerGroup
    )
    for _call in range(2):
        z, losses = executor(x)
        optimizer.zero_grad()
        expected, loss = plain(x)
        loss.backward()
        optimizer.step()
        blocks = [torch.cat(list(row), dim=1) for row in z.reshape(2, 4, 12, 14)]
        assert_close([losses.sum() / 8, torch.cat(blocks)], [loss.detach(), expected])
    assert_close([model.W.permute(1, 0, 2).reshape(40, 56)], [plain.W])


# The page.

PAGE = Path(__file__).parents[2] / "docs" / "poptorch.md"


def test_the_page_names_tests_that_exist():
    text = PAGE.read_text()
    named = re.findall(r"`(test_\w+\.py)?::(test_\w+)` \|$", text, re.MULTILINE)
    module = ""
    for file, name in named:
        module = file or module
        (path,) = (ROOT / "tests").rglob(module)  # in whichever room
        assert name in pages.functions_of(path), module
    table = text.partition("## The programs of the user guide")[2]
    listings = re.findall(r"^\| ([\d, ]+) \|", table, re.MULTILINE)
    assert {number for row in listings for number in row.split(", ")} == set(map(str, range(1, 28)))
    for heading in ("Beyond PopTorch", "Differs from PopTorch"):
        section = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
        rows = section.partition("| --- |")[2].splitlines()[1:]
        assert len(rows) > 5
        assert all(re.search(r"::test_\w+` \|$", row) for row in rows if row.startswith("|")), heading


@pytest.mark.thorough
def test_the_pages_examples(capsys):
    """The loop of torch's and the pipelined one print the same losses."""
    pages.execute(PAGE, without="transformers")  # tests/poptorch/generation has that
    printed, loss = capsys.readouterr().out, r"epoch \d: loss (\S+)\n"
    found, told = (
        [float(value) for value in re.findall(loss, text)] for text in (printed, PAGE.read_text())
    )
    assert found == pytest.approx(told, rel=1e-3)
    assert found[:3] == pytest.approx(found[3:], rel=1e-3)
    expected = r"right (9\d|100)%, on \d+ values\ntensor\(0\.\d+\)\n"
    assert re.fullmatch(expected, re.sub(loss, "", printed))

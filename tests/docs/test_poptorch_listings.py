"""The programs of PopTorch's user guide, chapter "Features", and the examples of docs/poptorch.md.

Programs that are not here are in the room that they are about.
"""

import re
from pathlib import Path

import pytest
import torch

import ipu_pipeline.poptorch as poptorch
from ipu_pipeline import datasets
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


# Numbers of the listings, and the test of each.
LISTINGS = [
    ("1", "test_poptorch_options.py::test_a_config_file"),
    ("2", "test_poptorch_executor.py::test_inference_follows_training"),
    ("3", "test_poptorch_module_list.py::test_the_list_is_computed_as_torch_does"),
    ("4", "test_poptorch_listings.py::test_4_float16"),
    ("5", "test_poptorch_executor.py::test_what_is_saved_knows_nothing_of_wrapping"),
    ("6", "test_poptorch_listings.py::test_6_another_branch_on_the_devices"),
    ("7", "test_poptorch_errors.py::test_which_error_is_which"),
    ("8", "test_poptorch_annotations.py::test_modules_begin_blocks"),
    ("8", "test_poptorch_transformers.py::test_listing_8"),
    ("9, 10", "test_poptorch_annotations.py::test_ids_by_number"),
    ("11", "test_poptorch_annotations.py::test_a_block_that_goes_back_to_an_earlier_ipu"),
    ("12", "test_poptorch_phases.py::test_listing_12"),
    ("13", "test_poptorch_phases.py::test_listing_13"),
    ("14", "test_poptorch_phases.py::test_listing_14"),
    ("15", "test_poptorch_phases.py::test_listing_15"),
    ("16", "test_poptorch_listings.py::test_16_groups_of_replicas"),
    ("17", "test_poptorch_optim_pipeline.py::test_equal_to_torch"),
    ("18", "test_poptorch_optim_pipeline.py::test_equal_to_torch"),
    ("19", "test_poptorch_optim_state.py::test_as_if_never_interrupted"),
    ("20", "test_poptorch_operations.py::test_operations_in_a_loops_body"),
    ("21", "test_poptorch_capture.py::test_a_loss_of_ones_own"),
    ("22, 23", "test_poptorch_capture.py::test_buffers_change_attributes_do_not"),
    ("24", "test_poptorch_calls.py::test_attributes_reach_a_custom_operation"),
    ("25", "test_poptorch_executables.py::test_listing_25_exported_offline_and_loaded"),
    ("25", "test_poptorch_executables.py::test_listing_25_options_edited"),
    ("26", "test_poptorch_executables.py::test_listing_26_without_the_model"),
    ("27", "test_poptorch_executables.py::test_listing_27_training_and_validation_apart"),
]


def test_each_listing_has_a_test():
    for _numbers, test in LISTINGS:
        module, _, name = test.partition("::")
        (path,) = (ROOT / "tests").rglob(module)  # in whichever room
        assert name in pages.functions_of(path), test
    told = {number for numbers, _test in LISTINGS for number in numbers.split(", ")}
    assert told == set(map(str, range(1, 28)))


# The page.

PAGE = Path(__file__).parents[2] / "docs" / "poptorch.md"


def losses_of_torch():
    """Trains the page's model in plain torch, with the same batches."""
    torch.manual_seed(0)
    digits = datasets.load_digits()
    images = torch.from_numpy(digits.train_images).flatten(1)
    dataset = torch.utils.data.TensorDataset(images, torch.from_numpy(digits.train_labels).long())
    relu, linear = torch.nn.ReLU, torch.nn.Linear
    model = torch.nn.Sequential(linear(784, 256), relu(), linear(256, 256), relu(), linear(256, 10))
    loader = torch.utils.data.DataLoader(dataset, batch_size=64, shuffle=True, drop_last=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _epoch in range(3):
        for x, y in loader:
            loss = torch.nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        yield loss.item()


@pytest.mark.thorough
def test_the_pages_examples(capsys, tmp_path, monkeypatch):
    """The pipelined loop has the losses of plain torch, as the page says."""
    monkeypatch.chdir(tmp_path)
    pages.execute(PAGE, without="transformers")  # tests/poptorch/generation has that
    printed, loss = capsys.readouterr().out, r"epoch \d: loss (\S+)\n"
    found, told = (
        [float(value) for value in re.findall(loss, text)] for text in (printed, PAGE.read_text())
    )
    assert len(found) == 3
    assert found == pytest.approx(told, rel=1e-3)
    assert found == pytest.approx(list(losses_of_torch()), rel=1e-3)
    expected = r"torch\.Size\(\[8, 32\]\)\nloss \d\.\d\d\n"
    assert re.fullmatch(expected, re.sub(loss, "", printed))

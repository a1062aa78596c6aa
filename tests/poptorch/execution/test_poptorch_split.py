"""`Options.splitAutomatically`: models without blocks, against plain torch and against the whole model."""

import logging

import pytest
import torch

import ipu_pipeline.poptorch as poptorch
from ipu_pipeline.poptorch.errors import Error
from tests.support.poptorch_front import (
    TrainedAlike,
    assert_close,
    assert_same_state,
    leaves,
    make_batch,
    make_options,
    make_sgd,
    seeded,
)
from tests.support.programs import start


class Model(torch.nn.Module):
    """A skip, a weight that is read twice, and statistics of batches."""

    def __init__(self, dropout=0.0, has_statistics=True):
        super().__init__()
        self.first, self.last = torch.nn.Linear(3, 4), torch.nn.Linear(4, 3, bias=False)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _number in range(2))
        self.norm = torch.nn.BatchNorm1d(4) if has_statistics else torch.nn.Identity()
        self.dropout = torch.nn.Dropout(dropout)

    def forward(self, x, target=None):
        x = skip = torch.tanh(self.first(x))
        for layer in self.layers:
            x = x + self.dropout(torch.tanh(layer(x)))
        x = self.last(self.norm(x) + skip) + skip @ self.last.weight.T
        return x if target is None else (x, torch.nn.functional.mse_loss(x, target))


@pytest.mark.parametrize(
    "num_ipus",
    [2, pytest.param(1, marks=pytest.mark.thorough), pytest.param(4, marks=pytest.mark.soak)],
)
def test_training_equals_plain_torch(num_ipus, caplog):
    caplog.set_level(logging.INFO, logger="poptorch::python")
    options = make_options(accumulation=3).splitAutomatically(num_ipus)
    options.anchorTensor("inner", "layers.1/linear")
    trained = TrainedAlike(seeded(Model), options)
    plain = trained.plain.model
    for call in range(2):
        inner = plain.first(make_batch(12, seed=call)[0]).tanh()
        inner = plain.layers[1](inner + torch.tanh(plain.layers[0](inner)))
        trained.call(*make_batch(12, seed=call))
    assert_close([trained.executor.getAnchoredTensor("inner")], [inner])
    trained.compare()
    plural = "s" * (num_ipus > 1)
    summary = str(trained.executor.summary())
    assert f"{num_ipus} stage{plural} on {num_ipus} IPU{plural}" in summary
    assert "first (Linear)" in summary
    assert "last (Linear)" in summary
    assert "The model is split by what its parts take:\nParts (" in caplog.text


def test_more_ipus_than_parts_or_devices():
    one = torch.nn.Linear(3, 3)
    with pytest.raises(Error, match="poptorch.Options.splitAutomatically: num_ipus must be at most"):
        poptorch.inferenceModel(one, poptorch.Options().splitAutomatically(8))(torch.ones(2, 3))
    with pytest.raises(Error, match="the use of 500 IPUs, however PopTorch must reserve a minimum of 512"):
        poptorch.inferenceModel(one, poptorch.Options().splitAutomatically(500))(torch.ones(2, 3))


@pytest.mark.thorough
def test_a_program_needs_no_other_call_for_its_ipus(tmp_path):
    """Splitting started JAX with one device, so that the IPUs could not be had any more."""
    code = """
import torch
from ipu_pipeline import poptorch
layers = [torch.nn.Linear(4, 4) for _number in range(3)]
executor = poptorch.inferenceModel(torch.nn.Sequential(*layers), poptorch.Options().splitAutomatically(2))
x = torch.ones(2, 4)
print(torch.allclose(executor(x), torch.nn.Sequential(*layers)(x), atol=1e-6))
"""
    assert start("-c", code, folder=tmp_path).stdout.strip() == "True"


@pytest.mark.thorough
def test_random_numbers_are_those_of_the_whole_model():
    found = []
    for num_ipus in (None, 2):
        options = make_options(accumulation=3).randomSeed(3).splitAutomatically(num_ipus)
        model = seeded(lambda: Model(dropout=0.3))
        executor = poptorch.trainingModel(model, options, make_sgd(model.parameters()))
        found.append(([leaves(executor(*make_batch(12, seed=call))) for call in range(2)], model))
    for own, whole in zip(found[1][0], found[0][0], strict=True):
        assert_close(own, whole)
    assert_same_state(found[1][1], found[0][1])


@pytest.mark.thorough
def test_inference_with_a_schedule():
    model = seeded(Model).eval()
    x = make_batch(12, 3)[0]
    options = make_options(4).splitAutomatically(2).setPipelineSchedule("interleaved")
    assert_close([poptorch.inferenceModel(model, options)(x)], [model(x)])


@pytest.mark.thorough
def test_replicas_and_a_schedule():
    options = make_options(accumulation=3).splitAutomatically(2).replicationFactor(2)
    options.setPipelineSchedule("zero_bubble")
    trained = TrainedAlike(seeded(lambda: Model(has_statistics=False)), options)
    trained.call(*make_batch(12))
    trained.compare()


class Small(torch.nn.Linear):
    """One layer."""

    def forward(self, x, target):
        return torch.nn.functional.mse_loss(super().forward(x), target)


class WithBlocks(Small):
    """The same with a block."""

    def forward(self, x, target):
        with poptorch.Block("all", ipu_id=0):
            return super().forward(x, target)


PHASES = poptorch.SerialPhasedExecution("a", "b")


@pytest.mark.parametrize(
    ("model", "option", "values", "message"),
    [
        (Small, "allowNewShapes", (True,), "does not go with poptorch.Options.allowNewShapes"),
        (Small, "checkIndices", (True,), "does not go with poptorch.Options.checkIndices"),
        (Small, "anchorTensor", ("a", "Gradient___weight"), "does not go with anchorTensor of a gradient"),
        (Small, "setExecutionStrategy", (PHASES,), "does not go with poptorch.SerialPhasedExecution"),
        (WithBlocks, "allowNewShapes", (False,), "is for a model without blocks, and the model has some"),
    ],
    ids=["shapes", "indices", "gradient", "phases", "blocks"],
)
def test_what_does_not_go_together(model, option, values, message):
    options = make_options(accumulation=3).splitAutomatically(2)
    getattr(options, option)(*values)
    model = seeded(lambda: model(3, 3))
    executor = poptorch.trainingModel(model, options, make_sgd(model.parameters()))
    with pytest.raises(Error, match=f"poptorch.Options.splitAutomatically.*{message}"):
        executor(*make_batch(12, 3))

"""`Options.splitAutomatically`: models without blocks, against plain torch and against the whole model."""

import logging

import pytest
import torch

import ipu_pipeline.poptorch as poptorch
from ipu_pipeline.poptorch.errors import Error
from tests.support.poptorch_front import (
    assert_close,
    assert_same_state,
    join,
    leaves,
    make_batch,
    make_options,
    make_sgd,
    reference,
    second,
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


def train(options, dropout=0.0):
    """Trains; returns the model, its executor, and the outputs of each of two calls."""
    model = seeded(lambda: Model(dropout))
    executor = poptorch.trainingModel(model, options, make_sgd(model.parameters()))
    return model, executor, [leaves(executor(*make_batch(12, 3, seed=call))) for call in range(2)]


@pytest.mark.parametrize(
    "num_ipus",
    [2, pytest.param(1, marks=pytest.mark.thorough), pytest.param(4, marks=pytest.mark.soak)],
)
def test_training_equals_plain_torch(num_ipus, caplog):
    caplog.set_level(logging.INFO, logger="poptorch::python")
    options = make_options(accumulation=3).splitAutomatically(num_ipus)
    options.anchorTensor("inner", "layers.1/linear")
    plain = reference(seeded(Model), make_sgd)
    model, executor, found = train(options)
    for call, own in enumerate(found):
        inner = plain.model.first(make_batch(12, 3, seed=call)[0]).tanh()
        inner = plain.model.layers[1](inner + torch.tanh(plain.model.layers[0](inner)))
        assert_close(own, join(plain.train(make_batch(12, 3, seed=call), 1, 3, second)))
    assert_close([executor.getAnchoredTensor("inner")], [inner])
    assert_same_state(model, plain.model)
    plural = "s" * (num_ipus > 1)
    summary = str(executor.summary())
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
        model, _executor, outputs = train(options, dropout=0.3)
        found.append((outputs, model))
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
    model = seeded(lambda: Model(has_statistics=False))
    plain = reference(model, make_sgd)
    executor = poptorch.trainingModel(model, options, make_sgd(model.parameters()))
    batch = make_batch(12, 3)
    assert_close(leaves(executor(*batch)), join(plain.train(batch, 1, 6, second)))
    assert_same_state(model, plain.model)


class Small(torch.nn.Linear):
    """One layer."""

    def forward(self, x, target):
        return torch.nn.functional.mse_loss(super().forward(x), target)


class WithBlocks(Small):
    """The same with a block."""

    def forward(self, x, target):
        with poptorch.Block("all", ipu_id=0):
            return super().forward(x, target)


@pytest.mark.parametrize(
    ("model", "change", "message"),
    [
        (Small, lambda o: o.allowNewShapes(True), "does not go with poptorch.Options.allowNewShapes"),
        (Small, lambda o: o.checkIndices(True), "does not go with poptorch.Options.checkIndices"),
        (
            Small,
            lambda o: o.anchorTensor("gradient", "Gradient___weight"),
            "does not go with anchorTensor of a gradient",
        ),
        (
            Small,
            lambda o: o.setExecutionStrategy(poptorch.SerialPhasedExecution("a", "b")),
            "does not go with poptorch.SerialPhasedExecution",
        ),
        (WithBlocks, lambda o: o, "is for a model without blocks, and the model has some"),
    ],
    ids=["shapes", "indices", "gradient", "phases", "blocks"],
)
def test_what_does_not_go_together(model, change, message):
    options = make_options(accumulation=3).splitAutomatically(2)
    change(options)
    model = seeded(lambda: model(3, 3))
    executor = poptorch.trainingModel(model, options, make_sgd(model.parameters()))
    with pytest.raises(Error, match=f"poptorch.Options.splitAutomatically.*{message}"):
        executor(*make_batch(12, 3))

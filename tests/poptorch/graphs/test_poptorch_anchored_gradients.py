"""`Options.anchorTensor` of gradients: those of each micro-batch's loss, equal to torch's."""

import pytest
import torch
from torch import nn

import ipu_pipeline.poptorch as poptorch
from ipu_pipeline.poptorch import OutputMode
from tests.support.poptorch_front import assert_close, make_options, seeded


class Tied(nn.Module):
    """A layer that both stages have."""

    def __init__(self):
        super().__init__()
        self.shared, self.last = nn.Linear(3, 3), nn.Linear(3, 2)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x, target):
        with poptorch.Block("first", ipu_id=0):
            x = torch.tanh(self.shared(x) * self.frozen)
        with poptorch.Block("second", ipu_id=1):
            x = self.last(torch.relu(poptorch.recomputationCheckpoint(self.shared(x))))
            return x, nn.functional.mse_loss(x, target)


def expect(model, x, target):
    """Of one micro-batch, by torch: the gradients of the shared weight and of the first stage's result."""
    model.zero_grad()
    hidden = torch.tanh(model.shared(x) * model.frozen)
    hidden.retain_grad()
    logits = model.last(torch.relu(model.shared(hidden)))
    nn.functional.mse_loss(logits, target).backward()
    return model.shared.weight.grad.clone(), hidden.grad


@pytest.mark.parametrize(
    ("num_replicas", "strategy", "scale"),
    [
        (1, poptorch.PipelinedExecution(poptorch.Stage("first", "second")), 1.0),
        pytest.param(2, poptorch.PipelinedExecution(), 128.0, marks=pytest.mark.thorough),
    ],
    ids=["one stage", "replicas"],
)
def test_gradients_are_torchs_of_each_micro_batch(num_replicas, strategy, scale):
    model, plain = seeded(Tied), seeded(Tied)
    options = make_options(2, 3, strategy, OutputMode.Final).replicationFactor(num_replicas)
    options.anchorTensor("all", "Gradient___shared.weight", OutputMode.All)
    options.anchorTensor("tanh", "tanh", OutputMode.All)
    options.anchorTensor("last", "Gradient___shared.weight")
    options.anchorTensor("sum", "Gradient___shared.weight", OutputMode.Sum)
    options.anchorTensor("second", "Gradient___tanh", OutputMode.EveryN, 2)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.0, loss_scaling=scale)
    training = poptorch.trainingModel(model, options, optimizer)
    for seed in range(2):  # of a call nothing is left for the next one
        generator = torch.Generator().manual_seed(seed)
        x, target = (torch.randn(24 * num_replicas, size, generator=generator) for size in (3, 2))
        training(x, target)
        parts = zip(*(value.chunk(6 * num_replicas) for value in (x, target)), strict=True)
        found = [expect(plain, *part) for part in parts]
        weights, hidden = (scale * torch.stack(values) for values in zip(*found, strict=True))
        wanted = {
            "all": weights.flatten(0, 1),
            "last": weights[-num_replicas:].flatten(0, 1),
            "sum": weights.reshape(6, num_replicas, 3, 3).sum(0).flatten(0, 1),
            "second": hidden.reshape(6, num_replicas, 4, 3)[1::2].flatten(0, 2),
            "tanh": torch.tanh(plain.shared(x) * plain.frozen),
        }
        assert_close([training.getAnchoredTensor(name) for name in wanted], wanted.values())
    names = {name for name in training.getTensorNames() if name.startswith("Gradient___")}
    assert {"Gradient___last.bias", "Gradient___last/linear", "Gradient___tanh"} <= names
    assert "Gradient___frozen" not in names
    assert training.options.anchored_tensors.keys() == {"all", "tanh", "last", "sum", "second"}


def test_gradients_that_there_are_not():
    options = make_options().anchorTensor("kept", "Gradient___shared.weight")
    inference = poptorch.inferenceModel(Tied(), options)
    message = "Gradient___shared.weight', which is not a value of the model"
    with pytest.raises(poptorch.Error, match=message):
        inference(torch.ones(2, 3), torch.ones(2, 2))

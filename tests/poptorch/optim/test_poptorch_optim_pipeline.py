"""The optimizers in a pipeline of two devices with gradient accumulation equal plain torch."""

import copy

import pytest
import torch

import ipu_pipeline.poptorch as poptorch
from ipu_pipeline.poptorch import optim
from tests.support.compilations import compiled_in
from tests.support.poptorch_front import TwoLayers, assert_same_state, make_batch, make_options, seeded

ACCUMULATION = 4


def groups_of(model):
    """Parameters of both stages are in both groups."""
    parameters = dict(model.named_parameters())
    weights = [parameter for name, parameter in parameters.items() if name.endswith("weight")]
    biases = [parameter for name, parameter in parameters.items() if name.endswith("bias")]
    return [{"params": weights}, {"params": biases, "lr": 0.02}]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("SGD", {"momentum": 0.9, "dampening": 0.1, "loss_scaling": 64.0, "max_grad_norm": 0.1}),
        pytest.param("LAMB", {"loss_scaling": 2.0}, marks=pytest.mark.thorough),
    ],
)
def test_equal_to_torch(name, arguments, caplog):
    """The learning rate and the scale change half-way, and all is compiled in the first step."""
    model = seeded(TwoLayers)
    model.first.bias.requires_grad_(False)
    plain = copy.deepcopy(model)
    max_norm = arguments.get("max_grad_norm")
    of_torch = optim.LAMB if name == "LAMB" else getattr(torch.optim, name)
    others = {n: v for n, v in arguments.items() if n not in ("loss_scaling", "max_grad_norm")}
    optimizer = getattr(optim, name)(groups_of(model), lr=0.01, **arguments)
    reference = of_torch(groups_of(plain), lr=0.01, **others)
    training = poptorch.trainingModel(model, make_options(1, ACCUMULATION), optimizer)
    inputs = make_batch(2 * ACCUMULATION)

    def step():
        training(*inputs)
        reference.zero_grad()
        for part in zip(*(tensor.chunk(ACCUMULATION) for tensor in inputs), strict=True):
            (plain(*part)[1] / ACCUMULATION).backward()
        if max_norm is not None:
            assert torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm) > max_norm
        reference.step()

    def run():
        step()
        optimizer.loss_scaling /= 2
        for changed in (optimizer, reference):
            changed.param_groups[0]["lr"] = 0.003
        training.setOptimizer(optimizer)
        for _step in range(2):
            step()

    assert compiled_in(step, caplog)
    assert compiled_in(run, caplog) == []
    assert_same_state(model, plain, 1e-6)

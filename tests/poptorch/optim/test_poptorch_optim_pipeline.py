"""The optimizers in a pipeline of two devices with gradient accumulation equal plain torch."""

import pytest
import torch

from ipu_pipeline.poptorch import optim
from ipu_pipeline.poptorch.errors import Error
from tests.support.compilations import compiled_in
from tests.support.poptorch_front import TrainedAlike, make_batch, make_model, make_options


def groups_of(parameters):
    """Parameters of both stages are in both groups."""
    parameters = list(parameters)
    weights, biases = ([p for p in parameters if p.ndim == ndim] for ndim in (2, 1))
    return [{"params": weights}, {"params": biases, "lr": 0.02}]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("SGD", {"momentum": 0.9, "dampening": 0.1, "loss_scaling": 64.0, "max_grad_norm": 0.1}),
        pytest.param("LAMB", {"loss_scaling": 2.0}, marks=pytest.mark.thorough),
    ],
)
def test_equal_to_torch(name, arguments, caplog):
    """The learning rate and the scale change half-way, and all is compiled in the first step.

    What is constant since then cannot change.
    """
    model = make_model()
    model.first.bias.requires_grad_(False)
    optimizer = getattr(optim, name)(groups_of(model.parameters()), lr=0.01, **arguments)
    max_norm = arguments.get("max_grad_norm")
    of_torch = optim.LAMB if name == "LAMB" else getattr(torch.optim, name)
    others = {n: v for n, v in arguments.items() if n not in ("loss_scaling", "max_grad_norm")}
    trained = TrainedAlike(
        model,
        make_options(1, 4),
        lambda _parameters: optimizer,
        lambda parameters: of_torch(groups_of(parameters), lr=0.01, **others),
    )
    reference, plain = trained.plain.optimizer, trained.plain.model

    def clip(*_step):
        assert torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm) > max_norm

    if max_norm is not None:
        reference.register_step_pre_hook(clip)

    def step():
        trained.call(*make_batch(8))

    def run():
        step()
        optimizer.loss_scaling /= 2
        for changed in (optimizer, reference):
            changed.param_groups[0]["lr"] = 0.003
        trained.executor.setOptimizer(optimizer)
        for _step in range(2):
            step()

    assert compiled_in(step, caplog)
    assert compiled_in(run, caplog) == []
    trained.compare(1e-6)
    decaying = getattr(optim, name)(groups_of(model.parameters()), lr=0.01, weight_decay=0.5, **arguments)
    with pytest.raises(Error, match="weight_decay of group 0 is constant since the model was compiled"):
        trained.executor.setOptimizer(decaying)

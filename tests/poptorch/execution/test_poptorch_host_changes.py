"""Changes on the host between calls, which the devices do not get by themselves."""

import jax
import numpy as np
import pytest
import torch

import ipu_pipeline.poptorch as poptorch
from ipu_pipeline.poptorch import logs
from ipu_pipeline.poptorch.execution.host_weights import HostChanges, OptimizerChanges
from tests.support.poptorch_front import assert_close, make_options, seeded

WEIGHTS = "call copyWeightsToDevice()"
OPTIMIZER, BUFFER = "call setOptimizer(optimizer)", "register_buffer"

x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


class Model(torch.nn.Module):
    """Has weights, statistics, and what is compiled in."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.norm = torch.nn.BatchNorm1d(3)
        self.scale = 2.0
        self.shift = torch.ones(3)

    def forward(self, x):
        y = self.norm(self.linear(x)) * self.scale + self.shift
        return y, torch.nn.functional.mse_loss(y, x)


class Wrapped:
    """A model that trains, and the same for inference; each was called once."""

    def __init__(self):
        self.model = seeded(Model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.training = poptorch.trainingModel(self.model, make_options(), self.optimizer)
        self.model.eval()
        self.inference = poptorch.inferenceModel(self.model, make_options())
        self.model.train()
        self.call()

    def call(self):
        self.training(x)
        self.inference(x)


@pytest.fixture(scope="module")
def shared():
    return Wrapped()


@pytest.fixture
def wrapped(shared):
    """With all that was changed before on the devices, and nothing said."""
    for executor in (shared.training, shared.inference):
        executor._compiled._changes = HostChanges(shared.model)
    shared.training._training._changes = OptimizerChanges(shared.optimizer)
    shared.training.copyWeightsToDevice()
    shared.call()
    logs._said.clear()
    return shared


def look(wrapped):
    wrapped.model.state_dict()
    wrapped.model.linear.weight.data.sum()
    wrapped.optimizer.zero_grad()
    wrapped.model.eval()
    wrapped.model.train()


def move(wrapped):
    wrapped.training.detachFromDevice()
    wrapped.training.attachToDevice()


def fill(wrapped):
    with torch.no_grad():
        wrapped.model.linear.bias.fill_(0.5)


def change_rate(wrapped):
    wrapped.optimizer.param_groups[0]["lr"] *= 0.5


def load_weights(wrapped):
    wrapped.model.load_state_dict(wrapped.model.state_dict())


def load_state(wrapped):
    wrapped.optimizer.load_state_dict(wrapped.optimizer.state_dict())


def test_what_the_library_writes_is_no_change(wrapped, caplog):
    """Nor is what is only looked at; nor what was put on the devices."""
    for change in (
        look,
        move,
        lambda w: w.training.copyWeightsToHost(),
        lambda w: w.inference.copyWeightsToHost(),
        lambda w: w.training.load_state_dict(w.model.state_dict()),
        lambda w: (fill(w), w.training.copyWeightsToDevice()),
        lambda w: (change_rate(w), w.training.setOptimizer(w.optimizer)),
    ):
        for _twice in range(2):
            change(wrapped)
            wrapped.call()
            assert not caplog.messages


@pytest.mark.parametrize(
    ("change", "message", "mend"),
    [
        (load_weights, "linear.weight, linear.bias, norm", WEIGHTS),
        (fill, "linear.bias of the model changed on the host", WEIGHTS),
        (lambda w: w.model.linear.weight.data.mul_(2), "linear.weight of the model changed", WEIGHTS),
        (lambda w: w.model(x), "norm.num_batches_tracked of the model changed", WEIGHTS),
        (change_rate, "lr of group 0 of the optimizer changed", OPTIMIZER),
        (load_state, "The optimizer has loaded a state", "Call destroy()"),
        (lambda w: setattr(w.model, "scale", 3.0), "scale of the model changed since it was", BUFFER),
        (lambda w: w.model.shift.add_(1), "shift of the model changed since it was", BUFFER),
    ],
    ids=["load_state_dict", "fill_", "data", "a run", "lr", "state", "number", "tensor"],
)
def test_changes_are_told_once(wrapped, caplog, change, message, mend):
    for _twice in range(2):
        change(wrapped)
        wrapped.training(x)
    (told,) = caplog.messages
    assert message in told
    assert mend in told


def test_an_inference_model_tells_too(wrapped, caplog):
    """Until the one that trains has run, whose weights it then gets."""
    fill(wrapped)
    wrapped.inference(x)
    (told,) = caplog.messages
    assert "linear.bias of the model changed on the host" in told


def test_clipping_without_gradients_is_told(wrapped, caplog):
    assert torch.nn.utils.clip_grad_norm_(wrapped.model.parameters(), 1.0) == 0
    (told,) = caplog.messages
    assert "poptorch.optim.SGD(..., max_grad_norm=1.0)" in told
    caplog.clear()
    logs._said.clear()
    wrapped.model(x)[1].backward()  # on the host
    assert torch.nn.utils.clip_grad_norm_(wrapped.model.parameters(), 1.0) > 0
    assert not caplog.messages
    wrapped.model.zero_grad()


def test_the_mends_help(wrapped):
    """What they put on the devices is what the model trains on with."""
    fill(wrapped)
    wrapped.training.copyWeightsToDevice()
    wrapped.optimizer.param_groups[0]["lr"] = 0.0
    wrapped.training.setOptimizer(wrapped.optimizer)
    wrapped.training(x)
    assert_close([wrapped.model.linear.bias.detach()], [torch.full((3,), 0.5)])
    wrapped.optimizer.param_groups[0]["lr"] = 0.1


@pytest.mark.skipif(jax.config.jax_enable_x64, reason="they fit")
def test_integers_that_do_not_fit_are_refused_before_compiling():
    wrapped = poptorch.inferenceModel(torch.nn.Identity(), make_options())
    message = "Input input has integers from 1 to 1099511627776, which do not fit"
    with pytest.raises(ValueError, match=message):
        wrapped(torch.from_numpy(np.array([1, 2**40])))
    assert not wrapped.isCompiled()

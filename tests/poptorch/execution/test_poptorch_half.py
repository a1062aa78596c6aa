"""Half precision: layers and inputs of different widths, torch.autocast, automatic loss scaling."""

import contextlib
import copy
import functools

import pytest
import torch
from torch import nn

import ipu_pipeline.poptorch as poptorch
from ipu_pipeline.poptorch import logs
from tests.support.poptorch_front import (
    TrainedAlike,
    assert_close,
    infer,
    leaves,
    make_options,
    make_sgd,
    model_of,
    reference,
    relative_difference,
    second,
    seeded,
)


class Layers(nn.Module):
    """Layers beside each other, whose results are returned."""

    def __init__(self, has_encoder):
        super().__init__()
        self.layers = nn.ModuleList([nn.LayerNorm(8), nn.RMSNorm(8), nn.BatchNorm1d(8), nn.PReLU(8)])
        self.layers += [nn.LSTMCell(8, 5), nn.GRUCell(8, 5), nn.RNNCell(8, 5)]
        self.layers += [nn.RNNCell(8, 5, nonlinearity="relu"), nn.Linear(8, 4), nn.Linear(8, 4, bias=False)]
        self.images = nn.ModuleList([nn.GroupNorm(2, 4), nn.InstanceNorm1d(4, affine=True)])
        self.images.append(nn.Conv1d(4, 3, 2))
        if has_encoder:
            self.layers.append(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True))
            self.images += [nn.GRU(2, 3), nn.LSTM(2, 3, bidirectional=True)]
        self.transposed = nn.ConvTranspose2d(2, 3, 2)
        self.bilinear = nn.Bilinear(8, 8, 3)

    def forward(self, x):
        made = [layer(x) for layer in self.layers]
        made += [layer(x.reshape(-1, 4, 2)) for layer in self.images]
        return *made, self.transposed(x.reshape(-1, 2, 2, 2)), self.bilinear(x, x)


@pytest.mark.parametrize(
    ("dtype", "is_narrow"),
    [(torch.float16, False), pytest.param(torch.bfloat16, True, marks=pytest.mark.thorough)],
    ids=["float16 input", "bfloat16 layers"],
)
def test_layers_and_inputs_of_different_widths(dtype, is_narrow):
    """Compared with float32, for numbers as exact as narrow ones. Layers keep their input's dtype."""
    model = seeded(lambda: Layers(has_encoder=is_narrow)).to(dtype).float()
    x = torch.linspace(-2, 2, 32).reshape(4, 8).sin().to(dtype).float()
    expected = leaves(copy.deepcopy(model)(x))
    found = leaves(infer(model.to(dtype), x) if is_narrow else infer(model, x.to(dtype)))
    assert {value.dtype for value in found} == {torch.float32 if is_narrow else dtype}
    differences = [relative_difference(a.float(), b) for a, b in zip(found, expected, strict=True)]
    assert max(differences) < (1e-5 if is_narrow else 2e-3)  # how exact few operations of float16 are


def test_inputs_of_float64_into_layers_of_float32(nothing_said):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Conv1d(4, 3, 2), nn.GRU(2, 3), nn.PReLU(4), nn.BatchNorm1d(4)])

        def forward(self, x, scale):
            return [layer(x * scale) for layer in self.layers]

    model = seeded(Mixed)
    plain = copy.deepcopy(model)
    x, scale = torch.linspace(-2, 2, 32).reshape(4, 4, 2).sin(), torch.full((4, 1, 1), 0.5)
    executor = poptorch.inferenceModel(model, make_options())
    assert_close(leaves(executor(x, scale.double())), [made.double() for made in leaves(plain(x, scale))])
    executor.copyWeightsToHost()
    assert_close(model.buffers(), plain.buffers())


def test_narrow_statistics_of_batches_in_float32():
    model = seeded(lambda: nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4, momentum=0.5))).half()
    plain = copy.deepcopy(model).float()
    x = torch.linspace(-2, 2, 64).reshape(8, 8).sin()
    found = poptorch.inferenceModel(model, make_options())
    assert_close([found(x)], [plain(x).detach()])
    found.copyWeightsToHost()
    assert model[1].running_var.dtype is torch.float16
    assert model[1].num_batches_tracked == 1
    for name in ("running_mean", "running_var"):
        assert relative_difference(getattr(model[1], name).float(), getattr(plain[1], name)) < 1e-3


def test_operations_promote_as_in_torch():
    def forward(self, half, full):
        return half + full, half * 2, torch.cat([half, full]), half.sum(), half + 1.5

    half, full = torch.ones(3).half() / 3, torch.ones(3) / 3
    found = infer(model_of(forward), half, full)
    expected = forward(None, half, full)
    assert_close(found, expected, 1e-3)
    assert found[0].dtype is torch.float32


class Network(nn.Module):
    """Two stages within a region."""

    def __init__(self, region=contextlib.nullcontext):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        self.region = region

    def forward(self, x, target):
        with self.region():
            with poptorch.Block(ipu_id=0):
                x = torch.tanh(self.first(x))
            with poptorch.Block(ipu_id=1):
                x = self.second(x)
                return x, nn.functional.mse_loss(x, target)


def make_data(rows=8):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, 8, generator=generator), torch.randn(rows, 4, generator=generator)


REGIONS = {
    "bfloat16": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "off": lambda: torch.autocast("cpu", enabled=False),
}


@pytest.mark.parametrize("name", ["bfloat16", pytest.param("off", marks=pytest.mark.thorough)])
def test_blocks_and_losses_within_autocast(name):
    """As torch's on a CPU: casts are the same, sums are taken in another order."""
    tolerance = 1e-5 if name == "off" else 2e-2
    make = functools.partial(torch.optim.SGD, lr=0.5)
    trained = TrainedAlike(seeded(lambda: Network(REGIONS[name])), make_options(1, 2), make)
    for _call in range(2):
        _output, loss = trained.call(*make_data(), tolerance=tolerance)
        assert loss.dtype == torch.float32
    assert {value.dtype for value in trained.model.parameters()} == {torch.float32}
    trained.compare(tolerance / 2 if name == "bfloat16" else tolerance)
    assert "2 stages on 2 IPUs" in str(trained.executor.summary())


def test_autocast_for_other_devices(caplog, monkeypatch):
    """What a program for a GPU says, counts here, as does PopTorch's. One for no device is told."""
    monkeypatch.setattr(logs, "_said", set())
    with pytest.warns(UserWarning, match="CUDA is not available"):
        outside = torch.autocast("cuda", dtype=torch.float16)

    class Model(nn.Linear):
        def forward(self, x):
            with torch.autocast("ipu"):
                first = super().forward(x)
            with torch.amp.autocast("cuda", dtype=torch.bfloat16):
                second = super().forward(x)
            with outside:
                return first, second, super().forward(x)

    found = infer(Model(8, 4), make_data()[0])
    assert [value.dtype for value in found] == [torch.float16, torch.bfloat16, torch.float32]
    (told,) = [message for message in caplog.messages if "has no effect" in message]
    assert "torch.autocast('cuda') has no effect on the model if it was made outside" in told
    with torch.autocast("cpu", dtype=torch.float16):
        assert torch.autocast("cpu").device == "cpu"


def test_autocast_around_the_first_call():
    x = make_data()[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        executor = poptorch.inferenceModel(nn.Linear(8, 4), make_options())
        assert executor(x).dtype is torch.bfloat16
    assert executor(x).dtype is torch.bfloat16  # it was compiled so


# Automatic loss scaling.


def scale_of(optimizer):
    return optimizer.state_dict()["ipu_state"]["loss_scale"].item()


def test_a_scale_that_is_too_large_is_halved():
    """Until gradients fit float16 no update is taken; then they are those of torch in float32."""
    options = make_options(1, 2).replicationFactor(2)
    options.Training.setAutomaticLossScaling(True)
    model = seeded(Network).half()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, loss_scaling=2.0**20)
    executor = poptorch.trainingModel(model, options, optimizer)
    plain = reference(copy.deepcopy(model).float(), make_sgd)
    before = [value.clone() for value in model.parameters()]
    data = make_data(16)
    num_skipped = 0
    while True:
        executor(*(value.half() for value in data))
        if any((new != old).any() for new, old in zip(model.parameters(), before, strict=True)):
            break
        num_skipped += 1
        assert scale_of(optimizer) == 2.0 ** (20 - num_skipped)
    assert 2 <= num_skipped <= 10
    assert scale_of(optimizer) == 2.0 ** (20 - num_skipped)
    executor(*(value.half() for value in data))
    for _call in range(2):
        plain.train(data, 1, 4, second)
    assert all(value.dtype is torch.float16 for value in model.parameters())
    assert_close([value.float() for value in model.parameters()], plain.model.parameters(), 2e-3)


def test_small_gradients_survive():
    """They are 2**-26, which is zero in float16, unless the loss is scaled: also with replicas."""

    def forward(self, x):
        return poptorch.identity_loss(self.weight * x * x, "sum")

    model = model_of(forward, linear=None, weight=nn.Parameter(torch.zeros(()).half()))
    options = make_options().replicationFactor(2)
    options.Training.setAutomaticLossScaling(True)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=2.0**10, loss_scaling=2.0**12)
    executor = poptorch.trainingModel(model, options, optimizer)
    executor(torch.full((2,), 2.0**-13).half())
    assert model.weight.item() == -(2.0**-16)

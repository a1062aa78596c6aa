"""Half precision: layers and inputs of different widths, torch.autocast, automatic loss scaling."""

import copy

import pytest
import torch
from torch import nn

import ipu_pipeline.poptorch as poptorch
from ipu_pipeline.poptorch import logs
from tests.support.poptorch_front import assert_close, leaves, make_options, relative_difference, seeded


class Layers(nn.Module):
    """Layers beside each other, whose results are returned."""

    def __init__(self, has_encoder):
        super().__init__()
        self.layers = nn.ModuleList(
            [
                nn.LayerNorm(8),
                nn.RMSNorm(8),
                nn.BatchNorm1d(8),
                nn.PReLU(8),
                nn.LSTMCell(8, 5),
                nn.GRUCell(8, 5),
                nn.RNNCell(8, 5),
                nn.RNNCell(8, 5, nonlinearity="relu"),
            ]
        )
        self.layers += [nn.Linear(8, 4), nn.Linear(8, 4, bias=False)]
        self.images = nn.ModuleList(
            [nn.GroupNorm(2, 4), nn.InstanceNorm1d(4, affine=True), nn.Conv1d(4, 3, 2)]
        )
        if has_encoder:
            self.layers.append(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True))
            self.images += [nn.GRU(2, 3), nn.LSTM(2, 3, bidirectional=True)]
        self.transposed = nn.ConvTranspose2d(2, 3, 2)
        self.bilinear = nn.Bilinear(8, 8, 3)

    def forward(self, x):
        image = x.reshape(-1, 4, 2)
        return (
            *[layer(x) for layer in self.layers],
            *[layer(image) for layer in self.images],
            self.transposed(x.reshape(-1, 2, 2, 2)),
            self.bilinear(x, x),
        )


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
    if is_narrow:
        found = leaves(poptorch.inferenceModel(model.to(dtype), make_options())(x))
    else:
        found = leaves(poptorch.inferenceModel(model, make_options())(x.to(dtype)))
    assert {value.dtype for value in found} == {torch.float32 if is_narrow else dtype}
    differences = [relative_difference(a.float(), b) for a, b in zip(found, expected, strict=True)]
    assert max(differences) < (1e-5 if is_narrow else 2e-3)  # how exact few operations of float16 are


def test_narrow_statistics_of_batches_in_float32():
    model = seeded(lambda: nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4, momentum=0.5))).half()
    plain = copy.deepcopy(model).float()
    x = torch.linspace(-2, 2, 64).reshape(8, 8).sin()
    found = poptorch.inferenceModel(model, make_options())
    assert_close([found(x)], [plain(x).detach()])
    found.copyWeightsToHost()
    assert model[1].running_var.dtype is torch.float16
    found, wanted = model[1], plain[1]
    assert found.num_batches_tracked == 1
    pairs = [(found.running_mean, wanted.running_mean), (found.running_var, wanted.running_var)]
    assert max(relative_difference(one.float(), other) for one, other in pairs) < 1e-3


def test_operations_promote_as_in_torch():
    class Model(nn.Module):
        def forward(self, half, full):
            return half + full, half * 2, torch.cat([half, full]), half.sum(), half + 1.5

    half, full = torch.ones(3).half() / 3, torch.ones(3) / 3
    found = poptorch.inferenceModel(Model(), make_options())(half, full)
    expected = Model()(half, full)
    assert_close(found, [value.reshape(1) if not value.dim() else value for value in expected], 1e-3)
    assert found[0].dtype is torch.float32


class Network(nn.Module):
    """Two stages; where autocast is, is said."""

    def __init__(self, region=None):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        self.region = region

    def compute(self, x, target):
        with poptorch.Block(ipu_id=0):
            x = torch.tanh(self.first(x))
        with poptorch.Block(ipu_id=1):
            x = self.second(x)
            return x, nn.functional.mse_loss(x, target)

    def forward(self, x, target):
        if self.region is None:
            return self.compute(x, target)
        with self.region():
            return self.compute(x, target)


def make_data(rows=8):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, 8, generator=generator), torch.randn(rows, 4, generator=generator)


def train_plain(model, data, optimizer, number):
    for part in zip(*(value.chunk(number) for value in data), strict=True):
        (model(*part)[1] / number).backward()
    optimizer.step()
    optimizer.zero_grad()


REGIONS = {
    "bfloat16": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "off": lambda: torch.autocast("cpu", enabled=False),
}


@pytest.mark.parametrize("name", ["bfloat16", pytest.param("off", marks=pytest.mark.thorough)])
def test_blocks_and_losses_within_autocast(name):
    """As torch's on a CPU: casts are the same, sums are taken in another order."""
    model = seeded(lambda: Network(REGIONS[name]))
    plain = copy.deepcopy(model)
    executor = poptorch.trainingModel(
        model, make_options(1, 2), torch.optim.SGD(model.parameters(), lr=0.5)
    )
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    tolerance = 1e-5 if name == "off" else 2e-2
    for _call in range(2):
        output, loss = executor(*make_data())
        with torch.no_grad():
            expected = [plain(*part) for part in zip(*(v.chunk(2) for v in make_data()), strict=True)]
        wanted = torch.cat([one[0] for one in expected])
        assert output.dtype == wanted.dtype
        assert loss.dtype == torch.float32
        assert_close(
            [output.float(), loss], [wanted.float(), torch.stack([one[1] for one in expected])], tolerance
        )
        train_plain(plain, make_data(), optimizer, 2)
    assert {value.dtype for value in model.parameters()} == {torch.float32}
    assert_close(model.parameters(), plain.parameters(), tolerance / 2 if name == "bfloat16" else tolerance)
    assert "2 stages on 2 IPUs" in str(executor.summary())


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

    found = poptorch.inferenceModel(Model(8, 4), make_options())(make_data()[0])
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


def make_scaled(scale):
    options = make_options(1, 2).replicationFactor(2)
    options.Training.setAutomaticLossScaling(True)
    model = seeded(Network).half()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, loss_scaling=scale)
    return model, optimizer, poptorch.trainingModel(model, options, optimizer)


def scale_of(optimizer):
    return optimizer.state_dict()["ipu_state"]["loss_scale"].item()


def test_a_scale_that_is_too_large_is_halved():
    """Until gradients fit float16 no update is taken; then they are those of torch in float32."""
    model, optimizer, executor = make_scaled(2.0**20)
    plain = copy.deepcopy(model).float()
    torchs = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
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
        train_plain(plain, data, torchs, 4)
    assert all(value.dtype is torch.float16 for value in model.parameters())
    assert_close([value.float() for value in model.parameters()], plain.parameters(), 2e-3)


def test_small_gradients_survive():
    """They are 2**-26, which is zero in float16, unless the loss is scaled: also with replicas."""

    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(()).half())

        def forward(self, x):
            return poptorch.identity_loss(self.weight * x * x, "sum")

    model = Small()
    options = make_options().replicationFactor(2)
    options.Training.setAutomaticLossScaling(True)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=2.0**10, loss_scaling=2.0**12)
    executor = poptorch.trainingModel(model, options, optimizer)
    executor(torch.full((2,), 2.0**-13).half())
    assert model.weight.item() == -(2.0**-16)

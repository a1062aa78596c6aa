"""Recurrent layers of packed sequences beside plain torch, in training, and what is refused."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence

import ipu_pipeline.poptorch as poptorch
from ipu_pipeline.poptorch import logs
from tests.support.poptorch_front import TrainedAlike, assert_close, infer, make_options, model_of, seeded


class Reader(nn.Module):
    """Reads sequences of three features; returns outputs, lengths, states and a loss."""

    def __init__(self, kind=nn.LSTM, padding_value=0.0, total_length=6, is_sorted=False, **settings):
        super().__init__()
        self.layer = kind(3, 5, **{"batch_first": True, **settings})
        self.head = nn.Linear(3 * (self.layer.proj_size or 5) if kind is nn.LSTM else 15, 2)
        self.padding_value, self.total_length, self.is_sorted = padding_value, total_length, is_sorted

    def forward(self, x, lengths, target=None):
        first = self.layer.batch_first
        with poptorch.Block("read", ipu_id=0):
            x = x if first else x.transpose(0, 1)
            packed = pack_padded_sequence(x, lengths.cpu(), first, self.is_sorted)
            packed, state = self.layer(packed)
            made, lengths = pad_packed_sequence(packed, first, self.padding_value, self.total_length)
            made = made if first else made.transpose(0, 1)
            state = (state[0] if isinstance(state, tuple) else state).transpose(0, 1)
        with poptorch.Block("judge", ipu_id=1):
            features = [made.sum(1), state.flatten(1), made[:, 0]]
            x = self.head(torch.cat(features, 1)[:, : self.head.in_features])
            if target is None:
                return made, lengths, state, x
            return made, lengths, state, x, functional.mse_loss(x, target)


def draw(seed=0, is_sorted=False):
    """Sequences, their lengths and targets, for two micro-batches of three."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([6, 4, 1] * 2 if is_sorted else [2, 6, 1, 5, 3, 6])
    x = torch.randn(6, 6, 3, generator=generator)
    return x, lengths, torch.randn(6, 2, generator=generator)


MORE_SETTINGS = (
    {"bidirectional": True, "num_layers": 2, "batch_first": False, "padding_value": -3.0},
    {"proj_size": 2, "bias": False, "total_length": 8},
    {"kind": nn.RNN, "is_sorted": True, "nonlinearity": "relu"},
)


@pytest.mark.parametrize(
    "settings",
    [
        {"kind": nn.GRU, "bidirectional": True},
        *(pytest.param(settings, marks=pytest.mark.thorough) for settings in MORE_SETTINGS),
    ],
    ids=str,
)
def test_packed_sequences_train_as_in_torch(settings):
    trained = TrainedAlike(seeded(lambda: Reader(**settings)), make_options(1, 2))
    for seed in range(2):
        trained.call(*draw(seed, settings.get("is_sorted", False)))
    trained.executor.copyWeightsToHost()
    trained.compare()


@pytest.mark.thorough
def test_exported_and_on_the_host(tmp_path):
    model = seeded(lambda: Reader(nn.GRU))
    x, lengths, _target = draw()
    poptorch.inferenceModel(model, make_options()).compileAndExport(tmp_path / "reader", x, lengths)
    loaded = poptorch.load(tmp_path / "reader")
    lengths = lengths.flip(0)
    expected = model(x, lengths)
    assert_close(loaded(x, lengths), expected)
    assert_close(loaded.model(x, lengths), expected)


@pytest.mark.thorough
def test_the_padding_may_be_anything():
    model = seeded(Reader)
    x, lengths, target = draw()
    x[torch.arange(6) >= lengths[:, None]] = torch.nan
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    executor = poptorch.trainingModel(model, make_options(1, 2), optimizer)
    executor(x, lengths, target)
    executor.copyWeightsToHost()
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def calling(function):
    """A model that calls a function with a recurrent layer, sequences and their lengths."""
    torch.manual_seed(0)
    return model_of(lambda self, *given: function(self.layer, *given), layer=nn.RNN(3, 5, batch_first=True))


def packed(x, lengths):
    return pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)


def test_an_initial_state_and_the_length_of_the_result(monkeypatch, caplog):
    monkeypatch.setattr(logs, "_said", set())

    def run(layer, x, lengths):
        made, last = layer(packed(x, lengths), torch.linspace(-1, 1, 30).reshape(1, 6, 5))
        few, _last = layer(pack_sequence([x[0, :2], x[1, :4]], enforce_sorted=False))
        return last, *(pad_packed_sequence(one, batch_first=True)[0] for one in (made, few))

    model = calling(run)
    x, lengths, _target = draw()
    assert_close(infer(model, x, lengths), model(x, lengths))
    assert "returns all 6 steps that were packed, whatever the lengths" in caplog.text


@pytest.mark.thorough
def test_packed_sequences_are_closed():
    x, lengths, _target = draw()
    for function in (
        lambda layer, x, lengths: torch.relu(packed(x, lengths).data),
        lambda layer, x, lengths: packed(x, lengths).batch_sizes[1],
        lambda layer, x, lengths: layer(packed(x, lengths))[0].data.shape[0] * x,
        lambda layer, x, lengths: functional.mse_loss(packed(x, lengths)[0], packed(x, lengths)[0]),
    ):
        with pytest.raises(poptorch.Error, match="looks into a packed sequence, whose shape depends"):
            infer(calling(function), x, lengths)

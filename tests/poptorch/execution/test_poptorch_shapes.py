"""`Options.allowNewShapes`: one model, a program for each shape, one state."""

import concurrent.futures
import functools
import gc
import logging

import jax
import pytest
import torch

import ipu_pipeline.poptorch as poptorch
from ipu_pipeline import engine
from ipu_pipeline.poptorch.execution import compilation
from tests.support.poptorch_front import (
    TrainedAlike,
    TwoLayers,
    assert_close,
    join,
    leaves,
    make_batch,
    make_options,
    make_sgd,
    second,
    seeded,
)


class Model(TwoLayers):
    """Statistics of batches and a factor; forward refuses micro-batches of 5 rows."""

    def __init__(self, ipus=(0, 1)):
        super().__init__(ipus=ipus)
        self.norm = torch.nn.BatchNorm1d(3)

    def forward(self, x, target=None, scale=1):
        if len(x) == 5:
            raise ValueError("five rows")
        return super().forward(self.norm(x) * scale, target)


class Trained(TrainedAlike):
    """Is called with batches by their sizes."""

    def __init__(self, options, ipus=(0, 1)):
        super().__init__(seeded(lambda: Model(ipus)), options)

    def call(self, *sizes):
        for number, size in enumerate(sizes):
            super().call(*make_batch(size, seed=number))


def test_shapes_in_turn_train_as_in_torch(monkeypatch, caplog):
    capture, captured = compilation.capture, []
    monkeypatch.setattr(compilation, "capture", lambda *args: captured.append(args) or capture(*args))
    caplog.set_level(logging.INFO, "poptorch::python")
    trained = Trained(make_options(2, 2).allowNewShapes(True, max_shapes=2))
    executor = trained.executor
    trained.call(32, 16, 32, 16)
    told = [record.getMessage() for record in caplog.records if "Compiled" in record.getMessage()]
    assert [text.partition(" in 0:")[0] for text in told] == [
        "Compiled for x [32, 3], target [32, 3] (1 of at most 2 shapes)",
        "Compiled for x [16, 3], target [16, 3] (2 of at most 2 shapes)",
    ]
    assert executor.rng_state[-1] == 8  # weight updates, of all shapes
    executor.setOptimizer(torch.optim.SGD(trained.model.parameters(), lr=0.03, momentum=0.9))
    trained.plain.optimizer.param_groups[0]["lr"] = 0.03
    trained.call(32, 16)
    trained.compare()  # which brings the weights to the host
    with torch.no_grad():
        for model in (trained.model, trained.plain.model):
            model.first.weight.mul_(0.5)
            model.norm.running_mean.add_(1)
    executor.copyWeightsToDevice()
    trained.call(32, 16)
    executor.detachFromDevice()
    trained.call(16, 32)
    trained.compare()
    assert len(captured) == 2
    x, target = make_batch(24)
    wrong, others = poptorch.Error, "allows other shapes of tensors, but"
    limit = r"for 2 shapes, which is the limit of .*max_shapes=2\), .*x \[24, 3\]"
    rows = r"batch dimension \(10\) must .* = 4 .* 8 rows would fit, or 12"
    for given, error, message in [
        ((x, target), wrong, limit),
        ((x[:10], target[:10]), AssertionError, rows),
        ((x[:3], target[:3]), AssertionError, r"\(3\) must be a multiple of .* 4 rows would fit"),
        ((x.double()[:16], target[:16]), wrong, f"Data type mismatch .*{others}"),
        ((x[:16], target[:16], 2), wrong, f"arguments mismatch: .*{others} no"),
    ]:
        with pytest.raises(error, match=message):
            executor(*given)
    executor.destroy()
    assert len(captured) == 2
    trained.compare()


def test_without_it_the_error_says_so():
    model = poptorch.inferenceModel(torch.nn.Linear(3, 2), make_options())
    model(torch.ones(4, 3))
    with pytest.raises(poptorch.Error, match=r"Shape mismatch for input: .*Options.allowNewShapes\(True\)"):
        model(torch.ones(2, 3))


def test_what_fails_leaves_the_other_shapes(monkeypatch):
    """Forward raises, or capturing, tracing or compiling is interrupted."""
    trained = Trained(make_options().allowNewShapes(), ipus=(0, 0))
    executor = trained.executor
    trained.call(4)
    held = measure()
    with pytest.raises(ValueError, match="five rows"):
        executor(*make_batch(5))

    def interrupt(*_args, **_kwargs):
        raise KeyboardInterrupt

    for place, name in ((compilation, "capture"), (engine.Pipeline, "trace"), (engine.Pipeline, "compile")):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(place, name, interrupt)
            executor(*make_batch(6))
    trained.call(4, 6, 4)
    assert measure() == held  # the state is there once
    trained.compare()


def measure():
    """The bytes of all arrays on the devices but counts and keys."""
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays() if array.size > 2)


def test_two_threads_with_different_shapes():
    model = seeded(lambda: torch.nn.Linear(3, 2))
    executor = poptorch.inferenceModel(model, make_options().allowNewShapes())

    def run(size):
        x = torch.full((size, 3), float(size))
        for _call in range(3):
            assert_close([executor(x)], [model(x)])

    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        list(threads.map(run, (2, 3)))


class Sequence(torch.nn.Module):
    """Positions and a mask, of which long sequences alone need the second; four stages of any strategy."""

    def __init__(self):
        super().__init__()
        self.positions = torch.nn.Embedding(6, 3)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(3, 3) for _layer in range(2)])
        self.register_buffer("faded", torch.linspace(1, 0.5, 6))

    def forward(self, x, target=None):
        length = x.shape[1]
        for number, layer in enumerate(self.layers):
            with poptorch.Block(f"layer{number}", ipu_id=number):
                if number == 0:
                    x = x + self.positions.weight[:length]
                x = torch.tanh(layer(x))
                if number == 1:
                    x = x if length < 3 else x * self.faded[:length, None]
        return x if target is None else (x, torch.nn.functional.mse_loss(x, target))


def make_phased():
    strategy = poptorch.SerialPhasedExecution("layer0", "layer1")
    strategy.setTensorsLiveness(poptorch.Liveness.OffChipAfterFwd)
    return make_options(accumulation=2, strategy=strategy)


def make_offloaded():
    options, away = make_options(2, 2), poptorch.TensorLocationSettings().useOnChipStorage(False)
    options.TensorLocations.setWeightLocation(away).setOptimizerLocation(away).setAccumulatorLocation(away)
    return options


VARIANTS = {"phases": make_phased, "offloaded": make_offloaded}


@pytest.mark.thorough
@pytest.mark.parametrize("name", VARIANTS)
def test_sequences_in_turn(name):
    """The state is the same wherever it lies. A buffer that only long sequences read comes and goes."""
    make_adam = functools.partial(poptorch.optim.Adam, lr=0.01, loss_scaling=4.0)
    make_plain = functools.partial(torch.optim.Adam, lr=0.01)
    trained = TrainedAlike(seeded(Sequence), VARIANTS[name]().allowNewShapes(), make_adam, make_plain)
    for number, length in enumerate((2, 4, 2, 4)):
        trained.call(*torch.randn(2, 8, length, 3, generator=torch.Generator().manual_seed(number)))
        if number == 2:  # on the host, and on the devices again
            trained.compare()
            for each in (trained.model, trained.plain.model):
                each.faded.data.mul_(0.5)
            trained.executor.copyWeightsToDevice()
            trained.executor.detachFromDevice()
            trained.executor.attachToDevice()
    trained.compare()


@pytest.mark.thorough
def test_files_have_the_shapes_of_the_last_call(tmp_path):
    trained = Trained(make_options().allowNewShapes(), ipus=(0, 0))
    trained.call(8, 16, 8)
    trained.executor.save(tmp_path / "model.pt")
    with pytest.raises(poptorch.Error, match="such inputs only"):
        poptorch.load(tmp_path / "model.pt")(*make_batch(16))
    loaded = poptorch.load(tmp_path / "model.pt")
    batch = make_batch(8, seed=7)
    expected = trained.plain.train(batch, 1, 1, second)
    for executor in (loaded, trained.executor):
        assert_close(leaves(executor(*batch)), join(expected))


class Choosy(torch.nn.Module):
    """What it trains, and where, depends on the number of rows."""

    def __init__(self):
        super().__init__()
        self.one, self.other = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)

    def forward(self, x, target):
        with poptorch.Block("first", ipu_id=1 if len(x) == 3 else 0):
            x = self.one(x)
        with poptorch.Block("second", ipu_id=0 if len(x) == 3 else 1):
            x = self.other(x) if len(x) != 2 else x * 1
            return torch.nn.functional.mse_loss(x, target)


@pytest.mark.thorough
def test_shapes_that_cannot_have_the_same_state():
    model = seeded(Choosy)
    executor = poptorch.trainingModel(model, make_options().allowNewShapes(), make_sgd(model.parameters()))
    first = executor(*make_batch(4))
    text = r"With these shapes \(x \[2, 3\], .* no longer on other.bias, other.weight, unlike with x \[4"
    with pytest.raises(poptorch.Error, match=text):
        executor(*make_batch(2))
    with pytest.raises(poptorch.Error, match=r"one.bias, .* would be on another IPU than with x \[4"):
        executor(*make_batch(3))
    model.one.weight.requires_grad_(False)
    with pytest.raises(poptorch.Error, match="requires_grad of one.weight has changed since"):
        executor(*make_batch(5))
    assert executor(*make_batch(4)) < first

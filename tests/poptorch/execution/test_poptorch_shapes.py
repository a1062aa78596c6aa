"""`Options.allowNewShapes`: one model, a program for each shape, one state."""

import concurrent.futures
import gc
import logging

import jax
import pytest
import torch

import ipu_pipeline.poptorch as poptorch
from ipu_pipeline import engine
from ipu_pipeline.poptorch.execution import building
from tests.support.poptorch_front import (
    assert_close,
    assert_same_state,
    join,
    leaves,
    make_batch,
    make_options,
    reference,
    second,
    seeded,
)


class Model(torch.nn.Module):
    """Two stages, with statistics of batches; forward refuses micro-batches of 5 rows."""

    def __init__(self, ipus=(0, 1)):
        super().__init__()
        self.first, self.second = torch.nn.Linear(3, 5), torch.nn.Linear(5, 3)
        self.norm = torch.nn.BatchNorm1d(5)
        self.ipus = ipus

    def forward(self, x, target=None, scale=1):
        if len(x) == 5:
            raise ValueError("five rows")
        with poptorch.Block("first", ipu_id=self.ipus[0]):
            x = torch.tanh(self.norm(self.first(x))) * scale
        with poptorch.Block("second", ipu_id=self.ipus[1]):
            x = self.second(x)
            return x if target is None else (x, torch.nn.functional.mse_loss(x, target))


def make_sgd(parameters, lr=0.1):
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


class Trained:
    """A wrapped model, and plain torch that is given the same."""

    def __init__(self, options, model=Model, make_optimizer=make_sgd):
        self.model = seeded(model)
        self.plain = reference(self.model, make_optimizer)
        self.options = options
        self.executor = poptorch.trainingModel(self.model, options, make_optimizer(self.model.parameters()))

    def call(self, *sizes, features=3):
        """Calls with batches of these sizes, each compared."""
        counts = self.options.device_iterations, self.options.Training.gradient_accumulation
        factor = self.options.replication_factor
        for number, size in enumerate(sizes):
            batch = make_batch(size, features, seed=number)
            expected = self.plain.train(batch, counts[0], counts[1] * factor, second)
            assert_close(leaves(self.executor(*batch)), join(expected))

    def compare(self):
        """Compares weights and buffers."""
        assert_same_state(self.model, self.plain.model)


def test_shapes_in_turn_train_as_in_torch(monkeypatch, caplog):
    captured = []
    monkeypatch.setattr(
        building, "capture", lambda *args, known=building.capture: captured.append(args) or known(*args)
    )
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
    executor.setOptimizer(make_sgd(trained.model.parameters(), lr=0.03))
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
    with pytest.raises(
        poptorch.Error, match=r"for 2 shapes, which is the limit of .*max_shapes=2\), .*x \[24, 3\]"
    ):
        executor(x, target)
    with pytest.raises(
        AssertionError, match=r"batch dimension \(10\) must .* = 4 .* 8 rows would fit, or 12"
    ):
        executor(x[:10], target[:10])
    with pytest.raises(AssertionError, match=r"\(3\) must be a multiple of .* 4 rows would fit"):
        executor(x[:3], target[:3])
    with pytest.raises(poptorch.Error, match="Data type mismatch .*allows other shapes of tensors, but"):
        executor(x.double()[:16], target[:16])
    with pytest.raises(
        poptorch.Error, match=r"arguments mismatch: .*allows other shapes of tensors, but no"
    ):
        executor(x[:16], target[:16], 2)
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
    trained = Trained(make_options().allowNewShapes(), lambda: Model((0, 0)))
    executor = trained.executor
    trained.call(4)
    held = measure()
    with pytest.raises(ValueError, match="five rows"):
        executor(*make_batch(5))

    def interrupt(*_args, **_kwargs):
        raise KeyboardInterrupt

    for place, name in ((building, "capture"), (engine.Pipeline, "trace"), (engine.Pipeline, "compile")):
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


def make_sequences(size, length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, size, length, 3, generator=generator)
    return x[0], x[1]


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
    options = VARIANTS[name]().allowNewShapes()
    model = seeded(Sequence)
    optimizer = poptorch.optim.Adam(model.parameters(), lr=0.01, loss_scaling=4.0)
    plain = reference(model, lambda parameters: torch.optim.Adam(parameters, lr=0.01))
    executor = poptorch.trainingModel(model, options, optimizer)
    for number, length in enumerate((2, 4, 2, 4)):
        batch = make_sequences(8, length, number)
        expected = plain.train(
            batch, options.device_iterations, options.Training.gradient_accumulation, second
        )
        assert_close(leaves(executor(*batch)), join(expected))
        if number == 2:  # on the host, and on the devices again
            assert_same_state(model, plain.model)
            for each in (model, plain.model):
                each.faded.data.mul_(0.5)
            executor.copyWeightsToDevice()
            executor.detachFromDevice()
            executor.attachToDevice()
    assert_same_state(model, plain.model)


@pytest.mark.thorough
def test_files_have_the_shapes_of_the_last_call(tmp_path):
    trained = Trained(make_options().allowNewShapes(), lambda: Model((0, 0)))
    trained.call(8, 16, 8)
    trained.executor.save(tmp_path / "model.pt")
    with pytest.raises(poptorch.Error, match="such inputs only"):
        poptorch.load(tmp_path / "model.pt")(*make_batch(16))
    loaded = poptorch.load(tmp_path / "model.pt")
    batch = make_batch(8, seed=7)
    expected = trained.plain.train(batch, 1, 1, second)
    assert_close(leaves(loaded(*batch)), join(expected))
    assert_close(leaves(trained.executor(*batch)), join(expected))


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

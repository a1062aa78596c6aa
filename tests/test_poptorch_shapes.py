"""`Options.allowNewShapes`: one model, a program for each shape, one state."""

import gc
import logging
import threading

import jax
import pytest
import torch

import ipu_pipeline.poptorch as poptorch
from ipu_pipeline import engine
from ipu_pipeline.poptorch.execution import building
from tests.poptorch_front import (
    assert_close,
    assert_same_state,
    join,
    leaves,
    make_batch,
    make_options,
    reference,
    seeded,
)


def second(outputs):
    return outputs[1]


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
        self.executor = poptorch.trainingModel(
            self.model, options, make_optimizer(self.model.parameters())
        )

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
    trained.call(32, 16, 32, 16, 16)
    told = [record.getMessage() for record in caplog.records if "Compiled" in record.getMessage()]
    assert [text.partition(" in 0:")[0] for text in told] == [
        "Compiled for x [32, 3], target [32, 3] (1 of at most 2 shapes)",
        "Compiled for x [16, 3], target [16, 3] (2 of at most 2 shapes)",
    ]
    assert executor.rng_state[-1] == 10  # weight updates, of all shapes
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
    with pytest.raises(poptorch.Error, match="Device is not attached"):
        executor(*make_batch(16))
    executor.attachToDevice()
    trained.call(16, 32)
    trained.compare()
    assert len(captured) == 2
    x, target = make_batch(24)
    with pytest.raises(poptorch.Error, match=r"for 2 shapes, as many as .*max_shapes=2\) allows.*x \[24, 3\]"):
        executor(x, target)
    with pytest.raises(AssertionError, match=r"batch dimension \(10\) must .* = 4 .* 8 rows would fit, or 12"):
        executor(x[:10], target[:10])
    with pytest.raises(AssertionError, match=r"\(3\) must be a multiple of .* 4 rows would fit"):
        executor(x[:3], target[:3])
    with pytest.raises(poptorch.Error, match="Data type mismatch .*allows other shapes of tensors, but"):
        executor(x.double()[:16], target[:16])
    with pytest.raises(poptorch.Error, match=r"arguments mismatch: .*allows other shapes of tensors, but no"):
        executor(x[:16], target[:16], 2)
    executor.destroy()
    assert len(captured) == 2
    trained.compare()


def test_without_it_the_error_says_so():
    model = poptorch.inferenceModel(torch.nn.Linear(3, 2), make_options())
    model(torch.ones(4, 3))
    with pytest.raises(poptorch.Error, match=r"Shape mismatch for input: .*Options.allowNewShapes\(True\)"):
        model(torch.ones(2, 3))


@pytest.mark.parametrize(
    ("arguments", "error"), [((1,), AssertionError), ((True, 0), ValueError), ((True, 2.0), AssertionError)]
)
def test_arguments_that_are_refused(arguments, error):
    with pytest.raises(error, match=r"poptorch.Options\(\).(allow_new_shapes|max_shapes) must be"):
        poptorch.Options().allowNewShapes(*arguments)


def test_what_fails_leaves_the_other_shapes(monkeypatch):
    """Forward raises, capturing or compiling is interrupted, XLA fails: nothing is lost, and none is added."""
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
        assert [*executor._compiled.programs] == [(torch.Size([4, 3]),) * 2]
    trained.call(4)
    assert measure() == held
    trained.call(6, 4, 6)
    assert measure() == held  # the state is there once
    trained.compare()


def measure():
    """The bytes of all arrays on the devices but counts and keys."""
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays() if array.size > 2)


def test_two_threads_with_different_shapes():
    model = seeded(lambda: torch.nn.Linear(3, 2))
    executor = poptorch.inferenceModel(model, make_options().allowNewShapes())
    found = {}

    def run(size):
        for _call in range(5):
            x = torch.full((size, 3), float(size))
            found.setdefault(size, []).append((executor(x), x))

    threads = [threading.Thread(target=run, args=(size,)) for size in (2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for made in found.values():
        assert len(made) == 5
        for result, x in made:
            assert_close([result], [model(x)])

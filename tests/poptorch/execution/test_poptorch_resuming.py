"""Training models that go on from memory."""

import copy

import jax
import pytest
import torch

import ipu_pipeline.poptorch as poptorch
from tests.support.poptorch_front import (
    TwoLayers,
    assert_same_state,
    make_batch,
    make_options,
    make_sgd,
    reference,
    seeded,
)
from tests.support.poptorch_resumer import make_model, train


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(other[name])), name


@pytest.mark.parametrize(
    "optimizer",
    [None, pytest.param(torch.optim.AdamW, marks=pytest.mark.thorough)],
    ids=["ours", "torch's"],
)
def test_a_program_that_is_started_again_ends_as_one_that_was_not(optimizer, restart):
    """Dropout, the buffers of each of two replicas, Adam, and rates that change.

    The last call is done again, from what was in memory before it.
    """
    expected, found = {}, {}
    restart(0)
    whole, own = make_model(2, optimizer)
    train(whole, own, 6, expected.__setitem__, 2)
    whole._resumption._series.wait()
    restart(1)
    executor, adam = make_model(2, optimizer)
    train(executor, adam, 6, found.__setitem__, 2)
    assert len(expected) == 6
    assert list(found) == [5]
    assert torch.equal(found[5], expected[5])
    assert_same(executor.state_dict(), whole.state_dict())
    mine, theirs = adam.state_dict(), own.state_dict()
    assert jax.tree.structure(mine) == jax.tree.structure(theirs)
    for value, wanted in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
        assert torch.equal(value, wanted) if isinstance(wanted, torch.Tensor) else value == wanted


def test_wrong_uses(restart):
    restart(0)
    model = seeded(TwoLayers)
    with pytest.raises(RuntimeError, match="resume is for training models"):
        poptorch.inferenceModel(model, make_options()).resume()
    executor = poptorch.trainingModel(model, make_options(), make_sgd(model.parameters()))
    executor(*make_batch(2))
    with pytest.raises(poptorch.Error, match="before the model is compiled"):
        executor.resume()
    executor.destroy()
    executor.resume()
    with pytest.raises(poptorch.Error, match="called before"):
        executor.resume()


class Counting(torch.nn.Module):
    """A parameter that is not trained, and a buffer that only long inputs change."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)
        self.frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("long", torch.zeros(3))

    def forward(self, x, target=None):
        y = self.layer(x) * self.frozen
        if len(x) > 2:
            self.long.add_(x.mean(0))
            y = y + 0.1 * self.long
        return y if target is None else torch.nn.functional.mse_loss(y, target)


class Program:
    """A model and its optimizer, which can be made again as in a process that is started again."""

    def __init__(self, restart, make_optimizer=make_sgd):
        self._begin_anew, self._make_optimizer = restart, make_optimizer
        self.number = -1
        self.begin()

    def begin(self):
        if self.number >= 0:
            self.executor._resumption._series.wait()
        self.number += 1
        self._begin_anew(self.number)
        self.model = seeded(Counting)
        self.optimizer = self._make_optimizer(self.model.parameters())
        self.options = make_options(accumulation=2, allow_new_shapes=True)
        self.executor = poptorch.trainingModel(self.model, self.options.clone(), self.optimizer)

    def call(self, number, size=4):
        return self.executor(*make_batch(size, seed=number))


def test_what_no_run_changes_and_what_only_another_shape_uses(restart):
    """They are on the host and on the devices again once compiled, and kept before that shape comes."""
    program = Program(restart)
    plain = reference(program.model, make_sgd)
    initial = copy.deepcopy(program.model.state_dict())
    program.executor.resume()
    for number, size in enumerate((4, 8, 4, 8)):
        if number == 3:
            before = copy.deepcopy(program.model.state_dict())
            program.begin()
            assert program.executor.resume() == 2  # the call before it is done again
            program.executor.load_state_dict(initial)  # which is older
            program.call(2)
            assert_same(program.model.state_dict(), before)
        if number == 2:
            with torch.no_grad():
                program.model.frozen.mul_(0.5)
                plain.model.frozen.mul_(0.5)
            program.executor.copyWeightsToDevice()
        program.call(number, size)
        plain.train(make_batch(size, seed=number), 1, 2, lambda loss: loss)
    assert plain.model.long.abs().sum() > 0
    assert_same_state(program.model, plain.model)


def test_the_host_has_the_weights_at_once(restart):
    """As do models for inference, before the first call."""
    program = Program(restart)
    program.executor.resume()
    for number in range(2):
        before = {name: value.clone() for name, value in program.model.state_dict().items()}
        program.call(number)
    expected = before["layer.weight"] @ torch.ones(3) + before["layer.bias"]
    program.begin()
    inference = poptorch.inferenceModel(program.model, make_options())
    initial = inference(torch.ones(1, 3))
    assert program.executor.resume() == 1
    assert_same(program.model.state_dict(), before)
    found = inference(torch.ones(1, 3))
    assert not torch.equal(found, initial)
    torch.testing.assert_close(found[0], expected)


def test_values_that_are_set_after_resuming_count(restart):
    """Without that, the optimizer has those that were in use."""
    program = Program(restart, lambda parameters: poptorch.optim.SGD(parameters, lr=0.1))
    program.executor.resume()
    program.call(0)
    program.optimizer.param_groups[0]["lr"] = 0.25
    program.executor.setOptimizer(program.optimizer)
    program.call(1)
    program.begin()
    assert program.executor.resume() == 1
    program.call(1)
    assert program.optimizer.state_dict()["ipu_param"]["lr___0"] == 0.25
    program.begin()
    assert program.executor.resume() == 1
    program.optimizer.param_groups[0]["lr"] = 0.0
    program.executor.setOptimizer(program.optimizer)
    weights = program.model.layer.weight.clone()
    program.call(1)
    assert torch.equal(program.model.layer.weight, weights)


def test_a_newer_checkpoint_on_disk_counts(restart):
    program = Program(restart)
    program.executor.resume()
    for number in range(3):
        program.call(number)
    state = program.model.state_dict()
    for given, done in ((2, 2), (3, 3)):
        program.begin()
        program.model.load_state_dict(state)
        assert program.executor.resume(given) == done
        assert torch.equal(program.model.layer.weight, state["layer.weight"]) == (given == 3)
    program.begin()
    with pytest.raises(TypeError, match="num_done must be a whole number from 0; got -1"):
        program.executor.resume(-1)


def test_torchs_own_counts_go_on(restart):
    """RMSprop does not need them; they begin with those of a state that was loaded."""
    program = Program(restart, lambda parameters: torch.optim.RMSprop(parameters, lr=0.01))
    plain = reference(program.model, program._make_optimizer)
    plain.train(make_batch(4), 1, 2, lambda loss: loss)
    program.optimizer.load_state_dict(plain.optimizer.state_dict())
    program.executor.resume()
    for number in range(2):
        program.call(number)
    program.begin()
    assert program.executor.resume() == 1
    program.call(1)
    steps = {float(value["step"]) for value in program.optimizer.state_dict()["state"].values()}
    assert steps == {3.0}


def test_what_is_in_memory_is_of_another_model(restart):
    """It is not lost by an error."""
    restart(0)
    model = seeded(TwoLayers)
    executor = poptorch.trainingModel(model, make_options(), make_sgd(model.parameters()))
    executor.resume()
    executor(*make_batch(2))
    executor._resumption._series.wait()
    restart(1)
    other = torch.nn.Linear(3, 3)
    executor = poptorch.trainingModel(other, make_options(), make_sgd(other.parameters()))
    with pytest.raises(ValueError, match=r"this one has no first\.bias, first\.weight, second"):
        executor.resume()
    restart(1)
    other = seeded(lambda: TwoLayers(hidden=7))
    executor = poptorch.trainingModel(other, make_options(), make_sgd(other.parameters()))
    executor.resume()
    for _call in range(2):
        with pytest.raises(ValueError, match=r"first\.weight"):
            executor(*make_batch(2))
        assert not executor.isCompiled()
    restart(1)
    executor = poptorch.trainingModel(model, make_options(), make_sgd(model.parameters()))
    assert executor.resume() == 0

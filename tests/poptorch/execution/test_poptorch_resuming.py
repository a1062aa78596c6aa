"""Training models that go on from memory."""

import itertools

import jax
import pytest
import torch

import ipu_pipeline.poptorch as poptorch
from ipu_pipeline.checkpointing import in_memory
from ipu_pipeline.poptorch.execution import resuming
from ipu_pipeline.processes.launched import MEMORY_VARIABLE, RESTART_VARIABLE
from tests.support.poptorch_front import TwoLayers, make_batch, make_options, make_sgd, seeded
from tests.support.poptorch_resumer import make_model, train


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Begins as a process that a launcher has started so often again."""
    directory = tmp_path / "memory"
    directory.mkdir(mode=0o700)
    monkeypatch.setenv(MEMORY_VARIABLE, str(directory))

    def begin(restart):
        monkeypatch.setenv(RESTART_VARIABLE, str(restart))
        monkeypatch.setattr(in_memory, "_begun", {})
        monkeypatch.setattr(resuming, "_numbers", itertools.count())

    return begin


class KilledError(Exception):
    pass


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(other[name])), name


@pytest.mark.parametrize("optimizer", [None, torch.optim.AdamW])
def test_a_program_that_is_started_again_ends_as_one_that_was_not(optimizer, start, monkeypatch):
    """Dropout, the buffers of each of two replicas, Adam, and rates that change."""
    expected, found = {}, {}

    def note(into, number, losses, last=None):
        assert torch.equal(into.setdefault(number, losses), losses)
        if number == last:
            raise KilledError

    with monkeypatch.context() as patch:
        patch.delenv(MEMORY_VARIABLE)
        whole, own = make_model(2, optimizer)
        train(whole, own, 9, lambda *told: note(expected, *told), 2)
    for restart, last in enumerate((2, 5)):
        start(restart)
        with pytest.raises(KilledError):
            train(*make_model(2, optimizer), 9, lambda *told, last=last: note(found, *told, last), 2)
    start(2)
    executor, adam = make_model(2, optimizer)
    again = []
    train(executor, adam, 9, lambda *told: (again.append(told[0]), note(found, *told)), 2)
    assert again[0] == 5
    assert len(found) == len(expected) == 9
    assert all(torch.equal(found[number], losses) for number, losses in expected.items())
    assert_same(executor.state_dict(), whole.state_dict())
    mine, theirs = adam.state_dict(), own.state_dict()
    assert jax.tree.structure(mine) == jax.tree.structure(theirs)
    for value, wanted in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
        assert torch.equal(value, wanted) if isinstance(wanted, torch.Tensor) else value == wanted


def test_weights_are_there_once_the_model_is_compiled(start):
    """Also on the host, and for several shapes; a state dict that was loaded before is older."""
    batches = [make_batch(4), make_batch(6, seed=1)]
    options = make_options(accumulation=2, allow_new_shapes=True)
    start(0)
    model = seeded(TwoLayers)
    executor = poptorch.trainingModel(model, options.clone(), make_sgd(model.parameters()))
    assert executor.resume() == 0
    states = []
    for batch in (*batches, *batches):
        states.append({name: value.clone() for name, value in model.state_dict().items()})
        executor(*batch)
    executor._resumption._series.wait()
    start(1)
    other = seeded(TwoLayers, 5)
    executor = poptorch.trainingModel(other, options.clone(), make_sgd(other.parameters()))
    executor.load_state_dict(states[0])
    assert executor.resume() == 3
    executor.compile(*batches[1])
    assert_same(other.state_dict(), states[3])
    executor(*batches[1])
    assert_same(other.state_dict(), model.state_dict())


def test_wrong_uses(start):
    start(0)
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


def test_what_is_in_memory_is_of_another_model(start):
    start(0)
    model = seeded(TwoLayers)
    executor = poptorch.trainingModel(model, make_options(), make_sgd(model.parameters()))
    executor.resume()
    executor(*make_batch(2))
    executor._resumption._series.wait()
    start(1)
    other = seeded(lambda: TwoLayers(hidden=7))
    executor = poptorch.trainingModel(other, make_options(), make_sgd(other.parameters()))
    executor.resume()
    with pytest.raises(ValueError, match=r"first\.weight"):
        executor(*make_batch(2))

"""Phased execution of PopTorch models that do unusual things: their numbers are those of plain torch."""

import jax
import pytest
import torch

import ipu_pipeline.poptorch as poptorch
from ipu_pipeline.poptorch import Liveness, Phase, SerialPhasedExecution, Stage
from tests.support.poptorch_front import (
    assert_close,
    assert_same_state,
    join,
    leaves,
    make_options,
    reference,
    seeded,
)

SIZE = 6
INPUTS = torch.randn(2, 2 * SIZE, SIZE, generator=torch.Generator().manual_seed(3))


def make_strategy(*phases, separate=False):
    strategy = SerialPhasedExecution(*phases).setTensorsLiveness(Liveness.OffChipAfterEachPhase)
    return strategy.useSeparateBackwardPhase(separate)


class Layers(torch.nn.Module):
    """Two independent layers and what joins them."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(SIZE, SIZE), torch.nn.Linear(SIZE, SIZE)
        self.register_buffer("before", torch.zeros(SIZE, SIZE))
        self.register_buffer("now", torch.zeros(SIZE, SIZE))

    def forward(self, x, target):
        with poptorch.Block("A"):
            a = torch.tanh(self.first(x))
        with poptorch.Block("B"):
            b = torch.tanh(self.second(x))
        with poptorch.Block("end"):
            return a, a * b, torch.nn.functional.mse_loss(a * b, target)


class Delay(Layers):
    """Keeps what it made two calls ago; block "read" is opened before the block of an earlier phase."""

    def forward(self, x, target):
        with poptorch.Block("read"):
            x = x - 0.5 * self.now
        with poptorch.Block("A"):
            a = torch.tanh(self.first(target))
            self.before.copy_(self.now)
            self.now.copy_(a.detach())
        with poptorch.Block("end"):
            x = torch.tanh(self.second(x) + self.before)
            return x, torch.nn.functional.mse_loss(x * a, target)


class WritesInput(Layers):
    """Writes an input into a buffer that is read before, neither in the first stage."""

    def forward(self, x, target):
        with poptorch.Block("A"):
            a = torch.tanh(self.first(x))
        with poptorch.Block("B"):
            b = torch.tanh(self.second(a) - self.now)
            self.now.copy_(x)
        with poptorch.Block("end"):
            return b, torch.nn.functional.mse_loss(a * b, target)


def compare(model, strategy, mode=None, num_calls=2, replicas=1, edit=lambda options: None):
    """Trains by a strategy and in plain torch, with two micro-batches per weight update and replica."""
    plain = reference(model, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    options = make_options(1, 2, strategy, mode, replication_factor=replicas)
    edit(options)
    training = poptorch.trainingModel(model, options, poptorch.optim.SGD(model.parameters(), lr=0.1))
    for _call in range(num_calls):
        outputs = leaves(training(*INPUTS))
        expected = plain.train(list(INPUTS), 1, 2 * replicas, lambda out: out[-1])
        if mode is poptorch.OutputMode.Sum:
            sums = [torch.stack(same).sum(0) for same in zip(*map(leaves, expected), strict=True)]
            assert_close([found.reshape(one.shape) for found, one in zip(outputs, sums, strict=True)], sums)
        else:
            assert_close(outputs, join(expected))
    training.copyWeightsToHost()
    assert_same_state(model, plain.model)


@pytest.mark.parametrize(
    ("make", "strategy"),
    [
        (Delay, make_strategy("A", "read", "end")),
        (WritesInput, make_strategy("A", "B", "end")),
        pytest.param(
            WritesInput,
            poptorch.ShardedExecution("A", "B", Stage("end").ipu(0)),
            marks=pytest.mark.thorough,
        ),
    ],
    ids=["delay", "input in phases", "input without phases"],
)
def test_what_a_buffer_had_before(make, strategy):
    compare(seeded(make), strategy)


def test_a_buffer_that_is_written_at_the_same_time():
    class AtOnce(Layers):
        def forward(self, x, target):
            with poptorch.Block("read"):
                read = x * self.now
            with poptorch.Block("A"):
                self.now.copy_(torch.tanh(self.first(x)).detach())
            with poptorch.Block("end"):
                return torch.nn.functional.mse_loss(self.second(read), target)

    strategy = make_strategy([Stage("A"), Stage("read")], "end")
    message = "Buffer now is read in block read and written in block A, which are on different stages"
    with pytest.raises(poptorch.Error, match=message):
        poptorch.trainingModel(seeded(AtOnce), make_options(1, 2, strategy))(*INPUTS)


def test_outputs_of_early_phases_are_summed():
    """With nothing else in host memory than what goes from phase to phase."""
    on_chip = poptorch.TensorLocationSettings().useOnChipStorage(True)

    def locate(options):
        for kind in ("Activation", "Weight", "Optimizer", "Accumulator"):
            getattr(options.TensorLocations, f"set{kind}Location")(on_chip)

    strategy = make_strategy([Stage("A"), Stage("B")], "end", separate=True)
    compare(seeded(Layers), strategy, poptorch.OutputMode.Sum, edit=locate)


@pytest.mark.thorough
def test_replicas_with_outputs_of_early_phases():
    compare(seeded(Layers), make_strategy([Stage("A"), Stage("B")], "end", separate=True), replicas=2)


def test_frozen_weights_are_in_host_memory():
    """A model for inference has nothing else to take away."""
    model = seeded(Layers).requires_grad_(requires_grad=False)
    options = make_options(strategy=make_strategy("A", "B", "end"))
    inference = poptorch.inferenceModel(model, options)
    assert_close(leaves(inference(*INPUTS))[:2], leaves(model(*INPUTS))[:2])
    kinds = {array.sharding.memory_kind for array in jax.tree.leaves(inference._compiled.state.variables)}
    assert kinds == {"pinned_host"}


@pytest.mark.parametrize("phases", [[["A"], ["B"]], [Phase("A"), Phase("B")], [[Stage("A")], [Stage("B")]]])
def test_a_list_of_phases(phases):
    message = r"SerialPhasedExecution takes its phases as arguments, as SerialPhasedExecution\(\*phases\)"
    with pytest.raises(AssertionError, match=message):
        SerialPhasedExecution(phases)

"""Phased execution of PopTorch models: the numbers of plain torch, what runs when, and what lies where."""

import contextlib
import gc

import jax
import pytest
import torch

import ipu_pipeline.poptorch as poptorch
from benchmarks.phases.run import PeakBytes
from ipu_pipeline.engine import watching
from ipu_pipeline.poptorch import Liveness, ParallelPhasedExecution, Phase, SerialPhasedExecution, Stage
from tests.support import poptorch_front as front
from tests.support import watchers
from tests.support.poptorch_front import TrainedAlike, assert_close, ipus_of, leaves, make_options, seeded

# Models.


def make_strategy(*phases, separate=False):
    strategy = SerialPhasedExecution(*phases).setTensorsLiveness(Liveness.OffChipAfterEachPhase)
    return strategy.useSeparateBackwardPhase(separate)


class Independent(torch.nn.Module):
    """Blocks A, B and C that need nothing of each other; listing 12."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleDict({name: torch.nn.Linear(6, 6) for name in "ABC"})

    def forward(self, x, target=None):
        made = []
        for name, layer in self.layers.items():
            with poptorch.Block(name):
                made.append(torch.tanh(layer(x)))
                if name == "C" and target is not None:  # which needs them all
                    loss = torch.nn.functional.mse_loss(made[0] + 2 * made[1] - made[2], target)
                    return *made, loss
        return tuple(made)


class Pairs(torch.nn.Module):
    """Two chains of two layers, "A", "B" and "A2", "B2", which the last block joins; listing 14."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleDict({n: torch.nn.Linear(6, 6) for n in ("A", "A2", "B", "B2")})

    def forward(self, x, target=None):
        first, second = x, x * 2
        for name in "AB":
            with poptorch.Block(name):
                first = torch.tanh(self.layers[name](first))
            with poptorch.Block(f"{name}2"):
                second = torch.tanh(self.layers[f"{name}2"](second)) + first
        return second if target is None else (second, torch.nn.functional.mse_loss(second, target))


SERIAL = [[Stage("A"), Stage("A2")], [Stage("B"), Stage("B2")]]


class Layers(torch.nn.Module):
    """Two independent layers and what joins them."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)
        self.register_buffer("before", torch.zeros(12, 6))
        self.register_buffer("now", torch.zeros(12, 6))

    def forward(self, x, target):
        with poptorch.Block("A"):
            a = torch.tanh(self.first(x))
        with poptorch.Block("B"):
            b = torch.tanh(self.second(x))
        with poptorch.Block("end"):
            return a, a * b, torch.nn.functional.mse_loss(a * b, target)


class Delay(Layers):
    """Keeps what it made two calls ago; block "read" is opened before the block of an earlier phase.

    The last block writes an input into a buffer that is read before.
    """

    def __init__(self):
        super().__init__()
        self.register_buffer("given", torch.zeros(12, 6))

    def forward(self, x, target):
        with poptorch.Block("read"):
            x = x - 0.5 * self.now
        with poptorch.Block("A"):
            a = torch.tanh(self.first(target))
            self.before.copy_(self.now)
            self.now.copy_(a.detach())
        with poptorch.Block("end"):
            x = torch.tanh(self.second(x) + self.before - self.given)
            self.given.copy_(target)
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


def make_inputs():
    return torch.randn(2, 24, 6, generator=torch.Generator().manual_seed(3))


def make_sgd(parameters):
    return poptorch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def compare(model, strategy, num_calls=2, counts=(2, 3), **values):
    """Trains, and infers if it can, by a strategy and in plain torch; returns the executors."""
    x, target = make_inputs()
    trained = TrainedAlike(model, make_options(*counts, strategy, **values), make_sgd, front.make_sgd)
    for _call in range(num_calls):
        trained.call(x, target)
    training = trained.executor
    training.copyWeightsToHost()
    trained.compare()
    if isinstance(model, Layers):  # which has no forward without a target
        return training, None
    model.eval()
    inference = poptorch.inferenceModel(model, make_options(6, strategy=strategy.clone()))
    with torch.no_grad():
        assert_close(leaves(inference(x)), leaves(model(x)))
    return training, inference


# The listings.


def test_listing_12():
    """The loss is in C, and needs B. In inference they are parallel, and what they make is joined."""
    second = Phase(Stage("B").ipu(1), Stage("C").ipu(3))
    strategy = ParallelPhasedExecution(Phase(Stage("A").ipu(0)), second)
    training, inference = compare(seeded(Independent), strategy, num_calls=1)
    assert ipus_of(training) == [0, 1, 3]
    assert ipus_of(inference) == [0, 1, 3, 1]


class Matrices(torch.nn.Module):
    """Listing 13: two chains of products that change IPUs after each phase."""

    def __init__(self, number=2, size=6):
        super().__init__()
        self.number = number
        scale = size**-0.5
        weights = [torch.nn.Parameter(scale * torch.randn(size, size)) for _matrix in range(6 * number)]
        self.weights = torch.nn.ParameterList(weights)

    def forward(self, x, target=None):
        weights = [x, x]
        matrices = iter(self.weights)
        for phase in range(2 * self.number):
            for ipu in range(2):
                with poptorch.Block(f"phase{phase}_ipu{ipu}"):
                    for _product in range(1 + phase % 2):
                        weights[ipu] = weights[ipu] @ next(matrices)
                    weights[ipu] = torch.relu(weights[ipu])
            weights.reverse()
        with poptorch.Block("end"):
            out = weights[0] + weights[1]
            return out if target is None else (out, torch.nn.functional.l1_loss(out, target))


@pytest.mark.thorough
def test_listing_13():
    phases = [
        Phase(*(Stage(f"phase{phase}_ipu{ipu}") for ipu in range(2))).ipus(*((0, 2), (1, 3))[phase % 2])
        for phase in range(4)
    ]
    compare(seeded(Matrices), ParallelPhasedExecution(*phases, Phase(Stage("end").ipu(0))), counts=(1, 1))


@pytest.mark.thorough
def test_listing_14():
    strategy = SerialPhasedExecution(*map(list, SERIAL)).setTensorsLiveness(Liveness.OffChipAfterFwd)
    for phase in strategy.phases:
        phase.ipus(0, 1)
    compare(seeded(Pairs), strategy.useSeparateBackwardPhase(), num_calls=1)


class Deep(torch.nn.Module):
    """Layers of one size in blocks of their own, as in listing 15; the last one may read the first's."""

    def __init__(self, number=4, size=64, skips=False):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(size, size) for _layer in range(number)])
        self.skips = skips

    def forward(self, x, target=None):
        made = []
        for number, layer in enumerate(self.layers):
            with poptorch.Block(str(number)):
                x = torch.tanh(layer(x))
                made.append(x)
                if number < len(self.layers) - 1:
                    continue
                x = x * made[0] if self.skips else x
                if target is not None:
                    return x, torch.nn.functional.mse_loss(x, target)
        return x


@pytest.mark.thorough
def test_listing_15():
    """A stage that needs what another one of its phase makes comes after it."""
    strategy = ParallelPhasedExecution(Phase(Stage("0"), Stage("1")), Phase(Stage("2"), Stage("3")))
    for number, ipus in enumerate(((0, 2), (1, 3))):
        strategy.phase(number).ipus(*ipus)
    strategy.sendTensorsOffChipAfterFwd()
    training, _inference = compare(seeded(lambda: Deep(size=6)), strategy, num_calls=1)
    assert ipus_of(training) == [0, 2, 1, 3]


def measure_peak(liveness, locations=None):
    """The most bytes that a model's arrays take on the device while it trains."""
    strategy = SerialPhasedExecution(*map(str, range(4))).setTensorsLiveness(liveness)
    options = make_options(1, 2, strategy)
    if locations is not None:
        options.TensorLocations.setWeightLocation(locations)
    gc.collect()
    others = PeakBytes()
    others.sample()
    model = seeded(Deep)
    optimizer = poptorch.optim.Adam(model.parameters(), lr=0.01)
    training = poptorch.trainingModel(model, options, optimizer)
    x = torch.randn(2, 64, 64)
    training(*x)
    watcher = PeakBytes()
    with watching.watching(watcher):
        training(*x)
    training.destroy()
    return watcher.peak - others.peak


WEIGHTS = 4 * (64 * 64 + 64) * 4


def test_bytes_on_the_device_fall():
    """Four layers with Adam are 4 times their weights, and sums of gradients; a phase has those of one."""
    assert measure_peak(Liveness.OffChipAfterFwdNoOverlap) < 2 * WEIGHTS


@pytest.mark.thorough
def test_bytes_of_each_liveness_and_of_a_location_that_was_set():
    peaks = {liveness: measure_peak(liveness) for liveness in Liveness}
    on_chip = poptorch.TensorLocationSettings().useOnChipStorage(True)
    with_weights = measure_peak(Liveness.OffChipAfterFwdNoOverlap, locations=on_chip)
    # Those of the three layers that are in other phases.
    assert with_weights >= peaks[Liveness.OffChipAfterFwdNoOverlap] + 3 / 4 * WEIGHTS
    assert peaks.pop(Liveness.AlwaysLive) > 4 * WEIGHTS
    assert max(peaks.values()) < 2 * WEIGHTS


class Seen(watchers.Watcher):
    """Notes in which memory arrays of which shape lie, and from which device to which they are sent."""

    def __init__(self):
        self.places, self.moves = set(), set()

    def run(self, launch, function, arguments):
        results = super().run(launch, function, arguments)
        self.places |= {(array.sharding.memory_kind, array.shape) for array in jax.live_arrays()}
        return results

    def moved(self, launch, target, _arrays):
        self.moves |= {(source.id, device.id) for source in launch.devices for device in target}


@pytest.mark.thorough
@pytest.mark.parametrize("liveness", [Liveness.OffChipAfterFwdNoOverlap, Liveness.OffChipAfterEachPhase])
def test_what_is_read_two_phases_later(liveness):
    """Meanwhile it is in host memory; in inference, only if all that a phase leaves is."""
    strategy = make_strategy("0", "1", "2").setTensorsLiveness(liveness)
    training, inference = compare(seeded(lambda: Deep(3, 6, skips=True)), strategy, num_calls=1)
    for executor, inputs in ((training, torch.randn(2, 24, 6)), (inference, torch.randn(1, 24, 6))):
        watcher = Seen()
        with watching.watching(watcher):
            executor(*inputs)
        is_away = ("pinned_host", (4, 6)) in watcher.places
        assert is_away == (executor is training or liveness is Liveness.OffChipAfterEachPhase)


@pytest.mark.thorough
def test_independent_stages_of_a_phase_exchange_nothing():
    """So that devices run them at the same time, forwards and backwards."""

    class Sum(Independent):
        def forward(self, x, target):
            with poptorch.Block("A"):
                x = torch.tanh(self.layers["A"](x))
            with poptorch.Block("B"):
                b = self.layers["B"](x)
            with poptorch.Block("C"):
                c = self.layers["C"](x)
            with poptorch.Block("end"):
                return torch.nn.functional.mse_loss(b * c, target)

    strategy = SerialPhasedExecution(
        Phase(Stage("A").ipu(0)), Phase(Stage("B").ipu(1), Stage("C").ipu(2)), Phase(Stage("end").ipu(3))
    )
    training = poptorch.trainingModel(seeded(Sum), make_options(strategy=strategy))
    watcher = Seen()
    with watching.watching(watcher):
        training(*torch.randn(2, 4, 6))
    assert watcher.moves == {(0, 1), (0, 2), (1, 3), (2, 3), (3, 1), (3, 2), (1, 0), (2, 0)}


# Models as people have them.


class Normalized(torch.nn.Module):
    """Batch normalization in two phases, a weight in both, and a block that is opened twice."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)
        self.norms = torch.nn.ModuleList([torch.nn.BatchNorm1d(6) for _norm in range(2)])

    def forward(self, x, target=None):
        x = x * 1.5
        with poptorch.Block("A"):
            x = self.norms[0](torch.tanh(self.first(x)))
        with poptorch.Block("B"):
            x = self.second(x)
        with poptorch.Block("B"):
            x = self.norms[1](torch.tanh(self.first(x)))
            return x if target is None else (x, torch.nn.functional.mse_loss(x, target))


PARALLEL = ParallelPhasedExecution("A", "B")


@pytest.mark.parametrize(
    ("strategy", "ipus"),
    [
        (make_strategy("A", "B"), [0, 0]),
        pytest.param(PARALLEL.sendTensorsOffChipAfterFwd(), [0, 1], marks=pytest.mark.thorough),
    ],
    ids=["serial", "parallel"],
)
def test_buffers_and_a_weight_of_two_phases(strategy, ipus):
    training, _inference = compare(seeded(Normalized), strategy, counts=(1, 2))
    assert ipus_of(training) == ipus


@pytest.mark.thorough
def test_replicas_with_outputs_of_early_phases():
    strategy = make_strategy([Stage("A"), Stage("B")], "end", separate=True)
    compare(seeded(Layers), strategy, counts=(1, 2), replication_factor=2)


def test_what_a_buffer_had_before():
    """In phases and without."""
    compare(seeded(Delay), make_strategy("A", "read", "end"), counts=(1, 2))
    strategy = poptorch.ShardedExecution("A", "B", Stage("end").ipu(0))
    compare(seeded(WritesInput), strategy, counts=(1, 2))


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
        poptorch.trainingModel(seeded(AtOnce), make_options(1, 2, strategy))(*torch.ones(2, 24, 6))


def test_outputs_of_early_phases_are_summed():
    """With nothing else in host memory than what goes from phase to phase."""
    strategy = make_strategy([Stage("A"), Stage("B")], "end", separate=True)
    options = make_options(1, 2, strategy, poptorch.OutputMode.Sum)
    for kind in ("Activation", "Weight", "Optimizer", "Accumulator"):
        on_chip = poptorch.TensorLocationSettings().useOnChipStorage(True)
        getattr(options.TensorLocations, f"set{kind}Location")(on_chip)
    trained = TrainedAlike(seeded(Layers), options, make_sgd, front.make_sgd)
    for _call in range(2):
        outputs = leaves(trained.executor(*make_inputs()))
        expected = trained.plain.train(make_inputs(), 1, 2, lambda made: made[-1])
        sums = [torch.stack(same).sum(0) for same in zip(*map(leaves, expected), strict=True)]
        assert_close([found.reshape(one.shape) for found, one in zip(outputs, sums, strict=True)], sums)
    trained.compare()


def test_frozen_weights_are_in_host_memory():
    """A model for inference has nothing else to take away."""
    model = seeded(Layers).requires_grad_(requires_grad=False)
    inference = poptorch.inferenceModel(model, make_options(strategy=make_strategy("A", "B", "end")))
    inputs = torch.randn(2, 12, 6)
    before = jax.live_arrays()
    assert_close(leaves(inference(*inputs))[:2], leaves(model(*inputs))[:2])
    shapes = {tuple(parameter.shape) for parameter in model.parameters()}
    weights = [a for a in jax.live_arrays() if a.shape in shapes and not any(a is one for one in before)]
    assert {array.sharding.memory_kind for array in weights} == {"pinned_host"}


@pytest.mark.thorough
def test_exported_and_loaded(tmp_path):
    strategy = SerialPhasedExecution(*map(list, SERIAL)).setTensorsLiveness(Liveness.OffChipAfterEachPhase)
    model, inputs = seeded(Pairs), make_inputs()
    own = poptorch.trainingModel(model, make_options(2, 3, strategy), make_sgd(model.parameters()))
    own.compileAndExport(tmp_path / "model.poptorch", *inputs)
    loaded = poptorch.load(tmp_path / "model.poptorch")
    assert_close(leaves(loaded(*inputs)), leaves(own(*inputs)), 0)
    assert ipus_of(loaded) == [0, 1, 0, 1]


@pytest.mark.thorough
def test_dropout():
    """Random numbers do not depend on what lies where."""

    class Dropping(Deep):
        def forward(self, x, target=None):
            return super().forward(torch.nn.functional.dropout(x, 0.5), target)

    found = []
    for liveness in (Liveness.AlwaysLive, Liveness.OffChipAfterEachPhase):
        model = seeded(lambda: Dropping(3, 6))
        strategy = SerialPhasedExecution("0", "1", "2").setTensorsLiveness(liveness)
        training = poptorch.trainingModel(model, make_options(1, 3, strategy, random_seed=5))
        training(*torch.ones(2, 6, 6))
        found.append([value.clone() for value in model.state_dict().values()])
    assert_close(*found, 0)


# What is refused.


class Sines(torch.nn.Module):
    """A sine in each block; without a name, outside of blocks."""

    def __init__(self, *names):
        super().__init__()
        self.names = names

    def forward(self, x):
        for name in self.names:
            with poptorch.Block(name) if name else contextlib.nullcontext():
                x = x.sin()
        return x


LATER = r"Block B, in phase 0, reads what block A makes, in phase 1, which comes later"
CIRCLE = "In phase 0 each of these stages reads .* makes, in a circle: .*block A, block A2"


@pytest.mark.parametrize(
    ("blocks", "phases", "error", "message"),
    [
        ([None], ["A"], poptorch.Error, "No active Block, all the ops must belong to a Block"),
        (["A", "B"], ["B", "A"], poptorch.Error, LATER),
        (["A", "B", "A2"], [[Stage("A", "A2"), Stage("B")]], poptorch.Error, CIRCLE),
        (["B"], ["A"], AssertionError, "Unknown Block 'B' list of expected Blocks"),
    ],
)
def test_what_cannot_be_phased(blocks, phases, error, message):
    options = make_options(strategy=SerialPhasedExecution(*phases))
    with pytest.raises(error, match=message):
        poptorch.inferenceModel(Sines(*blocks), options)(torch.ones(2))


def test_phases_and_a_schedule_without_effect(log):
    options = make_options(strategy=SerialPhasedExecution("A", "B", "C")).setPipelineSchedule("interleaved")
    poptorch.inferenceModel(Sines("A", "C"), options)(torch.ones(2))
    assert "opens no block 'B'" in " ".join(log)
    assert "setPipelineSchedule has no effect with poptorch.SerialPhasedExecution" in " ".join(log)

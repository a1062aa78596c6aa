"""What programs do beside the main path: told by name, taken over, or put back as it was."""

import copy
import warnings

import jax
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import ipu_pipeline.poptorch as poptorch
from ipu_pipeline.poptorch import logs
from tests.support.poptorch_front import TrainedAlike, assert_close, infer, make_options, model_of, seeded

x = torch.linspace(-1, 1, 12).reshape(4, 3)


def test_a_module_under_two_names_trains_as_in_torch():
    """By a loss that is made of other operations."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = self.second = nn.Linear(3, 3)

        def forward(self, x):
            y = self.second(torch.tanh(self.first(x)))
            return functional.gaussian_nll_loss(y, x, torch.full_like(x, 0.5))

    trained = TrainedAlike(seeded(Tied), None, lambda parameters: torch.optim.SGD(parameters, lr=1.0))
    trained.call(x, tolerance=1e-6)
    trained.compare(1e-6)


def test_data_is_a_detached_view():
    def forward(self, x):
        self.buffer.data.copy_(self.buffer + 1)
        y = self.linear(x)
        return poptorch.identity_loss(y.data.sum() + y.sum() + self.buffer.sum(), "sum")

    trained = TrainedAlike(model_of(forward, buffer=torch.zeros(3)))
    trained.call(x, tolerance=1e-6)
    trained.compare(1e-6)


def test_buffers_get_what_has_another_dtype_or_shape_and_one_value_twice():
    """Export of torch 2.13 puts the copied value in a buffer's place, and fails if two have the same."""
    dtypes = (torch.int32, torch.int32, torch.float16, torch.bool, torch.float32, torch.int64)
    buffers = {f"buffer{number}": torch.zeros(4, 3, dtype=dtype) for number, dtype in enumerate(dtypes)}

    def forward(self, x):
        for name in buffers:
            getattr(self, name).copy_(x[0])
        self.buffer_filled.fill_(x[1, 2])
        self.buffer_set[:] = x
        return [buffer * 3 for buffer in self.buffers()]

    integers = torch.zeros(4, 3, dtype=torch.int32)
    model = model_of(forward, **buffers, buffer_filled=integers, buffer_set=integers)
    plain, executor = copy.deepcopy(model), poptorch.inferenceModel(model, make_options())
    for _repetition in range(2):
        given = 5 * torch.rand(4, 3)
        assert_close(executor(given), plain(given))
    executor.copyWeightsToHost()
    assert_close(model.buffers(), plain.buffers())


def test_a_float64_input_is_rounded_only_where_forward_writes():
    def forward(self, x):
        x[:, 0] += 0.5
        return x.sum()

    given = torch.linspace(0, 1, 12, dtype=torch.float64).reshape(4, 3)
    written = given.clone()
    infer(model_of(forward), written)
    assert torch.equal(written[:, 1:], given[:, 1:])
    assert_close([written], [given + torch.tensor([0.5, 0, 0])])


def test_inputs_that_share_memory_where_forward_writes_to_one():
    """In torch a write to one changes the other, which would go to the devices by itself."""

    def forward(self, x, y):
        x.add_(1)
        return y * 2

    executor = poptorch.inferenceModel(model_of(forward), make_options())
    whole = torch.arange(16.0).reshape(4, 4)
    for time in range(2):  # the first call compiles
        for left, right in [(whole[:, :2], whole[:, :2]), (whole[:, 1:3], whole[:, 2:])]:
            with pytest.raises(poptorch.Error, match=r"Inputs args\[0\] and args\[1\] share memory"):
                executor(left, right)
        assert_close([executor(whole[:, :2], whole[:, 2:])], [whole[:, 2:] * 2])
        assert whole[0].tolist() == [time + 1, time + 2, 2, 3]


def test_what_was_replaced_since_it_was_compiled():
    model = model_of(lambda self, x: poptorch.identity_loss(self.linear(self.sequence(x)), "sum"))
    model.sequence = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    executor = poptorch.trainingModel(model, make_options())
    from_device = [lambda: executor(x), executor.copyWeightsToHost]
    to_device = [executor.copyWeightsToDevice, lambda: executor.load_state_dict(model.state_dict())]
    ones, bytes_ = nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(3, 3).double())
    linear = "linear.weight of the model is another tensor than when"
    for owner, name, value, message, refused in [
        (model.sequence, "1", nn.GELU(), "1 of the model is another module", from_device + to_device),
        (model.linear, "weight", bytes_, linear, from_device + to_device),
        (model.linear, "weight", ones, linear, from_device),
    ]:
        executor(x)
        before = getattr(owner, name)
        setattr(owner, name, value)
        for call in refused:
            with pytest.raises(poptorch.Error, match=message):
                call()
        if refused != from_device:
            executor.detachFromDevice()
            with pytest.raises(poptorch.Error, match=message):
                executor.attachToDevice()
            executor.destroy()
            setattr(owner, name, before if name == "weight" else value)
    for call in (*to_device, *from_device):
        call()
    torch.testing.assert_close(infer(model, x), model(x).detach())


def test_copies_of_modules_take_their_places():
    """As libraries for PopTorch make them around evaluations and saved checkpoints."""

    def forward(self, x):
        return poptorch.identity_loss(self.linear(torch.tanh(self.inner(x))) ** 2, "mean")

    trained = TrainedAlike(
        model_of(forward, inner=nn.Sequential(nn.Linear(3, 3))), None, lambda p: torch.optim.Adam(p, 0.1)
    )
    model, executor = trained.model, trained.executor
    trained.call(x, tolerance=1e-6)
    model.inner = copy.deepcopy(model.inner)
    trained.call(x, tolerance=1e-6)
    trained.compare(1e-6)
    executor.detachFromDevice()
    model.inner = copy.deepcopy(model.inner)
    with torch.no_grad():
        for changed in (model, trained.plain.model):
            changed.inner[0].weight += 0.5
    executor.attachToDevice()
    trained.call(x, tolerance=1e-6)
    trained.compare(1e-6)


def test_weights_that_change_between_compiling_and_the_first_call():
    model = nn.Linear(3, 3)
    executor = poptorch.inferenceModel(model, make_options())
    executor.compile(x)
    with torch.no_grad():
        model.weight.fill_(2)
    torch.testing.assert_close(executor(x), model(x).detach())


class Part(nn.Module):
    """A loss of two networks; an optimizer trains one of them."""

    def __init__(self, first, second, sign):
        super().__init__()
        self.first, self.second, self.sign = first, second, sign

    def forward(self, x):
        with poptorch.Block("first", ipu_id=0):
            x = torch.tanh(self.first(x))
        with poptorch.Block("second", ipu_id=1):
            return poptorch.identity_loss(self.sign * (self.second(x) - 1) ** 2, "mean")


def test_two_models_that_share_networks_are_trained_in_turn():
    with jax.enable_x64(True):
        torch.manual_seed(0)
        first = nn.Linear(3, 4).double()
        second = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double()
        rows = x.double()

        def make(first, second):
            parts = [Part(first, second, -1.0), Part(first, second, 1.0)]
            return parts, [torch.optim.SGD(net.parameters(), 0.05, 0.9) for net in (first, second)]

        plain, plain_optimizers = make(*copy.deepcopy((first, second)))
        parts, optimizers = make(first, second)
        options = make_options(1, 2)
        executors = list(map(poptorch.trainingModel, parts, [options] * 2, optimizers))
        with pytest.raises(RuntimeError, match="has already been wrapped"):
            poptorch.trainingModel(parts[0], options)
        for turn in (0, 1, 1, 0):
            losses = executors[turn](rows)
            plain_optimizers[turn].zero_grad()
            expected = [plain[turn](part) for part in rows.split(2)]
            (sum(expected) / 2).backward()
            plain_optimizers[turn].step()
            torch.testing.assert_close(losses, torch.stack(expected).detach(), rtol=1e-12, atol=1e-14)
        for name, value in plain[0].state_dict().items():
            torch.testing.assert_close(parts[1].state_dict()[name], value, rtol=1e-12, atol=1e-13)


# Inputs


def test_inputs_of_inference_mode():
    model = nn.Linear(3, 2)
    with torch.inference_mode():
        given = torch.ones(8, 3)
        torch.testing.assert_close(infer(model, given), model(given))
        made_there = nn.Linear(3, 2)
    assert poptorch.inferenceModel(model, make_options(2))(given).shape == (8, 2)
    with pytest.raises(poptorch.Error, match="Parameter weight was made within torch.inference_mode"):
        infer(made_there, x)


def test_causal_attention():
    model = model_of(lambda self, x: functional.scaled_dot_product_attention(x, x, x, is_causal=True))
    torch.testing.assert_close(infer(model, x[None]), model(x[None]))


def test_equal_arguments_that_are_no_tensors():
    executor = poptorch.inferenceModel(model_of(lambda self, x, other, **more: x), make_options())
    for _twice in range(2):
        executor(x, np.array([1, np.nan]), b=float("nan"), a=x)
    with pytest.raises(poptorch.Error, match=r"Value mismatch for args\[1\]"):
        executor(x, np.array([1, 2.0]), b=float("nan"), a=x)
    with pytest.raises(poptorch.Error, match="Value mismatch for b"):
        executor(x, np.array([1, np.nan]), b=1.0, a=x)


# Losses, optimizers and random numbers


OPTIMIZERS = {
    **{name: {} for name in ("NAdam", "Adam", "Adafactor", "Adadelta", "Adamax", "RAdam", "Rprop")},
    "SGD": {"momentum": 0.9},
    "RMSprop": {"momentum": 0.5, "centered": True},
    "Adagrad": {"initial_accumulator_value": 0.1},
    "ASGD": {"t0": 2},
    "Muon": {"lr": 0.01},
}


@pytest.mark.parametrize(
    "name",
    ["NAdam", *(pytest.param(name, marks=pytest.mark.thorough) for name in OPTIMIZERS if name != "NAdam")],
)
def test_the_state_of_an_optimizer_of_torchs(name):
    """It is taken over from training on the CPU or a checkpoint, and is there after destroy()."""

    def loss(model, x):
        return ((model.linear(x) - 1) ** 2).mean()

    def make(model):
        parameters = [p for p in model.linear.parameters() if p.dim() == 2 or name != "Muon"]
        return getattr(torch.optim, name)(parameters, **{"lr": 0.1, **OPTIMIZERS[name]})

    model = model_of(lambda self, x: poptorch.identity_loss(loss(self, x), "mean"))
    plain = copy.deepcopy(model)
    optimizer, plain_optimizer = make(model), make(plain)
    watched = None

    def train(model, optimizer):
        optimizer.zero_grad()
        loss(model, x).backward()
        optimizer.step()

    for number in range(4):
        train(plain, plain_optimizer)
        if number in (0, 2):
            train(model, optimizer)
            continue
        if number == 3:  # as from a checkpoint
            saved, optimizer = copy.deepcopy(optimizer.state_dict()), make(model)
            optimizer.load_state_dict(saved)
        executor = poptorch.trainingModel(model, make_options(), optimizer)
        executor(x)
        watched = optimizer.state_dict()["state"]  # while the model has it
        if number == 1:
            executor.detachFromDevice()
        executor.destroy()
    torch.testing.assert_close(model.linear.weight, plain.linear.weight, rtol=1e-5, atol=1e-6)
    expected = plain_optimizer.state[plain.linear.weight]
    found = optimizer.state[model.linear.weight]
    assert found.keys() == {key for key, value in expected.items() if value is not None}
    assert watched[0].keys() == found.keys()
    for slot, value in found.items():
        torch.testing.assert_close(value, expected[slot], rtol=1e-4, atol=1e-6)


def test_what_has_no_effect_is_told(log):
    def draw(self, x):
        torch.manual_seed(3)
        return x + torch.rand(3, generator=torch.Generator().manual_seed(1))

    infer(model_of(draw), x)

    def in_block(self, x):
        with poptorch.Block("A"):
            return poptorch.identity_loss(self.linear(x), "sum")

    model = model_of(in_block)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *args: None)
    options = make_options(1, 3)
    options.setExecutionStrategy(poptorch.ShardedExecution("A", "Typo")).setPipelineSchedule("interleaved")
    poptorch.trainingModel(model, options, optimizer)(x[:3])
    poptorch.DataLoader(make_options(), torch.utils.data.TensorDataset(x), batch_size=40)
    for part in (
        "sets a random seed, which has no effect",
        "draws random numbers from a generator, which has no effect",
        "The optimizer has hooks of step",
        "setPipelineSchedule has no effect with poptorch.ShardedExecution",
        "The model opens no block 'Typo'",
        "the data set has 4 rows, fewer than the 40 of one call",
    ):
        assert sum(part in line for line in log) == 1, (part, log)


def test_hints_that_have_no_effect(log):
    def forward(self, x):
        x = poptorch.set_available_memory(self.linear(x), 0.5)
        x = poptorch.set_overlap_for_input(x, poptorch.OverlapMode.NoOverlap)
        x = poptorch.set_overlap_for_output(x, poptorch.OverlapMode.OverlapDeviceIterationLoop)
        return x, x + 1

    model = model_of(forward)
    found = infer(model, x)
    torch.testing.assert_close(found, tuple(t.detach() for t in model(x)))
    for name in ("set_available_memory", "set_overlap_for_output"):
        assert sum(f"poptorch.{name}" in line and "has no effect" in line for line in log) == 1
    assert not any("set_overlap_for_input" in line for line in log)
    with pytest.raises(poptorch.Error, match=r"You may only set available memory for torch.tensor values"):
        poptorch.set_available_memory(5, 0.5)
    with pytest.raises(ValueError, match="must be from 0 to 1; got 2"):
        poptorch.set_available_memory(x, 2)
    with pytest.raises(ValueError, match="mode must be one of OverlapMode.NoOverlap"):
        poptorch.set_overlap_for_input(x, "none")


@pytest.mark.filterwarnings("error")
def test_schedulers_of_rates_see_that_the_optimizer_is_used():
    model = model_of(lambda self, x: poptorch.identity_loss(self.linear(x), "sum"))
    plain = copy.deepcopy(model)
    optimizer, torchs = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain))
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in (optimizer, torchs)]
    executor = poptorch.trainingModel(model, make_options(), optimizer)
    for _call in range(2):
        executor(x)
        torchs.zero_grad()
        plain(x).backward()
        torchs.step()
        for scheduler in schedulers:
            scheduler.step()
        executor.setOptimizer(optimizer)
    torch.testing.assert_close(model.state_dict(), plain.state_dict())


def test_periods_of_anchored_values():
    options = make_options(1, 3)
    options.anchorTensor("e", "linear", poptorch.OutputMode.EveryN, 7)
    with pytest.raises(poptorch.Error, match="anchorTensor 'e': OutputMode.EveryN keeps .* every 7"):
        poptorch.trainingModel(model_of(lambda self, x: x), options)


# What is not there


def test_names_that_are_not_there():
    with pytest.raises(AttributeError, match="'fps': torch_cluster has it"):
        _ = poptorch.fps
    with pytest.raises(AttributeError, match="has no attribute 'nothing'$"):
        _ = poptorch.nothing


def test_names_without_an_effect_say_so_and_change_nothing(caplog, monkeypatch):
    monkeypatch.setattr(logs, "_said", set())
    assert poptorch.AnchorMode.Final is poptorch.OutputMode.Final

    @poptorch.autocasting.autocast()
    def forward(self, x):
        with poptorch.Attribute(__outline={"layer": "first"}):
            return poptorch.ops.nop(self.layer(x))

    options = make_options()
    options.Precision.autocastPolicy(poptorch.autocasting.Policy([torch.add])).autocastEnabled(True)
    options.Precision.autocastEnabled(False)
    options.Precision.halfFloatCasting(poptorch.HalfFloatCastingBehavior.HalfUpcastToFloat)
    options.Precision.halfFloatCasting(poptorch.HalfFloatCastingBehavior.FloatDowncastToHalf)
    with pytest.raises(AssertionError, match="must be given one of HalfFloatCastingBehavior.*; got 1"):
        options.Precision.halfFloatCasting(1)
    model = model_of(forward, layer=poptorch.SerializedLinear(3, 4, factor=2, bias=True))
    assert_close([poptorch.inferenceModel(model, options)(x)], [model(x).detach()])
    told = [record.getMessage() for record in caplog.records if "has no effect" in record.getMessage()]
    starts = ["autocasting.autocast", "Options().Precision.autocastPolicy"]
    starts += ["Options().Precision.autocastEnabled", "Options().Precision.halfFloatCasting", "Attribute"]
    assert [text.split(" has no effect")[0] for text in told] == [f"poptorch.{start}" for start in starts]


def test_models_that_cannot_be_wrapped():
    with warnings.catch_warnings(action="ignore"):  # torch.jit is deprecated
        scripted = nn.Sequential(nn.ReLU(), torch.jit.script(nn.Linear(3, 3)))
        traced = torch.jit.trace(nn.Linear(2, 2), torch.ones(2))
    for model, message in [
        (scripted, "its part 1 is scripted"),
        (traced, "it is scripted or traced"),
        (nn.Sequential(nn.LazyLinear(3)), "0.weight of the model has no shape yet"),
    ]:
        with pytest.raises(TypeError, match=message):
            poptorch.inferenceModel(model)


def test_a_generate_of_the_models_own_runs_on_the_host(log):
    class Generating(nn.Module):
        def generate(self, number):
            return [number] * 3

    assert poptorch.inferenceModel(Generating()).generate(2) == [2, 2, 2]
    assert log == ["generate of Generating is its own, and runs on the host."]
    assert not hasattr(poptorch.inferenceModel(nn.Linear(2, 2)), "generate")

"""Wrapped models: calls against plain torch, weights in sync, life and death."""

import concurrent.futures
import copy
import gc
import pickle
import weakref
from collections import OrderedDict
from datetime import timedelta

import pytest
import torch

import ipu_pipeline.poptorch as poptorch
from ipu_pipeline.engine import SearchedSchedule
from ipu_pipeline.poptorch import logs
from tests.support.compilations import compiled_in
from tests.support.poptorch_front import (
    TrainedAlike,
    assert_close,
    assert_same_state,
    make_batch,
    make_model,
    make_options,
    make_sgd,
    reference,
    relative_difference,
    second,
    seeded,
    through_file,
)


@pytest.fixture(scope="module")
def shared():
    """A model that was trained, and its wrapper; tests train on, and leave both at work."""
    model = make_model()
    executor = poptorch.trainingModel(
        model, make_options(2, 2), poptorch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    )
    executor(*make_batch())
    return model, executor


class Layers(torch.nn.Module):
    """Layers, each in a block of its own, on IPUs as given."""

    def __init__(self, ipus):
        super().__init__()
        layers = [torch.nn.Linear(3, 3) for _ipu in ipus]
        self.layers = torch.nn.ModuleList(
            poptorch.BeginBlock(layer, f"block {number}", ipu_id=ipu)
            for number, (layer, ipu) in enumerate(zip(layers, ipus, strict=True))
        )

    def forward(self, x, targets):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x, torch.nn.functional.mse_loss(x[:, 0], targets)


@pytest.mark.parametrize(
    ("schedule", "ipus"),
    [
        ("zero_bubble", (0, 1)),
        pytest.param("looped", (0, 1, 0, 1), marks=pytest.mark.thorough),
        pytest.param("zbv", (0, 1, 1, 0), marks=pytest.mark.thorough),
        pytest.param(SearchedSchedule(), (0, 1, 0, 1), marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_schedules_that_poptorch_does_not_have(schedule, ipus, log):
    """That of the strategy counts, and not that of the options."""
    strategy = poptorch.PipelinedExecution(poptorch.AutoStage.AutoIncrement, schedule=schedule)
    options = make_options(1, 4).setExecutionStrategy(strategy)
    if schedule == "zero_bubble":
        options.setPipelineSchedule("interleaved")
    trained = TrainedAlike(seeded(lambda: Layers(ipus)), options)
    trained.call(make_batch()[0], torch.linspace(-1, 1, 8))
    trained.compare()
    told = "no effect: the execution strategy has the schedule 'zero_bubble'" in " ".join(log)
    assert told == (schedule == "zero_bubble")


@pytest.mark.parametrize(
    ("schedule", "number"), [("interleaved", 3), pytest.param("v_half", 4, marks=pytest.mark.thorough)]
)
def test_stages_of_one_ipu_that_follow_each_other(schedule, number):
    """They are one, as in PopTorch, but with schedules that PopTorch does not have."""
    strategy = poptorch.PipelinedExecution(poptorch.AutoStage.AutoIncrement, schedule=schedule)
    options = make_options(1, 4).setExecutionStrategy(strategy)
    model = seeded(lambda: Layers((0, 1, 1, 0)))
    executor = poptorch.trainingModel(model, options, make_sgd(model.parameters()))
    executor.compile(torch.ones(8, 3), torch.linspace(-1, 1, 8))
    assert f"{number} stages on 2 IPUs" in str(executor.summary())


def test_inference_follows_training(shared):
    """By default it returns all outputs; training the last ones (`test_values_within_the_model`)."""
    model, executor = shared
    options = make_options(2, mode=poptorch.OutputMode.Default)
    inference = poptorch.inferenceModel(executor, options)  # which stands for its model
    assert inference.options.output_mode is poptorch.OutputMode.All
    x, _target = make_batch()
    assert inference.model is model
    first = inference(x)
    assert_close([first], [model(x)])
    executor(*make_batch(seed=1))
    before = inference(x)
    assert not torch.equal(before, first)
    expected = model.first.weight.detach().clone()
    inference.copyWeightsToHost()
    assert torch.equal(model.first.weight, expected), "its buffers do not undo training"
    with torch.no_grad():
        model.first.weight.zero_()
    assert torch.equal(inference(x), before), "changes on the host wait for copyWeightsToDevice"
    inference.copyWeightsToDevice()
    assert_close([inference(x)], [model(x)])


# Weights on the host.

LOOKS = {
    "state_dict": lambda model: model.state_dict()["first.weight"],
    "parameters": lambda model: next(model.parameters()).detach(),
    "data": lambda model: model.first.weight.data,
    "numpy": lambda model: torch.from_numpy(model.first.weight.detach().numpy()),
    "deepcopy": lambda model: copy.deepcopy(model).first.weight.detach(),
    "pickle": lambda model: pickle.loads(pickle.dumps(model)).first.weight.detach(),
    "submodule": lambda model: model.first(torch.eye(3)).T - model.first.bias[:, None],
}


def test_weights_come_to_the_host_when_someone_looks():
    """They were trained by the optimizer that is there by default."""
    model = make_model(ipus=(0, 0))
    plain = reference(model, lambda parameters: torch.optim.SGD(parameters, lr=0.01))
    kept = model.first.weight
    executor = poptorch.trainingModel(model, make_options())
    for seed, (name, look) in enumerate({"kept": lambda _model: kept * 1, **LOOKS}.items()):
        executor(*make_batch(seed=seed))
        plain.train(make_batch(seed=seed), 1, 1, second)
        difference = relative_difference(look(model), plain.model.first.weight)
        assert difference < 1e-5, (name, difference)


def test_what_is_saved_knows_nothing_of_wrapping(shared):
    model, executor = shared
    before = model.first.weight.detach().clone()
    executor(*make_batch())
    state = model.state_dict()
    assert not torch.equal(state["first.weight"], before)
    assert {type(tensor) for tensor in state.values()} == {torch.Tensor}
    assert_close(through_file(state).values(), state.values(), 0)
    text = pickle.dumps(model)
    assert b"Watched" not in text
    again = pickle.loads(text)
    assert type(again.first.weight) is torch.nn.Parameter
    assert again.destroy() is None
    copied = copy.deepcopy(model)
    assert type(copied.first.weight) is torch.nn.Parameter
    poptorch.trainingModel(copied, make_options())  # it is not wrapped yet
    assert repr(model.first.weight) == repr(again.first.weight)


def test_outputs_can_be_saved(shared):
    _model, executor = shared
    output = executor(*make_batch())[0]
    assert torch.equal(through_file(output), output)
    with pytest.raises(poptorch.Error, match=r"backward\(\) cannot be called explicitly on outputs"):
        output.sum().backward() if output.requires_grad else output.backward()
    for copies in (copy.copy, copy.deepcopy, pickle.dumps):  # one would share what is on the devices
        with pytest.raises(TypeError, match="That works with the user's model, which is its attribute"):
            copies(executor)


def test_explicit_copies(shared):
    model, executor = shared
    executor(*make_batch())
    assert executor.copyWeightsToHostIfNeeded() is True
    assert executor.copyWeightsToHostIfNeeded() is False
    plain = copy.deepcopy(model)
    x, _target = make_batch()
    inference = poptorch.inferenceModel(model, make_options(2))
    inference(x)
    with torch.no_grad():
        for parameter in [*model.parameters(), *plain.parameters()]:
            parameter.mul_(0.5)
    executor.copyWeightsToDevice()
    assert_close([inference(x)], [plain(x)])  # what trains gives its weights to those that do not
    executor.copyWeightsToHost()
    assert_same_state(model, plain)
    executor.load_state_dict({name: tensor * 2 for name, tensor in model.state_dict().items()})
    executor(*make_batch())
    assert executor.copyWeightsToHostIfNeeded() is True
    executor.detachFromDevice()
    executor.load_state_dict(plain.state_dict())
    assert_close([inference(x)], [plain(x)])


# Life and death.


def test_momentum_survives_detaching():
    trained = TrainedAlike(make_model(ipus=(0, 0)))
    executor = trained.executor
    for seed in range(3):
        trained.call(*make_batch(seed=seed))
        executor.detachFromDevice()
        assert not executor.isAttachedToDevice()
        assert executor.isCompiled()
        trained.compare()
        for call in (executor.detachFromDevice, executor.copyWeightsToHost):
            with pytest.raises(poptorch.Error, match="Device is not attached"):
                call()
        if seed % 2:  # otherwise the next call does
            executor.attachToDevice()
            with pytest.raises(poptorch.Error, match="Device is already attached"):
                executor.attachToDevice()
    for _twice in range(2):
        executor.destroy()
    trained.call(*make_batch())
    trained.compare()


def test_a_model_is_wrapped_for_training_once():
    trained = TrainedAlike(make_model(ipus=(0, 0)))
    model, executor = trained.model, trained.executor
    trained.call(*make_batch())
    with pytest.raises(RuntimeError, match="Model has already been wrapped in 'poptorch.trainingModel'"):
        poptorch.trainingModel(model, make_options())
    inference = poptorch.inferenceModel(model, make_options())
    inference(make_batch()[0])
    model.destroy()
    assert not executor.isCompiled()
    assert not inference.isCompiled()
    assert not hasattr(model, "destroy")
    assert type(model.first.weight) is torch.nn.Parameter
    trained.compare()
    with pytest.raises(poptorch.Error, match="Model has not been compiled or has been destroyed"):
        executor.copyWeightsToDevice()
    executor(*make_batch())  # which wraps it again
    with pytest.raises(RuntimeError, match="has already been wrapped"):
        poptorch.trainingModel(model, make_options())
    model.destroy()
    other = poptorch.trainingModel(model, make_options())
    with pytest.raises(RuntimeError, match="has already been wrapped"):
        executor(*make_batch())
    assert not other.isCompiled()


def test_a_wrapper_that_is_dropped_frees_its_model():
    model = make_model(ipus=(0, 0))
    executor = poptorch.trainingModel(model, make_options())
    executor(*make_batch())
    before = model.first.weight.detach().clone()
    executor(*make_batch())
    del executor
    other = poptorch.trainingModel(model, make_options())
    after = model.first.weight.detach().clone()
    assert not torch.equal(before, after), "trained weights are not lost with it"
    reference_to_it = weakref.ref(model)
    del model, other
    gc.collect()
    assert reference_to_it() is None


def test_compile_runs_nothing(shared):
    model = make_model()
    before = copy.deepcopy(model.state_dict())
    called, early = [], "Please compile the model before obtaining compilation time"
    executor = poptorch.trainingModel(model, make_options().showCompilationProgressBar(True))
    first = poptorch.registerPreCompileHook(lambda: called.append(executor.isCompiled()))
    last = poptorch.registerPostCompileHook(lambda: called.append(executor.isCompiled()))
    try:
        with pytest.raises(poptorch.Error, match=early):
            executor.compilationTime()
        executor.compile(*make_batch())
    finally:
        first.remove()
        last.remove()
    assert called == [False, True]
    assert executor.compilationTime() > timedelta(0)
    assert_close(model.state_dict().values(), before.values(), 0)
    executor(*make_batch())
    assert called == [False, True]
    with pytest.raises(poptorch.Error, match="Please set showCompilationProgressBar"):
        shared[1].compilationTime()
    with pytest.raises(RuntimeError, match="Pre-compile hook must be callable"):
        poptorch.registerPreCompileHook(5)


def test_compiled_once(caplog):
    model = make_model()
    executor = poptorch.trainingModel(model, make_options(2, 2), make_sgd(model.parameters()))
    executor.compile(*make_batch())

    def run():
        executor(*make_batch())
        model.state_dict()
        executor(*make_batch())
        executor.setOptimizer(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
        executor(*make_batch())

    assert compiled_in(run, caplog) == []


# Modes, times, seeds.


def test_the_mode_of_the_time_of_wrapping(log):
    class Dropping(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(3, 3)
            self.drop = torch.nn.Dropout(0.5)

        def forward(self, x):
            return self.drop(self.linear(x)), torch.ones(1) if self.training else torch.zeros(1)

    model = seeded(Dropping)
    model.eval()
    evaluating = poptorch.inferenceModel(model, make_options())
    assert log == []
    model.train()
    training = poptorch.inferenceModel(model, make_options())
    x = torch.ones(64, 3)
    dropped, flag = training(x)
    assert sum("in training mode when it was wrapped by inferenceModel" in line for line in log) == 1
    assert model.training
    assert 0.3 < float((dropped == 0).double().mean()) < 0.7
    assert float(flag) == 1
    kept, flag = evaluating(x)
    assert_close([kept], [model.linear(x)])
    assert float(flag) == 0
    assert not torch.equal(training(x)[0], dropped), "each call draws anew"


def test_seeds():
    def run(seed, torchs):
        options = make_options()
        if seed is not None:
            options.randomSeed(seed)
        torch.manual_seed(torchs)
        executor = poptorch.inferenceModel(torch.nn.Dropout(0.5), options)
        return executor, executor(torch.ones(1000))

    executor, first = run(3, 7)
    assert torch.equal(first, run(3, 8)[1])
    other = run(None, 7)[1]
    assert not torch.equal(first, other)
    assert torch.equal(other, run(None, 7)[1])
    state = executor.rng_state
    again = executor(torch.ones(1000))
    assert not torch.equal(first, again)
    executor.rng_state = state
    assert torch.equal(executor(torch.ones(1000)), again)
    with pytest.raises(ValueError, match="rng_state must have the numbers that it was read with"):
        executor.rng_state = [1]


def test_attributes_of_the_model(shared):
    model, executor = shared
    assert executor.first is model.first
    assert executor.training is True
    assert "Linear(in_features=3, out_features=5, bias=True)" in repr(executor)
    with pytest.raises(AttributeError, match="nothing"):
        executor.nothing  # noqa: B018


def test_values_within_the_model():
    model = make_model()
    options = make_options(2, 2, mode=poptorch.OutputMode.Default)
    options.anchorTensor("hidden", "tanh", poptorch.OutputMode.All)
    options.anchorTensor("sum", "second/linear", poptorch.OutputMode.Sum)
    plain = copy.deepcopy(model)
    x, target = make_batch()
    executor = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.0))
    assert executor.options.output_mode is poptorch.OutputMode.Final
    with pytest.raises(AssertionError, match="Model has not been compiled"):
        executor.getTensorNames()
    with pytest.raises(AssertionError, match="Run the model before asking"):
        executor.getAnchoredTensor("hidden")
    logits, _loss = executor(x, target)
    assert {"first.weight", "second/linear", "tanh"} <= set(executor.getTensorNames())
    hidden = torch.tanh(plain.first(x)).detach()
    made = plain.second(hidden).detach()
    anchored = [executor.getAnchoredTensor("hidden"), executor.getAnchoredTensor("sum"), logits]
    assert_close(anchored, [hidden, made.reshape(4, 2, 3).sum(0), made[-2:]])
    with pytest.raises(AssertionError, match="No tensor is anchored as 'nobody'"):
        executor.getAnchoredTensor("nobody")


def test_what_cannot_be_captured():
    x, target = make_batch()
    model = make_model()
    anchored, others = make_options().anchorTensor("last", "mse_loss"), make_sgd(make_model().parameters())
    for options, optimizer, message in [
        (anchored, None, "anchorTensor names 'mse_loss', which is not a value of the model"),
        (make_options(), others, "There is nothing to train: the loss depends on model/first.bias"),
    ]:
        with pytest.raises(poptorch.Error, match=message):
            poptorch.trainingModel(copy.deepcopy(model), options, optimizer)(x, target)


def test_numbers_that_are_not_finite():
    model = make_model()
    before = copy.deepcopy(model.state_dict())
    options = make_options(1, 2)
    options.Precision.enableFloatingPointExceptions(True)
    executor = poptorch.trainingModel(model, options)
    x, target = make_batch()
    with pytest.raises(poptorch.Error, match="A floating-point exception: "):
        executor(x * torch.inf, target)
    assert_close(model.state_dict().values(), before.values(), 0)
    executor(x, target)
    assert not torch.equal(model.first.weight, before["first.weight"])


def test_a_profile(tmp_path):
    options = make_options().enableProfiling(str(tmp_path)).modelName("mine")
    executor = poptorch.inferenceModel(make_model(), options)
    for _call in range(2):
        executor(make_batch()[0])
    (file,) = tmp_path.glob("mine/**/*.xplane.pb")
    assert file.stat().st_size > 0


def test_synthetic_data(monkeypatch):
    """Inputs are looked at for their shapes only."""
    model = make_model(ipus=(0, 0))
    x, _target = make_batch()
    zeros = model(torch.zeros_like(x)).detach()
    for word in ("zeros", "random"):
        monkeypatch.setenv("IPU_PIPELINE_SYNTHETIC_DATA", word)
        found = poptorch.inferenceModel(model, make_options(2))(x * torch.nan)
        assert torch.isfinite(found).all()
        assert torch.allclose(found, zeros, atol=1e-6) == (word == "zeros")
    monkeypatch.delenv("IPU_PIPELINE_SYNTHETIC_DATA")
    training = poptorch.trainingModel(model, make_options().enableSyntheticData(True))
    plain = reference(model, lambda parameters: torch.optim.SGD(parameters, lr=0.01))
    training(x * torch.nan, x)
    plain.train((torch.zeros(8, 3), torch.zeros(8, 3)), 1, 1, second)
    assert_same_state(model, plain.model)


# What is refused.


def test_wrong_wrapping():
    model = make_model()
    with pytest.raises(poptorch.Error, match="Invalid type: 'options' is of type"):
        poptorch.trainingModel(model, {"deviceIterations": 2})
    with pytest.raises(TypeError, match="model must be a torch.nn.Module"):
        poptorch.inferenceModel(lambda x: x)
    with pytest.raises(TypeError, match="Unsupported optimizer type"):
        poptorch.trainingModel(model, make_options(), torch.optim.LBFGS(model.parameters()))
    message = r"gradientAccumulation to 1.*Use poptorch.Options\(\).deviceIterations"
    with pytest.raises(poptorch.Error, match=message):
        poptorch.inferenceModel(model, make_options(1, 2))
    with pytest.raises(poptorch.Error, match=r"running a poptorch.inferenceModel\(\)\.$"):
        poptorch.inferenceModel(model, make_options(1, 2, poptorch.ShardedExecution()))
    with pytest.raises(RuntimeError, match="Optimizers can only be updated for training models"):
        poptorch.inferenceModel(model, make_options()).setOptimizer(make_sgd(model.parameters()))
    options = make_options()
    executor = poptorch.trainingModel(model, options)  # none of these wrapped it
    for frozen in (options, executor.options):
        with pytest.raises(AttributeError, match="Can't modify frozen Options"):
            frozen.deviceIterations(2)
    options.clone().deviceIterations(2)


def test_other_arguments_than_the_first(shared):
    _model, executor = shared
    x, target = make_batch()
    wrong, sizes = poptorch.Error, r"expected torch.Size\(\[8, 3\]\) but got torch.Size\(\[4, 3\]\)"
    kinds = "expected <class 'torch.Tensor'> but got <class 'int'>"
    dtypes = "expected torch.float32 but got torch.int32"
    for args, kwargs, error, message in [
        ((x[:4], target), {}, wrong, f"Shape mismatch for x: {sizes}"),
        ((x.int(), target), {}, wrong, f"Data type mismatch for x: {dtypes}"),
        ((x,), {}, wrong, "Number of positional arguments mismatch: expected 2 but got 1"),
        ((x, 5), {}, wrong, f"Type mismatch for target: {kinds}"),
        ((x,), {"target": target}, wrong, "Number of positional arguments mismatch"),
        ((x,), {"nobody": target}, AssertionError, "nobody is not a valid parameter"),
        ((x, target, x), {}, AssertionError, "Too many arguments provided"),
        ((x,), {"x": target}, AssertionError, "Parameter x was passed more than once"),
        ((), {"target": target}, wrong, "Mandatory parameter x missing"),
    ]:
        with pytest.raises(error, match=message):
            executor(*args, **kwargs)
    executor(x, target)  # none of these did harm


def test_dicts_whose_keys_come_in_another_order():
    class Subtracts(torch.nn.Module):
        def forward(self, batch, **rest):
            return batch["a"] - batch["b"][0], rest["z"]["c"] - rest["y"]

    a, b = make_batch()
    executor = poptorch.inferenceModel(Subtracts(), make_options())
    executor({"a": a, "b": (b, 3)}, y=a, z={"c": b, "d": 2})
    assert_close(executor({"b": (b, 3), "a": a}, z={"d": 2, "c": b}, y=a), [a - b, b - a])
    with pytest.raises(poptorch.Error, match="Keys mismatch for batch"):
        executor({"b": (b, 3), "c": a}, y=a, z={"c": b, "d": 2})


def test_batches_that_cannot_be_cut():
    executor = poptorch.inferenceModel(make_model(), make_options(4))
    message = r"Invalid batch dimension: In the input x .* \(6\) must be a multiple"
    with pytest.raises(AssertionError, match=message):
        executor(torch.ones(6, 3))
    with pytest.raises(AssertionError, match="Invalid batch dimension"):
        executor(torch.tensor(1.0))
    assert not executor.isCompiled()


def test_two_threads_take_turns():
    trained = TrainedAlike(make_model(ipus=(0, 0)))
    inference = poptorch.inferenceModel(trained.model, make_options())
    trained.executor.compile(*make_batch())

    def train():
        trained.executor(*make_batch())

    calls = (train, train, lambda: inference(make_batch()[0]), trained.model.state_dict)
    with concurrent.futures.ThreadPoolExecutor(len(calls)) as threads:
        for future in [threads.submit(lambda call: [call() for _time in range(5)], c) for c in calls]:
            future.result()
    for _number in range(10):
        trained.plain.train(make_batch(), 1, 1, second)
    trained.compare()


# What models share.


class WithLoss(torch.nn.Sequential):
    """Models one after the other, and a loss."""

    def forward(self, x, target):
        x = super().forward(x)
        return x, torch.nn.functional.mse_loss(x, target)


def test_models_that_are_joined_after_they_were_wrapped():
    models = make_model(), seeded(lambda: torch.nn.Linear(3, 3), 1)
    x, _target = make_batch()
    inferences = [poptorch.inferenceModel(model, make_options()) for model in models]
    for inference in inferences:
        inference(x)
    both = WithLoss(*models)
    training = poptorch.trainingModel(both, make_options())
    training(*make_batch())
    for inference, model in zip(inferences, models, strict=True):
        assert_close([inference(x)], [model(x).detach()])
    with pytest.raises(RuntimeError, match="has already been wrapped"):
        poptorch.trainingModel(both, make_options())


@pytest.mark.parametrize("make", [torch.optim.NAdam, poptorch.optim.Adam])
def test_one_optimizer_of_models_that_share_a_layer(make, log):
    """The models hand the state to each other by parameters, whatever their names, as in torch.

    Counts are each parameter's. A new optimizer goes on with the state, whichever model has it.
    """
    body = torch.nn.Linear(2, 2)
    heads = [seeded(lambda: torch.nn.Linear(2, 1), number) for number in range(2)]
    models = [WithLoss(OrderedDict({"body": body, f"head{n}": head})) for n, head in enumerate(heads)]
    plain = copy.deepcopy(models)
    parameters = [*torch.nn.ModuleList(models).parameters()]
    optimizer = make(parameters, lr=0.1)
    reference = getattr(torch.optim, make.__name__)(torch.nn.ModuleList(plain).parameters(), lr=0.1)
    wrapped = [poptorch.trainingModel(model, make_options(), optimizer) for model in models]
    batch = torch.tensor([[1.0, -2.0]]), torch.tensor([[0.5]])

    def step(wrapped, plain):
        wrapped(*batch)
        reference.zero_grad()
        plain(*batch)[1].backward()
        reference.step()

    for call, number in enumerate((0, 1, 0, 0, 1, 0)):
        if call == 2:
            reference.param_groups[0]["lr"] = 0.05
            optimizer = make(parameters, lr=0.05)
        if call in (2, 4):
            wrapped[number].setOptimizer(optimizer)
        step(wrapped[number], plain[number])
    state = optimizer.state_dict()
    if make is torch.optim.NAdam:
        assert [entry["step"] for entry in state["state"].values()] == [6, 6, 4, 4, 2, 2]
    else:
        steps = {name: value for name, value in state["ipu_state"].items() if name.startswith("step")}
        assert [*steps.values()] == [6, 6, 4, 4, 2, 2]
    for number in (1, 0):
        wrapped[number].destroy()
    for layers, of_plain in (
        ([body, heads[1]], plain[1]),
        ([heads[0]], WithLoss(plain[0].head0)),  # which has the first one's name for another parameter
    ):
        other = poptorch.trainingModel(WithLoss(*layers), make_options(), optimizer)
        step(other, of_plain)
        other.destroy()
    for model, other in zip(models, plain, strict=True):
        assert_same_state(model, other)
    if make is poptorch.optim.Adam:
        steps = {
            name: value for name, value in optimizer.state_dict()["ipu_state"].items() if "step" in name
        }
        assert steps == {
            "step___model/0.weight#0": 7,
            "step___model/0.bias#1": 7,
            "step___model/0.weight#2": 5,
            "step___model/0.bias#3": 5,
            "step___model/1.weight": 3,
            "step___model/1.bias": 3,
        }
        again = make(parameters)
        for _number in range(2):  # the second time, the parameters and their names are known
            again.load_state_dict(optimizer.state_dict())
            names = {f"model/0.{name}": parameter for name, parameter in heads[0].named_parameters()}
            assert again.device_state.take(names, parameters).ipu_state["step___model/0.bias"] == 5
    assert {*log} == {
        f"The optimizer has {number} parameters that are not the model's. They are not trained."
        for number in (2, 4)
    }


def test_a_loaded_state_replaces_the_state(log):
    """What it lacks starts from nothing, as in torch, and what is of no parameter is forgotten."""
    model = seeded(lambda: WithLoss(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)))
    plain = copy.deepcopy(model)
    optimizer = poptorch.optim.Adam(model.parameters(), lr=0.1)
    reference = torch.optim.Adam(plain.parameters(), lr=0.1)
    fresh = optimizer.state_dict(), reference.state_dict()
    batch = torch.tensor([[1.0, -2.0]]), torch.tensor([[0.5]])

    def step():
        executor(*batch)
        reference.zero_grad()
        plain(*batch)[1].backward()
        reference.step()

    executor = poptorch.trainingModel(model, make_options(), optimizer)
    step()
    state, of_plain = copy.deepcopy((optimizer.state_dict(), reference.state_dict()))
    state["ipu_state"] = {k: v for k, v in state["ipu_state"].items() if "model/0" in k}
    of_plain["state"] = {number: of_plain["state"][number] for number in (0, 1)}
    state["ipu_state"]["exp_avg___model/gone"] = torch.zeros(1)
    for loaded, new in ((state, of_plain), optimizer), (fresh, poptorch.optim.Adam(optimizer.param_groups)):
        step()
        optimizer = new
        optimizer.load_state_dict(loaded[0])
        reference.load_state_dict(loaded[1])
        executor.setOptimizer(optimizer)
        step()
    assert not [key for key in optimizer.state_dict()["ipu_state"] if "gone" in key]
    executor.destroy()
    assert log == ["The optimizer's state has what is not needed, and is ignored: exp_avg___model/gone."]
    optimizer.load_state_dict(optimizer.state_dict())
    model[0].requires_grad_(False)
    plain[0].requires_grad_(False)
    executor = poptorch.trainingModel(model, make_options(), optimizer)
    step()
    executor.destroy()
    assert_same_state(model, plain)
    assert optimizer.state_dict()["ipu_state"]["step___model/0.bias"] == 1
    assert len(log) == 1


def test_parameters_of_other_classes():
    class Own(torch.nn.Parameter):
        pass

    model = make_model(ipus=(0, 0))
    model.first.weight = Own(model.first.weight.detach())
    executor = poptorch.trainingModel(model, make_options(), make_sgd(model.parameters()))
    before = model.first.weight.detach().clone()
    executor(*make_batch())
    assert not torch.equal(model.first.weight.detach(), before)
    model.destroy()
    assert type(model.first.weight) is Own


def test_more_that_is_told(shared, caplog, monkeypatch):
    monkeypatch.setattr(logs, "_said", set())
    model, executor = shared
    model.first.weight.requires_grad_(False)
    executor(*make_batch())
    assert "requires_grad of first.weight has changed since the model was compiled" in caplog.text
    model.first.weight.requires_grad_(True)
    assert executor.eval() is model
    executor.train()
    assert "On the devices its modules keep the modes" in caplog.text
    with pytest.raises(TypeError, match="Unsupported optimizer type"):
        poptorch.trainingModel(make_model(), make_options()).setOptimizer(5)
    options = make_options(2).outputMode(poptorch.OutputMode.EveryN, 3)
    with pytest.raises(poptorch.Error, match="every 3 micro-batches, but a call has 2"):
        poptorch.inferenceModel(model, options)
    other = make_model()
    optimizer = torch.optim.SGD([*other.parameters(), torch.nn.Parameter(torch.ones(1))], lr=0.1)
    poptorch.trainingModel(other, make_options(), optimizer)(*make_batch())
    assert "The optimizer has 1 parameters that are not the model's" in caplog.text

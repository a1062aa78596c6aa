"""Models that are exported and loaded: training goes on as if it had never been interrupted.

Listings 25, 26 and 27 of PopTorch's user guide are here.
"""

import collections
import concurrent.futures
import copy
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from torch import nn

import ipu_pipeline.poptorch as poptorch
from ipu_pipeline.engine import schedules
from ipu_pipeline.poptorch.files import model_files
from ipu_pipeline.poptorch.files.value_json import decode_options, encode_options
from ipu_pipeline.poptorch.lowering import registry
from tests.poptorch.test_poptorch_structures import Box, BoxParser, Pair
from tests.support import lowered
from tests.support.poptorch_front import (
    TwoLayers,
    assert_close,
    assert_same_state,
    join,
    make_batch,
    make_options,
    reference,
    second,
    seeded,
)

x, target = make_batch(8)


class Everything(nn.Module):
    """Dropout, batch norm, a buffer that is not saved, tied and unused weights, a tensor as attribute."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.second = nn.Linear(4, 3)
        self.third = nn.Linear(4, 3)
        self.third.weight = self.second.weight
        self.unused = nn.Linear(2, 2)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("hidden", torch.full((3,), 0.25), persistent=False)
        self.shift = torch.full((3,), 0.5)

    def forward(self, x, target, factor=2):
        with poptorch.Block("first", ipu_id=0):
            self.calls += 1
            x = self.drop(self.norm(self.first(x)))
        with poptorch.Block("second", ipu_id=1):
            x = self.second(x) + self.third(x) * factor + self.hidden + self.shift
            return {"x": x, "both": (x * 2, "text")}, nn.functional.mse_loss(x, target)


def assert_goes_on(executor, loaded, *inputs):
    """Both do the same, bit for bit."""
    for _call in range(2):
        assert_equal_values(loaded(*inputs), executor(*inputs))
    assert_equal_values(loaded.model.state_dict(), executor.model.state_dict())


def assert_equal_values(actual, expected):
    assert type(actual) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert torch.equal(actual, expected)
        assert actual.dtype == expected.dtype
    elif isinstance(expected, dict):
        assert list(actual) == list(expected)
        assert_equal_values(list(actual.values()), list(expected.values()))
    elif isinstance(expected, (tuple, list)):
        for one, other in zip(actual, expected, strict=True):
            assert_equal_values(one, other)
    else:
        assert actual == expected


def for_training(model, options=None):
    return poptorch.trainingModel(
        model, options or make_options(), torch.optim.SGD(model.parameters(), lr=0.1)
    )


OPTIMIZERS = {
    "ours": lambda p: poptorch.optim.AdamW(p, lr=0.05, loss_scaling=4.0, max_grad_norm=1.0),
    "torch's": lambda p: torch.optim.SGD(p, lr=0.002, momentum=0.9, nesterov=True),
    "torch's alone": lambda p: torch.optim.NAdam(p, lr=0.05),
    "combined": lambda p: poptorch.optim.SGD(p, lr=0.002, momentum=0.9, use_combined_accum=True),
    "LAMB": lambda p: poptorch.optim.LAMB(p, lr=0.05),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n.startswith("torch's") else pytest.mark.thorough) for n in OPTIMIZERS],
)
def test_training_goes_on(tmp_path, name):
    file = tmp_path / "model.poptorch"
    model = seeded(Everything)
    optimizer = OPTIMIZERS[name](model.parameters())
    training = poptorch.trainingModel(model, make_options(1, 2, random_seed=7), optimizer)
    training(x, target, factor=3)
    training.detachFromDevice()
    training.save(file)
    training.attachToDevice()
    for group in optimizer.param_groups:
        group["lr"] = 5.0  # of later; the file has the former one
    loaded = poptorch.load(file)
    assert type(loaded.model).__name__ != "Everything"
    assert loaded.options == training.options
    assert loaded.rng_state == training.rng_state
    assert loaded.getTensorNames() == training.getTensorNames()
    for _call in range(2):
        assert_equal_values(loaded(x, target, factor=3), training(x, target, factor=3))
    assert_equal_values(loaded.model.state_dict(), model.state_dict())
    assert model.calls == 6
    assert all(bool(tensor.isfinite().all()) for tensor in model.state_dict().values())
    assert torch.equal(loaded.model.hidden, model.hidden)
    assert loaded.model.third.weight is loaded.model.second.weight
    training.destroy()
    loaded.destroy()
    key = "ipu_state" if isinstance(optimizer, poptorch.optim.Optimizer) else "state"
    expected, state = (one.state_dict()[key] for one in (optimizer, loaded._optimizer))
    assert len(expected) > 5
    assert_equal_values(state, expected)


def test_listing_25_exported_offline_and_loaded(tmp_path):
    file = tmp_path / "training.poptorch"
    model = seeded(TwoLayers)
    plain = reference(model, lambda p: torch.optim.SGD(p, lr=0.1))
    options = make_options(2, 2).useOfflineIpuTarget()
    exporting = poptorch.trainingModel(model, options, poptorch.optim.SGD(model.parameters(), lr=0.1))
    exporting.compileAndExport(str(file), x, target)
    offline = r"(?s)Trying to run a model on an offline device \(Conn.*useOfflineIpuTarget.*poptorch.load"
    with pytest.raises(AssertionError, match=offline):
        exporting(x, target)
    with pytest.raises(
        AssertionError, match=r"Trying to attach to an offline device \(ConnectionType.Never"
    ):
        exporting.attachToDevice()
    with torch.inference_mode():
        loaded = poptorch.load(str(file))
    assert loaded.isCompiled()
    assert loaded.isAttachedToDevice()
    assert_close(loaded(x, target), join(plain.train((x, target), 2, 2, second)), 1e-5)
    loaded.copyWeightsToHost()
    assert_same_state(loaded.model, plain.model)


def test_listing_25_options_edited(tmp_path):
    file = tmp_path / "model"
    model = seeded(TwoLayers)
    poptorch.inferenceModel(model, make_options()).compileAndExport(file, x[:2])
    seen = []

    def edit(options):
        seen.append(options.device_iterations)
        options.deviceIterations(4).useIpuId(2).setExecutionStrategy(
            poptorch.PipelinedExecution(poptorch.Stage("second").ipu(1), poptorch.Stage("first").ipu(0))
        )

    loaded = poptorch.load(file, edit_opts_fn=edit)
    assert seen == [1]
    assert loaded.options.ipu_id == 2
    assert_close([loaded(x)], [model(x)], 1e-5)
    offline = poptorch.load(file, lambda options: options.useOfflineIpuTarget())
    with pytest.raises(AssertionError, match="offline device"):
        offline(x[:2])
    offline.save(tmp_path / "again")
    assert torch.equal(poptorch.load(tmp_path / "again")(x[:2]), loaded(x)[:2])
    with pytest.raises(TypeError, match="edit_opts_fn must be a function"):
        poptorch.load(file, "edit")


def test_listing_26_without_the_model(tmp_path):
    file = tmp_path / "executable"
    model = seeded(TwoLayers)
    plain = copy.deepcopy(model)
    first = for_training(model, make_options(2, 2))
    first.compileAndExport(file, x, target, export_model=False)
    expected = first(x, target)
    with pytest.raises(AssertionError, match="export_model=False"):
        poptorch.load(file)
    again = for_training(plain, make_options(2, 2))
    again.loadExecutable(file)
    assert again.isCompiled()
    assert_equal_values(again(x, target), expected)
    assert_goes_on(first, again, x, target)
    with pytest.raises(poptorch.Error, match="compiled already"):
        again.loadExecutable(file)
    again.destroy()
    with torch.inference_mode():
        again.loadExecutable(file)
    assert_goes_on(first, again, x, target)


def test_listing_27_training_and_validation_apart(tmp_path):
    model = seeded(lambda: TwoLayers(ipus=(0, 0)))
    options = make_options().useOfflineIpuTarget()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
    poptorch.trainingModel(model, options, optimizer).compileAndExport(tmp_path / "training", x, target)
    poptorch.inferenceModel(model, options).compileAndExport(tmp_path / "validation", x)
    # Weights copied by hand.
    training, validation = poptorch.load(tmp_path / "training"), poptorch.load(tmp_path / "validation")
    before = validation(x)
    training(x, target)
    validation.model.load_state_dict(training.model.state_dict())
    validation.copyWeightsToDevice()
    by_hand = validation(x)
    assert not torch.allclose(by_hand, before)
    # The validation of the model that trains.
    validation = poptorch.inferenceModel(training, make_options())
    validation.loadExecutable(tmp_path / "validation")
    assert torch.equal(validation(x), by_hand)
    training(x, target)
    assert not torch.allclose(validation(x), by_hand)
    # On the host, what was captured.
    assert_close([training.model(x, target)[0]], [validation(x)], 1e-5)


class Other(TwoLayers):
    def forward(self, x, y=None):
        return super().forward(x, y)


class Renamed(TwoLayers):
    def __init__(self):
        super().__init__()
        self.other, self.first = self.first, None


@pytest.fixture(scope="module")
def for_inference(tmp_path_factory):
    """A file of a model for inference."""
    file = tmp_path_factory.mktemp("exported") / "file"
    poptorch.inferenceModel(seeded(TwoLayers), make_options()).compileAndExport(file, x)
    return file


def test_an_executable_of_another_model(for_inference):
    wide = r"first.weight is torch.float32 of shape \(5, 3\); this model's is .*\(6, 3\)"
    for model, message in [
        (Other(), r"forward\(x, target=...*this model has forward\(x, y=None\)"),
        (TwoLayers(hidden=6), wide),
        (TwoLayers().half(), "this model's is torch.float16"),
        (Renamed(), "a model with a parameter first.weight, which this one does not have"),
    ]:
        other = poptorch.inferenceModel(model, make_options())
        with pytest.raises(poptorch.Error, match=message):
            other.loadExecutable(for_inference)
        assert not other.isCompiled()


def test_a_graph_for_another_use(tmp_path, for_inference):
    training = poptorch.trainingModel(seeded(TwoLayers), make_options())
    with pytest.raises(poptorch.Error, match="captured for inference, which cannot be used for training"):
        training.loadExecutable(for_inference)
    training.compileAndExport(tmp_path / "training", x, target)
    again = poptorch.inferenceModel(poptorch.load(tmp_path / "training"), make_options())
    with pytest.raises(poptorch.Error, match="captured for training, which cannot be used for inference"):
        again(x, target)


@dataclasses.dataclass
class Result:
    logits: torch.Tensor
    parts: list


@dataclasses.dataclass
class Fields(collections.OrderedDict):
    """A dict of its fields that are not None, as the outputs of transformers' models are."""

    logits: torch.Tensor = None
    loss: torch.Tensor = None

    def __post_init__(self):
        self.update({name: value for name, value in vars(self).items() if value is not None})

    def __reduce__(self):
        return Fields, (self.logits, self.loss)

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        setattr(self, key, value)


class Structured(nn.Module):
    def forward(self, pair, **more):
        ordered = collections.OrderedDict(a=pair.left * pair.right, b=(more["shift"], torch.Size([1])))
        parts = [ordered, Pair(pair.left, 3), None, 1.5, b"x", {1: True}, Fields(pair.left * 2)]
        return Result(pair.left + more["shift"], parts)


def test_structures_come_back(tmp_path):
    executor = poptorch.inferenceModel(Structured(), make_options())
    given = Pair(x, 2), {"shift": target}
    expected = executor(given[0], **given[1])
    executor.save(tmp_path / "file")
    actual = poptorch.load(tmp_path / "file")(given[0], **given[1])
    assert type(actual) is Result
    assert torch.equal(actual.logits, expected.logits)
    assert_equal_values(actual.parts, expected.parts)
    for fields in (actual.parts[-1], expected.parts[-1]):
        assert type(fields) is Fields
        assert list(fields) == ["logits"]
        assert fields["logits"] is fields.logits
        assert fields.loss is None
        assert torch.equal(fields.logits, 2 * x)


def test_what_a_file_cannot_hold(tmp_path):
    wide, generator = nn.Identity(), torch.Generator()
    wide.register_buffer("wide", torch.ones(2, dtype=torch.complex128))
    boxes = lowered.Call(lambda x: Box(x, "name"))
    draws = lowered.Call(lambda x: x + torch.randn(3, generator=generator))
    poptorch.registerCustomArgParser(Box, BoxParser())
    try:
        for model, schedule, message in [
            (boxes, "grouped", r"What the model returns is a tests\..*Box, which a file"),
            (nn.Linear(3, 3), schedules.grouped, "cannot hold a function or a path. Name a schedule"),
            (wide, "grouped", "tensors of complex128. Make them complex64"),
            (draws, "grouped", "cannot hold"),
        ]:
            executor = poptorch.inferenceModel(model, make_options().setPipelineSchedule(schedule))
            with pytest.raises(poptorch.Error, match=message):
                executor.compileAndExport(tmp_path / "file", x)
    finally:
        poptorch.registerCustomArgParser(Box, None)
    assert os.listdir(tmp_path) == []


@pytest.mark.usefixtures("no_cache")
def test_options_come_back(tmp_path, monkeypatch):
    options = make_options(strategy=poptorch.PipelinedExecution(poptorch.Stage("first", "second").ipu(3)))
    options.anchorTensor("hidden", "tanh", poptorch.OutputMode.Final).modelName("name")
    options.TensorLocations.setOptimizerLocation(poptorch.TensorLocationSettings().useOnChipStorage(False))
    options.setAvailableMemoryProportion({"IPU0": 0.5}).enableExecutableCaching(tmp_path / "cache")
    options.Precision.setPartialsType(torch.float16)
    options.autoRoundNumIPUs(True).updatableNamedBuffers(["a"]).setPipelineSchedule("interleaved")
    executor = poptorch.inferenceModel(seeded(TwoLayers), options)
    executor.compileAndExport(tmp_path / "file", x)
    defaults = '{"deviceIterations": 3, "randomSeed": 4, "useIpuId": 1}'
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", defaults)
    loaded = poptorch.load(tmp_path / "file")
    expected = options.clone()
    expected.enableExecutableCaching(None)  # a path of the machine that wrote the file
    assert loaded.options == expected
    assert loaded.options.is_set("model_name")
    assert not any(map(loaded.options.is_set, ("use_model", "log_dir", "replication_factor")))
    assert_equal_values(loaded(x), executor(x))
    assert torch.equal(loaded.getAnchoredTensor("hidden"), executor.getAnchoredTensor("hidden"))


class OddNames(nn.Module):
    def __init__(self):
        super().__init__()
        self.größe = nn.Parameter(torch.ones(3))
        self.parts = nn.ModuleDict({"a-b": nn.Linear(3, 3), "c d": nn.Sequential(nn.Linear(3, 3))})
        self.register_buffer("name", torch.ones(3))
        self.target = torch.ones(3)

    def forward(self, x, target, name=None):  # noqa: ARG002  # a name that a dict may have
        x = self.parts["c d"](self.parts["a-b"](x)) * self.größe + self.name + self.target
        return {"name": x, "target": nn.functional.mse_loss(x, target)}


def test_odd_names(tmp_path):
    inference = poptorch.inferenceModel(seeded(OddNames), make_options())
    inference.compileAndExport(tmp_path / "file", x, target, name="größe")
    loaded = poptorch.load(tmp_path / "file")
    assert_equal_values(loaded(x, target, name="größe"), inference(x, target, name="größe"))
    assert_equal_values(loaded.model.state_dict(), inference.model.state_dict())


def test_a_loaded_model_is_copied_and_wrapped_anew(tmp_path):
    model = seeded(lambda: TwoLayers(ipus=(0, 0)))
    for_training(model).compileAndExport(tmp_path / "file", x, target)
    loaded = poptorch.load(tmp_path / "file")
    copied = copy.deepcopy(loaded.model)
    expected = loaded(x, target)
    of_copy = for_training(copied)
    assert_equal_values(of_copy(x, target), expected)
    assert_equal_values(copied.state_dict(), loaded.model.state_dict())
    with pytest.raises(RuntimeError, match="already been wrapped"):
        poptorch.trainingModel(loaded)
    loaded.destroy()
    third = for_training(loaded)
    assert_equal_values(third(x, target), of_copy(x, target))
    third.save(tmp_path / "file")
    assert_goes_on(third, poptorch.load(tmp_path / "file"), x, target)


@pytest.mark.thorough
def test_random_numbers(tmp_path):
    model = nn.Dropout(0.5)
    executor = poptorch.inferenceModel(model, make_options(random_seed=3))
    ones = torch.ones(64)
    executor(ones)
    executor.save(tmp_path / "with")
    executor.save(tmp_path / "without", save_rng_state=False)
    expected = executor(ones)
    assert torch.equal(poptorch.load(tmp_path / "with")(ones), expected)
    assert not torch.equal(poptorch.load(tmp_path / "without")(ones), expected)
    first, again = (
        poptorch.load(tmp_path / name, lambda options: options.randomSeed(4))(ones)
        for name in ("with", "without")
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, expected)


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))
        self.shift = nn.Parameter(torch.full((3,), 5.0))

    def forward(self, x):
        self.count += 1
        return x + self.count + self.shift


def test_what_the_devices_have_is_saved(tmp_path):
    """Buffers come to the host with copyWeightsToHost only; what was changed there is not saved."""
    model = Counts()
    executor = poptorch.inferenceModel(model, make_options())
    executor(x)
    executor(x)
    with torch.no_grad():
        model.shift.zero_()
    executor.save(tmp_path / "file")
    assert model.count == 0
    loaded = poptorch.load(tmp_path / "file")
    assert torch.equal(loaded(x), executor(x))
    assert_close([loaded.model(x)], [x + 8])
    assert loaded.model.count == 3


class Unusual(nn.Module):
    """Tensors that share memory or lie in it otherwise, of few elements and of rare dtypes; odd numbers."""

    def __init__(self):
        super().__init__()
        numbers = torch.arange(6.0)
        for name, tensor in {
            "first": numbers[:3],
            "overlapping": numbers[1:4],
            "whole": numbers,
            "transposed": torch.arange(6.0).reshape(2, 3).t(),
            "expanded": torch.ones(1).expand(3),
            "empty": torch.zeros(0, 3),
            "flag": torch.tensor(True),
            "small": torch.ones(3, dtype=torch.int8),
            "complex": torch.tensor([1 + 2j, 2, 3j]),
            "conjugate": torch.tensor([1 + 2j, 2, 3j]).conj(),
            "narrow": torch.full((3,), 0.3).half(),
            "brain": torch.full((3,), 0.3).bfloat16(),
            "unused": torch.ones(3, dtype=torch.uint16),
        }.items():
            self.register_buffer(name, tensor)
        self.constant = torch.tensor([1j, 2.0, torch.nan])[:2]

    def forward(self, x, half):
        x = torch.where(self.flag, x + self.first + self.overlapping + self.whole[3:], torch.nan)
        x = x + self.transposed[:, 0] + self.expanded + self.empty.sum() + self.small
        x = x + self.narrow.float() + self.brain.float()
        x = (x * self.complex * self.conjugate).real + (self.constant * 1j).real.sum()
        odd = x.clamp(-torch.inf, torch.inf), x.t().contiguous().view(-1), torch.full((2,), torch.nan)
        return x, *odd, half + self.narrow, self.brain * 2


def test_unusual_tensors(tmp_path):
    model = Unusual()
    executor = poptorch.inferenceModel(model, make_options())
    expected = executor(x, x.half())
    executor.save(tmp_path / "file")
    loaded = poptorch.load(tmp_path / "file")
    for actual in (loaded(x, x.half()), loaded.model(x, x.half()), model(x, x.half())):
        for one, other in zip(actual, expected, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one.nan_to_num(7), other.nan_to_num(7))
    assert_equal_values(loaded.model.state_dict(), model.state_dict())


def test_an_input_that_is_changed_is_no_result(tmp_path):
    model = lowered.Call(lambda x: x.add_(1) * 2)
    poptorch.inferenceModel(model, make_options()).compileAndExport(tmp_path / "file", x)
    loaded = poptorch.load(tmp_path / "file")
    for run in (loaded.model, loaded):
        given = x.clone()
        assert torch.equal(run(given), (x + 1) * 2)
        assert torch.equal(given, x + 1)


class Loops(nn.Module):
    """Each kind of loop, one in a branch, and the same branch twice; a layer in the other branch."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3).requires_grad_(False)  # torch's map would not be captured

    def forward(self, x):
        def double(x):
            return poptorch.for_loop(2, lambda x: [x * 2], [x])[0]

        x = torch.cond(x.sum() > 0, double, lambda x: self.linear(x) - 1, (x,))
        x = torch.cond(x.sum() > 0, double, lambda x: self.linear(x) - 1, (x,))
        (x,) = torch.while_loop(lambda x: x.abs().sum() < 500, lambda x: (x * 2,), (x,))
        return torch._higher_order_ops.map(lambda row: row.cumsum(0), x)


def test_control_flow_within_control_flow(tmp_path):
    executor = poptorch.inferenceModel(seeded(Loops), make_options())
    expected = executor(x), executor(-x)
    executor.save(tmp_path / "file")
    loaded = poptorch.load(tmp_path / "file")
    assert_equal_values((loaded(x), loaded(-x)), expected)
    assert_close((loaded.model(x), loaded.model(-x)), expected)


@torch.library.custom_op("test_poptorch_executables::scaled", mutates_args=())
def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor


@scaled.register_fake
def scaled_fake(x, factor):  # the operation's
    return torch.empty_like(x)


def test_operations_of_the_users(tmp_path, monkeypatch):
    poptorch.register_lowering("test_poptorch_executables::scaled", lambda x, factor: x * factor)
    model = lowered.Call(lambda x: scaled(x, 2.5))
    poptorch.inferenceModel(model, make_options()).compileAndExport(tmp_path / "file", x)
    assert torch.equal(poptorch.load(tmp_path / "file")(x), x * 2.5)
    monkeypatch.setattr(registry, "_registered", {})
    match = "calls test_poptorch_executables::scaled.default, which has no lowering"
    with pytest.raises(poptorch.Error, match=match):
        poptorch.load(tmp_path / "file")


def through_json(options):
    return decode_options(json.loads(json.dumps(encode_options(options))))


def test_names_that_are_paths_are_not_restored():
    for given, restored in (("name", "name"), ("../name", None), ("/name", None)):
        options = through_json(poptorch.Options().modelName(given))
        assert options.values_by_name().get("model_name") == restored
        assert options.is_set("model_name") is (restored is not None)


def test_options_of_a_file_whose_classes_have_moved():
    """`AnchoredTensor` was in `options.diagnostics`, which is part of `options.options` now."""
    options = poptorch.Options()
    options.anchorTensor("hidden", "tanh")
    written = json.dumps(encode_options(options))
    assert "options.options:AnchoredTensor" in written
    former = json.loads(written.replace("options.options:", "options.diagnostics:"))
    assert decode_options(former).anchored_tensors == options.anchored_tensors


def test_strategies_come_back():
    for strategy in [
        poptorch.PipelinedExecution(poptorch.AutoStage.AutoIncrement),
        poptorch.ShardedExecution(poptorch.Stage("a", "b"), poptorch.Stage("c").ipu(3)),
        poptorch.SerialPhasedExecution(["a", "b"], "c").setTensorsLiveness(
            poptorch.Liveness.OffChipAfterFwd
        ),
        poptorch.ParallelPhasedExecution(
            poptorch.Phase(poptorch.Stage("a"), poptorch.Stage("b")).ipus(0, 2), "c"
        ).useSeparateBackwardPhase(),
    ]:
        restored = through_json(poptorch.Options().setExecutionStrategy(strategy)).execution_strategy
        assert restored == strategy
        assert repr(restored) == repr(strategy)


def test_saving_needs_a_compiled_model(tmp_path):
    executor = poptorch.inferenceModel(nn.Linear(3, 2), make_options())
    with pytest.raises(poptorch.Error, match="Call it with its inputs first, or compile"):
        executor.save(tmp_path / "file")
    executor(x)
    for wrong in ({"export_model": 1}, {"save_rng_state": "yes"}):
        with pytest.raises(TypeError, match="must be True or False; got"):
            executor.save(tmp_path / "file", **wrong)
    wrong = {"": poptorch.Error, tmp_path: poptorch.Error, 7: TypeError, b"file": TypeError}
    for path, error in wrong.items():
        with pytest.raises(error, match="filename must be"):
            executor.save(path)
    assert os.listdir(tmp_path) == []


@pytest.fixture(scope="module")
def executor():
    """A small model that has run."""
    made = poptorch.inferenceModel(seeded(TwoLayers), make_options())
    made(x)
    return made


def test_directories_and_links(tmp_path, executor):
    (tmp_path / "link").symlink_to(tmp_path / "new" / "file")
    (tmp_path / "file").touch()
    with pytest.raises(poptorch.Error, match=r"cannot be written: the directory .*file cannot be made"):
        executor.save(tmp_path / "file" / "in_it")
    (tmp_path / "file").unlink()
    executor.save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert os.listdir(tmp_path / "new") == ["file"]
    assert torch.equal(poptorch.load(tmp_path / "link")(x), executor(x))
    (tmp_path / "plain").write_text("")
    with pytest.raises(poptorch.Error, match="cannot be written"):
        executor.save(tmp_path / "plain" / "file")


def test_an_export_that_fails_leaves_the_old_file(tmp_path, monkeypatch, executor):
    file = tmp_path / "file"
    executor.save(file)
    before = file.read_bytes()
    for error in (OSError("disk full"), SafetensorError("disk full"), KeyboardInterrupt(), MemoryError()):

        def fail(_tensors, path, _metadata, error=error):
            Path(path).write_bytes(b"half of it")
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(model_files, "save_file", fail)
            is_told = isinstance(error, (OSError, SafetensorError))
            with pytest.raises(poptorch.Error if is_told else type(error), match="disk full|^$"):
                executor.save(file)
        assert file.read_bytes() == before
        assert os.listdir(tmp_path) == ["file"]
    executor.save(file)


def test_files_are_readable_as_others_are(tmp_path, executor):
    executor.save(tmp_path / "file")
    executor.save(tmp_path / "again")
    (tmp_path / "again").chmod(0o600)
    executor.save(tmp_path / "again")
    assert (tmp_path / "again").stat().st_mode & 0o777 == 0o600
    mask = os.umask(0)
    os.umask(mask)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o666 & ~mask


@pytest.mark.soak
def test_a_process_killed_as_it_writes_leaves_the_old_file(tmp_path):
    """SIGKILL as it writes again and again: the file is always a whole one."""
    program = """
import sys, torch
import ipu_pipeline.poptorch as poptorch
model = torch.nn.Linear(400, 400)
executor = poptorch.inferenceModel(model, poptorch.Options().showCompilationProgressBar(False))
executor(torch.ones(1, 400))
executor.save(sys.argv[1])
print("begin", flush=True)
while True:
    executor.save(sys.argv[1])
"""
    file = tmp_path / "file"
    with subprocess.Popen([sys.executable, "-c", program, file], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"begin\n"
        for _time in range(40):
            time.sleep(0.005)
            with model_files.read_file(file) as (_manifest, tensors):  # as it is being replaced
                assert tensors
        process.send_signal(signal.SIGKILL)
    poptorch.load(file)


@pytest.mark.thorough
def test_two_threads_write_and_read_at_once(tmp_path):
    file = tmp_path / "file"
    executors = [poptorch.inferenceModel(seeded(TwoLayers, seed), make_options()) for seed in (0, 1)]
    expected = [executor(x) for executor in executors]
    executors[0].save(file)
    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        writing = [
            threads.submit(lambda executor: [executor.save(file) for _time in range(3)], executor)
            for executor in executors
        ]
        reading = [threads.submit(lambda: poptorch.load(file)(x)) for _time in range(2)]
    for future in writing:
        future.result()
    for future in reading:
        assert any(torch.equal(future.result(), other) for other in expected)
    assert os.listdir(tmp_path) == ["file"]


CACHING = """
from jax import monitoring
import ipu_pipeline.poptorch as poptorch
from tests.support.poptorch_front import make_batch, make_options, seeded

counts, losses = {"hits": 0, "misses": 0}, []

def note(event, **_more):
    for kind in counts:
        counts[kind] += event == f"/jax/compilation_cache/cache_{kind}"

def call(executor):
    losses.append(float(executor(*make_batch(6))[1].sum()))

def wrap(options):
    from tests.poptorch.files.test_poptorch_executables import Everything
    model = seeded(Everything)
    return poptorch.trainingModel(model, options, poptorch.optim.AdamW(model.parameters(), lr=0.05))

monitoring.register_event_listener(note)
options = make_options(1, 3, random_seed=1)
{program}
print(*counts.values(), *losses)
"""


def count_compilations(program, **variables):
    """Cache hits, misses, and the losses, of a process."""
    environment = {**os.environ, **variables}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    program = CACHING.replace("{program}", program)
    made = subprocess.run(
        [sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True
    )
    hits, misses, *losses = made.stdout.split()
    return int(hits), int(misses), losses


@pytest.mark.thorough
def test_later_processes_find_the_model_compiled(tmp_path):
    """By POPTORCH_CACHE_DIR and by the option; wrapped anew, and loaded without its class.

    What is loaded goes on in another process with the same random numbers, averages and buffers.
    """
    cache, file = str(tmp_path / "cache"), str(tmp_path / "file")
    first = f"executor = wrap(options); call(executor); executor.save({file!r}); call(executor)"
    hits, misses, losses = count_compilations(first, POPTORCH_CACHE_DIR=cache)
    assert hits == 0
    assert misses > 3
    assert losses[0] != losses[1]
    anew = f"call(wrap(options.enableExecutableCaching({cache!r})))"
    load = f"call(poptorch.load({file!r}))"
    for program, variables, expected in (
        (anew, {}, losses[:1]),
        (load, {"POPTORCH_CACHE_DIR": cache}, losses[1:]),
    ):
        hits, misses, again = count_compilations(program, **variables)
        assert hits > 3
        assert (misses, again) == (0, expected)


def test_a_file_is_in_safetensors_format(tmp_path):
    """Other programs can read the graph and the tensors, as `save` says."""
    file = str(tmp_path / "model.poptorch")
    poptorch.inferenceModel(torch.nn.Linear(8, 2), make_options()).compileAndExport(file, torch.zeros(1, 8))
    with safe_open(file, "pt") as opened:
        assert opened.metadata().keys() == {"ipu_pipeline.poptorch", "crc32"}
        manifest = json.loads(opened.metadata()["ipu_pipeline.poptorch"])
        tensors = {
            one["name"]: opened.get_tensor(str(one["number"])) for one in manifest["model"]["tensors"]
        }
    calls = [node["target"] for node in manifest["program"]["nodes"] if node["op"] == "call_function"]
    assert calls == ["aten::linear.default"]
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "weight": (2, 8),
        "bias": (2,),
    }

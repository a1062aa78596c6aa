"""Errors of running programs as PopTorch's; what is left after one; times, and spans in the report."""

import json
import re
import time
import traceback

import jax
import pytest
import torch

import ipu_pipeline as ipu
import ipu_pipeline.poptorch as poptorch
from ipu_pipeline.poptorch.execution.compiled_model import translate
from tests.support.poptorch_front import (
    TwoLayers,
    assert_close,
    infer,
    make_batch,
    make_options,
    model_of,
    seeded,
)

RUNTIME = jax.errors.JaxRuntimeError
HUGE = 2**23  # its square, in float32, is more than any machine has

RECOVERABLE, UNRECOVERABLE, OTHER = poptorch.RecoverableError, poptorch.UnrecoverableError, poptorch.Error
LAUNCH = "INTERNAL: Failed to launch: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access"
ECC = "INTERNAL: CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error"
KINDS = [
    ("UNAVAILABLE: socket closed", RECOVERABLE, "unavailable", "IPU_RESET"),
    ("ABORTED: another task died", RECOVERABLE, "aborted", "PARTITION_RESET"),
    ("CANCELLED: as asked", RECOVERABLE, "cancelled", "PARTITION_RESET"),
    ("DEADLINE_EXCEEDED: 40s", RECOVERABLE, "deadline_exceeded", "PARTITION_RESET"),
    (LAUNCH, RECOVERABLE, "cuda_error_illegal_address", "FULL_RESET"),
    (ECC, UNRECOVERABLE, "cuda_error_ecc_uncorrectable", None),
    ("DATA_LOSS: checksum", UNRECOVERABLE, "data_loss", None),
    ("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.", OTHER, "out_of_memory", None),
    ("INTERNAL: Error dispatching: Out of memory allocating 9", OTHER, "out_of_memory", None),
    ("INTERNAL: CUDA_ERROR_OUT_OF_MEMORY: out of memory", OTHER, "out_of_memory", None),
    ("INTERNAL: Failed to do it", OTHER, "internal", None),
    ("INVALID_ARGUMENT: no", OTHER, "invalid_argument", None),
    ("no code at all", OTHER, "unknown", None),
]


def test_which_error_is_which():
    for text, kind, name, action in KINDS:
        error = translate(RUNTIME(text), "here")
        assert type(error) is kind, text
        assert text in error.message
        assert str(error) == error.message
        assert (error.type, error.location) == (name, "here")
        assert getattr(error, "recovery_action", None) == action


class Huge(torch.nn.Module):
    """Needs 256 TiB while `is_huge` is True."""

    def __init__(self, is_huge=True):
        super().__init__()
        self.first, self.weight = torch.nn.Linear(3, 3), torch.nn.Parameter(torch.ones(()))
        self.is_huge = is_huge

    def forward(self, x):
        with poptorch.Block(ipu_id=0):
            x = self.first(x)
        with poptorch.Block(ipu_id=1):
            if self.is_huge:
                row = (x.sum() * self.weight).expand(HUGE)
                return poptorch.identity_loss((torch.outer(row, row) @ row).mean(), "sum")
            return poptorch.identity_loss((x * self.weight).sum(), "sum")


def test_out_of_memory_in_inference():
    model = seeded(Huge)
    executor = poptorch.inferenceModel(model, make_options())
    for _time in range(2):  # what is on the devices stays
        with pytest.raises(poptorch.Error, match="Out of memory .* smaller") as caught:
            executor(make_batch(1)[0])
        error = caught.value
        assert type(error) is poptorch.Error
        assert (error.type, error.location) == ("out_of_memory", "PoplarExecutor.__call__")
        assert isinstance(error.__cause__, RUNTIME)
        assert "were lost" not in error.message


def test_weights_that_an_error_takes_with_it(caplog):
    """The update got what failed; destroy() leaves the host's weights, and training goes on with these."""
    model = seeded(Huge)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    executor = poptorch.trainingModel(model, make_options(), optimizer)
    x = make_batch(1)[0]
    for call, message in [
        (lambda: executor(x), "Out of memory .* were lost with it. The host has"),
        (lambda: executor(x), "An error came before this call. The weights and the optim"),
        (executor.copyWeightsToDevice, "were lost"),
        (executor.detachFromDevice, "were lost"),
    ]:
        with pytest.raises(poptorch.Error, match=message):
            call()
    assert_close(model.state_dict().values(), before.values())
    assert "The weights on the devices were lost by an error" in caplog.text
    assert not optimizer.state_dict()["ipu_state"]
    executor.destroy()
    model.is_huge = False
    executor = poptorch.trainingModel(model, make_options(), optimizer)
    executor(x)
    gradient = (x @ before["first.weight"].T + before["first.bias"]).sum()
    assert_close([model.weight], [before["weight"] - 0.1 * gradient])


@pytest.mark.parametrize("reads", [True, False], ids=["reading", "destroying"])
def test_what_is_first_to_see_an_error_of_an_update(reads):
    """Its call has returned: the loss is there before the update fails."""
    model = model_of(lambda self, x: poptorch.identity_loss(self.linear(x), "mean"))
    executor = poptorch.trainingModel(model, make_options(), torch.optim.SGD(model.parameters(), lr=0.1))
    before = model.linear.weight.detach().clone()
    executor(make_batch(1)[0])

    def fail(*args, **kwargs):
        raise RUNTIME("INTERNAL: Error dispatching computation: broken")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "device_get", fail)
        patch.setattr(jax, "block_until_ready", fail)
        message = "broken The weights and the optimizer's state .* were lost"
        with pytest.raises(poptorch.Error, match=message):
            _ = model.linear.weight + 1 if reads else executor.destroy()
        executor.destroy()
    assert not executor.isCompiled()
    assert torch.equal(model.linear.weight, before)


# Times and spans.


def test_times_of_each_micro_batch():
    options = make_options(3).replicationFactor(2).logCycleCount(True)
    executor = poptorch.inferenceModel(seeded(TwoLayers), options)
    x = make_batch(12)[0]
    with pytest.raises(poptorch.Error, match="run the model at least once"):
        executor.cycleCount()
    executor(x)
    begin = time.perf_counter()
    executor(x)
    length = time.perf_counter() - begin
    counters = executor.getPerfCounters()
    assert list(counters) == ["input", "input_complete", "output", "output_complete"]
    assert {len(times) for times in counters.values()} == {6}
    for points in zip(*counters.values(), strict=True):
        assert list(points) == sorted(points)
    assert counters["input_complete"] == sorted(counters["input_complete"])
    assert counters["output_complete"] == sorted(counters["output_complete"])
    parts = [executor.getHostIpuLatency(), executor.getComputeLatency(), executor.getIpuHostLatency()]
    least, most, mean = executor.getLatency()
    assert 0 < least <= mean <= most < length  # which is around the call
    assert all(0 <= part[0] <= part[2] <= part[1] for part in parts)
    assert sum(part[2] for part in parts) == pytest.approx(mean)
    assert 0 < executor.cycleCount() < length * 1e9
    with pytest.raises(poptorch.Error, match="Cycle count logging is disabled"):
        poptorch.inferenceModel(executor.model, make_options()).cycleCount()


@pytest.fixture(scope="module")
def executor():
    """One that has run."""
    made = poptorch.inferenceModel(seeded(TwoLayers), make_options(2))
    made(make_batch()[0])
    return made


def test_spans_are_in_the_report(tmp_path, executor, monkeypatch):
    monkeypatch.setattr(executor, "copyWeightsToDevice", executor.copyWeightsToDevice)  # is put back
    x = make_batch()[0]
    channel = poptorch.profiling.Channel("Mine")
    channel.instrument(executor, "copyWeightsToDevice")
    with channel.tracepoint("begun before"), ipu.reports.capture(tmp_path) as captured:
        with channel.tracepoint("before the first program"):
            pass
        with channel.tracepoint("call"):
            executor(x)
        executor.copyWeightsToDevice()
    (facts,) = captured.profile.pipelines
    assert (facts.name, facts.device_word) == ("TwoLayers", "IPU")
    spans = [event for event in captured.profile.events if event.kind == "span"]
    assert [span.name for span in spans] == ["Mine: call", "Mine: copyWeightsToDevice"]
    call, copy = spans
    forwards = [event for event in captured.profile.events if event.kind == "forward"]
    assert call.begin == 0.0  # the trace begins with the first program
    assert max(event.end for event in forwards) <= call.end <= copy.begin <= copy.end
    assert {span.ipu for span in spans} == {None}
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert "Mine: call" in [entry["name"] for entry in trace if entry.get("cat") == "span"]
    profile = ipu.reports.profile.read_profile((tmp_path / "profile.json").read_text())
    assert [event.name for event in profile.events if event.kind == "span"] == [span.name for span in spans]


def test_spans_end_with_the_recording(tmp_path, executor):
    channel = poptorch.profiling.Channel("Mine")
    begin = time.perf_counter()
    with ipu.reports.capture(tmp_path, max_actions=4) as captured, channel.tracepoint("all"):
        for _call in range(2):
            executor(make_batch()[0])
        microseconds = 1e6 * (time.perf_counter() - begin)
        executor(make_batch()[0])
    (span,) = [event for event in captured.profile.events if event.kind == "span"]
    assert 0 < span.length < microseconds


def test_an_exception_in_a_function_on_the_host():
    """It is an Error wherever it comes to light: as programs are started, or as their results are read."""
    fails = [False]

    def double(value):
        if fails[0]:
            raise KeyError("what the function says")
        return value * 2

    def forward(self, x):
        with poptorch.Block("A", ipu_id=0):
            x = torch.tanh(x)
        with poptorch.Block("B", ipu_id=1):
            return self.double(x)

    made = model_of(forward, double=poptorch.CPU(double, "double"))
    model = poptorch.inferenceModel(made, make_options(2))
    x = torch.ones(4, 3)
    model(x)
    fails[0] = True
    with pytest.raises(poptorch.Error, match="what the function says") as caught:
        model(x)
    assert (type(caught.value), caught.value.type) == (poptorch.Error, "internal")
    fails[0] = False
    assert torch.allclose(model(x), 2 * torch.tanh(x))


def test_an_error_within_forward_has_the_users_lines_and_the_module():
    """Plain torch shows as much; torch's export would add 80 frames of its own."""

    class Wrong(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(4, 2))

        def forward(self, x):
            return self.layers(x)

    with pytest.raises(RuntimeError, match="must have same reduction dim") as raised:
        infer(Wrong(), torch.ones(2, 3))
    (note,) = raised.value.__notes__
    layer, line = r"Linear\(in_features=4, out_features=2, bias=True\)", rf"{__file__}:\d+ \(forward\)"
    told = rf"This happened in module layers.1, {layer}, while the model's forward was captured, at {line}."
    assert re.fullmatch(told, note)
    frames = traceback.extract_tb(raised.value.__traceback__)
    assert [frame.name for frame in frames[-3:]] == ["forward", "forward", "forward"]
    assert frames[-3].filename == __file__
    assert len(frames) < 20
    usual = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    try:
        with pytest.raises(RuntimeError, match="must have same reduction dim") as raised:
            infer(Wrong(), torch.ones(2, 3))
    finally:
        jax.config.update("jax_traceback_filtering", usual)
    assert len(traceback.extract_tb(raised.value.__traceback__)) > 60

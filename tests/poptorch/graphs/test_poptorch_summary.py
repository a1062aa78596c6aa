"""`print(wrapped)` and `wrapped.summary()`: what a wrapped model is made of, and what its lines become."""

import pytest
import torch

import ipu_pipeline.poptorch as poptorch
from ipu_pipeline import engine
from ipu_pipeline.poptorch.graphs.modules import find_modules, find_spread, name_parts
from tests.support.poptorch_front import make_batch, make_options, make_sgd, seeded
from tests.support.programs import ROOT


class Net(torch.nn.Module):
    """Two stages; layers in a list, functions of torch, a layer without weights."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(3, 3) for _layer in range(3)])
        self.act = torch.nn.ReLU()
        self.head = torch.nn.Linear(3, 3)

    def forward(self, x, target):
        with poptorch.Block("body", ipu_id=0):
            for layer in self.layers:
                x = self.act(layer(x))
        with poptorch.Block("head", ipu_id=1):
            x = self.head(x) * 2
            return torch.nn.functional.mse_loss(x, target)


BEFORE = """\
Net, wrapped for training: stages are known once it is compiled, by a call or compile()
  a call has 4 micro-batches: 2 weight updates of 2
  modules                 parameters   size
  layers.{0..2} (Linear)          36  144 B
  act (ReLU)                       0    0 B
  head (Linear)                   12   48 B"""

AFTER = """\
Net: 2 stages on 2 IPUs, schedule grouped, 2 micro-batches per weight update
  a call has 4 micro-batches: 2 weight updates of 2
  48 parameters, 192 B, all trained
  stage  IPU  modules                   parameters   size     forward    backward
  0      0    block body:                       36  144 B  1.75 kflop  1.35 kflop
                layers.{0..2} (Linear)          36  144 B
                act (ReLU)
  1      1    block head:                       12   48 B  1.33 kflop
                Net itself
                head (Linear)                   12   48 B
  forward, backward: estimated operations; the last stage does both in its forward
  bubble: 28.6% of a step, estimated from these operations (33.3% if all actions took equally long)
  busiest IPU: 0, with 70% of all operations"""


def test_of_a_small_model(monkeypatch):
    monkeypatch.setattr(engine.Pipeline, "compile", lambda *_args: None)  # nothing runs
    model = seeded(Net)
    executor = poptorch.trainingModel(model, make_options(2, 2), make_sgd(model.parameters()))
    assert str(executor.summary()) == BEFORE
    printed = repr(executor)
    assert printed.startswith("PoplarExecutor(Net(\n  (layers): ModuleList(")
    with pytest.raises(TypeError, match="lines must be True or False; got 1"):
        executor.summary(lines=1)
    executor.compile(*make_batch(16))
    told = executor.summary()
    text = str(told)
    assert text == AFTER
    assert AFTER in (ROOT / "docs" / "poptorch.md").read_text()
    assert repr(executor) == f"{printed}\n{text}"
    assert told.pipeline.num_parameters == sum(p.numel() for p in model.parameters()) == 48

    lines = executor.summary(lines=True).lines
    expected = {
        "x = self.act(layer(x))": ((0,), {"linear": 3, "relu": 3}),
        "x = self.head(x) * 2": ((1,), {"linear": 1, "mul": 1}),
    }
    known = {line.text: (line.stages, dict(line.operations)) for line in lines}
    assert {key: known[key] for key in expected} == expected
    assert lines[0].file == __file__
    assert lines[0].num_flop >= 3 * 2 * 4 * 3 * 3
    traced = executor._compiled.pipeline.traced.stages
    for number, stage in enumerate(traced):
        own = [line.num_primitives for line in lines if line.stages == (number,)]
        assert sum(own) == len(stage.flat.equations)
    shown = str(executor.summary(lines=True)).partition("\n\n")[2]
    assert "test_poptorch_summary.py:" in shown
    assert "3 linear, 3 relu" in shown

    places = [stage.place for stage in traced]  # as reports and their page say
    assert places == ["stage 0 (layers.{0..2}, act)", "stage 1 (head)"]


def test_of_inference_without_blocks(monkeypatch):
    monkeypatch.setattr(engine.Pipeline, "compile", lambda *_args: None)
    executor = poptorch.inferenceModel(torch.nn.Tanh(), make_options(3))
    executor.compile(torch.ones(6))
    first, second, *_rest = str(executor.summary(lines=True)).splitlines()
    assert first == "Tanh: 1 stage on 1 IPU, schedule grouped, 3 micro-batches per execution, no training"
    assert second == "  a call has 3 micro-batches"
    assert "\n  0      0    Tanh              0   0 B  20 flop\n" in str(executor.summary())


def make_used(*paths):
    """What `modules_of_nodes` gives: modules that compute something, by their names."""
    used = []
    for path in paths:
        parts = path.split(".")
        above = [".".join(parts[:n]) for n in range(1, len(parts) + 1)]
        used.append(([(name, f"C{len(name.split('.'))}") for name in above], "linear"))
    return used


def shown(modules):
    return [(module.name, module.count, module.num_parameters, module.is_rest) for module in modules]


def test_modules_are_told_in_as_much_detail_as_fits():
    layers = [f"encoder.{n}.{part}" for n in range(12) for part in ("query", "key", "value")]
    used = [*make_used("embed", *layers, "encoder", "head"), ([], "mul")]
    weights = [(f"{layer}.weight", (2, 5), 40) for layer in layers]
    weights += [("embed.weight", (7,), 28), ("head.weight", (5,), 20), ("scale", (), 4)]
    assert shown(find_modules(used, weights, "Model", limit=6)) == [
        ("", 1, 1, True),
        ("embed", 1, 7, False),
        ("encoder", 1, 0, True),
        ("encoder.{0..11}", 12, 360, False),
        ("head", 1, 5, False),
    ]
    few = find_modules(used, weights, "Model", limit=4)
    assert shown(few)[1:] == [("embed", 1, 7, False), ("encoder", 1, 360, False), ("head", 1, 5, False)]
    assert name_parts(few) == "embed, encoder, head"
    # Spread over two stages, the encoder is not one thing, and a layer is.
    stages = [used[:10], used[10:]]
    spread = find_spread(stages)
    assert spread == {"encoder"}
    told = [shown(find_modules(own, (), "Model", spread, 1)) for own in stages]
    assert [[name for name, *_others in one] for one in told] == [
        ["embed", "encoder.{0..2}"],
        ["", "encoder", "encoder.{3..11}", "head"],
    ]
    # One that has something else in it is told by itself.
    other = make_used("layers.0.a", "layers.1.b", "layers.2.b")
    found = shown(find_modules(other, (), "Model", {"layers"}, 1))
    assert [module[0] for module in found] == ["layers.0", "layers.{1..2}"]

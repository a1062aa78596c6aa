"""Blocks: which operations are on which IPU."""

import contextlib
import functools

import pytest
import torch

import ipu_pipeline.poptorch as poptorch
from ipu_pipeline.poptorch.graphs.capture import capture
from ipu_pipeline.poptorch.graphs.partitions import cut_into_sections
from ipu_pipeline.poptorch.structures import flatten
from tests.support.poptorch_front import assert_close, make_options, model_of


def sections(forward, strategy=None, module=None, **options):
    """IPU, blocks and operations of each section of a model with that forward."""

    tensors, structure = flatten(((torch.ones(4),), {}))
    captured = capture(model_of(forward, linear=module), tensors, structure)
    strategy = strategy or poptorch.PipelinedExecution()
    found = cut_into_sections(captured.program.graph, strategy.place, **options)
    return [(s.ipu, s.name, [node.target._schema.name[6:] for node in s.nodes]) for s in found]


def computing(*steps):
    """A forward that opens a block, if it has a name, for each operation."""

    def forward(_self, x):
        for name, ipu, operation in steps:
            with poptorch.Block(name, ipu_id=ipu) if name else contextlib.nullcontext():
                x = getattr(torch, operation)(x) if operation else x
        return x

    return forward


def test_what_is_before_the_first_block_is_on_ipu_0():
    found = sections(computing((None, None, "sin"), ("a", 1, "cos")))
    assert found == [(0, "what is before the first block", ["sin"]), (1, "block a", ["cos"])]


def test_blocks_of_one_ipu_that_follow_each_other_are_one_stage():
    """A name again continues its block."""
    steps = [("a", 0, "sin"), ("b", 0, "cos"), ("c", 1, "sin"), ("empty", 2, None), ("d", 1, "cos")]
    assert sections(computing(*steps, ("e", 0, "sin"), ("e", None, "tan"))) == [
        (0, "block a, block b", ["sin", "cos"]),
        (1, "block c, block d", ["sin", "cos"]),
        (0, "block e", ["sin", "tan"]),
    ]


def test_stages_of_one_ipu_that_follow_each_other_may_stay_apart():
    forward = computing((None, None, "cos"), *((name, None, "sin") for name in "abcd"))
    stages = [poptorch.Stage(*names).ipu(ipu) for names, ipu in (("ab", 0), ("c", 1), ("d", 1))]
    found = sections(forward, poptorch.PipelinedExecution(*stages), has_several=True)
    parts = [(0, "block a, block b", ["cos", "sin", "sin"]), (1, "block c", ["sin"])]
    assert found == [*parts, (1, "block d", ["sin"])]


def test_nested_blocks_and_starts():
    def forward(self, x):
        with poptorch.Block("outer", ipu_id=0):
            x = x.sin()
            with poptorch.Block("inner", ipu_id=1):
                x = x.cos()
            x = x.tan()
        poptorch.Block.start("last", ipu_id=2)
        return x.exp()

    assert sections(forward) == [
        (0, "block outer", ["sin"]),
        (1, "block inner", ["cos"]),
        (0, "block outer", ["tan"]),
        (2, "block last", ["exp"]),
    ]


def test_ids_by_number():
    def forward(self, x):
        poptorch.Block.useAutoId()
        for _number in range(3):
            with poptorch.Block():
                x = x.sin()
        return x

    strategy = poptorch.PipelinedExecution(poptorch.AutoStage.AutoIncrement)
    assert sections(forward, strategy) == [(n, f"block {n}", ["sin"]) for n in range(3)]
    strategy = poptorch.PipelinedExecution(poptorch.Stage("0", "1").ipu(1), poptorch.Stage("2").ipu(0))
    assert sections(forward, strategy) == [(1, "block 0, block 1", ["sin"] * 2), (0, "block 2", ["sin"])]
    with pytest.raises(AssertionError, match="SameAsIpu was selected but no IPU was specified for block 0"):
        sections(forward)


def test_functions_begin_blocks():
    class Cosine:
        @poptorch.BlockFunction("cos", ipu_id=1)
        def compute(self, x):
            return x.cos()

    cosine = Cosine().compute

    def forward(self, x):
        x = poptorch.BeginBlock(torch.sin, "sin", ipu_id=0)(x)
        return poptorch.BeginBlock(functools.partial(cosine), ipu_id=2)(x)

    assert sections(forward) == [(0, "block sin", ["sin"]), (1, "block cos", ["cos"])]
    assert cosine.__name__ == "compute"
    assert float(cosine(torch.zeros(()))) == 1


def test_modules_begin_blocks():
    layers = torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Sigmoid(), torch.nn.ReLU())
    assert poptorch.BeginBlock(layers[1], ipu_id=1) is layers[1]
    poptorch.BeginBlock(layers[2], user_id="last", ipu_id=2)
    expected = [
        (0, "what is before the first block", ["tanh"]),
        (1, "block on IPU 1", ["sigmoid"]),
        (2, "block last", ["relu"]),
    ]
    assert sections(lambda self, x: self.linear(x), module=layers) == expected
    with pytest.raises(poptorch.Error, match="module has already been assigned to a block."):
        poptorch.BeginBlock(layers[1], ipu_id=0)
    text = poptorch.module_repr(layers)
    assert text.splitlines() == [
        "Sequential(",
        "  (0): Tanh()",
        "  (1): BeginBlock(user_id=None, ipu_id=1) Sigmoid()",
        "  (2): BeginBlock(user_id=last, ipu_id=2) ReLU()",
        ")",
    ]
    assert repr(poptorch.inferenceModel(layers)) == f"PoplarExecutor({text})"
    poptorch.removeBlocks(layers)
    assert poptorch.module_repr(layers) == repr(layers)
    every = [(0, "what is before the first block", ["tanh", "sigmoid", "relu"])]
    assert sections(lambda self, x: self.linear(x), module=layers) == every
    poptorch.BeginBlock(layers[1], ipu_id=0)


def test_wrong_blocks():
    no_module, integer = "module is not an instance of torch.nn.Module", "ipu_id must be an integer or None"
    user_id, start = "user_id must be a string, an integer or None", poptorch.Block.start
    for make, arguments, error, message in [
        (poptorch.removeBlocks, {"module": 3}, poptorch.Error, f"{no_module}. It is a int"),
        (poptorch.BeginBlock, {"layer_to_call": "layer"}, poptorch.Error, f"{no_module} or function"),
        (poptorch.Block, {"user_id": 0.5}, TypeError, f"Block: {user_id}; got 0.5"),
        (poptorch.BlockFunction, {"ipu_id": "0"}, TypeError, f"BlockFunction: {integer}; got '0'"),
        (start, {"ipu_id": -1}, ValueError, "Block.start: ipu_id must be at least 0; got -1"),
    ]:
        with pytest.raises(error, match=message):
            make(**arguments)

    def forward(self, x):
        def branch(x):
            with poptorch.Block("a", ipu_id=1):
                return x.sin()

        return torch.cond(x.sum() > 0, branch, branch, (x,))

    message = r"(?s)control flow could not be captured: .* no block begins in them"
    with pytest.raises(poptorch.Error, match=message):
        sections(forward)


def test_on_the_cpu_blocks_do_nothing():
    poptorch.Block.useAutoId()
    poptorch.Block.start("a", ipu_id=3)
    with poptorch.Block("a", ipu_id=3):
        assert not poptorch.isRunningOnIpu()


def test_a_block_that_goes_back_to_an_earlier_ipu():
    x, forward = torch.linspace(0, 1, 8), computing(("0", 0, "sin"), ("1", 1, "sin"), ("2", 0, "sin"))
    executor = poptorch.inferenceModel(model_of(forward), make_options(4))
    assert_close([executor(x)], [x.sin().sin().sin()])
    assert "3 stages on 2 IPUs" in str(executor.summary())

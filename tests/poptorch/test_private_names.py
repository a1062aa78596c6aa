"""Names of PopTorch's private modules and operations that public programs use."""

import pytest
import torch

import ipu_pipeline.poptorch as poptorch
from ipu_pipeline.poptorch._args_parser import ArgsParser
from ipu_pipeline.poptorch._impl import rewrapModelIfNecessary, unwrapModelIfNecessary
from ipu_pipeline.poptorch._poplar_executor import PoplarExecutor, _OverwriteContextManager
from ipu_pipeline.poptorch._utils import combine_batch_tensors_gen
from tests.support.poptorch_front import assert_close, make_options


def test_batches_are_combined_by_field():
    batches = [[torch.ones(1, 2), torch.zeros(1)], [torch.zeros(3, 2), torch.ones(2)]]
    first, second = combine_batch_tensors_gen(batches)
    assert (first.sum(dim=1).tolist(), second.tolist()) == ([2, 0, 0, 0], [0, 1, 1])
    with pytest.raises(ValueError, match="shorter"):
        list(combine_batch_tensors_gen([batches[0], batches[1][:1]]))


def test_arguments_are_in_the_order_of_forward():
    def forward(x, *others, scale=2, **options):
        return x, others, scale, options

    tensors = [torch.full((1,), float(number)) for number in range(4)]
    parsed = ArgsParser(forward)(tensors[:3], {"mask": tensors[3]})
    assert forward(*parsed.args, **parsed.kwargs) == forward(*tensors[:3], mask=tensors[3])
    assert parsed.arg_names == ["x", "*others[0]", "*others[1]"]
    assert parsed.kwargs == {"scale": 2, "mask": tensors[3]}
    assert all(a is b for a, b in zip(parsed.asPackedFlatTuple(), tensors, strict=True))
    assert ArgsParser(torch.nn.Linear(1, 1))([tensors[0]], {}).arg_names == ["input"]
    with pytest.raises(TypeError, match="must be a module or a function; got 5"):
        ArgsParser(5)


class Sizes:
    """An operation whose size depends on values, and what a library puts in its place."""

    @staticmethod
    def select(x):
        return x[x > 0].sum()


class FixedSizes:
    entered = 0

    def replace(self):
        FixedSizes.entered += 1
        self.select, Sizes.select = Sizes.select, staticmethod(lambda x: x.clamp(min=0).sum())

    def restore(self):
        FixedSizes.entered -= 1
        Sizes.select = self.select


class Selecting(torch.nn.Module):
    def forward(self, x):
        if x.ndim > 2:
            raise KeyError("mine")
        return Sizes.select(x)


def test_operations_are_replaced_while_a_model_is_captured(monkeypatch):
    monkeypatch.setattr(_OverwriteContextManager, "_classes", [])
    for _twice in range(2):
        _OverwriteContextManager.registerSubsitutionManager(FixedSizes)
    x, select = torch.randn(3, 4), Sizes.select
    model = poptorch.inferenceModel(Selecting(), make_options())
    assert_close([model(x)], [select(x)])
    with pytest.raises(KeyError, match="mine"):
        poptorch.inferenceModel(Selecting(), make_options())(torch.ones(1, 1, 1))
    assert (FixedSizes.entered, Sizes.select) == (0, select)
    with pytest.raises(TypeError, match="must have a method replace"):
        _OverwriteContextManager.registerSubsitutionManager(int)


class Named(torch.nn.Module):
    def forward(self, x):
        torch.ops.poptorch.push_name_scope("mine")
        y = torch.relu(x)
        torch.ops.poptorch.pop_name_scope()
        return torch.ops.poptorch.internal_cast(y, "FLOAT16")


def test_operations_of_poptorch_and_names_of_the_executor():
    model = Named()
    executor = poptorch.inferenceModel(model, make_options())
    assert isinstance(executor, PoplarExecutor)
    assert (executor._executable, executor._executable_inputs) == (None, None)
    assert (executor._options, executor._user_model) == (executor.options, model)
    assert executor(x=torch.ones(2)).dtype == torch.float16
    assert executor._executable is not None
    assert [(tensor.shape, tensor.dtype) for tensor in executor._executable_inputs.args] == [
        ((2,), torch.float32)
    ]
    assert any(name.startswith("mine/") for name in executor.getTensorNames())
    unwrapModelIfNecessary(model)
    rewrapModelIfNecessary(model)
    assert_close([executor(x=torch.ones(2))], [model(torch.ones(2))])
    with pytest.raises(ValueError, match="dtype must be one of FLOAT, FLOAT16; got 'INT'"):
        torch.ops.poptorch.internal_cast(torch.ones(1), "INT")

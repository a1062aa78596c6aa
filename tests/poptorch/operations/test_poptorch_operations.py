"""PopTorch's operations beside plain torch: on the CPU, on the devices, and differentiated."""

import contextlib
import functools
import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn
from torch._higher_order_ops.scan import scan
from torch.nn import functional

import ipu_pipeline.poptorch as poptorch
from ipu_pipeline import engine
from ipu_pipeline.poptorch.graphs.refusals import describe_control_flow_error
from ipu_pipeline.poptorch.operations.printing import Layout
from tests.support import lowered
from tests.support.poptorch_front import (
    TrainedAlike,
    assert_close,
    assert_same_state,
    join,
    make_options,
    reference,
    second,
)

InputChannels, ReducingDim, OutputChannels, Disabled = poptorch.MatMulSerializationMode


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def infer(function, *args, model=None):
    """What a function of tensors gives on the devices."""
    return poptorch.inferenceModel(model or lowered.Call(function), make_options())(*args)


class Trained(nn.Module):
    """A linear layer, then a function of the module and its result, whose mean square is minimized."""

    def __init__(self, function, blocks=False):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 4)
        self.function, self.blocks = function, blocks

    def forward(self, x):
        with poptorch.Block("first", ipu_id=0):
            x = torch.tanh(self.first(x))
            if not self.blocks:
                x = self.function(self, x)
        with poptorch.Block("last", ipu_id=1):
            if self.blocks:
                x = self.function(self, x)
            x = x.float()
            return x, poptorch.identity_loss(x.square(), "mean")


def make_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def train_as_torch(function, accumulation=2, blocks=False, calls=2):
    """Trains on the devices and by plain torch, from the same weights, and compares all."""
    model = Trained(function, blocks)
    plain = reference(model, make_sgd)
    training = poptorch.trainingModel(model, make_options(1, accumulation), make_sgd(model.parameters()))
    x = draw(4 * accumulation, 4)
    for _call in range(calls):
        actual = training(x)
        assert_close(actual, join(plain.train((x,), 1, accumulation, second)))
    assert_same_state(model, plain.model)


# Slices


def test_dynamic_slice_and_update_as_indices():
    for (dim, size, step), start in itertools.product([(0, 2, 1), (1, 5, 2), (-1, 4, 3)], [0, 2, 5]):
        shape = [3, 4]
        shape[dim] = 10
        x, place = draw(*shape), torch.tensor(start)
        expected = x.index_select(dim, torch.arange(start, start + size, step))
        assert torch.equal(poptorch.dynamic_slice(x, dim, place, size, step), expected)
        source = draw(*shape[:dim], size, *shape[dim:][1:], seed=1)
        changed = x.index_copy(dim, torch.arange(start, start + size), source)
        assert torch.equal(poptorch.dynamic_update(x, source, dim, place, size), changed)


def test_dynamic_slices_on_the_devices_and_their_gradients():
    def run(x, source, start, other):
        return (
            poptorch.dynamic_slice(x, 0, start, 5, 2),
            poptorch.dynamic_slice(x, 1, other, 2, 1),
            poptorch.dynamic_update(x, source, -2, start, 4),
            poptorch.dynamic_slice(x.long(), 1, start.int(), 2, 1),
        )

    lowered.compare(run, draw(8, 5), draw(4, 5, seed=1), torch.tensor(3), torch.tensor([2]))


def test_one_program_slices_wherever_the_tensor_says():
    model = lowered.Call(lambda x, start: poptorch.dynamic_slice(x, 0, start[0], 3, 1))
    executor = poptorch.inferenceModel(model, make_options())
    x = torch.arange(8.0)
    for start in (0, 3, 5):
        assert torch.equal(executor(x, torch.tensor([start])), x[start : start + 3])
    assert torch.equal(executor(x, torch.tensor([7])), x[5:])  # it begins earlier, so that it fits
    with pytest.raises(IndexError):
        poptorch.dynamic_slice(x, 0, torch.tensor(7), 3, 1)


# Matrix products in parts

OPERANDS = {
    "matrices": ((4, 6), (6, 8)),
    "a batch and a matrix": ((3, 4, 6), (6, 8)),
    "two batches": ((2, 1, 4, 6), (5, 6, 8)),
    "a vector": ((4, 6), (6,)),
}


def test_serialized_products_and_their_gradients():
    cases = {}
    for mode in (Disabled, InputChannels, ReducingDim, OutputChannels):
        for name, (lhs, rhs) in OPERANDS.items():
            if rhs != (6,) or mode in (InputChannels, ReducingDim):
                cases[f"{name}, {mode}"] = (
                    lambda a, b, mode=mode: poptorch.serializedMatMul(a, b, mode, 2),
                    draw(*lhs),
                    draw(*rhs, seed=1),
                )
    for name, (function, lhs, rhs) in cases.items():
        assert torch.equal(function(lhs, rhs), lhs @ rhs), name
    lowered.compare_all(cases)


@pytest.mark.parametrize("keeps", [False, True])
def test_parts_of_float16_are_added_in_float32_if_that_is_wanted(keeps):
    # 2048 + 1 is 2048 in float16, so that adding one part after the other loses all that follow the first.
    def run(lhs, rhs, mode, *cotangents):
        model = lowered.Call(lambda a, b: poptorch.serializedMatMul(a, b, mode, 8, keeps))
        return lowered.run_jax(model, (lhs.half(), rhs.half()), {}, *cotangents)

    large = torch.tensor([[2048.0, *[1.0] * 7]])
    (made,), _, _ = run(large, torch.ones(8, 1), ReducingDim)
    assert made.dtype == np.float16
    assert float(made[0, 0]) == (2056 if keeps else 2048)
    _, _, gradients = run(large.T, torch.ones(1, 1), InputChannels, [jnp.ones((8, 1), jnp.float16)])
    assert float(gradients["1"][0, 0]) == (2056 if keeps else 2048)


def temporary_bytes(function, *args):
    """What XLA's program needs beside its inputs and results."""
    lowered_function, inputs = lowered.lower(function, *args)
    arrays = [lowered.as_array(tensor) for tensor in inputs]

    def forward(*arrays):
        return lowered_function({}, arrays)[0][0]

    def backward(*arrays):
        made, transpose = jax.vjp(forward, *arrays)
        return transpose(made)

    programs = [jax.jit(f).lower(*arrays).compile() for f in (forward, backward)]
    return [program.memory_analysis().temp_size_in_bytes for program in programs]


@pytest.mark.parametrize(
    ("mode", "shapes"),
    [
        pytest.param(InputChannels, ((4096, 64), (64, 128)), marks=pytest.mark.thorough),
        pytest.param(ReducingDim, ((64, 4096), (4096, 128)), marks=pytest.mark.thorough),
        (OutputChannels, ((64, 128), (128, 4096))),
    ],
)
def test_serialized_products_need_less_memory(mode, shapes):
    """In float16: XLA's product of float32 on a CPU needs none beside its operands and its result."""
    operands = [draw(*shape, dtype=torch.float16) for shape in shapes]
    whole = temporary_bytes(torch.matmul, *operands)
    parts = temporary_bytes(lambda a, b: poptorch.serializedMatMul(a, b, mode, 16), *operands)
    for of_parts, of_whole in zip(parts, whole, strict=True):
        assert of_parts < 0.8 * of_whole, (parts, whole)


# Printing


def test_printing_on_the_cpu_prints_values_and_gradients(capfd):
    x = torch.tensor([[1.0, 2.5], [-3.0, 0.0]], requires_grad=True)
    printed = poptorch.ipu_print_tensor(x, "x")
    assert torch.equal(printed, x)
    (printed * 2).sum().backward()
    assert torch.equal(x.grad, torch.full((2, 2), 2.0))
    poptorch.ipu_print_tensor(torch.tensor(7))
    poptorch.ipu_print_tensor(torch.tensor([True, False]), "flags", print_gradient=False)
    assert capfd.readouterr().err == (
        "x:\n[[ 1.0000  2.5000]\n [-3.0000  0.0000]]\n"
        "x_gradient:\n[[2.0000 2.0000]\n [2.0000 2.0000]]\n"
        "7\nflags: [ True False]\n"
    )


def test_printing_on_the_devices(capfd):
    def show(self, x):
        x = poptorch.ipu_print_tensor(x.sum(), "sum", digits=6)
        return poptorch.ipu_print_tensor(x, "quiet", print_gradient=False, digits=6)

    train_as_torch(show, accumulation=3, blocks=True, calls=1)
    lines = capfd.readouterr().err.splitlines()
    values, quiet, gradients = (
        [float(line.split(": ")[1]) for line in lines if line.startswith(f"{title}: ")]
        for title in ("sum", "quiet", "sum_gradient")
    )
    # First on the devices, where a loss is not divided by the number of micro-batches, then by plain torch.
    assert (len(values), len(quiet), len(gradients)) == (6, 6, 6), lines
    assert not [line for line in lines if line.startswith("quiet_gradient")]
    np.testing.assert_allclose(sorted(values[:3]), sorted(values[3:]), atol=2e-6)
    np.testing.assert_allclose(sorted(gradients[:3]), 3 * np.sort(gradients[3:]), atol=5e-6)


def test_printing_keeps_order_and_dtypes_in_inference(capfd):
    def show(x):
        return poptorch.ipu_print_tensor(x, "x"), poptorch.ipu_print_tensor(x.half(), "h")

    made, half = poptorch.inferenceModel(lowered.Call(show), make_options(3))(torch.tensor([1, 2, 3]))
    assert made.tolist() == [1, 2, 3]
    assert half.dtype == torch.float16
    lines = capfd.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith("x")] == ["x: [1]", "x: [2]", "x: [3]"]
    assert "h: [1.0000]" in lines


BRACES = {"open_bracket": "{", "close_bracket": "}"}


def test_layouts():
    for array, values, expected in [
        ([1.0, 20.0], {}, "[ 1.0000 20.0000]"),
        ([1.0, 20.0], {"digits": 1, "separator": ", "}, "[ 1.0, 20.0]"),
        ([1.0, 1e10], {}, "[1.0000e+00 1.0000e+10]"),
        ([1.5, float("nan"), float("inf")], {"digits": 1}, "[1.5 nan inf]"),
        ([0.5, 1e6], {"float_format": "none"}, "[  0.5 1e+06]"),
        ([0.5], {"float_format": "scientific", "digits": 2}, "[5.00e-01]"),
        ([1e10], {"float_format": "fixed", "digits": 0}, "[10000000000]"),
        ([[1, 2], [30, 4]], {**BRACES, "separator": ","}, "{{ 1, 2},\n {30, 4}}"),
        (list(range(10)), {"summarise_threshold": 9, "edge_items": 2}, "[0 1 ... 8 9]"),
        (list(range(6)), {"max_line_width": 7}, "[0 1 2\n 3 4 5]"),
        ([], {}, "[]"),
        ([[], []], {}, "[[]\n []]"),
        (3, {}, "3"),
    ]:
        assert Layout(**values).write(np.asarray(array)) == expected


# What is kept for the backward


def checkpointed(self, x, mark=poptorch.recomputationCheckpoint):
    for _layer in range(2):
        x = mark(torch.sin(x))
        for _operation in range(3):
            x = torch.tanh(x * self.last.weight.sum())
    return x


def bytes_held(function):
    """What the first stage holds of a micro-batch between its forward and its backward."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.Pipeline, "compile", lambda *_args: None)  # nothing runs
        training = poptorch.trainingModel(Trained(function), make_options(1, 2))
        training.compile(draw(8, 4))
    return engine.planning.plan_memory(training._compiled.pipeline)[0].num_held_bytes


@functools.cache
def bytes_held_without():
    return bytes_held(lambda self, x: checkpointed(self, x, lambda x: x))


def test_a_model_with_checkpoints_computes_the_rest_again():
    train_as_torch(checkpointed, calls=1)
    assert 0 < bytes_held(checkpointed) < bytes_held_without() / 2
    x, y = draw(2, 3), draw(3)
    assert poptorch.recomputationCheckpoint(x) is x
    assert poptorch.recomputationCheckpoint(x, y) == (x, y)
    assert poptorch.recomputationCheckpoint([x, y]) == [x, y]
    # Without training there is nothing to keep.
    assert_close([infer(poptorch.recomputationCheckpoint, x)], [x])


def in_torchs_regions(self, x, is_reentrant=False):
    for _layer in range(2):

        def region(x, shift):
            for _operation in range(3):
                x = torch.tanh(x * self.last.weight.sum()) + shift
            return x

        shift = torch.ones(())
        x = torch.utils.checkpoint.checkpoint(region, torch.sin(x), shift, use_reentrant=is_reentrant)
    return x


@pytest.mark.parametrize("is_reentrant", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_regions_of_torchs_own_checkpoints_are_computed_again(is_reentrant):
    def compute(self, x):
        return in_torchs_regions(self, x, is_reentrant)

    assert 0 < bytes_held(compute) < bytes_held_without() / 2
    if is_reentrant:  # the other kind trains in graphs/test_poptorch_own_backwards.py
        train_as_torch(compute, calls=1)


def test_a_region_of_torchs_checkpoints_raises_the_users_error_and_has_no_policy(log):
    value, contexts = draw(2, 3), (contextlib.nullcontext(), contextlib.nullcontext())

    def fail(x):
        raise KeyError("mine")

    def forward(region, x):
        options = {"use_reentrant": False, "context_fn": lambda: contexts}
        return torch.utils.checkpoint.checkpoint(region, x, **options)

    with pytest.raises(KeyError, match="mine"):
        infer(functools.partial(forward, fail), value)
    assert_close([infer(functools.partial(forward, torch.sin), value)], [torch.sin(value)])
    assert "The context_fn of torch.utils.checkpoint has no effect" in log[0]


# Names


def test_name_scopes(log):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x):
            with poptorch.NameScope("outer"):
                x = torch.relu(self.linear(x))
                with poptorch.NameScope("inner"):
                    x = torch.relu(x)
                x = torch.relu(x)
            return torch.relu(x)

    model = Model()
    executor = poptorch.inferenceModel(model, make_options().anchorTensor("kept", "outer/inner/relu"))
    x = draw(2, 3)
    assert_close([executor(x)], [model(x).detach()])
    names = [name for name in executor.getTensorNames() if "relu" in name]
    assert names == ["outer/relu", "outer/inner/relu", "outer/relu_1", "relu"]
    assert "outer/linear/linear" in executor.getTensorNames()
    assert "linear.weight" in executor.getTensorNames()
    assert_close([executor.getAnchoredTensor("kept")], [model(x).detach()])
    assert not log


# Hints


def test_nop_and_set_available_memory(log):
    lowered.compare(lambda x: poptorch.set_available_memory(poptorch.nop(x), 0.5) * 2, draw(3))
    assert log == [line for line in log if line.startswith("poptorch.set_available_memory has no effect")]
    assert len(log) == 1
    x = draw(3).requires_grad_()
    poptorch.nop(x).sum().backward()
    assert torch.equal(x.grad, torch.ones(3))


# Convolutions side by side


class Convolutions(nn.Module):
    def __init__(self, change=lambda multi: multi, is_within=True):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(2, 3, 3), nn.Conv2d(2, 3, 3)
        self.change, self.is_within = change, is_within

    def forward(self, x):
        with self.change(poptorch.MultiConv()):
            if self.is_within:
                y, z = self.first(x), self.second(x)
        if not self.is_within:
            y, z = self.first(x), self.second(x)
        return torch.cat([y, z]), poptorch.identity_loss((y * z).square(), "mean")


def change_everything(multi):
    return (
        multi.availableMemoryProportions([0.5, 0.2])
        .partialsTypes([torch.float32, torch.float16])
        .planType(poptorch.MultiConvPlanType.Serial)
        .perConvReservedTiles(120)
        .cycleBackOff(0.3)
        .enableConvDithering(True)
    )


def test_multi_conv_trains_as_torch(log):
    trained = TrainedAlike(Convolutions(change_everything), make_optimizer=make_sgd)
    trained.call(draw(2, 2, 5, 5))
    trained.compare()
    assert len([line for line in log if line.startswith("poptorch.MultiConv.")]) == 6


def test_multi_convs_that_are_refused():
    three = Convolutions(lambda multi: multi.availableMemoryProportions([0.1] * 3))
    for model, text in [
        (three, "availableMemoryProportions was given 3 values, but there are 2 convolutions in it"),
        (Convolutions(is_within=False), "The MultiConv in .* has no convolution in it"),
    ]:
        with pytest.raises(poptorch.Error, match=text):
            infer(None, draw(2, 2, 5, 5), model=model)


# Loops and conditionals


def looped(self, x):
    """The state has a counter and a mask, too. torch's checkpoint has no effect in a body."""

    def body(number, x, positive, y):
        weight = self.last.weight @ self.first.weight
        x = torch.utils.checkpoint.checkpoint(functional.linear, x, weight, use_reentrant=False)
        x = torch.tanh(x) + number * y
        return number + 1, y, x > 0, torch.where(positive, x, -x)

    number = torch.zeros((), dtype=torch.int64)
    return poptorch.for_loop(5, body, [number, x[:, :4], x[:, 2:] > 0, x[:, 2:]])[3]


def branched(self, x):
    branches = lambda x, y: [self.last(x), y + 1], lambda x: (x[:, :4] * 2, torch.relu(x))
    return poptorch.cond(x.sum() > 0, branches[0], [x, x], branches[1], [x])[0]


def test_control_flow_trains_as_torch():
    train_as_torch(lambda self, x: looped(self, x) + branched(self, x))


def test_layers_and_rows_of_integers_in_bodies():
    """torch's own scan has no gradient for integers, and recurrent layers keep lists of weights."""
    norm, recurrent = nn.BatchNorm1d(3, eps=3.0).eval(), nn.LSTM(3, 3)

    def step(total, row):
        return total + norm(row), (row.argmax(-1), row * 2)

    def run(x):
        (y,) = poptorch.for_loop(2, norm, [x])
        (y,) = poptorch.cond(y.sum() > 1000, norm, [y], lambda y: -norm(y), [y])
        (z,) = poptorch.for_loop(2, lambda x: recurrent(x)[0], [x])
        return y, z, *scan(step, x, torch.stack([x, y]))[1]

    x = draw(4, 3)
    model = lowered.Call(run)
    model.norm, model.recurrent = norm, recurrent
    rows = torch.stack([x, -x / 8])  # it halves
    expected = [rows[1], recurrent(recurrent(x)[0])[0].detach(), rows.argmax(-1), rows * 2]
    assert_close(infer(None, x, model=model), expected)


@pytest.mark.thorough
def test_both_branches_loops_within_each_other_and_transposed_results():
    """Whose strides differ from time to time, and between branches."""

    def run(x, flag):
        (y,) = poptorch.cond(flag, lambda x: x + 1, [x], torch.neg, [x])
        (y,) = poptorch.cond(x.sum() > 0, lambda y: [y.t()], [y], lambda y: [y + 1], [y])
        loops = poptorch.for_loop(3, lambda y: poptorch.for_loop(2, lambda y: (y * 2 + x).t(), [y]), [y])
        return y, loops[0], *poptorch.for_loop(0, lambda x: [x + 1], [x])

    executor = poptorch.inferenceModel(lowered.Call(run), make_options())
    for flag in (True, False):
        x = draw(3, 3) if flag else -draw(3, 3)
        flags = torch.tensor([flag])
        assert_close(executor(x, flags), run(x, flags))


def test_a_loop_draws_other_numbers_each_time():
    def run(x):
        def twice(x):
            return poptorch.for_loop(2, lambda x, y: [torch.rand_like(x), x], [x, x])

        outer = poptorch.for_loop(2, lambda a, b, c, d: [*twice(a), a, b], [x, x, x, x])
        return torch.stack(outer)

    made = infer(run, torch.zeros(3)).flatten().tolist()
    assert len(set(made)) == 12
    assert all(0 < value < 1 for value in made)


@pytest.mark.thorough
def test_what_a_body_asks_for_and_what_it_may_not_have():
    def run(x):
        return poptorch.for_loop(2, lambda x: x + 1 if poptorch.isRunningOnIpu() else x, [x])[0]

    x = draw(3)
    assert_close([infer(run, x)], [x + 2])
    assert torch.equal(run(x), x)
    with pytest.raises(poptorch.Error, match="A tensor is made of numbers within a branch or a body"):
        infer(lambda x: poptorch.for_loop(2, lambda x: x + torch.tensor([1.0, 2.0, 3.0]), [x])[0], x)
    for name, body in (
        ("CPU", lambda x: poptorch.CPU(torch.neg, "neg")(x)),
        ("custom_op", lambda x: poptorch.custom_op([x], "A", "a", 1, [x])[0]),
    ):
        with pytest.raises(poptorch.Error, match=f"poptorch.{name} cannot be used in a branch, or in the"):
            infer(lambda x, body=body: poptorch.for_loop(2, body, [x])[0], x)


def returns_nothing(x):
    del x


def multiplies_wrong_shapes(x):
    return [x @ x]


def raises_key_error(x):
    return [{"other": x}["mine"]]


def asks_for_a_value(x):
    return [x * 2] if x.sum() > 0 else [x]


def names_a_device(x):
    return [x + torch.ones(3, device="ipu")]


def returns_another_shape(x):
    return [x[:1]]


def test_an_error_in_a_body_is_told_first(caplog):
    """Torch tells it after a page of its own frames."""
    for body, line, message in [
        (multiplies_wrong_shapes, "return [x @ x]", "RuntimeError: a and b must have same reduction dim"),
        (raises_key_error, 'return [{"other": x}["mine"]]', "KeyError"),
        (asks_for_a_value, "if x.sum() > 0", "Data-dependent branching"),
        (names_a_device, "torch.ones(3", 'The device "ipu" cannot be named within a branch or a body'),
        (returns_another_shape, "", "the body must return tensors of the shapes and dtypes that it takes"),
        (returns_nothing, "", "must return tensors in a list or a tuple"),
    ]:
        with pytest.raises(poptorch.Error) as caught:
            infer(lambda x, body=body: poptorch.for_loop(2, body, [x])[0], draw(2, 3))
        first = str(caught.value).splitlines()[0]
        assert message in first
        assert line in first
        assert (__file__ in first) == bool(line)
        assert not caplog.records
    with pytest.raises(poptorch.Error, match="test_poptorch_operations.py:.*RuntimeError: a and b"):
        body = multiplies_wrong_shapes
        infer(lambda x: poptorch.cond(x.sum() > 0, body, [x], torch.sin, [x])[0], draw(2, 3))
    with pytest.raises(ValueError, match="then_body and else_body must return tensors of the same shapes"):
        infer(lambda x: poptorch.cond(x.sum() > 0, lambda x: x[:1], [x], lambda x: x, [x])[0], draw(3))


def test_the_line_is_the_users_whatever_their_folders_are_called():
    """Scripts lie in clones of this repository, too: a folder's name does not make a file ours."""
    frames = [
        ("/home/somebody/ipu_pipeline/mine/torch/model.py", "return x @ y"),
        (str(Path(torch.__file__).parent / "_ops.py"), "return call()"),
    ]
    text = "".join(f'  File "{file}", line 3, in body\n    {code}\n' for file, code in frames)
    described = describe_control_flow_error(RuntimeError(text))
    assert described.startswith(f"{frames[0][0]}:3 (return x @ y): RuntimeError: ")


def test_operations_in_a_loops_body(capfd):
    def body(x):
        with poptorch.NameScope("body"):
            x = poptorch.ipu_print_tensor(poptorch.nop(x), "x", digits=1)
        start = torch.zeros((), dtype=torch.int64)
        x = poptorch.dynamic_update(x, poptorch.dynamic_slice(x, 0, start + 1, 1, 1), 0, start, 1)
        return poptorch.serializedMatMul(x, torch.ones(2, 2), ReducingDim, 2)

    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    (expected,) = poptorch.for_loop(2, body, [x])
    (made,) = infer(lambda x: poptorch.for_loop(2, body, [x]), x)
    assert_close([made], [expected])
    jax.effects_barrier()
    err = capfd.readouterr().err
    assert err.count("[[1.0 2.0]\n [3.0 4.0]]") == 2
    assert err.count("[[7.0 7.0]\n [7.0 7.0]]") == 2


# What is refused

WRONG = {
    poptorch.Error: {
        "dynamic_slice(X, 0, 1, 2, 1)": "Slice start argument to dynamic_slice must be a",
        "dynamic_slice(X, 0, ONE, 1.5, 1)": "Size must be an integer.",
        "dynamic_slice(X, 0, ONE, 2, 0)": "Step must be an integer. .*got 0",
        "dynamic_slice(X, 2, ONE, 2, 1)": "dim must be an integer from -2 to 1",
        "dynamic_slice(X, 0, ONE, 4, 1)": "size 4 is larger than dimension 0",
        "dynamic_slice(X, 0, X[0], 2, 1)": "start must have one integer; got a",
        "dynamic_slice([1], 0, ONE, 2, 1)": "must take a torch.tensor argument",
        "dynamic_update(X, X[0], 0, ONE, 2)": "input and src tensors must have same dimensionality.",
        "dynamic_update(X, X.double(), 0, ONE, 2)": "input and src tensor must have same dtype.",
        "dynamic_update(X, X[:2], 0, ONE, 1)": "src must have the shape of",
        "dynamic_update(X, X[:2], 0, 1, 2)": "Slice start argument to dynamic_update",
        "serializedMatMul(X, X.t(), InputChannels)": "factor is the number of parts. .* got 0",
        "serializedMatMul(X, X.t(), InputChannels, 2)": "InputChannels cuts, 3; got 2",
        "serializedMatMul(X, X.t(), ReducingDim, 3)": "ReducingDim cuts, 4; got 3",
        "serializedMatMul(X, X.t(), OutputChannels, 2)": "OutputChannels cuts, 3; got 2",
        "serializedMatMul(X[0], X.t(), InputChannels, 2)": "needs a matrix; lhs has 1 dim",
        "serializedMatMul(X, X[0], OutputChannels, 2)": "needs a matrix; rhs has 1 dim",
        "serializedMatMul(X, 3, InputChannels, 3)": "must take torch.tensor arguments. It got int",
        "nop(5)": "nop must take a torch.tensor argument",
        "ipu_print_tensor(3)": "ipu print tensor must take a torch.tensor argument.",
        "ipu_print_tensor(X, 3)": "title must be a string; got 3",
        "ipu_print_tensor(X, 'x', 1)": "print_gradient must be a bool; got 1",
        "ipu_print_tensor(X, float_format='e')": "float_format must be one of auto, fixed",
        "ipu_print_tensor(X, edge_items=0)": "edge_items is a number. .* from 1; got 0",
        "ipu_print_tensor(X, separator=None)": "separator must be a string; got None",
    },
    AssertionError: {
        "serializedMatMul(X, X.t(), 'rows')": "mode must be one of MatMulSerializationMode.*; got 'rows'",
        "serializedMatMul(X, X.t(), InputChannels, 2.0)": "factor must be an integer; got 2.0",
        "serializedMatMul(X, X.t(), InputChannels, 3, 1)": "keep_precision must be a bool; got 1",
        "MultiConv().availableMemoryProportions(1.5)": "must be floats from 0 to 1; got 1.5",
        "MultiConv().planType('Serial')": "must be one of MultiConvPlanType",
        "MultiConv().perConvReservedTiles(-1)": "must be an integer from 0; got -1",
        "MultiConv().cycleBackOff(2)": "must be from 0 to 1; got 2",
        "NameScope(3)": "name must be a string; got 3",
    },
    ValueError: {
        "MultiConv().partialsTypes([torch.float32, 'half'])": "must be torch.float32 or torch",
        "MultiConv().enableConvDithering(1)": "must be booleans; got 1",
        "NameScope('')": "must not be empty",
        "recomputationCheckpoint(X, 3)": "takes tensors; got int",
        "for_loop(2, torch.neg, (X,))": r"to be a list of tensors. \(Object is not list\)",
        "for_loop(2, torch.add, [X, 3])": r"\(Object contained in list at index 1 is not torch.tensor\)",
        "for_loop(-1, torch.neg, [X])": "count is how often the body runs, .* got -1",
        "for_loop(2, list, [])": "at least one tensor in inputs; the list is empty",
        "for_loop(2, lambda x: None, [X])": "it returned a NoneType",
        "for_loop(2, lambda x: x[0], [X])": "of the shapes and dtypes that it takes",
        "cond(YES, lambda: 3, [], lambda: 3, [])": "it returned a int",
        "cond(YES, torch.neg, X, torch.neg, [X])": r"then_inps to be a list of tensors. \(Object is not",
        "cond(YES, torch.neg, [X], torch.neg, [1])": r"else_inps .* \(Object contained in list at",
        "cond(True, torch.neg, [X], torch.neg, [X])": "the condition to be a tensor of one",
    },
}


def test_wrong_arguments():
    names = {"torch": torch, "poptorch": poptorch, "X": torch.zeros(3, 4), "ONE": torch.tensor(1)}
    names["YES"] = torch.tensor(True)
    names |= vars(poptorch.MatMulSerializationMode)
    for error, calls in WRONG.items():
        for text, match in calls.items():
            with pytest.raises(error, match=match) as caught:
                eval(f"poptorch.{text}", names)  # noqa: S307  # it is ours
            assert caught.type is error, text

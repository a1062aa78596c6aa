"""How operations find their lowerings, what is refused and how it is told, control flow, random numbers."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # as everybody calls it

from ipu_pipeline.ground import jax_core
from ipu_pipeline.poptorch import register_lowering
from ipu_pipeline.poptorch.lowering import registry
from tests.support import lowered
from tests.support.poptorch_front import model_of

LIBRARY = torch.library.Library("lowering_tests", "DEF")
LIBRARY.define("scaled_tanh(Tensor x, float scale) -> Tensor")
LIBRARY.impl("scaled_tanh", lambda x, scale: torch.tanh(x) * scale, "CPU")
LIBRARY.impl("scaled_tanh", lambda x, scale: torch.empty_like(x), "Meta")
LIBRARY.define("both(Tensor x, ScalarType dtype) -> (Tensor, Tensor)")
LIBRARY.impl("both", lambda x, dtype: (torch.empty_like(x), x.new_empty(2, dtype=dtype)), "Meta")
OPERATIONS = torch.ops.lowering_tests


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})


class Scaled(nn.Module):
    def forward(self, x):
        return OPERATIONS.scaled_tanh(x, 3.0)


def run(function, *args, cotangents=None):
    """Results of a module or a function of torch, and their gradients."""
    module = function if isinstance(function, nn.Module) else lowered.Call(function)
    results, _buffers, gradients = lowered.run_jax(module, args, {}, cotangents)
    return results, gradients


def scaled_tanh(x, scale):
    return scale * jnp.tanh(x)


def test_an_operation_of_the_users_has_the_lowering_that_is_registered(monkeypatch):
    x = torch.linspace(-1, 1, 5)
    for operation in (
        "lowering_tests::scaled_tanh",
        "lowering_tests::scaled_tanh.default",
        OPERATIONS.scaled_tanh,
        OPERATIONS.scaled_tanh.default,
    ):
        monkeypatch.setattr(registry, "_registered", {})
        if isinstance(operation, str):
            assert register_lowering(operation)(scaled_tanh) is scaled_tanh
        else:
            assert register_lowering(operation, scaled_tanh) is scaled_tanh
        (made,), gradients = run(Scaled(), x, cotangents=[jnp.ones(5)])
        np.testing.assert_allclose(made, 3 * np.tanh(x.numpy()), rtol=1e-6)
        np.testing.assert_allclose(gradients["0"], 3 - 3 * np.tanh(x.numpy()) ** 2, rtol=1e-5)


def test_a_lowering_of_several_results_gets_dtypes_and_its_results_are_cast():
    seen = []

    @register_lowering("lowering_tests::both")
    def both(x, dtype):
        seen.append(dtype)
        return x.astype(jnp.float16), jnp.array([1.9, 2.9])

    results, _gradients = run(lambda x: OPERATIONS.both(x, torch.int32), torch.ones(3))
    assert [np.dtype(dtype) for dtype in seen] == [np.int32]
    assert [result.dtype for result in results] == [np.float32, np.int32]
    np.testing.assert_array_equal(results[1], [1, 2])


def test_what_a_user_registers_comes_before_decompositions_and_before_ours():
    register_lowering("aten::addcmul", lambda x, a, b, value=1: x + 100)  # torch would decompose it
    register_lowering(torch.ops.aten.relu.default, lambda x: x - 100)
    x = torch.zeros(2)
    results, _gradients = run(lambda x: [torch.addcmul(x, x, x), F.relu(x)], x)
    np.testing.assert_array_equal(results, [[100, 100], [-100, -100]])
    kept = registry.kept_operations()
    assert torch.ops.aten.addcmul.default in kept
    assert torch.ops.aten.relu.default in kept
    assert torch.ops.aten.relu.out not in kept
    aten = torch.ops.aten  # these would become loops, or lose their meaning
    assert {aten.detach.default, aten.lstm.input, aten.gru.input, aten.rnn_tanh.input} <= set(kept)


def test_wrong_registrations_are_refused():
    for operation, function, error, text in [
        (3, scaled_tanh, TypeError, "operation must be one of torch.ops, or its name as a string; got int"),
        ("relu", scaled_tanh, ValueError, "'namespace::name'"),
        ("aten::wibble", scaled_tanh, ValueError, "torch has no operation aten::wibble. Define it"),
        ("aten::relu.wibble", scaled_tanh, ValueError, "torch has no operation aten::relu.wibble"),
        ("aten::relu_", scaled_tanh, ValueError, "aten::relu_ writes to its arguments"),
        ("aten::relu", 3, TypeError, "function must be callable; got int"),
    ]:
        with pytest.raises(error, match=text):
            register_lowering(operation, function)
    assert not [kept for kept in registry.kept_operations() if "wibble" in str(kept)]


def test_a_registered_lowering_that_returns_something_else_is_told():
    shape = r"registered for lowering_tests.scaled_tanh.default returned shape \(2,\), not \(3,\)"
    for function, text in [
        (lambda x, scale: x[:2], shape),
        (lambda x, scale: (x, x), "returned 2 results, not one array"),
        (lambda x, scale: None, "returned NoneType, not one array"),
    ]:
        register_lowering("lowering_tests::scaled_tanh", function)
        with pytest.raises(ValueError, match=text):
            run(Scaled(), torch.ones(3))


class Unsupported(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), Scaled()

    def forward(self, x):
        x = self.first(x)
        x = torch.cond(x.sum() > 0, lambda x: torch.special.airy_ai(x), lambda x: x.clone(), (x,))
        y = x.to(torch.complex32).abs()
        return self.second(x) + torch.special.airy_ai(x + 1) + y


def test_everything_without_a_lowering_is_told_at_once_with_its_place_and_the_mend():
    with pytest.raises(NotImplementedError) as caught:
        lowered.lower(Unsupported(), torch.eye(3))
    text = str(caught.value)
    first, *lines, last = text.splitlines()
    assert first == "The model uses what cannot be computed:"
    (scaled,) = (line for line in lines if "scaled_tanh" in line)
    start = "- lowering_tests.scaled_tanh.default has no lowering: in module 'second' (Scaled), "
    assert scaled.startswith(start)
    assert f"{__file__}:" in scaled
    assert scaled.endswith(": return OPERATIONS.scaled_tanh(x, 3.0).")
    (airy,) = (line for line in lines if "airy_ai" in line)
    assert ": x = torch.cond(" in airy  # where it is in a branch
    assert "; in module Unsupported, " in airy
    assert any("complex32" in line for line in lines)
    assert last.startswith("Say how JAX computes an operation with poptorch.register_lowering, as in")


def test_an_error_within_a_lowering_says_where_the_model_uses_it():
    def fail(x, scale):
        raise RuntimeError("wibble")

    register_lowering("lowering_tests::scaled_tanh", fail)
    with pytest.raises(RuntimeError, match="wibble") as caught:
        run(nn.Sequential(nn.ReLU(), Scaled()), torch.ones(3))
    assert "module '1' (Scaled)" in caught.value.__notes__[0]


def test_a_number_that_does_not_fit_is_an_error_that_says_where():
    with pytest.raises(OverflowError) as caught:
        run(lambda x: x + 2**40, torch.ones(2, dtype=torch.int64))
    assert "x + 2**40" in caught.value.__notes__[0]


class Control(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x, flag):
        from torch._higher_order_ops import map as mapped
        from torch._higher_order_ops import scan, while_loop

        chosen = torch.cond(flag, lambda x: self.layer(x), lambda x: x.sin(), (x,))
        _, power = while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 2), (torch.tensor(0), x))
        total, sums = scan(lambda carry, row: (carry + row, carry * row), x[0], x, dim=0)
        return chosen, power, total, sums, mapped(lambda row, y: row * y, x, x[0] * 2)


@pytest.mark.thorough
def test_control_flow_of_torch_is_that_of_jax():
    module, x = Control(), torch.arange(6.0).reshape(2, 3) / 5
    program, _inputs = lowered.lower(module, x, torch.tensor(True))
    values = {name: lowered.as_array(tensor) for name, tensor in program.tensors.items()}
    run = jax.jit(lambda *inputs: program(values, inputs)[0])
    for flag in (True, False):
        results = run(lowered.as_array(x), jnp.asarray(flag))
        expected = [
            module.layer(x) if flag else x.sin(),
            x * 8,
            x[0] + x.sum(0),
            torch.stack([x[0] * x[0], (x[0] + x[0]) * x[1]]),
            x * x[0] * 2,
        ]
        for ours, theirs in zip(results, expected, strict=True):
            lowered.close(ours, theirs, 1e-6, "control flow")


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")  # torch.export's own doing
def test_a_branch_has_its_gradients():
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: x.sin() * self.scale, lambda x: x * 0, (x,))

    module = model_of(forward, linear=None, scale=nn.Parameter(torch.tensor(3.0)))
    x = torch.tensor([0.5, -1, 2])
    _results, gradients = run(module, x, cotangents=[jnp.ones(3)])
    np.testing.assert_allclose(gradients["0"], np.cos(x.numpy()) * float(module.scale), rtol=1e-6)
    np.testing.assert_allclose(gradients["model.scale"], np.sin(x.numpy()).sum(), rtol=1e-6)


class Random(nn.Module):
    def forward(self, x):
        y, weights = x.clone(), torch.tensor([0.1, 0.2, 0.7])
        return {
            "dropout": F.dropout(x, 0.3),
            "again": F.dropout(x, 0.3),
            "in eval": F.dropout(x, 0.3, training=False),
            "everything": F.dropout(x, 1.0),
            "channels": F.dropout2d(x.reshape(100, 100, 2, 2), 0.25),
            "alpha": F.alpha_dropout(torch.zeros_like(x), 0.3),
            "rrelu": F.rrelu(-x, training=True),
            "rand": torch.rand(200, 200),
            "randn": torch.randn_like(x),
            "half": torch.randn(200, 200, dtype=torch.float16),
            "randint": torch.randint(-3, 4, (200, 200)),
            "bernoulli": torch.bernoulli(x * 0.2),
            "randperm": torch.randperm(50),
            "exponential": y.exponential_(2.0),
            "normal": torch.normal(x * 5, 2.0),
            "gumbel": F.gumbel_softmax(weights.log().expand(20000, 3), hard=True),
            "multinomial": torch.multinomial(weights, 20000, replacement=True),
        }


def test_random_numbers_have_the_distributions_of_torch():
    results, _gradients = run(Random(), torch.ones(200, 200))
    torch.manual_seed(0)
    names = list(Random()(torch.ones(200, 200)))
    made = {name: np.asarray(value, np.float64) for name, value in zip(names, results, strict=True)}
    near = {
        "dropout": {0: 0.3, 1 / 0.7: 0.7},
        "again": {0: 0.3, 1 / 0.7: 0.7},
        "in eval": {1: 1},
        "everything": {0: 1},
        "randint": dict.fromkeys(range(-3, 4), 1 / 7),
        "bernoulli": {0: 0.8, 1: 0.2},
        "multinomial": {0: 0.1, 1: 0.2, 2: 0.7},
    }
    for name, parts in near.items():
        counts = collections.Counter(made[name].reshape(-1).round(5))
        assert counts.keys() == {round(value, 5) for value in parts}, name
        for value, part in parts.items():
            assert counts[round(value, 5)] / made[name].size == pytest.approx(part, abs=0.02), name
    assert (made["dropout"] != made["again"]).any()
    channels = made["channels"].reshape(100 * 100, 4)
    assert (channels == channels[:, :1]).all()
    assert (channels == 0).mean() == pytest.approx(0.25, abs=0.02)
    assert made["alpha"].mean() == pytest.approx(0, abs=0.03)
    assert -1 / 3 - 1e-6 <= made["rrelu"].min() < -0.32
    assert -0.13 < made["rrelu"].max() <= -0.125
    assert made["rand"].mean() == pytest.approx(0.5, abs=0.01)
    assert (made["randn"].mean(), made["randn"].std()) == pytest.approx((0, 1), abs=0.02)
    assert (made["half"].mean(), made["half"].std()) == pytest.approx((0, 1), abs=0.02)
    assert sorted(made["randperm"]) == list(range(50)) != list(made["randperm"])
    assert made["exponential"].mean() == pytest.approx(0.5, abs=0.02)
    assert (made["normal"].mean(), made["normal"].std()) == pytest.approx((5, 2), abs=0.05)
    assert made["gumbel"].mean(0) == pytest.approx([0.1, 0.2, 0.7], abs=0.02)


def test_dropout_is_the_same_in_the_backward_and_another_one_in_every_row():
    """In every call, too: execution/test_poptorch_executor.py."""

    def forward(self, x):
        attended = F.scaled_dot_product_attention(x, x, torch.ones_like(x), dropout_p=0.5)
        return F.dropout(x, 0.5), attended, self.rnn(x)[0]

    module, x = model_of(forward, linear=None, rnn=nn.RNN(3, 4, 2, dropout=0.5)), torch.ones(50, 40, 3)
    cotangents = [jnp.ones(x.shape), jnp.zeros(x.shape), jnp.zeros((50, 40, 4))]
    results, gradients = run(module, x, cotangents=cotangents)
    dropped, attended, hidden = map(np.asarray, results)
    np.testing.assert_array_equal(gradients["0"], dropped)
    assert attended.mean() == pytest.approx(1, abs=0.1)
    assert attended.std() > 0.05
    for found in (dropped, attended, hidden):
        assert np.abs(found[:, 0] - found[:, 1]).max() > 0.01


def primitives(jaxpr, found):
    for equation in jaxpr.eqns:
        found[equation.primitive.name] += 1
        for inner in jax_core.jaxprs_in_params(equation.params):
            primitives(inner, found)
    return found


def slices(x):
    return x[1:, ::2], x.roll(1, 0), x.chunk(2), x.unfold(0, 2, 1), x.flip(0)


@pytest.mark.parametrize(
    ("module", "shape", "has"),
    [
        (nn.Conv2d(2, 3, 3), (1, 2, 8, 8), {"conv_general_dilated": 1}),
        (nn.MaxPool2d(2), (1, 2, 8, 8), {"max": 3}),
        (nn.MaxPool2d(3, 2), (1, 2, 8, 8), {"reduce_window_max": 1}),
        (nn.AvgPool2d(2), (1, 2, 8, 8), {"reduce_window_sum": 1}),
        (nn.AdaptiveMaxPool2d(4), (1, 2, 8, 8), {"max": 3}),
        (nn.Upsample(scale_factor=2), (1, 2, 8, 8), {"broadcast_in_dim": 2}),
        (nn.LSTM(3, 4, bidirectional=True), (5, 1, 3), {"scan": 2}),
        (nn.ReflectionPad2d(2), (1, 2, 8, 8), {"concatenate": 4}),
        (nn.CircularPad2d(2), (1, 2, 8, 8), {"concatenate": 2}),
        (slices, (4, 6), {"rev": 1}),
    ],
    ids=lambda value: type(value).__name__ if callable(value) else None,
)
def test_a_layer_becomes_what_one_would_write_by_hand(module, shape, has):
    program, inputs = lowered.lower(module, torch.ones(shape))
    values = {name: lowered.as_array(tensor) for name, tensor in program.tensors.items()}
    jaxpr = jax.make_jaxpr(program)(values, [lowered.as_array(tensor) for tensor in inputs])
    found = primitives(jaxpr.jaxpr, collections.Counter())
    assert {name: found[name] for name in has} == has
    assert not {"gather", "scatter", "sort", "argmax", "while"} & found.keys()


def test_the_gradient_of_a_maximum_goes_to_the_first_of_equal_elements():
    layers = [nn.MaxPool2d(2), nn.MaxPool2d((1, 4)), nn.MaxPool2d(5), nn.MaxPool2d(2, ceil_mode=True)]
    layers += [nn.MaxPool3d((1, 2, 3)), nn.MaxPool2d((2, 3), 2, dilation=(2, 1), return_indices=True)]
    layers += [nn.AdaptiveMaxPool2d((4, 2)), nn.AvgPool2d(3, 2, 1, count_include_pad=False)]
    layers.append(nn.AdaptiveAvgPool2d((4, 4)))
    torch.manual_seed(0)
    inputs = torch.randint(0, 3, (2, 3, 6, 9)).float()
    lowered.compare_all({str(layer): (layer, inputs) for layer in layers})

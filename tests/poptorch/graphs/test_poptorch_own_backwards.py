"""`torch.autograd.Function`s in models: their own backward is used, as torch uses it."""

import pytest
import torch
from torch.autograd.function import once_differentiable

import ipu_pipeline.poptorch as poptorch
from tests.poptorch.graphs.test_poptorch_capture import loss, train_as_torch, x
from tests.support.poptorch_front import assert_close, make_options, model_of


class Sign(torch.autograd.Function):
    """A straight-through estimator, whose context has more than tensors."""

    @staticmethod
    def forward(ctx, value, scale):
        ctx.save_for_backward(value, None)
        ctx.scale = scale
        assert ctx.needs_input_grad[1] is False
        return scale * value.sign()

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        value, nothing = ctx.saved_tensors
        assert nothing is None
        gradient *= ctx.scale  # it may be written to
        return torch.where(value.abs() <= 0.5, gradient, torch.tensor(0.25) * gradient), None


class Reversed(torch.autograd.Function):
    """Of adversarial training; `setup_context` apart from the forward."""

    @staticmethod
    def forward(value):
        return value.view_as(value)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.kept = {"shape": inputs[0].shape, "outputs": [output]}

    @staticmethod
    def backward(ctx, gradient):
        assert gradient.shape == ctx.kept["shape"]
        return -gradient * ctx.kept["outputs"][0]


class Product(torch.autograd.Function):
    """A layer: parameters among the arguments, gradients that are other than the right ones."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, value, weight, bias=None):
        ctx.save_for_backward(value, weight)
        return value @ weight.T + bias

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, gradient):
        value, weight = ctx.saved_tensors
        by_bias = gradient if ctx.needs_input_grad[2] else None  # torch sums what was broadcast
        return 2 * gradient @ weight, gradient.T @ value.tanh(), by_bias


class Sorted(torch.autograd.Function):
    """Several results: one an index, one that has no gradient, one that is no tensor."""

    @staticmethod
    def forward(ctx, value):
        values, order = value.sort(dim=-1)
        ctx.save_for_backward(order)
        total = value.sum()
        ctx.mark_non_differentiable(order, total)
        return values, order, None, total

    @staticmethod
    def backward(ctx, gradient, of_order, nothing, of_total):
        assert nothing is None
        (order,) = ctx.saved_tensors
        return torch.zeros_like(gradient).scatter(-1, order, gradient) + of_order.sum() + of_total


class Halved(torch.autograd.Function):
    """No gradient at all."""

    @staticmethod
    def forward(ctx, value):
        return value / 2

    @staticmethod
    def backward(ctx, gradient):
        return None


def straight_through(self, x):
    return (Sign.apply(self.linear(x), scale=3.0) - x).square()


def adversarial(self, x):
    with poptorch.Block("first", ipu_id=0):
        y = self.linear(x)
    with poptorch.Block("second", ipu_id=1):
        return (Reversed.apply(y) + self.linear(y)).square()


def layer(self, x):
    linear = self.linear
    return Product.apply(Product.apply(x, linear.weight, linear.bias).tanh(), linear.weight, x[0])


def several(self, x):
    values, order, _none, total = Sorted.apply(self.linear(x))
    return values * order.float() * total + self.linear(x)


def without(self, x):
    return Halved.apply(self.linear(x)) + self.linear(x).square()


def in_a_checkpoint(self, x):
    y = torch.utils.checkpoint.checkpoint(lambda y: Sign.apply(self.linear(y), 3.0), x, use_reentrant=False)
    return y.square() + self.linear(x)


def without_gradients(self, x):
    with torch.no_grad():
        y = Sign.apply(self.linear(x), 3.0)
    return (y - self.linear(x)).square()


def test_the_own_backward_is_used():
    forwards = [straight_through, layer, several, in_a_checkpoint, adversarial, without, without_gradients]
    train_as_torch(lambda self, x: loss(sum(forward(self, x) for forward in forwards)))


def test_inference():
    model = model_of(lambda self, x: Sorted.apply(Sign.apply(self.linear(x), 2.0)))
    values, order, nothing, total = poptorch.inferenceModel(model, make_options())(x)
    expected = model(x)
    assert nothing is None
    assert_close([values, order, total], [expected[0], expected[1], expected[3]])


def function_with(backward, forward=lambda ctx, value, other: value * 2):
    kinds = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type("Wrong", (torch.autograd.Function,), kinds)


def dirty(ctx, value, other):
    ctx.mark_dirty(value)
    return value.add_(1)


def gradients_in_forward(self, x):
    y = Sign.apply(self.linear(x), 2.0) + self.linear(x)
    return torch.autograd.grad(y.sum(), self.linear.weight, create_graph=True)[0]


def in_a_branch(self, x):
    return torch.cond(x.sum() > 0, lambda v: Sign.apply(v, 2.0), lambda v: 2 * v, (self.linear(x),))


def applied(backward, *forward):
    function = function_with(backward, *forward)
    return lambda self, x: function.apply(self.linear(x), None)


def reversible(ctx, gradient):
    kept = torch.ones(4, 3, requires_grad=True)
    with torch.enable_grad():
        (kept * 2).backward(gradient)
    return kept.grad, None


SHAPE = r"backward of Wrong returns a gradient of shape \(3,\) for argument 0, whose shape is \(4, 3\)"


def test_what_cannot_be_used():
    for forward, message in [
        (applied(lambda ctx, g: g), "backward of Wrong returns 1 gradients; its forward takes 2"),
        (applied(lambda ctx, g: (g, None, g)), "backward of Wrong returns 3 gradients"),
        (applied(lambda ctx, g: (g[0], None)), SHAPE),
        (applied(lambda ctx, g: (g * float(g.sum()), None)), "asks for a value of a tensor"),
        (applied(reversible), r"backward of Wrong calls .backward\(\) of a tensor"),
        (applied(lambda ctx, g: (g, None), dirty), "Wrong is a torch.autograd.Function that changes"),
        (applied(lambda ctx, g: (g, None), lambda ctx, v, o: 3), "forward of Wrong, .* no tensor"),
        (gradients_in_forward, "Sign is a torch.autograd.Function, and forward itself"),
        (in_a_branch, "Sign is a torch.autograd.Function within a branch"),
    ]:
        with pytest.raises(poptorch.Error, match=message):
            model = model_of(lambda self, x, made=forward: loss(made(self, x)))
            poptorch.trainingModel(model, make_options())(x)


def test_parameters_that_a_backward_was_not_given():
    model = model_of(lambda self, x: loss(function.apply(self.linear(x), None)))
    function = function_with(lambda ctx, g: (g @ model.linear.weight, None))
    with pytest.raises(poptorch.Error, match="backward of Wrong uses a parameter, or a buffer"):
        poptorch.trainingModel(model, make_options())(x)

"""Capturing models: what would go wrong in silence, and what is refused by name."""

import builtins
import copy
import functools
import os
import re
import signal
import threading

import pytest
import torch
from torch import nn
from torch._export import utils
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import exported_program
from torch.nn import functional

import ipu_pipeline.poptorch as poptorch
from ipu_pipeline.poptorch import markers, thread_views
from ipu_pipeline.poptorch.thread_views import changed_for_this_thread_alone
from tests.support.poptorch_front import (
    TrainedAlike,
    assert_close,
    assert_same_state,
    make_options,
    make_sgd,
    model_of,
    reference,
    seeded,
    through_file,
)


def infer(forward, *args, **attributes):
    return poptorch.inferenceModel(model_of(forward, **attributes), make_options())(*args)


def train_as_torch(forward, updates=2, **attributes):
    """Compares training with plain torch: the loss is what forward returns."""
    model = model_of(forward, **attributes)
    model.tied = model.linear.weight
    options, decay = make_options(1, 2), functools.partial(torch.optim.SGD, lr=0.1, weight_decay=0.1)
    trained = TrainedAlike(model, options, decay)
    for _update in range(updates):
        trained.call(x)
    trained.compare()
    assert model.tied is model.linear.weight
    return model


def loss(value):
    return poptorch.identity_loss(value, reduction="mean")


x = torch.linspace(-1, 1, 12).reshape(4, 3)


# Regions without gradients.


def without_gradient(self, x):
    with torch.no_grad():
        y = self.linear(x)
    return loss(self.linear(x) * y)


@torch.no_grad()
def _target(self, x):
    return self.linear(x)


def in_every_way(self, x):
    with torch.no_grad():
        y = self.linear(x)
    with torch.inference_mode(False):
        z = self.linear(x)
    y = y + self.linear(x).detach()
    return self.linear(x) * (y + _target(self, x)) + z * torch.no_grad()(self.linear)(x)


def what_it_was_given(self, x):
    """torch's `float` of float32 and its broadcast of equal shapes are the tensor itself, with a gradient.

    Export takes them for new ones, so that the loss of a model that measures something first had none.
    """
    y = self.linear(x)
    with torch.no_grad():
        y.float().contiguous()
        functional.l1_loss(y, x)
        doubled = 2 * y
    return (y - doubled) ** 2


def around_loops(self, x):
    """Export forgot regions with a loop or a branch in them, and bodies within bodies."""

    def twice(y):
        return poptorch.for_loop(2, lambda z: self.linear(z), [y])

    with torch.no_grad():
        y = self.linear(x)
        (z,) = poptorch.for_loop(2, twice, [x])
    with torch.no_grad():
        (y,) = poptorch.cond(x.sum() < 9, lambda y: y + self.linear(z), [y], self.linear, [y])
    (z,) = twice(z)
    return (self.linear(x) + y) * z


def counting(self, x):
    self.buffer.mul_(2)
    return self.linear(x) * self.buffer


def with_a_gradient_in_forward(self, x):
    y = self.linear(x)
    (gradient,) = torch.autograd.grad(y.pow(2).sum(), self.linear.weight, create_graph=True)
    return y.mean() + gradient.norm()


def in_two_stages(self, x):
    with poptorch.Block("a", ipu_id=0):
        y = self.linear(x)
    with poptorch.Block("b", ipu_id=1):
        return functional.linear(x, self.tied) * y.tanh()


@pytest.mark.parametrize(
    "forwards",
    [
        [what_it_was_given],
        [around_loops],
        [in_every_way, counting, with_a_gradient_in_forward, in_two_stages],
    ],
    ids=["a region first", "around loops", "others"],
)
def test_gradients_are_torchs(forwards):
    """They stop where they stop there; of buffers that count, and of a weight of two stages."""
    parts = [lambda self, x, f=forward: f(self, x).mean() for forward in forwards]
    train_as_torch(lambda self, x: loss(sum(p(self, x) for p in parts)), buffer=torch.tensor(1.0))


def test_inference_mode_has_no_gradient():
    """In forward it means the same as no_grad; around a call neither matters."""

    def inferred(self, x):
        with torch.inference_mode():
            y = self.linear(x)
        return loss(self.linear(x) * y)

    model, plain = model_of(inferred), reference(model_of(without_gradient), make_sgd)
    with torch.no_grad():
        poptorch.trainingModel(model, make_options(), make_sgd(model.parameters()))(x)
    plain.train((x,), 1, 1, lambda loss: loss)
    assert_close(model.state_dict().values(), plain.model.state_dict().values())
    linear = seeded(lambda: nn.Linear(3, 3))
    executor = poptorch.inferenceModel(linear, make_options())
    with torch.inference_mode():
        assert_close([executor(x)], [linear(x)])


def test_parameters_that_are_not_trained():
    """torch gives one without a path to the loss no gradient, so that it does not decay."""

    def forward(self, x):
        y = self.linear(x)
        return loss(y), functional.linear(x, self.other).sum()

    model = model_of(forward, other=nn.Parameter(torch.ones(2, 3)))
    model.linear.bias.requires_grad_(False)
    before = model.linear.bias.clone()
    weight = model.linear.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.5)
    poptorch.trainingModel(model, make_options(), optimizer)(x)
    assert torch.equal(model.other, torch.ones(2, 3))
    assert torch.equal(before, model.linear.bias)
    assert not torch.equal(weight, model.linear.weight)
    other = model_of(lambda self, x: loss(self.linear(x)))
    poptorch.trainingModel(other, make_options(), torch.optim.SGD([other.linear.bias], lr=1.0))(x)
    assert torch.equal(other.linear.weight, weight)


# Buffers and attributes.


def test_buffers_change_attributes_do_not():
    """What is assigned is as before, too."""

    def count(self, x):
        self.buffer += 1
        self.plain += 1
        self.assigned = self.assigned + 1
        self.new = x
        return self.linear(x), self.buffer, self.plain, self.assigned * 1

    plain, assigned = torch.tensor([0]), torch.tensor([5])
    model = model_of(count, buffer=torch.tensor([0]), plain=plain, assigned=assigned)
    executor = poptorch.inferenceModel(model, make_options())
    for call in (1, 2, 3):
        _y, *found = executor(x)
        assert [value.tolist() for value in found] == [[call], [1], [6]]
    assert (model.buffer.tolist(), plain.tolist()) == ([0], [0])
    assert model.plain is plain
    assert model.assigned is assigned
    assert not hasattr(model, "new")
    executor.copyWeightsToHost()
    assert model.buffer.tolist() == [3]


def test_named_buffers_are_copied_to_the_devices():
    model = model_of(lambda self, x: x + self.buffer_a + self.buffer_b, buffer_a=x, buffer_b=x)
    executor = poptorch.inferenceModel(model, make_options(updatable_named_buffers=["buffer_a"]))
    with pytest.raises(poptorch.Error, match="Model has not been compiled"):
        executor.copyNamedBuffersToDevice()
    assert_close([executor(x)], [3 * x])
    model.buffer_a.zero_()
    model.buffer_b.zero_()
    executor.copyNamedBuffersToDevice()
    assert_close([executor(x)], [2 * x])
    other = poptorch.inferenceModel(model, make_options())
    with pytest.raises(poptorch.Error, match="No named buffers marked as updatable"):
        other.copyNamedBuffersToDevice()
    wrong = poptorch.inferenceModel(model, make_options(updatable_named_buffers=["nobody"]))
    wrong(x)
    with pytest.raises(poptorch.Error, match=r"names \['nobody'\], which the model does not have"):
        wrong.copyNamedBuffersToDevice()


def change_parameter(self, x):
    with torch.no_grad():
        self.linear.weight.mul_(2)
    return self.linear(x)


def change_constant(self, x):
    self.table[0].add_(1)
    return x + self.table[0]


def differentiate_with_respect_to_a_leaf(self, x):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(self.linear(x).pow(2).sum(), x)[0]


def assigning(name, make):
    """A forward that assigns what is made of the model, and uses it."""

    def forward(self, x):
        setattr(self, name, make(self))
        made = getattr(self, name)
        return self.linear(x) + (made(x) if isinstance(made, nn.Module) else made).sum()

    return forward


def remove_buffer(self, x):
    del self.buffer
    return x


def assign_data(self, x):
    self.buffer.data = self.buffer + 1
    return x + self.buffer


def write_in_a_later_stage(self, x):
    with poptorch.Block("a", ipu_id=0):
        y = x + self.buffer
    with poptorch.Block("b", ipu_id=1):
        self.buffer.copy_(y.mean())
    return y * 2


class Boxed:
    def __init__(self, tensor):
        self.tensor = tensor


MADE, CALLING = "is made by the model's forward", "when calling the forward method"
NEW_BUFFER = f"Buffer mask {MADE}. Make it in __init__"
REASSIGNED = f"Buffer buffer is reassigned within the model {CALLING}"
REPLACED = f"Parameter weight is removed or replaced {CALLING}"
OTHER_MODULE = r"(Module|Parameter) linear\S* is removed or replaced"
ITEM = r"x.sum\(\).item\(\).* asks for a value of a tensor"
BOXED = r"the result\[0\] of the model's forward is an object with tensors"
CHANGED_CONSTANT = "A tensor of a list or a closure, neither a buffer nor an input, is changed"
SHAPE = r"Input args\[0\] of shape \(4, 3\) has another shape after the model's forward, \((3, 4|1, 4, 3)\)"
REFUSED = {
    "constant": (change_constant, CHANGED_CONSTANT),
    "parameter": (change_parameter, "Parameter linear.weight is changed by the model's forward"),
    "if": (lambda self, x: x if x.sum() > 0 else -x, r"test_poptorch_capture.py:\d+.* asks for a value"),
    "mask": (lambda self, x: x[x > 0].sum(), "asks for a value of a tensor"),
    "size": (lambda self, x: x.unique(), "the size of what unique returns depends on values"),
    "numpy": (lambda self, x: torch.from_numpy(x.numpy()), "asks for a value of a tensor"),
    "new buffer": (assigning("mask", lambda model: nn.Buffer(torch.arange(3.0))), NEW_BUFFER),
    "new module": (assigning("late", lambda model: nn.Linear(3, 3)), f"Module late {MADE}"),
    "other parameter": (assigning("weight", lambda model: nn.Parameter(model.weight * 2)), REPLACED),
    "other module": (assigning("linear", lambda model: nn.Linear(3, 3)), OTHER_MODULE),
    "other buffer": (assigning("buffer", lambda model: model.buffer + 1), REASSIGNED),
    "no buffer": (remove_buffer, f"Buffer buffer is removed from the model {CALLING}"),
    "data": (assign_data, r"assigns the `.data` of a tensor"),
    "item": (lambda self, x: (x, x.sum().item()), ITEM),
    "written later": (write_in_a_later_stage, "Buffer buffer is read in block a and written in block b"),
    "object returned": (lambda self, x: (Boxed(x), x), BOXED),
    "leaf": (differentiate_with_respect_to_a_leaf, "takes a tensor out of torch's sight"),
    "other shape": (lambda self, x: x.t_().add_(1), SHAPE),
    "only another shape": (lambda self, x: x.unsqueeze_(0) * 2, SHAPE),
    "half complex": (lambda self, x: x.chalf().abs(), "makes or takes a tensor of torch.complex32"),
    "lowering": (
        lambda self, x: torch.special.airy_ai(x),
        r"aten.special_airy_ai.default has no lowering: in module Model, .*test_poptorch_capture.py:\d+"
        r"[\s\S]*poptorch.register_lowering\(",
    ),
}


def test_refusals(capfd):
    for name, (forward, message) in REFUSED.items():
        weight, table = nn.Parameter(torch.ones(3, 3)), [torch.zeros(1)]
        model = model_of(forward, buffer=torch.zeros(1), weight=weight, table=table)
        before = {key: (value, value.clone()) for key, value in model.state_dict(keep_vars=True).items()}
        with pytest.raises(poptorch.Error, match=message):
            poptorch.inferenceModel(model, make_options())(x)
        assert capfd.readouterr().err == "", name
        after = model.state_dict(keep_vars=True)
        assert after.keys() == before.keys()
        for key, (tensor, value) in before.items():
            assert after[key] is tensor, f"{key} is as before {name}"
            assert torch.equal(tensor, value), f"{key} is as before {name}"
    options = make_options(source_location_excludes=["test_poptorch_capture", "poptorch_front"])
    with pytest.raises(poptorch.Error, match="has no lowering: in module Model.\n"):
        poptorch.inferenceModel(model_of(lambda self, x: torch.special.airy_ai(x)), options)(x)
    with pytest.raises(KeyError, match="mine"):  # the user's own
        infer(lambda self, x: {}["mine"], x)
    with pytest.raises(poptorch.Error, match="is an object with tensors in it, which are not found"):
        infer(lambda self, box: box.tensor, Boxed(x))


def test_buffers_that_share_memory():
    """One whose elements do is only read; one within another that is written is refused."""
    model = model_of(lambda self, x: loss(self.linear(x) * self.mask))
    model.register_buffer("mask", torch.ones(1, 3).expand(4, 3))
    poptorch.trainingModel(model, make_options())(x)
    assert model.state_dict()["mask"].shape == (4, 3)
    model = model_of(lambda self, x: self.part.add_(1) + self.buffer.sum(), buffer=torch.zeros(4))
    model.register_buffer("part", model.buffer[:2])
    with pytest.raises(poptorch.Error, match="buffer and part share memory, .* Register a copy"):
        poptorch.inferenceModel(model, make_options())(x)


def test_hooks_on_gradients():
    def hooked(self, x):
        y = self.linear(x)
        y.register_hook(lambda gradient: 2 * gradient)
        return loss(y)

    with pytest.raises(poptorch.Error, match="forward calls register_hook of a tensor"):
        poptorch.trainingModel(model_of(hooked), make_options())(x)
    for add, place in [
        (lambda m: m.register_full_backward_hook(lambda *args: None), "module 'linear'"),
        (lambda m: m.weight.register_hook(lambda g: 2 * g), "parameter 'linear.weight'"),
        (lambda m: m.bias.register_post_accumulate_grad_hook(lambda p: None), "parameter 'linear.bias'"),
    ]:
        model = model_of(lambda self, x: loss(self.linear(x)))
        handle = add(model.linear)
        executor = poptorch.trainingModel(model, make_options())
        with pytest.raises(poptorch.Error, match=f"{place} has a hook"):
            executor(x)
        handle.remove()
        executor(x)


class LookedAt(nn.Module):
    """While its forward is captured, another thread does something with what is in it."""

    def __init__(self, look):
        super().__init__()
        self.inner = inner = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.thread = threading.Thread(target=lambda: look(inner))

    def forward(self, x):
        y = self.inner(x)
        if markers.current_capture() is not None and self.thread.ident is None:
            self.thread.start()
            self.thread.join()
        return self.inner(y)


def test_other_threads_see_weights_while_a_model_is_captured():
    """Export puts tensors without values in their place, and did so for all threads."""
    seen = []
    copies = [lambda model: model, copy.copy, copy.deepcopy]
    copies.append(lambda model: through_file(model, weights_only=False))
    model = LookedAt(
        lambda inner: seen.extend(dict(copied(inner).state_dict()) for copied in copies)
    ).eval()
    poptorch.inferenceModel(model, make_options())(torch.ones(4, 3))
    expected = model.inner.state_dict()
    assert len(seen) == len(copies)
    for found in seen:
        assert not {type(tensor) for tensor in found.values()} & {FakeTensor}
        assert found.keys() == expected.keys()
        assert_close(found.values(), expected.values())
    kept = [vars(module)[kind] for module in model.modules() for kind in ("_parameters", "_modules")]
    assert {type(held) for held in kept} == {dict}


def test_other_threads_train_a_model_while_it_is_captured():
    def change(inner):
        optimizer = torch.optim.SGD(inner.parameters(), 0.5)
        inner(batch).square().sum().backward()
        optimizer.step()
        inner[1].register_buffer("mine", torch.ones(1))

    torch.manual_seed(0)
    batch = torch.randn(4, 3)
    model = LookedAt(change).eval()
    expected = copy.deepcopy(model.inner)
    change(expected)
    executor = poptorch.inferenceModel(model, make_options())
    executor.compile(batch)
    assert_same_state(model.inner, expected)
    assert_close([executor(batch)], [expected.eval()(expected(batch)).detach()])


def test_another_thread_replaces_a_parameter_while_a_model_is_captured():
    def change(inner):
        inner[0].bias = nn.Parameter(torch.full((3,), 7.0))

    model = LookedAt(change).eval()
    executor = poptorch.inferenceModel(model, make_options())
    with pytest.raises(poptorch.Error, match="inner.0.bias of the model was replaced in another thread"):
        executor(torch.ones(4, 3))
    assert model.inner[0].bias.tolist() == [7] * 3
    assert_close([executor(torch.ones(4, 3))], [model(torch.ones(4, 3)).detach()])


def test_an_interrupt_leaves_the_model_as_it_was(monkeypatch):
    """In forward, and while the model gets back what it had."""

    def forward(self, x):
        raise KeyboardInterrupt

    def interrupted(*columns, strict):
        for number, row in enumerate(builtins.zip(*columns, strict=strict)):
            if number == 1:
                signal.raise_signal(signal.SIGINT)
            yield row

    model = model_of(forward)
    before = model.state_dict()
    with pytest.raises(KeyboardInterrupt):
        poptorch.inferenceModel(model, make_options())(x)
    monkeypatch.setattr(thread_views, "zip", interrupted, raising=False)
    with pytest.raises(KeyboardInterrupt), thread_views.changed_for_this_thread_alone(model):
        pass
    kept = [vars(module)[kind] for module in model.modules() for kind in ("_parameters", "_modules")]
    assert {type(held) for held in kept} == {dict}
    assert_close(model.state_dict().values(), before.values())


def test_one_thread_at_a_time_has_models_with_a_module_in_common():
    def enter():
        begun.set()
        with changed_for_this_thread_alone(nn.Sequential(common)):
            order.append("second")

    common, begun, order = nn.ReLU(), threading.Event(), []
    before = vars(common)["_parameters"]
    thread = threading.Thread(target=enter)
    with changed_for_this_thread_alone(nn.Sequential(common)):
        thread.start()
        begun.wait()
        for _time in range(100):
            os.sched_yield()  # it would enter
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
    assert vars(common)["_parameters"] is before


OF_CLASSES = ["__new__", "__init__", "__getattribute__", "__class_getitem__", "__doc__", "__hash__"]


def test_each_thread_has_the_methods_of_its_own_dictionary():
    def call(held, name):
        result = getattr(held, name)(*arguments.get(name, ()))
        result = list(result) if name in ("__iter__", "__reversed__", "keys", "values", "items") else result
        return None if name in ("__ior__", "__sizeof__") else result, dict(held.items())

    arguments = {
        **dict.fromkeys(["__or__", "__ror__", "__ior__", "update", "__eq__", "__ne__"], ({"c": 3},)),
        **dict.fromkeys(["__contains__", "__getitem__", "__delitem__", "get", "pop"], ("b",)),
        **dict.fromkeys(["__lt__", "__le__", "__gt__", "__ge__"], ({},)),
        **dict.fromkeys(["__setitem__", "setdefault"], ("c", 4)),
        "fromkeys": ("ab",),
    }
    for name in sorted(vars(dict).keys() - OF_CLASSES):
        model, results = nn.Module(), []
        others = vars(model)["_parameters"] = {"a": 1, "b": 2}
        with changed_for_this_thread_alone(model):
            held = vars(model)["_parameters"]
            held.clear()
            held.update({"x": 1, "b": 5})
            thread = threading.Thread(target=lambda to=results, args=(held, name): to.append(call(*args)))
            thread.start()
            thread.join()
            assert call(held, name) == call({"x": 1, "b": 5}, name)
        assert results == [call({"a": 1, "b": 2}, name)], name
        assert vars(model)["_parameters"] is others
        assert others == results[0][1]


# Losses.


def mse(self, x):
    return functional.mse_loss(self.linear(x), x)


def two_losses(self, x):
    return mse(self, x), functional.l1_loss(self.linear(x), x)


class Wrong(nn.Module):
    """Computes a loss and something of it, each on a line of its own."""

    def __init__(self, compute):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.compute = compute

    def forward(self, x):
        found = functional.mse_loss(self.linear(x), x)
        return self.compute(found, self.linear.weight)


def changed_by_another_name(found, _weight):
    found.view(1).mul_(2)
    return found


def scaled_in_place(found, weight):
    found += weight.abs().sum()
    return found


def test_what_is_computed_from_a_loss_and_returned_is_no_loss():
    for compute in (lambda found, _weight: (found, found.exp()), scaled_in_place, changed_by_another_name):
        with pytest.raises(poptorch.Error) as raised:
            poptorch.trainingModel(seeded(lambda made=compute: Wrong(made)), make_options())(x)
        (line,) = re.findall(rf"The value is from module Wrong, {__file__}:(\d+):", str(raised.value))
        assert 0 <= int(line) - compute.__code__.co_firstlineno < 4
        for part in (
            "The model returns a value that is computed from a loss",
            "found = functional.mse_loss(self.linear(x), x)",
            "wrap it in poptorch.identity_loss(loss, reduction='mean')",
        ):
            assert part in str(raised.value), part


def hidden(self, x):
    y = self.linear(x)
    made = torch.cond(y.sum() > 0, lambda y: functional.mse_loss(y, y + 1), lambda y: y.sum(), [y])
    return made, functional.l1_loss(y, x)


def in_a_region(self, x):
    def branch(x):
        return functional.mse_loss(self.linear(x), x)

    return torch.cond(x.sum() > -100, branch, lambda x: x.sum(), (x,))


def two_results(self, x):
    first, second = two_losses(self, x)
    return first + second, first - second


def test_losses_that_cannot_be_found():
    wide = r"The loss must be one floating-point number. The loss in .* is torch.float32 of shape \(4, 3\)"
    for forward, message in [
        (lambda self, x: self.linear(x).sum(), "Couldn't find a loss in graph!"),
        (two_losses, "Multiple independent losses found in graph. Graph must have one final loss"),
        (lambda self, x: functional.mse_loss(self.linear(x), x, reduction="none"), wide),
        (lambda self, x: (mse(self, x), self.linear(x))[1], "does not return its loss. The loss, mse"),
        (lambda self, x: (2 * mse(self, x)).detach(), "only values that are computed from it without"),
        (lambda self, x: 2 * loss(mse(self, x)), "identity_loss marks, but only what is computed from it"),
        (lambda self, x: (loss(self.linear(x)), mse(self, x))[1], "identity_loss marks, but other values"),
        (hidden, "within a branch, a loop or another region"),
        (in_a_region, "The loss is computed in .*, within a branch, a loop or another"),
        (two_results, "one scalar that forward returns, and no other"),
    ]:
        with pytest.raises(poptorch.Error, match=message):
            poptorch.trainingModel(model_of(forward), make_options())(x)
    assert len(infer(two_losses, x)) == 2


def train_by(forward, find_loss):
    """Compares an update with one of plain torch by a loss; returns the model's outputs, and that loss."""
    model, plain = model_of(forward), model_of(forward)
    made = poptorch.trainingModel(model, make_options())(x)
    wanted = find_loss(plain)
    wanted.backward()
    assert_close(model.state_dict().values(), [p.detach() - 0.01 * p.grad for p in plain.parameters()])
    return made, wanted.detach()


def test_what_is_returned_beside_a_loss():
    """Copies of it, values without gradients, metrics; the loss is what alone has a way for gradients."""

    def forward(self, x):
        found = mse(self, x)
        metric = functional.l1_loss(self.linear(x).detach(), x)
        two_losses(self, x)  # which nothing uses
        copies = [found.detach(), found.float(), found * 1.0, 0 + found, found.mean(), found.unsqueeze(0)]
        metrics = [metric, found.detach().exp(), 3 * self.linear(x).sum()]
        return {"found": (found, copies), "metrics": metrics}

    made, alone = train_by(forward, lambda plain: mse(plain, x))
    assert_close([*made["found"][1], made["found"][0]], [*(5 * [alone]), alone.reshape(1), alone])
    assert_close(made["metrics"][1:2], [alone.exp()])


def test_a_mark_counts_whatever_else_is_computed():
    def forward(self, x):
        first, second = two_losses(self, x)
        penalty = self.linear.weight.square().sum()
        marked = poptorch.identity_loss(2 * first + 0.1 * penalty, reduction="sum")
        return marked, 2 * marked, second, first.exp()

    train_by(forward, lambda plain: 2 * mse(plain, x) + 0.1 * plain.linear.weight.square().sum())


def test_the_result_that_several_losses_go_into_is_minimized():
    """As question answering of transformers has it: half the sum of two. Parts may be returned."""

    def forward(self, x):
        first, second = two_losses(self, x)
        return (first + 3 * second) / 2, first, second

    train_by(forward, lambda plain: forward(plain, x)[0])


def test_a_loss_of_one_element_keeps_its_shape():
    def forward(self, x):
        return poptorch.identity_loss(x[0, :1] * mse(self, x), "none")

    made, _loss = train_by(forward, lambda plain: forward(plain, x)[0])
    assert made.shape == (1,)


def test_the_device_of_pop_torch_in_forward():
    def forward(self, x):
        y = x.to("ipu") + torch.ones(3, device="ipu")
        return y + torch.arange(3, device=torch.device("ipu", 0)).to("ipu:0", torch.float32)

    assert_close([infer(forward, x)], [x + 1 + torch.arange(3)])


def test_a_loss_of_ones_own():
    train_as_torch(lambda self, x: poptorch.identity_loss(5 * (self.linear(x) - x) ** 2, reduction="sum"))
    with pytest.raises(AssertionError, match="Unsupported reduction type!"):
        poptorch.identity_loss(x, "max")


# Structures, arguments and results.


def test_structures_of_arguments_and_results():
    class Model(nn.Module):
        def forward(self, pair, factor=2, *, scale=None):
            y = pair["a"] * factor + pair["b"][0]
            return {"y": y, "rest": [y if scale is None else y * scale, "text", None], "given": pair["a"]}

    executor = poptorch.inferenceModel(Model(), make_options(2))
    a = torch.arange(4.0)
    made = executor({"a": a, "b": (a + 1,)}, scale=a)
    assert list(made) == ["y", "rest", "given"]
    assert made["rest"][1:] == ["text", None]
    assert_close([made["y"], made["rest"][0], made["given"]], [3 * a + 1, (3 * a + 1) * a, a])
    with pytest.raises(poptorch.Error, match=r"Keys mismatch: expected \['scale'\] but got \[\]"):
        executor({"a": a, "b": (a + 1,)})
    with pytest.raises(poptorch.Error, match=r"Type mismatch for pair\['b'\]: expected <class 'tuple'>"):
        executor({"a": a, "b": [a + 1]}, scale=a)
    with pytest.raises(poptorch.Error, match="Shape mismatch for scale"):
        executor({"a": a, "b": (a + 1,)}, scale=torch.ones(6))


def test_dtypes_come_back():
    def forward(self, x, large):
        cast = [x.to(dtype) for dtype in (torch.int32, torch.float16, torch.bfloat16)]
        return x.argmax(1), x > 0, *cast, torch.ones(1, dtype=torch.int64), large + 1

    large = torch.tensor([1, 2**31 - 2])
    for made, expected in zip(infer(forward, x, large), forward(None, x, large), strict=True):
        assert made.dtype == expected.dtype
        assert torch.equal(made, expected)


def test_float64_is_told(caplog, nothing_said):
    """And inputs that require a gradient, which are detached."""
    made = infer(lambda self, x: x / 3, x.double().requires_grad_())
    assert made.dtype == torch.float64
    assert not made.requires_grad
    assert_close([made], [x.double() / 3], 1e-6)
    assert "Tensors of float64 are computed in float32" in caplog.text
    assert "Input args[0] requires a gradient" in caplog.text


def test_no_tensor_at_all():
    executor = poptorch.inferenceModel(model_of(lambda self: self.linear.weight * 2), make_options(3))
    assert executor().shape == (9, 3)


def in_autocast(self, x):
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        y = self.linear(x)
    return loss(self.linear(x) * y)


def in_branch(self, x):
    def branch(x):
        with torch.no_grad():
            y = self.linear(x)
        return self.linear(x) * y

    return loss(torch.cond(x.sum() > -100, branch, lambda x: self.linear(x), (x,)))


def test_regions_without_gradients_within_others():
    model = train_as_torch(in_branch, updates=1)
    # Of a model that is wrapped already, torch would trace what watches the weights with the branches.
    inference = poptorch.inferenceModel(model, make_options())
    assert_close([inference(x)], [model(x).detach()])
    assert type(model.linear.weight) is not nn.Parameter, "it is watched again"
    with pytest.raises(poptorch.Error, match="switches gradients off within a region of torch.autocast"):
        poptorch.trainingModel(model_of(in_autocast), make_options())(x)
    assert infer(in_autocast, x).shape == ()


def test_a_buffer_that_keeps_anothers_old_value():
    def forward(self, x):
        self.buffer_old.copy_(self.buffer_new)
        self.buffer_new.add_(1)
        return x + self.buffer_old

    model = model_of(forward, buffer_old=torch.zeros(()), buffer_new=torch.ones(()))
    executor = poptorch.inferenceModel(model, make_options())
    assert_close([executor(x), executor(x)], [x + 1, x + 2])
    executor.copyWeightsToHost()
    assert (model.buffer_old.item(), model.buffer_new.item()) == (2, 3)


def test_any_keyword_arguments_keep_their_order():
    class Model(nn.Module):
        def forward(self, x, *, y=None, **others):
            return torch.cat([x, y, *others.values()])

    t = [torch.tensor([float(n)]) for n in range(4)]
    made = poptorch.inferenceModel(Model(), make_options())(t[0], b=t[2], a=t[3], y=t[1])
    assert made.tolist() == [0, 1, 2, 3]


def test_little_is_done_for_operations_that_a_model_does_not_have(monkeypatch):
    """torch would list all of them twice in each of its namespaces, and give all composite ones kernels."""
    listed, registered = [], []
    find, override = utils._materialize_cpp_cia_ops, exported_program._override_composite_implicit_decomp

    def counted():
        listed.append(1)
        find()

    def overridden(composites):
        registered.append(set(composites))
        return override(composites)

    infer(lambda self, x: self.linear(x), x)  # what torch keeps by itself is there
    monkeypatch.setattr(utils, "_materialize_cpp_cia_ops", counted)
    monkeypatch.setattr(exported_program, "_override_composite_implicit_decomp", overridden)
    infer(lambda self, x: self.linear(x), x)
    assert len(listed) == 1
    assert utils._materialize_cpp_cia_ops is counted
    (found,) = registered
    assert torch.ops.aten.matmul.default in found  # it has a lowering as a whole
    assert torch.ops.aten.type_as.default not in found
    assert len(found) < 100

"""What models call elsewhere: the host (`poptorch.CPU`), custom operations, and a search."""

import copy
import math
import runpy
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import ipu_pipeline.poptorch as poptorch
from ipu_pipeline.poptorch.operations import custom_ops
from tests.poptorch.operations.test_poptorch_operations import (
    Trained,
    draw,
    infer,
    make_sgd,
    train_as_torch,
)
from tests.support import lowered, pages, programs
from tests.support.poptorch_front import TrainedAlike, assert_close, make_options

# Beam search


def decode_by_hand(log_probs, blank, width):
    """Prefix beam search in a dictionary: prefix -> ends in a blank, ends in its last label."""
    beam = {(): (0.0, -math.inf)}
    for emitted in log_probs:
        new = {}

        def add(prefix, blank_too, label, new=new):
            old = new.get(prefix, (-math.inf, -math.inf))
            new[prefix] = np.logaddexp(old[0], blank_too), np.logaddexp(old[1], label)

        for prefix, (by_blank, by_label) in beam.items():
            total = np.logaddexp(by_blank, by_label)
            add(prefix, total + emitted[blank], -math.inf)
            for label, probability in enumerate(emitted):
                if label == blank:
                    continue
                if prefix and label == prefix[-1]:
                    add(prefix, -math.inf, by_label + probability)
                    add((*prefix, label), -math.inf, by_blank + probability)
                else:
                    add((*prefix, label), -math.inf, total + probability)
        ranked = sorted(new.items(), key=lambda item: -np.logaddexp(*item[1]))
        beam = dict(ranked[:width])
    found = [(prefix, np.logaddexp(*ends)) for prefix, ends in beam.items()]
    return sorted(((p, v) for p, v in found if v > -math.inf), key=lambda item: -item[1])


def check_decoded(found, expected, blank):
    """Compares the paths of one input with (labels, log probability), best first."""
    probabilities, lengths, labels = found
    for number, (path, value) in enumerate(expected[: len(probabilities)]):
        assert labels[number][: lengths[number]].tolist() == list(path), (number, path)
        assert set(labels[number][lengths[number] :].tolist()) <= {blank}
        assert float(probabilities[number]) == pytest.approx(value, abs=2e-5)


@pytest.mark.parametrize(("blank", "width"), [(0, 4), pytest.param(2, 30, marks=pytest.mark.thorough)])
def test_beam_search_as_by_hand(blank, width):
    probs = torch.log_softmax(2 * draw(9, 3, 4, seed=width), -1)
    lengths = torch.tensor([9, 4, 0])
    paths = min(width, 5)

    def run(probs, lengths):
        return tuple(poptorch.ctc_beam_search_decoder(probs, lengths, blank, width, paths))

    on_cpu, on_device = run(probs, lengths), infer(run, probs, lengths)
    for found in (on_cpu, on_device):
        assert [t.dtype for t in found] == [torch.float32, torch.int32, torch.int32]
        assert [tuple(t.shape) for t in found] == [(3, paths), (3, paths), (3, paths, 9)]
        for row in range(3):
            rows = probs[: lengths[row], row].double().numpy()
            check_decoded([part[row] for part in found], decode_by_hand(rows, blank, width), blank)


def test_known_decodings():
    # The best alignment is blank, blank: 0.36. But "a" has three alignments: 0.24 + 0.24 + 0.16.
    probs = torch.tensor([[[0.6, 0.4]], [[0.6, 0.4]]]).log()
    probabilities, lengths, labels = poptorch.ctc_beam_search_decoder(
        probs, torch.tensor([2]), beam_width=4, top_paths=3
    )
    assert labels.tolist() == [[[1, 0], [0, 0], [0, 0]]]
    assert lengths.tolist() == [[1, 0, 0]]
    assert probabilities[0, :2].exp().tolist() == pytest.approx([0.64, 0.36])
    assert probabilities[0, 2] == -math.inf  # there is no third one

    # "aa" needs a blank between.
    sure = torch.full((3, 1, 3), 1e-6)
    for time, label in enumerate((1, 0, 1)):
        sure[time, 0, label] = 1
    _probabilities, lengths, labels = poptorch.ctc_beam_search_decoder(sure.log(), torch.tensor([3]))
    assert (lengths.tolist(), labels.tolist()) == ([[2]], [[[1, 1, 0]]])


@pytest.mark.thorough
def test_a_search_has_no_gradient_and_takes_float16():
    def run(self, x):
        probs = torch.log_softmax(x[:, None], -1)
        decoded = poptorch.ctc_beam_search_decoder(probs, torch.tensor([len(x)]), beam_width=3)[0]
        return self.last(x) + decoded

    train_as_torch(run)
    probs = torch.log_softmax(draw(4, 1, 3), -1).half()
    found = poptorch.ctc_beam_search_decoder(probs, torch.tensor([4]))
    assert found[0].dtype == torch.float16
    assert not found[0].requires_grad


PROBS, LENGTHS = torch.zeros(3, 2, 4), torch.tensor([3, 3])


def test_searches_that_are_refused():
    for arguments, text in [
        ((3, LENGTHS), "ctc_beam_search_decoder: probs must be a torch.tensor argument."),
        ((PROBS, [3, 3]), "lengths must be a torch.tensor argument. It got list"),
        ((PROBS[0], LENGTHS), r"of shape \(time, batch, classes\); got torch.float32 of shape \(2, 4\)"),
        ((PROBS, torch.tensor([3])), r"lengths must be integers of shape \(2,\)"),
        ((PROBS, LENGTHS, 4), "blank must be less than the number of classes, 4; got 4"),
        ((PROBS, LENGTHS, 0, 0), "beam_width is a number of prefixes. .* from 1; got 0"),
        ((PROBS, LENGTHS, 0, 3, 4), "top_paths must be at most beam_width, 3; got 4"),
    ]:
        with pytest.raises(poptorch.Error, match=text):
            poptorch.ctc_beam_search_decoder(*arguments)


# The host


def sort_by_numpy(x):
    return torch.from_numpy(np.sort(x.detach().numpy(), axis=-1))


def test_a_function_of_the_host_does_what_cannot_be_compiled():
    def forward(x, indices):
        x = torch.tanh(x)
        made = poptorch.CPU(lambda x, *, indices: {"x": sort_by_numpy(x), "i": indices * 2}, "sort")(
            x, indices=indices
        )
        return made["x"] + 1, made["i"]

    x, indices = draw(4, 5), torch.arange(4)
    made = infer(forward, x, indices)
    expected = forward(x, indices)
    assert_close(made, expected)
    assert made[1].dtype == torch.int64


class Hosted(nn.Module):
    """Has a layer that runs on the host."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.on_host = poptorch.CPU(self.middle, "middle")

    def forward(self, x):
        with poptorch.Block(ipu_id=0):
            x = self.on_host(torch.tanh(self.first(x)))
        with poptorch.Block(ipu_id=1):
            x = self.last(x)
            return x, poptorch.identity_loss(x.square(), "mean")


def test_a_module_on_the_host_is_trained_as_in_torch():
    trained = TrainedAlike(Hosted(), make_options(1, 2), make_sgd)
    trained.plain.model.on_host = poptorch.CPU(trained.plain.model.middle, "middle")
    for _call in range(2):
        trained.call(draw(8, 4))
    trained.compare()


class Normalized(nn.Module):
    """A module on the host with buffers that it writes to; it is made there in forward."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 6))

    def forward(self, x):
        return poptorch.CPU(self.inner, "inner")(x) if poptorch.isRunningOnIpu() else self.inner(x)


@pytest.mark.thorough
def test_a_module_with_buffers_on_the_host():
    torch.manual_seed(1)
    normalized = Normalized()
    buffers = copy.deepcopy(dict(normalized.named_buffers()))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.normalized = nn.Linear(4, 6), normalized

        def forward(self, x):
            return poptorch.identity_loss(self.normalized(torch.tanh(self.first(x))).square(), "mean")

    trained = TrainedAlike(Model(), make_optimizer=make_sgd)
    trained.call(draw(8, 4))
    models = trained.model, trained.plain.model
    assert_close(*([p.detach() for p in model.parameters()] for model in models))
    for name, buffer in normalized.named_buffers():
        assert torch.equal(buffer, buffers[name])  # they stay as they are


def test_gradients_of_functions_of_the_host():
    def function(x, index):
        return x.square() * index, index + 1, x.detach()

    def run(self, x):
        first, second, third = poptorch.CPU(function, "function")(x, torch.arange(6))
        return self.last(first + second + third)

    train_as_torch(run)


@pytest.mark.thorough
def test_a_function_that_torch_cannot_differentiate_is_told_when_it_trains():
    def run(self, x):
        return self.last(poptorch.CPU(lambda x: torch.from_numpy(np.sort(x.numpy())), "sort")(x))

    with pytest.raises(
        poptorch.Error, match="CPU 'sort' has no gradient, .* RuntimeError: Can't call numpy"
    ):
        train_as_torch(run)
    train_as_torch(lambda self, x: run(self, x.detach()) + self.last(x))


@pytest.mark.thorough
def test_a_function_with_dropout_runs_but_does_not_train():
    dropout = nn.Dropout(0.5)

    def run(self, x):
        return self.last(poptorch.CPU(dropout, "dropout")(x))

    with pytest.raises(poptorch.Error, match="CPU 'dropout' has no gradient.* its results differ for"):
        train_as_torch(run)
    kept = infer(lambda x: poptorch.CPU(dropout, "dropout")(x), torch.ones(1000)) > 0
    assert 300 < int(kept.sum()) < 700


@pytest.mark.thorough
def test_an_error_on_the_host_leaves_the_weights():
    def check(x):
        if x.isnan().any():
            raise ValueError("no number")
        return x * 1

    def run(fails):
        model = Trained(lambda self, x: self.last(poptorch.CPU(check, "check")(x)))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        executor = poptorch.trainingModel(model, make_options(1, 2), optimizer)
        first = executor(x)
        if fails:
            with pytest.raises(Exception, match="no number"):
                executor(torch.full((4, 4), torch.nan))
        return [*first, *executor(x), *(p.detach() for p in model.parameters())]

    x = draw(4, 4)
    assert_close(run(True), run(False), 1e-7)


def test_functions_of_the_host_that_are_refused():
    x = draw(2, 3)
    uses = Trained(lambda self, x: poptorch.CPU(lambda x: self.last(x), "closure")(x))
    with pytest.raises(poptorch.Error, match="CPU 'closure' fails on tensors of ones.* must be arguments"):
        infer(None, draw(2, 4), model=uses)
    with pytest.raises(poptorch.Error, match="CPU 'bad' fails on tensors of ones.*ZeroDivisionError"):
        infer(lambda x: poptorch.CPU(lambda x: x / (1 // 0), "bad")(x), x)
    with pytest.raises(poptorch.Error, match="CPU 'none' must be given at least one tensor"):
        infer(lambda x: poptorch.CPU(lambda: x, "none")() + x, x)
    with pytest.raises(TypeError, match="layer_to_call must be callable; got int"):
        poptorch.CPU(3, "three")
    with pytest.raises(TypeError, match="ID must be a string; got 3"):
        poptorch.CPU(torch.neg, 3)

    with pytest.raises(Exception, match="CPU 'cut' returns tensors of other shapes or dtypes"):
        infer(lambda x: poptorch.CPU(lambda x: x[: 2 if x.sum() == 6 else 1], "cut")(x), torch.zeros(2, 3))


# Custom operations


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch):
    monkeypatch.setattr(custom_ops, "_registered", {})


def cube(x, bias):
    return x**3, x**3 + bias


def cube_gradient(inputs, results, gradients):
    (x, _bias), (first, second) = inputs, gradients
    assert len(results) == 2
    return 3 * x**2 * (first + second), second


def call_cube(self, x):
    bias = self.last.weight.sum() + torch.zeros_like(x)
    first, second = poptorch.custom_op([x, bias], "Cube", "com.acme", 1, example_outputs=[x, x])
    return self.last(first * second)


@pytest.mark.parametrize("vjp", [pytest.param(None, marks=pytest.mark.thorough), cube_gradient])
def test_a_custom_operation_trains_as_in_torch(vjp):
    assert poptorch.register_custom_op("com.acme", "Cube", 1, cube, vjp=vjp) is cube

    def expected(self, x):
        if poptorch.isRunningOnIpu():
            return call_cube(self, x)
        return self.last(x**3 * (x**3 + self.last.weight.sum()))

    train_as_torch(expected)
    parts = Trained(call_cube), Trained(expected)  # on the CPU JAX computes it, and its gradient
    for part in parts:
        part(draw(4, 4))[1].backward()
    assert_close([p.grad for p in parts[0].parameters()], [p.grad for p in parts[1].parameters()])


def test_an_operation_that_writes_to_an_input_and_one_whose_result_nobody_reads(log):
    """A teacher follows the student, in torch's parameters that need no gradient."""
    average = lambda new, old: (old + new) / 2  # noqa: E731
    poptorch.register_custom_op("com.acme", "Follow", 1, average, writes=[1])
    poptorch.register_custom_op("com.acme", "Follow", 2, average)

    def follow(self, x):
        with torch.no_grad():
            for version in (1, 2):
                weights = [self.first.weight, self.first.bias], [self.teacher.weight, self.teacher.bias]
                for new, old in zip(*weights, strict=True):
                    made = poptorch.custom_op([new, old], "Follow", "com.acme", version, [new])
                    made[0].mean()  # which nobody reads
            poptorch.CPU(lambda x: None, "logging")(x)
            return x - self.teacher(x)[:, :4]

    class Follows(Trained):
        def __init__(self):
            super().__init__(lambda self, x: self.last(x - follow(self, x[:, :4]).sum()))
            self.teacher = nn.Linear(4, 6).requires_grad_(False)

    trained = TrainedAlike(Follows(), make_options(1, 2), make_sgd)
    for seed in range(2):
        trained.call(draw(4, 4, seed=seed))
    trained.compare()
    for line, what in zip(
        log,
        ("custom operation 'Follow' of domain 'com.acme', version 2", "poptorch.CPU 'logging'"),
        strict=True,
    ):
        assert "test_poptorch_calls.py" in line
        assert f"nobody reads the results of {what}" in line
    with pytest.raises(
        ValueError, match=r"registered with writes=\[1\]: .* the example_outputs \[\(1,\)\]"
    ):
        poptorch.custom_op([draw(2), draw(2)], "Follow", "com.acme", 1, [draw(1)])


@pytest.mark.thorough
def test_a_vjp_is_used_in_place_of_jaxs():
    ten_times = lambda _inputs, _results, gradients: (10 * gradients[0],)  # noqa: E731
    poptorch.register_custom_op("com.acme", "Odd", 1, jnp.square, vjp=ten_times)
    x = draw(3).requires_grad_()
    function = lambda x: poptorch.custom_op([x], "Odd", "com.acme", 1, [x])[0]  # noqa: E731
    function(x).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 10.0))
    _, _, gradients = lowered.run_jax(lowered.Call(function), (x,), {}, [jnp.ones(3, np.float32)])
    np.testing.assert_array_equal(gradients["0"], 10)


@pytest.mark.thorough
def test_a_decorator_other_dtypes_and_integers():
    @poptorch.register_custom_op("com.acme", "Pick", 2)
    def pick(x, index, *, scale):
        return [x[index] * scale, index + 1]

    def run(x, index):
        return poptorch.custom_op((x, index), "Pick", "com.acme", 2, [x[:2].half(), index], {"scale": 3})

    index = torch.tensor([1, 0])
    x = draw(4)
    for made in (run(x, index), infer(run, x, index)):
        assert [t.dtype for t in made] == [torch.float16, torch.int64]
        assert_close(made, [(x[index] * 3).half(), index + 1], 1e-3)
    lowered.compare(lambda x: run(x.square(), index)[0].float(), x)


def test_attributes_reach_a_custom_operation():
    """On the host and on the devices, with the types that they were given."""
    given = []

    @poptorch.register_custom_op("test.poptorch", "ManyAttributeOp", 1)
    def many(x, **attributes):
        given.append(attributes)
        return x

    attributes = {
        "float_one": 1.0,
        "int_minus_five": -5,
        "floats": [1.0, -2.0, 3.0],
        "ints": [1, -2, 3],
        "a_string": "string with quotes and slash \" ' \\ end",
        "strings": ["abc", "def", "ghi"],
    }

    def run(x):
        return poptorch.custom_op([x], "ManyAttributeOp", "test.poptorch", 1, [x], attributes)[0]

    x = draw(3)
    assert_close([run(x), infer(run, x)], [x, x])
    assert len(given) > 1
    assert all(one == attributes for one in given)
    assert [type(value) for value in given[0].values()] == [type(v) for v in attributes.values()]


def test_attributes_that_are_refused():
    x = draw(2)
    for attributes, text in [
        ({3: 1}, "All attribute keys must be strings."),
        ({"a": None}, "Attribute values must be floats, ints, strings"),
        ({"a": [[1]]}, "Attribute values must be floats, ints, strings"),
        ({"a": [1, 2.0]}, "The types in a list/tuple attribute must all be the same."),
        ({"a": ["x", "ä"]}, "'ä' contains non-ASCII characters."),
        ([1], "attributes must be a dict; got list"),
    ]:
        with pytest.raises(ValueError, match=text):  # whether or not there is such an operation
            poptorch.custom_op([x], "Nobody's", "com.acme", 1, [x], attributes)


def test_what_is_not_registered_is_told_with_what_is():
    x = draw(2)
    call = lambda x: poptorch.custom_op([x], "Cube", "com.acme", 2, [x])  # noqa: E731
    text = "There is no custom operation 'Cube' of domain 'com.acme', version 2. Registered .* are: "
    with pytest.raises(poptorch.Error, match=f"{text}none"):
        call(x)
    poptorch.register_custom_op("com.acme", "Cube", 1, lambda x: x)
    poptorch.register_custom_op("b", "A", 1, lambda x: x)
    registered = "'A' of 'b', version 1; 'Cube' of 'com.acme', version 1"
    for run in (call, lambda x: infer(call, x)):
        with pytest.raises(poptorch.Error, match=text + registered):
            run(x)


@pytest.mark.thorough
def test_custom_operations_that_return_something_else():
    x = draw(2)
    poptorch.register_custom_op("a", "Short", 1, lambda x: x[:1])
    match = r"'Short' .* returned arrays of shapes \[\(1,\)\]; its example"
    with pytest.raises(poptorch.Error, match=match):
        infer(lambda x: poptorch.custom_op([x], "Short", "a", 1, [x])[0], x)
    poptorch.register_custom_op("a", "Nothing", 1, lambda x: None)
    with pytest.raises(poptorch.Error, match=r"'Nothing' .* must return .*; it returned \['NoneType'\]"):
        infer(lambda x: poptorch.custom_op([x], "Nothing", "a", 1, [x])[0], x)
    poptorch.register_custom_op("a", "Bad", 1, jnp.sin, vjp=lambda _inputs, _results, given: given * 2)
    with pytest.raises(poptorch.Error, match="The vjp of custom operation 'Bad' .* returned gradients of"):
        train_as_torch(lambda self, x: self.last(poptorch.custom_op([x], "Bad", "a", 1, [x])[0]))
    with pytest.raises(ValueError, match="inputs must be a list of tensors, at least one"):
        poptorch.custom_op([], "Bad", "a", 1, [x])
    for inputs, examples, name in ((x, [x], "inputs"), ([x], x, "example_outputs")):
        with pytest.raises(ValueError, match=rf"{name} must be a list .* got a tensor. Write \[tensor\]"):
            poptorch.custom_op(inputs, "Cube", "com.acme", 1, examples)
    with pytest.raises(ValueError, match="example_outputs must be a list of tensors, at least one"):
        poptorch.custom_op([x], "Bad", "a", 1, [3])


def test_registrations_that_are_refused():
    for arguments, keywords, error, text in [
        ((1, "A", 1, jnp.sin), {}, TypeError, "domain must be a string; got 1"),
        (("a", "A", "1", jnp.sin), {}, TypeError, "version must be an integer; got '1'"),
        (("a", "A", 1, 3), {}, TypeError, "function must be callable; got int"),
        (("a", "A", 1, jnp.sin), {"vjp": 3}, TypeError, "vjp must be callable; got int"),
        (
            ("a", "A", 1, jnp.sin),
            {"writes": 1},
            TypeError,
            "writes must be a list of numbers of inputs; got 1",
        ),
        (("a", "A", 1, jnp.sin), {"library": "x.so"}, ValueError, "a function or a library, not both"),
        (("a", "A", 1, jnp.sin), {"symbol": "x"}, ValueError, "there is no library"),
        (("a", "A", 1), {"library": "not there.so"}, OSError, "not there.so"),
    ]:
        with pytest.raises(error, match=text):
            poptorch.register_custom_op(*arguments, **keywords)
    assert not custom_ops._registered


PAGE = Path(__file__).parents[3] / "docs" / "poptorch_operations.md"


def test_the_pages_example(capsys):
    pages.execute(PAGE)
    assert capsys.readouterr().out == "tensor([-0.5000,  2.0000])\n"


# A library in C++

EXAMPLE = Path(__file__).parents[3] / "examples" / "custom_ops" / "train.py"
ATTRIBUTES = {
    "float_one": 0.1,
    "float_many": [1.5, -2.25, 1e-30],
    "int_one": -(2**40),
    "int_many": (7, -(2**62)),
    "string_one": "a \"quoted\" one, a \\ and 'another'",
    "string_many": ["x", 'y"', "\\z"],
}


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The example's operations, compiled."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler (c++)")
    module = runpy.run_path(str(EXAMPLE))
    return module, module["build"](tmp_path_factory.mktemp("library"))


@pytest.mark.thorough
def test_operations_of_a_library(library):
    module, path = library
    module["register"](path)
    with pytest.raises(ValueError, match="has no symbol 'Square'. It must be defined by XLA_FFI"):
        poptorch.register_custom_op("com.acme", "Square", 1, library=path)

    x, bias = draw(3, 2), draw(3, 2, seed=1)
    run = lambda x, bias: poptorch.custom_op([x, bias], "Cube", "com.acme", 1, [x, x])  # noqa: E731
    for made in (run(x, bias), infer(run, x, bias)):
        assert_close(made, [x**3, x**3 + bias])

    def leaky(self, x):
        if not poptorch.isRunningOnIpu():
            return self.last(nn.functional.leaky_relu(x, 0.02))
        return self.last(poptorch.custom_op([x], "LeakyRelu", "com.acme", 1, [x], {"alpha": 0.02})[0])

    train_as_torch(leaky)
    with pytest.raises(
        poptorch.Error, match="'Cube' .* is from a library, and has no gradient. Give .* vjp="
    ):
        train_as_torch(call_cube)
    text = torch.zeros(400, dtype=torch.uint8)

    def describe(x):
        return poptorch.custom_op([x], "ManyAttributeOp", "test.poptorch", 1, [text], ATTRIBUTES)[0]

    for made in (describe(x), infer(describe, x)):
        lines = bytes(made.tolist()).rstrip(b"\0").decode().splitlines()
        assert lines == [
            "float 0.100000001",
            "floats 1.5 -2.25 1e-30",
            f"int {-(2**40)}",
            f"ints 7 {-(2**62)}",
            "string a \"quoted\" one, a \\ and 'another'",
            'strings x y" \\z',
        ]
    with pytest.raises(poptorch.Error, match="Attribute 'empty' is an empty list, whose type a library"):
        poptorch.custom_op([x], "Cube", "com.acme", 1, [x], {"empty": []})


@pytest.mark.thorough
def test_the_example_trains(library):
    folder = library[1].parent
    printed = programs.run(EXAMPLE, folder, folder=folder, as_tests=True)
    first, *_others, last = map(float, printed.split()[1:])
    assert last < first / 2

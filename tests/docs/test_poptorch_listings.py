"""The programs of PopTorch's user guide, chapter "Features", as docs/poptorch.md lists them."""

import copy
import io
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import torch

import ipu_pipeline.poptorch as poptorch
from ipu_pipeline.poptorch.operations import custom_registry
from tests.support.poptorch_front import assert_close, assert_same_state, make_options, seeded
from tests.support.programs import ROOT

QUIET = {"show_compilation_progress_bar": False}


def quiet():
    return poptorch.Options().set(**QUIET)


class WithLoss(torch.nn.Module):
    """A linear layer; its forward returns the loss too, while it trains."""

    def __init__(self, size=10):
        super().__init__()
        self.fc = torch.nn.Linear(size, size)
        self.loss = torch.nn.MSELoss()

    def forward(self, x, target=None):
        x = self.fc(x)
        return (x, self.loss(x, target)) if self.training else x


def test_1_options_of_a_file(tmp_path):
    file = tmp_path / "options.cfg"
    file.write_text(
        "deviceIterations(1)\nsetExecutionStrategy(poptorch.ShardedExecution())\n"
        "replicationFactor(1)\nenableSyntheticData(True)\n"
    )
    options = poptorch.Options()
    options.loadFromFile(file)
    assert isinstance(options.execution_strategy, poptorch.ShardedExecution)
    assert (options.device_iterations, options.replication_factor, options.synthetic_data) == (1, 1, True)


def test_2_training_with_defaults_and_inference_on_the_cpu():
    model = seeded(WithLoss)
    plain = copy.deepcopy(model)
    training = poptorch.trainingModel(model, quiet())
    generator = torch.Generator().manual_seed(1)
    x, target = torch.rand(10, generator=generator), torch.rand(10, generator=generator)
    for _call in range(800):
        output, _loss = training(x, target)
    training.copyWeightsToHost()
    model.eval()
    assert torch.allclose(model(x), output, rtol=1e-4, atol=1e-4)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    for _call in range(800):
        optimizer.zero_grad()
        plain(x, target)[1].backward()
        optimizer.step()
    assert_close(model.state_dict().values(), plain.state_dict().values(), 1e-4)


class Separable(torch.nn.Sequential):
    """A convolution of each channel by itself, then one of all channels."""

    def __init__(self, inputs, outputs, stride):
        nn = torch.nn
        super().__init__(
            nn.Conv2d(inputs, inputs, 3, stride, 1, groups=inputs, bias=False),
            nn.BatchNorm2d(inputs),
            nn.ReLU6(),
            nn.Conv2d(inputs, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU6(),
        )


@pytest.mark.thorough
def test_3_a_network_like_mobilenet():
    nn = torch.nn
    model = seeded(
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU6(),
            Separable(8, 16, 2),
            Separable(16, 32, 2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(32, 100),
        )
    )
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.uniform_(-0.1, 0.1)
            module.running_var.uniform_(0.5, 1.5)
    model.eval()
    image = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(1))
    output = poptorch.inferenceModel(model, quiet())(image)
    expected = model(image)
    assert_close([output], [expected.detach()])
    assert output.topk(5).indices[0, 0] == expected.topk(5).indices[0, 0]


def test_4_float16():
    model = torch.nn.Linear(1, 10).half()
    x = torch.tensor([[0.5]]).half()
    output = poptorch.inferenceModel(model, quiet())(x)
    assert output.dtype == torch.float16
    assert_close([output], [model(x).detach()], 1e-3)


@pytest.mark.thorough
def test_5_modes_and_weights():
    model = seeded(WithLoss)
    model.eval()
    validating = poptorch.inferenceModel(model, quiet())
    model.train()
    training = poptorch.trainingModel(model, quiet())
    x, target = torch.rand(10), torch.rand(10)
    start = copy.deepcopy(model.state_dict())
    for _call in range(3):
        assert len(training(x, target)) == 2
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    saved = torch.load(file)
    assert not torch.equal(saved["fc.weight"], start["fc.weight"])
    on_device = validating(x)
    model.eval()
    on_host = model(x).detach()
    assert_close([on_device], [on_host])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model.train()
    optimizer.zero_grad()
    model(x, target)[1].backward()
    optimizer.step()
    assert_close([validating(x)], [on_host])
    validating.copyWeightsToDevice()
    model.eval()
    assert_close([validating(x)], [model(x).detach()])
    assert not torch.equal(model(x), on_host)


def test_6_another_branch_on_the_devices():
    class Model(torch.nn.Module):
        def forward(self, x):
            return x + 1 if poptorch.isRunningOnIpu() else x - 1

    model = Model()
    assert poptorch.inferenceModel(model, quiet())(torch.ones(1)).item() == 2
    assert model(torch.ones(1)).item() == 0


class EncoderLayer(torch.nn.Module):
    """A layer like BERT's: attention and two dense layers, each with a residual; it returns a tuple."""

    def __init__(self, size):
        super().__init__()
        nn = torch.nn
        self.attention = nn.MultiheadAttention(size, 2, batch_first=True)
        self.norms = nn.ModuleList([nn.LayerNorm(size), nn.LayerNorm(size)])
        self.dense = nn.Sequential(nn.Linear(size, 2 * size), nn.GELU(), nn.Linear(2 * size, size))

    def forward(self, x, mask):
        attended, _weights = self.attention(x, x, x, key_padding_mask=mask, need_weights=False)
        x = self.norms[0](x + attended)
        return (self.norms[1](x + self.dense(x)),)


class Bert(torch.nn.Module):
    """Embeddings and three layers."""

    def __init__(self, words=50, size=8):
        super().__init__()
        nn = torch.nn
        self.words, self.positions = nn.Embedding(words, size, padding_idx=0), nn.Embedding(16, size)
        self.layers = nn.ModuleList([EncoderLayer(size) for _layer in range(3)])
        self.head = nn.Linear(size, 2)

    def forward(self, tokens):
        x = self.words(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            (x,) = layer(x, tokens == 0)
        return {"logits": self.head(x[:, 0]), "hidden": x}


class Tuples(torch.nn.Module):
    """Returns the model's results as a tuple."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens):
        return tuple(self.model(tokens).values())


def act_on_errors(executor, *inputs):
    """What a program does about an error: the order of the classes matters."""
    try:
        executor(*inputs)
    except poptorch.RecoverableError as error:
        what = {"IPU_RESET": "again", "PARTITION_RESET": "anew", "FULL_RESET": "new process"}
        return f"{what[error.recovery_action]}: {error.message.partition('.')[0]}"
    except poptorch.UnrecoverableError as error:
        return f"broken: {error.type}"
    except poptorch.Error as error:
        return f"{error.type} in {error.location}: {error.message}"
    except Exception as error:
        return f"other: {error}"
    return "fine"


def test_7_errors(monkeypatch):
    executor = poptorch.inferenceModel(seeded(lambda: torch.nn.Bilinear(3, 3, 2)), quiet())
    x = torch.ones(1, 3)
    assert act_on_errors(executor, x, x) == "fine"
    assert act_on_errors(executor, x) == (
        "poptorch_error in : Mandatory parameter input2 missing. The model's forward takes "
        "['input1', 'input2']."
    )
    for error, expected in [
        (jax.errors.JaxRuntimeError("UNAVAILABLE: gone."), "again: UNAVAILABLE: gone"),
        (jax.errors.JaxRuntimeError("ABORTED: gone."), "anew: ABORTED: gone"),
        (
            jax.errors.JaxRuntimeError("INTERNAL: CUDA_ERROR_LAUNCH_FAILED."),
            "new process: INTERNAL: CUDA_ERROR_LAUNCH_FAILED",
        ),
        (jax.errors.JaxRuntimeError("DATA_LOSS: gone"), "broken: data_loss"),
        (jax.errors.JaxRuntimeError("INTERNAL: x"), "internal in PoplarExecutor.__call__: INTERNAL: x"),
        (OSError("mine"), "other: mine"),
    ]:

        def fail(*_arguments, error=error, **_named):
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(executor._compiled.pipeline, "accumulate", fail)
            assert act_on_errors(executor, x, x) == expected
    assert act_on_errors(executor, x, x) == "fine"


def test_8_layers_of_an_existing_model_begin_blocks():
    model = seeded(lambda: Tuples(Bert())).eval()
    layers = model.model.layers
    for number, ipu in ((0, 1), (1, 2), (2, 3)):
        layers[number] = poptorch.BeginBlock(layers[number], ipu_id=ipu)
    executor = poptorch.inferenceModel(model, quiet().deviceIterations(4))
    tokens = torch.randint(1, 50, (8, 6), generator=torch.Generator().manual_seed(1))
    tokens[:, 4:] = 0
    output = executor(tokens)
    assert_close(output, [t.detach() for t in model(tokens)])
    assert executor._compiled.stages.ipus == [0, 1, 2, 3]
    sections = [{str(node.target) for node in s.nodes} for s in executor._compiled.stages.sections]
    assert "aten.embedding.default" in sections[0]
    assert repr(executor).count("BeginBlock(user_id=None") == 3


class FourLinears(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(5, 5) for _layer in range(4)])

    def forward(self, x):
        poptorch.Block.useAutoId()
        for number, layer in enumerate(self.layers):
            with poptorch.Block(ipu_id=number):
                x = torch.relu(layer(x))
        return x


class Decorated(FourLinears):
    @poptorch.BlockFunction(ipu_id=0)
    def begin(self, x):
        return self.layers[0](x)

    @poptorch.BlockFunction(ipu_id=1)
    def go_on(self, x):
        return self.layers[2](self.layers[1](x))

    @poptorch.BlockFunction(ipu_id=1)
    def end(self, x):
        return self.layers[3](x)

    def forward(self, x):
        return self.end(self.go_on(self.begin(x)))


@pytest.mark.parametrize(("kind", "ipus"), [(FourLinears, [0, 1, 2, 3]), (Decorated, [0, 1])])
def test_9_and_10_blocks(kind, ipus):
    model = seeded(kind)
    executor = poptorch.inferenceModel(model, quiet().deviceIterations(4))
    x = torch.randn(4, 5)
    assert_close([executor(x)], [model(x).detach()])
    assert executor._compiled.stages.ipus == ipus


# 11 is tests/poptorch/graphs/test_poptorch_annotations.py::test_a_block_that_goes_back_to_an_earlier_ipu.


class SquareOfProduct(torch.nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.W = torch.nn.Parameter(weight.clone())

    def forward(self, x):
        z = x @ self.W
        return z, poptorch.identity_loss(z**2, reduction="mean")


def test_16_groups_of_replicas():
    generator = torch.Generator().manual_seed(100)
    x = torch.randn(24, 40, generator=generator)
    weight = torch.randn(40, 56, generator=generator) * (5 * 8) ** -0.5
    plain = SquareOfProduct(weight)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    model = SquareOfProduct(weight.reshape(40, 4, 14).permute(1, 0, 2).contiguous())
    options = quiet().replicationFactor(8).outputMode(poptorch.OutputMode.All)
    options.inputReplicaGrouping(4, poptorch.CommGroupType.Consecutive)
    executor = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.01))
    executor.W.replicaGrouping(
        poptorch.CommGroupType.Orthogonal, 2, poptorch.VariableRetrievalMode.OnePerGroup
    )
    for _call in range(4):
        z, losses = executor(x)
        optimizer.zero_grad()
        expected, loss = plain(x)
        loss.backward()
        optimizer.step()
        blocks = [torch.cat(list(row), dim=1) for row in z.reshape(2, 4, 12, 14)]
        assert_close([losses.sum() / 8, torch.cat(blocks)], [loss.detach(), expected])
    assert_close([model.W.permute(1, 0, 2).reshape(40, 56)], [plain.W])


def test_17_loss_scaling():
    results = []
    for scaled in (False, True):
        model = seeded(WithLoss)
        optimizer = poptorch.optim.SGD(
            model.parameters(), lr=0.01, loss_scaling=2.0 if scaled else None, use_combined_accum=False
        )
        training = poptorch.trainingModel(model, quiet(), optimizer)
        generator = torch.Generator().manual_seed(1)
        x, target = torch.rand(10, generator=generator), torch.rand(10, generator=generator)
        training(x, target)
        if scaled:
            optimizer.loss_scaling = 1.0
            training.setOptimizer(optimizer)
        training(x, target)
        results.append(model)
    assert_same_state(*results, tolerance=1e-6)


def test_18_constant_and_variable_attributes():
    parameters = list(torch.nn.Linear(2, 2).parameters())
    given = poptorch.optim.SGD(parameters, lr=0.01, momentum=0.0, loss_scaling=1.0)
    assert not any(given.variable_attrs.isConstant(name) for name in ("lr", "momentum", "loss_scaling"))
    optimizer = poptorch.optim.SGD(parameters, lr=0.01)
    assert [optimizer.variable_attrs.isConstant(n) for n in ("lr", "momentum", "loss_scaling")] == [
        False,
        True,
        True,
    ]
    given.variable_attrs.markAsConstant("loss_scaling")
    optimizer.variable_attrs.markAsVariable("momentum")
    assert given.variable_attrs.isConstant("loss_scaling")
    assert not optimizer.variable_attrs.isConstant("momentum")

    model = seeded(WithLoss)
    x = torch.ones(10)
    training = poptorch.trainingModel(model, quiet(), torch.optim.SGD(model.parameters(), lr=0.01))
    training(x, x)
    training.setOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    with pytest.raises(
        poptorch.Error, match="momentum of group 0 is constant since the model was compiled"
    ):
        training.setOptimizer(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))


def test_19_the_state_of_an_optimizer_is_saved():
    def run(is_interrupted):
        model = seeded(WithLoss)
        training = poptorch.trainingModel(model, quiet(), poptorch.optim.Adam(model.parameters(), lr=0.01))
        x = torch.linspace(-1, 1, 10)
        training(x, x * x)
        if is_interrupted:
            file = io.BytesIO()
            torch.save(training._optimizer.state_dict(), file)
            file.seek(0)
            training.destroy()
            optimizer = poptorch.optim.Adam(model.parameters(), lr=0.01)
            optimizer.load_state_dict(torch.load(file))
            training = poptorch.trainingModel(model, quiet(), optimizer)
        training(x, x * x)
        training(x, x * x)
        return model, training

    (model, training), (other, _other_training) = run(True), run(False)
    assert_same_state(model, other, 1e-7)
    assert training._optimizer.state_dict()["ipu_state"] is not None


def test_21_a_loss_of_ones_own():
    def run(make_loss):
        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.fc = torch.nn.Linear(4, 4)

            def forward(self, x, target):
                output = self.fc(x)
                return output, make_loss(output, target)

        model = seeded(Model)
        training = poptorch.trainingModel(
            model, make_options(), torch.optim.SGD(model.parameters(), lr=0.1)
        )
        training(torch.ones(2, 4), torch.zeros(2, 4))
        return model

    own = run(lambda output, target: poptorch.identity_loss(5 * (output - target) ** 2, reduction="mean"))
    plain = seeded(lambda: torch.nn.Linear(4, 4))
    (5 * plain(torch.ones(2, 4)).square().mean()).backward()
    expected = plain.weight - 0.1 * plain.weight.grad
    assert_close([own.fc.weight.detach()], [expected.detach()])
    # What follows one of torch's operations may be the loss, or may not.
    with pytest.raises(poptorch.Error, match="computed from a loss"):
        run(lambda output, target: 5 * torch.nn.functional.mse_loss(output, target))


class Operations(torch.nn.Module):
    """One of each operation; `plain` is the same in plain torch."""

    def __init__(self):
        super().__init__()
        nn = torch.nn
        self.first, self.second = nn.Conv1d(2, 3, 3), nn.Conv1d(2, 3, 3)
        self.linear = nn.Linear(6, 4, bias=False)

    def forward(self, x, start):
        with poptorch.MultiConv():
            x = torch.cat([self.first(x), self.second(x)], 1)
        x = poptorch.nop(x)
        x = poptorch.dynamic_update(x, 2 * poptorch.dynamic_slice(x, 2, start, 2, 1), 2, start, 2)
        x = poptorch.set_available_memory(x, 0.3).mean(2)
        mode = poptorch.MatMulSerializationMode.OutputChannels
        x = poptorch.ipu_print_tensor(x, "x", print_gradient=False)
        return poptorch.serializedMatMul(x, self.linear.weight.t(), mode, 2)

    def plain(self, x, start):
        x = torch.cat([self.first(x), self.second(x)], 1)
        scale = torch.ones(x.shape[2])
        scale[start : start + 2] = 2
        return self.linear((x * scale).mean(2))


def test_20_operations(capfd):
    model = seeded(Operations)
    generator = torch.Generator().manual_seed(1)
    x, start = torch.randn(3, 2, 8, generator=generator), torch.tensor([3])
    expected = model.plain(x, 3).detach()
    assert_close([model(x, start).detach()], [expected])
    printed = capfd.readouterr().err
    assert "x:\n[[" in printed  # behind what is said once in a process
    assert_close([poptorch.inferenceModel(model, quiet())(x, start)], [expected])
    assert capfd.readouterr().err.count("x:\n[[") == 1

    class Training(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x, start):
            return poptorch.identity_loss(self.model(x, start).square(), "mean")

    plain = copy.deepcopy(model)
    training = poptorch.trainingModel(Training(), quiet(), torch.optim.SGD(model.parameters(), lr=0.1))
    training(x, start)
    plain.plain(x, 3).square().mean().backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert_same_state(model, plain)

    probs, lengths = torch.log_softmax(x.permute(2, 0, 1), -1), torch.tensor([8, 8, 5])
    on_devices = poptorch.inferenceModel(Decoder(), quiet())(probs, lengths)
    for made, wanted in zip(on_devices, Decoder()(probs, lengths), strict=True):
        torch.testing.assert_close(made, wanted)


class Decoder(torch.nn.Module):
    def forward(self, log_probs, lengths):
        return tuple(poptorch.ctc_beam_search_decoder(log_probs, lengths))


def test_24_custom_operations(monkeypatch):
    monkeypatch.setattr(custom_registry, "_registered", {})
    given = []
    poptorch.register_custom_op("com.acme", "Cube", 1, lambda x, bias: (x**3, x**3 + bias))
    poptorch.register_custom_op("com.acme", "LeakyRelu", 1, lambda x, alpha: jnp.where(x > 0, x, alpha * x))

    @poptorch.register_custom_op("test.poptorch", "ManyAttributeOp", 1)
    def many(x, **attributes):
        given.append(attributes)
        return x

    attributes = {
        "float_one": 1.0,
        "float_minus_two": -2.0,
        "int_zero": 0,
        "int_minus_five": -5,
        "floats_one_two_three": [1.0, 2.0, 3.0],
        "floats_minus_one_two_three": [-1.0, -2.0, -3.0],
        "ints_one_two_three": [1, 2, 3],
        "ints_minus_one_two_three": [-1, -2, -3],
        "a_string": "string with quotes and slash \" ' \\ end",
        "strs": ["abc", "def", "ghi"],
    }

    class Model(torch.nn.Module):
        def forward(self, x, bias):
            cube = poptorch.custom_op([x, bias], "Cube", "com.acme", 1, example_outputs=[x, x])
            leaky = poptorch.custom_op(
                (x,), "LeakyRelu", "com.acme", 1, example_outputs=(x,), attributes={"alpha": 0.02}
            )
            many = poptorch.custom_op([x], "ManyAttributeOp", "test.poptorch", 1, [x], attributes)
            return *cube, *leaky, *many

    x, bias = torch.linspace(-2, 2, 6), torch.ones(6)
    expected = [x**3, x**3 + 1, torch.nn.functional.leaky_relu(x, 0.02), x]
    assert_close(poptorch.inferenceModel(Model(), quiet())(x, bias), expected)
    assert given
    assert all(one == attributes for one in given)
    assert [type(value) for value in given[0].values()] == [type(v) for v in attributes.values()]
    assert_close(Model()(x, bias), expected)


# 22 and 23 are tests/poptorch/graphs/test_poptorch_capture.py::test_buffers_change_attributes_do_not.


# The documentation.

PAGE = Path(__file__).parents[2] / "docs" / "poptorch.md"


def source_of(file):
    """The text of the one file of tests that has this name, in whichever room."""
    (path,) = (ROOT / "tests").rglob(file)
    return path.read_text()


def test_the_page_names_tests_that_exist():
    module = ""
    rows = re.findall(r"^\| [\d, ]+ \|.*\| `(.*)::(\w+)` \|$", PAGE.read_text(), re.MULTILINE)
    assert len(rows) >= 16
    for file, name in rows:
        module = file or module
        assert f"def {name}(" in source_of(module), name


@pytest.mark.parametrize("heading", ["Beyond PopTorch", "Differs from PopTorch"])
def test_each_row_names_a_test_that_exists(heading):
    section = PAGE.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = section.partition("| --- |")[2].splitlines()[1:]
    found = [re.search(r"\| `(test_\w+\.py)::(test_\w+)` \|$", row) for row in rows if row.startswith("|")]
    assert len(found) > 5
    for match in found:
        file, name = match.groups()
        assert f"def {name}(" in source_of(file), name


def test_the_pages_examples(capsys):
    """The loop of torch's and the pipelined one print the same losses."""
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        if "transformers" in block:  # tests/poptorch/generation has it
            continue
        exec(compile(block, str(PAGE), "exec"), {"__name__": "example"})  # noqa: S102  # the page is ours
    printed, loss = capsys.readouterr().out, r"epoch \d: loss (\S+)\n"
    found, told = (
        [float(value) for value in re.findall(loss, text)] for text in (printed, PAGE.read_text())
    )
    assert found == pytest.approx(told, rel=1e-3)
    assert found[:3] == pytest.approx(found[3:], rel=1e-3)
    expected = r"right (9\d|100)%, on \d+ values\ntensor\(0\.\d+\)\n"
    assert re.fullmatch(expected, re.sub(loss, "", printed))

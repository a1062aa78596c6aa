"""Values that forward asks for: constants of buffers, or those of the first micro-batch."""

import copy

import pytest
import torch
from torch.compiler import is_compiling

import ipu_pipeline.poptorch as poptorch
from tests.support.poptorch_front import assert_close, make_options


class Sizes(torch.nn.Module):
    """As audio models have them: a number of layers, and sizes, in buffers."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.register_buffer("number", torch.tensor(2))
        self.register_buffer("length", torch.tensor(3))

    def forward(self, x):
        for _layer in range(int(self.number)):
            x = torch.relu(self.layer(x))
        longest = max(self.number, self.length)
        if longest >= 5 or torch.equal(self.number, self.length):
            x = -x
        padded = torch.nn.functional.pad(x, (self.number - 2, longest))
        return padded[:, : longest + 1], torch.full((x.shape[0], self.number), self.number.item())


def test_values_of_buffers_are_constants():
    model, x = Sizes(), torch.randn(2, 4)
    inference = poptorch.inferenceModel(model, make_options())
    assert_close(inference(x), model(x))
    inference.copyWeightsToDevice()
    model.number = torch.tensor(3)
    with pytest.raises(poptorch.Error, match="number is not as it was when the model was compiled"):
        inference.copyWeightsToDevice()
    inference.destroy()
    assert_close(poptorch.inferenceModel(model, make_options())(x), model(x))


class Masked(torch.nn.Module):
    """Branches on what its inputs are."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, mask):
        self.calls += 1
        y = self.layer(x)
        if mask.any():
            y = y * mask.sum().item()
        return y, poptorch.identity_loss(y.square().mean(), "none")


def allowing(accumulation=1):
    options = make_options(1, accumulation)
    options.allowValueBranches(True)
    return options


def test_values_of_inputs_are_those_of_the_first_micro_batch():
    model = Masked()
    plain = copy.deepcopy(model)
    x, mask = torch.randn(4, 4), torch.tensor([[True], [False]] * 2)
    with pytest.raises(poptorch.Error, match=r"if mask.any\(\): asks .*allowValueBranches\(True\)"):
        poptorch.trainingModel(model, make_options(1, 2))(x, mask)
    training = poptorch.trainingModel(model, allowing(2), torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _call in range(2):
        results, losses = training(x, mask)
        parts = [plain(x[:2], mask[:2]), plain(x[2:], mask[2:])]
        (sum(loss for _y, loss in parts) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert_close([results], [torch.cat([y for y, _loss in parts])])
        assert_close([losses], [torch.stack([loss for _y, loss in parts])])
    training.copyWeightsToHost()
    assert_close(model.state_dict().values(), plain.state_dict().values())
    mask[3] = True
    with pytest.raises(poptorch.Error, match=r"item\(\) .*compiled for 1, .*micro-batch 1 .* is 2"):
        training(x, mask)
    training.copyWeightsToHost()
    assert_close(model.state_dict().values(), plain.state_dict().values())
    with pytest.raises(poptorch.Error, match="A file cannot hold that"):
        training.save("model.poptorch")


def take(x, y, mask):
    x[mask[:, 0], 0] = y[mask[:, 0], 1 + mask[0, 0]]
    x[:, mask.sum() - 3] += x[:, mask.sum() - 2]
    x[mask] = torch.linspace(0, 1, int(mask.sum()))
    x[mask[:, 1], torch.tensor(2)] = 3.0
    x[mask[:, 1]] = y[mask[:, 1]] / len(y[mask[:, 1]])
    rows = x[mask[:, 0]]
    masks = mask.nonzero(), torch.argwhere(mask), *torch.where(mask), mask.any().nonzero()
    selected = (
        torch.masked_select(x, mask[0]),
        y.masked_select(mask),
        y[mask.any()],
        x[tuple((3 * mask).nonzero().T)],
        rows[:, mask[0]],
    )
    return y[mask].sum(), rows.softmax(0), *masks, *selected


class Indexed(torch.nn.Module):
    def __init__(self, use):
        super().__init__()
        self.layer, self.use = torch.nn.Linear(4, 4), use
        self.register_buffer("mask", MASK)

    def forward(self, x, mask=None):
        x, mask = self.layer(x), self.mask if mask is None else mask
        results = self.use(x.clone(), x.square() * mask, mask)
        loss = sum(each.square().sum() for each in results if each.is_floating_point())
        return *results, poptorch.identity_loss(loss, "none")


MASK = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 0, 1]]).bool()


@pytest.mark.parametrize(
    ("use", "options", "masks"),
    [
        (take, make_options(), [[], []]),
        (take, None, [[MASK]] * 2),
    ],
    ids=["of a buffer", "of an input"],
)
def test_masks_as_indices(use, options, masks):
    torch.manual_seed(0)
    model, x = Indexed(use), torch.randn(3, 4)
    plain = copy.deepcopy(model)
    training = poptorch.trainingModel(
        model, options or allowing(), torch.optim.SGD(model.parameters(), lr=0.1)
    )
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for mask in masks:
        *expected, loss = plain(x, *mask)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        *results, actual = training(x, *mask)
        assert_close(results, [each.detach() for each in expected])
        assert_close([actual], [loss.detach()])
    training.copyWeightsToHost()
    assert_close(model.state_dict().values(), plain.state_dict().values())
    if options is None:
        with pytest.raises(poptorch.Error, match=r"compiled for \d, that of the first .* it is \d"):
            training(x, ~MASK)


@pytest.mark.parametrize(
    ("mask", "error"),
    [
        (torch.ones(1, 4), (IndexError, r"shape of the mask \[1, 4\] at index 0 does not match")),
        (torch.ones(3, 1), (IndexError, r"shape of the mask \[3, 1\] at index 1 does not match")),
        (torch.tensor(1, dtype=torch.uint8), (poptorch.Error, r"index as a mask. Use index.bool\(\)")),
    ],
)
def test_what_is_no_mask_of_a_tensor(mask, error):
    model = Indexed(lambda x, y, mask: [y[mask]])
    model.mask = mask if mask.dtype == torch.uint8 else mask.bool()
    with pytest.raises(error[0], match=error[1]):
        poptorch.inferenceModel(model, make_options())(torch.ones(3, 4))


def test_a_check_of_torch_is_checked_on_devices():
    """torch._check_tensor_all, which models of transformers call."""

    class Checked(torch.nn.Module):
        def forward(self, x):
            torch._check_tensor_all(x > 0, lambda: "not positive")
            return x.sqrt()

    inference = poptorch.inferenceModel(Checked(), make_options())
    assert_close([inference(torch.ones(2))], [torch.ones(2)])
    with pytest.raises(poptorch.Error, match=r"torch._check_tensor_all\(.*compiled for True"):
        inference(-torch.ones(2))


def test_forward_may_not_ask_otherwise():
    class Otherwise(torch.nn.Module):
        runs = 0

        def forward(self, x):
            Otherwise.runs += 1
            return x * (x.sum().item() if Otherwise.runs % 2 else sum(x.tolist()))

    with pytest.raises(poptorch.Error, match="asks for other values of tensors while it is captured"):
        poptorch.inferenceModel(Otherwise(), allowing())(torch.ones(2))


def is_captured():
    return torch.compiler.is_compiling()


class Asking(torch.nn.Module):
    """Asks whether it is compiled, and, so that it also runs on an example, for a value."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.register_buffer("scale", torch.tensor(3))

    def forward(self, x):
        x = self.layer(x)
        for asks in (
            is_compiling,
            torch.compiler.is_exporting,
            torch.compiler.is_dynamo_compiling,
            is_captured,
        ):
            x = x.sin() if asks() else x.cos()
        return x, poptorch.identity_loss(x.square().sum() * int(self.scale), "none")


def test_a_model_that_asks_whether_it_is_compiled_computes_as_in_plain_torch():
    model, x = Asking(), torch.randn(2, 4)
    plain = copy.deepcopy(model)
    training = poptorch.trainingModel(model, make_options(), torch.optim.SGD(model.parameters(), lr=0.1))
    result, loss = plain(x)
    loss.backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert_close(training(x), [result.detach(), loss.detach()])
    training.copyWeightsToHost()
    assert_close(model.state_dict().values(), plain.state_dict().values())
    assert not torch.compiler.is_compiling()


def test_random_numbers_are_no_constants():
    class Dropping(torch.nn.Module):
        def forward(self, x):
            return x if torch.rand([]) < 0.5 else 2 * x

    with pytest.raises(poptorch.Error, match=r"torch.rand.* asks for a random number.*layerdrop=0"):
        poptorch.inferenceModel(Dropping(), allowing())(torch.ones(2))


def test_files_keep_what_must_be_as_it_was(tmp_path):
    model, x = Sizes(), torch.randn(2, 4)
    poptorch.inferenceModel(model, make_options()).compileAndExport(
        tmp_path / "graph", x, export_model=False
    )
    inference = poptorch.inferenceModel(model, make_options())
    inference.loadExecutable(tmp_path / "graph")
    assert_close(inference(x), model(x))
    inference.destroy()
    model.number += 1
    other = poptorch.inferenceModel(model, make_options())
    with pytest.raises(poptorch.Error, match="number is not as it was"):
        other.loadExecutable(tmp_path / "graph")
        other(x)

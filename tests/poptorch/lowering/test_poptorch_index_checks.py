"""`Options.checkIndices`: indices that a tensor does not have."""

import pytest
import torch

import ipu_pipeline.poptorch as poptorch
from tests.support.poptorch_front import assert_same_state, make_options, reference, seeded

RIGHT = {
    "rows": [[0], [4]],
    "classes": [[3], [-100]],
    "gathered": [[0], [3]],
    "selected": [[3], [0]],
    "advanced": [[-4], [3]],
    "bag": [[5], [0]],
    "put": [[-4], [3]],
}


class Model(torch.nn.Module):
    """Has an operation of each kind that takes indices, in two stages."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(5, 3)
        self.linear = torch.nn.Linear(3, 4)
        self.bag = torch.nn.EmbeddingBag(6, 4)
        self.loss = torch.nn.CrossEntropyLoss()

    def forward(self, rows, classes, gathered, selected, advanced, bag, put):
        with poptorch.Block("first", ipu_id=0):
            x = self.table(rows[:, 0])
        with poptorch.Block("second", ipu_id=1):
            x = self.linear(x)
            y = torch.gather(x, 1, gathered)
            y = y + torch.index_select(x, 1, selected[:, 0]).sum()
            y = y + x[:, advanced[:, 0]].sum()
            y = y + self.bag(bag).sum()
            y = y + torch.zeros(4).index_put((put[:, 0],), x[0, 0]).sum()
            return self.loss(x + y.sum(1, keepdim=True), classes[:, 0])


def make_inputs(**changed):
    return [torch.tensor(value).repeat(2, 1) for value in {**RIGHT, **changed}.values()]


@pytest.fixture(scope="module")
def training():
    """Of two micro-batches for each update."""
    model = seeded(Model)
    options = make_options(1, 2).checkIndices()
    return poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.1))


def test_right_indices_train_as_without(training):
    model = training.model
    plain = reference(seeded(Model), lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    plain.model.load_state_dict(model.state_dict())
    plain.train(make_inputs(), 1, 2, lambda loss: loss)
    training(*make_inputs())
    assert_same_state(model, plain.model)


@pytest.mark.parametrize(
    ("name", "index", "place", "bounds"),
    [
        ("rows", 5, "embedding in module 'table' (Embedding)", "from 0 to 4"),
        ("rows", -1, "embedding in module 'table' (Embedding)", "from 0 to 4"),
        ("classes", 4, "in module 'loss' (CrossEntropyLoss)", "from 0 to 3"),
        ("gathered", 4, "y = torch.gather(x, 1, gathered)", "from 0 to 3"),
        ("selected", -1, "y = y + torch.index_select(x, 1, selected[:, 0]).sum()", "from 0 to 3"),
        ("advanced", -5, "y = y + x[:, advanced[:, 0]].sum()", "from -4 to 3"),
        ("bag", 6, "in module 'bag' (EmbeddingBag)", "from 0 to 5"),
        ("put", 4, "index_put", "from -4 to 3"),
    ],
)
def test_wrong_indices_are_errors(training, name, index, place, bounds):
    """The weights are those of before the update, and the next call is like any other."""
    training(*make_inputs())
    before = {name: tensor.clone() for name, tensor in training.model.state_dict().items()}
    with pytest.raises(poptorch.Error, match="An index is out of range in ") as raised:
        training(*make_inputs(**{name: [RIGHT[name][0], [index]]}))
    assert place in str(raised.value)
    assert f": {index}, where the tensor has indices {bounds}." in str(raised.value)
    after = training.model.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


class Branch(torch.nn.Module):
    """Reads by indices if the sum is positive."""

    def forward(self, x, at):
        return torch.cond(x.sum() > 0, lambda x, at: x[at], lambda x, _at: x + 0, [x, at])


@pytest.mark.thorough
def test_branches_and_replicas():
    options = make_options().checkIndices().set(replication_factor=2)
    inference = poptorch.inferenceModel(Branch(), options)
    x = torch.ones(4, 2)
    assert inference(x, torch.tensor([1, 0, 1, 0])).shape == (4, 2)
    for at in ([2, 0, 0, 0], [0, 0, 0, 2]):
        with pytest.raises(poptorch.Error, match=": 2, where the tensor has indices from -2 to 1"):
            inference(x, torch.tensor(at))
    with pytest.raises(poptorch.Error, match="index in the model, .*: 5, where"):
        inference(x, torch.tensor([5, 0, 0, 0]))
    # The other branch does not read them.
    inference(-x, torch.tensor([5, 0, 0, 0]))

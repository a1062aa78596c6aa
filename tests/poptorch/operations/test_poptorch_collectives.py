"""PopART's operations over replicas, by `custom_op`, against plain torch that computes all replicas."""

import pytest
import torch

import ipu_pipeline.poptorch as poptorch
from tests.support.poptorch_front import assert_close, make_options

NUM_REPLICAS = 2
GROUPING = {"__collectiveReplicaGrouping": [NUM_REPLICAS, 1, NUM_REPLICAS]}


def call(name, x, example, **attributes):
    return poptorch.custom_op([x], name, "ai.graphcore", 1, [example], {**GROUPING, **attributes})[0]


def gather(x):
    """As Graphcore's experimental addons have it: gradients are summed by an operation of their own."""
    rows = call("ReplicatedAllGather", x, torch.zeros(NUM_REPLICAS, *x.shape))
    return call("ReplicatedAllReduceTP", rows, rows, op="sum", backwards=True)


def exchange(x):
    rows = torch.stack([x, 2 * x])
    return call("ReplicatedAllToAll", rows, rows)


KINDS = {
    "gather": (gather, lambda values, _replica: torch.stack(values)),
    "sum": (lambda x: call("ReplicatedAllReduce", x, x), lambda values, _replica: sum(values)),
    "exchange": (exchange, lambda values, replica: torch.stack([(replica + 1) * x for x in values])),
}


class Model(torch.nn.Module):
    def __init__(self, operation):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        self.operation = operation

    def forward(self, x):
        return loss_of(self.operation(self.weight * x[0]), x)


def loss_of(result, x):
    """Differs between elements and between replicas."""
    factors = torch.arange(1.0, result.numel() + 1).reshape(result.shape)
    return result, poptorch.identity_loss((result.square() * factors).sum() * x.sum(), "none")


@pytest.mark.parametrize("kind", KINDS)
def test_operations_over_replicas(kind):
    operation, reference = KINDS[kind]
    x = torch.tensor([[1.0, -2.0, 0.5], [0.3, 1.0, 2.0]])
    model = Model(operation)
    plain = model.weight.detach().clone().requires_grad_()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    training = poptorch.trainingModel(model, make_options().replicationFactor(NUM_REPLICAS), optimizer)
    results, losses = training(x)
    values = [plain * row for row in x]
    expected = [loss_of(reference(values, n), row) for n, row in enumerate(x)]
    (sum(loss for _result, loss in expected) / NUM_REPLICAS).backward()
    assert_close([losses], [torch.stack([loss for _result, loss in expected]).detach()])
    assert_close([results], [torch.cat([result for result, _loss in expected]).detach()])
    assert_close([model.weight.detach()], [plain.detach() - plain.grad])


@pytest.mark.parametrize("kind", KINDS)
def test_plain_torch_has_one_replica(kind):
    """The values of others are zeros."""
    weight = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    result = KINDS[kind][0](weight)
    own = weight.detach()
    expected = own if kind == "sum" else torch.stack([own, torch.zeros(3)])
    (result * torch.arange(1.0, result.numel() + 1).reshape(result.shape)).sum().backward()
    assert_close([result.detach(), weight.grad], [expected, torch.tensor([1.0, 2.0, 3.0])])


def test_booleans_are_gathered():
    def operation(x):
        return call("ReplicatedAllGather", x > 0, torch.zeros(NUM_REPLICAS, *x.shape, dtype=torch.bool))

    options = make_options().replicationFactor(NUM_REPLICAS)
    model = torch.nn.Module()
    model.forward = operation
    x = torch.tensor([[1.0, -2.0], [-0.3, 1.0]])
    assert poptorch.inferenceModel(model, options)(x).tolist() == (x > 0).unsqueeze(1).tolist() * 2


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        (lambda x: call("ReplicatedAllReduce", x > 0, x > 0), "sums numbers; its input has booleans"),
        (
            lambda x: call("ReplicatedAllGather", x, torch.zeros(3, 3)),
            r"with 2 replicas, an input of shape",
        ),
        (lambda x: call("ReplicatedAllToAll", x, x), "does not fit ReplicatedAllToAll"),
        (lambda x: call("ReplicatedAllReduceTP", x, x, op="mean"), "its attribute 'op' is 'mean'"),
        (
            lambda x: call("ReplicatedAllReduce", x, x, __collectiveReplicaGrouping=[4, 1, 2]),
            r"over all 2 replicas; its attribute '__collectiveReplicaGrouping' is \[4, 1, 2\]",
        ),
    ],
)
def test_what_does_not_fit(operation, message):
    options = make_options().replicationFactor(NUM_REPLICAS)
    with pytest.raises(poptorch.Error, match=message):
        poptorch.trainingModel(Model(operation), options)(torch.ones(2, 3))

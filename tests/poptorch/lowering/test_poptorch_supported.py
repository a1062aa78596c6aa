"""Operations that PopTorch lists, which are those of docs/poptorch_operations.md, compute as in torch.

A name is held by a snippet or by moments below, by torch's database of modules, or by that of operators.
"""

import re
import warnings

import pytest
import torch
from torch import distributions as D  # noqa: N812
from torch import nn
from torch.nn import functional

import ipu_pipeline.poptorch as poptorch
from tests.support import lowered, operator_database
from tests.support.poptorch_front import make_options
from tests.support.programs import ROOT

PAGE = (ROOT / "docs" / "poptorch_operations.md").read_text()
LISTED = PAGE.partition("\n## Operations that PopTorch lists\n")[2]
NAMES = " ".join(re.findall(r"^\* [^:]+: `([^`]+)`$", LISTED, re.MULTILINE)).split()
OUTCOMES = operator_database.read_outcomes()

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
ROWS = torch.tensor([[0, 2], [1, 1], [3, 0]])
BITS = torch.tensor([5, -3, 12]), torch.tensor([6, 7, -1])
IMAGE = torch.linspace(-1, 1, 32).cos().reshape(1, 2, 4, 4)


def measure_distributions(x):
    """Log probabilities, a divergence and an entropy, whose arguments torch would look at."""
    normal, choice = D.Normal(x, x.exp()), D.Categorical(logits=x)
    prior = D.Normal(torch.zeros_like(x), 1.0)
    divergence = D.kl_divergence(normal, prior)
    return normal.log_prob(x + 1), divergence, choice.log_prob(torch.tensor([1, 0, 5, 2])), choice.entropy()


DOUBLE = lowered.Call(lambda x: 2 * x)
# Of each operation a function or module, and what it is given.
SNIPPETS = {
    "Tensor.index_fill_": (lambda x: x.clone().index_fill_(1, ROWS[0], 7.0), X),
    "bitwise_and": (torch.bitwise_and, *BITS),
    "bitwise_not": (torch.bitwise_not, BITS[0]),
    "bitwise_or": (torch.bitwise_or, *BITS),
    "bitwise_xor": (torch.bitwise_xor, *BITS),
    "nn.Module": (DOUBLE, X),
    "nn.Sequential": (nn.Sequential(nn.Linear(6, 3), nn.Tanh(), DOUBLE), X),
    "nn.RReLU": (nn.RReLU().eval(), X),
    "nn.utils.weight_norm": (nn.utils.parametrizations.weight_norm(nn.Linear(6, 3)), X),
    "nn.Identity": (nn.Identity(), X),
    "nn.EmbeddingBag": (nn.EmbeddingBag(4, 3, padding_idx=1), ROWS),
    "nn.functional.one_hot": (lambda rows: functional.one_hot(rows, 5), ROWS),
    "nn.Upsample": (nn.Upsample(scale_factor=2, mode="bicubic"), IMAGE),
}
# What PopTorch's list excludes, and what distributions give besides numbers.
WITHOUT_LIMITS = {
    "topk": (lambda x: torch.topk(x, 2, sorted=False)[0].sum(-1), X),
    "indices of pooling": (nn.MaxPool2d(2, return_indices=True), IMAGE),
    "normalization without weights": (nn.GroupNorm(1, 2, affine=False), IMAGE),
    "dilated transposed convolution": (nn.ConvTranspose2d(2, 3, 2, dilation=2), IMAGE),
    "recurrent layers": (nn.LSTM(6, 3, 2, bias=False, bidirectional=True), X),
    "padding_idx": (nn.Embedding(4, 3, padding_idx=1), ROWS),
    "norm of a matrix": (lambda x: (torch.linalg.matrix_norm(x, 2), torch.linalg.matrix_norm(x, "nuc")), X),
    "modes of Upsample": (nn.Upsample(scale_factor=2, mode="bilinear"), IMAGE),
    "slices": (lambda x: x[1:9, 2:], X),
    "distributions": (measure_distributions, X),
}

NUM = 40_000
ROOT_12 = 12**-0.5
# Of each operation the numbers that it draws, their mean and their spread.
DRAWN = {
    "bernoulli": (lambda half: torch.bernoulli(half), 0.5, 0.5),
    "distributions.Bernoulli": (lambda half: D.Bernoulli(half / 2).sample(), 0.25, 0.75**0.5 / 2),
    "randn": (lambda half: torch.randn(NUM), 0.0, 1.0),
    "normal": (lambda half: torch.normal(half, 2.0), 0.5, 2.0),
    "distributions.Normal": (lambda half: D.Normal(half, 4 * half).sample(), 0.5, 2.0),
    "rand": (lambda half: torch.rand(NUM), 0.5, ROOT_12),
    "uniform": (lambda half: half.clone().uniform_(1, 3), 2.0, 2 * ROOT_12),
    "distributions.Uniform": (lambda half: D.Uniform(half, 3 * half).sample(), 1.0, ROOT_12),
    "exponential": (lambda half: half.clone().exponential_(2.0), 0.5, 0.5),
    "distributions.Exponential": (lambda half: D.Exponential(half).sample(), 2.0, 2.0),
    "randperm": (lambda half: torch.randperm(NUM), (NUM - 1) / 2, NUM * ROOT_12),
}


# Operations by other names in torch's database of operators.
OPERATORS = {
    "index_reduce": "index_reduce.amax",
    "scatter_reduce": "scatter_reduce.amax",
    "div": "div.floor_rounding",
    "max": "max.binary",
    "min": "min.binary",
    "meshgrid": "meshgrid.list_of_tensors",
    "nn.dropout": "nn.functional.dropout",
    "nn.TripletMarginLoss": "nn.functional.triplet_margin_loss",
}
MODULES = {name for name in NAMES if re.match(r"nn\.[A-Z]", name)} - SNIPPETS.keys() - OPERATORS.keys()


def test_each_operation_of_the_page_is_held():
    assert len(NAMES) == len(set(NAMES)) == 216
    assert "lists 221 operations. All but five" in LISTED  # those of torch_scatter
    assert set(NAMES) >= SNIPPETS.keys() | DRAWN.keys() | OPERATORS.keys()
    operators = set(NAMES) - SNIPPETS.keys() - DRAWN.keys() - MODULES
    kinds = {OUTCOMES[OPERATORS.get(name, name.removeprefix("Tensor."))].kind for name in operators}
    assert kinds == {"passed"}


@pytest.mark.thorough
def test_modules_of_the_page_are_in_torchs_list():
    """All of that are compared in test_poptorch_module_list.py."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Hypothesis, which it imports where that is installed
        from torch.testing._internal.common_modules import module_db

    assert {info.name for info in module_db} >= MODULES


@pytest.mark.thorough
def test_snippets_compute_as_torch_does():
    torch.manual_seed(0)
    lowered.compare_all({**SNIPPETS, **WITHOUT_LIMITS})


@pytest.mark.thorough
def test_random_numbers_have_the_moments_that_they_should():
    """Also from distributions, whose parameters torch looks at, and checks if a model insists on that."""

    draw_all = lowered.Call(lambda half: [draw(half) for draw, _mean, _spread in DRAWN.values()])
    drawn = poptorch.inferenceModel(draw_all, make_options().randomSeed(3))(torch.full((NUM,), 0.5))
    for (name, (_draw, mean, spread)), values in zip(DRAWN.items(), drawn, strict=True):
        assert values.shape == (NUM,), name
        assert abs(values.double().mean() - mean) < 5 * spread / NUM**0.5, name
        assert abs(values.double().std() / spread - 1) < 0.05, name
    by_name = dict(zip(DRAWN, drawn, strict=True))
    assert sorted(by_name["randperm"].tolist()) == list(range(NUM))
    assert set(by_name["bernoulli"].tolist()) == {0.0, 1.0}
    assert 0 <= by_name["rand"].min() < by_name["rand"].max() < 1
    assert 1 <= by_name["uniform"].min() < by_name["uniform"].max() < 3
    assert by_name["exponential"].min() > 0
    insisting = lowered.Call(lambda x: D.Normal(x, x, validate_args=True).sample())
    with pytest.raises(ValueError, match="of distribution Normal.* found invalid values"):
        poptorch.inferenceModel(insisting, make_options())(X)
    checked = poptorch.inferenceModel(insisting, make_options())
    assert checked(X.abs() + 1).shape == X.shape
    with pytest.raises(poptorch.Error, match="D.Normal.* asks for a value .*compiled for True"):
        checked(X)

"""docs/poptorch_supported.md is true: the operations that PopTorch lists, one by one."""

import re
import warnings

import pytest
import torch
from torch import distributions as D  # noqa: N812
from torch import nn
from torch.nn import functional

import ipu_pipeline.poptorch as poptorch
from tests.support import lowered
from tests.support.poptorch_front import make_options
from tests.support.programs import ROOT


def read_page(name, row):
    return dict(re.findall(row, (ROOT / "docs" / name).read_text(), re.MULTILINE))


HELD_BY = read_page("poptorch_supported.md", r"^\| `(\S+)` \| (.+) \|$")
OUTCOMES = read_page("poptorch_operators.md", r"^\| `(\S+)` \| ([^|]+) \|")

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
    "tensor.index_fill_": (lambda x: x.clone().index_fill_(1, ROWS[0], 7.0), X),
    "torch.bitwise_and": (torch.bitwise_and, *BITS),
    "torch.bitwise_not": (torch.bitwise_not, BITS[0]),
    "torch.bitwise_or": (torch.bitwise_or, *BITS),
    "torch.bitwise_xor": (torch.bitwise_xor, *BITS),
    "torch.nn.Module": (DOUBLE, X),
    "torch.nn.Sequential": (nn.Sequential(nn.Linear(6, 3), nn.Tanh(), DOUBLE), X),
    "torch.nn.RReLU": (nn.RReLU().eval(), X),
    "torch.nn.utils.weight_norm": (nn.utils.parametrizations.weight_norm(nn.Linear(6, 3)), X),
    "torch.nn.Identity": (nn.Identity(), X),
    "torch.nn.EmbeddingBag": (nn.EmbeddingBag(4, 3, padding_idx=1), ROWS),
    "torch.nn.functional.one_hot": (lambda rows: functional.one_hot(rows, 5), ROWS),
    "torch.nn.Upsample": (nn.Upsample(scale_factor=2, mode="bicubic"), IMAGE),
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
    "torch.bernoulli": (lambda half: torch.bernoulli(half), 0.5, 0.5),
    "torch.distributions.Bernoulli": (lambda half: D.Bernoulli(half / 2).sample(), 0.25, 0.75**0.5 / 2),
    "torch.randn": (lambda half: torch.randn(NUM), 0.0, 1.0),
    "torch.normal": (lambda half: torch.normal(half, 2.0), 0.5, 2.0),
    "torch.distributions.Normal": (lambda half: D.Normal(half, 4 * half).sample(), 0.5, 2.0),
    "torch.rand": (lambda half: torch.rand(NUM), 0.5, ROOT_12),
    "torch.uniform": (lambda half: half.clone().uniform_(1, 3), 2.0, 2 * ROOT_12),
    "torch.distributions.Uniform": (lambda half: D.Uniform(half, 3 * half).sample(), 1.0, ROOT_12),
    "torch.exponential": (lambda half: half.clone().exponential_(2.0), 0.5, 0.5),
    "torch.distributions.Exponential": (lambda half: D.Exponential(half).sample(), 2.0, 2.0),
    "torch.randperm": (lambda half: torch.randperm(NUM), (NUM - 1) / 2, NUM * ROOT_12),
}


def named(how):
    return {name for name, held_by in HELD_BY.items() if held_by == how}


def test_the_page_says_how_each_operation_is_held():
    assert len(HELD_BY) == 221
    assert named("snippet") == SNIPPETS.keys()
    assert named("moments") == DRAWN.keys()
    operators = re.findall(r"^operator `(\S+)`$", "\n".join(HELD_BY.values()), re.MULTILINE)
    modules = re.findall(r"^module `(\S+)`$", "\n".join(HELD_BY.values()), re.MULTILINE)
    assert {OUTCOMES[name].strip() for name in operators} == {"passed"}
    others = [how for how in HELD_BY.values() if how.startswith("not here: ")]
    assert len(others) == 5  # those of torch_scatter
    assert len(operators) + len(modules) + len(SNIPPETS) + len(DRAWN) + len(others) == len(HELD_BY)


@pytest.mark.thorough
def test_modules_of_the_page_are_in_torchs_list():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Hypothesis, which it imports where that is installed
        from torch.testing._internal.common_modules import module_db

    known = {f"module `{info.name}`" for info in module_db}
    assert {how for how in HELD_BY.values() if how.startswith("module ")} <= known


@pytest.mark.thorough
def test_snippets_compute_as_torch_does():
    torch.manual_seed(0)
    lowered.compare_all({**SNIPPETS, **WITHOUT_LIMITS})


@pytest.mark.thorough
def test_random_numbers_have_the_moments_that_they_should():
    """Also from distributions, whose parameters torch looks at. A model that insists on that is refused."""

    draw_all = lowered.Call(lambda half: [draw(half) for draw, _mean, _spread in DRAWN.values()])
    drawn = poptorch.inferenceModel(draw_all, make_options().randomSeed(3))(torch.full((NUM,), 0.5))
    for (name, (_draw, mean, spread)), values in zip(DRAWN.items(), drawn, strict=True):
        assert values.shape == (NUM,), name
        assert abs(values.double().mean() - mean) < 5 * spread / NUM**0.5, name
        assert abs(values.double().std() / spread - 1) < 0.05, name
    by_name = dict(zip(DRAWN, drawn, strict=True))
    assert sorted(by_name["torch.randperm"].tolist()) == list(range(NUM))
    assert set(by_name["torch.bernoulli"].tolist()) == {0.0, 1.0}
    assert 0 <= by_name["torch.rand"].min() < by_name["torch.rand"].max() < 1
    assert 1 <= by_name["torch.uniform"].min() < by_name["torch.uniform"].max() < 3
    assert by_name["torch.exponential"].min() > 0
    insisting = lowered.Call(lambda x: D.Normal(x, x, validate_args=True).sample())
    with pytest.raises(poptorch.Error, match="asks for a value of a tensor"):
        poptorch.inferenceModel(insisting, make_options())(X)

"""Where operations are easily got wrong: boundaries, ties, zeros, signs, NaN, short integers, scalars.

Each group of functions is exported and compiled once, forward and backward, and compared with torch.
"""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # as everybody calls it

from tests.support import lowered

NAN, INF = float("nan"), float("inf")


def numbers(*values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype)


HALVES = numbers(-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 3.5, -0.2)
AROUND = numbers(-4, -3, -2, -1, -0.5, 0, 0.5, 1, 2, 3, 4, 6, 7)  # with every boundary of an activation
WIDE = numbers(-120, -30, -20.5, -1, 0, 1, 19.5, 20.5, 100, 300)  # where exp overflows
MATRIX = numbers(1, 3, 3, -2, 5, 5, 5, 0, -1, -1, 2, 2).reshape(3, 4)  # with ties
DISTINCT = MATRIX + 0.1 * torch.arange(4)
LIMITS = numbers(-1, -1, 1, -1, -1, 0), numbers(2, 2, 2, 2, 2, 1)
SIGNED = numbers(7, -7, 7, -7, 5.5, -5.5), numbers(2, 2, -2, -2, INF, INF)


def divide(mode):
    return lambda a, b: torch.div(a, b, rounding_mode=mode)


ROUNDING = {
    "round": (torch.round, HALVES),
    "round decimals": (lambda x: torch.round(x, decimals=1), numbers(0.25, 0.35, -1.25, 12.349)),
    "round tens": (lambda x: torch.round(x, decimals=-1), numbers(15.0, 25, -35, 4)),
    "floor": (torch.floor, HALVES),
    "ceil": (torch.ceil, HALVES),
    "trunc": (torch.trunc, HALVES),
    "frac": (torch.frac, HALVES),
    "sign": (torch.sign, numbers(-2, 0, 3, NAN)),
    "remainder": (torch.remainder, *SIGNED),
    "remainder by number": (lambda x: x % -3, HALVES),
    "fmod": (torch.fmod, *SIGNED),
    "fmod by number": (lambda x: torch.fmod(x, -2.0), HALVES),
    "div": (torch.div, *SIGNED),
    "div floor": (divide("floor"), numbers(7, -7, 7, -7, 0), numbers(2, 2, -2, 0, 0)),
    "div trunc": (divide("trunc"), *SIGNED),
}

PIECES = {
    "relu": (F.relu, AROUND),
    "relu6": (F.relu6, AROUND),
    "hardtanh": (F.hardtanh, AROUND),
    "hardtanh wide": (lambda x: F.hardtanh(x, -2.0, 3.0), AROUND),
    "hardsigmoid": (F.hardsigmoid, AROUND),
    "hardswish": (F.hardswish, AROUND),
    "hardshrink": (F.hardshrink, AROUND),
    "softshrink": (F.softshrink, AROUND),
    "threshold": (lambda x: F.threshold(x, 1.0, 20.0), AROUND),
    "leaky_relu": (F.leaky_relu, AROUND),
    "prelu": (F.prelu, AROUND, numbers(0.3)),
    "prelu channels": (F.prelu, AROUND[:12].reshape(2, 3, 2), numbers(0.3, -0.1, 2)),
    "rrelu": (lambda x: F.rrelu(x, training=False), AROUND),
    "elu": (lambda x: F.elu(x, 0.7), WIDE),
    "celu": (lambda x: F.celu(x, 1.3), WIDE),
    "selu": (F.selu, WIDE),
    "gelu": (F.gelu, AROUND),
    "gelu tanh": (lambda x: F.gelu(x, approximate="tanh"), AROUND),
    "silu": (F.silu, WIDE),
    "mish": (F.mish, WIDE),
    "softplus": (F.softplus, WIDE),
    "softplus threshold": (lambda x: F.softplus(x, 2.0, 5.0), AROUND),
    "logsigmoid": (F.logsigmoid, WIDE),
    "tanhshrink": (F.tanhshrink, AROUND),
    "softsign": (F.softsign, AROUND),
    "glu": (lambda x: F.glu(x, -1), MATRIX),
    "sigmoid": (torch.sigmoid, WIDE),
    "clamp": (lambda x: x.clamp(-1, 2), AROUND),
    "clamp min": (lambda x: x.clamp(min=0), AROUND),
    "clamp crossed": (lambda x: x.clamp(2, -1), AROUND),
    "clamp tensors": (torch.clamp, numbers(-3, -1, 0, 2, 5, 4), *LIMITS),
    "maximum": (torch.maximum, numbers(1, 2, 3), numbers(1, 3, 2)),
    "minimum": (torch.minimum, numbers(1, 2, 3), numbers(1, 3, 2)),
    "abs": (torch.abs, AROUND),
    "where number": (lambda x: torch.where(x > 0, x, -1.0), AROUND),
    "masked_fill": (lambda x: x.masked_fill(x > 1, -INF), AROUND),
    "padding": (lambda w: F.embedding(torch.tensor([0, 2, 2]), w, padding_idx=2), MATRIX),
}

ROWS = torch.tensor([0, 2, 0])


def shifted_chebyshev(x):
    return torch.special.shifted_chebyshev_polynomial_u(x.detach(), torch.tensor([0, 1, 4]))


POWERS = {
    "square": (lambda x: x**2, AROUND),
    "cube": (lambda x: x**3, AROUND),
    "power 0": (lambda x: x**0, AROUND),
    "power -2": (lambda x: x**-2, numbers(-2, 0.5, 3)),
    "power 2.5": (lambda x: x**2.5, numbers(0, 0.5, 3)),
    "power 9": (lambda x: x**9, AROUND),
    "of number": (lambda x: 2.5**x, AROUND),
    "of 0": (lambda x: 0.0**x, numbers(0, 1, 2)),
    "tensors": (torch.pow, numbers(0, 0, 2, 3, 1.5), numbers(0, 2, 0, 1, -2)),
    "sqrt": (torch.sqrt, numbers(0.25, 4)),
    "rsqrt": (torch.rsqrt, numbers(0.25, 4)),
    "xlogy": (torch.xlogy, numbers(0, 1, 2), numbers(0.5, 2, 3)),
    "logaddexp": (torch.logaddexp, numbers(1, -INF, 200), numbers(1, 0, 300)),
    "expm1": (torch.expm1, numbers(1e-7, -1e-7, 2)),
    "log1p": (torch.log1p, numbers(1e-7, -1e-7, 2)),
    "polygamma": (lambda x: torch.polygamma(4, x), numbers(0.4, 3)),
    "polynomials": (shifted_chebyshev, numbers(0.2, 0.7, 0.9)),
    "cumprod": (lambda x: x.cumprod(0), numbers(2, -1, 0.5)),
    "index_reduce": (lambda x, s: x.index_reduce(0, ROWS, s, "mean"), MATRIX, MATRIX + 1),
    "transposed": (lambda x: x.H, MATRIX),
    "digamma": (torch.digamma, numbers(-2.3, 0.4, 3)),
    "atan2": (torch.atan2, numbers(1, -1, 0.5), numbers(-1, 2, 0.1)),
    "addcmul": (torch.addcmul, AROUND, AROUND + 1, AROUND - 1),
    "add alpha": (lambda a, b: torch.add(a, b, alpha=0.3), AROUND, AROUND + 1),
    "rsub": (lambda x: 3 - x, AROUND),
    "lerp": (lambda a, b: torch.lerp(a, b, 0.3), AROUND, AROUND + 1),
}

REDUCTIONS = {
    "amax": (lambda x: x.amax(1), MATRIX),
    "amin all": (lambda x: x.amin(), MATRIX),
    "max": (lambda x: x.max(), MATRIX),
    "max dim": (lambda x: x.max(-1), MATRIX),
    "min dim keepdim": (lambda x: x.min(0, keepdim=True), MATRIX),
    "max NaN": (lambda x: x.max(0), numbers(1, NAN, 3)),
    "argmax": (lambda x: [x.argmax(), x.argmax(1), x.argmin(0, True), x.argmax(keepdim=True)], MATRIX),
    "median": (lambda x: x.median(), numbers(3, 1, 1, 4, 1, 7)),
    "median dim": (lambda x: x.median(1), DISTINCT),
    "nanmedian": (lambda x: x.nanmedian(0), numbers(3, NAN, 1)),
    "kthvalue": (lambda x: x.kthvalue(2, 1), DISTINCT),
    "sort": (lambda x: x.sort(dim=-1, stable=True), MATRIX),
    "sort descending": (lambda x: x.sort(dim=0, descending=True, stable=True), numbers(2, NAN, 1, 2)),
    "topk": (lambda x: x.topk(2, 0), DISTINCT),
    "topk smallest": (lambda x: x.topk(2, largest=False), numbers(2, NAN, INF, 1)[[0, 3, 1, 2]]),
    "std": (lambda x: [x.std(1), x.std(unbiased=False), x.std(0, correction=0)], DISTINCT),
    "std of equal": (lambda x: x.std(1), torch.ones(2, 3)),
    "var": (lambda x: [x.var(), x.var(1, correction=0), torch.var_mean(x, 0, correction=2)], MATRIX),
    "var of one": (lambda x: x.var(), numbers(3.0)),
    "norm at 0": (lambda x: [x.norm(), x.norm(p=1), x.norm(p=3), x.norm(p=INF)], torch.zeros(3)),
    "norm": (
        lambda x: [x.norm(dim=1), x.norm(p=0.5, dim=0), x.norm(p=-INF), x.norm(p=0), x.norm(p=3)],
        MATRIX + 0.1,
    ),
    "normalize 0": (lambda x: F.normalize(x, dim=-1), torch.zeros(2, 3)),
    "logsumexp": (lambda x: x.logsumexp(0), numbers(-INF, 1, 300)),
    "prod zeros": (lambda x: x.prod(1), numbers(2, 0, 3, 0, 0, 5, 1, 2, 3).reshape(3, 3)),
    "cumprod zeros": (lambda x: x.cumprod(1), numbers(2, 0, 3, 0, 0, 5).reshape(2, 3)),
    "cumsum": (lambda x: x.cumsum(0), MATRIX),
    "cummax": (lambda x: torch.cummax(x, 1), MATRIX),
    "softmax masked": (lambda x: F.softmax(x, -1), numbers(1, -INF, 3, 2)),
    "log_softmax far": (lambda x: F.log_softmax(x, 0), numbers(1000, -1000, 3)),
    "nothing": (lambda x: [x.sum(), x.prod(), x.sum(0)], torch.zeros(0, 3)),
    "scalar": (
        lambda x: [x.sum(-1), x.softmax(0), x.cumsum(0), x.max(0)[0], x.sort()[0], x.squeeze(0)],
        torch.tensor(2.0),
    ),
    "cosine_similarity 0": (lambda a, b: F.cosine_similarity(a, b), torch.zeros(2, 3), torch.ones(2, 3)),
    "cdist": (lambda x: [torch.cdist(x, x + 1, p) for p in (1.0, 2.0, 3.0, INF)], MATRIX),
    "cdist 0": (lambda x: torch.cdist(x, x), MATRIX),
    "pdist": (lambda x: F.pdist(x), MATRIX),
}

INDICES = torch.tensor([[0, 2, 1, 0], [2, 2, 0, 1]])
SHIFTED, OFFSETS = MATRIX[:2] + torch.tensor([0.0, 1, -5, 2]), torch.tensor([0, 3, 3])


def scatter_reduce(how, include):
    return lambda x, i, s: x.scatter_reduce(0, i, s, how, include_self=include)


def bag(mode):
    return lambda w, i, o: F.embedding_bag(i.reshape(-1), w, o, mode=mode, padding_idx=1)


def assign(x, where, value):
    x = x.clone()
    x[where] = value
    return x


INDEXING = {
    "gather": (lambda x, i: x.gather(0, i), MATRIX, INDICES),
    "scatter": (lambda x, i, s: x.scatter(0, i, s), MATRIX, INDICES[:1, :2], MATRIX[:1, :2] + 5),
    "scatter number": (lambda x, i: x.scatter(0, i, 9.0), MATRIX, INDICES),
    "scatter_add": (lambda x, i, s: x.scatter_add(0, i, s), MATRIX, INDICES, MATRIX[:2] + 5),
    **{
        f"scatter_reduce {how} {include}": (scatter_reduce(how, include), MATRIX, INDICES, SHIFTED)
        for how in ("sum", "prod", "mean", "amax", "amin")
        for include in (True, False)
    },
    "index": (lambda x, i: [x[:, i[0]], x[i[:, :2], i[:, 2:]], x[-1], x[..., -2:]], MATRIX, INDICES),
    "index negative": (lambda x: x[torch.tensor([-1, 0, -1])], MATRIX),
    "index_put": (lambda x, i: x.index_put((i[0, 1:3],), torch.ones(4)), MATRIX, INDICES),
    "index_put accumulate": (lambda x, i: x.index_put((i[:, 0], i[:, 1]), x[0, :2], True), MATRIX, INDICES),
    "index_add": (lambda x, s: x.index_add(0, torch.tensor([0, 0, 2]), s, alpha=2), MATRIX, MATRIX + 1),
    "index_copy": (lambda x, s: x.index_copy(0, torch.tensor([2, 0]), s[:2]), MATRIX, MATRIX + 1),
    "index_fill": (lambda x: x.index_fill(1, torch.tensor([0, 3]), 7.0), MATRIX),
    "mask assigned": (lambda x: [assign(x, x > 2, 0.0), assign(x, (x > 2)[:, 0], torch.ones(4))], MATRIX),
    "masked_scatter": (lambda x, s: x.masked_scatter(x > 2, s), MATRIX, MATRIX + 10),
    "take_along_dim": (lambda x, i: x.take_along_dim(i, 1), MATRIX[:2], INDICES),
    "embedding": (lambda w, i: F.embedding(i, w, padding_idx=2), MATRIX, INDICES),
    "embedding by frequency": (lambda w, i: F.embedding(i, w, scale_grad_by_freq=True), MATRIX, INDICES),
    **{f"embedding_bag {how}": (bag(how), MATRIX, INDICES, OFFSETS) for how in ("sum", "mean", "max")},
    "one_hot": (lambda i: F.one_hot(i, 4), INDICES),
    "slices": (lambda x: [x[::2, 1:-1], x[5:], x[:, -3:100:2], x.narrow(1, 1, 2)], MATRIX),
    "slices assigned": (lambda x: assign(x, (slice(0, 3, 2), slice(1, None)), 5.0), MATRIX),
    "diagonal": (lambda x: [x.diagonal(1), x.diagonal(-1), torch.diag_embed(x)], MATRIX),
    "unfold": (lambda x: [x.unfold(1, 2, 1), x.unfold(1, 3, 2), x.unfold(0, 2, 1)], MATRIX),
    "roll": (lambda x: [x.roll(1), x.roll((1, -1), (0, 1)), x.flip(0), x.rot90()], MATRIX),
    "triangles": (lambda x: [x.tril(-1), x.triu(1)], MATRIX),
    "cat": (lambda x: torch.cat([torch.zeros(0), x, x[:0], x], 0), MATRIX),
    "repeat": (lambda x: [x.repeat(2, 1, 3), x.repeat_interleave(2, 1), x.expand(2, -1, -1)], MATRIX),
    "searchsorted": (lambda x: torch.searchsorted(numbers(0, 2, 2, 5), x), MATRIX),
}

PLUS = torch.tensor([7, -7, 7, -7], dtype=torch.int32)
MINUS = torch.tensor([2, 2, -2, -2], dtype=torch.int32)
BYTES = torch.tensor([0, 5, 250], dtype=torch.uint8)
BOOLS = torch.tensor([True, False, True])
FLOATS = numbers(-1.9, 300, -129, 3.9, 0)

INTEGERS = {
    "divided": (lambda a, b: [a / b, a // b, a % b, torch.fmod(a, b), divide("trunc")(a, b)], PLUS, MINUS),
    "by numbers": (lambda a: [a / 2, a // 2, a % 3, a * 1.5, a**2, a.abs(), -a, a.sign()], PLUS),
    "bits": (lambda a, b: [a & b, a | b, a ^ b, ~a, a << 2, a >> 1], PLUS, MINUS),
    "bytes": (lambda a: [a + 10, a - 6, a * 3, a > 5, a.sum(), a.float().mean(), a == 250], BYTES),
    "bytes summed up": (lambda a: a.cumsum(0), BYTES),
    "bytes and numbers": (lambda a: [a + (-1), a > -1], BYTES),
    "bools": (lambda a: [a + a, a * a, a + 1, a & True, a.logical_not(), a * 0.5], BOOLS),
    "bools together": (lambda a: [a.sum(), a.cumsum(0), a.any(), a.all()], BOOLS),
    "casts": (lambda x: [x.byte(), x.to(torch.int8), x.short(), x.int(), x.bool(), x.long()], FLOATS),
    "short casts": (lambda x: [x.to(torch.int8), x.float(), x.bool(), x.half()], PLUS * 50),
    "mixed": (lambda a, b, c: [a + b, b * c, a == c, torch.where(c, a, b)], PLUS[:3], BYTES, BOOLS),
    "pool": (lambda x: F.max_pool1d(x.float(), 2), PLUS.reshape(1, 1, 4)),
    "product": (lambda a, b: [a @ b, torch.outer(a, b)], PLUS, MINUS),
    "ranges": (lambda: [torch.arange(5), torch.arange(3, 0, -1), torch.arange(0, 1, 0.25)],),
    "made": (lambda: [torch.linspace(0, 1, 5), torch.eye(2, 3)],),
    "extrema": (lambda a: [a.max(), a.min(0), a.argmax(), a.clamp(-2, 5), torch.maximum(a, a[:1])], PLUS),
    "sorted": (lambda a: a.sort(stable=True), PLUS),
}

GROUPS = {"rounding": ROUNDING, "pieces": PIECES, "powers": POWERS, "integers": INTEGERS}
SLOW = pytest.mark.thorough
THOROUGH = {"reductions": REDUCTIONS, "indexing": INDEXING}


@pytest.mark.filterwarnings("ignore:var.*degrees of freedom")  # torch's; the result is NaN
@pytest.mark.filterwarnings("ignore:index_reduce.* is in beta")
@pytest.mark.parametrize("group", [*GROUPS, *(pytest.param(g, marks=SLOW) for g in THOROUGH)])
def test_results_and_gradients_are_those_of_torch(group):
    lowered.compare_all((GROUPS | THOROUGH)[group])


def add_up(x):
    return x.sum(), x.mean(), x.var(), x.norm(), x.cumsum(0)[-1], x.logsumexp(0)


def compute_losses(x):
    of_classes = F.cross_entropy(x, torch.tensor([0, 3, 1]))
    return of_classes, F.mse_loss(x, x * 0.9), F.smooth_l1_loss(x, x * 0)


def scale(x):
    return x * 1e5, x + 1e-4, x / 3, 1e5 - x, x > 0.1, x == 0.1, torch.add(x, x, alpha=0.3)


def pool(x):
    return F.avg_pool1d(x, 3), F.adaptive_avg_pool1d(x, 3), F.max_pool1d(x, 2)


HALF = {
    "numbers": (scale, numbers(0.1, 0.3)),
    "masked": (lambda x: (1 - x) * -1e5 + x, numbers(1.0, 1, 1)),
    "sums": (add_up, torch.full((5000,), 0.1)),
    "with float": (lambda x, y: [x * y, x + y, torch.where(x > 0, x, y), x * torch.tensor(1.1)], HALVES),
    "layer_norm": (lambda x: [F.layer_norm(x, (4,)), F.group_norm(x, 1), F.rms_norm(x, (4,))], MATRIX),
    "linear": (nn.Linear(4, 3), MATRIX),
    "convolution": (nn.Conv1d(1, 4, 3, padding=1), MATRIX[:, None]),
    "batch_norm": (nn.BatchNorm1d(4), MATRIX),
    "attention": (lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), MATRIX),
    "pooling": (pool, MATRIX[None]),
    "resized": (lambda x: F.interpolate(x[None], scale_factor=2.0, mode="linear"), MATRIX),
    "gru": (nn.GRU(4, 3), MATRIX),
    "losses": (compute_losses, MATRIX),
    "embedding": (lambda w, i: F.embedding(i, w), MATRIX, INDICES),
}
# Of one argument each.
FUNCTIONS = (torch.exp, torch.sigmoid, torch.tanh, torch.expm1, torch.asinh, torch.erf, torch.exp2)
FUNCTIONS += (F.gelu, F.silu, F.softplus, lambda x: x**3)
SOFTMAXES = (F.softmax, F.log_softmax)
HALF["functions"] = (lambda x: [*(f(x) for f in FUNCTIONS), *(f(x, 0) for f in SOFTMAXES)], HALVES)


@pytest.mark.thorough
def test_sixteen_bits_are_computed_in_float32_where_torch_does():
    dtype, tolerance = torch.float16, 3e-3
    cases = {}
    torch.manual_seed(0)
    for name, (function, *args) in HALF.items():
        if isinstance(function, nn.Module):
            function = copy.deepcopy(function)
            function.reset_parameters()
            function.to(dtype)
        narrow = [x.to(dtype) if x.is_floating_point() else x for x in args]
        cases[name] = (function, *narrow, *([HALVES + 0.1] if name == "with float" else []))
    lowered.compare_all(cases, tolerance=tolerance)

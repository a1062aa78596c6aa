"""Modules of torch.nn through trainingModel: results, buffers and all gradients are those of plain torch.

Many modules stand side by side in one model, since compiling takes longer than anything else. To what each
of them is given a trained zero is added, whose gradient is that of the input.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import pytest
import torch
from torch import nn

import ipu_pipeline.poptorch as poptorch
from tests.support.poptorch_front import join, leaves, make_options, norm, reference, seeded
from tests.support.poptorch_models import Draw

ROWS, ACCUMULATION = 2, 2
TOLERANCES = {"float32": 1e-5, "float64": 1e-12}  # of a leaf's 2-norm
UNIT = {"float32": 2.0**-23, "float64": 2.0**-52}


@dataclasses.dataclass(frozen=True)
class Module:
    """A module to compare.

    Attributes:
      make: the module.
      inputs: what it is given for so many rows.
      call: how it is called.
      num_fixed: the last so many inputs are targets that have no gradient.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[Draw, int], tuple[torch.Tensor, ...]]
    call: Callable[..., Any] = lambda module, *inputs: module(*inputs)
    num_fixed: int = 0


def of_shape(*shapes):
    """Inputs of these shapes, beside the rows."""
    return lambda draw, rows: tuple(draw.normal(rows, *shape) for shape in shapes)


def made(text):
    """What makes a module of torch.nn, as it is written."""
    return eval(f"lambda: nn.{text}", {"nn": nn})  # noqa: S307  # it is ours


def group(shape, *texts):
    """Modules that take one input of a shape."""
    return {text: Module(made(text), of_shape(shape)) for text in texts}


def classes(number, *shape):
    """Scores, and classes as targets."""
    return lambda draw, rows: (draw.normal(rows, number, *shape), draw.integers(0, number, rows, *shape))


def signed(*shapes):
    """Inputs of these shapes, and for each row 1 or -1."""

    def make(draw, rows):
        signs = 2 * draw.integers(0, 2, rows) - 1
        return *(draw.normal(rows, *shape) for shape in shapes), signs.to(draw.dtype)

    return make


def probabilities(draw, rows):
    return draw.normal(rows, 4).softmax(-1), draw.normal(rows, 4).softmax(-1)


def variances(draw, rows):
    return draw.normal(rows, 4), draw.normal(rows, 4), 0.5 + draw.uniform(rows, 4)


def counts(draw, rows):
    return draw.normal(rows, 3), draw.integers(0, 2, rows, 3).to(draw.dtype)


SEQUENCE = of_shape((4, 3))
ACTIVATIONS = group(
    (3, 4),
    *("ELU()", "CELU(0.5)", "SELU()", "GELU()", "GELU(approximate='tanh')", "SiLU()", "Mish()"),
    *("Softplus()", "Softplus(2.0, 1.0)", "Softsign()", "Tanhshrink()", "Hardshrink()", "Softshrink()"),
    *("Hardswish()", "Hardtanh()", "LeakyReLU()", "ReLU6()", "LogSigmoid()", "PReLU(3)"),
    *("Threshold(0.1, 0.3)", "GLU()", "Softmin(1)", "LogSoftmax(-1)", "RReLU().eval()"),
    "Dropout(0.4).eval()",
)
NORMALIZATIONS = {
    **group((3, 4), "BatchNorm1d(3)", "InstanceNorm1d(3, affine=True)", "RMSNorm(4)"),
    **group(
        (4, 3, 3),
        *("BatchNorm2d(4, momentum=None)", "BatchNorm2d(4, track_running_stats=False)"),
        *("InstanceNorm2d(4, track_running_stats=True)", "GroupNorm(2, 4)", "LayerNorm((4, 3, 3))"),
        *("LayerNorm(3, bias=False)", "LocalResponseNorm(2)", "Softmax2d()", "BatchNorm2d(4).eval()"),
    ),
    **group((2, 2, 3, 2), "BatchNorm3d(2, affine=False)", "InstanceNorm3d(2)"),
}
CONVOLUTIONS = {
    **group(
        (4, 7),
        "Conv1d(4, 6, 3, stride=2, padding=1, groups=2)",
        "Conv1d(4, 2, 3, padding=2, dilation=2, padding_mode='circular')",
        "ConvTranspose1d(4, 2, 3, stride=2, groups=2)",
    ),
    **group(
        (2, 5, 6),
        "Conv2d(2, 3, (3, 2), padding='same', bias=False)",
        "Conv2d(2, 3, 2, stride=(1, 2), padding=1, padding_mode='replicate')",
        "ConvTranspose2d(2, 3, 3, stride=2, padding=1, output_padding=1, dilation=2)",
        "Unfold(2, stride=2)",
    ),
    **group((2, 3, 4, 4), "Conv3d(2, 2, (1, 3, 2))", "ConvTranspose3d(2, 1, 2, stride=2)"),
    **group((8, 6), "Fold((4, 3), (2, 2))"),
}
POOLINGS = {
    **group(
        (3, 7),
        *("MaxPool1d(3, 2, 1)", "AvgPool1d(3, 2, 1, ceil_mode=True)", "AdaptiveAvgPool1d(3)"),
        *("AdaptiveMaxPool1d(2)", "LPPool1d(2, 2)"),
    ),
    **group(
        (2, 6, 5),
        *("MaxPool2d((2, 3), 2, dilation=(2, 1), ceil_mode=True)", "MaxPool2d(2, return_indices=True)"),
        *("AvgPool2d(3, 2, 1, count_include_pad=False)", "AdaptiveAvgPool2d((4, None))"),
        "AdaptiveMaxPool2d(2)",
    ),
    **group((2, 4, 4, 4), "MaxPool3d(2)", "AvgPool3d((2, 1, 3))", "AdaptiveAvgPool3d(1)"),
}
SHAPES = {
    **group(
        (4, 3, 4),
        *("Flatten()", "Unflatten(1, (2, 2))", "PixelShuffle(2)", "PixelUnshuffle(1)", "ChannelShuffle(2)"),
        *("ReflectionPad2d((1, 2, 0, 1))", "ReplicationPad2d(2)", "ZeroPad2d((1, -1, 0, 2))"),
        *("ConstantPad2d(1, 3.5)", "CircularPad2d(1)", "Upsample(scale_factor=2)"),
        "Upsample((5, 3), mode='bilinear', align_corners=True)",
        "Upsample(scale_factor=(1.5, 2), mode='bicubic')",
    ),
    "Bilinear": Module(lambda: nn.Bilinear(2, 3, 4), of_shape((2,), (3,))),
    "CosineSimilarity": Module(lambda: nn.CosineSimilarity(1), of_shape((3, 2), (3, 2))),
    "cdist": Module(nn.Identity, of_shape((3, 4), (2, 4)), lambda _module, *both: torch.cdist(*both)),
    "grid_sample": Module(
        nn.Identity,
        of_shape((2, 3, 4), (3, 4, 2)),
        lambda _module, image, grid: nn.functional.grid_sample(
            image, torch.tanh(grid), align_corners=False
        ),
    ),
    "PairwiseDistance": Module(lambda: nn.PairwiseDistance(3.0), of_shape((3,), (3,))),
    "Embedding": Module(
        lambda: nn.Embedding(5, 3, padding_idx=1), lambda draw, rows: (draw.integers(0, 5, rows, 4),)
    ),
    "EmbeddingBag": Module(
        lambda: nn.EmbeddingBag(5, 3, mode="sum"),
        lambda draw, rows: (draw.integers(0, 5, rows, 4), draw.normal(rows, 4)),
        lambda module, numbers, weights: module(numbers, per_sample_weights=weights),
    ),
}
RECURRENT = {
    "RNN": Module(lambda: nn.RNN(3, 2, nonlinearity="relu", batch_first=True), SEQUENCE),
    "LSTM": Module(lambda: nn.LSTM(3, 4, proj_size=2, batch_first=True, bidirectional=True), SEQUENCE),
    "GRU": Module(
        lambda: nn.GRU(3, 2, num_layers=2), SEQUENCE, lambda module, x: module(x.transpose(0, 1))[0].mT
    ),
    "RNNCell": Module(lambda: nn.RNNCell(3, 2), of_shape((3,), (2,))),
    "LSTMCell": Module(lambda: nn.LSTMCell(3, 2), of_shape((3,))),
    "GRUCell": Module(lambda: nn.GRUCell(3, 2, bias=False), of_shape((3,), (2,))),
}
ATTENTION = {
    "MultiheadAttention": Module(
        lambda: nn.MultiheadAttention(4, 2, kdim=3, vdim=2, add_bias_kv=True, batch_first=True),
        of_shape((3, 4), (5, 3), (5, 2)),
    ),
    "TransformerEncoderLayer": Module(
        lambda: nn.TransformerEncoderLayer(4, 2, 5, 0.0, batch_first=True, norm_first=True),
        of_shape((3, 4)),
    ),
    "TransformerDecoderLayer": Module(
        lambda: nn.TransformerDecoderLayer(4, 1, 5, 0.0, "gelu", batch_first=True), of_shape((3, 4), (2, 4))
    ),
}
LOSSES = {
    "L1Loss": Module(nn.L1Loss, of_shape((4,), (4,))),
    "MSELoss": Module(lambda: nn.MSELoss(reduction="sum"), of_shape((4,), (4,))),
    "SmoothL1Loss": Module(lambda: nn.SmoothL1Loss(beta=0.5), of_shape((4,), (4,))),
    "HuberLoss": Module(lambda: nn.HuberLoss(delta=0.5), of_shape((4,), (4,))),
    "CrossEntropyLoss": Module(lambda: nn.CrossEntropyLoss(label_smoothing=0.2), classes(3, 2)),
    "CrossEntropyLoss, probabilities": Module(nn.CrossEntropyLoss, probabilities),
    "NLLLoss": Module(lambda: nn.NLLLoss(reduction="none"), classes(4)),
    "PoissonNLLLoss": Module(lambda: nn.PoissonNLLLoss(full=True), counts, num_fixed=1),
    "GaussianNLLLoss": Module(nn.GaussianNLLLoss, variances),
    "KLDivLoss": Module(lambda: nn.KLDivLoss(reduction="batchmean"), probabilities),
    "BCELoss": Module(nn.BCELoss, probabilities, num_fixed=1),
    "BCEWithLogitsLoss": Module(nn.BCEWithLogitsLoss, counts),
    "MarginRankingLoss": Module(lambda: nn.MarginRankingLoss(0.5), signed((), ()), num_fixed=1),
    "HingeEmbeddingLoss": Module(nn.HingeEmbeddingLoss, signed(()), num_fixed=1),
    "CosineEmbeddingLoss": Module(nn.CosineEmbeddingLoss, signed((3,), (3,)), num_fixed=1),
    "SoftMarginLoss": Module(nn.SoftMarginLoss, signed(()), num_fixed=1),
    "CTCLoss": Module(
        nn.CTCLoss,
        lambda draw, rows: (draw.normal(rows, 5, 4), draw.integers(1, 4, rows, 2)),
        lambda module, x, classes: module(
            x.transpose(0, 1).log_softmax(-1), classes, (5,) * len(x), (2,) * len(x)
        ),
    ),
    "MultiMarginLoss": Module(lambda: nn.MultiMarginLoss(p=2, margin=0.7), classes(4)),
    "MultiLabelSoftMarginLoss": Module(nn.MultiLabelSoftMarginLoss, counts, num_fixed=1),
    "TripletMarginLoss": Module(lambda: nn.TripletMarginLoss(3.0, swap=True), of_shape((4,), (4,), (4,))),
}
GROUPS = {
    "activations": ACTIVATIONS,
    "normalizations": NORMALIZATIONS,
    "convolutions": CONVOLUTIONS,
    "poolings": POOLINGS,
    "shapes": SHAPES,
    "recurrent": RECURRENT,
    "attention": ATTENTION,
    "losses": LOSSES,
}


class SideBySide(nn.Module):
    """All modules of a group, half of them on each of two IPUs; the loss is a weighted sum of results."""

    def __init__(self, modules, example, dtype):
        super().__init__()
        self.compared = list(modules.values())
        self.layers = nn.ModuleList([module.make() for module in self.compared]).to(dtype)
        self.counts = [len(tensors) for tensors in example]
        self.zeros = nn.ParameterList(
            [
                torch.zeros_like(tensor[:ROWS])
                for module, tensors in zip(self.compared, example, strict=True)
                for tensor in tensors[: len(tensors) - module.num_fixed]
                if tensor.is_floating_point()
            ]
        )

    def forward(self, *inputs):
        given, zeros = iter(inputs), iter(self.zeros)
        every, total = [], 0.0
        for number, (module, count) in enumerate(zip(self.compared, self.counts, strict=True)):
            with poptorch.Block(ipu_id=2 * number // len(self.compared)):
                tensors = [next(given) for _input in range(count)]
                varied, fixed = tensors[: count - module.num_fixed], tensors[count - module.num_fixed :]
                varied = [t + next(zeros) if t.is_floating_point() else t for t in varied]
                results = leaves(module.call(self.layers[number], *varied, *fixed))
                every.append(results)
                total = total + sum(_weighted(result) for result in results if result.is_floating_point())
        return every, poptorch.identity_loss(total, reduction="sum")


def _weighted(result):
    return (result * torch.cos(torch.arange(result.numel()).view(result.shape).to(result.dtype))).sum()


def find_differences(actual, expected, tolerance, rooms=None):
    """The tensors that differ, with difference and norm. Dtypes, shapes and integers must be the same."""
    found = {}
    for name, wanted in expected.items():
        one = actual[name].detach()
        assert (one.dtype, one.shape) == (wanted.dtype, wanted.shape), name
        if not wanted.is_floating_point():
            assert torch.equal(one, wanted), name
        elif not norm(one - wanted) <= tolerance * norm(wanted) + (rooms or {}).get(name, 0.0):
            found[name] = norm(one - wanted), norm(wanted)
    return found


def train(group, dtype):
    """Trains the modules of a group; returns what differs from plain torch."""
    draw = Draw(torch.Generator().manual_seed(1), getattr(torch, dtype))
    example = [module.inputs(draw, ROWS * ACCUMULATION) for module in group.values()]
    batch = [tensor for tensors in example for tensor in tensors]
    model = seeded(lambda: SideBySide(group, example, draw.dtype))
    plain = reference(model, lambda parameters: torch.optim.SGD(parameters, lr=1.0))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    results, _loss = poptorch.trainingModel(model, make_options(1, ACCUMULATION), optimizer)(*batch)
    made = plain.train(batch, 1, ACCUMULATION, lambda outputs: outputs[-1])
    expected = iter(join(made))
    found = {}
    for name, outputs in zip(group, results, strict=True):
        outputs = dict(enumerate(outputs))
        wanted = {number: next(expected).detach() for number in outputs}
        if different := find_differences(outputs, wanted, TOLERANCES[dtype]):
            found[name] = different
    after = dict(model.named_parameters())
    gradients = {name: before[name] - after[name] for name in before}  # the rate is 1
    wanted = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in plain.model.named_parameters()
    }
    rooms = {name: UNIT[dtype] * norm(before[name]) for name in before}  # of the subtraction
    found |= find_differences(gradients, wanted, TOLERANCES[dtype], rooms)
    buffers = dict(model.named_buffers())
    return found | find_differences(buffers, dict(plain.model.named_buffers()), TOLERANCES[dtype])


# Of make test; whole models have the others, too. All of torch's own list are compared in float32.
FIRST = {("convolutions", "float64")}


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize(
    ("group", "dtype"),
    [
        pytest.param(group, dtype, marks=() if (group, dtype) in FIRST else pytest.mark.thorough)
        for group, dtype in ((group, "float64") for group in GROUPS)
    ],
)
def test_modules(group, dtype):
    with jax.enable_x64(dtype == "float64"):
        assert train(GROUPS[group], dtype) == {}

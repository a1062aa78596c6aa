"""Whole models written out in small, as users have them, for the tests of PopTorch's front.

Each forward takes inputs and, for training, targets; without targets it leaves the loss out. At named
places a block may begin; where one does, and how, is set from outside. They are deterministic, and have no
parameter whose gradient is zero but for rounding, as a bias straight before a batch norm has.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm

import ipu_pipeline.poptorch as poptorch

__all__ = ["WHOLE_MODELS", "Whole", "whole_model"]


class Whole(nn.Module):
    """A model with places where a block may begin.

    Attributes:
      PLACES: their names, in the order in which forward comes to them.
      LAYERS: modules that forward calls, by name: there a block may begin as well.
      begins: what to do at a place, as a context manager for what is computed there.
    """

    PLACES: tuple[str, ...] = ()
    LAYERS: tuple[str, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.begins: dict[str, Callable[[], Any]] = {}

    def at(self, place: str) -> Any:
        """A context manager for what is computed at a place."""
        assert place in self.PLACES
        return self.begins.get(place, contextlib.nullcontext)()


@dataclasses.dataclass(frozen=True)
class Draw:
    """Random inputs: a generator of torch's, and the dtype of floating-point numbers."""

    generator: torch.Generator
    dtype: torch.dtype

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=self.dtype)

    def uniform(self, *shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=self.generator, dtype=self.dtype)

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """From `low` to `high` - 1."""
        return torch.randint(low, high, shape, generator=self.generator)


@dataclasses.dataclass(frozen=True)
class WholeModel:
    """How to make a model and what it is called with."""

    make: Callable[[], Whole]  # its weights depend on torch's seed
    make_batch: Callable[[Draw, int], tuple[torch.Tensor, ...]]  # inputs and targets for so many rows
    num_inputs: int = 1  # so many of these tensors are given for inference
    min_rows: int = 1  # of a micro-batch


WHOLE_MODELS: dict[str, WholeModel] = {}


def whole_model(
    name: str, make_batch: Callable[[Draw, int], tuple[torch.Tensor, ...]], **options: Any
) -> Callable[[type[Whole]], type[Whole]]:
    """A decorator that registers a model. Its options are those of `WholeModel`."""

    def register(model: type[Whole]) -> type[Whole]:
        WHOLE_MODELS[name] = WholeModel(model, make_batch, **options)
        return model

    return register


@whole_model(
    "siamese", lambda draw, rows: tuple(draw.normal(rows, 5, 4) for _one in range(3)), num_inputs=3
)
class Siamese(Whole):
    """One tower for three inputs: its variables belong to several stages."""

    PLACES = ("anchor", "positive", "negative", "loss")
    LAYERS = ("tower", "tower.3")

    def __init__(self):
        super().__init__()
        self.tower = nn.Sequential(
            nn.Conv1d(5, 6, 2), nn.SELU(), nn.Flatten(), weight_norm(nn.Linear(18, 6)), nn.Softsign()
        )
        self.loss = nn.TripletMarginLoss(margin=5.0)

    def forward(self, anchor, positive, negative):
        with self.at("anchor"):
            anchor = self.tower(anchor)
        with self.at("positive"):
            positive = self.tower(positive)
        with self.at("negative"):
            negative = functional.normalize(self.tower(negative), dim=-1)
        with self.at("loss"):
            return [anchor, positive, negative, self.loss(anchor, positive, negative)]


@whole_model(
    "two heads", lambda draw, rows: (draw.normal(rows, 6), draw.normal(rows, 2), draw.integers(0, 3, rows))
)
class TwoHeads(Whole):
    """Where an object is, and what; the loss is a sum with a trained balance."""

    PLACES = ("body", "where", "what", "loss")
    LAYERS = ("body", "where", "what")

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Softplus(), nn.Linear(8, 8), nn.Hardtanh(-2, 2))
        self.where, self.what = nn.Linear(8, 2), nn.Bilinear(8, 8, 3)
        self.balance = nn.Parameter(torch.tensor([0.3, -0.2]))

    def forward(self, x, place=None, kind=None):
        with self.at("body"):
            x = self.body(x)
        with self.at("where"):
            found = self.where(x)
        with self.at("what"):
            scores = self.what(x, torch.sin(x))
        with self.at("loss"):
            if place is None:
                return found, scores
            of_place = functional.smooth_l1_loss(found, place, beta=0.5)
            of_kind = functional.multi_margin_loss(scores, kind, margin=2.0)
            losses = torch.stack([of_place, of_kind])
            total = (losses * torch.exp(-self.balance) + self.balance).sum()
            return found, scores, losses, poptorch.identity_loss(total, reduction="none")


@whole_model("experts", lambda draw, rows: (draw.normal(rows, 6), draw.normal(rows, 4)))
class Experts(Whole):
    """Each row goes to two of four experts; the second counts only if the gate gives it enough."""

    PLACES = ("gate", "experts", "mix")
    LAYERS = ("gate", "experts.0", "experts.2")

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(6, 4)
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(6, 7), nn.SiLU(), nn.Linear(7, 4)) for _expert in range(4)]
        )
        self.register_buffer("uses", torch.zeros(4, dtype=torch.int64))

    def forward(self, x, target=None):
        with self.at("gate"):
            weights, chosen = torch.topk(self.gate(x).softmax(-1), 2)
            keep = torch.stack([torch.ones_like(weights[:, 0]) > 0, weights[:, 1] > 0.2], -1)
            weights = torch.where(keep, weights, torch.zeros_like(weights))
            self.uses += functional.one_hot(chosen, 4).sum((0, 1))
        with self.at("experts"):
            every = torch.stack([expert(x) for expert in self.experts], 1)
        with self.at("mix"):
            picked = every.gather(1, chosen[..., None].expand(-1, -1, 4))
            y = (picked * weights[..., None]).sum(1)
            dense = torch.zeros_like(every[..., 0]).scatter(1, chosen, weights)
            result = (y, chosen, dense)
            return result if target is None else (*result, functional.l1_loss(y, target))


# Of images.


class Residual(nn.Module):
    """ResNet's basic block."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x):
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += x if self.downsample is None else self.downsample(x)
        return self.relu(y)


@whole_model(
    "resnet", lambda draw, rows: (draw.normal(rows, 3, 16, 16), draw.integers(0, 5, rows)), min_rows=2
)
class ResNet(Whole):
    """ResNet-18 with few channels, and two of its four layers."""

    PLACES = ("stem", "layer1", "layer2", "head")
    LAYERS = ("layer1.0", "layer1.1", "layer2.0.downsample", "layer2.1.conv2", "fc")

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 4, 7, 1, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        self.layer1 = nn.Sequential(Residual(4, 4, 1), Residual(4, 4, 1))
        self.layer2 = nn.Sequential(Residual(4, 8, 2), Residual(8, 8, 1))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8, 5)

    def forward(self, x, target=None):
        for place in ("stem", "layer1", "layer2"):
            with self.at(place):
                x = getattr(self, place)(x)
        with self.at("head"):
            x = self.fc(torch.flatten(self.pool(x), 1))
            return x if target is None else (x, functional.cross_entropy(x, target, label_smoothing=0.1))


@whole_model(
    "unet",
    lambda draw, rows: (draw.normal(rows, 2, 8, 12), draw.integers(0, 2, rows, 1, 8, 12).to(draw.dtype)),
)
class UNet(Whole):
    """Skips from each level down to the same level up: values that pass by stages."""

    PLACES = ("down1", "down2", "bottom", "up2", "up1", "loss")
    LAYERS = ("down1", "down2", "bottom", "rise2", "up2", "up1")

    def __init__(self):
        super().__init__()
        self.down1, self.down2 = self.make_level(2, 4), self.make_level(4, 6)
        self.bottom = self.make_level(6, 6)
        self.rise2 = nn.ConvTranspose2d(6, 6, 2, stride=2)
        self.up2, self.up1 = self.make_level(12, 4), self.make_level(8, 4)
        self.last = nn.Conv2d(4, 1, 1)

    @staticmethod
    def make_level(inputs, outputs):
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1), nn.ELU(), nn.GroupNorm(2, outputs), nn.SiLU()
        )

    def forward(self, x, mask=None):
        with self.at("down1"):
            first = self.down1(x)
        with self.at("down2"):
            second = self.down2(functional.max_pool2d(first, 2))
        with self.at("bottom"):
            x = self.bottom(functional.avg_pool2d(second, 2))
        with self.at("up2"):
            x = self.up2(torch.cat([self.rise2(x), second], 1))
        with self.at("up1"):
            x = functional.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
            x = self.last(self.up1(torch.cat([x, first], 1)))
        with self.at("loss"):
            if mask is None:
                return torch.sigmoid(x)
            return x, functional.binary_cross_entropy_with_logits(x, mask)


@whole_model("autoencoder", lambda draw, rows: (draw.uniform(rows, 1, 8, 8), draw.uniform(rows, 1, 8, 8)))
class Autoencoder(Whole):
    """Its tuple of results has a dictionary and a list in it."""

    PLACES = ("encode", "decode")
    LAYERS = ("encoder", "encoder.2", "decoder.0", "decoder.2")

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 3, 3, stride=2, padding=1), nn.Softplus(), nn.Conv2d(3, 4, 3, 2, 1), nn.Tanh()
        )
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(4, 3, 3, stride=2, padding=1, output_padding=1),
            nn.LeakyReLU(0.1),
            nn.ConvTranspose2d(3, 1, 2, stride=2),
            nn.Sigmoid(),
        )

    def forward(self, x, target=None):
        with self.at("encode"):
            code = self.encoder(x)
        with self.at("decode"):
            made = self.decoder(code)
            result = {"code": code, "made": [made]}
            return (result,) if target is None else (result, functional.mse_loss(made, target))

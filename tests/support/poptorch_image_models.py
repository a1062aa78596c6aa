"""Whole models of images; see `poptorch_models`, where they are registered."""

import torch
from torch import nn
from torch.nn import functional

from tests.support.poptorch_models import Whole, whole_model


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

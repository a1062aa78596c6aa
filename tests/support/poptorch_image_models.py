"""Whole models of images; see `poptorch_models`, where they are registered."""

import torch
from torch import nn
from torch.nn import functional

from tests.support.poptorch_models import Whole, in_order, whole_model


@whole_model(
    "mnist cnn", lambda draw, rows: (draw.normal(rows, 1, 12, 12), draw.integers(0, 10, rows)), min_rows=2
)
class MnistCnn(Whole):
    """With batch norm, whose statistics are buffers; the result is the class as an integer, too."""

    PLACES = ("block1", "block2", "head", "loss")
    LAYERS = ("block1", "block2", "dense", "classifier")

    def __init__(self):
        super().__init__()
        self.block1 = self.make_block(1, 3)
        self.block2 = self.make_block(3, 4)
        self.dense = nn.Linear(36, 12)
        self.classifier = nn.Linear(12, 10)

    @staticmethod
    def make_block(inputs, outputs):
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )

    def forward(self, x, target=None):
        with self.at("block1"):
            x = self.block1(x)
        with self.at("block2"):
            x = self.block2(x)
        with self.at("head"):
            x = functional.relu(self.dense(x.flatten(1)))
            x = functional.log_softmax(self.classifier(x), dim=-1)
        with self.at("loss"):
            found = x.argmax(-1)
            return (found, x) if target is None else (found, x, functional.nll_loss(x, target))


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


class Inverted(nn.Module):
    """MobileNet's inverted residual, with squeeze and excitation."""

    def __init__(self, channels, hidden, activation):
        super().__init__()
        self.expand = nn.Sequential(
            nn.Conv2d(channels, hidden, 1, bias=False), nn.BatchNorm2d(hidden, momentum=0.01), activation
        )
        self.depthwise = nn.Sequential(
            nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden, bias=False),
            nn.BatchNorm2d(hidden, eps=1e-3),
        )
        self.squeeze = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(hidden, 2, 1), nn.SiLU())
        self.excite = nn.Sequential(nn.Conv2d(2, hidden, 1), nn.Sigmoid())
        self.project = nn.Conv2d(hidden, channels, 1, bias=False)

    def forward(self, x):
        y = self.depthwise(self.expand(x))
        return x + self.project(y * self.excite(self.squeeze(y)))


@whole_model(
    "mobilenet", lambda draw, rows: (draw.normal(rows, 3, 9, 9), draw.integers(0, 3, rows)), min_rows=2
)
class MobileNet(Whole):
    PLACES = ("stem", "body", "head")
    LAYERS = ("blocks.0", "blocks.1.squeeze", "blocks.1", "classifier")

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, stride=2)
        self.blocks = nn.ModuleList([Inverted(4, 8, nn.ReLU6()), Inverted(4, 6, nn.Hardswish())])
        self.classifier = nn.Sequential(nn.Linear(4, 6), nn.Hardswish(), nn.Dropout(0.0), nn.Linear(6, 3))

    def forward(self, x, target=None):
        with self.at("stem"):
            x = functional.hardswish(self.stem(x))
        with self.at("body"):
            x = in_order(self.blocks, x)
        with self.at("head"):
            x = self.classifier(x.mean([2, 3]))
            return x if target is None else (x, functional.cross_entropy(x, target))


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


@whole_model(
    "video",
    lambda draw, rows: (draw.normal(rows, 2, 4, 6, 6), draw.normal(rows, 3)),
    min_rows=2,
)
class Video(Whole):
    PLACES = ("early", "late", "head")
    LAYERS = ("early", "late", "head")

    def __init__(self):
        super().__init__()
        self.early = nn.Sequential(
            nn.Conv3d(2, 3, 3, padding=1, bias=False), nn.BatchNorm3d(3), nn.ReLU(), nn.AvgPool3d(2)
        )
        self.late = nn.Sequential(
            nn.Conv3d(3, 4, (1, 3, 3), padding=(0, 2, 2), dilation=(1, 2, 2)),
            nn.CELU(),
            nn.MaxPool3d((1, 3, 3)),
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x, target=None):
        with self.at("early"):
            x = self.early(x)
        with self.at("late"):
            x = self.late(x)
        with self.at("head"):
            x = self.head(x.flatten(start_dim=1))
            return x if target is None else (x, functional.huber_loss(x, target, delta=0.7))


@whole_model(
    "superresolution",
    lambda draw, rows: (draw.uniform(rows, 3, 5, 4), draw.uniform(rows, 3, 10, 8)),
)
class SuperResolution(Whole):
    PLACES = ("first", "middle", "last")
    LAYERS = ("first", "norm", "last", "shuffle")

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, padding=1, padding_mode="reflect")
        self.slope = nn.PReLU(6, init=0.2)
        self.norm = nn.InstanceNorm2d(6, affine=True)
        self.last = nn.Conv2d(6, 12, 3, padding="same")
        self.shuffle = nn.PixelShuffle(2)

    def forward(self, x, target=None):
        with self.at("first"):
            y = self.slope(self.first(x))
        with self.at("middle"):
            y = self.norm(y)
        with self.at("last"):
            y = self.shuffle(self.last(y)) + functional.interpolate(x, scale_factor=2, mode="nearest")
            return y if target is None else (y, functional.smooth_l1_loss(y, target))


@whole_model("vision transformer", lambda draw, rows: (draw.normal(rows, 3, 8, 8), draw.uniform(rows, 4)))
class VisionTransformer(Whole):
    """Patches, a class token and nn.MultiheadAttention, whose weights are returned."""

    PLACES = ("patches", "attend", "mix", "head")
    LAYERS = ("patches", "attention", "mlp", "head")

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 6, 4, stride=4)
        self.token = nn.Parameter(torch.randn(1, 1, 6))
        self.positions = nn.Parameter(torch.randn(1, 5, 6))
        self.norm = nn.RMSNorm(6)
        self.attention = nn.MultiheadAttention(6, 3, batch_first=True)
        self.mlp = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))
        self.head = nn.Linear(6, 4)

    def forward(self, x, target=None):
        with self.at("patches"):
            x = self.patches(x).flatten(2).transpose(1, 2)
            x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        with self.at("attend"):
            y = self.norm(x)
            y, weights = self.attention(y, y, y)
            x = x + y
        with self.at("mix"):
            x = x + self.mlp(x)
        with self.at("head"):
            x = self.head(x[:, 0])
            if target is None:
                return x, weights
            return (
                x,
                weights,
                functional.kl_div(
                    x.log_softmax(-1), target.log_softmax(-1), reduction="batchmean", log_target=True
                ),
            )

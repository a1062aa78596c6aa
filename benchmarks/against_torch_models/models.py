"""The models of this benchmark as torch modules, what they are trained on, and where their stages begin."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported, which reads it once

import torch
from torch import nn
from torch.nn import functional

__all__ = ["CASES", "Case"]

NUM_CLASSES = 10
LENGTH, NUM_TOKENS = 128, 30522  # of BERT; GPT-2 has its own number
NUM_FEATURES, LSTM_WIDTH, NUM_STEPS = 64, 256, 64


class Classifier(nn.Module):
    """Parts one after another, and the cross entropy of what the last one gives."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return x if labels is None else functional.cross_entropy(x, labels)


class Residual(nn.Module):
    """ResNet's basic block (He et al. 2016)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.skip = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.skip = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.body(x) + self.skip(x))


def make_head(channels: int) -> nn.Module:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, NUM_CLASSES))


def make_resnet18() -> nn.Module:
    """That for CIFAR: a stem of stride 1, and no pooling before the layers."""
    stem = nn.Sequential(nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU())
    widths = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]
    layers = [nn.Sequential(Residual(i, o, s), Residual(o, o, 1)) for i, o, s in widths]
    return Classifier([nn.Sequential(stem, layers[0]), *layers[1:3], nn.Sequential(layers[3], make_head(512))])


class Inverted(nn.Module):
    """MobileNetV2's block (Sandler et al. 2018)."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = inputs * expansion
        parts: list[nn.Module] = []
        if expansion > 1:
            parts += [nn.Conv2d(inputs, hidden, 1, bias=False), nn.BatchNorm2d(hidden), nn.ReLU6()]
        parts += [
            nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, bias=False),
            nn.BatchNorm2d(hidden),
            nn.ReLU6(),
            nn.Conv2d(hidden, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        ]
        self.body = nn.Sequential(*parts)
        self.is_residual = stride == 1 and inputs == outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x) if self.is_residual else self.body(x)


def make_mobilenet() -> nn.Module:
    """MobileNetV2 for CIFAR: the stem and the first two groups have stride 1."""
    groups = [(1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2)]
    blocks, inputs = [], 32
    for expansion, outputs, number, stride in [*groups, (6, 320, 1, 1)]:
        for place in range(number):
            blocks.append(Inverted(inputs, outputs, stride if place == 0 else 1, expansion))
            inputs = outputs
    stem = nn.Sequential(nn.Conv2d(3, 32, 3, 1, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU6())
    last = nn.Sequential(nn.Conv2d(320, 1280, 1, bias=False), nn.BatchNorm2d(1280), nn.ReLU6())
    return Classifier(
        [
            nn.Sequential(stem, *blocks[:3]),
            nn.Sequential(*blocks[3:6]),
            nn.Sequential(*blocks[6:10]),
            nn.Sequential(*blocks[10:], last, make_head(1280)),
        ]
    )


class ConvNeXtBlock(nn.Module):
    """A depthwise convolution of 7 x 7, and two dense layers (Liu et al. 2022)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.dense = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.scale = nn.Parameter(torch.full((width,), 1e-6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.dense(self.norm(self.depthwise(x).permute(0, 2, 3, 1)))
        return x + (self.scale * y).permute(0, 3, 1, 2)


def make_convnext() -> nn.Module:
    """Eight of its blocks, 96 and 192 wide."""
    return Classifier(
        [
            nn.Sequential(nn.Conv2d(3, 96, 2, 2), ConvNeXtBlock(96), ConvNeXtBlock(96)),
            nn.Sequential(ConvNeXtBlock(96), ConvNeXtBlock(96)),
            nn.Sequential(nn.Conv2d(96, 192, 2, 2), ConvNeXtBlock(192), ConvNeXtBlock(192)),
            nn.Sequential(ConvNeXtBlock(192), ConvNeXtBlock(192), make_head(192)),
        ]
    )


def make_mnist_cnn() -> nn.Module:
    """The four blocks of tutorial/poptorch."""
    return Classifier(
        [
            nn.Sequential(nn.Conv2d(1, 10, 5), nn.MaxPool2d(2), nn.ReLU()),
            nn.Sequential(nn.Conv2d(10, 20, 5), nn.MaxPool2d(2), nn.ReLU()),
            nn.Sequential(nn.Flatten(), nn.Linear(320, 256), nn.ReLU()),
            nn.Linear(256, NUM_CLASSES),
        ]
    )


class LstmPart(nn.Module):
    """A layer, of which only the outputs go on."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(inputs, LSTM_WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.lstm(x)[0]
        return found


class LastStep(nn.Module):
    """What the last step gave, as classes."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(LSTM_WIDTH, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.dense(x[:, -1])
        return found


def make_lstm() -> nn.Module:
    """Three layers, and a dense one."""
    return Classifier([LstmPart(NUM_FEATURES), LstmPart(LSTM_WIDTH), LstmPart(LSTM_WIDTH), LastStep()])


class OnlyLoss(nn.Module):
    """A model of transformers, which returns the loss, or logits without labels."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        found: torch.Tensor = self.model(tokens, labels=labels, return_dict=False)[0]
        return found


def make_bert(num_layers: int = 2) -> nn.Module:
    """Layers of BERT-base, and its head for masked tokens."""
    import transformers

    config = transformers.BertConfig(
        num_hidden_layers=num_layers, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    return OnlyLoss(transformers.BertForMaskedLM(config))


def make_gpt2() -> nn.Module:
    """Two layers of GPT-2 small, and its head."""
    import transformers

    config = transformers.GPT2Config(n_layer=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    return OnlyLoss(transformers.GPT2LMHeadModel(config))


def _draw_images(*shape: int) -> Callable[[torch.Generator, int], tuple[torch.Tensor, torch.Tensor]]:
    def draw(generator: torch.Generator, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        labels = torch.randint(0, NUM_CLASSES, (number,), generator=generator)
        return torch.randn(number, *shape, generator=generator), labels

    return draw


def _draw_tokens(generator: torch.Generator, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, NUM_TOKENS, (number, LENGTH), generator=generator)
    return tokens, tokens


@dataclass(frozen=True)
class Case:
    """A model, and how it is trained.

    Attributes:
      name: for tables.
      make: makes the module: (inputs, labels) -> loss, (inputs) -> what it finds.
      draw: draws so many inputs with labels.
      begins: the names of the modules at which the second to the last stage begin.
      batch_size: inputs in a micro-batch.
      gradient_accumulation: micro-batches per weight update, and per call.
      is_convolutional: whether convolutions dominate.
    """

    name: str
    make: Callable[[], nn.Module]
    draw: Callable[[torch.Generator, int], tuple[torch.Tensor, torch.Tensor]]
    begins: tuple[str, ...] = ("parts.1", "parts.2", "parts.3")
    batch_size: int = 8
    gradient_accumulation: int = 4
    is_convolutional: bool = False

    def make_model(self) -> nn.Module:
        """The model, with the same weights in every process."""
        torch.manual_seed(0)
        return self.make()

    def make_data(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What a call takes."""
        generator = torch.Generator().manual_seed(1)
        return self.draw(generator, self.batch_size * self.gradient_accumulation)


_CIFAR = _draw_images(3, 32, 32)
_BERT = ("model.bert.encoder.layer.0", "model.bert.encoder.layer.1", "model.cls")
_GPT2 = ("model.transformer.h.0", "model.transformer.h.1", "model.lm_head")
CASES = {
    "resnet18": Case("ResNet-18 for CIFAR, 8 x 4", make_resnet18, _CIFAR, is_convolutional=True),
    "mobilenet": Case("MobileNetV2 for CIFAR, 8 x 4", make_mobilenet, _CIFAR, is_convolutional=True),
    "convnext": Case("ConvNeXt, 8 blocks, 8 x 4", make_convnext, _CIFAR),
    "mnist_cnn": Case(
        "MNIST CNN, 40 x 10", make_mnist_cnn, _draw_images(1, 28, 28), batch_size=40, gradient_accumulation=10
    ),
    "bert": Case("BERT-base, 2 layers, 2 x 4", make_bert, _draw_tokens, _BERT, batch_size=2),
    "bert12": Case(
        "BERT-base, 12 layers, 2 x 4",
        functools.partial(make_bert, 12),
        _draw_tokens,
        tuple(f"model.bert.encoder.layer.{number}" for number in (3, 6, 9)),
        batch_size=2,
    ),
    "gpt2": Case("GPT-2 small, 2 layers, 2 x 4", make_gpt2, _draw_tokens, _GPT2, batch_size=2),
    "lstm": Case("LSTM, 3 x 256 wide, 64 steps, 8 x 4", make_lstm, _draw_images(NUM_STEPS, NUM_FEATURES)),
}

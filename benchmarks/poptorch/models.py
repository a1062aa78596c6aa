"""The models of this benchmark as torch modules, and what they are trained on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

__all__ = ["CASES", "NUM_HEADS", "RATE", "WEIGHT_DECAY", "Case", "make_data", "make_model"]

RATE, WEIGHT_DECAY = 1e-3, 0.01  # of AdamW; the second is torch's default
MNIST_CLASSES = 10
MLP_WIDTH = 512
NUM_TOKENS, LENGTH, WIDTH, NUM_HEADS = 64, 64, 128, 4  # of the transformer


@dataclass(frozen=True)
class Case:
    """What is trained.

    Attributes:
      name: for tables.
      make_stages: makes the stages, modules that are called one after another.
      make_inputs: draws so many inputs.
      label_shape: of what belongs to one input: classes.
      num_classes: how many there are.
      batch_size: inputs in a micro-batch.
      gradient_accumulation: micro-batches per weight update.
      device_iterations: weight updates per call.
    """

    name: str
    make_stages: Callable[[], list[nn.Module]]
    make_inputs: Callable[[np.random.Generator, int], Any]
    label_shape: tuple[int, ...]
    num_classes: int
    batch_size: int
    gradient_accumulation: int
    device_iterations: int

    @property
    def num_micro_batches(self) -> int:
        """Of a call."""
        return self.gradient_accumulation * self.device_iterations


class Classifier(nn.Module):
    """Stages one after another, and the cross entropy of what the last one gives."""

    def __init__(self, stages: list[nn.Module]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for stage in self.stages:
            x = stage(x)
        return x, nn.functional.cross_entropy(x.flatten(0, -2), labels.flatten())


def make_mnist_stages() -> list[nn.Module]:
    """The four blocks of tutorial/poptorch."""
    return [
        nn.Sequential(nn.Conv2d(1, 10, 5), nn.MaxPool2d(2), nn.ReLU()),
        nn.Sequential(nn.Conv2d(10, 20, 5), nn.MaxPool2d(2), nn.ReLU()),
        nn.Sequential(nn.Flatten(), nn.Linear(320, 256), nn.ReLU()),
        nn.Sequential(nn.Linear(256, MNIST_CLASSES)),
    ]


def make_mlp_stages() -> list[nn.Module]:
    """Two dense layers a stage."""

    def dense() -> list[nn.Module]:
        return [nn.Linear(MLP_WIDTH, MLP_WIDTH), nn.ReLU()]

    return [nn.Sequential(*dense(), *dense()) for _stage in range(4)]


class Embed(nn.Module):
    """Tokens and their places as vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(NUM_TOKENS, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.tokens(tokens) + self.places


def make_transformer_stages() -> list[nn.Module]:
    """One of torch's encoder layers a stage."""

    def encoder() -> nn.Module:
        return nn.TransformerEncoderLayer(
            WIDTH, NUM_HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )

    return [
        nn.Sequential(Embed(), encoder()),
        nn.Sequential(encoder()),
        nn.Sequential(encoder()),
        nn.Sequential(encoder(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, NUM_TOKENS)),
    ]


def _draw_normal(*shape: int) -> Callable[[np.random.Generator, int], Any]:
    return lambda rng, number: rng.normal(size=(number, *shape)).astype(np.float32)


def _draw_tokens(rng: np.random.Generator, number: int) -> Any:
    return rng.integers(0, NUM_TOKENS, (number, LENGTH))


CASES = {
    "mnist_cnn": Case(
        "MNIST CNN, 40 x 10 x 10", make_mnist_stages, _draw_normal(1, 28, 28), (), MNIST_CLASSES, 40, 10, 10
    ),
    "mlp": Case(
        "MLP 512 wide, 8 layers, 64 x 16 x 2",
        make_mlp_stages,
        _draw_normal(MLP_WIDTH),
        (),
        MLP_WIDTH,
        64,
        16,
        2,
    ),
    "transformer": Case(
        "transformer, 4 layers, 4 x 8 x 2",
        make_transformer_stages,
        _draw_tokens,
        (LENGTH,),
        NUM_TOKENS,
        4,
        8,
        2,
    ),
}


def make_model(case: Case) -> Classifier:
    """The model, with the same weights in every process."""
    torch.manual_seed(0)
    return Classifier(case.make_stages())


def make_data(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """The inputs and labels of a call, one micro-batch after another."""
    rng = np.random.default_rng(0)
    number = case.num_micro_batches * case.batch_size
    labels = rng.integers(0, case.num_classes, (number, *case.label_shape))
    return torch.from_numpy(case.make_inputs(rng, number)), torch.from_numpy(labels)

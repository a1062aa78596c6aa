"""The model that tells clothes apart, what it takes, and its weights in a file."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

import torch

from ipu_pipeline import datasets

MEAN, DEVIATION = 0.5, 0.5  # what pixels from 0 to 1 are normalized by: from -1 to 1


class ClassificationModel(torch.nn.Module):
    """Two convolutional and two linear layers, with the loss in training."""

    def __init__(self, classes: Sequence[str] = datasets.CLOTHES) -> None:
        super().__init__()
        self.classes = tuple(classes)
        self.conv1 = torch.nn.Conv2d(1, 5, 3)
        self.pool = torch.nn.MaxPool2d(2, 2)
        self.conv2 = torch.nn.Conv2d(5, 12, 5)
        self.norm = torch.nn.GroupNorm(3, 12)
        self.fc1 = torch.nn.Linear(972, 100)
        self.relu = torch.nn.ReLU()
        self.fc2 = torch.nn.Linear(100, 10)
        self.log_softmax = torch.nn.LogSoftmax(dim=1)
        self.loss = torch.nn.NLLLoss()

    def forward(
        self, x: torch.Tensor, labels: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Images [batch, 1, 28, 28] to log-probabilities [batch, 10], in training also the loss."""
        x = self.pool(self.relu(self.conv1(x)))
        x = self.norm(self.relu(self.conv2(x)))
        x = torch.flatten(x, start_dim=1)
        x = self.relu(self.fc1(x))
        x = self.log_softmax(self.fc2(x))
        if self.training:
            return x, self.loss(x, labels)
        return x

    def get_extra_state(self) -> list[str]:
        """What the state dict has beside the weights."""
        return list(self.classes)

    def set_extra_state(self, state: Sequence[str]) -> None:
        """Takes the classes of a state dict."""
        self.classes = tuple(state)


def normalize(images: object) -> torch.Tensor:
    """Grey images [images, 28, 28] from 0 to 1 as the model takes them."""
    return (torch.as_tensor(images).unsqueeze(1) - MEAN) / DEVIATION


def save_weights(model: ClassificationModel, path: Path) -> None:
    """Writes the model's state dict."""
    write_whole(path, lambda stream: torch.save(model.state_dict(), stream))


def load_weights(path: Path) -> ClassificationModel:
    """The model with the weights of a file that `save_weights` wrote.

    Raises:
      OSError: there is no such file, or it cannot be opened.
      ValueError: it is damaged, or has something else in it.
    """
    if not path.exists():
        raise FileNotFoundError(
            f"{path}: there are no weights. train.py writes them; --weights says where."
        )
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:  # the system does not let us read it
        raise
    except Exception as error:  # torch, zipfile and pickle each have kinds of their own
        raise ValueError(
            f"{path} has no weights that can be read: it is damaged, or no file of torch's."
        ) from error
    model = ClassificationModel()
    expected = model.state_dict()
    if not isinstance(state, dict) or state.keys() != expected.keys():
        raise ValueError(f"{path} has no weights of this model, which are {', '.join(expected)}.")
    for name, value in expected.items():
        if not _is_alike(state[name], value):
            raise ValueError(f"{path} has weights of another model: its {name} is not as it is here.")
    model.load_state_dict(state)
    return model


def _is_alike(found: object, expected: torch.Tensor | list[str]) -> bool:
    if isinstance(expected, torch.Tensor):
        return isinstance(found, torch.Tensor) and found.shape == expected.shape
    are_names = isinstance(found, list) and all(isinstance(name, str) for name in found)
    return are_names and len(found) == len(expected)


def check_target(path: Path) -> None:
    """Refuses what `write_whole` could not write, before there is something to write.

    Raises:
      OSError: it is no file, its folder is missing, or nothing can be written there.
    """
    if path.exists() and not path.is_file():
        raise FileExistsError(f"{path} is a folder or a device; give the path of a file.")
    folder = path.resolve().parent if path.is_symlink() else path.parent
    if not folder.is_dir():
        raise FileNotFoundError(f"{path}: there is no folder {folder}.")
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"{path}: nothing can be written into {folder}.")


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Writes a file that gets its name when it is complete, so that no half of one is ever there."""
    target = path.resolve()
    beside = target.with_name(f"{target.name}.{secrets.token_hex(4)}.part")
    try:
        with beside.open("xb") as stream:
            write(stream)
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)

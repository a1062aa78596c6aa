"""The two pictures: the confusion matrix, and an image before and after its preparation."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from classifier import check_target, write_whole
from PIL import Image

try:
    from matplotlib.figure import Figure
    from sklearn.metrics import ConfusionMatrixDisplay
except ModuleNotFoundError as error:
    sys.exit(
        f"Error: there is no module {error.name}. Run: pip install scikit-learn==1.9.1 matplotlib==3.11.2"
    )

FORMATS = (".png", ".jpg", ".jpeg", ".webp", ".svg", ".pdf")


def check_picture(path: Path) -> None:
    """Refuses where a picture could not be written, before there is one.

    Raises:
      ValueError: its name does not end in one of the formats.
      OSError: see `check_target`.
    """
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"{path}: the name of a picture must end in one of {', '.join(FORMATS)}.")
    check_target(path)


def save(figure: Figure, path: Path) -> None:
    """Writes a picture in the format that its name has."""
    kind = path.suffix.removeprefix(".").lower()
    write_whole(path, lambda stream: figure.savefig(stream, format=kind))


def draw_confusion_matrix(labels: np.ndarray, predictions: np.ndarray, classes: Sequence[str]) -> Figure:
    """How often images of each class, a row, are taken for each class, a column."""
    figure = Figure(figsize=(6.4, 6), dpi=80, layout="constrained")
    axes = figure.subplots()
    display = ConfusionMatrixDisplay.from_predictions(
        labels,
        predictions,
        labels=range(len(classes)),
        display_labels=classes,
        normalize="true",
        values_format=".0%",
        xticks_rotation=45,
        cmap="Blues",
        colorbar=False,
        ax=axes,
    )
    for text in display.text_.flat:
        text.set_fontsize(9)
    axes.set(xlabel="taken for", ylabel="is")
    for tick in axes.get_xticklabels():
        tick.set(horizontalalignment="right", rotation_mode="anchor")
    return figure


def draw_before_and_after(before: Image.Image, after: Image.Image, title: str) -> Figure:
    """The image as it is shown, and the 28 x 28 pixels that the model gets."""
    figure = Figure(figsize=(6, 3.4), dpi=80, layout="constrained")
    figure.suptitle(title)
    for axes, image, text in zip(figure.subplots(1, 2), (before, after), ("before", "after"), strict=True):
        axes.imshow(image, cmap="gray", vmin=0, vmax=255)
        axes.set(title=f"{text}: {image.width} x {image.height}", xticks=[], yticks=[])
    return figure

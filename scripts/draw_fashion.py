"""Makes the pictures of the walkthrough about Fashion-MNIST.

    python scripts/draw_fashion.py --data-dir FOLDER [--epochs N]

It draws two images that a reader can give to classify.py, trains train.py on Fashion-MNIST, which takes
minutes, and keeps its confusion matrix and what classify.py shows of one of the images. Look at them before
they are committed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image, ImageDraw

FOLDER = Path(__file__).resolve().parents[1] / "tutorial" / "poptorch" / "fashion_mnist"
PICTURES = FOLDER / "pictures"


def draw_trousers() -> Image.Image:
    """Blue trousers on a white sheet that is larger than they are, as a shop shows them."""
    image = Image.new("RGB", (480, 480), "white")
    draw = ImageDraw.Draw(image)
    legs = [(165, 30), (315, 30), (345, 450), (262, 450), (240, 170), (218, 450), (135, 450)]
    draw.polygon(legs, fill=(45, 70, 130), outline=(25, 40, 80), width=4)
    draw.line([(165, 58), (315, 58)], fill=(25, 40, 80), width=5)
    draw.line([(240, 58), (240, 165)], fill=(25, 40, 80), width=4)
    return image


def draw_seven() -> Image.Image:
    """A seven, in ink on grey paper."""
    image = Image.new("RGB", (400, 400), (225, 222, 215))
    draw = ImageDraw.Draw(image)
    draw.line([(95, 85), (290, 85), (170, 330)], fill=(30, 35, 60), width=42, joint="curve")
    draw.line([(150, 205), (285, 205)], fill=(30, 35, 60), width=34)
    return image


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data-dir", type=Path, required=True, help="Folder with Fashion-MNIST's idx files."
    )
    parser.add_argument("--epochs", type=int, default=5, help="Epochs to train for.")
    args = parser.parse_args()
    PICTURES.mkdir(exist_ok=True)
    draw_trousers().save(PICTURES / "trousers.png", optimize=True)
    draw_seven().save(PICTURES / "seven.jpg")
    with tempfile.TemporaryDirectory() as folder:
        weights = ["--weights", f"{folder}/classifier.pth"]
        matrix = ["--confusion-matrix", PICTURES / "confusion_matrix.png"]
        data = ["--dataset", "fashion", "--data-dir", args.data_dir, "--epochs", str(args.epochs)]
        subprocess.run([sys.executable, FOLDER / "train.py", *data, *weights, *matrix], check=True)
        image = [PICTURES / "trousers.png", "--picture", PICTURES / "classified.png"]
        subprocess.run([sys.executable, FOLDER / "classify.py", *image, *weights], check=True)


if __name__ == "__main__":
    main()

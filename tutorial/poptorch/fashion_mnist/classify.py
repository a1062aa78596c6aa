"""Says what an image shows, by the weights that train.py wrote: on the device, and in plain torch."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from classifier import load_weights, normalize
from pictures import check_picture, draw_before_and_after, save
from PIL import Image, ImageOps

import ipu_pipeline.poptorch as poptorch
from ipu_pipeline.tutorial_support import add_ipu_model_argument, exit_on_error, is_shown_on

SIZE = (28, 28)
LIGHT = 200  # of 255: above that a corner is background on which clothes are darker


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("image", type=Path, help="A picture of any size, in any format of pillow's.")
    parser.add_argument(
        "--weights", type=Path, default=Path("classifier.pth"), help="What train.py has written."
    )
    parser.add_argument(
        "--picture",
        type=Path,
        default=Path("classified.png"),
        help="Where the image before and after is written; its ending says the format.",
    )
    add_ipu_model_argument(parser)
    return parser.parse_args()


def read_image(path: Path) -> Image.Image:
    """The image as a viewer shows it: upright, on white where it is transparent; in mode L or RGB.

    Raises:
      OSError: the file cannot be opened.
      ValueError: it is damaged, or no image.
    """
    with path.open("rb") as stream:
        try:
            with Image.open(stream) as image:
                image.load()
                image = ImageOps.exif_transpose(image)
        except Image.UnidentifiedImageError:
            raise ValueError(f"{path} is no image that pillow can read.") from None
        except Exception as error:  # its readers raise errors of many kinds at damaged files
            raise ValueError(f"{path} is a damaged image, or too large a one: {error}.") from error
    if image.mode[0] in "IF":
        return _narrow(image)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("L" if image.mode in ("1", "L") else "RGB")


def _narrow(image: Image.Image) -> Image.Image:
    """A grey image of 16 or 32 bits, or of floats, in 8 bits."""
    values = np.nan_to_num(np.asarray(image, np.float64))
    tops = {"I": (255, 65535), "F": (1, 255, 65535)}.get(image.mode, (65535,))
    top = next((top for top in tops if values.max() <= top), values.max())
    return Image.fromarray(np.rint(np.clip(values / top, 0, 1) * 255).astype(np.uint8))


def prepare(image: Image.Image) -> Image.Image:
    """The image like those that the model has seen: 28 x 28, grey, light on dark."""
    image = image.resize(SIZE).convert("L")
    return ImageOps.invert(image) if image.getpixel((1, 1)) > LIGHT else image


def describe(output: torch.Tensor, classes: tuple[str, ...]) -> str:
    probability, label = output[0].exp().max(dim=0)
    return f"{classes[label]} ({probability:.1%})"


def main() -> None:
    args = parse_arguments()
    check_picture(args.picture)
    before = read_image(args.image)
    model = load_weights(args.weights)
    model.eval()
    after = prepare(before)
    images = normalize(np.asarray(after, np.float32)[np.newaxis] / 255)

    options = poptorch.Options().showCompilationProgressBar(is_shown_on(sys.stderr))
    if args.ipu_model:
        options.useIpuModel(True)
    on_device = describe(poptorch.inferenceModel(model, options)(images), model.classes)
    print(f"On the device: {on_device}")
    with torch.no_grad():
        print(f"In plain torch: {describe(model(images), model.classes)}")
    save(draw_before_and_after(before, after, on_device), args.picture)
    print(f"Before and after: {args.picture}")


if __name__ == "__main__":
    exit_on_error(main)

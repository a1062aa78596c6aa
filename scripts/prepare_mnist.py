"""Writes MNIST from its idx files as tensorflow-datasets keeps it, in array_record form.

    python scripts/prepare_mnist.py --idx-dir FOLDER --data-dir TARGET

It takes seconds, and neither TensorFlow nor a network. The tutorial's programs then train on TARGET as
their --data-dir, exactly as on FOLDER; a TARGET of ~/tensorflow_datasets they find by themselves.
"""

import argparse
import contextlib
import io
import sys
from pathlib import Path

from ipu_pipeline.data import mnist


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--idx-dir", type=Path, required=True, help="Folder with the four idx .gz files.")
    parser.add_argument(
        "--data-dir", type=Path, required=True, help=f"Folder in which {mnist.TFDS_DATASET} is to be made."
    )
    parser.add_argument(
        "--overwrite", action="store_true", help=f"Delete a {mnist.TFDS_DATASET} that is there."
    )
    args = parser.parse_args()
    try:
        with mnist.needing_the_extra():
            import tensorflow_datasets as tfds
        tfds.disable_progress_bar()
        splits = mnist.read_idx(args.idx_dir)
        # tfds announces a download, which there is not, on the standard output.
        with contextlib.redirect_stdout(io.StringIO()):
            path = mnist.write_tfds(splits, args.data_dir, args.overwrite)
    except FileExistsError as error:
        sys.exit(f"Error: {error} Give --overwrite to replace it.")
    except (ValueError, OSError) as error:
        sys.exit(f"Error: {error}")
    sizes = {split: len(labels) for split, (_images, labels) in splits.items()}
    print(f"Wrote {path}: {sizes['train']} images to train on, {sizes['test']} held out")


if __name__ == "__main__":
    main()

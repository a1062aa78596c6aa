"""A first model for PopTorch: it learns to tell clothes apart, and keeps its weights for classify.py."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import torch
from classifier import ClassificationModel, check_target, normalize, save_weights
from pictures import check_picture, draw_confusion_matrix, save
from sklearn.metrics import accuracy_score, recall_score
from tqdm import tqdm

import ipu_pipeline.poptorch as poptorch
from ipu_pipeline import datasets
from ipu_pipeline.tutorial_support import (
    add_fashion_arguments,
    add_ipu_model_argument,
    check_loss,
    exit_on_error,
    is_shown_on,
    positive_int,
)

MOMENTUM = 0.9


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add_fashion_arguments(parser)
    parser.add_argument(
        "--device-iterations", type=positive_int, default=1, help="Weight updates per call."
    )
    parser.add_argument(
        "--gradient-accumulation", type=positive_int, default=1, help="Micro-batches per weight update."
    )
    parser.add_argument(
        "--replicas", type=positive_int, default=1, help="Copies of the model, each on an IPU of its own."
    )
    parser.add_argument(
        "--test-batch-size", type=positive_int, default=32, help="Images per micro-batch in the test."
    )
    parser.add_argument(
        "--weights", type=Path, default=Path("classifier.pth"), help="Where the weights are written."
    )
    parser.add_argument(
        "--confusion-matrix",
        type=Path,
        default=Path("confusion_matrix.png"),
        help="Where the picture of the confusion matrix is written; its ending says the format.",
    )
    add_ipu_model_argument(parser)
    return parser.parse_args()


def make_dataset(images: object, labels: object) -> torch.utils.data.TensorDataset:
    return torch.utils.data.TensorDataset(normalize(images), torch.as_tensor(labels).long())


def make_options(args: argparse.Namespace) -> poptorch.Options:
    """What training and inference have in common."""
    options = poptorch.Options().randomSeed(args.seed)
    options.showCompilationProgressBar(is_shown_on(sys.stderr))
    if args.ipu_model:
        options.useIpuModel(True)
    return options


def make_training_options(args: argparse.Namespace, num_images: int) -> poptorch.Options:
    """How many images a call takes; there must be as many."""
    options = make_options(args)
    options.deviceIterations(args.device_iterations).replicationFactor(args.replicas)
    options.autoRoundNumIPUs(True)  # any number of replicas: IPUs that make it a power of two are idle
    options.Training.gradientAccumulation(args.gradient_accumulation)
    options.outputMode(poptorch.OutputMode.All)  # the losses of all micro-batches, not of the last alone
    wanted = args.device_iterations * args.replicas * args.gradient_accumulation * args.batch_size
    if wanted > num_images:
        raise ValueError(
            f"A call takes --device-iterations {args.device_iterations} x --gradient-accumulation "
            f"{args.gradient_accumulation} x --replicas {args.replicas} x --batch-size {args.batch_size} = "
            f"{wanted:,} images, more than the {num_images:,} there are to train on. Give a smaller one of "
            "the four."
        )
    return options


def train(model: poptorch.PoplarExecutor, loader: poptorch.DataLoader, epochs: int) -> None:
    """Trains; prints the mean loss of each epoch."""
    size = loader.combinedBatchSize
    model.compile(torch.zeros(size, 1, 28, 28), torch.zeros(size, dtype=torch.long))
    for epoch in range(1, epochs + 1):
        begin, sum_of_losses = time.perf_counter(), 0.0
        progress = tqdm(loader, desc=f"Epoch {epoch}", unit="call", disable=not is_shown_on(sys.stderr))
        for number, (images, labels) in enumerate(progress, 1):
            _output, losses = model(images, labels)
            check_loss(f"call {number} of epoch {epoch}", losses)
            sum_of_losses += float(losses.mean())
            progress.set_postfix(loss=f"{sum_of_losses / number:.3f}", refresh=False)
        rate = len(loader) / (time.perf_counter() - begin)
        print(
            f"Epoch {epoch}: mean loss {sum_of_losses / len(loader):.3f}; "
            f"{rate:.1f} calls/s, {rate * size:,.0f} images/s",
            flush=True,
        )


def classify_all(model: poptorch.PoplarExecutor, loader: poptorch.DataLoader) -> np.ndarray:
    """The most probable class of each image."""
    found = []
    for images, _labels in tqdm(loader, desc="Test", unit="call", disable=not is_shown_on(sys.stderr)):
        # All calls take equally many images: the last is filled up, and what comes of that is dropped.
        missing = loader.combinedBatchSize - len(images)
        filled = torch.cat([images, images[:1].expand(missing, -1, -1, -1)])
        found.append(model(filled)[: len(images)].argmax(dim=1))
    return torch.cat(found).numpy()


def report(labels: np.ndarray, predictions: np.ndarray, classes: tuple[str, ...]) -> None:
    """Prints how many images are recognized, and of which classes most and least."""
    num_right = int(accuracy_score(labels, predictions, normalize=False))
    print(f"Test accuracy: {num_right / len(labels):.2%} ({num_right} of {len(labels)} images)")
    there = np.unique(labels)
    recognized = recall_score(labels, predictions, labels=there, average=None)
    for what, place in ("most", recognized.argmax()), ("least", recognized.argmin()):
        print(f"Recognized {what}: {classes[there[place]]}, {recognized[place]:.1%}")


def main() -> None:
    args = parse_arguments()
    check_target(args.weights)
    check_picture(args.confusion_matrix)
    torch.set_num_threads(1)  # it does little here, and would take the cores from the devices
    data, data_line = datasets.load_fashion(args.dataset, args.data_dir)
    print(data_line)

    options = make_training_options(args, len(data.train_images))
    training_loader = poptorch.DataLoader(
        options,
        make_dataset(data.train_images, data.train_labels),
        batch_size=args.batch_size,
        shuffle=True,
    )
    model = ClassificationModel(data.classes)
    model.train()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=args.learning_rate, momentum=MOMENTUM)
    training_model = poptorch.trainingModel(model, options, optimizer)
    train(training_model, training_loader, args.epochs)
    training_model.detachFromDevice()
    save_weights(model, args.weights)
    print(f"Weights: {args.weights}")

    model.eval()
    options = make_options(args)
    inference_model = poptorch.inferenceModel(model, options)
    test_loader = poptorch.DataLoader(
        options,
        make_dataset(data.test_images, data.test_labels),
        batch_size=args.test_batch_size,
        drop_last=False,
    )
    predictions = classify_all(inference_model, test_loader)
    report(data.test_labels, predictions, data.classes)
    save(draw_confusion_matrix(data.test_labels, predictions, data.classes), args.confusion_matrix)
    print(f"Confusion matrix: {args.confusion_matrix}")
    print("Program ran successfully")


if __name__ == "__main__":
    exit_on_error(main)

"""A small convolutional network on Fashion-MNIST, written for PopTorch: on an IPU."""

import argparse
import sys

import numpy as np
import torch
from torch.utils.data import TensorDataset
from tqdm import tqdm

import ipu_pipeline.poptorch as poptorch
from ipu_pipeline import datasets
from ipu_pipeline.tutorial_support import add_fashion_arguments, check_loss, exit_on_error, is_shown_on

MOMENTUM = 0.9
TEST_BATCH_SIZE = 40  # divides Fashion-MNIST's 10,000 test images, and the 360 of the digits


class ClassificationModel(torch.nn.Module):
    """Two convolutional and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = torch.nn.Conv2d(1, 5, 3)
        self.pool = torch.nn.MaxPool2d(2, 2)
        self.conv2 = torch.nn.Conv2d(5, 12, 5)
        self.norm = torch.nn.GroupNorm(3, 12)
        self.fc1 = torch.nn.Linear(972, 100)
        self.relu = torch.nn.ReLU()
        self.fc2 = torch.nn.Linear(100, 10)
        self.log_softmax = torch.nn.LogSoftmax(dim=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images [batch, 1, 28, 28] to log-probabilities [batch, 10]."""
        x = self.pool(self.relu(self.conv1(x)))
        x = self.norm(self.relu(self.conv2(x)))
        x = torch.flatten(x, start_dim=1)
        x = self.relu(self.fc1(x))
        return self.log_softmax(self.fc2(x))


class ModelWithLoss(torch.nn.Module):
    """A model and its loss: what trains on the IPU computes both."""

    def __init__(self, model: torch.nn.Module, criterion: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        self.criterion = criterion

    def forward(
        self, x: torch.Tensor, labels: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """The output, with labels also the loss."""
        output = self.model(x)
        if labels is None:
            return output
        return output, self.criterion(output, labels)


def make_dataset(images: np.ndarray, labels: np.ndarray, batch_size: int) -> TensorDataset:
    if len(images) < batch_size:
        raise ValueError(f"There are {len(images)} images, fewer than the {batch_size} of a batch.")
    pixels = torch.as_tensor(images).unsqueeze(1)
    return TensorDataset((pixels - 0.5) / 0.5, torch.as_tensor(labels).long())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_fashion_arguments(parser)
    args = parser.parse_args()
    data, data_line = datasets.load_fashion(args.dataset, args.data_dir)
    print(data_line)
    training_set = make_dataset(data.train_images, data.train_labels, args.batch_size)
    test_set = make_dataset(data.test_images, data.test_labels, TEST_BATCH_SIZE)

    options = poptorch.Options()
    options.randomSeed(args.seed)

    training_loader = poptorch.DataLoader(
        options,
        training_set,
        batch_size=args.batch_size,
        shuffle=True,
        drop_last=True,
    )
    model = ClassificationModel()
    criterion = torch.nn.NLLLoss()
    model = ModelWithLoss(model, criterion)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=args.learning_rate, momentum=MOMENTUM)

    model.train()
    training_model = poptorch.trainingModel(model, options, optimizer)
    for epoch in range(1, args.epochs + 1):
        sum_of_losses = 0.0
        progress = tqdm(training_loader, desc=f"Epoch {epoch}", disable=not is_shown_on(sys.stderr))
        for number, (images, labels) in enumerate(progress, 1):
            output, loss = training_model(images, labels)
            sum_of_losses += loss.item()
            progress.set_postfix(loss=f"{sum_of_losses / number:.3f}", refresh=False)
        mean_loss = sum_of_losses / len(training_loader)
        check_loss(f"epoch {epoch}", mean_loss)
        print(f"Epoch {epoch}: mean loss {mean_loss:.4f}", flush=True)

    model.eval()
    inference_model = poptorch.inferenceModel(model, options)
    test_loader = poptorch.DataLoader(options, test_set, batch_size=TEST_BATCH_SIZE, drop_last=True)
    num_right = num_images = 0
    with torch.no_grad():
        for images, labels in test_loader:
            output = inference_model(images)
            num_right += int((output.argmax(dim=1) == labels).sum())
            num_images += len(labels)
    print(f"Test accuracy: {num_right / num_images:.2%} ({num_right} of {num_images} images)")


if __name__ == "__main__":
    exit_on_error(main)

"""A convolutional network on handwritten digits, written for PopTorch: four blocks on four IPUs."""

import argparse
import sys
import time

import torch
from tqdm import tqdm

import ipu_pipeline.poptorch as poptorch
from ipu_pipeline import datasets
from ipu_pipeline.tutorial_support import (
    add_ipu_model_argument,
    check_loss,
    exit_on_error,
    is_shown_on,
    positive_float,
    positive_int,
    seed,
)

GRADIENT_ACCUMULATION = 10  # micro-batches per weight update
DEVICE_ITERATIONS = 10  # weight updates per call
TEST_DEVICE_ITERATIONS = 100  # micro-batches per call
MEAN, DEVIATION = 0.1307, 0.3081  # of MNIST's pixels
STRATEGIES = {"pipelined": poptorch.PipelinedExecution, "sharded": poptorch.ShardedExecution}


class ConvLayer(torch.nn.Module):
    """A convolution, then the largest value of each square of pixels, then ReLU."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, pool_size: int) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(in_channels, out_channels, kernel_size)
        self.pool = torch.nn.MaxPool2d(pool_size)
        self.relu = torch.nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images to smaller images with more channels."""
        return self.relu(self.pool(self.conv(x)))


class Network(torch.nn.Module):
    """The model in four blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1 = ConvLayer(1, 10, kernel_size=5, pool_size=2)
        self.layer2 = ConvLayer(10, 20, kernel_size=5, pool_size=2)
        self.layer3 = torch.nn.Linear(320, 256)
        self.layer3_act = torch.nn.ReLU()
        self.layer4 = torch.nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images [batch, 1, 28, 28] to a score for each digit [batch, 10]."""
        with poptorch.Block("B1"):
            x = self.layer1(x)
        with poptorch.Block("B2"):
            x = self.layer2(x)
        with poptorch.Block("B3"):
            x = self.layer3_act(self.layer3(torch.flatten(x, start_dim=1)))
        with poptorch.Block("B4"):
            return self.layer4(x)


class NetworkWithLoss(torch.nn.Module):
    """The model and its loss: what trains on the IPUs computes both."""

    def __init__(self) -> None:
        super().__init__()
        self.network = Network()
        self.loss = torch.nn.CrossEntropyLoss()

    def forward(
        self, images: torch.Tensor, labels: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """The scores, with labels also the loss."""
        output = self.network(images)
        if labels is None:
            return output
        with poptorch.Block("B4"):
            return output, self.loss(output, labels)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--batch-size", type=positive_int, default=40, help="Images per micro-batch in training."
    )
    parser.add_argument(
        "--device-iterations",
        type=positive_int,
        help=f"Weight updates per call, by default {DEVICE_ITERATIONS}, or what there are images for.",
    )
    parser.add_argument(
        "--test-batch-size", type=positive_int, default=8, help="Images per micro-batch in the test."
    )
    parser.add_argument("--epochs", type=positive_int, default=3, help="Epochs to train for.")
    parser.add_argument("--learning-rate", type=positive_float, default=0.001, help="The learning rate.")
    parser.add_argument("--profile", action="store_true", help="Write profiles of the first calls.")
    parser.add_argument("--profile-dir", default="./profile", help="Where --profile writes.")
    parser.add_argument(
        "--strategy",
        choices=list(STRATEGIES),
        default="pipelined",
        help="Whether IPUs work at the same time, on different micro-batches.",
    )
    parser.add_argument("--debug", action="store_true", help="Log which operations each IPU has.")
    parser.add_argument(
        "--offload-optimiser",
        action="store_true",
        help="Keep the optimizer's state in the host's memory between weight updates.",
    )
    parser.add_argument(
        "--dataset",
        choices=["auto", "mnist", "digits"],
        default="auto",
        help="auto: MNIST if there is one, else the 8x8 digits that come with the library.",
    )
    parser.add_argument(
        "--data-dir",
        help="The folder with MNIST's four idx .gz files; by default that of the environment variable "
        f"{datasets.DATA_DIR_VARIABLE}.",
    )
    parser.add_argument(
        "--seed", type=seed, default=0, help="Of the initial weights and the order of the images."
    )
    add_ipu_model_argument(parser)
    return parser.parse_args()


def make_dataset(images: object, labels: object) -> torch.utils.data.TensorDataset:
    """Images with a channel, normalized, and labels as torch's losses want them."""
    pixels = torch.as_tensor(images).unsqueeze(1)
    return torch.utils.data.TensorDataset((pixels - MEAN) / DEVIATION, torch.as_tensor(labels).long())


def find_device_iterations(args: argparse.Namespace, num_images: int) -> int:
    """How many weight updates a call has; there must be images for a call."""
    per_update = args.batch_size * GRADIENT_ACCUMULATION
    wanted = args.device_iterations or max(min(DEVICE_ITERATIONS, num_images // per_update), 1)
    if wanted * per_update > num_images:
        raise ValueError(
            f"A call takes --device-iterations {wanted} x {GRADIENT_ACCUMULATION} micro-batches x "
            f"--batch-size {args.batch_size} = {wanted * per_update:,} images, more than the "
            f"{num_images:,} there are to train on. Give a smaller one of the two."
        )
    return wanted


def make_training_options(args: argparse.Namespace, device_iterations: int) -> poptorch.Options:
    options = poptorch.Options()
    options.randomSeed(args.seed)
    options.deviceIterations(device_iterations)
    options.Training.gradientAccumulation(GRADIENT_ACCUMULATION)
    options.outputMode(poptorch.OutputMode.All)  # the outputs of all micro-batches, not of the last alone
    options.setExecutionStrategy(
        STRATEGIES[args.strategy](
            poptorch.Stage("B1").ipu(0),
            poptorch.Stage("B2").ipu(1),
            poptorch.Stage("B3").ipu(2),
            poptorch.Stage("B4").ipu(3),
        )
    )
    options.showCompilationProgressBar(is_shown_on(sys.stderr))
    if args.ipu_model:
        options.useIpuModel(True)
    if args.offload_optimiser:
        options.TensorLocations.setOptimizerLocation(
            poptorch.TensorLocationSettings().useOnChipStorage(False)
        )
    if args.profile:
        options.enableProfiling(args.profile_dir)
    return options


def make_inference_options(training_options: poptorch.Options) -> poptorch.Options:
    options = training_options.clone()
    options.Training.gradientAccumulation(1)
    options.deviceIterations(TEST_DEVICE_ITERATIONS)
    return options


def make_training_loader(
    args: argparse.Namespace, options: poptorch.Options, data: datasets.ImageData
) -> poptorch.DataLoader:
    return poptorch.DataLoader(
        options,
        make_dataset(data.train_images, data.train_labels),
        batch_size=args.batch_size,
        shuffle=True,
        num_workers=2,
        mode=poptorch.DataLoaderMode.Async,
    )


def make_test_loader(
    args: argparse.Namespace, options: poptorch.Options, data: datasets.ImageData
) -> poptorch.DataLoader:
    return poptorch.DataLoader(
        options,
        make_dataset(data.test_images, data.test_labels),
        batch_size=args.test_batch_size,
        drop_last=False,
    )


def count_right(output: torch.Tensor, labels: torch.Tensor) -> int:
    return int((output.argmax(dim=1) == labels).sum())


def train(model: poptorch.PoplarExecutor, loader: poptorch.DataLoader, epochs: int) -> None:
    """Trains; prints the loss and the accuracy of the last call of each epoch."""
    size = loader.combinedBatchSize
    model.compile(torch.zeros(size, 1, 28, 28), torch.zeros(size, dtype=torch.long))
    for epoch in range(1, epochs + 1):
        begin = time.perf_counter()
        progress = tqdm(loader, desc=f"Epoch {epoch}", unit="call", disable=not is_shown_on(sys.stderr))
        for number, (images, labels) in enumerate(progress, 1):
            output, losses = model(images, labels)
            # Here, not after the loop: the loader's tensors are valid until it is asked for the next ones.
            check_loss(f"call {number} of epoch {epoch}", losses)
            loss, accuracy = float(losses.mean()), count_right(output, labels) / size
            progress.set_postfix(loss=f"{loss:.3f}", accuracy=f"{accuracy:.2%}")
        rate = len(loader) / (time.perf_counter() - begin)
        print(
            f"Epoch {epoch}: loss {loss:.3f}, accuracy {accuracy:.2%} at its end; "
            f"{rate:.1f} calls/s, {rate * size:,.0f} images/s",
            flush=True,
        )


def test(model: poptorch.PoplarExecutor, loader: poptorch.DataLoader) -> None:
    """Prints the accuracy on the held-out images."""
    num_right = num_images = 0
    for images, labels in tqdm(loader, desc="Test", unit="call", disable=not is_shown_on(sys.stderr)):
        # All calls take equally many images: the last is filled up, and what comes of that is dropped.
        missing = loader.combinedBatchSize - len(images)
        filled = torch.cat([images, images[:1].expand(missing, -1, -1, -1)])
        num_right += count_right(model(filled)[: len(images)], labels)
        num_images += len(images)
    print(f"Test accuracy: {num_right / num_images:.2%} ({num_right} of {num_images} images)")


def main() -> None:
    args = parse_arguments()
    if args.debug:
        poptorch.setLogLevel("DEBUG")
    torch.set_num_threads(1)  # it does little here, and would take the cores from the devices
    data, data_line = datasets.load(args.dataset, args.data_dir)
    print(data_line)

    device_iterations = find_device_iterations(args, len(data.train_images))
    options = make_training_options(args, device_iterations)
    inference_options = make_inference_options(options)
    training_loader = make_training_loader(args, options, data)
    test_loader = make_test_loader(args, inference_options, data)
    print(
        f"Calls per epoch: {len(training_loader)}; weight updates per call: {device_iterations}; "
        f"micro-batches per weight update: {GRADIENT_ACCUMULATION}, each of {args.batch_size} images"
    )

    model = NetworkWithLoss()
    model.train()
    optimizer = poptorch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    training_model = poptorch.trainingModel(model, options, optimizer)
    try:
        train(training_model, training_loader, args.epochs)
    finally:
        training_loader.terminate()

    model.eval()
    inference_model = poptorch.inferenceModel(model, inference_options)
    test(inference_model, test_loader)
    print("Program ran successfully")


if __name__ == "__main__":
    exit_on_error(main)

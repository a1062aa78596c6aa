"""A small BERT of Hugging Face's transformers in four pipeline stages, which learns to answer questions.

A question is a kind of bracket, and the answer is what stands in brackets of that kind, with them; others
are about it. Nothing is downloaded: texts are drawn, and so are the weights at the start. It needs the
extra `torch` and transformers 5. docs/poptorch.md explains it.
"""

import argparse
import copy
import math
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # read by transformers when it is imported

import jax
import torch
import transformers

import ipu_pipeline.poptorch as poptorch

PADDING, FIRST, SEPARATOR = 0, 1, 2
KINDS = 3  # of brackets
QUESTIONS = 3  # the token that asks for kind 0; those of the other kinds follow
OPENING, CLOSING = QUESTIONS + KINDS, QUESTIONS + 2 * KINDS
WORDS, VOCABULARY = QUESTIONS + 3 * KINDS, 32
QUESTION_LENGTH = 3  # its first token, the question, a separator
SHORTEST, LONGEST = 11, 15  # texts, with their brackets
LENGTH = QUESTION_LENGTH + LONGEST
CHECKED_UPDATES = 20
TOLERANCES = {"float32": 1e-5, "float64": 1e-12}  # of a weight's 2-norm
STRATEGIES = {"pipelined": poptorch.PipelinedExecution, "sharded": poptorch.ShardedExecution}

Batch = dict[str, torch.Tensor]


class Questions(torch.utils.data.Dataset[Batch]):
    """Questions, texts and answers, each drawn from its number and the seed."""

    def __init__(self, count: int, seed: int) -> None:
        self.count = count
        self.seed = seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Batch:
        """One of them: ids, mask and types have the shape [LENGTH], the answer's ends none."""
        if not 0 <= index < self.count:
            raise IndexError(index)
        random = torch.Generator().manual_seed(self.seed * 1_000_003 + index)

        def draw(low: int, high: int) -> int:
            """A number from `low` to `high`."""
            return int(torch.randint(low, high + 1, (), generator=random))

        asked = draw(0, KINDS - 1)
        left = draw(SHORTEST, LONGEST) - 3 * KINDS  # words beside a pair of each kind with a word in it
        text: list[int] = []

        def add_words(count: int) -> None:
            text.extend(draw(WORDS, VOCABULARY - 1) for _word in range(count))

        start = end = 0
        for kind in torch.randperm(KINDS, generator=random).tolist():
            before, more = draw(0, min(2, left)), 0
            add_words(before)
            more = draw(0, min(2, left - before))
            left -= before + more
            if kind == asked:
                start = QUESTION_LENGTH + len(text)
                end = start + more + 2
            text.append(OPENING + kind)
            add_words(1 + more)
            text.append(CLOSING + kind)
        add_words(left)
        tokens = [FIRST, QUESTIONS + asked, SEPARATOR, *text]
        padding = LENGTH - len(tokens)
        return {
            "input_ids": torch.tensor(tokens + [PADDING] * padding),
            "attention_mask": torch.tensor([1] * len(tokens) + [0] * padding),
            "token_type_ids": torch.tensor([0] * QUESTION_LENGTH + [1] * len(text) + [0] * padding),
            "start_positions": torch.tensor(start),
            "end_positions": torch.tensor(end),
        }


class PipelinedBert(transformers.BertForQuestionAnswering):
    """BERT, with what IPUs do said by `begin_blocks`, and tuples as results."""

    def begin_blocks(self, layers_per_ipu: list[int]) -> None:
        """Begins a block at the first layer of each IPU but 0, which embeds tokens.

        What follows the layers is on the last IPU.
        """
        layers = self.bert.encoder.layer
        first = layers_per_ipu[0]
        for ipu, count in enumerate(layers_per_ipu[1:], 1):
            layers[first] = poptorch.BeginBlock(layers[first], user_id=f"layer {first}", ipu_id=ipu)
            first += count

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        token_type_ids: torch.Tensor,
        start_positions: torch.Tensor | None = None,
        end_positions: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """The scores of each position [batch, LENGTH] as start and end; before them the loss, if known."""
        output = super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            start_positions=start_positions,
            end_positions=end_positions,
        )
        if start_positions is None:
            return output.start_logits, output.end_logits
        # The mean of two losses: this says that it is the one to minimize.
        loss = poptorch.identity_loss(output.loss, reduction="none")
        return loss, output.start_logits, output.end_logits


def make_model(args: argparse.Namespace) -> PipelinedBert:
    torch.manual_seed(args.seed)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=args.width,
        num_hidden_layers=sum(args.layers_per_ipu),
        num_attention_heads=args.heads,
        intermediate_size=4 * args.width,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=args.dropout,
        attention_probs_dropout_prob=args.dropout,
        initializer_range=0.05,
        pad_token_id=PADDING,
        attn_implementation=args.attention,
        use_cache=False,
    )
    model = PipelinedBert(config).to(getattr(torch, args.dtype))
    if args.recompute:
        model.activation_checkpointing_enable()
    model.begin_blocks(args.layers_per_ipu)
    return model


def make_options(args: argparse.Namespace, trains: bool) -> poptorch.Options:
    options = poptorch.Options().showCompilationProgressBar(False).outputMode(poptorch.OutputMode.All)
    options.randomSeed(args.seed)
    options.setExecutionStrategy(STRATEGIES[args.strategy]())
    if trains:
        options.deviceIterations(args.device_iterations).replicationFactor(args.replicas)
        options.Training.gradientAccumulation(args.accumulation)
    else:
        options.deviceIterations(16)
    return options


def make_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """The parameters in two groups: matrices decay, biases and scales do not."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.01},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]


def share_of_rate(update: int, num_updates: int) -> float:
    """The learning rate, of the highest: up within a tenth of the updates, then down."""
    warmup = max(1, num_updates // 10)
    return min((update + 1) / warmup, (num_updates - update) / max(1, num_updates - warmup))


def forever(loader: poptorch.DataLoader) -> Iterator[Batch]:
    while True:
        yield from loader


class PlainTraining:
    """The same training in plain torch, to compare with."""

    def __init__(self, model: torch.nn.Module, args: argparse.Namespace) -> None:
        torch.set_num_threads(1)  # its threads and XLA's would fight for the cores
        self.model = copy.deepcopy(model)
        self.optimizer = torch.optim.AdamW(make_groups(self.model), lr=args.rate)
        self.num_updates = args.device_iterations
        self.num_micro_batches = args.accumulation * args.replicas
        self.trained: set[str] = set()  # parameters with gradients that are more than rounding

    def __call__(self, rate: float, batch: Batch) -> torch.Tensor:
        """Takes what a call of the wrapped model takes; returns the losses of its micro-batches."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        losses = []
        parts = {name: tensor.chunk(self.num_updates) for name, tensor in batch.items()}
        for update in range(self.num_updates):
            self.optimizer.zero_grad()
            pieces = {name: part[update].chunk(self.num_micro_batches) for name, part in parts.items()}
            for number in range(self.num_micro_batches):
                loss = self.model(**{name: piece[number] for name, piece in pieces.items()})[0]
                (loss / self.num_micro_batches).backward()
                losses.append(loss.detach())
            self._note_trained()
            self.optimizer.step()
        return torch.stack(losses)

    def _note_trained(self) -> None:
        gradients = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        norms = {name: float(gradient.norm()) for name, gradient in gradients.items()}
        self.trained |= {name for name, norm in norms.items() if norm > 1e-5 * max(norms.values())}

    def compare(self, model: torch.nn.Module, tolerance: float) -> float:
        """The greatest difference of a weight of another model, of its 2-norm.

        Left out are the biases that move all scores of a softmax alike, which takes that away. So their
        gradients are nothing but rounding; and Adam divides gradients by their size.

        Raises:
          ValueError: it is above the tolerance.
        """
        greatest = 0.0
        for name in sorted(self.trained):
            expected = self.model.get_parameter(name).detach()
            found = float((model.get_parameter(name).detach() - expected).norm() / expected.norm())
            greatest = max(greatest, found)
            if not found <= tolerance:
                raise ValueError(f"--check: {name} differs from plain torch's by {found:.1e} of its norm.")
        return greatest


def evaluate(model: PipelinedBert, args: argparse.Namespace) -> float:
    """The share of new questions that are answered exactly: with the start and the end."""
    model.eval()
    options = make_options(args, trains=False)
    inference = poptorch.inferenceModel(model, options)
    right = count = 0
    for batch in poptorch.DataLoader(options, Questions(512, args.seed + 1), batch_size=args.batch):
        wanted = [batch.pop(name) for name in ("start_positions", "end_positions")]
        starts, ends = (scores.argmax(-1) for scores in inference(**batch))
        right += int(((starts == wanted[0]) & (ends == wanted[1])).sum())
        count += len(starts)
    return right / count


def train(args: argparse.Namespace) -> float:
    """The program; returns the share of new questions that are answered exactly."""
    model = make_model(args)
    options = make_options(args, trains=True)
    loader = poptorch.DataLoader(
        options, Questions(args.questions, args.seed), batch_size=args.batch, shuffle=True
    )
    if not len(loader):
        raise ValueError(
            f"--questions: a call takes {loader.combinedBatchSize} of them; got {args.questions}."
        )
    plain = PlainTraining(model, args) if args.check else None
    optimizer = poptorch.optim.AdamW(make_groups(model), lr=args.rate)
    training = poptorch.trainingModel(model, options, optimizer)
    num_calls = math.ceil(args.updates / args.device_iterations)
    print(
        f"{model.num_parameters():,} parameters, {model.config.num_hidden_layers} layers on "
        f"{len(args.layers_per_ipu)} IPUs"
    )
    begin, losses = time.perf_counter(), []
    for call, batch in zip(range(num_calls), forever(loader), strict=False):
        rate = args.rate * share_of_rate(call, num_calls)
        for group in optimizer.param_groups:
            group["lr"] = rate
        training.setOptimizer(optimizer)
        found, _starts, _ends = training(**batch)
        losses.append(float(found.float().mean()))
        done = (call + 1) * args.device_iterations
        if not math.isfinite(losses[-1]):
            raise ValueError(f"The loss of update {done} is {losses[-1]}; try a lower --rate.")
        if plain is not None:
            expected = plain(rate, batch)
            difference = float((found - expected).norm() / expected.norm())
            if not difference <= TOLERANCES[args.dtype]:
                raise ValueError(f"--check: the losses of update {done} differ by {difference:.1e}.")
        if (call + 1) % args.print_every == 0 or call + 1 == num_calls:
            seconds = time.perf_counter() - begin
            print(f"Update {done}: loss {sum(losses) / len(losses):.4f}, {seconds:.1f} s", flush=True)
            losses = []
    if plain is not None:
        worst = plain.compare(model, TOLERANCES[args.dtype])
        print(
            f"As plain torch: the losses of {done} updates, and {len(plain.trained)} weights to {worst:.1e}"
        )
    share = evaluate(model, args)
    print(f"Exact match: {share:.1%}")
    return share


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1; got {number}")
    return number


def natural(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0; got {number}")
    return number


def share(text: str) -> float:
    number = float(text)
    if not 0 <= number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 0 and below 1; got {text}")
    return number


def positive_float(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a finite number above 0; got {text}")
    return number


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    model = parser.add_argument_group("the model")
    model.add_argument(
        "--layers-per-ipu",
        nargs="+",
        type=natural,
        default=[0, 2, 2, 2],
        help="IPU 0 has the embeddings as well, the last one the answers",
    )
    model.add_argument("--width", type=positive, default=32, help="of the activations")
    model.add_argument("--heads", type=positive, default=4, help="of the attention; they divide the width")
    model.add_argument("--dropout", type=share, default=0.0, help="share of activations that are dropped")
    model.add_argument("--attention", choices=["eager", "sdpa"], default="sdpa", help="how it is computed")
    model.add_argument(
        "--dtype", choices=["float32", "float64", "bfloat16"], default="float32", help="of all"
    )
    running = parser.add_argument_group("how it runs")
    running.add_argument(
        "--strategy",
        choices=list(STRATEGIES),
        default="pipelined",
        help="whether IPUs work at the same time, on different micro-batches",
    )
    running.add_argument("--recompute", action="store_true", help="keep of each layer its inputs only")
    running.add_argument(
        "--replicas", type=positive, default=1, help="copies of it, each on IPUs of its own"
    )
    training = parser.add_argument_group("training")
    training.add_argument("--updates", type=positive, default=240, help="of the weights, in all")
    training.add_argument("--batch", type=positive, default=8, help="questions in a micro-batch")
    training.add_argument("--accumulation", type=positive, default=8, help="micro-batches of an update")
    training.add_argument("--device-iterations", type=positive, default=4, help="updates of a call")
    training.add_argument("--questions", type=positive, default=8192, help="to train with")
    training.add_argument("--rate", type=positive_float, default=2e-3, help="the highest learning rate")
    training.add_argument("--seed", type=natural, default=0, help="of weights, questions and dropout")
    training.add_argument("--print-every", type=positive, default=10, metavar="CALLS", help="the loss")
    training.add_argument(
        "--check",
        action="store_true",
        help=f"train with plain torch as well, for {CHECKED_UPDATES} updates at most, and compare",
    )
    args = parser.parse_args(arguments)
    if 0 in args.layers_per_ipu[1:]:
        parser.error(f"argument --layers-per-ipu: only IPU 0 may have none; got {args.layers_per_ipu}")
    if not sum(args.layers_per_ipu):
        parser.error("argument --layers-per-ipu: there must be a layer")
    if args.width % args.heads:
        parser.error(f"argument --heads: must divide --width {args.width}; got {args.heads}")
    if args.check and args.dropout:
        parser.error("argument --check: torch drops others than IPUs do; leave --dropout out")
    if args.check and args.dtype not in TOLERANCES:
        parser.error(f"argument --check: --dtype must be one of {', '.join(TOLERANCES)}; got {args.dtype}")
    if args.check:
        args.updates = min(args.updates, CHECKED_UPDATES)
    return args


def main(arguments: list[str] | None = None) -> float:
    args = parse_arguments(arguments)
    if args.dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    transformers.logging.set_verbosity_error()
    return train(args)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError, poptorch.Error) as error:
        sys.exit(f"Error: {error}")
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        sys.exit(130)

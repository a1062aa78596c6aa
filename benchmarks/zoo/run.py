"""Small models of transformers, of as many types as their names suffice for: how many equal plain torch.

    python -m benchmarks.zoo.run [--types bert gpt2] [--results FILE] [--only equal] [--json FILE]

Each type is a process: a crash or an endless loop in it is one type's. A model is captured by
`torch.export`, wrapped by `poptorch.inferenceModel`, and trained by one step of SGD, each compared with
plain torch. What the library refuses without values of inputs gets them (`allowValueBranches`). Nothing is
downloaded.

`--results` keeps what was found of each type, and goes on where it was. `--only first` measures the
processor time of a first call against that of `torch.compile`, each in a process of its own.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import json
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.harness import Row

MODULE = "benchmarks.zoo.run"
QUESTION = "zoo"
TOLERANCE = 1e-4  # of an output or a weight, relative to its 2-norm
IN_FLOAT64 = 1e-10  # where float32 rounds too much, as batch normalization of few values does
OF_CHANGE = 0.1  # of the change of all weights, added to a weight's 2-norm: its gradient may be rounding
MOST_SECONDS = 120.0
LEARNING_RATE = 1.0
# What takes seconds to load, and is the same for all types.
PRELOADED = [
    "benchmarks.zoo.models",
    "ipu_pipeline.poptorch",
    "jax",
    "torch._dynamo",
    "torch._export.non_strict_utils",
    "torch.export._trace",
    "transformers.models.auto.modeling_auto",
]
SHORT_TYPES = ["bert", "gpt2", "t5", "vit", "resnet", "wav2vec2"]


def take_tensors(value: Any) -> Iterator[Any]:
    """The tensors in dicts, lists and tuples, in their order."""
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from take_tensors(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from take_tensors(part)


def compare_tensors(actual: Any, expected: Any) -> str:
    """Says "equal", or what is different."""
    import torch

    actual, expected = list(take_tensors(actual)), list(take_tensors(expected))
    if len(actual) != len(expected):
        return f"different: {len(actual)} tensors instead of {len(expected)}"
    worst = 0.0
    for number, (one, other) in enumerate(zip(actual, expected, strict=True)):
        if one.shape != other.shape:
            return f"different: output {number} is {tuple(one.shape)}, not {tuple(other.shape)}"
        one, other = one.detach().double(), other.detach().double()
        if not torch.equal(one.isfinite(), other.isfinite()):
            return f"different: output {number} is finite elsewhere"
        one, other = one.nan_to_num(0, 0, 0), other.nan_to_num(0, 0, 0)
        worst = max(worst, ((one - other).norm() / other.norm().clamp(min=1e-30)).item())
    return "equal" if worst <= TOLERANCE else f"different: by {worst:.1e}"


def make_loss(model: Any, names: Sequence[str]) -> Any:
    """A module that calls a model, and returns a loss of its first output of floating-point numbers."""
    import torch

    import ipu_pipeline.poptorch as poptorch

    class Loss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *args: torch.Tensor) -> torch.Tensor:
            outputs = take_tensors(self.model(**dict(zip(names, args, strict=True))))
            output = next(each for each in outputs if each.is_floating_point())
            # Of squares alone, what layer normalization returns would have no gradient.
            wanted = torch.linspace(-1.0, 1.0, output.numel()).reshape(output.shape)
            return poptorch.identity_loss((output - wanted).square().mean(), "none")

    return Loss().train()


def train_plain(loss: Any, args: Sequence[Any]) -> None:
    """A step of SGD by plain torch."""
    import torch

    optimizer = torch.optim.SGD(loss.parameters(), lr=LEARNING_RATE)
    loss(*args).backward()
    optimizer.step()


def compare_weights(actual: Any, expected: Any, before: Mapping[str, Any], tolerance: float) -> str:
    """Likewise, for the weights of models after a step."""
    change = (
        sum((w - before[n]).double().square().sum() for n, w in expected.named_parameters()).sqrt().item()
    )
    worst, own = 0.0, dict(actual.named_parameters())
    for name, weight in expected.named_parameters():
        allowed = weight.double().norm().item() + OF_CHANGE * change
        worst = max(worst, (own[name] - weight).double().norm().item() / max(allowed, 1e-30))
        if not worst <= tolerance:
            return f"different: {name} by {worst:.1e}, of a change of {change:.1e}"
    return "equal"


def describe(error: BaseException) -> str:
    """The first line of an error."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def attempt(tell: Callable[[str, str], None], name: str, run: Callable[[bool], str]) -> None:
    """Tells what a comparison found; with values of inputs, if it needs them."""
    try:
        tell(name, run(False))
        return
    except Exception as error:  # it is what we look for
        tell(name, describe(error))
        if "allowValueBranches" not in str(error):
            return
    try:
        tell(f"{name} with values", run(True))
    except Exception as error:
        tell(f"{name} with values", describe(error))


def check(kind: str, pipe: Connection) -> None:
    """Checks a type, and sends what is found as it is found."""
    import warnings

    import jax
    import torch

    import ipu_pipeline.poptorch as poptorch
    from benchmarks.zoo import models

    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)

    def tell(name: str, value: str) -> None:
        pipe.send((name, value))

    def make_options(allows: bool) -> poptorch.Options:
        return poptorch.Options().showCompilationProgressBar(False).allowValueBranches(allows)

    def infer(allows: bool) -> str:
        inference = poptorch.inferenceModel(copy.deepcopy(model), make_options(allows))
        return compare_tensors(inference(**inputs), wanted)

    def train_as(dtype: Any, allows: bool, tolerance: float) -> str:
        args = [value.to(dtype) if value.is_floating_point() else value for value in inputs.values()]
        start = copy.deepcopy(untouched).to(dtype)
        own, plain = (make_loss(copy.deepcopy(start), list(inputs)) for _side in range(2))
        train_plain(plain, args)
        optimizer = poptorch.optim.SGD(own.parameters(), lr=LEARNING_RATE)
        training = poptorch.trainingModel(own, make_options(allows), optimizer)
        training(*args)
        training.copyWeightsToHost()
        return compare_weights(own.model, plain.model, dict(start.named_parameters()), tolerance)

    def train(allows: bool) -> str:
        result = train_as(torch.float32, allows, TOLERANCE)
        if not result.startswith("different"):
            return result
        starts = [make_loss(copy.deepcopy(untouched), list(inputs)) for _seed in range(2)]
        for seed, start in enumerate(starts):
            torch.manual_seed(seed)
            train_plain(start, list(inputs.values()))
        first, second = (start.model for start in starts)
        if compare_weights(first, second, dict(untouched.named_parameters()), TOLERANCE) != "equal":
            tell("torch training", "random")
            return result
        jax.config.update("jax_enable_x64", True)
        result = train_as(torch.float64, allows, IN_FLOAT64)
        return "equal in float64" if result == "equal" else result

    try:
        model = models.make_model(kind)
        tell("built", str(sum(each.numel() for each in model.parameters())))
        untouched = copy.deepcopy(model)  # RWKV's weights change in inference
        inputs, wanted = models.find_inputs(model)
        torch.manual_seed(1)
        with torch.no_grad():
            again = compare_tensors(copy.deepcopy(model)(**inputs), wanted)
        if again != "equal":
            tell("not built", f"random in torch, {again}")
            return
        tell("torch", ", ".join(f"{name} {tuple(value.shape)}" for name, value in inputs.items()))
    except Exception as error:
        tell("not built", describe(error))
        return
    try:
        with torch.no_grad():
            torch.export.export(copy.deepcopy(model), (), inputs, strict=False)
        tell("export", "taken")
    except Exception as error:
        tell("export", describe(error))
    attempt(tell, "inference", infer)
    try:
        train_plain(make_loss(copy.deepcopy(untouched), list(inputs)), list(inputs.values()))
    except Exception as error:
        tell("torch training", describe(error))
    else:
        attempt(tell, "training", train)


def run_type(kind: str) -> dict[str, str]:
    """Checks a type in a process, which may crash."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=check, args=(kind, sender))
    process.start()
    sender.close()
    record: dict[str, str] = {}
    until = time.monotonic() + MOST_SECONDS
    with contextlib.suppress(EOFError):
        while receiver.poll(max(0.0, until - time.monotonic())):
            name, value = receiver.recv()
            record[name] = value
        record["crash"] = f"not done in {MOST_SECONDS:.0f} s"
        process.kill()
    process.join()
    if "crash" not in record and process.exitcode:
        code = process.exitcode
        record["crash"] = signal.Signals(-code).name if code < 0 else f"exit status {code}"
    return record


def run_types(kinds: Sequence[str], path: Path | None) -> dict[str, dict[str, str]]:
    """What is found of each type; those in the file are not run again."""
    record = json.loads(path.read_text()) if path is not None and path.exists() else {}
    for kind in kinds:
        if kind not in record:
            begin = time.monotonic()
            record[kind] = run_type(kind)
            print(
                f"{kind}: {verdict(record[kind])} ({time.monotonic() - begin:.0f} s)",
                file=sys.stderr,
                flush=True,
            )
            if path is not None:
                path.write_text(json.dumps(record, indent=1) + "\n")
    return {kind: record[kind] for kind in kinds}


def result_of(record: Mapping[str, str], name: str) -> str:
    """The result of a comparison, with values of inputs where it needs them."""
    return record.get(f"{name} with values", record.get(name, ""))


def verdict(record: Mapping[str, str]) -> str:
    """What there is to say of a type, in a line."""
    if "torch" not in record:
        return "not built" if "crash" not in record else f"crash: {record['crash']}"
    parts = [] if record.get("export") == "taken" else [f"torch.export: {record.get('export')}"]
    for name in ("inference", "training"):
        with_values = " with values" if f"{name} with values" in record else ""
        parts.append(
            f"{name}{with_values} {result_of(record, name) or record.get('torch training', 'not tried')}"
        )
    return "; ".join(parts + [f"crash: {record[name]}" for name in ("crash",) if name in record])


def make_rows(results: Mapping[str, Mapping[str, str]]) -> list[Row]:
    """The numbers of types; prints which are not equal, by cause."""
    built = {kind: record for kind, record in results.items() if "torch" in record}
    taken = [kind for kind, record in built.items() if record.get("export") == "taken"]
    rows = []
    for name in ("inference", "training"):
        trainable = [kind for kind in built if name == "inference" or "torch training" not in built[kind]]
        equal = [kind for kind in trainable if result_of(built[kind], name).startswith("equal")]
        with_values = [kind for kind in equal if f"{name} with values" in built[kind]]
        causes: dict[str, list[str]] = collections.defaultdict(list)
        for kind in set(trainable) - set(equal):
            causes[result_of(built[kind], name) or built[kind].get("crash", "")].append(kind)
        for cause, kinds in sorted(causes.items(), key=lambda pair: -len(pair[1])):
            print(f"{name}: {len(kinds)} ({', '.join(sorted(kinds))}): {cause}")
        for text, among in (
            ("that run in torch", trainable),
            ("that torch.export takes", set(taken) & set(trainable)),
        ):
            number = len(set(equal) & set(among))
            num_with = len(set(with_values) & set(among))
            ours = f"{number} types, {num_with} with values of inputs"
            rows.append(
                Row(
                    QUESTION,
                    f"{name}: share of types {text}",
                    ours,
                    f"{len(among)} types",
                    number / len(among),
                )
            )
    number = len(taken)
    rows.append(
        Row(
            QUESTION,
            "torch.export: share of types that run",
            f"{number} types",
            f"{len(built)} types",
            number / len(built),
        )
    )
    return rows


def time_first(side: str, kind: str) -> dict[str, float]:
    """Processor seconds of the first call of a new process, with its compilers."""
    import torch

    import ipu_pipeline.poptorch as poptorch
    from benchmarks.zoo import models

    torch.set_num_threads(1)
    model = models.make_model(kind)
    inputs, _outputs = models.find_inputs(model)
    if side == "first-torch":
        import torch._inductor.compile_fx  # what imports take is not counted on either side

        run = torch.compile(model)
    else:
        import jax
        import torch.export._trace

        jax.devices()
        options: poptorch.Options = (
            poptorch.Options().showCompilationProgressBar(False).allowValueBranches(True)
        )
        run = poptorch.inferenceModel(model, options)

    def cpu() -> float:
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(each.ru_utime + each.ru_stime for each in used)

    begin = cpu()
    with torch.no_grad():
        run(**inputs)
    return {"seconds": cpu() - begin}


def measure_first(kind: str, num_rounds: int) -> Row:
    """Compares first calls, in turn, with no caches of torch's."""
    record: dict[str, list[float]] = {"first-ours": [], "first-torch": []}
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # in this process, or its time would not be counted
    for _ in range(num_rounds):
        for side, seconds in record.items():
            with tempfile.TemporaryDirectory() as folder:
                os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
                seconds.append(harness.run_module(MODULE, "--side", side, "--types", kind)["seconds"])
    case = f"{kind}: processor time of the first call, against torch.compile"
    return harness.compare(QUESTION, case, record["first-ours"], record["first-torch"])


def main() -> None:
    parser = harness.make_parser(__doc__)
    parser.add_argument("--types", nargs="+", help="Of transformers, as in AutoConfig.")
    parser.add_argument("--results", type=Path, help="Keep what is found of each type in this file.")
    parser.add_argument("--only", choices=["equal", "first"], help="Only one of the two parts.")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if args.side:
        print(json.dumps(time_first(args.side, args.types[0])))
        return
    from benchmarks.zoo import names

    rows: list[Row] = []
    if args.only != "first":
        kinds = args.types or (SHORT_TYPES if args.short else names.TYPES)
        rows += make_rows(run_types(kinds, args.results))
    if args.only != "equal":
        for kind in args.types or (names.FIRST_CALLS[:1] if args.short else names.FIRST_CALLS):
            rows.append(measure_first(kind, 1 if args.short else args.rounds))
            print(f"{kind}: {rows[-1].value:.2f}", file=sys.stderr, flush=True)
    harness.report(rows, args.json)


if __name__ == "__main__":
    main()

"""torch's operators by torch's own database of them, through the front's capture and lowerings.

The database is that of torch.testing: each operator with sample inputs. They are run in float32, values and
gradients, beside torch. Several operators are computed by one compiled program: most of the time goes to
compiling.
"""

import dataclasses
import functools
import itertools
import random
import tomllib
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ipu_pipeline.poptorch import dtypes
from ipu_pipeline.poptorch.errors import Error
from ipu_pipeline.poptorch.structures import flatten
from tests.support import lowered

PASSED, REFUSED, WRONG, CRASHED = "passed", "refused", "wrong", "crashed"
# Outcomes without a comparison: random streams differ from torch's; there are no values; torch refuses.
RANDOM, UNSET, ELSEWHERE = "random numbers", "memory that is not set", "torch refuses it on a CPU"

OUTCOMES = Path(__file__).parents[1] / "poptorch" / "lowering" / "operators.toml"

_REFUSALS = (Error, NotImplementedError)


@functools.cache
def operators():
    """The entries of the database that take float32, by their names."""
    # Not at the top: every process that runs tests would import a large part of torch and SciPy.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Hypothesis, which it imports where that is installed
        from torch.testing._internal.common_methods_invocations import op_db

    entries = [entry for entry in op_db if torch.float32 in entry.dtypes]
    names = [".".join(filter(None, (entry.name, entry.variant_test_name))) for entry in entries]
    return dict(zip(names, entries, strict=True))


@dataclasses.dataclass
class Outcome:
    """How an operator does."""

    kind: str  # one of the names above
    why: str = ""  # of a refusal the reason, of a difference where it is
    has_gradient: bool = False  # whether gradients were compared


def read_outcomes():
    """The outcomes that scripts/write_operator_outcomes.py wrote, by the operators' names."""
    return {
        name: Outcome(some["kind"], some["why"], some["gradient"])
        for some in tomllib.loads(OUTCOMES.read_text())["outcomes"]
        for name in some["operators"].split()
    }


class _Sources(TorchDispatchMode):
    """Notes whether operations draw random numbers, or leave memory as it is."""

    def __init__(self):
        super().__init__()
        self.kind = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.kind = RANDOM
        elif func.overloadpacket in _WITHOUT_VALUES and self.kind is None:
            self.kind = UNSET
        return func(*args, **(kwargs or {}))


_WITHOUT_VALUES = {torch.ops.aten.empty_like, torch.ops.aten.new_empty, torch.ops.aten.empty_permuted}
_WITHOUT_VALUES |= {torch.ops.aten.empty, torch.ops.aten.empty_strided, torch.ops.aten.new_empty_strided}
_UNSET = {"empty", "empty_like", "new_empty", "empty_permuted", "empty_strided", "new_empty_strided"}


def _processed(entry, sample, *args, **kwargs):
    """The operator with inputs and results as the database has them for comparisons of gradients.

    Matrices that are to be Hermitian or triangular are made so; of results what is arbitrary is left out,
    as the signs of eigenvectors.
    """
    return sample.output_process_fn_grad(entry.gradcheck_wrapper(entry.op, *args, **kwargs))


class Case:
    """An operator with one of its samples, computed by torch in float32 and float64.

    Attributes:
      kind: None, or why there is nothing to compare.
      results: torch's.
      gradients: torch's, by the places of the inputs; None without any.
    """

    def __init__(self, name, entry, sample, processed=False):
        self.name, self.entry, self.sample = name, entry, sample
        self.function = functools.partial(_processed, entry, sample) if processed else entry
        self.inputs, self.structure = flatten(((sample.input, *sample.args), sample.kwargs))
        self.kind = UNSET if name in _UNSET else None
        sources = _Sources()
        try:
            with sources:
                leaves, self.results = self._run(torch.float32)
        except (AssertionError, RuntimeError) as error:
            self.kind, self.error = ELSEWHERE, error
            return
        if sources.kind == RANDOM or entry.name in _SEEDED:
            self.kind = RANDOM
            return
        self.places = [place for place, leaf in enumerate(leaves) if leaf.requires_grad]
        self.cotangents = [_cotangent(result) for result in self.results]
        self.gradients = self._differentiate(leaves, self.results)
        try:
            wide_leaves, self.wide = self._run(torch.float64)
        except Exception:  # some take no float64
            self.wide, self.wide_gradients = None, None
        else:
            self.wide_gradients = self._differentiate(wide_leaves, self.wide)

    def _run(self, dtype):
        leaves = []
        for tensor in self.inputs:
            leaf = tensor.detach().clone()
            if dtype is torch.float64 and (leaf.is_floating_point() or leaf.is_complex()):
                leaf = leaf.to(torch.complex128 if leaf.is_complex() else torch.float64)
            leaves.append(leaf.requires_grad_(tensor.requires_grad))
        args, kwargs = self.structure.unflatten(leaves)
        results, _ = flatten(self.function(*args, **kwargs))
        return leaves, results

    def _differentiate(self, leaves, results):
        """Gradients of the sum of the results times the cotangents; None if torch has none."""
        pairs = [
            (result, cotangent.to(result.dtype))
            for result, cotangent in zip(results, self.cotangents, strict=True)
            if result.requires_grad
        ]
        varied = [leaves[place] for place in self.places]
        if not pairs or not varied or not self.entry.supports_autograd or self.name in WRONG_IN_TORCH:
            return None
        outputs, cotangents = zip(*pairs, strict=True)
        try:
            found = torch.autograd.grad(outputs, varied, cotangents, allow_unused=True)
        except (NotImplementedError, RuntimeError):  # of some there are forms that have no derivative
            return None
        return [
            torch.zeros_like(leaf) if gradient is None else gradient.to_dense()
            for leaf, gradient in zip(varied, found, strict=True)
        ]

    def lower(self):
        """Captures it.

        Returns:
          A function of the arrays of the differentiated inputs: results, gradients as torch has them.
        """
        args, kwargs = self.structure.unflatten([tensor.detach().clone() for tensor in self.inputs])
        program, inputs = lowered.lower(lowered.Call(self.function), *args, **kwargs)
        values = {name: lowered.as_array(tensor) for name, tensor in program.tensors.items()}
        given = [lowered.as_array(tensor) for tensor in inputs]
        places = self.places if self.gradients is not None else []

        def compute(varied):
            now = list(given)
            for place, value in zip(places, varied, strict=True):
                now[place] = value
            return program(values, now)[0]

        def with_gradients(varied, cotangents):
            if not places:
                return compute(varied), []
            results, transpose = jax.vjp(compute, varied)
            by_result = [
                _fitting(result, cotangent, torchs.requires_grad)
                for result, cotangent, torchs in zip(results, cotangents, self.results, strict=True)
            ]
            # torch's gradients of complex numbers are the conjugates of JAX's.
            return results, [jnp.conj(gradient) for gradient in transpose(by_result)[0]]

        cotangents = [lowered.as_array(cotangent) for cotangent in self.cotangents]
        return with_gradients, [given[place] for place in places], cotangents

    def compare(self, made, gradients):
        """The difference from torch as text, or None."""
        if len(made) != len(self.results):
            return f"{len(made)} results, not {len(self.results)}"
        values = zip(made, self.results, self.wide or self.results, strict=True)
        only_form = self.kind is UNSET
        found = [_difference(*three, f"result {number}", only_form) for number, three in enumerate(values)]
        if self.gradients is not None:
            wide = self.wide_gradients or self.gradients
            for place, *three in zip(self.places, gradients, self.gradients, wide, strict=True):
                found.append(_difference(*three, f"gradient by input {place}"))
        return next(filter(None, found), None)


# Operators whose gradients are wrong in torch, and how; only their values are compared.
WRONG_IN_TORCH = {"as_strided_scatter": "torch's gradient is that of elements that are overwritten"}
_SEEDED = frozenset(("normal", "randn", "rand_like", "randn_like", "randint", "randint_like"))


def _cotangent(result):
    rng = np.random.default_rng(0)
    values = rng.normal(size=result.shape)
    if result.is_complex():
        values = values + 1j * rng.normal(size=result.shape)
    dtype = torch.complex64 if result.is_complex() else torch.float32
    return torch.from_numpy(np.asarray(values)).to(dtype)


def _fitting(result, cotangent, counts):
    if not jnp.issubdtype(result.dtype, jnp.inexact):
        return np.zeros(result.shape, jax.dtypes.float0)
    return jnp.conj(cotangent).astype(result.dtype) if counts else jnp.zeros(result.shape, result.dtype)


def _wide(tensor):
    if tensor.dtype in (torch.bfloat16, torch.float16):
        tensor = tensor.float()
    return (tensor.detach().resolve_conj().resolve_neg() + 0).numpy()


def _difference(ours, torchs, exact, what, only_form=False):
    """How our array differs from torch's tensor, or None.

    A difference counts where its 2-norm is above 1e-5 of the result's, unless ours is as near to what torch
    computes in float64: no further than 4 times as far as torch's in float32.
    """
    ours = np.asarray(ours)
    wanted = dtypes.jax_dtype(torchs.dtype)
    if ours.shape != tuple(torchs.shape) or ours.dtype != wanted:
        return f"{what}: {ours.dtype}{list(ours.shape)}, not {wanted}{list(torchs.shape)}"
    if only_form:
        return None
    theirs = _wide(torchs)
    if theirs.dtype.kind in "biu":
        return None if np.array_equal(ours, theirs.astype(ours.dtype)) else f"{what}: other integers"
    exact = _wide(exact) if exact.shape == torchs.shape else theirs
    kind = np.complex128 if theirs.dtype.kind == "c" else np.float64
    ours, theirs, exact = (array.astype(kind) for array in (ours, theirs, exact))
    finite = np.isfinite(theirs)
    if not np.array_equal(finite, np.isfinite(ours)):
        return f"{what}: not finite in other places"
    if not np.array_equal(ours[~finite], theirs[~finite], equal_nan=True):
        return f"{what}: other values that are not finite"
    ours, theirs, exact = ours[finite], theirs[finite], exact[finite]
    norm = np.linalg.norm
    distance = norm(ours - theirs)
    if distance <= 1e-5 * norm(theirs):
        return None
    allowed = max(1e-5 * norm(exact), 4 * norm(theirs - exact))
    if np.isfinite(exact).all() and norm(ours - exact) <= allowed:
        return None
    return f"{what}: differs by {distance / max(norm(theirs), 1e-30):.1e} of torch's"


def cases_of(name, count):
    """The first samples of an operator as cases."""
    entry = operators()[name]
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002  # samples are drawn from it
    random.seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        samples = entry.sample_inputs("cpu", torch.float32, requires_grad=entry.supports_autograd)
        return [Case(name, entry, sample) for sample in itertools.islice(samples, count)]


def run(cases):
    """Outcomes of some cases that are computed by one program.

    Cases that are refused or crash when they are captured are none of it. What fails as it is compiled or
    run is computed by itself.
    """
    outcomes, lowerings = {}, {}
    for case in cases:
        if case.kind not in (None, UNSET):
            outcomes[case] = Outcome(case.kind)
            continue
        try:
            function, *arguments = case.lower()
            jax.eval_shape(function, *arguments)
            lowerings[case] = function, arguments
        except _REFUSALS as error:
            outcomes[case] = Outcome(REFUSED, _reason(error))
        except Exception as error:
            outcomes[case] = Outcome(CRASHED, f"{type(error).__name__}: {error}".splitlines()[0])
    made = _compute(lowerings)
    for case, results in made.items():
        if isinstance(results, Exception):
            outcomes[case] = Outcome(CRASHED, f"{type(results).__name__}: {results}".splitlines()[0])
            continue
        difference = case.compare(*results)
        if difference is not None:
            difference = _processed_difference(case)
        has_gradient = case.gradients is not None
        outcomes[case] = Outcome(PASSED if difference is None else WRONG, difference or "", has_gradient)
    return [outcomes[case] for case in cases]


def _compute(lowerings):
    def together(arguments):
        return [function(*one) for (function, _), one in zip(lowerings.values(), arguments, strict=True)]

    try:
        made = jax.jit(together)([arguments for _, arguments in lowerings.values()])
        return dict(zip(lowerings, jax.block_until_ready(made), strict=True))
    except Exception as error:
        if len(lowerings) == 1:
            return dict.fromkeys(lowerings, error)
        return {case: made for case, one in lowerings.items() for made in _compute({case: one}).values()}


def _processed_difference(case):
    again = Case(case.name, case.entry, case.sample, processed=True)
    function, *arguments = again.lower()
    return again.compare(*jax.jit(function)(*arguments))


def _reason(error):
    lines = str(error).splitlines()
    line = lines[1].removeprefix("- ") if lines[0].endswith("cannot be computed:") else lines[0]
    if "asks for a value of a tensor" in line:
        return "asks for a value of a tensor, on which the size of its result or what comes next depends"
    return line.partition(": in module")[0].replace(".default", "")


def outcome_of(outcomes):
    """The outcome of an operator, from those of its samples: the worst."""
    order = (CRASHED, WRONG, REFUSED, RANDOM, ELSEWHERE, UNSET, PASSED)
    worst = min(outcomes, key=lambda outcome: order.index(outcome.kind), default=Outcome(ELSEWHERE))
    return dataclasses.replace(worst, has_gradient=any(outcome.has_gradient for outcome in outcomes))


def measure(names, count, group=16):
    """Outcomes of operators by their names."""
    found = {}
    names = list(names)
    with warnings.catch_warnings(), lowered.keys(0):
        warnings.simplefilter("ignore")
        for start in range(0, len(names), group):
            cases = {name: cases_of(name, count) for name in names[start : start + group]}
            flat = run([case for some in cases.values() for case in some])
            for name, some in cases.items():
                found[name], flat = outcome_of(flat[: len(some)]), flat[len(some) :]
    return found

"""Modules of torch computed by their lowerings, forward and gradients, beside torch itself."""

import contextlib
import copy
import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import torch

from ipu_pipeline.poptorch import dtypes
from ipu_pipeline.poptorch.graphs import capture
from ipu_pipeline.poptorch.lowering import random_numbers, substitutes
from ipu_pipeline.poptorch.lowering.interpreter import describe_unsupported, find_unsupported, run_node
from ipu_pipeline.poptorch.structures import flatten

torch.set_num_threads(1)  # its threads fight with XLA's
logging.getLogger("torch.__trace").setLevel(logging.WARNING)  # pytest would collect each step of exporting


class Call(torch.nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args, **kwargs):
        return self.function(*args, **kwargs)


class Group(torch.nn.Module):
    """Several modules, each called with its own arguments: together they are compiled fast."""

    def __init__(self, modules):
        super().__init__()
        self.group = torch.nn.ModuleList(modules)

    def forward(self, calls):
        return [module(*args, **kwargs) for module, (args, kwargs) in zip(self.group, calls, strict=True)]


@dataclasses.dataclass
class Lowered:
    """A module as a function of JAX."""

    program: torch.export.ExportedProgram
    tensors: dict  # parameters, buffers and constants by their targets

    def __call__(self, values, inputs):
        """Results and changed buffers, of tensors by their targets and the inputs in order."""
        inputs = iter(inputs)
        known = {}
        graph, signature = self.program.graph, self.program.graph_signature
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        for node, spec in zip(placeholders, signature.input_specs, strict=True):
            known[node] = next(inputs) if spec.kind.name == "USER_INPUT" else values.get(spec.target)
        for node in graph.nodes:
            if node.op == "call_function":
                known[node] = run_node(node, known.__getitem__)
        (output,) = (node for node in graph.nodes if node.op == "output")
        results, changed = [], {}
        for node, spec in zip(output.args[0], signature.output_specs, strict=True):
            value = known[node] if isinstance(node, torch.fx.Node) else node
            if spec.kind.name == "BUFFER_MUTATION":
                changed[spec.target] = value
            elif spec.kind.name == "USER_OUTPUT":
                results.append(value)
        return results, changed


def lower(module, *args, **kwargs):
    """A module, or a function, as JAX runs it.

    Raises:
      NotImplementedError: it has an operation without a lowering.
    """
    module = module if isinstance(module, torch.nn.Module) else Call(module)
    tensors, structure = flatten((args, kwargs))
    tensors = [tensor.detach() for tensor in tensors]  # export takes a tensor that is given twice for one
    with substitutes.exportable():
        captured = capture.capture(module, tensors, structure)
    if unsupported := find_unsupported(captured.program.graph):
        raise NotImplementedError(describe_unsupported(unsupported))
    return Lowered(captured.program, dict(captured.tensors)), tensors


def as_array(tensor):
    return jnp.asarray(dtypes.to_numpy(tensor.detach().contiguous()))


@contextlib.contextmanager
def keys(seed=0):
    """Random numbers outside of a pipeline: the lowerings' keys come from here."""
    state = [jax.random.key(seed)]

    def next_key():
        state[0], key = jax.random.split(state[0])
        return key

    before = random_numbers.next_rng_key
    random_numbers.next_rng_key = next_key
    try:
        yield
    finally:
        random_numbers.next_rng_key = before


def fit(result, cotangent):
    """A cotangent as `jax.vjp` takes it."""
    is_floating = jnp.issubdtype(result.dtype, jnp.floating)
    return cotangent if is_floating else np.zeros(result.shape, jax.dtypes.float0)


def run_jax(module, args, kwargs, cotangents=None, seed=0):
    """Results, changed buffers, and gradients of sum(results * cotangents) by floating-point tensors.

    Gradients are by "0", "1", ... for inputs and by targets for parameters.
    """
    lowered, inputs = lower(module, *args, **kwargs)
    values = {name: as_array(tensor) for name, tensor in lowered.tensors.items()}
    given = {str(i): as_array(tensor) for i, tensor in enumerate(inputs)}
    every = values | given
    varied = {name: array for name, array in every.items() if jnp.issubdtype(array.dtype, jnp.floating)}

    def function(varied):
        now = every | varied
        results, changed = lowered(now, [now[str(i)] for i in range(len(inputs))])
        return [result for result in results if result is not None], changed

    with keys(seed):
        if cotangents is None:
            results, changed = jax.jit(function)(varied)
            return results, changed, None

        def with_gradients(varied, cotangents):
            results, transpose, changed = jax.vjp(function, varied, has_aux=True)
            given = [fit(*pair) for pair in zip(results, cotangents, strict=True)]
            return results, changed, transpose(given)[0]

        return jax.jit(with_gradients)(varied, cotangents)


def run_torch(module, args, kwargs, fixed=(), seed=0):
    """Results, changed buffers, gradients (but of tensors with `fixed` ids) and the cotangents."""
    tensors, structure = flatten((args, kwargs))
    leaves = [
        tensor.detach().clone().requires_grad_(tensor.is_floating_point() and id(tensor) not in fixed)
        for tensor in tensors
    ]
    args, kwargs = structure.unflatten(leaves)
    results, _ = flatten(module(*args, **kwargs))
    rng = np.random.default_rng(seed)
    cotangents = [torch.from_numpy(np.asarray(rng.normal(size=result.shape))) for result in results]
    pairs = zip(cotangents, results, strict=True)
    cotangents = [c.to(r.dtype) if r.is_floating_point() else c for c, r in pairs]
    varied = {f"model.{name}": p for name, p in module.named_parameters()}
    varied |= {str(i): leaf for i, leaf in enumerate(leaves) if leaf.requires_grad}
    pairs = [(r, c) for r, c in zip(results, cotangents, strict=True) if r.requires_grad]
    found = [None] * len(varied)
    if pairs:
        outputs, given = zip(*pairs, strict=True)
        found = torch.autograd.grad(outputs, list(varied.values()), given, allow_unused=True)
    gradients = {
        name: torch.zeros_like(value) if gradient is None else gradient.to_dense()
        for (name, value), gradient in zip(varied.items(), found, strict=True)
    }
    return results, dict(module.named_buffers()), gradients, cotangents


def compare(module, *args, tolerance=2e-5, gradients=True, fixed=(), **kwargs):
    """Asserts that a module's results, buffers and gradients are torch's.

    Args:
      module: or a function.
      tolerance: relative to the largest element, and to 1.
      gradients: whether they are compared.
      fixed: tensors that have no gradient.
    """
    module = module if isinstance(module, torch.nn.Module) else Call(module)
    reference = copy.deepcopy(module)
    with torch.set_grad_enabled(gradients):
        results, buffers, of_torch, cotangents = run_torch(reference, args, kwargs, set(map(id, fixed)))
    cotangents = [as_array(c) for c in cotangents] if gradients else None
    made, changed, of_jax = run_jax(module, args, kwargs, cotangents)
    assert len(made) == len(results)
    for number, (ours, theirs) in enumerate(zip(made, results, strict=True)):
        close(ours, theirs, tolerance, f"result {number}")
    for name, value in changed.items():
        close(value, buffers[name.removeprefix("model.")], tolerance, f"buffer {name}")
    if gradients:
        for name, theirs in of_torch.items():
            close(of_jax[name], theirs, tolerance, f"gradient of {name}")


def compare_all(cases, **options):
    """`compare` for several functions at once; if they differ, each by itself, to say which one it is.

    The cases are functions or modules with their arguments, by name.
    """
    modules = [f if isinstance(f, torch.nn.Module) else Call(f) for f, *_ in cases.values()]
    calls = [(tuple(args), {}) for _, *args in cases.values()]
    try:
        compare(Group(modules), calls, **options)
    except Exception:
        for (name, (_, *args)), module in zip(cases.items(), modules, strict=True):
            try:
                compare(module, *args, **options)
            except Exception as error:
                error.add_note(f"It is {name}.")
                raise
        raise


def close(ours, theirs, tolerance, what):
    expected = dtypes.to_numpy(theirs.detach().contiguous())
    ours = np.asarray(ours)
    assert ours.dtype == expected.dtype, (what, ours.dtype, expected.dtype)
    assert ours.shape == expected.shape, (what, ours.shape, expected.shape)
    if expected.dtype.kind in "biu":
        np.testing.assert_array_equal(ours, expected, err_msg=what)
    else:
        ours, expected = ours.astype(np.float64), expected.astype(np.float64)
        finite = np.abs(expected[np.isfinite(expected)])
        scale = max(1.0, float(finite.max())) if finite.size else 1.0
        np.testing.assert_allclose(ours, expected, rtol=tolerance, atol=tolerance * scale, err_msg=what)

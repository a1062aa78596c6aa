"""Names of JAX and jaxlib that are not public, each with a public fallback.

Only this module and `jax_processes` use such names, and `NAMES` lists them; `jax_core` has the types of
jaxprs. A name is public if JAX's reference documentation describes it. `jax.extend.core`, on which the
engine is built, is public in this sense; `jax.core` is not, nor is anything in jaxlib. The names are looked
up once, when this module is imported. If one is missing, everything still works, only more slowly or with
more memory: arrays are moved by `jax.device_put`, loops are not reduced to the outputs that are needed,
equal programs are compiled one by one, some are not kept for the next pipeline, JAX's traces of a program
stay when the program is gone, and programs found in JAX's cache count as compiled. Only what uses
`jax.new_ref` is refused then.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import io
import pickle
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from ipu_pipeline.ground import jax_core
from ipu_pipeline.ground.user_warnings import warn_of_untested

NAMES: list[str] = []  # each as "module:name"; `find` adds them

# Nothing replaces the names and parameters of primitives: an untested JAX is tried.
warn_of_untested("jax", jax.__version__)


def explain_compilation(error: Exception) -> str | None:
    """Explains an error of XLA that is due to a version of JAX, with the mend; None for other errors."""
    if "annotate_device_placement" in str(error):
        return (
            f"Offloading: on CPUs, XLA of JAX {jax.__version__} cannot place arrays in host memory within "
            "a program, and all stages on one device form one program. Offload nothing, give stages "
            "devices of their own, or install JAX 0.10."
        )
    return None


def find(path: str) -> Any:
    """The object that a name stands for; None if there is no such name."""
    NAMES.append(path)
    module, _, names = path.partition(":")
    try:
        value: Any = importlib.import_module(module)
        for name in names.split("."):
            value = getattr(value, name)
    except (ImportError, AttributeError):
        return None
    return value


# The persistent compilation cache. Without the name, programs found in it count as compiled.

_register_event_listener = find("jax.monitoring:register_event_listener")


def notify_of_cache_hits(callback: Callable[[], None]) -> None:
    """Calls a function whenever a program is found in JAX's cache, in the thread that asks for it."""

    def listen(event: str, **_details: Any) -> None:
        if event == "/jax/compilation_cache/cache_hits":
            callback()

    if _register_event_listener is not None:
        _register_event_listener(listen)


# Programs before XLA. Without the name, programs with unread arguments are compiled each time.

_lowering = find("jax.stages:Lowered._lowering")


def kept_arguments(lowered: jax.stages.Lowered) -> tuple[int, ...] | None:
    """The arguments that a program before XLA reads (JAX leaves out the others); None if not known."""
    try:
        return tuple(sorted(_lowering.__get__(lowered).compile_args["kept_var_idx"]))
    except (AttributeError, KeyError, TypeError):
        return None


# Moving arrays. jaxlib's functions are four to five times faster than `jax.device_put`.

_ArrayCopySemantics = find("jaxlib.xla_client:ArrayCopySemantics")
_ArrayImpl = find("jaxlib.xla_client:ArrayImpl")
_DeviceList = find("jaxlib.xla_client:DeviceList")
_HostBufferSemantics = find("jaxlib.xla_client:HostBufferSemantics")
_batched_copy = find("jaxlib.xla_client:batched_copy_array_to_devices_with_sharding")
_batched_put = find("jaxlib.xla_client:batched_device_put")


def is_device_array(value: Any) -> bool:
    """Whether a value is a JAX array of numbers: neither of random keys nor traced."""
    if _ArrayImpl is not None:
        return type(value) is _ArrayImpl
    if not isinstance(value, jax.Array) or is_traced(value):
        return False
    return not jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def make_copy(devices: Sequence[Any], sharding: Any) -> Callable[[Sequence[Any]], list[Any]]:
    """Returns a function that copies arrays to other devices of the same client."""

    def put(arrays: Sequence[Any]) -> list[Any]:
        copies: list[Any] = jax.device_put(list(arrays), sharding)
        return copies

    if _batched_copy is None or _DeviceList is None or _ArrayCopySemantics is None:
        return put

    targets, reuse = _DeviceList(tuple(devices)), _ArrayCopySemantics.REUSE_INPUT

    def copy(arrays: Sequence[Any]) -> list[Any]:
        # Random keys are arrays of arrays, which only the public function knows.
        if not all(map(is_device_array, arrays)):
            return put(arrays)
        number = len(arrays)
        copies: list[Any] = _batched_copy(arrays, [targets] * number, [sharding] * number, [reuse] * number)
        return copies

    return copy


def make_send(device: Any, sharding: Any) -> Callable[[np.ndarray[Any, Any] | np.generic, bool], Any]:
    """Makes a function that puts an array of NumPy on a device; with True, a copy without shared memory."""
    if _batched_put is None or _HostBufferSemantics is None:

        def put(array: np.ndarray[Any, Any] | np.generic, is_copied: bool) -> Any:
            return jax.device_put(np.array(array) if is_copied else array, sharding)

        return put

    during_call = _HostBufferSemantics.IMMUTABLE_ONLY_DURING_CALL

    def send(array: np.ndarray[Any, Any] | np.generic, is_copied: bool) -> Any:
        aval = _cached_shaped_array(array.shape, array.dtype)
        arguments = (aval, sharding, [np.asarray(array)], [device], True)
        if not is_copied:
            return _batched_put(*arguments)
        return _batched_put(*arguments, force_copy=True, host_buffer_semantics=during_call)

    return send


def make_array(shape: Sequence[int], sharding: Any, parts: Sequence[Any]) -> Any:
    """Makes the array of a sharding from its devices' parts; nothing is copied or checked."""
    first = parts[0]
    if _ArrayImpl is None or not all(map(is_device_array, parts)):
        return jax.make_array_from_single_device_arrays(tuple(shape), sharding, list(parts))
    aval = _cached_shaped_array(tuple(shape), first.dtype)
    return _ArrayImpl(aval, sharding, list(parts), committed=True, _skip_checks=True)


_convert_element_type = find("jax._src.lax.lax:_convert_element_type")


def as_weak(value: Any) -> Any:
    """The value with a weak type, as that of a Python number, where JAX has a way to make one."""
    if _convert_element_type is None:
        return value
    return _convert_element_type(value, value.dtype, weak_type=True)


# Tracing.

_ShapedArray = find("jax.core:ShapedArray")
_Tracer = find("jax.core:Tracer")
_trace_state_clean = find("jax._src.core:trace_state_clean")
_make_user_context = find("jax:make_user_context")
_trace_mark = None if _make_user_context is None else _make_user_context(None)


def shaped_array(shape: Sequence[int], dtype: Any) -> Any:
    """The abstract value of an array."""
    if _ShapedArray is not None:
        return _ShapedArray(tuple(shape), dtype)
    (aval,) = jax.make_jaxpr(lambda x: x)(jax.ShapeDtypeStruct(tuple(shape), dtype)).in_avals
    return aval


_NO_MESH = AbstractMesh((), ())


def without_mesh(aval: Any) -> Any:
    """The abstract value of an array, without the mesh that it was traced in."""
    mesh = getattr(getattr(aval, "sharding", None), "mesh", None)
    if mesh is None or mesh.empty:
        return aval
    if hasattr(aval, "inner_aval"):  # of an array that is written in place
        return aval.update(inner_aval=without_mesh(aval.inner_aval))
    return aval.update(sharding=NamedSharding(_NO_MESH, PartitionSpec(*[None] * aval.ndim)))


def context_without_mesh(context: Any) -> Any:
    """The settings that an equation was traced with (its `ctx`), without the mesh."""
    mesh = getattr(context, "cur_abstract_mesh", None)
    if mesh is None or mesh.empty:
        return context
    with context.manager, jax.sharding.use_abstract_mesh(_NO_MESH):
        (traced,) = jax.make_jaxpr(jax.lax.neg)(np.float32(0)).eqns
    return traced.ctx


def array_without_mesh(value: Any) -> Any:
    """Takes an abstract mesh out of the type of an array that was made in it; else the value as it is."""
    if isinstance(value, np.ndarray) and hasattr(value, "aval"):  # as a trace makes of an array of NumPy
        aval = without_mesh(value.aval)
        return value if aval is value.aval else type(value)(np.asarray(value), aval)
    if not isinstance(value, jax.Array) or is_traced(value):
        return value
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        data = jax.random.key_data(value)
        bare = array_without_mesh(data)
        return value if bare is data else jax.random.wrap_key_data(bare, impl=jax.random.key_impl(value))
    old_aval: Any = jax.typeof(value)
    aval = without_mesh(old_aval)
    # A mesh with devices has their kind: such arrays come from elsewhere.
    if aval is old_aval or old_aval.sharding.mesh.abstract_device is not None or _ArrayImpl is None:
        return value
    parts = [shard.data for shard in value.addressable_shards]
    return _ArrayImpl(aval, value.sharding, parts, committed=value.committed, _skip_checks=True)


_cached_shaped_array = functools.lru_cache(maxsize=256)(shaped_array)


def is_traced(value: Any) -> bool:
    """Whether a value only stands for an array, in a function that is being traced."""
    if _Tracer is not None:
        return isinstance(value, _Tracer)
    if not isinstance(value, jax.Array):
        return False
    try:
        value.devices()
    except jax.errors.ConcretizationTypeError:
        return True
    except RuntimeError:  # its memory was donated
        return False
    return False


def is_outside_of_traces() -> bool:
    """Whether no function is being traced here for certain; False if JAX does not say."""
    return _trace_state_clean is not None and bool(_trace_state_clean())


def lines_of(value: Any) -> list[tuple[str, int]]:
    """Files and lines of the calls in which a traced value was computed, the innermost one first.

    The list is empty if the value is not traced, or JAX does not know.
    """
    try:
        return [(frame.file_name, frame.line_num) for frame in value._line_info.traceback.frames]  # noqa: SLF001
    except AttributeError:
        return []


def functions_of(equation: Any) -> list[tuple[str, int, str]]:
    """Files, lines and functions of the calls that made an equation, the innermost one first.

    The list is empty if JAX does not know.
    """
    try:
        frames = equation.source_info.traceback.frames
        return [(frame.file_name, frame.line_num, frame.function_name) for frame in frames]
    except AttributeError:
        return []


_trace_caches = [
    cache
    for cache in (
        find("jax._src.pjit:_infer_params_cached"),
        find("jax._src.interpreters.partial_eval:trace_to_jaxpr"),
    )
    if hasattr(cache, "cache_keys") and hasattr(cache, "evict_weakref")
]


def _drop_traces(mark: object) -> None:
    """Removes the traces of a context, which are never looked up again, from JAX's caches.

    A cache keeps a trace for as long as the traced function lives, and functions of `jax.numpy` live for
    ever. It forgets all traces of a function at once; traces of other contexts are made again when needed.
    """
    for cache in _trace_caches:
        for function in [key[0]() for key in cache.cache_keys() if mark in key[1]]:
            if function is not None:
                cache.evict_weakref(function)


@contextlib.contextmanager
def fresh_trace() -> Iterator[None]:
    """A context in which JAX traces inner functions anew, whatever its caches have."""
    if _trace_mark is not None:
        mark = object()  # the caches tell contexts apart by it
        try:
            with _trace_mark(mark):
                yield
        finally:
            _drop_traces(mark)
        return
    jax.clear_caches()  # this drops compiled programs, too; they are compiled again when called
    try:
        yield
    finally:
        jax.clear_caches()


# Names of scopes in equations.

_has_name_stacks = None not in [
    find("jax.extend.source_info_util:SourceInfo.name_stack"),
    find("jax.extend.source_info_util:SourceInfo.replace"),
    find("jax.extend.source_info_util:NameStack.stack"),
    find("jax.extend.source_info_util:NameStack.__add__"),
]


def scope_names(equation: Any) -> list[str]:
    """Names of the scopes (`jax.named_scope`) and transformations around an equation, outermost first."""
    if _has_name_stacks:
        return [entry.name for entry in equation.source_info.name_stack.stack]
    bare = equation.replace(invars=[], outvars=[], params={}, effects=frozenset())
    jaxpr = jax_core.Jaxpr([], [], [], [bare], frozenset(), _DEBUG_INFO)
    text = jaxpr.pretty_print(name_stack=True, custom_pp_eqn_rules=False, use_color=False)
    (stack,) = re.findall(r"# \[(.*)\]", text)
    return [name for name in re.split("[/()]", stack) if name]


_DEBUG_INFO = jax_core.DebugInfo("jit", "ipu_pipeline", None, None)


def within_scopes(caller: Any, equation: Any) -> Any:
    """Puts the scopes of the call that an equation was inlined from around its own."""
    info = equation.source_info
    if _has_name_stacks:
        stack = caller.source_info.name_stack + info.name_stack
        return equation.replace(source_info=info.replace(name_stack=stack))
    outer = scope_names(caller)
    if not outer:
        return equation

    def trivial(x: Any) -> Any:
        with contextlib.ExitStack() as scopes:
            for name in (*outer, *scope_names(equation)):
                scopes.enter_context(jax.named_scope(name))
            return jax.lax.neg(x)

    (traced,) = jax.make_jaxpr(trivial)(np.float32(0)).eqns
    return equation.replace(source_info=traced.source_info)


def in_place_of(replaced: Any, equation: Any) -> Any:
    """Gives an equation the scopes and the lines of the one that it replaces."""
    return equation.replace(source_info=replaced.source_info)


# What JAX makes random bits of; None: not known.
threefry: Any = find("jax.extend.random:threefry_prng_impl")

# How an equation is reduced to some of its outputs, by primitive: (which, equation) -> (inputs, equation);
# since JAX 0.12 the second argument says which arrays that are written in place are read later.
dce_rules: Mapping[Any, Callable[..., tuple[Any, Any]]] = (
    find("jax.interpreters.partial_eval:dce_rules") or {}
)


@functools.cache
def _count_parameters(function: Callable[..., Any]) -> int:
    return len(inspect.signature(function).parameters)


def reduce(equation: Any, used_outputs: list[bool]) -> Any | None:
    """An equation without some of its outputs; None if none is left. As it is, if it cannot be reduced."""
    rule = dce_rules.get(equation.primitive)
    if rule is None:
        return equation
    more = [[True] * len(equation.invars)] if _count_parameters(rule) > 2 else []
    _used_inputs, reduced = rule(used_outputs, *more, equation)
    return reduced


# Arrays that are written in place.

_discharge = find("jax._src.state.discharge:discharge_state")


def discharge(closed_jaxpr: Any) -> Any:
    """Makes writes to arrays of `jax.new_ref` in a jaxpr equations that return their new values."""
    if _discharge is None:
        raise ValueError(
            "Stages cannot use jax.new_ref with this version of JAX: the function that turns writes into "
            f"results was not found in jax {jax.__version__}. Write x = x.at[...].set(value) instead."
        )
    if "consts" in inspect.signature(_discharge).parameters:  # as JAX 0.9 has it
        return jax_core.ClosedJaxpr(*_discharge(closed_jaxpr.jaxpr, closed_jaxpr.consts))
    return _discharge(closed_jaxpr)


# Checks (`checkify.check`) that become results.

_checkify = find("jax.experimental.checkify:checkify")
_user_checks = find("jax.experimental.checkify:user_checks")
_check_error = find("jax.experimental.checkify:JaxRuntimeError")


def has_checks(closed_jaxpr: Any) -> bool:
    """Whether a jaxpr has a `checkify.check` that `with_errors_of_checks` can turn into a result."""
    effects = {type(effect).__name__ for effect in closed_jaxpr.effects}
    return None not in (_checkify, _user_checks, _check_error) and "ErrorEffect" in effects


def with_errors_of_checks(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function return the error of its checks, a pytree, and what it returned."""
    assert _checkify is not None
    checked_function: Callable[..., Any] = _checkify(function, errors=_user_checks)
    return checked_function


def make_check_error(message: str) -> Exception:
    """The error that JAX raises for a check."""
    assert _check_error is not None
    error: Exception = _check_error(message)
    return error


# Primitives of our own: their derivatives, and what they mean for XLA.

_derivatives = find("jax.interpreters.ad:primitive_jvps")
_register_lowering = find("jax.interpreters.mlir:register_lowering")
_lower_function = find("jax.interpreters.mlir:lower_fun")
_make_linear = find("jax.interpreters.ad:deflinear2")
_batching_rules = find("jax.interpreters.batching:primitive_batchers")


def end_derivatives(primitive: Any) -> None:
    """Allows a primitive in functions that are differentiated; its one result is an integer."""

    def derivative(operands: Any, tangents: Any, **params: Any) -> Any:
        del tangents
        return primitive.bind(*operands, **params), np.zeros((), jax.dtypes.float0)

    if _derivatives is not None:
        _derivatives[primitive] = derivative


def lower_by_axis(
    primitive: Any, axis: str, alone: Callable[..., Any], together: Callable[..., Any]
) -> None:
    """Makes a primitive with one result mean a function, and another one where `shard_map` has an axis.

    Without the names a program with the primitive does not compile, and JAX says so.
    """

    def lower(context: Any, *arguments: Any) -> Any:
        axes = getattr(context.module_context.axis_context, "manual_axes", ())
        function = together if axis in axes else alone
        return _lower_function(function, multiple_results=False)(context, *arguments)

    if _register_lowering is not None and _lower_function is not None:
        # Lowered anew each time: lowered once and called twice, it would be one collective for XLA.
        _register_lowering(primitive, lower, cacheable=False)


def make_own_transpose(primitive: Any) -> None:
    """Lets a linear primitive that is its own transpose be differentiated, and mapped by elements."""

    def differentiate(cotangent: Any, _operand: Any) -> list[Any]:
        return [primitive.bind(cotangent)]

    def batch(operands: Any, dimensions: Any) -> tuple[Any, Any]:
        return primitive.bind(*operands), dimensions[0]

    if _make_linear is not None and _batching_rules is not None:
        _make_linear(primitive, differentiate)
        _batching_rules[primitive] = batch


def as_operand(value: Any) -> Any:
    """Makes a value an operand of such a primitive; without that name it takes one more operation."""
    is_smooth = jnp.issubdtype(value.dtype, jnp.inexact)
    return jax.lax.stop_gradient(value) if _derivatives is None and is_smooth else value


# Executables: loaded for other devices than they were compiled for, and JAX's persistent cache.

_find_cache = find("jax._src.compilation_cache:_get_cache")
_reset_cache = find("jax.experimental.compilation_cache.compilation_cache:reset_cache")
_serialize = find("jax.experimental.serialize_executable:serialize")
_deserialize = find("jaxlib.xla_client:Client.deserialize_executable")
_CompileOptions = find("jaxlib.xla_client:CompileOptions")
_DeviceAssignment = find("jaxlib.xla_client:DeviceAssignment")


def reset_persistent_cache() -> None:
    """Makes JAX read the settings of its persistent cache again; by itself it reads them only once."""
    if _reset_cache is not None:
        _reset_cache()


def find_persistent_cache() -> Any:
    """JAX's persistent cache, with `get(key)` and `put(key, value)`, until it is reset.

    None if there is none, or if the name is missing.
    """
    return None if _find_cache is None else _find_cache(types.SimpleNamespace(runtime_type=""))


def can_move_executables(client: Any) -> bool:
    """Whether what was compiled for one device of a client can be loaded for others.

    It cannot with JAX's persistent compilation cache: a program that XLA's CPU client loaded from there and
    that is written out again fails when it is called (jax 0.10.2).
    """
    functions = (_find_cache, _serialize, _deserialize, _CompileOptions, _DeviceAssignment)
    return None not in functions and _find_cache(client) is None


class WrittenExecutable(NamedTuple):
    """A compiled program, written out."""

    written: bytes
    in_tree: Any
    out_tree: Any


def write_executable(compiled: jax.stages.Compiled) -> WrittenExecutable:
    """Writes a compiled program out; only where `can_move_executables`."""
    return WrittenExecutable(*_serialize(compiled))


def read_executable(executable: WrittenExecutable, device: Any) -> jax.stages.Compiled:
    """Loads the program for a device of the kind that it was compiled for."""
    unloaded, leaves, no_kwargs = _Reader(executable.written, device).load()
    arguments = executable.in_tree.unflatten(leaves)
    return jax.stages.Compiled(unloaded.load(), [], arguments, executable.out_tree, no_kwargs=no_kwargs)


class _Reader(pickle.Unpickler):
    """Reads what JAX wrote for one device for another one; JAX's own reader insists on the same device."""

    def __init__(self, written: bytes, device: Any) -> None:
        super().__init__(io.BytesIO(written))
        self._device = device

    def persistent_load(self, pid: tuple[Any, ...]) -> Any:
        """Finds what JAX does not write as an object: the device, its client, and XLA's executable."""
        kind, *contents = pid
        if kind == "device":
            return self._device
        if kind == "client":
            return self._device.client
        if kind != "exec":
            raise pickle.UnpicklingError(f"JAX wrote something unknown: {kind}.")
        options = _CompileOptions()
        options.num_replicas = options.num_partitions = 1
        options.device_assignment = _DeviceAssignment.create(np.array([[self._device.id]]))
        return _deserialize(self._device.client, contents[0], [self._device], options)

"""Loops on the device: a body that runs many times within one `Session.run`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ipu_pipeline.engine.fronts import InsideOfBodyError, Loop, find_frame, look_at_body
from ipu_pipeline.graphcore.sdk_names import explain_missing
from ipu_pipeline.ground import jax_compat
from ipu_pipeline.ground.checks import check_function, check_integer, name_of
from ipu_pipeline.queues.infeed import IPUInfeedQueue
from ipu_pipeline.queues.outfeed import Operation
from ipu_pipeline.queues.queue_arguments import check_queue
from ipu_pipeline.tf1.graph import Placeholder, as_traced_inputs
from ipu_pipeline.tf1.program.calls import LoopCall, current_builder, make_replication
from ipu_pipeline.tf1.program.program import returned_values

__all__ = ["repeat", "while_loop"]


def repeat(
    n: Any,
    body: Callable[..., Any],
    inputs: Any = None,
    infeed_queue: IPUInfeedQueue | None = None,
    use_while_v1: bool = True,
) -> Any:
    """Runs a body a number of times on the device, within one `Session.run`.

    On one device the loop is one compiled program, which handles blocks of iterations. A body with
    `scopes.ipu_shard` runs one iteration at a time, shard after shard.

    A body whose optimizer is a `CrossReplicaOptimizer` has replicas: the number of IPUs that `IPUConfig`
    selects, divided by the number that the body uses. All replicas run one iteration at the same time. Each
    has its own infeed elements, carried values and random numbers; docs/replicas.md says what they share.
    The rest of the program computes with each replica's results, and `Session.run` returns the first
    replica's. A following pipeline or loop with one replica gets the first replica's results; another
    number of replicas is an error. Variables that the body assigns are joined at each weight update and at
    the end of a run. Gradients that are still accumulated at the end of a run are averaged over the
    replicas, so that a checkpoint can continue with another number.

    Example:
      >>> def body(number):
      ...     return 2 * number
      >>> def model(number):
      ...     return ipu.loops.repeat(10, body, [number])
      >>> with ipu.scopes.ipu_scope("/device:IPU:0"):
      ...     program = ipu.ipu_compiler.compile(model, [np.float32(1)])
      >>> with ipu.Session() as session:
      ...     session.run(program)
      [array(1024., dtype=float32)]

    Args:
      n: the number of iterations, from 0: an integer, or a traced integer scalar.
      body: takes the inputs and then the infeed's element, and returns the inputs of the next iteration,
        with the same structure, shapes and dtypes. Training steps (`minimize`) and `enqueue` operations run
        whether or not they are returned, anywhere among these. It may read values from outside.
      inputs: the inputs of the first iteration: arrays, or pytrees of them, in a list; a single input need
        not be in a list.
      infeed_queue: the queue from which each replica takes one element per iteration.
      use_while_v1: has no effect, as there is only one kind of loop; accepted for TensorFlow 1 code.

    Returns:
      The inputs of the iteration after the last one, in a list; a single input without a list; an operation
      if there are no inputs.

    Raises:
      TypeError, ValueError: an argument has a wrong value, or the body does not return the next inputs.
      RuntimeError: it is not called in a function that `ipu_compiler.compile` traces, or it is called
        within a stage or body.
    """
    del use_while_v1
    count = _check_count(n, "ipu.loops.repeat: n")
    return _loop("ipu.loops.repeat", body, inputs, infeed_queue, count, None)


def while_loop(
    condition: Callable[..., Any],
    body: Callable[..., Any],
    inputs: Any = None,
    infeed_queue: IPUInfeedQueue | None = None,
    maximum_iterations: Any = None,
    use_while_v1: bool = True,
) -> Any:
    """Runs a body on the device as long as a condition holds, within one `Session.run`.

    Example:
      >>> def model(number):
      ...     return ipu.loops.while_loop(lambda number: number < 1000, lambda number: 2 * number, [number])
      >>> with ipu.scopes.ipu_scope("/device:IPU:0"):
      ...     program = ipu.ipu_compiler.compile(model, [np.float32(1)])
      >>> with ipu.Session() as session:
      ...     session.run(program)
      [array(1024., dtype=float32)]

    Args:
      condition: called before each iteration with its inputs, without the infeed's element; returns a
        boolean scalar. It cannot use variables, random keys or values from outside. With several replicas
        it must return the same in all of them.
      body: as for `repeat`.
      inputs: the inputs of the first iteration, at least one, as for `repeat`.
      infeed_queue: the queue from which each iteration takes an element. On one device, elements that its
        `prefetch_depth` has fetched ahead are handled together; elements that the loop did not need come
        first in the next run.
      maximum_iterations: the largest number of iterations, given like `n` of `repeat`; None: no limit.
      use_while_v1: as for `repeat`.

    Returns:
      The inputs of the iteration after the last one, like `repeat`.

    Raises:
      The errors of `repeat`; and ValueError if the condition does not return a boolean scalar.
    """
    del use_while_v1
    check_function("ipu.loops.while_loop: condition", condition)
    count = maximum_iterations
    if count is not None:
        count = _check_count(count, "ipu.loops.while_loop: maximum_iterations")
    return _loop("ipu.loops.while_loop", body, inputs, infeed_queue, count, condition)


def run_once(function: Callable[..., Any], *arguments: Any) -> Any:
    """Runs a function that trains, enqueues or uses shards, as the body of a loop that runs once.

    Returns:
      The function's result, without operations.
    """
    place = f"the compiled function {name_of(function)}"
    trees: list[Any] = []
    avals: list[jax.ShapeDtypeStruct] = []

    def call(*_previous: Any) -> list[Any]:
        leaves, tree = jax.tree.flatten(returned_values(function(*arguments)))
        trees[:] = [tree]
        return [jnp.asarray(leaf) for leaf in leaves]

    def look() -> None:
        avals[:] = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in call()]

    builder = current_builder()
    assert builder is not None
    look_at_body(look, builder.names, place)
    results = _loop(
        place, call, [jnp.zeros(aval.shape, aval.dtype) for aval in avals], None, 1, None, place
    )
    (tree,) = trees
    return tree.unflatten(results if len(avals) > 1 else [results][: len(avals)])


def _loop(
    caller: str,
    body: Callable[..., Any],
    inputs: Any,
    infeed_queue: IPUInfeedQueue | None,
    count: Any,
    cond: Callable[..., Any] | None,
    place: str | None = None,
) -> Any:
    check_function(f"{caller}: body", body)
    check_queue("infeed_queue", infeed_queue, IPUInfeedQueue, f"{caller}: ")
    builder = current_builder()
    if builder is None:
        raise RuntimeError(
            f"{caller} must be called in a function that ipu_compiler.compile traces, within an ipu_scope; "
            "here it is not placed on an IPU device."
        )
    frame = find_frame()
    if frame is not None and frame.is_stage:
        raise InsideOfBodyError(
            f"{caller} was called within a computational stage or the body of a loop; use jax.lax.scan or "
            "jax.lax.fori_loop there."
        )
    leaves, tree = as_traced_inputs(inputs, f"{caller}: inputs")
    num_inputs = tree.num_leaves
    if cond is not None and not num_inputs:
        raise ValueError(f"{caller}: inputs must have at least one array, which the condition takes.")
    element = None if infeed_queue is None else infeed_queue.element
    avals = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    own_place = place or f"the body {name_of(body)} of {caller}"
    loop = Loop.of_body(
        body,
        jax.tree.unflatten(tree, avals),
        element,
        builder.names,
        own_place,
        lambda returned: _new_inputs(returned, tree, own_place),
        cond,
        caller,
    )
    traced, training = loop.body, loop.body.training
    loop_call = LoopCall(
        loop=loop,
        has_count_operand=jax_compat.is_traced(count),
        count=None if jax_compat.is_traced(count) else count,
        infeed_queue=infeed_queue,
        replication=make_replication(
            builder.ipu_device,
            loop.num_devices,
            loop.uses_replicas,
            [infeed_queue, *(entry.target for entry, _places in traced.enqueued)],
            trains=training is not None,
            averages=training is not None and training.averages_replicas,
            sharded=["replicated_optimizer_state_sharding"] if training and training.shards_state else [],
        ),
    )
    operands = [*([count] if loop_call.has_count_operand else []), *traced.captured, *leaves]
    results = jax.tree.unflatten(tree, builder.add(loop_call, operands, avals))
    if not results:
        return Operation("repeat")
    return results[0] if len(results) == 1 else results


_REMOVED = object()


def _new_inputs(returned: Any, tree: Any, place: str) -> list[Any]:
    """The leaves of what a body returned, without operations."""
    values = list(returned) if isinstance(returned, (tuple, list)) else [returned]
    results = [value for value in map(_without_operations, values) if value is not _REMOVED]
    leaves, result_tree = jax.tree.flatten(results)
    if result_tree == tree or len(leaves) != tree.num_leaves:  # another number is an error with the shapes
        return leaves
    raise ValueError(
        f"{place} must return its inputs' structure, {_describe(tree)}, besides operations; it returns "
        f"{_describe(result_tree)}."
    )


def _without_operations(value: Any) -> Any:
    """A value without the operations in it; _REMOVED if nothing is left, and for None."""
    if value is None or isinstance(value, Operation):
        return _REMOVED
    if type(value) in (tuple, list) and value:
        members = [inner for inner in map(_without_operations, value) if inner is not _REMOVED]
        return type(value)(members) if members else _REMOVED
    if type(value) is dict and value:
        inner = {key: _without_operations(part) for key, part in value.items()}
        kept_items = {key: part for key, part in inner.items() if part is not _REMOVED}
        return kept_items or _REMOVED
    return value


def _describe(tree: Any) -> str:
    return str(jax.tree.unflatten(tree, ["*"] * tree.num_leaves)).replace("'*'", "*")


def _check_count(n: Any, argument: str) -> Any:
    if isinstance(n, Placeholder):
        n = n.traced()
    if jax_compat.is_traced(n):
        if n.shape != () or not jnp.issubdtype(n.dtype, jnp.integer):
            raise TypeError(f"{argument} must be an integer scalar; got {n.dtype.name}{list(n.shape)}.")
        return n
    return check_integer(argument, n, least=0)


explain_missing(__name__)

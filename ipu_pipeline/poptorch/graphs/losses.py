"""Finds the loss of a model: always a value that forward returns.

A value marked by `identity_loss` wins. Without it, the loss is the single one of torch's losses, if it is
returned. If a value computed from it is returned, that value may be meant instead, so this is an error. If
there are several losses, it is the one scalar result from which gradients lead to all, such as half the sum
of two.

Losses are found before the graph is decomposed, while they are single operations, and get a mark. The
choice between them is made when the graph is functional: only there do in-place operations make nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import NoReturn

import torch
from torch.export.graph_signature import OutputKind

from ipu_pipeline.poptorch import markers
from ipu_pipeline.poptorch.errors import Error
from ipu_pipeline.poptorch.lowering.interpreter import describe_place

_OURS = "identity_loss"
# The operations of torch.nn's losses in a graph before it is decomposed.
_LOSSES = frozenset(
    (
        "binary_cross_entropy",
        "binary_cross_entropy_with_logits",
        "cosine_embedding_loss",
        "cross_entropy_loss",
        "ctc_loss",
        "hinge_embedding_loss",
        "huber_loss",
        "kl_div",
        "l1_loss",
        "linear_cross_entropy",
        "margin_ranking_loss",
        "mse_loss",
        "multi_margin_loss",
        "multilabel_margin_loss",
        "nll_loss",
        "nll_loss2d",
        "nll_loss_nd",
        "poisson_nll_loss",
        "smooth_l1_loss",
        "soft_margin_loss",
        "triplet_margin_loss",
    )
)
# Operations that return their operand in another shape or floating-point dtype.
_COPIES = frozenset(
    (
        "_to_copy",
        "_unsafe_view",
        "alias",
        "clone",
        "expand",
        "nop",
        "print_tensor",
        "recomputation_checkpoint",
        "reshape",
        "squeeze",
        "unsqueeze",
        "view",
    )
)
_COPIES_OF_ONE_ELEMENT = frozenset(("mean", "sum"))
_NEUTRAL = {"add": 0, "sub": 0, "mul": 1, "div": 1}  # a second operand that changes nothing
_MEND = "wrap it in poptorch.identity_loss(loss, reduction='mean'), and return that from forward."


def mark_losses(graph: torch.fx.Graph) -> None:
    """Puts a mark behind each loss."""
    identity_losses = [node for node in graph.nodes if _operation(node) == _OURS]
    losses = identity_losses or [node for node in graph.nodes if _operation(node) in _LOSSES]
    hidden = _find_hidden(graph, even_without_gradients=not losses)
    if hidden and not identity_losses:
        raise Error(
            f"The loss is computed in {describe_place(hidden[0])}, within a branch, a loop "
            "or another region of its own, where it cannot be told from the rest. Compute it after the "
            "region; or pass what the region gives through poptorch.identity_loss behind it."
        )
    if not losses:
        raise Error(
            "Couldn't find a loss in graph! The loss must be one of torch's losses that forward "
            f"returns; or {_MEND}"
        )
    for loss in losses:
        reduced = _with_batch_mean(loss)
        with graph.inserting_after(reduced):
            marked = graph.call_function(markers.mark_found_loss(), (reduced, str(_operation(loss))))
        marked.meta = dict(reduced.meta)
        _put_behind(reduced, marked)


def choose_loss(program: torch.export.ExportedProgram, trainable: Set[torch.fx.Node]) -> None:
    """Removes the marks of all losses but the final one, which is minimized."""
    graph = program.graph_module.graph
    marks = [node for node in graph.nodes if node.target is markers.mark_found_loss()]
    (output,) = (node for node in graph.nodes if node.op == "output")
    results = [
        node
        for node, spec in zip(output.args[0], program.graph_signature.output_specs, strict=True)
        if spec.kind is OutputKind.USER_OUTPUT and isinstance(node, torch.fx.Node)
    ]
    loss = _choose(marks, results, trainable)
    value = loss.meta["val"]
    if value.numel() != 1 or not value.dtype.is_floating_point:
        raise Error(
            f"The loss must be one floating-point number. The loss in {describe_place(loss)} is "
            f"{value.dtype} of shape {tuple(value.shape)}. To minimize its mean, {_MEND}"
        )
    scalar = loss
    if value.dim():  # of one element: what forward returns keeps its shape
        with graph.inserting_after(loss):
            scalar = graph.call_function(torch.ops.aten.view.default, (loss, []))
        scalar.meta = {**loss.meta, "val": value.view(())}
    with graph.inserting_after(scalar):
        final = graph.call_function(markers.mark_final_loss(), (scalar,))
    final.meta = dict(scalar.meta)
    if scalar is loss:
        _put_behind(loss, final)
        program.graph_signature.replace_all_uses(loss.name, final.name)
    for mark in marks:
        (inner,) = mark.all_input_nodes
        mark.replace_all_uses_with(inner)
        program.graph_signature.replace_all_uses(mark.name, inner.name)
        graph.erase_node(mark)
    program.graph_module.recompile()


def _choose(
    marks: Sequence[torch.fx.Node], results: Sequence[torch.fx.Node], trainable: Set[torch.fx.Node]
) -> torch.fx.Node:
    """Chooses one of the marked losses, or the result that is computed from all of them."""
    ways = {node: ways_of_gradients(node) for node in {*marks, *results}}
    returned = {_original(node, even_detached=True) for node in results}
    is_ours = _name_of(marks[0]) == _OURS
    candidates = list(marks)
    if not is_ours:
        trained = [node for node in marks if ways[node] & trainable] or candidates
        reached = set().union(*(ways[node] for node in results))
        candidates = [node for node in trained if node in reached] or [n for n in trained if n in returned]
        if not candidates:
            _complain_of_unused(trained[0], results)
    final = [
        node
        for node in candidates
        if not any(node in ways[other] for other in candidates if other is not node)
    ]
    if len(final) > 1:
        return _find_combined_loss(final, results)
    (loss,) = final
    after = [n for n in results if loss in ways[n] and _original(n) is not loss]
    if after and not is_ours:
        _complain_of_followers(loss, after[0])
    if loss not in returned:
        raise Error(
            "The model does not return what poptorch.identity_loss marks, but "
            f"{'only what is computed from it' if after else 'other values'}. It marks a value in "
            f"{describe_place(loss)} . Return that value; or, if another one is the loss, mark that one."
        )
    return loss


def _complain_of_followers(loss: torch.fx.Node, follower: torch.fx.Node) -> NoReturn:
    raise Error(
        "The model returns a value that is computed from a loss, and it is not clear which is to "
        f"be minimized. The value is from {describe_place(follower)} ; the loss, {_name_of(loss)}, from "
        f"{describe_place(loss)} . If it is the value: {_MEND} If it is the loss: return value.detach() "
        "in place of the value."
    )


def _complain_of_unused(loss: torch.fx.Node, results: Sequence[torch.fx.Node]) -> NoReturn:
    place = f"The loss, {_name_of(loss)}, is from {describe_place(loss)} ."
    if any(loss in _ancestors(node) for node in results):
        raise Error(
            "The model does not return its loss, but only values that are computed from it without a way "
            f"for gradients (as after detach, or in integers). {place} Return it; or, if another value "
            f"is the loss: {_MEND}"
        )
    raise Error(
        f"The model does not return its loss. {place} Return it; or, if another value is the loss: {_MEND}"
    )


def _find_combined_loss(losses: Sequence[torch.fx.Node], results: Iterable[torch.fx.Node]) -> torch.fx.Node:
    """Finds the one result of one number from which gradients lead to several losses."""
    scalars = {_original(node): node for node in results if _is_one_number(node)}
    made_of_all = [node for node in scalars.values() if set(losses) <= ways_of_gradients(node)]
    if len(made_of_all) == 1:
        return made_of_all[0]
    places = "; ".join(f"{_name_of(node)} in {describe_place(node)}" for node in losses)
    raise Error(
        "Multiple independent losses found in graph. Graph must have one final loss. "
        "Wrap final graph loss in poptorch.identity_loss. (It is found without that where one scalar that "
        f"forward returns, and no other, is made of them all.) They are: {places}."
    )


def _is_one_number(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.numel() == 1 and value.dtype.is_floating_point


def find_marked_loss(graph: torch.fx.Graph) -> torch.fx.Node:
    """Finds the final loss in a graph, after `choose_loss`."""
    (marked,) = (node for node in graph.nodes if node.target is markers.mark_final_loss())
    loss: torch.fx.Node = marked
    return loss


def ways_of_gradients(loss: torch.fx.Node) -> set[torch.fx.Node]:
    """Finds the nodes of a functional graph that a gradient of `loss` reaches, including itself."""
    nodes: set[torch.fx.Node] = set()
    stack = [loss]
    while stack:
        node = stack.pop()
        if node in nodes or node.target is torch.ops.aten.detach.default:
            continue
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex()):
            continue
        nodes.add(node)
        stack += node.all_input_nodes
    return nodes


def _ancestors(node: torch.fx.Node) -> set[torch.fx.Node]:
    ancestors: set[torch.fx.Node] = set()
    stack = [node]
    while stack:
        current = stack.pop()
        if current not in ancestors:
            ancestors.add(current)
            stack += current.all_input_nodes
    return ancestors


def _original(node: torch.fx.Node, even_detached: bool = False) -> torch.fx.Node:
    """Returns the node that a node is a copy of, or the node itself."""
    while _is_copy(node) or (even_detached and node.target is torch.ops.aten.detach.default):
        node = node.all_input_nodes[0]
    return node


def _is_copy(node: torch.fx.Node) -> bool:
    operation, value = _operation(node), node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point or not node.all_input_nodes:
        return False
    operand = node.all_input_nodes[0].meta.get("val")
    if not isinstance(operand, torch.Tensor) or operand.numel() != value.numel():
        return False
    if operation in _NEUTRAL:
        alone = node.args[0] is node.all_input_nodes[0] and not node.kwargs
        return alone and len(node.args) == 2 and bool(node.args[1] == _NEUTRAL[operation])
    return operation in _COPIES or (operation in _COPIES_OF_ONE_ELEMENT and operand.numel() == 1)


def _find_hidden(graph: torch.fx.Graph, even_without_gradients: bool) -> list[torch.fx.Node]:
    """Finds the losses in regions that are graphs of their own."""
    root = graph.owning_module
    parts = [] if root is None else [m for m in root.modules() if isinstance(m, torch.fx.GraphModule)]
    left_out = {root}
    if not even_without_gradients:
        for node in (node for part in parts for node in part.graph.nodes):
            if "wrap_with_set_grad_enabled" in str(node.target) and node.args[0] is False:
                region = node.args[1]
                left_out.add(getattr(node.graph.owning_module, str(region.target)))
    hidden = [part for part in parts if part not in left_out]
    return [n for part in hidden for n in part.graph.nodes if _operation(n) in {*_LOSSES, _OURS}]


def _with_batch_mean(loss: torch.fx.Node) -> torch.fx.Node:
    """Returns the mean if the loss is `kl_div`'s sum for reduction="batchmean", which torch divides."""
    users = list(loss.users)
    if _operation(loss) != "kl_div" or [user.target for user in users] != [torch.ops.aten.div.Tensor]:
        return loss
    shape = loss.args[0].meta["val"].shape  # type: ignore[union-attr]  # it is a node
    return users[0] if users[0].args == (loss, *shape[:1]) else loss


def _put_behind(node: torch.fx.Node, mark: torch.fx.Node) -> None:
    """Makes all users of a mark's operand use the mark."""
    node.replace_all_uses_with(mark, delete_user_cb=lambda user: user is not mark)


def _name_of(mark: torch.fx.Node) -> str:
    """Returns the operation of a loss that was found."""
    return str(mark.args[1])


def _operation(node: torch.fx.Node) -> str | None:
    schema = getattr(node.target, "_schema", None)
    return None if schema is None else str(schema.name).split("::")[-1]

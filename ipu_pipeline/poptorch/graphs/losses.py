"""The loss of a model: the one operation among torch's losses that no other loss is made of.

Where there are several, it is the result of forward that all of them go into, as the half of a sum of two.
"""

from __future__ import annotations

import torch

from ipu_pipeline.poptorch import markers
from ipu_pipeline.poptorch.errors import Error
from ipu_pipeline.poptorch.logs import warn_once
from ipu_pipeline.poptorch.lowering.unsupported import describe_place

__all__ = ["find_marked_loss", "mark_loss"]

# What torch.nn's losses, and identity_loss, are in a graph before it is decomposed.
_LOSSES = frozenset(
    (
        "binary_cross_entropy",
        "binary_cross_entropy_with_logits",
        "cosine_embedding_loss",
        "cross_entropy_loss",
        "ctc_loss",
        "hinge_embedding_loss",
        "huber_loss",
        "identity_loss",
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
_HOW_TO = (
    "Wrap what is to be minimized in poptorch.identity_loss(value, reduction='mean'), and return it from "
    "the model's forward."
)


def mark_loss(graph: torch.fx.Graph) -> None:
    """Puts the marker of the final loss behind the loss.

    Args:
      graph: of `torch.export`, not decomposed.

    Raises:
      Error: there is none; or more than one that no other depends on, and not just one scalar result that
        is made of them all; or it is no floating-point scalar.
    """
    losses = [node for node in graph.nodes if _is_loss(node)]
    if not losses:
        whole = graph.owning_module
        parts = [] if whole is None else [m for m in whole.modules() if isinstance(m, torch.fx.GraphModule)]
        hidden = [node for part in parts for node in part.graph.nodes if _is_loss(node)]
        if hidden:
            raise Error(
                f"The loss is computed in {describe_place(hidden[0])}, within a branch, a loop "
                "or another region of its own, where it cannot be told from the rest. Compute it after the "
                "region; or pass what the region gives through poptorch.identity_loss behind it."
            )
        raise Error(f"Couldn't find a loss in graph! {_HOW_TO}")
    inner: set[torch.fx.Node] = set()
    for loss in losses:
        inner |= _ancestors(loss)
    final = [loss for loss in losses if loss not in inner]
    loss = _with_batch_mean(final[0]) if len(final) == 1 else _joined(graph, final)
    value = loss.meta["val"]
    if value.dim() != 0 or not value.dtype.is_floating_point:
        raise Error(
            f"The loss must be a floating-point scalar; that of {describe_place(loss)} is {value.dtype} of "
            f"shape {tuple(value.shape)}. {_HOW_TO}"
        )
    if followers := [user for user in loss.users if user.op == "call_function"]:
        warn_once(
            f"The loss is what {describe_place(loss)} computes. What {describe_place(followers[0])} makes "
            f"of it is returned, but not minimized. {_HOW_TO}"
        )
    with graph.inserting_after(loss):
        marked = graph.call_function(markers.mark_final_loss(), (loss,))
    marked.meta = dict(loss.meta)
    loss.replace_all_uses_with(marked, delete_user_cb=lambda user: user is not marked)


def _joined(graph: torch.fx.Graph, losses: list[torch.fx.Node]) -> torch.fx.Node:
    """The one scalar result of a graph that several losses all go into."""
    results = {node for node in graph.output_node().all_input_nodes if _is_floating_scalar(node)}
    made_of_all = [node for node in results if set(losses) <= _ancestors(node)]
    if len(made_of_all) == 1:
        return made_of_all[0]
    places = "; ".join(f"{node.target} in {describe_place(node)}" for node in losses)
    raise Error(
        "Multiple independent losses found in graph. Graph must have one final loss. "
        "Wrap final graph loss in poptorch.identity_loss. (It is found without that where one scalar that "
        f"forward returns, and no other, is made of them all.) They are: {places}."
    )


def _is_floating_scalar(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dim() == 0 and value.dtype.is_floating_point


def find_marked_loss(graph: torch.fx.Graph) -> torch.fx.Node:
    """The final loss in a graph that was decomposed after `mark_loss`."""
    (marked,) = (node for node in graph.nodes if node.target is markers.mark_final_loss())
    found: torch.fx.Node = marked
    return found


def _is_loss(node: torch.fx.Node) -> bool:
    return _operation(node) in _LOSSES


def _with_batch_mean(loss: torch.fx.Node) -> torch.fx.Node:
    """For reduction="batchmean" of `kl_div`, torch itself divides the sum: that is the loss then."""
    users = list(loss.users)
    if _operation(loss) != "kl_div" or [user.target for user in users] != [torch.ops.aten.div.Tensor]:
        return loss
    shape = loss.args[0].meta["val"].shape  # type: ignore[union-attr]  # it is a node
    return users[0] if users[0].args == (loss, *shape[:1]) else loss


def _operation(node: torch.fx.Node) -> str | None:
    schema = getattr(node.target, "_schema", None)
    return None if schema is None else str(schema.name).split("::")[-1]


def _ancestors(node: torch.fx.Node) -> set[torch.fx.Node]:
    found: set[torch.fx.Node] = set()
    left = list(node.all_input_nodes)
    while left:
        one = left.pop()
        if one not in found:
            found.add(one)
            left += one.all_input_nodes
    return found

"""Operators that change an argument without saying so in their schema."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from torchbay._control_flow import with_subgraphs
from torchbay._observe import BATCH_NORMS
from torchbay._reason import CannotServe

__all__ = ["reveal_hidden_writes"]

aten = torch.ops.aten

_HONEST = aten._native_batch_norm_legit.default  # noqa: SLF001 - an operator's name
_REFUSED = (
    aten.miopen_batch_norm.default,
    aten.batch_norm_gather_stats.default,
    aten.batch_norm_gather_stats_with_counts.default,
    aten.batch_norm_update_stats.default,
)


def reveal_hidden_writes(module: GraphModule) -> None:
    """Replace batch norms that move their statistics by the operator that says so.

    Otherwise functionalization would not see the write, and a backend might not do it.

    Raises:
        CannotServe: There is no such operator for one of them.
    """
    for graph in with_subgraphs(module):
        for node in list(graph.graph.nodes):
            if node.target in _REFUSED:
                raise CannotServe(f"{node.target} changes its arguments without saying so")
            if node.target in BATCH_NORMS and _moves_statistics(node):
                _replace(graph, node)
        graph.recompile()


def _moves_statistics(node: Node) -> bool:
    return node.args[3] is not None and node.args[4] is not None and bool(node.args[5])


def _replace(module: GraphModule, node: Node) -> None:
    """Use ``_native_batch_norm_legit``, and the backward that goes with it instead of cuDNN's."""
    for user in list(node.users):
        if user.args[1] not in (0, 1, 2):
            _replace_backward(module, user)
    with module.graph.inserting_before(node):
        legit = module.graph.call_function(_HONEST, node.args[:8])
    legit.meta.update(node.meta)
    legit.meta["val"] = tuple(node.meta["val"][:3])
    node.replace_all_uses_with(legit)
    module.graph.erase_node(node)


def _replace_backward(module: GraphModule, workspace: Node) -> None:
    """Let what takes cuDNN's workspace do without it.

    Raises:
        CannotServe: It is used for something else.
    """
    for node in list(workspace.users):
        if node.target is not aten.cudnn_batch_norm_backward.default:
            raise CannotServe(f"{workspace.args[0]} is used for more than its results")
        x, gradient, *rest, eps, _ = node.args
        given = (gradient, x, *rest, True, eps, [True, True, True])
        with module.graph.inserting_before(node):
            backward = module.graph.call_function(aten.native_batch_norm_backward.default, given)
        backward.meta.update(node.meta)
        node.replace_all_uses_with(backward)
        module.graph.erase_node(node)
    module.graph.erase_node(workspace)

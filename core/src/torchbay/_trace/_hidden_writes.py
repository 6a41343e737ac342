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
    """Use ``_native_batch_norm_legit``; cuDNN's further output is for the backward pass only."""
    for user in node.users:
        if user.args[1] not in (0, 1, 2):
            raise CannotServe(f"{node.target} is used for more than its result and statistics")
    with module.graph.inserting_before(node):
        legit = module.graph.call_function(_HONEST, node.args[:8])
    legit.meta.update(node.meta)
    legit.meta["val"] = tuple(node.meta["val"][:3])
    node.replace_all_uses_with(legit)
    module.graph.erase_node(node)

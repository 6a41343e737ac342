"""Operators that a backend asks to keep whole."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch.fx import GraphModule, Node

from torchbay._control_flow import with_subgraphs

__all__ = ["kernels_of", "recompose"]

aten = torch.ops.aten


@attrs.frozen(eq=False)
class _Kernel:
    """A kernel that PyTorch runs for a composite operator, and that operator's arguments."""

    composite: Any
    arguments: Callable[..., tuple[Any, ...] | None]


def _layer_norm(x: Any, shape: Any, weight: Any, bias: Any, eps: Any) -> tuple[Any, ...]:
    return (x, shape, weight, bias, eps)


def _group_norm(
    x: Any, weight: Any, bias: Any, _n: Any, _c: Any, _hw: Any, groups: Any, eps: Any
) -> tuple[Any, ...]:
    return (x, groups, weight, bias, eps)


def _attention(mask_at: int | None, dropout_at: int, causal_at: int) -> Callable[..., Any]:
    """Return how a kernel's arguments map to those of ``scaled_dot_product_attention``."""

    def arguments(*args: Any, attn_mask: Any = None, scale: Any = None) -> tuple[Any, ...] | None:
        given = dict(enumerate(args))
        mask = attn_mask if mask_at is None else given.get(mask_at)
        if given.get(dropout_at, 0.0) != 0.0:
            return None
        return (*args[:3], mask, 0.0, given.get(causal_at, False), scale)

    return arguments


_SDPA = aten.scaled_dot_product_attention.default
_KERNELS: dict[Any, _Kernel] = {
    aten.native_layer_norm.default: _Kernel(aten.layer_norm.default, _layer_norm),
    aten.native_group_norm.default: _Kernel(aten.group_norm.default, _group_norm),
    **{
        getattr(aten, f"_scaled_dot_product_{name}").default: _Kernel(_SDPA, _attention(*places))
        for name, places in {
            "flash_attention_for_cpu": (None, 3, 4),
            "flash_attention": (None, 3, 4),
            "efficient_attention": (3, 5, 6),
            "cudnn_attention": (3, 5, 6),
        }.items()
    },
}


def kernels_of(keep: frozenset[Any]) -> frozenset[Any]:
    """Return the kernels that must not be decomposed for these composites to be found again."""
    return frozenset(target for target, kernel in _KERNELS.items() if kernel.composite in keep)


def recompose(module: GraphModule, keep: frozenset[Any]) -> None:
    """Put composite operators in the place of the kernels PyTorch runs for them.

    A kernel that is used for more than its first result, such as the statistics of a norm, stays.
    """
    for graph in with_subgraphs(module):
        for node in list(graph.graph.nodes):
            kernel = _KERNELS.get(node.target)
            if kernel is None or kernel.composite not in keep or not _is_single(node):
                continue
            if (arguments := kernel.arguments(*node.args, **node.kwargs)) is not None:
                _replace(graph, node, kernel.composite, arguments)
        graph.recompile()


def _is_single(node: Node) -> bool:
    return all(user.target is operator.getitem and user.args[1] == 0 for user in node.users)


def _replace(module: GraphModule, node: Node, composite: Any, arguments: tuple[Any, ...]) -> None:
    *positional, scale = arguments if composite is _SDPA else (*arguments, None)
    keywords = {"scale": scale} if composite is _SDPA and scale is not None else {}
    with module.graph.inserting_before(node):
        whole = module.graph.call_function(composite, tuple(positional), keywords)
    whole.meta = {**node.meta, "val": node.meta["val"][0]}
    for user in list(node.users):
        user.replace_all_uses_with(whole)
        module.graph.erase_node(user)
    module.graph.erase_node(node)

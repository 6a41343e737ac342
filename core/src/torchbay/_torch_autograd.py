"""PyTorch's private names about autograd, all of them, and the partitioner of joint graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.fx import GraphModule, Node, traceback

__all__ = [
    "Partitioner",
    "anchored",
    "edge_of",
    "groups_of",
    "has_gradient_hooks",
    "in_this_thread",
    "is_about_spent_graph",
    "is_in_backward",
    "is_plain_view",
    "is_spent",
    "keeps_graph",
    "note_phase",
    "partitioned",
    "roots_behind",
    "runs_python",
    "without_autocast",
]

Partitioner = Literal["min_cut", "default"]


def has_gradient_hooks(tensor: torch.Tensor) -> tuple[int, int]:
    """Return how many hooks wait for a tensor's gradient: when it is known, when it is added."""
    after = getattr(tensor, "_post_accumulate_grad_hooks", None)
    return len(tensor._backward_hooks or ()), len(after or ())


@contextlib.contextmanager
def in_this_thread() -> Iterator[None]:
    """Have autograd run backward functions in the thread that asks for gradients."""
    with torch.autograd.set_multithreading_enabled(False):
        yield


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """Switch autocast off, as a backward outside an autocast region finds it."""
    with torch._C._DisableAutocast():
        yield


class _Anchor(torch.autograd.Function):
    """Stands for whatever computed an input before the call."""

    @staticmethod
    def forward(ctx: Any, past: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        del past
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        del ctx
        raise PastInput


class PastInput(Exception):
    """A backward went on to what computed an input before the call."""


def anchored(fake: torch.Tensor) -> torch.Tensor:
    """Let a fake need gradients as a tensor does that was computed before the call.

    A backward that goes past it raises `PastInput`.
    """
    with torch.enable_grad():
        result: torch.Tensor = _Anchor.apply(torch.empty(0, requires_grad=True), fake)
    return result


def edge_of(tensor: torch.Tensor) -> GradientEdge:
    """Return where autograd hands over the gradient of a tensor as it is now."""
    return get_gradient_edge(tensor)


_VIEWS = frozenset(
    f"{name}Backward{number}"
    for number in range(4)
    for name in (
        "Alias",
        "AsStrided",
        "Diagonal",
        "Expand",
        "Permute",
        "ReshapeAlias",
        "Select",
        "Slice",
        "Split",
        "SplitWithSizes",
        "Squeeze",
        "T",
        "Transpose",
        "Unbind",
        "Unfold",
        "Unsqueeze",
        "View",
    )
)
"""Autograd's names for views whose gradient is that of a view by strides."""


def is_plain_view(tensor: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether views alone lead from one tensor to the other, as autograd sees it."""
    if not base.requires_grad:
        return False
    node, end = tensor.grad_fn, edge_of(base).node
    while node is not None and node is not end and node.name() in _VIEWS:
        node = node.next_functions[0][0]
    return node is end


_SPENT = "second time"


def is_about_spent_graph(error: RuntimeError) -> bool:
    """Whether autograd raised because a backward has let go of what it needs."""
    return _SPENT in str(error)


def is_spent(tensor: torch.Tensor) -> bool:
    """Whether a backward has let go of what the gradient of a tensor is computed from."""
    return any(map(_has_let_go, _nodes_behind(tensor, set())))


def keeps_graph() -> bool:
    """Whether the backward that runs in this thread was asked to keep what it uses."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def groups_of(
    roots: Sequence[torch.Tensor], edges: Sequence[GradientEdge]
) -> tuple[frozenset[int], ...]:
    """Return which roots a backward of any one of them uses up, as autograd sees it.

    Args:
        roots: The roots.
        edges: Where their history ends, as far as it belongs to them.
    """
    ends = {edge.node for edge in edges}
    groups: list[tuple[set[int], set[Any]]] = []
    for number, root in enumerate(roots):
        members, nodes = {number}, _saving_nodes(root, ends)
        for group in [g for g in groups if not g[1].isdisjoint(nodes)]:
            groups.remove(group)
            members, nodes = members | group[0], nodes | group[1]
        groups.append((members, nodes))
    return tuple(frozenset(members) for members, _ in groups)


def roots_behind(
    roots: Sequence[torch.Tensor], edges: Sequence[GradientEdge]
) -> list[frozenset[int]]:
    """Return, for each edge, the roots that autograd gets to it from."""
    behind = [_nodes_behind(root, set()) for root in roots]
    return [frozenset(i for i, nodes in enumerate(behind) if e.node in nodes) for e in edges]


def runs_python(roots: Sequence[torch.Tensor], edges: Sequence[GradientEdge]) -> bool:
    """Whether a backward from roots to edges runs functions that are written in Python."""
    ends = {edge.node for edge in edges}
    nodes = {node for root in roots for node in _nodes_behind(root, ends)}
    return any(isinstance(node, torch.autograd.function.BackwardCFunction) for node in nodes)


def _nodes_behind(root: torch.Tensor, ends: set[Any]) -> set[Any]:
    """Return the functions behind a root, those of the ends and behind them left out."""
    pending, seen = [root.grad_fn], set(ends)
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            pending += [following for following, _ in node.next_functions]
    return seen - ends


def _saving_nodes(root: torch.Tensor, ends: set[Any]) -> set[Any]:
    """Return the functions behind a root that keep something for their backward."""
    nodes = _nodes_behind(root, ends)
    return {n for n in nodes if any(name.startswith("_raw_saved") for name in dir(n))}


def _has_let_go(node: Any) -> bool:
    saved = [name for name in dir(node) if name.startswith("_raw_saved") or name == "saved_tensors"]
    try:
        for name in saved:
            getattr(node, name.replace("_raw", ""))
    except RuntimeError as error:
        return is_about_spent_graph(error)
    return False


# A field that torch copies to the nodes which are traced, once again when a graph is traced anew.
_PHASE = "custom"
_BACKWARD = "torchbay_backward"
_WITHIN, _AFTER = "within the call", "after the call"


def note_phase(*, is_after: bool) -> None:
    """Have what is traced next know whether a backward does it.

    Args:
        is_after: Whether that would be one after the call.
    """
    # What a program annotates stands in the same field.
    noted = {k: v for k, v in traceback.current_meta.get(_PHASE, {}).items() if k != _BACKWARD}
    if torch._C._current_autograd_node() is not None:
        noted[_BACKWARD] = _AFTER if is_after else _WITHIN
    if noted or _PHASE in traceback.current_meta:
        traceback.current_meta[_PHASE] = noted


def is_in_backward(node: Node) -> bool:
    """Whether a backward did what a node stands for."""
    return _BACKWARD in node.meta.get(_PHASE, ())


def _mark_forward(joint: GraphModule) -> None:
    """Tell the default partitioner where the forward ends, or it would keep nothing at all."""
    last = None
    for node in joint.graph.nodes:
        if node.meta.get(_PHASE, {}).get(_BACKWARD) == _AFTER:
            break
        last = node if node.op == "call_function" else last
    if last is not None:
        last.meta["partitioner_tag"] = "is_forward"


def partitioned(
    joint: GraphModule, forward_outputs: int, partitioner: Partitioner, states: Sequence[int]
) -> tuple[GraphModule, GraphModule]:
    """Split a joint graph into its forward and its backward half.

    The forward half returns what the joint graph returns first, then what the backward half needs,
    which it takes under the same names, before the tangents.

    Args:
        joint: A functional graph; inputs named ``tangents_...`` belong to the backward half.
        forward_outputs: How many of its outputs belong to the forward half.
        partitioner: ``min_cut`` computes again what is cheaper to compute than to keep
            (``torch._functorch.partitioners.min_cut_rematerialization_partition``); ``default``
            keeps everything.
        states: The inputs that are there anyway, so that keeping one costs nothing. A view of one
            is then made again: kept, it would look like memory that the backward half can free.
    """
    from torch._functorch import partitioners

    if partitioner == "default":
        _mark_forward(joint)
    split: Callable[..., Any] = _PARTITIONERS[partitioner](partitioners)
    forward, backward = split(
        joint, (), num_fwd_outputs=forward_outputs, static_lifetime_input_indices=list(states)
    )
    return forward, backward


_PARTITIONERS: Mapping[str, Callable[[Any], Any]] = {
    "min_cut": lambda module: module.min_cut_rematerialization_partition,
    "default": lambda module: module.default_partition,
}

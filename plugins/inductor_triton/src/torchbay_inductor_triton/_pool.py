"""Copies of outputs that CUDA graphs would overwrite in their next replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ._views import viewed

__all__ = ["leaving_pool"]

_Run = Callable[[list[Any]], Sequence[Any]]
_Storages = dict[int, torch.UntypedStorage]


def leaving_pool(run: _Run, module: GraphModule) -> _Run:
    """Return ``run`` with outputs in memory of their own.

    Without it a result that the caller still holds would change silently.
    """
    [output] = module.graph.find_nodes(op="output")
    nodes: Any = output.args[0]
    owners = [viewed(node) for node in nodes]
    simple = [
        owners.count(owner) == 1 and _clone_keeps_strides(node)
        for node, owner in zip(nodes, owners, strict=True)
    ]

    def run_and_copy(inputs: list[Any]) -> Sequence[Any]:
        copies: _Storages = {}
        return [
            tensor.clone() if alone else _copied(tensor, copies)
            for tensor, alone in zip(run(inputs), simple, strict=True)
        ]

    return run_and_copy


def _clone_keeps_strides(node: Node) -> bool:
    value = node.meta["val"]
    return bool(value.clone().stride() == value.stride())


def _copied(tensor: torch.Tensor, copies: _Storages) -> torch.Tensor:
    """Copy the storage, once for all tensors that share it, and view the copy likewise."""
    storage = tensor.untyped_storage()
    key = storage.data_ptr()
    if key not in copies:
        copies[key] = storage.clone()
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(copies[key], tensor.storage_offset(), tensor.shape, tensor.stride())

"""PyTorch's private names, all of them; no other file of this plugin touches any."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

__all__ = ["arguments"]


def arguments(node: Node) -> list[Any]:
    """Return a node's arguments in the order of its operator's schema, with the defaults."""
    target: Any = node.target
    missing = target._schema.arguments[len(node.args) :]
    return [
        *node.args,
        *(node.kwargs.get(argument.name, argument.default_value) for argument in missing),
    ]

"""Python code for a graph whose inputs arrive in one list, which it empties."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

from torch.fx import GraphModule
from torch.fx.graph import CodeGen

__all__ = ["boxed_function"]


def boxed_function(graph: GraphModule) -> Callable[[list[Any]], Sequence[Any]]:
    """Return ``run(inputs)`` for a graph; ``graph`` itself stays as it is."""
    copied = _without_metadata(graph)
    copied.graph.set_codegen(_ListCodeGen())
    copied.recompile()
    run: Callable[[list[Any]], Sequence[Any]] = copied.forward
    return run


def _without_metadata(graph: GraphModule) -> GraphModule:
    """Return a copy without fake tensors and stack traces, which would outlive the request."""
    nodes = deepcopy(graph.graph)
    for node in nodes.nodes:
        node.meta.clear()
    copied = GraphModule(graph, nodes, "EagerGraph")
    for name, inner in copied.named_children():
        if isinstance(inner, GraphModule):
            setattr(copied, name, _without_metadata(inner))
    return copied


class _ListCodeGen(CodeGen):
    """Generates ``def forward(self, inputs)`` that takes the list apart first.

    The caller's references end there, so an input dies after its last use in the graph.
    """

    def gen_fn_def(
        self,
        free_vars: list[str],
        maybe_return_annotation: str,
        *,
        expanded_def: bool = False,  # noqa: ARG002
    ) -> str:
        names = [_bare(variable) for variable in free_vars if variable != "self"]
        unpack = f"\n    {', '.join(names)}, = inputs" if names else ""
        return f"def forward(self, inputs){maybe_return_annotation}:{unpack}\n    inputs.clear()"


def _bare(variable: str) -> str:
    """Strip the annotation and the default from ``name: type = default``."""
    return variable.partition(":")[0].partition("=")[0].strip()

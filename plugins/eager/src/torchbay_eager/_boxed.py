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
    copied = deepcopy(graph.graph)
    copied.set_codegen(_ListCodeGen())
    # Fake tensors and stack traces would outlive the request.
    for node in copied.nodes:
        node.meta.clear()
    run: Callable[[list[Any]], Sequence[Any]] = GraphModule(graph, copied, "EagerGraph").forward
    return run


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

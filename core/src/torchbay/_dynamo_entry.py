"""Lets ``torch.compile(..., backend="torchbay")`` compile with a torchbay backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.fx import GraphModule

from torchbay._compiled import compile  # noqa: A004 - named as torch.compile is

__all__ = ["torchbay_backend"]


def torchbay_backend(
    graph: GraphModule,
    example_inputs: Sequence[Any],  # noqa: ARG001 - part of Dynamo's calling convention
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Return what serves the calls of a graph that Dynamo captured.

    Args:
        graph: Dynamo's graph, at its first call captured anew as any function is.
        example_inputs: Unused: that call brings the real ones.
        mode: Passed on to the backend.
        options: ``backend`` chooses it, as in `torchbay.compile`; the others are its options.
    """
    given = dict(options or {})
    backend = given.pop("backend", None)
    # Dynamo's own module writes its code in its first call, which would count as an effect.
    written = GraphModule(graph, graph.graph)
    compiled = compile(
        written, backend=backend, mode=mode, options=given or None, name="torch_compile"
    )

    # Of a module Dynamo would call the forward, and that is the graph's own.
    def run(*inputs: Any) -> Any:
        return compiled(*inputs)

    return run

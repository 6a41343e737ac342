"""Lets ``torch.compile(..., backend="torchbay")`` compile with a torchbay backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.fx import GraphModule

from torchbay._compiled import compile  # noqa: A004 - named as torch.compile is
from torchbay._dynamo import GraphServer, has_symbolic_sizes
from torchbay._registry import choose
from torchbay._settings import Settings
from torchbay.errors import TorchbayError

__all__ = ["torchbay_backend"]


def torchbay_backend(
    graph: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Return what serves the calls of a graph that Dynamo captured.

    Args:
        graph: Dynamo's graph.
        example_inputs: Its inputs at the call that Dynamo captured.
        mode: Passed on to the backend.
        options: ``backend`` chooses it, as in `torchbay.compile`; the others are its options.
    """
    given = dict(options or {})
    settings = Settings(
        backend=given.pop("backend", None),
        mode=mode,
        options=given or None,
        tracer="dynamo",
        name="torch_compile",
    )
    settings.check_backend()
    backend = choose(settings.backend)
    if has_symbolic_sizes(graph) and not backend.capabilities.dynamic_shapes:
        return _captured_anew(graph, settings)
    try:
        return GraphServer(settings, "torch_compile")(graph, example_inputs)
    except TorchbayError as error:
        return _raiser(error)


def _raiser(error: TorchbayError) -> Callable[..., Any]:
    """Return what raises an error when it is called: Dynamo would wrap it in one of its own."""

    def run(*_inputs: Any) -> Any:
        raise error.with_traceback(None)

    return run


def _captured_anew(graph: GraphModule, settings: Settings) -> Callable[..., Any]:
    """Return the graph captured as any function is, once for each size it meets."""
    # Dynamo's own module writes its code in its first call, which would count as an effect.
    written = GraphModule(graph, graph.graph)
    compiled = compile(
        written,
        backend=settings.backend,
        mode=settings.mode,
        options=settings.options,
        name=settings.name,
    )

    # Of a module Dynamo would call the forward, and that is the graph's own.
    def run(*inputs: Any) -> Any:
        return compiled(*inputs)

    return run

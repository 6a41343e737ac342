"""Fifth stage: a lowered graph becomes something callable."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from torchbay._lower import Lowered
from torchbay._observe import unmoved_generators
from torchbay._registry import account
from torchbay._trace import Trace
from torchbay.errors import BackendFailed
from torchbay.plugin import Backend, CompileRequest, Executable, UnsupportedGraph

__all__ = ["build"]


def build(lowered: Lowered, trace: Trace, backend: Backend, options: Any, name: str) -> Executable:
    """Compile a graph with a backend.

    Raises:
        UnsupportedGraph: The backend declines it, or does not claim its device or dtypes.
        BackendFailed: The backend raised anything else, or made something that cannot run.
    """
    request = _request(lowered, trace, options, name)
    _check_claims(backend, request)
    try:
        with torch.no_grad(), unmoved_generators():
            executable = backend.compile(request)
    except (UnsupportedGraph, BackendFailed):
        raise
    except Exception as error:
        raise BackendFailed(
            f"compiling {name} raised {error!r}",
            account=account(backend),
            remedy="Report it to the backend's authors with the graph that explain() prints, "
            "or choose another backend",
        ) from error
    if not callable(getattr(executable, "run", None)):
        raise BackendFailed(
            f"compiling {name} returned {executable!r}, which has no run(inputs)",
            account=account(backend),
            remedy="A backend's compile() returns an Executable",
        )
    return executable


def _request(lowered: Lowered, trace: Trace, options: Any, name: str) -> CompileRequest:
    assert lowered.graph is not None
    written = set(lowered.written) if lowered.by_backend else set()
    fakes = [trace.fakes[i] for i in lowered.inputs]
    return CompileRequest(
        graph=lowered.graph,
        example_inputs=fakes,
        state_count=sum(trace.inputs[i].is_state for i in lowered.inputs),
        mutated=frozenset(p for p, i in enumerate(lowered.inputs) if i in written),
        device=_device(lowered.graph),
        options=options,
        name=name,
    )


def _tensors(graph: torch.fx.GraphModule) -> Iterator[torch.Tensor]:
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        for part in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(part, torch.Tensor):
                yield part


def _device(graph: torch.fx.GraphModule) -> torch.device:
    """Return the first device other than the CPU, or the CPU."""
    devices = (tensor.device for tensor in _tensors(graph))
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def _check_claims(backend: Backend, request: CompileRequest) -> None:
    claims = backend.capabilities
    for tensor in _tensors(request.graph):
        if tensor.device.type not in claims.devices:
            raise UnsupportedGraph(
                f"the graph runs on {tensor.device.type}",
                account=account(backend),
                remedy=f"It compiles for {', '.join(sorted(claims.devices))}",
            )
        if claims.dtypes is not None and tensor.dtype not in claims.dtypes:
            raise UnsupportedGraph(f"the graph uses {tensor.dtype}", account=account(backend))

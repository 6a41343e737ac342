"""The Inductor backend: what it claims, what it declines, and one compilation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch

from torchbay.plugin import Capabilities, CompileRequest, UnsupportedGraph

from . import _toolchain, _torch_compat
from ._layout import as_promised, broken_promises
from ._options import InductorOptions
from ._pool import leaving_pool
from ._views import making_views, split_views

__all__ = ["InductorBackend", "InductorExecutable"]


@attrs.frozen
class InductorExecutable:
    """Calls Inductor's generated code directly.

    ``code`` owns what ``run`` reaches only by reference, such as recorded CUDA graphs.
    """

    run: Callable[[list[Any]], Sequence[Any]]
    code: object = attrs.field(repr=False)
    output_strides: Sequence[Sequence[Any]] = attrs.field(repr=False)


@attrs.frozen
class InductorBackend:
    """Compiles graphs for CPU and CUDA."""

    name: str = "inductor_triton"
    api_version: int = 1
    options: type[InductorOptions] = InductorOptions
    capabilities: Capabilities = Capabilities(
        devices=frozenset({"cpu", "cuda"}),
        decompositions=_torch_compat.decompositions,
        dynamic_shapes=True,
        training=True,
        mutation=True,
        control_flow=True,
    )

    def fingerprint(self) -> Mapping[str, str]:
        """Name the versions, compilers and processors that shape the generated code."""
        return _toolchain.components()

    def compile(self, request: CompileRequest) -> InductorExecutable:
        """Generate, build and load code for ``request.graph``."""
        _decline_unfit(request)
        _toolchain.require_compiler(request.device)
        on_gpu = request.device.type == "cuda"
        graph, views = (
            split_views(request.graph, request.free_strides) if on_gpu else (request.graph, {})
        )
        settings = dict(request.options.settings)
        with _torch_compat.settings_applied(settings), _generators_kept(request.device):
            kept = [i for i in range(_output_count(request)) if i not in views]
            free = frozenset(at for at, i in enumerate(kept) if i in request.free_strides)
            rest = attrs.evolve(request, graph=graph, free_strides=free)
            code, chosen = _torch_compat.generate(rest)
            run = as_promised(_torch_compat.entry_point(code), _broken(graph, chosen, free))
            if on_gpu and _torch_compat.uses_cuda_graphs():
                run = leaving_pool(_torch_compat.starting_a_step(run), graph)
        return InductorExecutable(making_views(run, views), code, _strides(request, kept, chosen))


def _output_count(request: CompileRequest) -> int:
    return len(request.graph.graph.output_node().args[0])  # type: ignore[arg-type]


def _strides(
    request: CompileRequest, kept: Sequence[int], chosen: Sequence[Sequence[Any] | None]
) -> list[Sequence[Any]]:
    """Return the strides of all outputs, given what Inductor chose for those it computes."""
    nodes: Any = request.graph.graph.output_node().args[0]
    strides: list[Sequence[Any]] = [node.meta["val"].stride() for node in nodes]
    for position, found in zip(kept, chosen, strict=True):
        if position in request.free_strides and found is not None:
            strides[position] = tuple(found)
    return strides


def _broken(
    graph: torch.fx.GraphModule, chosen: Sequence[Sequence[Any] | None], free: frozenset[int]
) -> dict[int, tuple[int, ...]]:
    nodes: Any = graph.graph.output_node().args[0]
    return broken_promises([node.meta["val"] for node in nodes], chosen, free)


def _decline_unfit(request: CompileRequest) -> None:
    for node in request.graph.graph.nodes:
        if not _torch_compat.takes_control_flow(node):
            raise UnsupportedGraph(
                f"'{node.name}', a {node.target}, is control flow that Inductor does not take",
                account="torchbay-inductor-triton",
                remedy="Use backend='eager' for this function.",
            )
        if reason := _unfit(node):
            raise UnsupportedGraph(
                f"'{node.name}' {reason}, and Inductor reads plain strided memory",
                account="torchbay-inductor-triton",
                remedy="Use backend='eager' for this function.",
            )


def _unfit(node: torch.fx.Node) -> str:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return ""
    if value.layout is not torch.strided:
        return f"has layout {value.layout}"
    # Inside the graph the sign is an operator like any other.
    if value.is_neg() and (node.op == "placeholder" or _is_output(node)):
        return "is a lazy negation"
    return ""


def _is_output(node: torch.fx.Node) -> bool:
    return any(user.op == "output" for user in node.users)


def _generators_kept(device: torch.device) -> Any:
    """Restore the random generators afterwards: passes and autotuning may draw from them."""
    devices = [device] if device.type == "cuda" else []
    return torch.random.fork_rng(devices)

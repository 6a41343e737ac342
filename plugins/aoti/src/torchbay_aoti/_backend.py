"""The AOTInductor backend: what it claims, what it declines, and one compilation."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attrs
import torch

from torchbay.plugin import Capabilities, CompileRequest, UnsupportedGraph

from . import _package, _toolchain
from ._inputs import checking, copying_back, specs_of
from ._options import AotiOptions

__all__ = ["AotiBackend", "AotiExecutable"]


@attrs.frozen
class AotiExecutable:
    """Calls a loaded package; inputs that its machine code does not fit are refused."""

    run: Callable[[list[Any]], Sequence[Any]]


@attrs.frozen
class AotiBackend:
    """Compiles static graphs for CPU and CUDA; weights stay inputs."""

    name: str = "aoti"
    api_version: int = 1
    options: type[AotiOptions] = AotiOptions
    # AOTInductor traces the graph again and decomposes it itself.
    capabilities: Capabilities = Capabilities(
        devices=frozenset({"cpu", "cuda"}), mutation=True, thread_safe=True
    )

    def fingerprint(self) -> Mapping[str, str]:
        """Name the versions, compilers and processors that shape the machine code."""
        return _toolchain.components()

    def compile(self, request: CompileRequest) -> AotiExecutable:
        """Build a package for ``request.graph``, load it, and see that its files go."""
        _decline_unfit(request)
        _toolchain.require_compiler()
        with contextlib.ExitStack() as files:
            directory = files.enter_context(TemporaryDirectory(prefix="torchbay-aoti-"))
            executable = _loaded(request, Path(directory))
            if request.device.type == "cuda":
                # Each kernel is read from there at its first launch.
                weakref.finalize(executable, files.pop_all().close)
        return executable


def _loaded(request: CompileRequest, directory: Path) -> AotiExecutable:
    run = _package.load(_package.build(request, directory), request.device)
    if request.device.type == "cuda" and request.mutated:
        run = copying_back(run, sorted(request.mutated))
    return AotiExecutable(checking(run, specs_of(request.example_inputs)))


def _decline_unfit(request: CompileRequest) -> None:
    for node in request.graph.graph.nodes:
        if reason := _unfit(node):
            raise UnsupportedGraph(
                f"'{node.name}' {reason}, and AOTInductor reads plain strided memory",
                account="torchbay-aoti",
                remedy="Use backend='eager' for this function.",
            )


def _unfit(node: torch.fx.Node) -> str:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return ""
    if value.layout is not torch.strided:
        return f"has layout {value.layout}"
    if node.op == "placeholder" and value.is_conj():
        return "is a lazy conjugate"
    # Inside the graph the sign is an operator like any other.
    if value.is_neg() and (node.op == "placeholder" or _is_output(node)):
        return "is a lazy negation"
    return ""


def _is_output(node: torch.fx.Node) -> bool:
    return any(user.op == "output" for user in node.users)

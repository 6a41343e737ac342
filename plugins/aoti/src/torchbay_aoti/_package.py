"""Packages: built from a graph, proven loadable in a child process, loaded."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from torchbay.errors import BackendFailed
from torchbay.plugin import CompileRequest

from . import _torch_compat

__all__ = ["build", "load"]


def build(request: CompileRequest, directory: Path) -> Path:
    """Compile ``request.graph`` to a package file in ``directory``."""
    settings = {
        **request.options.settings,
        "aot_inductor.package": True,
        "aot_inductor.output_path": str(directory / "build"),
        # Small tensors of the graph stay tensors, and folding never bakes a mutated one.
        "always_keep_tensor_constants": True,
        "joint_graph_constant_folding": False,
    }
    devices = [request.device] if request.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        return _torch_compat.write_package(request, settings, directory / "graph.pt2")


def load(path: Path, device: torch.device) -> Callable[[list[Any]], Sequence[Any]]:
    """Return the function in a package, whose files are unpacked beside it."""
    index = _device_index(device)
    with _unpacking_to(path.parent):
        if not _loading_is_proven():
            _prove_loading(path, index)
        return _torch_compat.load_package(path, index)


@contextlib.contextmanager
def _unpacking_to(directory: Path) -> Iterator[None]:
    """Steer the loader, which leaves its folder behind when the process ends or crashes."""
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(directory)
    try:
        yield
    finally:
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before


def _device_index(device: torch.device) -> int:
    if device.type != "cuda":
        return -1
    return torch.cuda.current_device() if device.index is None else device.index


_proven = False


def _loading_is_proven() -> bool:
    return _proven or not sys.executable


def _prove_loading(path: Path, index: int) -> None:
    """Load the package in a child first: where toolchains clash, loading kills the process.

    Once for each process: the clash lies between two libraries, not in a graph.
    """
    global _proven
    program = _torch_compat.LOADING_PROGRAM.format(path=str(path), index=index)
    command = [sys.executable, "-P", "-c", program]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    if child.returncode < 0:
        raise _crash(signal.Signals(-child.returncode).name)
    _proven = True


def _crash(signal_name: str) -> BackendFailed:
    return BackendFailed(
        f"loading the compiled package kills the process ({signal_name}): most likely it mixes "
        "the C++ standard library of the compiler with the copy inside PyTorch",
        account="backend 'aoti'",
        remedy="Start Python with LD_PRELOAD=$(g++ -print-file-name=libstdc++.so.6).",
    )

"""Tries one backend on one device, in a process that may die of it.

Run as ``python -m torchbay.cli._probe REPORT [NAME DEVICE]``. Each line of the report is a JSON
document, written at once, so that the last ones say how far a process got that died.
"""

from __future__ import annotations

import json
import platform
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import torchbay
from torchbay._registry import load
from torchbay.errors import NotServed, TorchbayError, UnsupportedGraph
from torchbay.plugin import API_VERSION, OLDEST_API_VERSION, Backend

Note = Callable[..., None]

_TOLERANCE = 0.05  # of values around 4, in half precision
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def main(report: str, *subject: str) -> None:
    """Examine a backend on a device, or this machine if none is named."""

    def note(**fields: Any) -> None:
        with Path(report).open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(fields) + "\n")

    note(**_attempt(note, *subject) if subject else _machine())
    note(step="shutting down")


def _machine() -> dict[str, Any]:
    return {
        "torchbay": torchbay.__version__,
        "plugin_api": sorted({OLDEST_API_VERSION, API_VERSION}),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": _version("triton"),
        "gpus": _gpus(),
        "devices": _devices(),
    }


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _gpus() -> list[str]:
    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _devices() -> list[str]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return ["cpu", accelerator.type] if accelerator else ["cpu"]


def _attempt(note: Note, name: str, device: str) -> dict[str, str]:
    try:
        return _examine(name, device, note)
    except (Exception, SystemExit) as error:  # noqa: BLE001  whatever a backend raises
        return {"state": "fails", **_parts(error), "output": traceback.format_exc()}


def _examine(name: str, device: str, note: Note) -> dict[str, str]:
    """Return the verdict; what the backend raises is one as well."""
    note(step="importing its plugin")
    backend = load(name)
    claimed = backend.capabilities.devices
    note(api_version=backend.api_version, claims=sorted(claimed))
    if device not in claimed:
        return {"state": "unclaimed"}
    inputs = _inputs(backend, device)
    try:
        _serve(_layer, name, inputs, note)
    except (NotServed, UnsupportedGraph):
        return _served_least(name, inputs, note)
    return {"state": "works"}


def _served_least(name: str, inputs: Sequence[Tensor], note: Note) -> dict[str, str]:
    """Try again with the one operator that every backend can be expected to have."""
    try:
        _serve(torch.add, name, inputs, note)
    except (NotServed, UnsupportedGraph) as refusal:
        return {"state": "declines", **_parts(refusal)}
    return {"state": "works"}


def _inputs(backend: Backend, device: str) -> list[Tensor]:
    claimed = backend.capabilities.dtypes
    dtype = next((one for one in _DTYPES if claimed is None or one in claimed), _DTYPES[0])
    ramp = torch.linspace(-1, 1, 16 * 16).reshape(16, 16)
    return [ramp.to(device, dtype), ramp.flip(0).to(device, dtype)]


def _layer(x: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x @ weight) + 1


def _serve(
    function: Callable[..., Tensor], name: str, inputs: Sequence[Tensor], note: Note
) -> None:
    """Compile and run a function; raises if the backend declines it, fails, or is wrong."""
    expected = function(*inputs)
    compiled = torchbay.compile(function, backend=name, fullgraph=True, fallback=None)
    note(step="compiling")
    compiled(*inputs)
    note(step="running what it compiled")
    _compare(compiled(*inputs), expected)
    if not torchbay.explain(compiled).calls["graph"]:
        raise RuntimeError("no call was served from a graph")


def _compare(actual: Tensor, expected: Tensor) -> None:
    distance = float((actual.double() - expected.double()).abs().max())
    # Not "above": a distance of NaN is wrong too.
    if not distance <= _TOLERANCE:
        raise RuntimeError(f"its result is wrong: {distance:.3g} away from eager's")


def _parts(error: BaseException) -> dict[str, str]:
    if isinstance(error, TorchbayError):
        return {"what": error.what, "account": error.account, "remedy": error.remedy}
    return {"what": repr(error)}


if __name__ == "__main__":
    with torch.no_grad():
        main(*sys.argv[1:])

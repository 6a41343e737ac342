"""Finds out what a machine offers to compilers."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from torchbay.cli._child import Child, probe
from torchbay.cli._remedies import INSTALL_COMPILER, INSTALL_TRITON

__all__ = ["Finding", "Machine", "look_around", "standard_library"]


@attrs.frozen(kw_only=True)
class Finding:
    """Something about the machine, and what to do about it."""

    what: str
    remedy: str


@attrs.frozen(kw_only=True)
class Machine:
    """What backends find here.

    Attributes:
        versions: Of torchbay, its plugin API, Python, torch, CUDA and Triton; and the GPUs' names.
        compiler: The first line of what the C++ compiler says about its version.
        devices: Types of device; none if not even PyTorch can be imported.
        findings: What may stand in a backend's way.
    """

    versions: Mapping[str, Any]
    compiler: str | None
    devices: Sequence[str]
    findings: Sequence[Finding]


def look_around(timeout: float) -> Machine:
    """Describe this machine. PyTorch is asked in a child process as well."""
    child = probe(timeout=timeout)
    devices = child.notes.get("devices", [])
    versions = {name: child.notes[name] for name in child.notes.keys() - {"devices", "step"}}
    compiler = _compiler()
    return Machine(
        versions=versions,
        compiler=_first_line([compiler, "--version"]) if compiler else None,
        devices=devices,
        findings=_findings(versions, compiler) if devices else [_no_torch(child)],
    )


def standard_library() -> str | None:
    """Return the path of the C++ compiler's standard library, if there is one."""
    compiler = _compiler()
    found = _first_line([compiler, "-print-file-name=libstdc++.so.6"]) if compiler else ""
    return found if Path(found).is_absolute() else None


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++"))


def _first_line(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return repr(error)
    return done.stdout.strip().partition("\n")[0]


def _findings(versions: Mapping[str, Any], compiler: str | None) -> list[Finding]:
    found = []
    if compiler is None:
        found.append(Finding(what="no C++ compiler was found", remedy=INSTALL_COMPILER))
    if Path("/dev/nvidiactl").exists() and not versions["gpus"]:
        found.append(_unusable_gpu(versions))
    if versions["gpus"] and versions["triton"] is None:
        found.append(Finding(what="Triton is not installed", remedy=INSTALL_TRITON))
    return found


def _unusable_gpu(versions: Mapping[str, Any]) -> Finding:
    torch, cuda = versions["torch"], versions["cuda"]
    if cuda is None:
        return Finding(
            what=f"there is an NVIDIA GPU, and torch {torch} is built without CUDA",
            remedy="Install a CUDA build of PyTorch: https://pytorch.org/get-started/locally",
        )
    return Finding(
        what=f"there is an NVIDIA GPU, and torch {torch} cannot use it",
        remedy=f"Update its driver to one for CUDA {cuda}, and look at CUDA_VISIBLE_DEVICES",
    )


def _no_torch(child: Child) -> Finding:
    last = child.output.strip().rpartition("\n")[2]
    return Finding(
        what=f"PyTorch cannot be used: {child.end}: {last}",
        remedy="Reinstall torch and torchbay: without them no backend can be checked",
    )

"""The compilers and processors that generated code depends on."""

from __future__ import annotations

import functools
import platform
import subprocess
from collections.abc import Mapping
from importlib import metadata

import torch

from torchbay.errors import BackendFailed

from . import _torch_compat

__all__ = ["components", "require_compiler"]


def components() -> Mapping[str, str]:
    """Return every version and processor by name, the same in each process of one toolchain."""
    return {
        "torch": torch.__version__,
        "torch_git": str(torch.version.git_version),
        "triton": _triton_version(),
        "compiler": _compiler_version(_torch_compat.cpp_compiler()),
        "machine": platform.machine(),
        "cpu_isa": torch.backends.cpu.get_cpu_capability(),
        "gpus": _gpus(),
        "settings": _torch_compat.settings_digest(),
    }


def require_compiler(device: torch.device) -> None:
    """Raise `BackendFailed` where CPU code is wanted and nothing can build it."""
    compiler = _torch_compat.cpp_compiler()
    if device.type == "cpu" and compiler is None:
        raise BackendFailed(
            "Inductor found no C++ compiler",
            account="backend 'inductor_triton'",
            remedy="Install g++, or name a compiler in the environment variable CXX.",
        )


def _triton_version() -> str:
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return "none"


@functools.cache
def _compiler_version(compiler: str | None) -> str:
    if compiler is None:
        return "none"
    shown = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    # The rest of the first line repeats how the compiler was called.
    return shown.stdout.partition("\n")[0].rpartition("/")[2]


def _gpus() -> str:
    if not torch.cuda.is_available():
        return "none"
    found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return ", ".join(sorted({f"{gpu.name} sm_{gpu.major}{gpu.minor}" for gpu in found}))

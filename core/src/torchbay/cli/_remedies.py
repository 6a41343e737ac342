"""What helps against the failures of toolchains, known by what their errors say."""

from __future__ import annotations

import re

__all__ = ["INSTALL_COMPILER", "INSTALL_TRITON", "known_remedy"]

INSTALL_COMPILER = (
    "Install g++ (Debian and Ubuntu: apt install g++; Fedora: dnf install gcc-c++), "
    "or name a C++ compiler in the environment variable CXX"
)
INSTALL_TRITON = "Install the Triton that this PyTorch was made for: pip install triton"

_REMEDIES = {
    r"InvalidCxxCompiler|[Nn]o (working )?C\+\+ compiler": INSTALL_COMPILER,
    r"Python\.h: No such file": "Install Python's headers, e.g. apt install python3-dev",
    r"cannot find 'ld'": "Install binutils",
    r"TritonMissing|[Nn]o working triton|No module named 'triton'": INSTALL_TRITON,
    r"no kernel image is available": "Install a PyTorch that was built for this GPU",
    r"driver version is insufficient": "Update the NVIDIA driver",
    r"died of SIGKILL|out of memory": "Free memory, or try on a machine with more of it",
    r"No space left on device": "Make room in the folder for temporary files (TMPDIR)",
}


def known_remedy(text: str) -> str | None:
    """Return what helps against the first failure that a text gives away, if it is known."""
    return next((remedy for sign, remedy in _REMEDIES.items() if re.search(sign, text)), None)

"""The device OpenVINO compiles for, and what identifies it."""

from __future__ import annotations

import functools
import platform
from collections.abc import Mapping

import openvino as ov

__all__ = ["DEVICE", "components", "core"]

DEVICE = "CPU"


@functools.cache
def core() -> ov.Core:
    """Return the one core of this process; making it looks for devices."""
    return ov.Core()


def components() -> Mapping[str, str]:
    """Return what shapes compiled models: OpenVINO's version and the processor's abilities."""
    abilities = core().get_property(DEVICE, "OPTIMIZATION_CAPABILITIES")
    return {
        "openvino": ov.__version__,
        "machine": platform.machine(),
        "abilities": " ".join(sorted(abilities)),
    }

"""Options: a mode, or settings of AOTInductor and Inductor by name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from torchbay.errors import UnknownOption

from . import _torch_compat

__all__ = ["AotiOptions"]

# The other modes are about CUDA graphs, which packages do not use.
_MODES = ("default", "max-autotune-no-cudagraphs")

# Names that start like this exist in Inductor but cannot do here what they say.
_REFUSED = {
    "always_keep_tensor_constants": "is always on",
    "aot_inductor.custom_op": "is for packages that leave this process",
    "aot_inductor.force_mmap_weights": "is about weights inside the package, and there are none",
    "aot_inductor.output_path": "is chosen by the backend",
    "aot_inductor.package": "is chosen by the backend",
    "aot_inductor.serialized": "is chosen by the backend",
    "aot_inductor.use_runtime_constant_folding": "folds weights, which are inputs here",
    "cpp_wrapper": "is always on",
    "fallback_random": "makes packages that cannot draw random numbers",
    "freezing": "would copy weights into the code, and torchbay reads weights on every call",
    "fx_wrapper": "generates graphs instead of code",
    "joint_graph_constant_folding": "is always off: it bakes tensors that the graph writes",
    "pre_grad": "acts on graphs before autograd, which this backend never sees",
    "triton.cudagraphs": "does nothing in a package: use backend='inductor_triton'",
}


class AotiOptions:
    """Inductor settings for one compiled object, checked before anything compiles.

    Args:
        mode: ``default`` or ``max-autotune-no-cudagraphs``, as in ``torch.compile``.
        settings: Names of ``torch._inductor.config``, dotted where they are nested there. They
            win over the mode.
    """

    __slots__ = ("settings",)

    settings: Mapping[str, Any]

    def __init__(self, *, mode: str | None = None, **settings: object) -> None:
        checked = {_known(name): value for name, value in settings.items()}
        for name, value in checked.items():
            _check_type(name, value)
        self.settings = MappingProxyType({**_settings_of(mode), **checked})

    def __repr__(self) -> str:
        return f"AotiOptions({dict(sorted(self.settings.items()))})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AotiOptions) and self.settings == other.settings

    def __hash__(self) -> int:
        return hash(repr(self))


def _settings_of(mode: str | None) -> Mapping[str, Any]:
    if mode is None:
        return {}
    if mode not in _MODES:
        raise _refusal(f"there is no mode {mode!r}", f"Modes: {', '.join(_MODES)}.")
    return _torch_compat.mode_settings(mode)


def _known(name: str) -> str:
    """Return the name as Inductor spells it."""
    spelled = name.replace("-", "_")
    types = _torch_compat.setting_types()
    if spelled not in types:
        raise _refusal(f"Inductor has no setting {name!r}", _suggestion(spelled, types))
    for prefix, reason in _REFUSED.items():
        if spelled.startswith(prefix):
            raise _refusal(f"{name!r} {reason}", "Leave it out.")
    return spelled


def _suggestion(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, n=3)
    did_you_mean = f"Did you mean {' or '.join(map(repr, near))}? " if near else ""
    return f"{did_you_mean}torch._inductor.list_options() lists all of them."


def _check_type(name: str, value: object) -> None:
    expected = _torch_compat.setting_types()[name]
    if not _torch_compat.has_type(value, expected):
        shown = expected.__name__ if isinstance(expected, type) else expected
        raise _refusal(f"Inductor's setting {name!r} cannot be {value!r}", f"Its type is {shown}.")


def _refusal(what: str, remedy: str) -> UnknownOption:
    return UnknownOption(what, account="backend 'aoti'", remedy=remedy)

"""Options: a mode, or Inductor's own settings by name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from torchbay.errors import UnknownOption

from . import _torch_compat

__all__ = ["InductorOptions"]

_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")

# Names that start like this exist in Inductor but cannot do here what they say.
_REFUSED = {
    "aot_inductor": "belongs to ahead-of-time packages: use backend='aoti'",
    "fallback_random": "comes too late: random operators are decomposed before options apply",
    "freezing": "would copy weights into the code, and torchbay reads weights on every call",
    "fx_wrapper": "generates graphs instead of code",
    "pre_grad": "acts on graphs before autograd, which this backend never sees",
}


class InductorOptions:
    """Inductor settings for one compiled object, checked before anything compiles.

    Args:
        mode: ``default``, ``reduce-overhead``, ``max-autotune`` or ``max-autotune-no-cudagraphs``,
            as in ``torch.compile``.
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
        return f"InductorOptions({dict(sorted(self.settings.items()))})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, InductorOptions) and self.settings == other.settings

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
    return UnknownOption(what, account="backend 'inductor_triton'", remedy=remedy)

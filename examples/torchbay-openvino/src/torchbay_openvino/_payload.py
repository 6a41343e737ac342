"""Saved models: OpenVINO's own export, beside what it was made with."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping

import openvino as ov

from torchbay.plugin import Verdict

from ._device import DEVICE, components, core

__all__ = ["exported", "imported", "verdict"]

_MODEL, _MADE_WITH = "model.blob", "made_with.json"


def exported(compiled: ov.CompiledModel) -> Mapping[str, bytes]:
    """Return a compiled model as bytes, with the versions that can read them."""
    model = io.BytesIO()
    compiled.export_model(model)
    made_with = json.dumps(components(), sort_keys=True)
    return {_MODEL: model.getvalue(), _MADE_WITH: made_with.encode()}


def imported(payload: Mapping[str, bytes], properties: Mapping[str, object]) -> ov.CompiledModel:
    """Return the compiled model that was saved."""
    return core().import_model(io.BytesIO(payload[_MODEL]), DEVICE, dict(properties))


def verdict(payload: Mapping[str, bytes]) -> Verdict:
    """Compare what a payload was made with to what is here; nothing in it is run."""
    if not {_MODEL, _MADE_WITH} <= payload.keys():
        return Verdict("refused", "it was not saved by torchbay-openvino")
    try:
        made_with = dict(json.loads(payload[_MADE_WITH]))
    except ValueError as error:
        return Verdict("refused", f"its description cannot be read: {error}")
    here = components()
    differing = [name for name in here if made_with.get(name) != here[name]]
    if differing:
        name = differing[0]
        return Verdict(
            "refused", f"it was made with {name} {made_with.get(name)}, here is {here[name]}"
        )
    return Verdict("usable")

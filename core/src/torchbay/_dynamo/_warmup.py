"""Compiling for a call without the call's effects."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any

from torchbay._call import Call
from torchbay._observe import (
    Reach,
    Snapshot,
    argument_holders,
    python_randomness_kept,
    unmoved_generators,
)
from torchbay._observe._rehearsal import WriteUndo

__all__ = ["rehearse_compiled"]


def rehearse_compiled(call: Call, run_compiled: Callable[[], object]) -> None:
    """Run a call as it is, then compiled, and undo what each of them wrote.

    The first run finds out what is written: while that is watched, Dynamo compiles nothing.
    """
    reach = Reach.of(call, _codes(call.function))
    snapshot = Snapshot([*reach.holders.values(), *argument_holders(call)])
    undo = WriteUndo()
    try:
        with unmoved_generators(), python_randomness_kept(), undo:
            call.function(*call.args, **call.kwargs)
        undo.undo()
        snapshot.restore()
        with unmoved_generators(), python_randomness_kept():
            run_compiled()
    finally:
        undo.undo()
        snapshot.restore()


def _codes(function: Any) -> Mapping[CodeType, dict[str, Any]]:
    """Return the code of a function or of a module's forward, with the globals it names."""
    target = getattr(function, "forward", function)
    target = getattr(target, "__func__", target)
    code = getattr(target, "__code__", None)
    return {code: target.__globals__} if code is not None else {}

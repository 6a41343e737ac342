"""First stage: the call runs eagerly, for real, while what it relies on is written down."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import torch

from torchbay._call import Call, Place
from torchbay._observe._effects import EffectHistory
from torchbay._observe._ops import Gate, OpRecord
from torchbay._observe._reach import Reach, Reading
from torchbay._observe._recorder import CodeRecorder, FunctionRecorder, OpRecorder
from torchbay._observe._rehearsal import WriteUndo, unmoved_generators
from torchbay._observe._snapshot import Change, Snapshot
from torchbay._reason import Reason
from torchbay._torch_compat import compiler_flag

__all__ = [
    "Change",
    "EffectHistory",
    "Gate",
    "Observation",
    "OpRecord",
    "Reach",
    "Reading",
    "Snapshot",
    "observe",
    "rehearse",
    "unmoved_generators",
]


@attrs.frozen(eq=False)
class Observation:
    """What one real call did and what it could read.

    Attributes:
        result: What the call returned; the caller gets this very object.
        ops: Operators in the order they were dispatched.
        gates: Data-dependent reads in the order they happened.
        readings: The Python values the code that ran could read.
        reach: Everything that was reached, whether code could name it or not.
        changes: Python state that differs from before the call.
        obstacles: Why the call can never be in a graph, if it cannot.
    """

    result: Any
    ops: tuple[OpRecord, ...]
    gates: tuple[Gate, ...]
    readings: tuple[Reading, ...]
    reach: Reach
    changes: tuple[Change, ...]
    obstacles: tuple[Reason, ...]


def observe(call: Call, reach: Reach) -> Observation:
    """Run a call and record it. Whatever the call raises passes through untouched."""
    snapshot = Snapshot(reach)
    before = _Tensors(call, reach)
    seed = torch.initial_seed()
    recorder, codes = OpRecorder(), CodeRecorder()
    with compiler_flag(), recorder, FunctionRecorder(recorder), _profile(codes):
        result = call.function(*call.args, **call.kwargs)
    changes = snapshot.changes() + _argument_changes(call)
    for code, variables in codes.user_codes.items():
        reach.add_globals(variables, [code])
    obstacles = [*recorder.obstacles, *before.obstacles()]
    if torch.initial_seed() != seed:
        obstacles.append(Reason("the call seeds the random generator"))
    return Observation(
        result,
        tuple(recorder.ops),
        tuple(recorder.gates),
        tuple(reach.named(codes.names())),
        reach,
        tuple(changes),
        tuple(obstacles),
    )


def rehearse(call: Call, reach: Reach) -> Observation:
    """Observe a call, then undo what it wrote to tensors, Python state and random generators."""
    snapshot, undo = Snapshot(reach), WriteUndo()
    try:
        with unmoved_generators(), undo:
            return observe(call, reach)
    finally:
        undo.undo()
        snapshot.restore()


@contextmanager
def _profile(codes: CodeRecorder) -> Iterator[None]:
    before = sys.getprofile()
    sys.setprofile(codes)
    try:
        yield
    finally:
        if before is None or callable(before):
            sys.setprofile(before)
        else:
            # A profiler written in C, such as cProfile, installs itself.
            before.enable()


class _Tensors:
    """What a call's tensors are like before it: gradients, and metadata that guards compare."""

    def __init__(self, call: Call, reach: Reach) -> None:
        places: list[Place] = [*call.tensors, *reach.tensors()]
        self._before = [(p.path, p.value, _gradient(p.value), _metadata(p.value)) for p in places]

    def obstacles(self) -> list[Reason]:
        """Return why a call that did this to its tensors cannot be in a graph."""
        found = []
        for path, tensor, gradient, metadata in self._before:
            if _gradient(tensor) is not gradient:
                found.append(Reason(f"the call writes a gradient onto {path}"))
            if _metadata(tensor) != metadata:
                found.append(
                    Reason(f"the call changes the shape, dtype or gradient flag of {path}")
                )
        return found


def _gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    return tensor.grad if tensor.is_leaf and tensor.requires_grad else None


def _metadata(tensor: torch.Tensor) -> tuple[Any, ...]:
    strides = tensor.stride() if tensor.layout is torch.strided else None
    return tensor.dtype, tensor.device, tuple(tensor.shape), strides, tensor.requires_grad


def _argument_changes(call: Call) -> list[Change]:
    """Return the containers among the arguments that no longer hold what was passed in them."""
    again = Call.of(call.function, call.args, call.kwargs)
    before = [item for group in (call.tensors, call.values, call.objects) for item in group]
    after = [item for group in (again.tensors, again.values, again.objects) for item in group]
    same_form = again.rebuild == call.rebuild and len(before) == len(after)
    if not same_form:
        return [Change("the arguments", None, None)]
    return [
        Change(old.path, old.value, new.value)
        for old, new in zip(before, after, strict=True)
        if old.value is not new.value
    ]

"""First stage: the call runs eagerly, for real, while what it relies on is written down."""

from __future__ import annotations

import dis
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType
from typing import Any

import attrs
import torch
from torch.nn.parameter import is_lazy

from torchbay._call import Call, Place
from torchbay._observe._effects import EffectHistory
from torchbay._observe._ops import (
    BATCH_NORMS,
    GATES,
    LIFTS,
    PACK,
    Gate,
    OpRecord,
    as_it_is,
    elements,
    is_compared,
    record_of,
    sizes_of,
)
from torchbay._observe._profile import ProfileRecorder, profiled
from torchbay._observe._reach import Holder, Reach, Reading
from torchbay._observe._recorder import OpRecorder
from torchbay._observe._rehearsal import (
    WriteUndo,
    generator_states,
    restore_generators,
    unmoved_generators,
)
from torchbay._observe._snapshot import Change, Snapshot, is_same
from torchbay._observe._state import is_unwatchable
from torchbay._reason import CannotServe, Reason
from torchbay._torch_compat import compiler_flag

__all__ = [
    "BATCH_NORMS",
    "GATES",
    "LIFTS",
    "PACK",
    "Change",
    "EffectHistory",
    "Gate",
    "Holder",
    "Observation",
    "OpRecord",
    "Reach",
    "Reading",
    "Snapshot",
    "as_it_is",
    "elements",
    "generator_states",
    "is_compared",
    "observe",
    "python_randomness_kept",
    "record_of",
    "rehearse",
    "restore_generators",
    "sizes_of",
    "unmoved_generators",
]


@attrs.frozen(eq=False)
class Observation:
    """What one real call did and what it could read.

    Attributes:
        result: What the call returned; the caller gets this very object.
        ops: Operators in the order they were dispatched.
        gates: Data-dependent reads in the order they happened.
        watched: What the code that ran could read, in the containers that hold it.
        reach: Everything that was reached, whether code could name it or not.
        changes: State outside the call's tensors that differs from before the call.
        obstacles: Why the call can never be in a graph, if it cannot.
        codes: A user's code that ran, with its globals.
        environment: The environment variables that were read, with their values.
    """

    result: Any
    ops: tuple[OpRecord, ...]
    gates: tuple[Gate, ...]
    watched: tuple[Holder, ...]
    reach: Reach
    changes: tuple[Change, ...]
    obstacles: tuple[Reason, ...]
    codes: Mapping[CodeType, dict[str, Any]]
    environment: Mapping[str, str | None]

    @property
    def record(self) -> int:
        """Equal for calls that read the same of tensor data and issued the same operators."""
        gates = tuple(map(str, self.gates))
        return hash((gates, tuple((op.name, repr(op.values)) for op in self.ops)))

    @property
    def readings(self) -> Iterator[Reading]:
        """The Python values the code that ran could read."""
        return (reading for holder in self.watched for reading in holder.readings)


def observe(call: Call, reach: Reach) -> Observation:
    """Run a call and record it. Whatever the call raises passes through untouched."""
    snapshot, tensors, randomness = Snapshot(reach), _Tensors(call, reach), _python_randomness()
    recorder = OpRecorder()
    profile = ProfileRecorder(recorder)
    with compiler_flag(), recorder, profiled(profile):
        result = call.function(*call.args, **call.kwargs)
    changes = [*snapshot.changes(), *_argument_changes(call), *profile.effects]
    changes += [Change(late.path, None, None) for late in _late(reach, profile.user_codes)]
    watched = tuple(reach.watched(profile.names()))
    changes += [Change(f"the initialization of {path}", None, None) for path in tensors.lazy]
    obstacles = [*recorder.obstacles, *profile.obstacles, *tensors.obstacles()]
    obstacles += _unwatched([*call.objects, *(r for holder in watched for r in holder.readings)])
    if _python_randomness() != randomness:
        obstacles.append(Reason("the call draws random numbers of Python or NumPy"))
    return Observation(
        result,
        tuple(recorder.ops),
        tuple(recorder.gates),
        watched,
        reach,
        tuple(changes),
        tuple(obstacles),
        profile.user_codes,
        profile.environment,
    )


def rehearse(call: Call, reach: Reach) -> Observation:
    """Observe a call, then undo what it wrote to tensors, Python state and random generators."""
    snapshot, undo = Snapshot(reach), WriteUndo()
    try:
        with unmoved_generators(), python_randomness_kept(), undo:
            return observe(call, reach)
    finally:
        undo.undo()
        snapshot.restore()


def _late(reach: Reach, codes: Mapping[CodeType, dict[str, Any]]) -> list[Reading]:
    """Return globals found only after the call that it may have changed: the next one decides."""
    known = set(reach.holders)
    found = reach.add_globals(codes)
    reach.complete()
    held = (holder for key, holder in reach.holders.items() if key not in known)
    mutable = {id(holder.container) for holder in held if not isinstance(holder.container, tuple)}
    stored = {name for code in codes for name in _stored_globals(code)}
    return [r for r in found if id(r.value) in mutable or r.key in stored]


def _stored_globals(code: CodeType) -> Iterator[str]:
    names = ("STORE_GLOBAL", "DELETE_GLOBAL")
    return (i.argval for i in dis.get_instructions(code) if i.opname in names)


def _unwatched(places: Iterable[Place]) -> list[Reason]:
    """Return the objects that could change without a guard or a snapshot seeing it."""
    return [
        Reason(
            f"changes of {place.path}, a {type(place.value).__qualname__}, cannot be watched",
            remedy="Use a list, a dict or a tensor",
        )
        for place in places
        if is_unwatchable(place.value)
    ]


def _python_randomness() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy.random")
    return random.getstate(), repr(numpy.get_state()) if numpy is not None else None


@contextmanager
def python_randomness_kept() -> Iterator[None]:
    """Leave the generators of Python and NumPy where they were."""
    numpy = sys.modules.get("numpy.random")
    before, numpy_before = random.getstate(), numpy.get_state() if numpy is not None else None
    try:
        yield
    finally:
        random.setstate(before)
        if numpy is not None:
            numpy.set_state(numpy_before)


class _Tensors:
    """What a call's tensors are like before it: gradients, memory, and what guards compare."""

    def __init__(self, call: Call, reach: Reach) -> None:
        found: list[Place] = [*call.tensors, *reach.tensors()]
        self.lazy = [place.path for place in found if is_lazy(place.value)]
        places = [place for place in found if not is_lazy(place.value)]
        self._before = [(p.path, p.value, _facts(p.value)) for p in places]
        # Kept, so that no other gradient gets the identity of one of these.
        self._gradients = [p.value.grad for p in places if p.value.is_leaf]

    def obstacles(self) -> list[Reason]:
        """Return why a call that did this to its tensors cannot be in a graph."""
        return [
            Reason(f"the call changes the {what} of {path}")
            for path, tensor, before in self._before
            for what, now in _facts(tensor).items()
            if now != before[what]
        ]


def _facts(tensor: torch.Tensor) -> dict[str, Any]:
    is_strided = tensor.layout is torch.strided
    has_data = is_strided and not tensor.is_meta
    return {
        "gradient": id(tensor.grad) if tensor.is_leaf else None,
        "attributes": [(name, id(value)) for name, value in vars(tensor).items()],
        "shape": tuple(tensor.shape),
        "strides": tensor.stride() if is_strided else None,
        "dtype or device": (tensor.dtype, tensor.device),
        "gradient flag": tensor.requires_grad,
        "memory": _memory(tensor) if has_data else None,
    }


def _memory(tensor: torch.Tensor) -> int | None:
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return None


def _argument_changes(call: Call) -> list[Change]:
    """Return the containers among the arguments that no longer hold what was passed in them."""
    try:
        again = Call.of(call.function, call.args, call.kwargs)
    except CannotServe as refusal:
        return [Change(refusal.reason.what, None, None)]
    before = [item for group in (call.tensors, call.values, call.objects) for item in group]
    after = [item for group in (again.tensors, again.values, again.objects) for item in group]
    if again.rebuild != call.rebuild or len(before) != len(after):
        return [Change("what the arguments hold", None, None)]
    return [
        Change(old.path, old.value, new.value)
        for old, new in zip(before, after, strict=True)
        if not is_same(old.value, new.value)
    ]

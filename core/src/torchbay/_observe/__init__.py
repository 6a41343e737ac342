"""First stage: the call runs eagerly, for real, while what it relies on is written down."""

from __future__ import annotations

import dis
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from logging import Logger
from types import CodeType, ModuleType
from typing import Any

import attrs
import torch
from torch.nn.parameter import is_lazy

from torchbay._call import Call, Place
from torchbay._observe._arguments import argument_holders, hidden_argument_changes
from torchbay._observe._branches import BranchWatch
from torchbay._observe._checkpoints import RealCheckpoints
from torchbay._observe._direct import DirectCalls
from torchbay._observe._effects import EffectHistory, counts
from torchbay._observe._gradients import Gradient, GradientPlace, Gradients
from torchbay._observe._inside import Inside
from torchbay._observe._names import attribute_obstacles, named_attributes, version_obstacles
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
from torchbay._observe._profile import ProfileRecorder, StrictRecorder, profiled
from torchbay._observe._reach import Holder, Reach, Reading
from torchbay._observe._recorder import OpRecorder
from torchbay._observe._rehearsal import (
    WriteUndo,
    generator_states,
    python_randomness_kept,
    restore_generators,
    unmoved_generators,
)
from torchbay._observe._snapshot import ABSENT, Change, Effect, Snapshot, is_same, put
from torchbay._observe._state import has_attributes, is_unwatchable
from torchbay._reason import Reason
from torchbay._torch_autograd import has_gradient_hooks, in_this_thread
from torchbay._torch_checkpoint import checkpoints_replaced
from torchbay._torch_compat import compiler_flag, operators_called_directly
from torchbay._torch_encoder import padded_encoders
from torchbay._torch_optim import plain_optimizers

__all__ = [
    "ABSENT",
    "BATCH_NORMS",
    "GATES",
    "LIFTS",
    "PACK",
    "BranchWatch",
    "Change",
    "Effect",
    "EffectHistory",
    "Gate",
    "Gradient",
    "GradientPlace",
    "Holder",
    "Inside",
    "Observation",
    "OpRecord",
    "OpRecorder",
    "ProfileRecorder",
    "Reach",
    "Reading",
    "Snapshot",
    "StrictRecorder",
    "argument_holders",
    "as_it_is",
    "elements",
    "generator_states",
    "has_attributes",
    "is_compared",
    "is_same",
    "named_attributes",
    "observe",
    "profiled",
    "put",
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
        before: What the containers held before the call.
        effects: The containers that hold something else after it.
        changes: All state outside the call's tensors that differs from before the call.
        obstacles: Why the call can never be in a graph, if it cannot.
        codes: A user's code that ran, with its globals.
        environment: The environment variables that were read, with their values.
        levels: The loggers that were asked whether a level is enabled, with the answers.
        names: What the code that ran can name; None if anything.
        reads_fast_path: Whether an encoder would drop padding only with its fast path enabled.
        gradients: What every leaf held as its gradient before and after, if the call had to do
            with gradients that stay.
    """

    result: Any
    ops: tuple[OpRecord, ...]
    gates: tuple[Gate, ...]
    watched: tuple[Holder, ...]
    reach: Reach
    before: Snapshot
    effects: tuple[Effect, ...]
    changes: tuple[Change, ...]
    obstacles: tuple[Reason, ...]
    codes: Mapping[CodeType, dict[str, Any]]
    environment: Mapping[str, str | None]
    levels: Mapping[tuple[Logger, int], bool]
    names: frozenset[str] | None
    reads_fast_path: bool
    gradients: tuple[Gradient, ...]

    @property
    def record(self) -> int:
        """Equal for calls that read the same of tensor data and issued the same operators."""
        gates = tuple(map(str, self.gates))
        return hash((gates, tuple((op.name, repr(op.values)) for op in self.ops)))

    @property
    def readings(self) -> Iterator[Reading]:
        """The Python values the code that ran could read."""
        return (reading for holder in self.watched for reading in holder.readings)

    @property
    def settings(self) -> list[Reading]:
        """The floats among the settings of optimizers, such as learning rates."""
        owners = (holder.owner for holder in self.watched)
        optimizers = [owner for owner in owners if isinstance(owner, torch.optim.Optimizer)]
        groups = {id(group) for optimizer in optimizers for group in optimizer.param_groups}
        return [r for r in self.readings if id(r.holder) in groups and type(r.value) is float]

    @property
    def counted(self) -> list[Reading]:
        """The numbers in containers that the call moves, as it found them."""
        moved = {
            (id(effect.holder.container), change.key)
            for effect in self.effects
            for change in effect.changes
            if counts(change)
        }
        return [r for r in self.readings if (id(r.holder), r.key) in moved]

    @property
    def made(self) -> list[Any]:
        """What the call returned and what it left in containers."""
        written = (change.after for effect in self.effects for change in effect.changes)
        gradients = (g.after for g in self.gradients if g.after is not g.before)
        return [self.result, *written, *gradients]

    @property
    def leaves_gradients(self) -> bool:
        """Whether the call left gradients on its tensors."""
        return any(g.is_changed and g.after is not None for g in self.gradients)

    def running(self, profile: ProfileRecorder) -> Observation:
        """Return the observation of a call that runs this code as well, in its backward."""
        if not profile.user_codes:
            return self
        more = profile.names()
        names = None if self.names is None or more is None else self.names | more
        self.reach.add_globals(profile.user_codes)
        self.reach.complete()
        return attrs.evolve(
            self,
            watched=tuple(self.reach.watched(names, _written_by(self.effects))),
            codes={**self.codes, **profile.user_codes},
            environment={**self.environment, **profile.environment},
            levels={**self.levels, **profile.levels},
            names=names,
        )

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """Look at Python state, and at what tensors hold as gradients, as the call found it."""
        moved = [g for g in self.gradients if g.after is not g.before]
        with self.undone() if self.effects else nullcontext():
            for gradient in moved:
                gradient.tensor.grad = gradient.before
            try:
                yield
            finally:
                for gradient in moved:
                    gradient.tensor.grad = gradient.after

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Put Python state back to before the call, for a while; what happens then is undone."""
        after = Snapshot.of(self.reach)
        with self.before.restored():
            try:
                yield
            finally:
                after.restore()


def observe(call: Call, reach: Reach) -> Observation:
    """Run a call and record it. Whatever the call raises passes through untouched."""
    before = Snapshot([*reach.holders.values(), *argument_holders(call)])
    tensors, randomness = _Tensors(call, reach), _python_randomness()
    recorder = OpRecorder()
    profile = ProfileRecorder(recorder)
    direct = DirectCalls(recorder, profile, reach)
    with (
        compiler_flag(),
        operators_called_directly(direct),
        padded_encoders(),
        plain_optimizers(),
        checkpoints_replaced(RealCheckpoints(recorder)),
        in_this_thread(),
        recorder,
        profiled(profile),
    ):
        result = call.function(*call.args, **call.kwargs)
    effects = before.effects()
    changes = [change for effect in effects for change in effect.changes]
    changes += [*hidden_argument_changes(call), *profile.effects]
    changes += [Change(late.path, None, None) for late in _late(reach, profile.user_codes)]
    named = profile.names()
    names = None if named is None else named | reach.names
    watched = tuple(reach.watched(names, _written_by(effects)))
    changes += [Change(f"the initialization of {path}", None, None) for path in tensors.lazy]
    obstacles = [*recorder.obstacles, *profile.obstacles, *tensors.obstacles()]
    obstacles += version_obstacles(profile.user_codes)
    obstacles += attribute_obstacles([*call.tensors, *reach.tensors()], names)
    obstacles += _unwatched([*call.objects, *(r for holder in watched for r in holder.readings)])
    if _python_randomness() != randomness:
        obstacles.append(Reason("the call draws random numbers of Python or NumPy"))
    asks_gradients = profile.asks_gradients or "grad" in reach.names
    if asks_gradients:
        changes += [Change(f"{late.path}.grad", None, None) for late in tensors.late(reach)]
    return Observation(
        result,
        tuple(recorder.ops),
        tuple(recorder.gates),
        watched,
        reach,
        before,
        tuple(effects),
        tuple(changes),
        tuple(obstacles),
        profile.user_codes,
        profile.environment,
        profile.levels,
        names,
        profile.reads_fast_path,
        tuple(tensors.gradients.after(frozenset(recorder.used), is_asked=asks_gradients)),
    )


def rehearse(call: Call, reach: Reach) -> Observation:
    """Observe a call, then undo what it wrote to tensors, Python state and random generators."""
    snapshot = Snapshot([*reach.holders.values(), *argument_holders(call)])
    undo = WriteUndo()
    gradients: tuple[Gradient, ...] = ()
    try:
        with unmoved_generators(), python_randomness_kept(), undo:
            observation = observe(call, reach)
            gradients = observation.gradients
            return observation
    finally:
        undo.undo()
        snapshot.restore()
        for gradient in gradients:
            gradient.tensor.grad = gradient.before


def _written_by(effects: Sequence[Effect]) -> Callable[[Holder, Any], bool]:
    """Return whether a call wrote a place: of what is a container and no more, all of it."""
    keys = {id(e.holder.container): {c.key for c in e.changes} for e in effects}

    def is_written(holder: Holder, key: Any) -> bool:
        written = keys.get(id(holder.container), ())
        return key in written or (bool(written) and holder.is_whole and holder.suffix == "{}")

    return is_written


def _late(reach: Reach, codes: Mapping[CodeType, dict[str, Any]]) -> Iterator[Reading | Holder]:
    """Yield what was found only after the call, which may have changed it: the next one decides."""
    known = set(reach.holders)
    found = reach.add_globals(codes)
    reach.complete()
    held = [holder for key, holder in reach.holders.items() if key not in known]
    mutable = {id(holder.container) for holder in held if not isinstance(holder.container, tuple)}
    stored = {name for code in codes for name in _stored_globals(code)}
    yield from (r for r in found if id(r.value) in mutable or r.key in stored)
    yield from (holder for holder in held if isinstance(holder.owner, ModuleType))


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


class _Tensors:
    """What a call's tensors are like before it: gradients, memory, and what guards compare."""

    def __init__(self, call: Call, reach: Reach) -> None:
        found: list[Place] = [*call.tensors, *reach.tensors()]
        self.lazy = [place.path for place in found if is_lazy(place.value)]
        places = [place for place in found if not is_lazy(place.value)]
        self._before = [(p.path, p.value, _facts(p.value)) for p in places]
        self.gradients = Gradients(places)

    def late(self, reach: Reach) -> Iterator[Reading]:
        """Yield the leaves that were found only after the call."""
        known = {id(tensor) for _, tensor, _ in self._before}
        found = (r for r in reach.tensors() if id(r.value) not in known)
        return (r for r in found if not is_lazy(r.value) and r.value.is_leaf)

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
        "hooks": has_gradient_hooks(tensor),
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

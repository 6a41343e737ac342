"""From an observed call to one more specialization: trace, lower, build, guard."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any, TypeVar

import attrs
import torch

from torchbay._backward import Backward
from torchbay._build import Builder
from torchbay._call import Call, Place
from torchbay._claims import able_backends, check_sizes, complaint, training_backends
from torchbay._dynamic_shapes import declared_by
from torchbay._guards import GuardFunction, guards_of_graph
from torchbay._lower import Lowered, lower
from torchbay._marks import marked
from torchbay._observe import Observation, Reach
from torchbay._options import read as read_options
from torchbay._reason import CannotServe, Reason
from torchbay._registry import choose, notify
from torchbay._settings import Settings
from torchbay._source import definition
from torchbay._specialization import Specialization
from torchbay._structure import tensors_in
from torchbay._symbolic import Declarations, Declared, SizeHistory, Symbolic
from torchbay._torch_dims import fixing_line
from torchbay._trace import Trace, trace
from torchbay._tree import Leaf, Path, grow
from torchbay.errors import DimensionFixed, UnsupportedGraph
from torchbay.plugin import (
    Backend,
    Capabilities,
    CompileReport,
    DeclineReport,
    PartialBackend,
)

__all__ = ["Specializer", "refuse_obstacles"]

T = TypeVar("T")


@attrs.define(eq=False)
class Specializer:
    """Makes the specializations of one compiled object.

    Attributes:
        settings: What the caller asked for.
        name: What the caller calls the compiled object.
        builds: How many graphs were handed to a backend, whether it took them or not.
    """

    settings: Settings
    name: str
    builds: int = 0
    _sizes: SizeHistory = attrs.field()

    @_sizes.default
    def _no_sizes(self) -> SizeHistory:
        return SizeHistory(self.settings.dynamic)

    def specialize(
        self,
        call: Call,
        observation: Observation,
        backend: Backend,
        options: Any,
        group: Specialization | None,
        declared: Declarations,
    ) -> Specialization | None:
        """Run the stages from the trace to the executables.

        Returns a new specialization, or None if the call's path was added to ``group``, whose
        guards hold for it.

        Raises:
            CannotServe: The call cannot be in a graph, or no backend takes it.
            DimensionFixed: The program serves one size only of a dimension declared dynamic.
            BackendFailed: The backend raised something of its own.
        """
        if needs_training(call, observation) and not backend.capabilities.training:
            backend, options = self._trainer(backend)
        symbolic = self._symbolic(call, observation, backend, declared)
        *attempts, last = _attempts(symbolic, observation)
        for attempt in attempts:
            with contextlib.suppress(CannotServe):
                return self._specialized(call, observation, backend, options, group, attempt)
        try:
            return self._specialized(call, observation, backend, options, group, last)
        except CannotServe as refusal:
            for key, said in symbolic.demanded.items():
                raise _fixed(key, said, call, observation, refusal.reason) from refusal
            raise

    def declared(self, call: Call, reach: Reach, backend: Backend) -> Declarations:
        """Return what the caller declared about a call's sizes, before it runs.

        Raises:
            InvalidArgument: It does not fit the call, or cannot be had.
        """
        where = definition(call.function)
        given = self.settings.dynamic_shapes
        found = dict(marked([*reach.tensors(), *call.tensors], where))
        for (path, dim), said in found.items():
            if said.is_demanded:
                check_sizes(backend, f"{said.by} of dimension {dim} of {path}", where)
        return found | dict(declared_by(given, call)) if given is not None else found

    def _symbolic(
        self, call: Call, observation: Observation, backend: Backend, declared: Declarations
    ) -> Symbolic:
        marked_paths = {path for path, _ in declared}
        state = [
            reading
            for reading in observation.readings
            if _is_free_tensor(reading.value) or reading.path in marked_paths
        ]
        numbers: list[Place] = [*call.numbers, *observation.settings]
        found = self._sizes.symbolic(call.tensors, state, numbers, declared)
        return found if backend.capabilities.dynamic_shapes else Symbolic()

    def _specialized(
        self,
        call: Call,
        observation: Observation,
        backend: Backend,
        options: Any,
        group: Specialization | None,
        symbolic: Symbolic,
    ) -> Specialization | None:
        started = time.perf_counter()
        captured = trace(call, observation, symbolic)
        _refuse_fixed(captured, symbolic.demanded, call, observation)

        def made_with(maker: Backend, its_options: Any) -> _Made:
            return self._made(call, observation, captured, maker, its_options, group)

        made = self.or_fallback(made_with, backend, options)
        _refuse_fixed(captured, symbolic.demanded, call, observation)
        self.report(made.leaf, started)
        return made.entry

    def claim_problem(self, backend: Backend, call: Call) -> Reason | None:
        """Return why a backend cannot take a call's tensors, whatever the graph will be."""
        tensors = [item.value for item in call.tensors]
        problem = complaint(backend.capabilities, tensors)
        if problem is None or self.settings.fallback not in (None, ...):
            return None
        others = ", ".join(able_backends(tensors))
        return Reason(
            f"backend {backend.name!r} cannot take this call: {problem}",
            remedy=f"Installed backends that take it: {others}" if others else "",
        )

    def _trainer(self, backend: Backend) -> tuple[Backend, Any]:
        """Return the caller's fallback and its options, for what a backend cannot train.

        Raises:
            CannotServe: There is none that can.
        """
        what = f"backend {backend.name!r} claims no training, and the call needs gradients"
        notify("torchbay_declined", DeclineReport(self.name, backend.name, what))
        if self.settings.fallback not in (None, ...):
            fallback = choose(self.settings.fallback)
            if fallback.capabilities.training:
                return fallback, read_options(fallback, None, None)
        able = ", ".join(training_backends()) or "none"
        raise CannotServe(
            what,
            remedy=f"Installed backends that train: {able}; for inference, call it under "
            "torch.no_grad() or torch.inference_mode()",
        )

    def or_fallback(self, make: Callable[[Backend, Any], T], backend: Backend, options: Any) -> T:
        """Return what is made with a backend; with the caller's fallback, if that one declines.

        Raises:
            CannotServe: No backend takes the graph.
            BackendFailed: A backend raised something of its own.
        """
        try:
            return make(backend, options)
        except UnsupportedGraph as refusal:
            notify("torchbay_declined", DeclineReport(self.name, backend.name, str(refusal)))
            if self.settings.fallback in (None, ...) or isinstance(backend, PartialBackend):
                raise CannotServe(
                    f"backend {backend.name!r} declines the graph: {refusal}",
                    remedy="Name a fallback, e.g. fallback='eager', or choose another backend",
                ) from refusal
        fallback = choose(self.settings.fallback)
        return make(fallback, read_options(fallback, None, None))

    def lowered(self, captured: Trace, backend: Backend, options: Any) -> tuple[Lowered, Builder]:
        """Lower for a backend; return what compiles the parts as well."""
        lowered = lower(captured, self._claims(backend), self.settings.partitioner)
        states = tuple(entry.is_state for entry in captured.inputs)
        rest, is_training = self._rest(backend), lowered.training is not None
        build = Builder(captured.mode, states, backend, options, rest, self.name, is_training)
        return lowered, build

    def report(self, leaf: Leaf, started: float) -> None:
        """Tell observers of a leaf whose making began at this time."""
        leaf.compile_seconds = time.perf_counter() - started
        notify("torchbay_compiled", _report(self.name, leaf))

    def _made(
        self,
        call: Call,
        observation: Observation,
        captured: Trace,
        backend: Backend,
        options: Any,
        group: Specialization | None,
    ) -> _Made:
        """Lower for a backend, build what the tree of the group lacks, and guard it."""
        lowered, build = self.lowered(captured, backend, options)

        def guards() -> GuardFunction:
            return guards_of_graph(call, observation, captured, lowered.changed)

        training, backward = lowered.training, None
        if training is not None:
            backward = Backward(training, build.backward, self.name)
        path = Path(captured, lowered, guards, observation.record, backward)
        try:
            tree = (group.root, group.guards) if group is not None else None
            grown = grow(tree, path, build)
            if group is not None and grown is not None:
                group.add(grown.leaf)
                return _Made(None, grown.leaf)
            grown = grown or grow(None, path, build)
        finally:
            self.builds += build.count
        assert grown is not None, "a path always fits a tree of its own"
        return _Made(Specialization.of(grown), grown.leaf)

    def _claims(self, backend: Backend) -> Capabilities:
        """Return what to lower for: whoever gets the rest of a graph need not write inputs."""
        is_partial = isinstance(backend, PartialBackend)
        claims = backend.capabilities
        return attrs.evolve(claims, mutation=False) if is_partial else claims

    def _rest(self, backend: Backend) -> Backend | None:
        """Return what compiles the parts of a graph that a partial backend leaves."""
        if not isinstance(backend, PartialBackend) or self.settings.fallback is None:
            return None
        return choose("eager" if self.settings.fallback is ... else self.settings.fallback)


@attrs.frozen
class _Made:
    """A leaf, and the specialization it made necessary, if it did."""

    entry: Specialization | None
    leaf: Leaf


def _refuse_fixed(
    captured: Trace, demanded: Declarations, call: Call, observation: Observation
) -> None:
    """Raise if the program serves one size only of a dimension that was declared dynamic."""
    for key, said in demanded.items():
        if (line := fixing_line(captured.sizes[key])) is not None:
            reason = Reason("the program takes no other size", where=line)
            raise _fixed(key, said, call, observation, reason)


def _fixed(
    key: tuple[str, int], said: Declared, call: Call, observation: Observation, reason: Reason
) -> DimensionFixed:
    """Return the error of a call whose size cannot be left open as the caller demands."""
    path, dim = key
    what = f"dimension {dim} of {path}" if dim >= 0 else path
    error = DimensionFixed(
        f"{what} is declared dynamic by {said.by}, and cannot be: {reason.what}",
        account=reason.where or definition(call.function),
        remedy=_REMEDIES[said.by],
    )
    error.result = observation.result
    return error


_REMEDIES = {
    "dynamic_shapes": "Change that line, or use Dim.AUTO to allow a graph for each such size",
    "mark_unbacked(strict=True)": "Change that line, or leave out strict=True to allow it",
    "mark_dynamic": "Change that line, or use maybe_mark_dynamic to allow it",
}


def _is_free_tensor(value: Any) -> bool:
    """Whether a value is a tensor that may well come in other sizes: no parameter."""
    return isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter)


def _attempts(symbolic: Symbolic, observation: Observation) -> list[Symbolic]:
    """Return what to leave open, the most first: what cannot be left open can still be fixed."""
    attempts = [symbolic]
    if not symbolic.is_static:
        attempts.append(attrs.evolve(symbolic, in_python=True))
    may_be_fixed = not symbolic.is_static or _reads_numbers(observation)
    if may_be_fixed and not symbolic.demanded:
        attempts.append(Symbolic())
    return attempts


def _reads_numbers(observation: Observation) -> bool:
    """Whether a call read numbers from tensor data that its graph may have left open."""
    return any(type(gate.value) is not bool for gate in observation.gates)


def _report(name: str, leaf: Leaf) -> CompileReport:
    """Return what observers are told."""
    nodes = [node for graph in leaf.graphs for node in graph.graph.nodes]
    count = sum(node.op == "call_function" for node in nodes)
    backend = leaf.parts[0][0] if leaf.parts else ""
    return CompileReport(name, backend, leaf.compile_seconds, count)


def needs_training(call: Call, observation: Observation) -> bool:
    """Whether a call makes something that needs gradients, or leaves gradients somewhere."""
    places: list[Place] = [*call.tensors, *observation.reach.tensors()]
    inputs = {id(place.value) for place in places}
    made = tensors_in(observation.made)
    needs = any(tensor.requires_grad and id(tensor) not in inputs for tensor in made)
    return needs or observation.leaves_gradients


def refuse_obstacles(call: Call, observation: Observation) -> None:
    """Raise CannotServe if the call did something that no graph can do."""
    for obstacle in observation.obstacles:
        raise CannotServe(obstacle.what, where=obstacle.where, remedy=obstacle.remedy)
    places: list[Place] = [*call.tensors, *observation.reach.tensors()]
    inputs = {id(place.value) for place in places}
    for tensor in tensors_in(observation.made):
        if id(tensor) in inputs:
            continue
        if tensor.requires_grad and tensor.is_leaf:
            raise CannotServe("its result is a new tensor that gradients are collected in")
        if tensor.requires_grad and tensor.retains_grad:
            raise CannotServe("its result retains its gradient")
        if vars(tensor):
            raise CannotServe(f"its result has attributes of its own: {', '.join(vars(tensor))}")
        if type(tensor) is not torch.Tensor:
            raise CannotServe(f"its result is a new {type(tensor).__qualname__}")

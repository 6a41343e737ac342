"""From an observed call to one more specialization: trace, lower, build, guard."""

from __future__ import annotations

import time
from typing import Any

import attrs
import torch

from torchbay._build import Built, build, build_in_regions
from torchbay._call import Call, Place
from torchbay._claims import able_backends, complaint
from torchbay._guards import guards_of_graph
from torchbay._lower import lower
from torchbay._observe import Observation
from torchbay._options import read as read_options
from torchbay._reason import CannotServe, Reason
from torchbay._registry import choose, notify
from torchbay._settings import Settings
from torchbay._specialization import Specialization, specialization
from torchbay._structure import tensors_in
from torchbay._trace import Trace, trace
from torchbay.errors import UnsupportedGraph
from torchbay.plugin import Backend, DeclineReport, PartialBackend

__all__ = ["Specializer", "refuse_obstacles"]


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

    def specialize(
        self, call: Call, observation: Observation, backend: Backend, options: Any
    ) -> Specialization:
        """Run the stages from the trace to the executable.

        Raises:
            CannotServe: The call cannot be in a graph, or no backend takes it.
            BackendFailed: The backend raised something of its own.
        """
        started = time.perf_counter()
        captured = trace(call, observation)
        built = self._built_or_fallback(captured, backend, options)
        guards = guards_of_graph(call, observation, captured.inputs, built.lowered.written)
        made = specialization(guards, captured, built, time.perf_counter() - started)
        notify("torchbay_compiled", made.report(self.name))
        return made

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

    def _built_or_fallback(self, captured: Trace, backend: Backend, options: Any) -> Built:
        """Lower and build; with the fallback the caller named, if the backend declines."""
        try:
            return self._built(captured, backend, options)
        except UnsupportedGraph as refusal:
            notify("torchbay_declined", DeclineReport(self.name, backend.name, str(refusal)))
            if self.settings.fallback in (None, ...) or isinstance(backend, PartialBackend):
                raise CannotServe(
                    f"backend {backend.name!r} declines the graph: {refusal}",
                    remedy="Name a fallback, e.g. fallback='eager', or choose another backend",
                ) from refusal
        fallback = choose(self.settings.fallback)
        return self._built(captured, fallback, read_options(fallback, None, None))

    def _built(self, captured: Trace, backend: Backend, options: Any) -> Built:
        if isinstance(backend, PartialBackend):
            return self._built_in_parts(captured, backend, options)
        lowered = lower(captured, backend.capabilities)
        executable = None
        if lowered.graph is not None:
            self.builds += 1
            executable = build(lowered, captured, backend, options, self.name)
        return Built(lowered, executable, ((backend.name, ()),))

    def _built_in_parts(self, captured: Trace, backend: PartialBackend, options: Any) -> Built:
        # Whoever gets the rest of the graph need not claim to write inputs.
        lowered = lower(captured, attrs.evolve(backend.capabilities, mutation=False))
        if lowered.graph is None:
            return Built(lowered, None, ((backend.name, ()),))
        self.builds += 1
        name = "eager" if self.settings.fallback is ... else self.settings.fallback
        fallback = choose(name) if name is not None else None
        executable, parts = build_in_regions(
            lowered, captured, backend, options, fallback, self.name
        )
        return Built(lowered, executable, parts)


def refuse_obstacles(call: Call, observation: Observation) -> None:
    """Raise CannotServe if the call did something that no graph can do."""
    for obstacle in observation.obstacles:
        raise CannotServe(obstacle.what, where=obstacle.where, remedy=obstacle.remedy)
    places: list[Place] = [*call.tensors, *observation.reach.tensors()]
    inputs = {id(place.value) for place in places}
    for tensor in tensors_in(observation.made):
        if id(tensor) in inputs:
            continue
        if tensor.requires_grad:
            raise CannotServe(
                "its result needs gradients, and training is not served from a graph yet",
                remedy="Call it under torch.no_grad() or torch.inference_mode() for inference",
            )
        if vars(tensor):
            raise CannotServe(f"its result has attributes of its own: {', '.join(vars(tensor))}")
        if type(tensor) is not torch.Tensor:
            raise CannotServe(f"its result is a new {type(tensor).__qualname__}")

"""One build, and what the world was like before and after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import torch

from torchbay._control_flow import with_subgraphs
from torchbay.plugin import CompileRequest, Executable
from torchbay.testing._subject import Subject

__all__ = ["Surroundings", "WatchedBuild", "generator_states", "watched"]


@attrs.frozen
class Surroundings:
    """What a build could have changed, in a form that can be compared.

    Attributes:
        request: The graph with its metadata, and the example inputs, as text.
        generators: The states of PyTorch's random generators.
        settings: PyTorch's settings, by name.
    """

    request: tuple[str, ...]
    generators: tuple[bytes, ...]
    settings: dict[str, object]


@attrs.frozen(eq=False)
class WatchedBuild:
    """An executable and the surroundings of its making."""

    request: CompileRequest
    inputs: Sequence[torch.Tensor]
    executable: Executable
    before: Surroundings
    after: Surroundings
    generators: Callable[[], tuple[bytes, ...]]


def watched(
    subject: Subject, request: CompileRequest, inputs: Sequence[torch.Tensor]
) -> WatchedBuild:
    """Have a request compiled and look around before and after; undo what was left behind."""

    def generators() -> tuple[bytes, ...]:
        return generator_states(subject.device)

    devices = [subject.device] if subject.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        before = _surroundings(request, generators())
        try:
            executable = subject.build(request)
            after = _surroundings(request, generators())
        finally:
            _restore(before.settings)
    return WatchedBuild(request, inputs, executable, before, after, generators)


def generator_states(device: torch.device) -> tuple[bytes, ...]:
    """Return the states of the generators that code for a device can draw from."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states += torch.cuda.get_rng_state_all()
    return tuple(bytes(state.tolist()) for state in states)


def _surroundings(request: CompileRequest, generators: tuple[bytes, ...]) -> Surroundings:
    settings = {
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "thread count": torch.get_num_threads(),
        "determinism": torch.are_deterministic_algorithms_enabled(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "autocast": torch.is_autocast_enabled("cpu"),
    }
    return Surroundings(_text_of(request), generators, settings)


def _text_of(request: CompileRequest) -> tuple[str, ...]:
    nodes = (
        f"{node.format_node()} {sorted(map(str, node.meta))} {node.meta.get('val')}"
        for graph in with_subgraphs(request.graph)
        for node in graph.graph.nodes
    )
    return (request.graph.code, *nodes, *map(str, request.example_inputs))


def _restore(settings: dict[str, object]) -> None:
    torch.set_grad_enabled(bool(settings["grad mode"]))
    torch.set_default_dtype(settings["default dtype"])  # type: ignore[arg-type]
    torch.set_num_threads(int(settings["thread count"]))  # type: ignore[call-overload]
    torch.use_deterministic_algorithms(bool(settings["determinism"]))
    torch.set_float32_matmul_precision(str(settings["matmul precision"]))

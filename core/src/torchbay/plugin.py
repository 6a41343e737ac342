"""The door for backend authors: everything a plugin needs, and nothing else.

A plugin is a distribution with an entry point in the group ``torchbay.backends``. The entry
point's name is the backend's name, its value a module that implements one hook:

    from torchbay.plugin import Backend, hookimpl

    @hookimpl
    def torchbay_make_backend() -> Backend:
        from ._backend import MyBackend

        return MyBackend()

Docstrings here are normative: they say what a member means, when it is called, what it may raise
and what it must not do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import attrs
import pluggy
import torch
from torch.fx import GraphModule, Node

from torchbay.errors import UnsupportedGraph

__all__ = [
    "API_VERSION",
    "OLDEST_API_VERSION",
    "ArtifactDelegate",
    "Backend",
    "Capabilities",
    "CompileReport",
    "CompileRequest",
    "DeclineReport",
    "Decompositions",
    "Executable",
    "GuardedExecutable",
    "Hooks",
    "NoOptions",
    "PartialBackend",
    "PersistentBackend",
    "RecompileReport",
    "ResettableBackend",
    "StridedExecutable",
    "UnsupportedGraph",
    "Verdict",
    "hookimpl",
    "hookspec",
]

API_VERSION = 1
"""The version of this contract. Additions do not change it; removals and new meanings do."""

OLDEST_API_VERSION = 1
"""The oldest version a plugin may state and still be loaded."""

hookspec = pluggy.HookspecMarker("torchbay")
hookimpl = pluggy.HookimplMarker("torchbay")

Decompositions = Mapping[Any, Callable[..., Any]]
"""Operator overload -> Python function that computes it from simpler operators."""


@attrs.frozen(kw_only=True)
class Capabilities:
    """What a backend claims. The core gives it nothing beyond these claims.

    Attributes:
        devices: Types of device it compiles for, as in ``torch.device(...).type``.
        dtypes: Element types it takes, or None for all of them.
        decompositions: Called once, when the first graph is lowered for this backend: returns the
            operators to rewrite into simpler ones first. None leaves the ATen graph as traced.
        keep: Composite operators to hand over whole, among
            ``aten.scaled_dot_product_attention.default``, ``aten.layer_norm.default`` and
            ``aten.group_norm.default``. Otherwise they arrive as the kernels PyTorch would call,
            or decomposed.
        dynamic_shapes: Takes graphs with symbolic sizes, and with numbers that are known only when
            they run: ``aten._local_scalar_dense`` of a tensor, and Python's arithmetic on those.
        training: Takes the forward and the backward half of a training step. They come as two
            requests, told apart by `CompileRequest.side`.
        mutation: Takes graphs that end in ``aten.copy_`` onto an input listed in
            `CompileRequest.mutated`. Without it such values are further outputs, and the core
            writes them back.
        control_flow: Takes higher-order operators such as ``torch.cond``. Their functions are
            graphs of their own, submodules of the request's graph, and take all they use as
            operands. Those are ``cond``, ``while_loop``, ``scan``, ``associative_scan``,
            ``map_impl`` and ``flex_attention``; a backend declines those it does not know.
        external_weights: Can build code that borrows its weights from the caller.
        eager_random: Draws from PyTorch's generators exactly as eager execution of the graph does.
        thread_safe: Executables may run in several threads at once.
    """

    devices: frozenset[str] = frozenset({"cpu"})
    dtypes: frozenset[torch.dtype] | None = None
    decompositions: Callable[[], Decompositions] | None = None
    keep: frozenset[Any] = frozenset()
    dynamic_shapes: bool = False
    training: bool = False
    mutation: bool = False
    control_flow: bool = False
    external_weights: bool = False
    eager_random: bool = False
    thread_safe: bool = False


@attrs.frozen(kw_only=True)
class NoOptions:
    """The options class of a backend that has none."""


@attrs.frozen(kw_only=True)
class CompileRequest:
    """Everything a backend may look at. Frozen; new fields always come with defaults.

    Attributes:
        graph: A functional ATen graph, linted and free of dead nodes. Every node carries a fake
            value in ``meta["val"]``, and the user's stack in ``stack_trace`` where it is known.
            It takes flat inputs and returns a flat tuple. Random operators stand in program order.
        example_inputs: One fake tensor (or symbolic int) per placeholder, in order. Sizes may be
            symbols; the graph reads them with ``aten.sym_size``. A float that changes is a
            0-dimensional float64 tensor on the CPU.
        state_count: How many leading inputs are state: parameters, buffers, free tensors. State
            keeps its storage from call to call far more often than not, but may be replaced.
        mutated: Positions of inputs the graph writes, with ``aten.copy_`` as its last nodes.
            Empty unless the backend claims ``mutation``.
        device: The device the graph runs on; ``cpu`` for a graph without tensors elsewhere.
        options: An instance of the backend's ``options`` class.
        side: Which graph this is: the whole computation, or one half of a training step.
        free_strides: Positions of outputs that this backend's own backward half takes and nobody
            else sees, some of them inputs that are handed through. A `StridedExecutable` may give
            these other strides than the graph has.
        name: What the caller called the compiled object; for messages and file names only.
    """

    graph: GraphModule
    example_inputs: Sequence[Any]
    state_count: int = 0
    mutated: frozenset[int] = frozenset()
    device: torch.device = attrs.field(factory=lambda: torch.device("cpu"))
    options: Any = attrs.field(factory=NoOptions)
    side: Literal["inference", "forward", "backward"] = "inference"
    free_strides: frozenset[int] = frozenset()
    name: str = ""


@runtime_checkable
class Executable(Protocol):
    """A compiled graph in memory. The core keeps it as long as it may call it."""

    def run(self, inputs: list[Any]) -> Sequence[Any]:
        """Run the graph once.

        Means: ``inputs`` holds the values of the graph's placeholders in order: state, then the
        call's tensors, then what earlier parts of the graph computed, then ints. The list is the
        callee's to clear. Returns the graph's outputs in order. Each has the sizes, strides, dtype
        and device of its node's ``meta["val"]``, strides in ``free_strides`` aside. No output shares memory with an output of another
        call.
        When called: on every hit, after the core's guards held; grad mode is off and autocast is
        disabled, whatever they were around the call.
        May raise: what the operators themselves raise on the values they are given.
        Must not: change inputs other than the request's ``mutated``, draw from a generator it has
        no random operator for, or keep an input or an output alive once it has returned.
        """


@runtime_checkable
class StridedExecutable(Executable, Protocol):
    """A compiled forward half that lays out what its backward half takes as suits it."""

    @property
    def output_strides(self) -> Sequence[Sequence[Any]]:
        """The strides of every output, in elements: those of the graph, but for `free_strides`.

        When called: once, before the backward half is compiled, whose inputs then have them.
        """


@runtime_checkable
class GuardedExecutable(Executable, Protocol):
    """A compiled graph that takes only some of the inputs its guards let through."""

    def refuses(self, inputs: Sequence[Any]) -> str | None:
        """Return why these inputs cannot be run, or None to run them.

        Means: on a refusal other specializations are tried, then the call is captured anew. The
        reason is shown with the recompile.
        When called: on every call, after the core's guards held and before `run`.
        Must not: keep, change or wait for the inputs.
        """


@runtime_checkable
class Backend(Protocol):
    """Turns one graph into something callable.

    Satisfied by shape: no inheritance, hence no defaults inherited by accident.
    """

    @property
    def name(self) -> str:
        """The entry point's name, as users type it."""

    @property
    def api_version(self) -> int:
        """The plugin API this was written for: a literal, never `API_VERSION` itself."""

    @property
    def capabilities(self) -> Capabilities:
        """What this backend claims; read when a compiled object first uses it."""

    @property
    def options(self) -> type[Any]:
        """The class of this backend's options, `NoOptions` if it has none.

        When called: once per `torchbay.compile`, before any work, as ``options(**given)``;
        ``mode="..."`` is one of the given names where the caller passed a mode.
        May raise: TypeError or ValueError. For an attrs class, unknown names and values of the
        wrong type are refused by the core, with the known names.
        """

    def fingerprint(self) -> Mapping[str, str]:
        """Return named components that change whenever the code compiled from a graph would.

        Must not: contain a path of this machine, or anything that differs between two processes
        with the same toolchain.
        """

    def compile(self, request: CompileRequest) -> Executable:
        """Compile ``request.graph``.

        When called: on a miss, under the core's build lock, with grad mode off.
        May raise: `UnsupportedGraph` to decline. Anything else is a failure and reaches the caller
        as `torchbay.errors.BackendFailed`.
        Must not: change the request, move a random generator, touch a user's tensor, or leave
        ambient state (grad mode, default dtype, thread count) other than it was.
        """


@runtime_checkable
class ResettableBackend(Protocol):
    """A backend that keeps something of its own between compilations."""

    def reset(self) -> None:
        """Forget it. Called by `torchbay.reset`, after all specializations were dropped."""


@runtime_checkable
class PartialBackend(Backend, Protocol):
    """A backend that takes parts of graphs and leaves the rest to another."""

    def supports(self, node: Node) -> bool:
        """Whether this node may be in a graph for `compile`.

        Means: the core cuts the graph into as few regions as it can, compiles those whose nodes
        are all supported with this backend and the rest with the caller's fallback. Random
        operators and writes stay with the fallback, in program order, unless every node of the
        graph is supported.
        When called: for each node that computes something, after lowering.
        Must not: change the node or its graph.
        """


@attrs.frozen
class Verdict:
    """Whether a saved payload can be used here.

    Attributes:
        state: ``usable``; ``slower`` if it can be used but runs slower than one made here;
            ``refused`` if it cannot be used.
        reason: Why it is not simply usable.
    """

    state: Literal["usable", "slower", "refused"]
    reason: str = ""


@runtime_checkable
class PersistentBackend(Backend, Protocol):
    """A backend whose executables can be saved, and loaded where nothing can be compiled."""

    def save(self, executable: Executable) -> Mapping[str, bytes]:
        """Return everything that `load` needs, by name.

        Must not: contain weights, or a path of this machine.
        """

    def check(self, payload: Mapping[str, bytes]) -> Verdict:
        """Return whether a payload can be used on this machine.

        When called: before `load`, in a process that may have no compiler.
        Must not: execute anything the payload brings.
        """

    def load(self, payload: Mapping[str, bytes], request: CompileRequest) -> Executable:
        """Return an executable equal to the one that was saved, for the same request.

        When called: with a payload that `check` did not refuse.
        Must not: compile, or start a compiler.
        """


@runtime_checkable
class ArtifactDelegate(Backend, Protocol):
    """A backend whose artifacts another installed backend makes."""

    @property
    def artifact_backend(self) -> str:
        """The name of that backend; it is reached through the registry, never imported."""


@attrs.frozen
class CompileReport:
    """A graph was compiled.

    Attributes:
        name: What the caller called the compiled object.
        backend: The backend that compiled it.
        seconds: From the end of the observed call to the executable.
        nodes: How many operators the compiled graph calls.
    """

    name: str
    backend: str
    seconds: float
    nodes: int


@attrs.frozen
class RecompileReport:
    """A call needed one more specialization; each reason names a path and both values."""

    name: str
    reasons: tuple[str, ...]


@attrs.frozen
class DeclineReport:
    """A backend declined a graph."""

    name: str
    backend: str
    reason: str


class Hooks(Protocol):
    """What the core calls on a plugin's module. Implement with `hookimpl`."""

    @hookspec(firstresult=True)
    def torchbay_make_backend(self) -> Backend:
        """Return the backend that this entry point names.

        When called: once per process, when the backend is first used; never to list it.
        May raise: anything; the backend is then listed as broken, with the cause.
        Must not: compile, initialize a device, or change global state.
        """

    @hookspec
    def torchbay_compiled(self, report: CompileReport) -> None:
        """A graph was compiled. Exceptions are logged, never raised, as for every observer."""

    @hookspec
    def torchbay_recompiled(self, report: RecompileReport) -> None:
        """A call needed one more specialization. Called before it is compiled."""

    @hookspec
    def torchbay_declined(self, report: DeclineReport) -> None:
        """A backend declined a graph. Called before the fallback is tried."""

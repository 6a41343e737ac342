"""Accepts a function with torch.compile's backend signature as a backend."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import attrs
import torch
from torch.fx import Graph, GraphModule

from torchbay.errors import BackendFailed
from torchbay.plugin import Capabilities, CompileRequest, Executable

PlainFunction = Callable[..., Callable[..., Sequence[Any]]]
"""``(graph_module, example_inputs, **options) -> callable(*inputs)``."""

_DEVICES = frozenset({"cpu", "cuda", "hpu", "meta", "mps", "mtia", "privateuseone", "xla", "xpu"})
_REMEDY = "Return a callable that takes the graph's inputs and returns a list or tuple of outputs."


class PlainOptions:
    """Options on their way to a plain function, which alone knows their meaning."""

    function: ClassVar[PlainFunction]

    def __init__(self, **given: object) -> None:
        signature = _signature(self.function) if given else None
        if signature:
            signature.bind(None, None, **given)
        self.given = given


@attrs.frozen(eq=False)
class PlainBackend:
    """A plain function seen as a `Backend` for static graphs on every device."""

    function: PlainFunction
    options: type[PlainOptions] = attrs.field(init=False, repr=False)

    @options.default
    def _options(self) -> type[PlainOptions]:
        return type("PlainOptions", (PlainOptions,), {"function": staticmethod(self.function)})

    @property
    def name(self) -> str:
        """The function's own name."""
        return str(getattr(self.function, "__name__", type(self.function).__name__))

    @property
    def api_version(self) -> int:
        """The plugin API this adapter was written for."""
        return 1

    @property
    def capabilities(self) -> Capabilities:
        """Static graphs, wherever PyTorch has tensors."""
        return Capabilities(devices=_devices(), training=True)

    def fingerprint(self) -> Mapping[str, str]:
        """Name the function; what it depends on is unknown."""
        return {"function": _origin(self.function), "torch": torch.__version__}

    def compile(self, request: CompileRequest) -> Executable:
        """Call the function on a copy of the graph, which it may change."""
        account = f"backend {self.name!r} ({_origin(self.function)})"
        options = request.options.given if isinstance(request.options, PlainOptions) else {}
        inputs = list(request.example_inputs)
        compiled = self.function(_copied(request.graph), inputs, **options)
        if not callable(compiled):
            raise BackendFailed(
                f"it returned {compiled!r}, which is not callable", account=account, remedy=_REMEDY
            )
        return PlainExecutable(compiled, _output_count(request.graph), account)


class PlainExecutable:
    """Calls what a plain function returned."""

    __slots__ = ("_account", "_count", "_function")

    def __init__(self, function: Callable[..., Any], count: int, account: str) -> None:
        self._function = function
        self._count = count
        self._account = account

    def run(self, inputs: list[Any]) -> Sequence[Any]:
        """Call it with the inputs spread out."""
        outputs = self._function(*inputs)
        if isinstance(outputs, (list, tuple)) and len(outputs) == self._count:
            return outputs
        raise self._refusal(outputs)

    def _refusal(self, outputs: object) -> BackendFailed:
        found = type(outputs).__name__
        if isinstance(outputs, (list, tuple)):
            found = f"{found} of {len(outputs)}"
        return BackendFailed(
            f"its callable returned a {found} instead of a list or tuple of {self._count}",
            account=self._account,
            remedy=_REMEDY,
        )


def _signature(function: PlainFunction) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except ValueError:  # some builtins have none
        return None


def _origin(function: PlainFunction) -> str:
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def _devices() -> frozenset[str]:
    # Out-of-tree devices rename privateuseone.
    accelerator = torch.accelerator.current_accelerator()
    return _DEVICES | {accelerator.type} if accelerator else _DEVICES


def _copied(graph: GraphModule) -> GraphModule:
    nodes = Graph()
    nodes.output(nodes.graph_copy(graph.graph, {}))
    return GraphModule(graph, nodes)


def _output_count(graph: GraphModule) -> int:
    return len(graph.graph.output_node().args[0])  # type: ignore[arg-type]

"""The OpenVINO backend: what it claims, which nodes it takes, and one compilation."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch
from torch.fx import Node

from torchbay.plugin import Capabilities, CompileRequest, Executable, Verdict

from ._convert import TYPES, model, refusal
from ._device import DEVICE, components, core
from ._executable import OpenVinoExecutable
from ._options import OpenVinoOptions
from ._outputs import views
from ._payload import exported, imported, verdict

__all__ = ["OpenVinoBackend"]


@attrs.frozen
class OpenVinoBackend:
    """Compiles static graphs, or the parts it has conversions for, for the CPU."""

    name: str = "openvino"
    api_version: int = 1
    options: type[OpenVinoOptions] = OpenVinoOptions
    capabilities: Capabilities = Capabilities(dtypes=frozenset(TYPES))

    def fingerprint(self) -> Mapping[str, str]:
        """Name the versions and the processor that shape compiled models."""
        return {"torch": torch.__version__, **components()}

    def supports(self, node: Node) -> bool:
        """Tell whether the node has a conversion that fits what it is given."""
        return not refusal(node)

    def compile(self, request: CompileRequest) -> OpenVinoExecutable:
        """Convert the graph and let OpenVINO compile it."""
        made, _ = views(request.graph.graph)
        converted = model(request.graph.graph, made)
        compiled = core().compile_model(converted, DEVICE, request.options.properties())
        return OpenVinoExecutable(compiled, request.graph, request.state_count)

    def save(self, executable: Executable) -> Mapping[str, bytes]:
        """Return the compiled model as bytes; weights are inputs, hence not in it."""
        assert isinstance(executable, OpenVinoExecutable)
        return exported(executable.compiled)

    def check(self, payload: Mapping[str, bytes]) -> Verdict:
        """Compare versions and processor to those here."""
        return verdict(payload)

    def load(self, payload: Mapping[str, bytes], request: CompileRequest) -> OpenVinoExecutable:
        """Import the compiled model; the request says how its inputs and outputs lie."""
        compiled = imported(payload, request.options.properties())
        return OpenVinoExecutable(compiled, request.graph, request.state_count)

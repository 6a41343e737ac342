"""Requests as the core makes them, without the core."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from torchbay.plugin import CompileRequest


def make_request(
    function: Callable[..., tuple[torch.Tensor, ...]],
    inputs: Sequence[torch.Tensor],
    *,
    decompositions: Mapping[Any, Any] | None = None,
    **fields: Any,
) -> CompileRequest:
    """Trace ``function`` to a functional ATen graph over fakes of ``inputs``."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    fakes = [mode.from_tensor(tensor, static_shapes=True) for tensor in inputs]
    functional = torch.func.functionalize(function, remove="mutations")
    # Without the Python dispatcher batch_norm changes its statistics behind the graph's back.
    with mode, torch.no_grad(), enable_python_dispatcher():
        graph = make_fx(functional, decomposition_table=dict(decompositions or {}))(*fakes)
    _finish(graph)
    return CompileRequest(graph=graph, example_inputs=fakes, **fields)


def _finish(graph: GraphModule) -> None:
    [output] = graph.graph.find_nodes(op="output")
    output.args = (tuple(output.args[0]),)
    graph.graph.eliminate_dead_code()
    graph.graph.lint()
    graph.recompile()


@pytest.fixture(scope="session", autouse=True)
def _private_inductor_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep compiled code of these tests out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


@pytest.fixture(name="make_request", scope="session")
def _make_request() -> Callable[..., CompileRequest]:
    return make_request

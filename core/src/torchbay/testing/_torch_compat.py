"""What the kit needs of private torch: the operator database, graphs no capture makes yet."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torchbay._torch_compat import fake_tensor_mode, import_tracer, trace_to_graph
from torchbay.plugin import CompileRequest

__all__ = ["dynamic_request", "operator_database", "static_request", "unknown_operator"]


@functools.cache
def operator_database() -> Mapping[str, Any]:
    """Return PyTorch's own descriptions of its operators, by name and variant."""
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    # Importing it points Inductor's cache somewhere else.
    if before is None:
        os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
    else:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = before
    return {_name(info): info for info in op_db}


def _name(info: Any) -> str:
    return f"{info.name}.{info.variant_test_name}" if info.variant_test_name else str(info.name)


@functools.cache
def unknown_operator() -> Callable[[torch.Tensor], torch.Tensor]:
    """Return an operator that no backend has heard of: it triples its argument."""

    def triple(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    operator = torch.library.custom_op("torchbay_testing::triple", triple, mutates_args=())
    operator.register_fake(torch.empty_like)
    function: Callable[[torch.Tensor], torch.Tensor] = torch.ops.torchbay_testing.triple.default
    return function


def static_request(
    function: Callable[..., Any], inputs: Sequence[torch.Tensor], decompositions: Any, **fields: Any
) -> CompileRequest:
    """Return a request for a flat function, with sizes as they are."""
    import_tracer()
    mode = fake_tensor_mode()
    fakes = [mode.from_tensor(tensor, static_shapes=True) for tensor in inputs]
    return _request(function, mode, fakes, decompositions, fields)


def dynamic_request(
    function: Callable[..., Any], tensor: torch.Tensor, decompositions: Any, **fields: Any
) -> CompileRequest:
    """Return a request for a function of a tensor and of its first size, which is symbolic."""
    import_tracer()
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    mode = fake_tensor_mode()
    sizes = [DimDynamic.DYNAMIC, *[DimDynamic.STATIC] * (tensor.dim() - 1)]
    context: Any = StatelessSymbolicContext(
        dynamic_sizes=sizes, constraint_sizes=[None] * tensor.dim()
    )
    fake = mode.from_tensor(tensor, symbolic_context=context, source=ConstantSource("x"))
    return _request(function, mode, [fake, fake.shape[0]], decompositions, fields)


def _request(
    function: Callable[..., Any],
    mode: Any,
    inputs: list[Any],
    decompositions: Any,
    fields: Mapping[str, Any],
) -> CompileRequest:
    with mode, torch.no_grad():
        graph = trace_to_graph(function, inputs, decompositions)
    graph.graph.eliminate_dead_code()
    graph.graph.lint()
    graph.recompile()
    return CompileRequest(graph=graph, example_inputs=inputs, **fields)

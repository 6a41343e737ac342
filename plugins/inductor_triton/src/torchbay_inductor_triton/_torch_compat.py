"""Inductor's private names, all of them; no other file of this plugin touches any.

Written against torch 2.13. Inductor is imported on use: its import takes seconds.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin

import torch
from torch.fx import Graph, GraphModule, Node

from torchbay.plugin import CompileRequest

__all__ = [
    "cpp_compiler",
    "decompositions",
    "entry_point",
    "generate",
    "has_type",
    "mode_settings",
    "setting_types",
    "settings_applied",
    "settings_digest",
    "starting_a_step",
    "takes_control_flow",
    "uses_cuda_graphs",
]

_Run = Callable[[list[Any]], Sequence[Any]]


def _compile_fx() -> Any:
    """Import Inductor proper, without the deprecation warnings that its import issues."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch._inductor import compile_fx
    return compile_fx


def decompositions() -> Mapping[Any, Callable[..., Any]]:
    """Return the operators that Inductor wants rewritten before it lowers a graph."""
    _compile_fx()
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


@functools.cache
def setting_types() -> Mapping[str, Any]:
    """Return the type of each setting of Inductor, as annotated."""
    from torch._inductor import config

    return {name: config.get_type(name) for name in config.get_config_copy()}


def mode_settings(mode: str) -> Mapping[str, Any]:
    """Return the settings that a mode of ``torch.compile`` stands for."""
    from torch._inductor import list_mode_options

    return list_mode_options(mode)


def settings_applied(settings: Mapping[str, Any]) -> contextlib.AbstractContextManager[None]:
    """Put settings in force, for this process, until the context ends."""
    from torch._inductor import config

    # Weights are inputs; freezing expects them as constants.
    return config.patch({**settings, "freezing": False})


def settings_digest() -> str:
    """Return a digest of the settings that shape code, whoever changed them."""
    from torch._inductor import config

    plain = (bool, int, float, str, type(None))
    portable = config.save_config_portable()
    shaping = {name: value for name, value in portable.items() if isinstance(value, plain)}
    return hashlib.sha256(repr(sorted(shaping.items())).encode()).hexdigest()[:16]


def has_type(value: object, expected: Any) -> bool:
    """Tell whether a setting annotated as ``expected`` may hold ``value``."""
    origin, choices = get_origin(expected), get_args(expected)
    if origin is Literal:
        return value in choices
    if origin in (Union, UnionType):
        return any(has_type(value, choice) for choice in choices)
    kind = origin or expected
    if isinstance(value, bool) and kind in (int, float):
        return False
    return not isinstance(kind, type) or isinstance(value, (int, float) if kind is float else kind)


def cpp_compiler() -> str | None:
    """Return the C++ compiler that Inductor would call, or None."""
    from torch._inductor import config

    candidates = config.cpp.cxx
    if not isinstance(candidates, list | tuple):
        candidates = (candidates,)
    return next(filter(None, map(shutil.which, filter(None, candidates))), None)


_TAKEN = frozenset({"cond", "while_loop", "scan", "flex_attention"})


def takes_control_flow(node: Node) -> bool:
    """Tell whether Inductor takes a node, if that is an operator that takes functions."""
    if not isinstance(node.target, torch._ops.HigherOrderOperator):
        return True
    is_loop = node.target.name() == "while_loop"
    carried: Any = node.args[2] if is_loop else ()
    # A number that a loop carries makes its passes fail.
    return node.target.name() in _TAKEN and all(isinstance(value, Node) for value in carried)


def generate(request: CompileRequest) -> tuple[Any, Sequence[Any]]:
    """Return Inductor's compiled code for a graph, and the strides of its outputs.

    This is what ``compile_fx`` does for a graph once AOTAutograd has traced it.
    """
    graph = _copied(request.graph)
    _output(graph).meta |= _output_promises(graph, request.free_strides)
    with _compiler_state(_fake_mode(graph)) as output_strides:
        code = _lowered(_simplified(graph, request.device), request)
    return code, output_strides


def _simplified(graph: GraphModule, device: torch.device) -> GraphModule:
    passes = _compile_fx()._recursive_joint_graph_passes
    # Older versions change the graph in place and know no input_device.
    known = inspect.signature(passes).parameters
    return passes(graph, **({"input_device": device} if "input_device" in known else {})) or graph


def _lowered(graph: GraphModule, request: CompileRequest) -> Any:
    from torch._inductor import config
    from torch._inductor.utils import BoxedBool

    compile_fx = _compile_fx()
    with config.patch(compile_fx.get_cpp_wrapper_config() if config.cpp_wrapper else {}):
        return compile_fx.compile_fx_inner(
            graph,
            list(request.example_inputs),
            # CUDA graphs read state in place instead of copying it on every call.
            static_input_idxs=list(range(request.state_count)),
            cudagraphs=BoxedBool(config.triton.cudagraphs),
            graph_id=next(compile_fx._graph_counter),
            cpp_wrapper=config.cpp_wrapper,
            is_inference=request.side == "inference",
            is_backward=request.side == "backward",
        )


def _copied(module: GraphModule) -> GraphModule:
    graph = Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    copied = GraphModule(module, graph)
    for name, inner in copied.named_children():
        if isinstance(inner, GraphModule):
            setattr(copied, name, _copied(inner))
    return copied


def _output(module: GraphModule) -> torch.fx.Node:
    [output] = module.graph.find_nodes(op="output")
    return output


def _output_promises(module: GraphModule, free: AbstractSet[int]) -> dict[str, Any]:
    """Return what keeps Inductor from choosing other strides for outputs than the graph's."""
    outputs = cast("tuple[torch.fx.Node, ...]", _output(module).args[0])
    return {
        "original_output_strides": [node.meta["val"].stride() for node in outputs],
        "user_visible_output_idxs": [i for i in range(len(outputs)) if i not in free],
        "output_stack_traces": [node.meta.get("stack_trace") for node in outputs],
    }


def _fake_mode(module: GraphModule) -> Any:
    """Return the mode of the graph's fakes, which a graph without inputs has as well."""
    from torch._guards import detect_fake_mode

    return detect_fake_mode([node.meta.get("val") for node in module.graph.nodes])


@contextlib.contextmanager
def _compiler_state(fake_mode: Any) -> Iterator[list[Any]]:
    """Enter the states that Inductor expects AOTAutograd to have entered.

    Yields the list to which it adds the strides of the outputs.
    """
    from torch._dispatch.python import enable_python_dispatcher
    from torch._dynamo import compiled_autograd
    from torch._guards import TracingContext, tracing
    from torch._inductor.virtualized import V

    context = TracingContext(fake_mode)
    output_strides: list[Any] = []
    context.output_strides = output_strides
    # Symbols stay symbols.
    context.fakify_first_call = True
    with (
        torch.no_grad(),
        torch._C._DisableAutocast(),
        V.set_fake_mode(fake_mode),
        tracing(context),
        compiled_autograd._disable(),
        enable_python_dispatcher(),
    ):
        yield output_strides


def entry_point(code: Any) -> _Run:
    """Return the function to call: generated code without Inductor's bookkeeping around it."""
    return getattr(code, "current_callable", None) or code


def uses_cuda_graphs() -> bool:
    """Tell whether the settings in force ask for CUDA graphs."""
    from torch._inductor import config

    return bool(config.triton.cudagraphs)


def starting_a_step(run: _Run) -> _Run:
    """Let CUDA graphs take each call for a new step, as each call of ``torch.compile`` is.

    Without it every call would be recorded as the continuation of the one before.
    """
    from torch._dynamo.mutation_guard import GenerationTracker

    def run_step(inputs: list[Any]) -> Sequence[Any]:
        GenerationTracker.generation += 1
        return run(inputs)

    return run_step

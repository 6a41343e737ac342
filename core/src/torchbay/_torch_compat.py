"""The only file of the core that touches private names of torch, and what differs by version.

Nothing here imports ``torch._dynamo`` or ``torch._inductor`` before a graph is traced.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any

import torch
from torch._C._dynamo.guards import GlobalStateGuard, TensorGuards
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode

from torchbay._torch_symbols import keep_symbols

__all__ = [
    "PAD",
    "ObservingDispatchMode",
    "ObservingFunctionMode",
    "OpOverload",
    "TensorGuards",
    "ambient_state_guard",
    "argument_of",
    "compiler_flag",
    "fake_tensor_mode",
    "fake_tolist",
    "function_mode_count",
    "functionalized",
    "global_module_hooks",
    "import_tracer",
    "inference_execution",
    "is_dynamo_entry",
    "is_fake",
    "is_inside_trace",
    "is_transformed",
    "leave_mode",
    "only_default_device_modes",
    "plain_execution",
    "pytree_node",
    "set_node_stack",
    "storage_id",
    "suspend_compiler_flag",
    "tensor_guard",
    "trace_to_graph",
    "untraced",
    "writes_of",
]


OpOverload = torch._ops.OpOverload

PAD = torch._VF._pad_packed_sequence
"""What `pad_packed_sequence` calls: it reads and writes integers where no mode sees it."""

_GLOBAL_HOOKS = (
    torch.nn.modules.module._global_forward_hooks,
    torch.nn.modules.module._global_forward_pre_hooks,
)


def global_module_hooks() -> tuple[dict[int, Any], ...]:
    """Return the hooks that run around every module, the same tuple every time."""
    return _GLOBAL_HOOKS


class ObservingDispatchMode(TorchDispatchMode):
    """A dispatch mode that also sees higher-order operators."""

    supports_higher_order_operators = True


ObservingFunctionMode = TorchFunctionMode


def is_dynamo_entry(code: CodeType) -> bool:
    """Whether code is where something under torch.compile, or a ``torch.cond``, is entered."""
    return code.co_name == "compile_wrapper" and code.co_filename.endswith("_dynamo/eval_frame.py")


def leave_mode(mode: TorchDispatchMode) -> None:
    """Take a dispatch mode off the stack wherever it stands, for the rest of its ``with`` block."""
    from torch.utils import _python_dispatch as stack

    above: list[TorchDispatchMode] = []
    while stack._get_current_dispatch_mode_stack():
        if (top := stack._pop_mode()) is mode:
            break
        above.append(top)
    for other in reversed(above):
        stack._push_mode(other)


@contextlib.contextmanager
def fake_tolist(answer: Callable[[torch.Tensor], Any]) -> Iterator[None]:
    """Answer ``tolist()`` of fake tensors, which is no operator and has no data to return."""
    from torch._subclasses.fake_tensor import FakeTensor

    def tolist(self: torch.Tensor) -> Any:
        return answer(self)

    before = FakeTensor.tolist
    FakeTensor.tolist = tolist  # type: ignore[method-assign]
    try:
        yield
    finally:
        FakeTensor.tolist = before  # type: ignore[method-assign]


_dispatch_modes = torch._C._len_torch_dispatch_stack
_functorch_level = torch._C._functorch.peek_interpreter_stack
_function_modes = torch._C._len_torch_function_stack


def is_inside_trace() -> bool:
    """Whether this call is itself being traced, transformed or observed by somebody."""
    return (
        torch.compiler.is_dynamo_compiling()
        or _dispatch_modes() > 0
        or _functorch_level() is not None
        or (_function_modes() > 0 and not only_default_device_modes())
    )


def function_mode_count() -> int:
    """Return how many torch-function modes are active, a default device being one."""
    return int(_function_modes())


def only_default_device_modes() -> bool:
    """Whether every active torch-function mode merely sets a default device."""
    stack = (torch._C._get_function_stack_at(i) for i in range(_function_modes()))
    return all(isinstance(mode, DeviceContext) for mode in stack)


def ambient_state_guard() -> Callable[[], bool]:
    """Return a check that grad mode, autocast, default dtype, determinism and the like are as now."""
    same_state = GlobalStateGuard().check
    is_inference = torch.is_inference_mode_enabled
    inference, modes, device = is_inference(), _function_modes(), torch.get_default_device()

    def ambient_state_is_unchanged() -> bool:
        return (
            same_state()
            and is_inference() is inference
            and _function_modes() == modes
            and (modes == 0 or torch.get_default_device() == device)
        )

    return ambient_state_is_unchanged


def tensor_guard(tensors: Sequence[torch.Tensor], fakes: Sequence[Any]) -> Callable[..., bool]:
    """Return a check of as many tensors, each against one of ``tensors``.

    Class, dispatch keys (layout, conjugate and negative bits, inference), dtype, device,
    ``requires_grad``, sizes and strides must be equal, and no tensor may be given twice. Sizes and
    strides that are symbols of a tensor's fake are left aside.
    """
    sizes: Any = [_fixed(fake.shape) for fake in fakes]
    strides: Any = [_fixed(f.stride()) if f.layout is torch.strided else None for f in fakes]
    guard = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    check: Callable[..., bool] = guard.check
    return check


def _fixed(sizes: Sequence[Any]) -> list[int | None]:
    return [size if isinstance(size, int) else None for size in sizes]


_flag_lock = threading.Lock()
_flag_users = 0
_fast_path_before = True


@contextlib.contextmanager
def compiler_flag() -> Iterator[None]:
    """Make ``torch.compiler.is_compiling()`` true, as it is under torch.compile and torch.export.

    Libraries then take the path they keep for compilers in the observed run and in the trace
    alike. So do PyTorch's transformer layers, which otherwise run one fused operator in eager and
    another sequence under make_fx. Both flags are one per process: they are counted, and put
    back when their last user leaves.
    """
    global _fast_path_before, _flag_users
    with _flag_lock:
        if _flag_users == 0:
            _fast_path_before = torch.backends.mha.get_fastpath_enabled()
        _flag_users += 1
        torch.compiler._is_compiling_flag = True
        torch.backends.mha.set_fastpath_enabled(False)
    # With a cache, the run that comes second does not cast what the first one did.
    caches = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(caches)
        with _flag_lock:
            _flag_users -= 1
            if _flag_users == 0:
                # Whoever else raised it is another thread: none of ours runs inside a trace.
                torch.compiler._is_compiling_flag = False
                torch.backends.mha.set_fastpath_enabled(_fast_path_before)


def suspend_compiler_flag() -> None:
    """Take the path for compilers back until `compiler_flag` ends."""
    torch.compiler._is_compiling_flag = False
    torch.backends.mha.set_fastpath_enabled(_fast_path_before)


@contextlib.contextmanager
def plain_execution() -> Iterator[None]:
    """Run what a graph says and nothing else: no autograd, no autocast."""
    with torch.no_grad(), torch._C._DisableAutocast():
        yield


@functools.cache
def import_tracer() -> None:
    """Import what tracing needs, so that no import happens while a call is observed."""
    import torch._inductor.config
    import torch._subclasses.fake_tensor
    import torch.fx.experimental.proxy_tensor
    import torch.fx.experimental.symbolic_shapes  # noqa: F401


@contextlib.contextmanager
def inference_execution() -> Iterator[None]:
    """Run a graph so that what it makes are inference tensors, as the program made them."""
    with torch.inference_mode(), torch._C._DisableAutocast():
        yield


def fake_tensor_mode() -> Any:
    """Return a fresh fake tensor mode that can name data-dependent sizes."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)


def is_fake(value: object) -> bool:
    """Whether a value is a fake tensor."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(value, FakeTensor)


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a wrapper made by ``vmap``, ``grad`` or functionalization."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def trace_to_graph(
    function: Callable[..., Any],
    inputs: Sequence[Any],
    decompositions: Any = None,
) -> torch.fx.GraphModule:
    """Trace a flat function below autograd; operators stay in program order, none is dropped."""
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.traceback import preserve_node_meta

    tracer = make_fx(
        function,
        decomposition_table=decompositions,
        tracing_mode="real",
        _error_on_data_dependent_ops=False,
    )
    with preserve_node_meta():
        graph: torch.fx.GraphModule = tracer(*inputs)
    return graph


@contextlib.contextmanager
def untraced() -> Iterator[None]:
    """Compute with real tensors inside a trace."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def set_node_stack(text: str) -> None:
    """Give the nodes that are traced next this stack, formatted like a traceback."""
    from torch.fx import traceback

    traceback.set_stack_trace([text] if text else [])


def functionalized(graph: torch.fx.GraphModule, mode: Any) -> Callable[..., Any]:
    """Return the graph as a function without in-place operators but a last copy into each input.

    Args:
        graph: A traced graph.
        mode: The mode it was traced in: sizes that depend on data get the symbols they had.
    """
    interpreter = _Retracer(graph, mode)

    def run(*inputs: Any) -> Any:
        return interpreter.run(*inputs)

    functional: Callable[..., Any] = torch.func.functionalize(run)
    return functional


class _Retracer(torch.fx.Interpreter):
    """Runs a graph whose operators may be decomposed into ones with other strides."""

    def __init__(self, graph: torch.fx.GraphModule, mode: Any) -> None:
        super().__init__(graph)
        self._mode = mode

    def run_node(self, n: torch.fx.Node) -> Any:
        result = super().run_node(n)
        keep_symbols(self._mode, n, result)
        return result

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # A view where one is possible, else a copy: what was viewed may have other strides now.
        if target is torch.ops.aten.view.default:
            target = torch.ops.aten.reshape.default
        return super().call_function(target, args, kwargs)


def writes_of(operator: Any) -> tuple[tuple[int, str], ...]:
    """Return position and name of the arguments an operator's schema says it changes."""
    if not isinstance(operator, OpOverload):
        return ()
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(operator._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def argument_of(
    operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], name: str
) -> Any | None:
    """Return what an operator is given under a name, by default too; None if it has none such."""
    for position, argument in enumerate(operator._schema.arguments):
        if argument.name == name:
            given = args[position] if position < len(args) else kwargs.get(name)
            return argument.default_value if given is None else given
    return None


def storage_id(tensor: torch.Tensor) -> int:
    """Return a number that tensors have in common, among those alive, if they share memory."""
    return int(tensor.untyped_storage()._cdata)


def pytree_node(kind: type) -> Any | None:
    """Return how PyTorch takes a registered container apart, or None."""
    from torch.utils import _pytree

    return _pytree.SUPPORTED_NODES.get(kind)

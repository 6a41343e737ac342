"""The only file of the core that touches private names of torch, and what differs by version.

Nothing here imports ``torch._dynamo`` or ``torch._inductor`` before a graph is traced.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any

import torch
from torch._C._dynamo.guards import GlobalStateGuard, TensorGuards
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode

from torchbay._torch_symbols import is_number, keep_symbols

__all__ = [
    "PAD",
    "HigherOrderOperator",
    "ObservingDispatchMode",
    "ObservingFunctionMode",
    "OpOverload",
    "TensorGuards",
    "ambient_state_guard",
    "argument_of",
    "compiled_name",
    "compiler_flag",
    "draws",
    "fake_tensor_mode",
    "fake_tolist",
    "fakes_as_tensors",
    "fast_path_enabled",
    "function_mode_count",
    "function_modes",
    "functionalized",
    "global_module_hooks",
    "has_effect_token",
    "has_saved_tensor_hooks",
    "import_tracer",
    "inference_execution",
    "is_dynamo_entry",
    "is_fake",
    "is_inside_trace",
    "is_transformed",
    "lazy_signs_resolved",
    "leave_mode",
    "map_subgraphs",
    "map_tensors",
    "only_default_device_modes",
    "operators_called_directly",
    "plain_execution",
    "pytree_node",
    "returns_other_lse",
    "run_skipped_functions",
    "set_node_stack",
    "storage_id",
    "suspend_compiler_flag",
    "tensor_guard",
    "tensors_among",
    "trace_to_graph",
    "untraced",
    "with_operands",
    "without_modes",
    "without_recording",
    "writes_of",
]


OpOverload = torch._ops.OpOverload
HigherOrderOperator = torch._ops.HigherOrderOperator

PAD = torch._VF._pad_packed_sequence
"""What `pad_packed_sequence` calls: it reads and writes integers where no mode sees it."""

_GLOBAL_HOOKS = (
    torch.nn.modules.module._global_forward_hooks,
    torch.nn.modules.module._global_forward_pre_hooks,
    torch.nn.modules.module._global_backward_hooks,
    torch.nn.modules.module._global_backward_pre_hooks,
)


def global_module_hooks() -> tuple[dict[int, Any], ...]:
    """Return the hooks that run around every module, the same tuple every time."""
    return _GLOBAL_HOOKS


class ObservingDispatchMode(TorchDispatchMode):
    """A dispatch mode that also sees higher-order operators."""

    supports_higher_order_operators = True


ObservingFunctionMode = TorchFunctionMode


@contextlib.contextmanager
def lazy_signs_resolved() -> Iterator[None]:
    """Let kernels see lazy conjugations and negations, as outside a dispatch mode.

    Below one, the keys that resolve them are excluded, and ``linalg.pinv`` of complex numbers, for
    one, is wrong.
    """
    guard, keys = torch._C._SetExcludeDispatchKeyGuard, torch._C.DispatchKey
    with guard(keys.Conjugate, False), guard(keys.Negative, False):
        yield


def is_dynamo_entry(code: CodeType) -> bool:
    """Whether code is where something under torch.compile is entered."""
    return code.co_name == "compile_wrapper" and code.co_filename.endswith("_dynamo/eval_frame.py")


def compiled_name(variables: Mapping[str, Any]) -> str:
    """Return the name of what torch.compile was given, by the variables of its entry."""
    function = variables.get("fn")
    return str(getattr(function, "__qualname__", type(function).__qualname__))


_direct = threading.local()
_direct_lock = threading.Lock()
_direct_users = 0
_compile_and_call: Any = None

DirectCall = Callable[[Callable[..., Any], tuple[Any, ...], Callable[[], Any]], Any]
"""What runs a higher-order operator: its function, the arguments, and torch's own way to do it."""


@contextlib.contextmanager
def operators_called_directly(call: DirectCall) -> Iterator[None]:
    """Have ``torch.cond`` and its like call ``call`` in this thread, instead of torch.compile.

    Outside a trace these functions hand a call of their operator to torch.compile. Where they do
    is replaced once for all threads, counted, and put back when the last user leaves.
    """
    global _compile_and_call, _direct_users
    from torch._higher_order_ops import utils

    if not hasattr(utils, "_hop_compile_and_call"):
        # Older versions of torch have no one place for it: such calls run eagerly there.
        yield
        return
    with _direct_lock:
        if _direct_users == 0:
            _compile_and_call = utils._hop_compile_and_call
            utils._hop_compile_and_call = _called_directly
            _switch_flex_attention(is_direct=True)
        _direct_users += 1
    before = getattr(_direct, "call", None)
    _direct.call = call
    try:
        yield
    finally:
        _direct.call = before
        with _direct_lock:
            _direct_users -= 1
            if _direct_users == 0:
                utils._hop_compile_and_call = _compile_and_call
                _switch_flex_attention(is_direct=False)


def _called_directly(
    function: Callable[..., Any], args: Any, kwargs: Mapping[str, Any] | None = None
) -> Any:
    original, call = _compile_and_call, getattr(_direct, "call", None)
    if call is None or kwargs:
        return original(function, args, kwargs)
    # What torch.cond passes on; every other function has made its arguments flat by itself.
    is_cond = function.__name__ == "_cond_op_wrapper"
    return call(_flat_cond if is_cond else function, args, lambda: original(function, args, kwargs))


def _flat_cond(pred: Any, true_fn: Any, false_fn: Any, operands: Any) -> Any:
    """Call the operator with flat operands and branches that return a flat tuple."""
    from torch.utils import _pytree as pytree

    if is_number(pred):
        # What a Python number decides, the program does.
        return (true_fn if pred else false_fn)(*operands)
    leaves, structure = pytree.tree_flatten(tuple(operands))
    returned: list[Any] = []

    def flat(branch: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
        def run(*values: Any) -> tuple[Any, ...]:
            results, form = pytree.tree_flatten(branch(*pytree.tree_unflatten(values, structure)))
            returned.append(form)
            if form != returned[0]:
                raise ValueError(f"the branches of torch.cond return {returned[0]} and {form}")
            return tuple(results)

        return run

    cond = torch.ops.higher_order.cond
    results = cond(pred, flat(true_fn), flat(false_fn), tuple(leaves))
    return pytree.tree_unflatten(results, returned[0])


class _DirectHere:
    """True in threads that call operators directly.

    Gradients need torch's own way, and so does a log-sum-exp whose base depends on who asks.
    """

    def __init__(self, otherwise: object) -> None:
        self._otherwise = otherwise

    def __bool__(self) -> bool:
        is_direct = getattr(_direct, "call", None) is not None and not torch.is_grad_enabled()
        options = sys._getframe(1).f_locals.get("kernel_options")
        return (is_direct and not returns_other_lse(options)) or bool(self._otherwise)


def returns_other_lse(options: Any) -> bool:
    """Whether options of ``flex_attention`` make compiled code return another log-sum-exp.

    FLASH kernels return it to base e, everything else to base 2.
    """
    is_flash = isinstance(options, Mapping) and options.get("BACKEND") == "FLASH"
    return is_flash and bool(options.get("OUTPUT_LOGSUMEXP"))


_FLEX_MODULE = "torch.nn.attention.flex_attention"
_FLEX_SWITCH = "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"


def _switch_flex_attention(*, is_direct: bool) -> None:
    """Have ``flex_attention`` ask the thread whether to use torch.compile, or no longer."""
    module = sys.modules.get(_FLEX_MODULE)
    switch = getattr(module, _FLEX_SWITCH, None)
    if is_direct and switch is not None:
        setattr(module, _FLEX_SWITCH, _DirectHere(switch))
    elif isinstance(switch, _DirectHere):
        setattr(module, _FLEX_SWITCH, switch._otherwise)


def has_effect_token(operator: Any) -> bool:
    """Whether an operator is registered as one whose effects must stay in order."""
    from torch._higher_order_ops import effects

    return operator not in _CHECKS and effects._get_effect(operator) is not None


_CHECKS = (
    torch.ops.aten._assert_async.default,
    torch.ops.aten._assert_async.msg,
    torch.ops.aten._linalg_check_errors.default,
)
"""Operators that raise or do nothing."""


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Return nested containers with something else in the place of each tensor."""
    from torch.utils import _pytree as pytree

    return pytree.tree_map_only(torch.Tensor, function, value)


def map_subgraphs(function: Callable[[Any], Any], args: Sequence[Any]) -> tuple[Any, ...]:
    """Return an operator's arguments with something else in the place of each function."""
    return tuple(
        map_subgraphs(function, value)
        if type(value) is tuple
        else function(value)
        if callable(value) and not isinstance(value, torch.Tensor)
        else value
        for value in args
    )


def tensors_among(value: Any) -> list[torch.Tensor]:
    """Return the tensors in nested containers, in order."""
    from torch.utils import _pytree as pytree

    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


_OPERANDS = {
    "cond": (3,),
    "while_loop": (3,),
    "scan": (3,),
    "associative_scan": (2,),
    "map_impl": (2,),
    "flex_attention": (7, 8),
}
"""Where a kept operator takes what it passes on to its functions, last of all."""

_NAMES_OF_OPERANDS = ("additional_inputs", "score_mod_other_buffers", "mask_mod_other_buffers")


def with_operands(
    operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], more: Sequence[Any]
) -> tuple[Any, ...]:
    """Return a kept operator's arguments, all by position, with further operands.

    Raises:
        ValueError: It is given something by name that is no operands.
    """
    if unknown := kwargs.keys() - set(_NAMES_OF_OPERANDS):
        raise ValueError(f"{operator} is given {', '.join(sorted(unknown))}")
    given = [*args, *(kwargs[name] for name in _NAMES_OF_OPERANDS if name in kwargs)]
    for place in _OPERANDS[operator.name()]:
        given += [()] * (place + 1 - len(given))
        given[place] = (*given[place], *more)
    return tuple(given)


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Take every dispatch mode off for a while."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        yield


@contextlib.contextmanager
def without_recording(values: Any) -> Iterator[None]:
    """Run operators on fakes such as these, so that nothing gets into the graph being traced."""
    from torch._guards import detect_fake_mode
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

    mode: Any = detect_fake_mode(tensors_among(values))
    fresh = mode.shape_env.ignore_fresh_unbacked_symbols() if mode else contextlib.nullcontext()
    with disable_proxy_modes_tracing(), fresh:
        yield


def run_skipped_functions(operator: Any, args: Sequence[Any]) -> None:
    """Run the functions that a kept operator does not run when its operands are fakes."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    if operator.name() == "while_loop":
        condition, _, carried, more = args
        condition(*carried, *more)
    elif operator.name() == "flex_attention":
        query, score, mask = args[0], args[3], args[4][-1]
        places = [query.new_zeros((), dtype=torch.int) for _ in range(4)]
        with TransformGetItemToIndex():
            score(query.new_zeros(()), *places, *(args[7] if len(args) > 7 else ()))
            mask(*places, *(args[8] if len(args) > 8 else ()))


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


_top_saved_tensor_hooks = torch._C._autograd._top_saved_tensors_default_hooks


def has_saved_tensor_hooks() -> bool:
    """Whether somebody, such as a checkpoint, intercepts what autograd saves in this thread."""
    return _top_saved_tensor_hooks(True) is not None


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
    return all(isinstance(mode, DeviceContext) for mode in function_modes())


def function_modes() -> list[Any]:
    """Return the torch-function modes that are active, the outermost first."""
    return [torch._C._get_function_stack_at(i) for i in range(_function_modes())]


def ambient_state_guard() -> Callable[[], bool]:
    """Return a check that grad mode, autocast, default dtype, determinism and the like are as now.

    It fails while autograd saves under hooks, whatever is the case now.
    """
    same_state = GlobalStateGuard().check
    is_inference = torch.is_inference_mode_enabled
    inference, modes, device = is_inference(), _function_modes(), torch.get_default_device()
    saves = torch.is_grad_enabled()

    def ambient_state_is_unchanged() -> bool:
        return (
            same_state()
            and not (saves and _top_saved_tensor_hooks(True))
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


def fast_path_enabled() -> bool:
    """Whether the user lets transformer layers take their fused path, whatever `compiler_flag` does."""
    return _fast_path_before if _flag_users else torch.backends.mha.get_fastpath_enabled()


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
def fakes_as_tensors() -> Iterator[None]:
    """Let functions that work on lists of tensors take fakes where they take plain tensors."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils import _foreach_utils

    known = _foreach_utils._foreach_supported_types
    known.append(FakeTensor)
    try:
        yield
    finally:
        known.remove(FakeTensor)


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
        if isinstance(target, HigherOrderOperator):
            args = map_subgraphs(lambda subgraph: _Retracer(subgraph, self._mode).run, args)
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


def draws(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of an operator draws from a random generator."""
    if not isinstance(operator, OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    # Attention is tagged for its dropout, which is seldom on, and its backward for being given
    # what the forward drew.
    names = {argument.name for argument in operator._schema.arguments}
    is_given = not names.isdisjoint({"philox_seed", "rng_state"})
    return not is_given and argument_of(operator, args, kwargs, "dropout_p") != 0.0


def storage_id(tensor: torch.Tensor) -> int:
    """Return a number that tensors have in common, among those alive, if they share memory."""
    return int(tensor.untyped_storage()._cdata)


def pytree_node(kind: type) -> Any | None:
    """Return how PyTorch takes a registered container apart, or None."""
    from torch.utils import _pytree

    return _pytree.SUPPORTED_NODES.get(kind)

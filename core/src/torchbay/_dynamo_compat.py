"""The only file of the core that touches private names of Dynamo, torch.compile's front-end.

Nothing here imports ``torch._dynamo`` before something is compiled with ``tracer="dynamo"``.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import attrs
import torch
from torch.fx import GraphModule, Node

__all__ = [
    "Frame",
    "detached",
    "dynamo_error",
    "dynamo_limits",
    "example_of",
    "forget_code",
    "frame_being_compiled",
    "has_begun",
    "hidden_from_dynamo",
    "higher_order_name",
    "inference_nodes",
    "is_due_to_warning",
    "optimized",
    "source_of",
    "user_error_line",
]


@attrs.frozen
class Frame:
    """The frame whose graph Dynamo hands over.

    Attributes:
        code: The frame's code; of a part after a graph break, code that Dynamo wrote.
        broken: Why the graph ends before the frame does, or an empty string.
    """

    code: CodeType | None = None
    broken: str = ""


def optimized(
    function: Callable[..., Any],
    backend: Callable[..., Any],
    *,
    fullgraph: bool,
    dynamic: bool | None,
    on_guards: Callable[[list[str]], None],
    on_guard_failure: Callable[[str], None],
) -> Callable[..., Any]:
    """Return what ``torch.compile`` would, which also tells of guards and of those that failed."""
    import torch._dynamo

    wrap = torch._dynamo.optimize(
        backend,
        nopython=fullgraph,
        dynamic=dynamic,
        guard_export_fn=lambda guards: on_guards(_guard_lines(guards)),
        guard_fail_fn=lambda failure: on_guard_failure(str(failure.reason).strip()),
    )
    compiled: Callable[..., Any] = wrap(function)
    return compiled


def _guard_lines(guards: Any) -> list[str]:
    lines = [line for guard in guards for line in _guard_code(guard)]
    return list(dict.fromkeys(lines))


def _guard_code(guard: Any) -> list[str]:
    """Return a guard's source; where Dynamo keeps none, its kind and what it is about."""
    # Marks of dynamic dimensions stand in the source of every tensor's guard, and little else.
    lines = [str(line) for line in guard.code_list or () if "'_dynamo_" not in str(line)]
    kind = guard.create_fn_name()
    return lines or [f"{kind}({guard.name})" if guard.name else kind]


@contextlib.contextmanager
def dynamo_limits(recompile_limit: int, *, fail: bool, symbolic_floats: bool) -> Iterator[None]:
    """Let Dynamo compile a code object this often, and raise beyond it if asked to.

    It guards the hooks of modules too, which it leaves out by default, lets NumPy draw from NumPy's
    own stream, and breaks the graph where a `random.Random` object draws.
    """
    from torch._dynamo import config

    _watch_random_objects()

    wanted = {
        "recompile_limit": recompile_limit,
        "fail_on_recompile_limit_hit": fail,
        "skip_nnmodule_hook_guards": False,
        "use_numpy_random_stream": True,
    }
    if not symbolic_floats:
        wanted["specialize_float"] = True
    # Not config.patch: it makes a context variable every time, and those are never freed.
    before = {name: getattr(config, name) for name in wanted}
    differing = [name for name, value in wanted.items() if before[name] != value]
    for name in differing:
        setattr(config, name, wanted[name])
    _serving.depth = getattr(_serving, "depth", 0) + 1
    try:
        yield
    finally:
        _serving.depth -= 1
        for name in differing:
            setattr(config, name, before[name])


_serving = threading.local()


@functools.cache
def _watch_random_objects() -> None:
    """Let Dynamo break the graph at a `random.Random` object, in calls that are ours alone.

    Otherwise every later call gets the number that the object drew when Dynamo traced it.
    """
    from torch._dynamo.variables import RandomVariable

    is_supported = RandomVariable.is_supported_random_obj

    def is_supported_elsewhere(value: Any) -> bool:
        return not getattr(_serving, "depth", 0) and is_supported(value)

    vars_of: Any = RandomVariable
    vars_of.is_supported_random_obj = staticmethod(is_supported_elsewhere)


def dynamo_error(error: BaseException) -> tuple[str, BaseException | None]:
    """Return what kind of error of Dynamo's this is, and what a backend raised inside of it.

    The kinds are ``"backend"``, ``"limit"`` and ``"capture"``; an empty string is none of them.
    """
    from torch._dynamo import exc

    if isinstance(error, exc.BackendCompilerFailed):
        return "backend", error.inner_exception
    if isinstance(error, exc.FailOnRecompileLimitHit):
        return "limit", None
    if isinstance(error, exc.TorchDynamoException):
        return "capture", None
    return "", None


def has_begun(error: BaseException) -> bool:
    """Whether a frame of the call ran before Dynamo gave up on this or another one."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_code.co_name != "compile_wrapper":
        traceback = traceback.tb_next
    if traceback is None:
        return True
    frame = traceback.tb_next
    compilers = ("_dynamo/convert_frame.py", "_dynamo/output_graph.py")
    return frame is not None and not frame.tb_frame.f_code.co_filename.endswith(compilers)


def is_due_to_warning(error: BaseException | None) -> bool:
    """Whether a warning led to an error: where warnings are errors, those of tracing are too."""
    while error is not None and not isinstance(error, Warning):
        error = error.__cause__ or error.__context__
    return error is not None


def user_error_line(error: BaseException) -> str:
    """Return ``file:line`` of the user's code that Dynamo was at when it gave up."""
    stack = getattr(error, "real_stack", None)
    return f"{stack[-1].filename}:{stack[-1].lineno}" if stack else ""


def frame_being_compiled() -> Frame:
    """Return which frame Dynamo is at; only from within a backend function."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        owner = frame.f_locals.get("self")
        if (root := getattr(owner, "root_tx", None)) is not None:
            return Frame(root.f_code, _broken(getattr(owner, "compile_subgraph_reason", None)))
        frame = frame.f_back
    return Frame()


def _broken(reason: Any) -> str:
    if reason is None or not getattr(reason, "graph_break", False):
        return ""
    what = str(reason.reason).strip().partition("\n")[0]
    if not (stack := reason.user_stack):
        return what
    return f"{what} at {stack[-1].filename}:{stack[-1].lineno}"


def forget_code(code: CodeType) -> None:
    """Drop what Dynamo compiled for a code object."""
    import torch._dynamo

    torch._dynamo.reset_code(code)


@contextlib.contextmanager
def hidden_from_dynamo(mode: Any) -> Iterator[None]:
    """Work on a graph inside Dynamo's backend function as one works outside of it."""
    from torch._guards import tracing

    flag, strangers = torch.compiler._is_compiling_flag, mode.allow_non_fake_inputs
    caches = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    # Constants of the graph are real tensors.
    mode.allow_non_fake_inputs = True
    try:
        with tracing(None):
            yield
    finally:
        mode.allow_non_fake_inputs = strangers
        torch.set_autocast_cache_enabled(caches)
        torch.compiler._is_compiling_flag = flag


def detached(mode: Any, fake: torch.Tensor) -> torch.Tensor:
    """Return a fake over the same memory that can be changed without changing Dynamo's own."""
    with mode, torch.no_grad():
        return fake.detach()


def example_of(node: Node) -> Any:
    """Return the fake tensor or symbolic size that Dynamo knows a node by."""
    return node.meta.get("example_value")


def source_of(node: Node) -> str:
    """Return how Dynamo writes where an input of its graph comes from."""
    source = getattr(node, "_dynamo_source", None)
    name = getattr(source, "name", node.name)
    return str(name() if callable(name) else name)


def higher_order_name(graph: GraphModule) -> str | None:
    """Return the name of a higher-order operator that a graph calls, if it calls one."""
    kind = torch._ops.HigherOrderOperator
    targets = (node.target for node in graph.graph.nodes if node.op == "call_function")
    return next((str(target) for target in targets if isinstance(target, kind)), None)


def inference_nodes(graph: GraphModule) -> frozenset[Node]:
    """Return the nodes that run in an inference mode which the graph enters itself."""
    modes = torch.autograd.grad_mode
    inside: set[Node] = set()
    entered: list[bool] = []
    for node in graph.graph.nodes:
        if node.target is modes._enter_inference_mode:
            entered.append(bool(node.args[0]))
        elif node.target is modes._exit_inference_mode:
            entered.pop()
        elif entered and entered[-1]:
            inside.add(node)
    return frozenset(inside)

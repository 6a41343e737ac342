"""`torchbay.compile`, and what it returns."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import os
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, overload

import torch

from torchbay._compile import Dispatcher
from torchbay._dynamic_shapes import check_dynamic_shapes
from torchbay._dynamo import DynamoDispatcher
from torchbay._settings import Settings
from torchbay.errors import InvalidArgument

__all__ = [
    "AnyDispatcher",
    "CompiledFunction",
    "CompiledModule",
    "compile",
    "dispatcher_of",
    "leading_arguments",
]

Function = TypeVar("Function", bound=Callable[..., Any])


AnyDispatcher = Dispatcher | DynamoDispatcher


def _dispatcher(original: Callable[..., Any], settings: Settings) -> AnyDispatcher:
    kind = DynamoDispatcher if settings.tracer == "dynamo" else Dispatcher
    return kind(original, settings)


class CompiledFunction:
    """A callable served from compiled graphs. Otherwise it behaves as the original does."""

    def __init__(self, original: Callable[..., Any], settings: Settings) -> None:
        functools.update_wrapper(self, original, updated=())
        self._original = original
        self._settings = settings
        self.dispatch = _dispatcher(original, settings)
        self._bound: dict[int, AnyDispatcher] = {}

    @property
    def original(self) -> Callable[..., Any]:
        """The callable as it was passed to `torchbay.compile`."""
        return self._original

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.dispatch(args, kwargs)

    def warmup(self, /, *args: Any, **kwargs: Any) -> None:
        """Compile for a call with these arguments, without the call's effects.

        The original does run once, but what it writes to tensors, to reachable Python state and to
        PyTorch's random generators is undone. Does nothing if such a call is covered already.
        """
        self.dispatch.warmup(args, kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Bind to an instance; each has specializations and a budget of its own."""
        is_method = hasattr(type(self._original), "__get__")
        if instance is None or not is_method or isinstance(self._original, staticmethod):
            return self
        return _BoundFunction(self, instance)

    def dispatcher_for(self, instance: Any) -> AnyDispatcher:
        """Return what serves this instance's calls; it goes when the instance does."""
        key = id(instance)
        if key not in self._bound:
            try:
                weakref.finalize(instance, self._bound.pop, key, None)
            except TypeError:
                return self.dispatch
            self._bound[key] = _dispatcher(self._original, self._settings)
        return self._bound[key]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_original" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._original, name)

    def __repr__(self) -> str:
        return f"<compiled {self._original!r}>"

    def __copy__(self) -> CompiledFunction:
        return CompiledFunction(self._original, self._settings)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledFunction:
        return CompiledFunction(copy.deepcopy(self._original, memo), self._settings)

    def __reduce__(self) -> Any:
        if _found_by_name(self) is self:
            return self.__qualname__
        return CompiledFunction, (self._original, self._settings)


class _BoundFunction:
    """A compiled function bound to an instance, as a method is."""

    def __init__(self, function: CompiledFunction, instance: Any) -> None:
        functools.update_wrapper(self, function.original, updated=())
        self.__func__ = function
        self.__self__ = instance
        self.dispatch = function.dispatcher_for(instance)

    @property
    def original(self) -> Callable[..., Any]:
        """The method as it was before compilation."""
        method: Callable[..., Any] = self.__func__.original.__get__(self.__self__)
        return method

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.dispatch((self.__self__, *args), kwargs)

    def warmup(self, /, *args: Any, **kwargs: Any) -> None:
        """Compile for a call with these arguments, as `CompiledFunction.warmup` does."""
        self.dispatch.warmup((self.__self__, *args), kwargs)


class CompiledModule(torch.nn.Module):
    """A module whose calls are served from compiled graphs.

    It holds no parameter and no submodule of its own: every attribute is the original's, to read
    and to write, so that names in a ``state_dict`` stay as they are. Methods that return the module
    return the compiled one.
    """

    __slots__ = ("_torchbay_dispatch", "_torchbay_original", "_torchbay_settings")

    def __init__(self, original: torch.nn.Module, settings: Settings) -> None:
        _write(self, "_torchbay_original", original)
        _write(self, "_torchbay_settings", settings)
        _write(self, "_torchbay_dispatch", _dispatcher(original, settings))

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return _dispatch_of(self)(args, kwargs)

    def __getattribute__(self, name: str) -> Any:
        if name in _OWN:
            return object.__getattribute__(self, name)
        original = _original_of(self)
        return original if name == "original" else getattr(original, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_original_of(self), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(_original_of(self), name)

    def __dir__(self) -> list[str]:
        return sorted({*dir(_original_of(self)), "original", "warmup"})

    def __repr__(self) -> str:
        return f"Compiled({_original_of(self)!r})"

    def __getitem__(self, key: Any) -> Any:
        return _original_of(self)[key]

    def __len__(self) -> int:
        return len(_original_of(self))

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Any:
        return iter(_original_of(self))

    def __contains__(self, item: Any) -> bool:
        return item in _original_of(self)

    def warmup(self, /, *args: Any, **kwargs: Any) -> None:
        """Compile for a call with these arguments, without the call's effects.

        The original does run once, but what it writes to tensors, to reachable Python state and to
        PyTorch's random generators is undone. Does nothing if such a call is covered already.
        """
        _dispatch_of(self).warmup(args, kwargs)

    def __copy__(self) -> CompiledModule:
        return CompiledModule(copy.copy(_original_of(self)), _settings_of(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledModule:
        return CompiledModule(copy.deepcopy(_original_of(self), memo), _settings_of(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return CompiledModule, (_original_of(self), _settings_of(self))


_write = object.__setattr__
# Slots, read without __getattribute__: this is the way of every call.
_dispatch_of, _original_of, _settings_of = (
    vars(CompiledModule)[name].__get__ for name in CompiledModule.__slots__
)


def _returning_the_compiled(name: str) -> Callable[..., Any]:
    method = getattr(torch.nn.Module, name)

    @functools.wraps(method)
    def call(self: CompiledModule, *args: Any, **kwargs: Any) -> Any:
        original = _original_of(self)
        result = getattr(original, name)(*args, **kwargs)
        return self if result is original else result

    return call


_CHAINED = (
    "apply",
    "bfloat16",
    "cpu",
    "cuda",
    "double",
    "eval",
    "float",
    "half",
    "requires_grad_",
    "share_memory",
    "to",
    "to_empty",
    "train",
    "type",
)
for _name in _CHAINED:
    setattr(CompiledModule, _name, _returning_the_compiled(_name))

_OWN = frozenset(
    {*_CHAINED, "warmup", "__class__", "__copy__", "__deepcopy__", "__reduce_ex__", "__reduce__"}
)


@overload
def compile(fn: Function, **settings: Any) -> Function: ...  # noqa: A001
@overload
def compile(fn: None = None, **settings: Any) -> Callable[[Function], Function]: ...  # noqa: A001
def compile(  # type: ignore[misc] # noqa: A001, PLR0913 - all as torch.compile names it
    fn: Any = None,
    *,
    backend: Any = None,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    dynamic_shapes: Any = None,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    tracer: str = "auto",
    partitioner: Literal["min_cut", "default"] = "min_cut",
    fallback: Any = ...,
    recompile_limit: int = 8,
    fail_on_recompile_limit: bool = False,
    name: str | None = None,
    disable: bool = False,
) -> Any:
    """Return a callable that is served from graphs compiled by a backend.

    The first call with a new kind of arguments runs the original, for real and once; its result is
    what the caller gets. The graph captured from it serves the calls that follow, as long as
    everything it relied on still holds.

    Args:
        fn: A function, method, callable object or ``torch.nn.Module``. Without it, a decorator.
        backend: The name of an installed backend, a backend object, or a function
            ``(graph_module, example_inputs, **options) -> callable`` as torch.compile takes it.
            By default `torchbay.set_default_backend`, else ``TORCHBAY_BACKEND``, else the only one
            installed besides ``eager``, else ``eager``.
        fullgraph: Raise `torchbay.errors.NotServed` for a call that cannot be served from a graph,
            after it has run. By default it is served eagerly, with one warning.
        dynamic: Whether sizes of tensors, and int and float arguments, are symbols that one graph
            leaves open. By default they are from the second value on that is seen; with True those
            of the call's own tensors are from the first call on; with False each set of sizes gets
            a specialization. A size of 0 or 1 always gets one of its own.
        dynamic_shapes: The same for each argument, as torch.export takes it: a dict by argument
            name, or a tuple by position, of ``{dimension: torch.export.Dim(...)}``, nested as the
            arguments are. What it leaves out is fixed. A call outside a ``Dim``'s range, or whose
            equal ``Dim``s differ, gets another specialization. Excludes ``dynamic``, and
            ``tracer="dynamo"``.
        mode: A named set of the backend's options.
        options: The backend's options by name. Excludes ``mode``.
        tracer: How graphs are captured: ``"auto"`` or ``"make_fx"``, which mean the same for now;
            or ``"dynamo"``, PyTorch's own front-end, with its guards and its limits: symbolic sizes
            as ``torch.compile`` makes them for backends that take them, ``recompile_limit`` counted
            per code object, and Python between graphs where one does not hold the whole call.
        partitioner: What a call that needs gradients keeps for its backward: with ``"min_cut"``,
            what is cheap to compute from the rest is computed again; with ``"default"``, everything
            is kept.
        fallback: The backend for graphs that ``backend`` declines. By default, and with None, such
            calls run eagerly, with one warning.
        recompile_limit: The most sets of guards to compile for. Calls beyond it run eagerly.
        fail_on_recompile_limit: Raise `torchbay.errors.RecompileLimit` for them instead.
        name: What messages call it.
        disable: Return ``fn`` itself.

    Raises:
        InvalidArgument: An argument cannot be used; raised before any work.
        UnknownBackend: No backend of that name is installed.
    """
    given = Settings(
        backend=backend,
        fullgraph=fullgraph,
        dynamic=dynamic,
        dynamic_shapes=dynamic_shapes,
        mode=mode,
        options=options,
        tracer=tracer,
        partitioner=partitioner,
        fallback=fallback,
        recompile_limit=recompile_limit,
        fail_on_recompile_limit=fail_on_recompile_limit,
        name=name,
    )
    if disable or os.environ.get("TORCHBAY_OFF") == "1":
        return fn if fn is not None else lambda function: function
    if fn is None:
        return lambda function: _compiled(function, given)
    return _compiled(fn, given)


def _compiled(fn: Any, settings: Settings) -> Any:
    settings.check_backend()
    if isinstance(fn, CompiledModule):
        fn = _original_of(fn)
    elif isinstance(fn, (CompiledFunction, _BoundFunction)):
        fn = fn.original
    _check_callable(fn)
    if settings.dynamic_shapes is not None:
        check_dynamic_shapes(settings.dynamic_shapes, fn)
    if isinstance(fn, torch.nn.Module):
        return CompiledModule(fn, settings)
    return CompiledFunction(fn, settings)


def _check_callable(fn: Any) -> None:
    if isinstance(fn, type):
        problem = "is a class; compile an instance or one of its methods"
    elif inspect.iscoroutinefunction(fn) or inspect.isasyncgenfunction(fn):
        problem = "is a coroutine function; compile the functions it calls"
    elif inspect.isgeneratorfunction(fn):
        problem = "is a generator function; compile the functions it calls"
    elif not callable(fn):
        problem = "is not callable"
    else:
        return
    raise InvalidArgument(f"{fn!r} {problem}", remedy="Pass a function, a method or a module")


def _found_by_name(function: Any) -> Any:
    """Return what stands under a function's own name in its module, if anything."""
    found: Any = importlib.import_module(function.__module__)
    for part in function.__qualname__.split("."):
        found = getattr(found, part, None)
    return found


def dispatcher_of(compiled: Any) -> AnyDispatcher:
    """Return the dispatcher of something `torchbay.compile` returned.

    Raises:
        InvalidArgument: It did not return that.
    """
    if isinstance(compiled, CompiledModule):
        return _dispatch_of(compiled)  # type: ignore[no-any-return]
    if isinstance(compiled, (CompiledFunction, _BoundFunction)):
        return compiled.dispatch
    raise InvalidArgument(
        f"{compiled!r} is not compiled", remedy="Pass what torchbay.compile returned"
    )


def leading_arguments(compiled: Any) -> Callable[[], tuple[Any, ...]]:
    """Return what returns the arguments before those of a call: for a method, its instance."""
    if not isinstance(compiled, _BoundFunction):
        return tuple
    try:
        instance = weakref.ref(compiled.__self__)
    except TypeError:
        return tuple
    return lambda: (instance(),)

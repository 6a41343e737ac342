"""The other front-end: Dynamo captures graphs, guards them and dispatches calls to them.

Entered only through ``tracer="dynamo"`` or ``torch.compile(..., backend="torchbay")``.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import attrs

from torchbay._call import Call
from torchbay._dynamo._frames import FramePart, GraphServer, Refused, has_symbolic_sizes
from torchbay._dynamo._warmup import rehearse_compiled
from torchbay._dynamo_compat import (
    dynamo_error,
    dynamo_limits,
    forget_code,
    has_begun,
    is_due_to_warning,
    optimized,
    user_error_line,
)
from torchbay._log import log
from torchbay._options import read as read_options
from torchbay._reason import CannotServe, Reason
from torchbay._registry import choose, notify
from torchbay._settings import Settings
from torchbay._source import definition
from torchbay._torch_compat import global_module_hooks, is_inside_trace
from torchbay.errors import NotServed, RecompileLimit, TorchbayError
from torchbay.plugin import RecompileReport

__all__ = [
    "DynamoDispatcher",
    "FramePart",
    "GraphServer",
    "has_symbolic_sizes",
    "live_dynamo_dispatchers",
]

live_dynamo_dispatchers: weakref.WeakSet[DynamoDispatcher] = weakref.WeakSet()
"""Every such dispatcher in use; `torchbay.reset` empties them."""

_starting = threading.Lock()


class DynamoDispatcher:
    """Serves the calls of one callable through Dynamo, from graphs our backends compile."""

    def __init__(self, function: Callable[..., Any], settings: Settings) -> None:
        self.function = function
        self.settings = settings
        self.name = settings.name_for(function)
        self.parts: list[FramePart] = []
        self.reset()
        live_dynamo_dispatchers.add(self)

    def reset(self) -> None:
        """Forget every graph; of the code it compiled, so must Dynamo."""
        for code in {part.code for part in self.parts if part.code is not None}:
            forget_code(code)
        self.parts = []
        self.recompiles: list[tuple[str, ...]] = []
        self.calls = {"graph": 0, "eager": 0}
        self._compiled: Callable[..., Any] | None = None
        self._failures: list[str] = []
        self._is_static = True
        self._server = GraphServer(self.settings, self.name, self._add, self._note_run)
        self._ran = threading.local()

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Serve one call."""
        if is_inside_trace():
            return self.function(*args, **kwargs)
        if any(global_module_hooks()):
            return self._with_global_hooks(args, kwargs)
        # A compiled module may have a length, hence be false.
        compiled = self._start() if self._compiled is None else self._compiled
        before = self._runs
        try:
            with self._limits():
                result = compiled(*args, **kwargs)
        except Exception as error:
            problem = self._problem(error)
            if problem is None:
                raise
            if self._is_too_late(error, problem):
                self._refuse_warning(error, problem)
                raise
            return self._instead(error, problem, args, kwargs)
        self._count(before)
        return result

    def _with_global_hooks(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Serve a call while hooks run around every module, which Dynamo does not guard."""
        reason = Reason("hooks are registered for all modules, which Dynamo does not watch")
        result = self.function(*args, **kwargs)
        self.calls["eager"] += 1
        if self.settings.fullgraph:
            raise self._not_served(reason, result)
        self._server.warn(f"runs eagerly: {reason}")
        return result

    def _not_served(self, reason: Reason, result: Any) -> NotServed:
        error = NotServed(
            f"{self.name} cannot be served from a graph: {reason.what}",
            account=reason.where,
            remedy=reason.remedy or "Leave out fullgraph=True to run such calls eagerly",
        )
        error.result = result
        return error

    def warmup(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Compile for such a call. It does run, but what it writes is undone."""
        calls = dict(self.calls)
        try:
            rehearse_compiled(Call.of(self.function, args, kwargs), lambda: self(args, kwargs))
        except CannotServe as refusal:
            self._server.warn(f"is not warmed up: {refusal.reason}")
        finally:
            self.calls = calls

    def _start(self) -> Callable[..., Any]:
        with _starting:
            if self._compiled is None:
                backend = choose(self.settings.backend)
                read_options(backend, self.settings.mode, self.settings.options)
                self._is_static = not backend.capabilities.dynamic_shapes
                self._compiled = optimized(
                    self.function,
                    self._server,
                    fullgraph=self.settings.fullgraph,
                    dynamic=self._dynamic(backend),
                    on_guards=self._note_guards,
                    on_guard_failure=self._failures.append,
                )
            return self._compiled

    def _dynamic(self, backend: Any) -> bool | None:
        """Return what Dynamo may make symbolic: nothing, unless the backend takes it."""
        self.settings.check_sizes(backend)
        return self.settings.dynamic if backend.capabilities.dynamic_shapes else False

    def _limits(self) -> AbstractContextManager[None]:
        return dynamo_limits(
            self.settings.recompile_limit,
            fail=self.settings.fail_on_recompile_limit,
            # Without symbolic sizes there are no symbolic floats either.
            symbolic_floats=self._is_static,
        )

    @property
    def _runs(self) -> tuple[int, int]:
        """How many graphs this thread has run: compiled ones, and others as they are."""
        return getattr(self._ran, "counts", (0, 0))

    def _note_run(self, is_graph: bool) -> None:  # noqa: FBT001 - what happened, not how to
        compiled, plain = self._runs
        self._ran.counts = (compiled + is_graph, plain + (not is_graph))

    def _note_guards(self, lines: list[str]) -> None:
        if self.parts:
            self.parts[-1].guards = "\n".join(lines)

    def _add(self, part: FramePart) -> None:
        reasons = tuple(dict.fromkeys(self._failures))
        self._failures.clear()
        if any(part.code is other.code for other in self.parts):
            self.recompiles.append(reasons)
            log("recompiles", f"{self.name}: {'; '.join(reasons)}")
            notify("torchbay_recompiled", RecompileReport(self.name, reasons))
        self.parts.append(part)

    def _count(self, before: tuple[int, int]) -> None:
        after = self._runs
        self.calls["graph" if after[0] > before[0] else "eager"] += 1
        if after == before:
            self._server.warn(
                "ran with no compiled graph: Dynamo captured none for such a call, or "
                f"recompile_limit={self.settings.recompile_limit} is reached. "
                "TORCH_LOGS=graph_breaks,recompiles says which"
            )

    def _problem(self, error: Exception) -> Reason | TorchbayError | None:
        """Return what an error of Dynamo's means here, or None if it is the program's own."""
        kind, inner = dynamo_error(error)
        if kind == "backend":
            if isinstance(inner, Refused):
                return inner.reason
            return inner if isinstance(inner, TorchbayError) else None
        if kind == "limit":
            return self._limit_error()
        # Whatever was raised before any frame ran, Dynamo raised it: eager execution decides.
        if kind == "capture" or not has_begun(error):
            return Reason(_headline(error), where=user_error_line(error))
        return None

    def _is_too_late(self, error: Exception, problem: Reason | TorchbayError) -> bool:
        """Whether part of the call has run, so that it cannot be served once more."""
        is_final = isinstance(problem, TorchbayError) or self.settings.fullgraph
        return not is_final and has_begun(error)

    def _refuse_warning(self, error: Exception, problem: Reason | TorchbayError) -> None:
        """Refuse a call in the middle of which tracing gave a warning that is an error here.

        Raises:
            NotServed: That is what happened.
        """
        if isinstance(problem, Reason) and is_due_to_warning(error):
            remedy = "Let warnings pass that only tracing gives, or leave out tracer='dynamo'"
            raise self._not_served(attrs.evolve(problem, remedy=remedy), None) from error

    def _limit_error(self) -> RecompileLimit:
        last = "; ".join(dict.fromkeys(self._failures))
        self._failures.clear()
        return RecompileLimit(
            f"{self.name}: recompile_limit={self.settings.recompile_limit} is reached, and this "
            f"call needs another graph: {last}",
            account=definition(self.function),
            remedy="Raise recompile_limit, or call with fewer kinds of arguments",
        )

    def _instead(
        self,
        error: Exception,
        problem: Reason | TorchbayError,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Serve a call that Dynamo gave up on, before any of it ran.

        An error that the program raises by itself keeps its type that way.

        Raises:
            NotServed: ``fullgraph=True`` asked for nothing less than a graph.
        """
        if isinstance(problem, TorchbayError):
            raise problem from problem.__cause__
        result = None if has_begun(error) else self.function(*args, **kwargs)
        self.calls["eager"] += 1
        if not self.settings.fullgraph:
            self._server.warn(f"runs eagerly: {problem}")
            return result
        raise self._not_served(problem, result) from error


def _headline(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ". ".join(lines[:2]).removesuffix(".") if lines else repr(error)

"""The story of one call; read this first.

    observe -> trace -> guard -> lower -> build -> dispatch

`Dispatcher.__call__` is the last stage and the only one most calls see: it tries the guards of the
specializations it has. When none holds, `Dispatcher._miss` runs the call eagerly under observation,
hands that result to the caller, and turns what was observed into one more specialization.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any

import torch

from torchbay._build import compiling
from torchbay._call import Call, refuse_unusable
from torchbay._guards import guards_of_call
from torchbay._log import log
from torchbay._misses import forget_misses
from torchbay._observe import EffectHistory, Observation, Reach, observe, rehearse
from torchbay._options import read as read_options
from torchbay._reason import CannotServe, Reason, Unsettled
from torchbay._registry import choose, notify
from torchbay._settings import Settings
from torchbay._source import definition
from torchbay._specialization import EagerRoute, Specialization
from torchbay._specialize import Specializer, refuse_obstacles
from torchbay._symbolic import Declarations
from torchbay._torch_compat import has_saved_tensor_hooks, import_tracer, is_inside_trace
from torchbay._trace import subclass_among
from torchbay._tree import MISS
from torchbay.errors import NotServed, RecompileLimit, TorchbayError, TorchbayWarning
from torchbay.plugin import Backend, RecompileReport

__all__ = ["Dispatcher", "Entry", "live_dispatchers"]

Entry = Specialization | EagerRoute
Observe = Callable[[Call, Reach], Observation]

_UNDER_HOOKS = Reason(
    "hooks on what autograd saves are active around the call, such as a checkpoint's",
    remedy="Compile what holds the checkpoint, or call it outside",
)
_MOST_LEAVES = 64
_MOST_BUILDS = 256

live_dispatchers: weakref.WeakSet[Dispatcher] = weakref.WeakSet()
"""Every dispatcher in use; `torchbay.reset` empties them."""


class Dispatcher:
    """Serves the calls of one callable, each from the specialization whose guards hold."""

    def __init__(self, function: Callable[..., Any], settings: Settings) -> None:
        self.function = function
        self.settings = settings
        self.name = settings.name_for(function)
        self._specializer = Specializer(settings, self.name)
        self.reset()
        live_dispatchers.add(self)

    def reset(self) -> None:
        """Forget every specialization, and what led to them."""
        self.entries: tuple[Entry, ...] = ()
        self.recompiles: list[tuple[str, ...]] = []
        self.eager_calls = 0
        self._specializer.builds = 0
        self._effects = EffectHistory()
        self._warned: set[str] = set()
        self._codes: dict[CodeType, dict[str, Any]] = {}

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serve one call."""
        if is_inside_trace():
            return self.function(*args, **kwargs)
        entries = self.entries
        for entry in entries:
            inputs = entry.match(args, kwargs)
            if inputs is not None:
                result = entry.run(inputs, args, kwargs)
                if result is not MISS:
                    entry.calls += 1
                    if entry is not entries[0]:
                        self._promote(entry)
                    return result
        return self._miss(args, kwargs, observe)

    def warmup(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compile for such a call. It does run, but what it writes is undone."""
        forget_misses()
        self._miss(args, kwargs, rehearse)
        self.eager_calls -= 1

    def _promote(self, entry: Entry) -> None:
        """Let the specialization used last be tried first."""
        if isinstance(entry, EagerRoute):
            return
        with compiling:
            if entry in self.entries:
                others = (other for other in self.entries if other is not entry)
                self.entries = _ordered((entry, *others))

    def _miss(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        run: Observe,
    ) -> Any:
        """Serve a call that no specialization covers, and add one that does."""
        if torch.is_grad_enabled() and has_saved_tensor_hooks():
            return self._undescribed(_UNDER_HOOKS, args, kwargs, run)
        group = self._group_of(args, kwargs)
        if (limit := self._limit(group)) is not None:
            return self._past_limit(limit, args, kwargs, run)
        backend = choose(self.settings.backend)
        self.settings.check_sizes(backend)
        options = read_options(backend, self.settings.mode, self.settings.options)
        try:
            call = Call.of(self.function, args, kwargs)
        except CannotServe as refusal:
            return self._undescribed(refusal.reason, args, kwargs, run)
        reach = Reach.of(call, self._codes)
        self._refuse_unusable(call, reach)
        declared = self._specializer.declared(call, reach, backend)
        reasons = self._recompile_reasons(args, kwargs)
        problem = subclass_among(call, reach) or self._specializer.claim_problem(backend, call)
        if problem is not None:
            return self._unobserved(problem, call, run)
        if reasons:
            log("recompiles", f"{self.name}: {'; '.join(reasons)}")
            notify("torchbay_recompiled", RecompileReport(self.name, reasons))
        import_tracer()
        observation = run(call, reach)
        self.eager_calls += 1
        self._codes |= observation.codes
        # Held until the entry stands, so that threads with the same call compile it once.
        with compiling:
            entry = self._entry_for(call, observation, backend, options, reasons, declared)
            if entry is not None:
                self._add(entry, call, reasons)
        if isinstance(entry, EagerRoute):
            self._report(entry.reason, observation.result)
        return observation.result

    def _entry_for(
        self,
        call: Call,
        observation: Observation,
        backend: Backend,
        options: Any,
        reasons: tuple[str, ...],
        declared: Declarations,
    ) -> Entry | None:
        """Turn an observed call into what serves the next one.

        Returns None if there is nothing to add: the call became one more leaf of a tree, another
        thread was first, or a change to Python state has yet to show whether it is always made.
        """
        try:
            with observation.as_before():
                matching = self._matching(call.args, call.kwargs)
            graphs = [entry for entry in matching if isinstance(entry, Specialization)]
            if matching and not graphs:
                return None
            refuse_obstacles(call, observation)
            is_settled = self._effects.is_settled(observation.changes)
            if not is_settled or any(entry.covers(observation.record) for entry in graphs):
                return None
            group = graphs[0] if graphs else None
            made = self._specializer.specialize(
                call, observation, backend, options, group, declared
            )
            if made is None:
                self._note_recompile(call, reasons)
            return made  # noqa: TRY300 - what follows is about what cannot be served
        except Unsettled as more:
            self._codes |= more.codes
            return None
        except CannotServe as refusal:
            return self._eager_route(call, refusal.reason)
        except TorchbayError:
            raise
        except Exception as error:  # noqa: BLE001 - the call has been served, whatever broke here
            return self._eager_route(call, Reason(f"capturing it raised {error!r}"))

    def _add(self, entry: Entry, call: Call, reasons: tuple[str, ...]) -> None:
        entry.watch(call, weakref.WeakMethod(self.discard))
        with compiling:
            if self.entries:
                self._note_recompile(call, reasons)
            self.entries = _ordered((entry, *self.entries))

    def _note_recompile(self, call: Call, reasons: tuple[str, ...]) -> None:
        # There are none if another thread compiled the first specialization meanwhile.
        self.recompiles.append(reasons or self._recompile_reasons(call.args, call.kwargs))

    def discard(self, entry: Entry) -> None:
        """Drop an entry that can never be hit again: an object it is about is gone."""
        with compiling:
            self.entries = tuple(other for other in self.entries if other is not entry)

    def _matching(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Entry]:
        """Return the entries whose guards hold, graphs first."""
        return [entry for entry in self.entries if entry.match(args, kwargs) is not None]

    def _group_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Specialization | None:
        """Return the specialization whose guards hold, if any do."""
        matching = self._matching(args, kwargs)
        return next((entry for entry in matching if isinstance(entry, Specialization)), None)

    def _limit(self, group: Specialization | None) -> str | None:
        """Return which limit forbids one more specialization, if one does."""
        if group is not None and len(group.leaves) >= _MOST_LEAVES:
            return f"{_MOST_LEAVES} outcomes of its branches are compiled"
        if group is None and len(self.entries) >= self.settings.recompile_limit:
            return f"recompile_limit={self.settings.recompile_limit} is reached"
        return (
            f"{_MOST_BUILDS} graphs were built"
            if self._specializer.builds >= _MOST_BUILDS
            else None
        )

    def _past_limit(
        self, limit: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: Observe
    ) -> Any:
        is_fatal = self.settings.fullgraph or self.settings.fail_on_recompile_limit
        if is_fatal or limit not in self._warned:
            last = "; ".join(self._recompile_reasons(args, kwargs))
            what = f"{self.name}: {limit}, and this call needs another specialization: {last}"
            remedy = "Raise recompile_limit, or call with fewer kinds of arguments"
            if is_fatal:
                raise RecompileLimit(what, account=definition(self.function), remedy=remedy)
            self._warn(limit, f"{what}. Such calls run eagerly. {remedy}")
        self.eager_calls += 1
        return self.function(*args, **kwargs) if run is observe else None

    def _eager_route(self, call: Call, reason: Reason) -> EagerRoute:
        """Keep such calls out of the graph from now on."""
        function, guards = call.function, guards_of_call(call)

        def run(_inputs: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            result = function(*args, **kwargs)
            if self.settings.fullgraph:
                route.calls += 1
            self._report(reason, result)
            return result

        route = EagerRoute(guards=guards, match=guards.match, run=run, reason=reason)
        return route

    def _unobserved(self, reason: Reason, call: Call, run: Observe) -> Any:
        """Serve a call that cannot be in a graph, as can be seen without running it."""
        route = self._eager_route(call, reason)
        self._add(route, call, (str(reason),))
        return self._undescribed(reason, call.args, call.kwargs, run)

    def _undescribed(
        self, reason: Reason, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: Observe
    ) -> Any:
        """Serve a call whose arguments cannot even be described."""
        self.eager_calls += 1
        result = self.function(*args, **kwargs) if run is observe else None
        self._report(reason, result)
        return result

    def _report(self, reason: Reason, result: Any) -> None:
        """Say once why calls run eagerly, or every time if the caller accepts no such calls."""
        if self.settings.fullgraph:
            raise _not_served(self.name, reason, result)
        self._warn(reason.what, f"{self.name} runs eagerly: {reason}")

    def _warn(self, key: str, text: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            warnings.warn(text, TorchbayWarning, stacklevel=6)

    def _recompile_reasons(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[str, ...]:
        """Return how the call differs from the specialization used last."""
        found = [(entry, entry.guards.mismatches(args, kwargs)) for entry in self.entries]
        for entry, mismatches in found:
            if not mismatches:
                return (entry.why_missed(),)
        return tuple(map(str, found[0][1])) if found else ()

    def _refuse_unusable(self, call: Call, reach: Reach) -> None:
        where = definition(self.function)
        for item in call.tensors:
            refuse_unusable(f"argument {item.path}", item.value, where)
        for reading in reach.named_tensors():
            refuse_unusable(reading.path, reading.value, where)


def _ordered(entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
    """Put graphs before eager routes: those know less of what sets calls apart."""
    return tuple(sorted(entries, key=lambda entry: isinstance(entry, EagerRoute)))


def _not_served(name: str, reason: Reason, result: Any) -> NotServed:
    """Return the error of a call that had to be served from a graph and was not."""
    error = NotServed(
        f"{name} cannot be served from a graph: {reason.what}",
        account=reason.where,
        remedy=reason.remedy or "Leave out fullgraph=True to run such calls eagerly",
    )
    error.result = result
    return error

"""What the functions given to ``torch.cond`` and its like do, seen without running them for real.

Of two branches one runs, and both are in the graph. So all of them run once more, on fake tensors,
before the real call: whatever their code reads is noted, and what a graph cannot do is found.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchbay._control_flow import is_control_flow, is_kept
from torchbay._observe._inside import Inside
from torchbay._observe._ops import GATES, LIFTS, PACK
from torchbay._observe._rehearsal import written
from torchbay._torch_compat import (
    ObservingDispatchMode,
    fake_tensor_mode,
    has_effect_token,
    map_subgraphs,
    map_tensors,
    returns_other_lse,
    run_skipped_functions,
    storage_id,
    tensors_among,
    without_modes,
)
from torchbay._torch_symbols import fake_of

__all__ = ["BranchWatch", "rehearse_branches"]


class BranchWatch(ObservingDispatchMode):
    """Watches functions that an operator runs.

    Attributes:
        free: The tensors they have from elsewhere than their arguments, by identity.
        problem: Why no graph can hold the operator, as far as is known; empty if it can.
    """

    def __init__(self, inside: Inside) -> None:
        super().__init__()
        self._inside = inside
        self.free: dict[int, torch.Tensor] = {}
        self.problem = ""
        self._depth = 0
        # By identity, and kept alive, so that nothing else gets the same one.
        self._known: dict[int, torch.Tensor] = {}
        self._outside: set[int] = set()
        self._made: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._depth and func not in LIFTS:
            self._take((args, kwargs))
        if is_control_flow(func):
            args = self.watched(func, args)
            if is_kept(func):
                run_skipped_functions(func, args)
        elif self._depth:
            self._check(func, args, kwargs)
        with self._inside.operator():
            result = func(*args, **kwargs)
        if self._depth:
            self._give(result)
        return result

    def watched(self, operator: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return an operator's arguments with functions that are watched while they run."""
        if not is_kept(operator):
            self._note(f"{operator} is a higher-order operator that no graph may hold")
        if any(map(returns_other_lse, args)):
            self._note("BACKEND='FLASH' returns another log-sum-exp than eager execution")
        # What this one's functions return is data to it, and never a result.
        may_alias = str(operator) == "flex_attention"
        return map_subgraphs(lambda function: self._watched(function, may_alias=may_alias), args)

    def _watched(self, function: Callable[..., Any], *, may_alias: bool) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            with self:
                self._depth += 1
                try:
                    self._enter(given)
                    with self._inside.program():
                        result = function(*given)
                    if not may_alias:
                        self._check_result(result)
                    return result
                finally:
                    self._depth -= 1

        return run

    def _enter(self, given: Any) -> None:
        for tensor in tensors_among(given):
            self._known[id(tensor)] = tensor
            self._keep_outside(tensor)

    def _take(self, value: Any) -> None:
        for tensor in tensors_among(value):
            if id(tensor) not in self._known:
                self.free[id(tensor)] = tensor
                self._keep_outside(tensor)

    def _give(self, value: Any) -> None:
        for tensor in tensors_among(value):
            self._known[id(tensor)] = tensor
            if (storage := storage_id(tensor)) not in self._outside:
                self._made.add(storage)

    def _keep_outside(self, tensor: torch.Tensor) -> None:
        self._outside.add(storage_id(tensor))
        self._made.discard(storage_id(tensor))

    def _check(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if func in GATES or func is PACK:
            self._note("a function given to it branches on data, or reads a number of a tensor")
        elif has_effect_token(func):
            self._note(f"a function given to it calls {func}, which has an effect")
        elif any(storage_id(t) not in self._made for t in written(func, args, kwargs)):
            self._note("a function given to it changes a tensor from outside it")

    def _check_result(self, result: Any) -> None:
        storages = [storage_id(tensor) for tensor in tensors_among(result)]
        if any(storage not in self._made for storage in storages):
            self._note("a function given to it returns a tensor from outside it, or a view of one")
        elif len(set(storages)) < len(storages):
            self._note("a function given to it returns two tensors that share memory")

    def _note(self, problem: str) -> None:
        self.problem = self.problem or problem


def rehearse_branches(function: Callable[..., Any], args: tuple[Any, ...], inside: Inside) -> str:
    """Run what calls an operator on fakes; return why a graph cannot hold it, or nothing.

    Must be called under the profile of the observed call.
    """
    watch = BranchWatch(inside)
    try:
        with inside.operator(), without_modes(), torch.no_grad():
            mode = fake_tensor_mode()
            fakes = map_tensors(lambda tensor: fake_of(mode, tensor, "operand", frozenset()), args)
            with mode, watch:
                function(*fakes)
    except Exception as error:  # noqa: BLE001 - eager execution decides what the user gets to see
        text = str(error).strip().partition("\n")[0]
        return watch.problem or f"running it on fake tensors raises {type(error).__name__}: {text}"
    needs = (tensor.requires_grad for tensor in [*tensors_among(args), *watch.free.values()])
    if torch.is_grad_enabled() and any(needs):
        return "its result needs gradients, and training is not served from a graph yet"
    return watch.problem

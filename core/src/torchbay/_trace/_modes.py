"""The modes that are active while a call runs again under fake tensors."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from torchbay._control_flow import is_control_flow, is_kept
from torchbay._observe import GATES, LIFTS, Gate, OpRecord, is_compared, record_of
from torchbay._reason import CannotServe
from torchbay._source import user_line, user_stack_entry
from torchbay._torch_compat import (
    ObservingDispatchMode,
    ObservingFunctionMode,
    is_fake,
    is_transformed,
    set_node_stack,
)
from torchbay._trace._branches import free_tensors, lifted

__all__ = ["GateAnswers", "OpTracer", "Substitution"]

aten = torch.ops.aten


class Substitution(ObservingFunctionMode):
    """Puts the graph's inputs in place of the program's own tensors, at every call into torch.

    The program's modules keep their real parameters throughout: swapping them would show fake
    tensors to every other thread that runs the same module.
    """

    def __init__(self, inputs: Mapping[int, torch.Tensor], answers: GateAnswers) -> None:
        super().__init__()
        self._inputs = inputs
        self._answers = answers

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        args = substitute(args, self._inputs)
        if func is torch.Tensor.tolist:
            return self._answers.next(func, args)
        return func(*args, **substitute(kwargs or {}, self._inputs))


def substitute(value: Any, inputs: Mapping[int, torch.Tensor]) -> Any:
    """Return a value with tensors replaced, inside lists, tuples and dicts too."""
    if isinstance(value, torch.Tensor):
        return inputs.get(id(value), value)
    if type(value) in (tuple, list):
        return type(value)(substitute(item, inputs) for item in value)
    if type(value) is dict:
        return {key: substitute(item, inputs) for key, item in value.items()}
    return value


class GateAnswers:
    """Answers data-dependent reads from the record, and keeps the tensors they were read from."""

    def __init__(self, gates: Sequence[Gate]) -> None:
        self._gates = gates
        self.is_copying = False
        self.tensors: list[tuple[torch.Tensor, ...]] = []

    def tolist(self, tensor: torch.Tensor) -> Any:
        """Return what ``tensor.tolist()`` returned in the observed run."""
        return self.next(torch.Tensor.tolist, (tensor,))

    def next(self, reader: Any, args: Sequence[Any]) -> Any:
        """Return what the observed run read here.

        Raises:
            CannotServe: The observed run did not read anything like it at this point.
        """
        position = len(self.tensors)
        if position >= len(self._gates) or self._gates[position].reader is not reader:
            raise CannotServe(
                "a second run of the call reads data where the first did not", where=user_line()
            )
        # Copied, because the program may change the tensor after reading it.
        read = [argument for argument in args if isinstance(argument, torch.Tensor)]
        self.is_copying = True
        self.tensors.append(tuple(map(aten.clone.default, read)))
        self.is_copying = False
        return self._gates[position].value

    def check_used_up(self) -> None:
        """Raise CannotServe if the observed run read more than this one."""
        if len(self.tensors) < len(self._gates):
            raise CannotServe(
                "a second run of the call does not read data where the first did",
                where=self._gates[len(self.tensors)].where,
            )


class OpTracer(ObservingDispatchMode):
    """Logs operators as `OpRecorder` does, answers gates, and refuses tensors of unknown origin."""

    def __init__(self, inputs: dict[int, torch.Tensor], answers: GateAnswers) -> None:
        super().__init__()
        self._inputs = inputs
        self._answers = answers
        self._depth = 0
        self.ops: list[OpRecord] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        set_node_stack(user_stack_entry())
        if func not in LIFTS:
            args = substitute(args, self._inputs)
            kwargs = substitute(kwargs or {}, self._inputs)
            refuse_strangers((args, kwargs))
        if func in GATES:
            return self._answers.next(func, args)
        if is_control_flow(func):
            result = self._with_functions(func, args, kwargs or {})
        else:
            result = func(*args, **(kwargs or {}))
        if is_compared(func) and not self._answers.is_copying and not self._depth:
            self.ops.append(record_of(func, args, kwargs or {}, result, user_line()))
        return result

    def _with_functions(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operator that takes functions; what they do is not compared with the first run.

        Raises:
            CannotServe: No graph may hold the operator, or what its functions do.
        """
        if not is_kept(func):
            raise CannotServe(f"{func} is a higher-order operator", where=user_line())
        inside = functools.partial(self._inside, user_stack_entry())
        free = free_tensors(func, args, kwargs, self._inputs)
        operands = lifted(func, args, kwargs, free, self._inputs, inside)
        self._depth += 1
        try:
            return func(*operands)
        finally:
            self._depth -= 1

    @contextmanager
    def _inside(self, where: str) -> Iterator[None]:
        """Stay active in a function that an operator runs, and give the operator its line back."""
        with self:
            yield
        set_node_stack(where)


def refuse_strangers(value: Any) -> None:
    """Raise CannotServe for a real tensor among an operator's arguments.

    Every argument and every reachable tensor has been replaced by now. What is left was hidden
    where a change to it could not be seen: it must not become a constant of the graph.
    """
    if isinstance(value, torch.Tensor):
        if not is_fake(value) and not is_transformed(value):
            raise CannotServe(
                f"a tensor of shape {tuple(value.shape)} is used that is neither an argument nor "
                "reachable from the callable, its arguments or its globals",
                where=user_line(),
                remedy="Pass it as an argument, or register it as a buffer",
            )
    elif isinstance(value, (tuple, list)):
        for item in value:
            refuse_strangers(item)
    elif isinstance(value, dict):
        refuse_strangers(list(value.values()))

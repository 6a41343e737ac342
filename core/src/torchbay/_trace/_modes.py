"""The modes that are active while a call runs again under fake tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torchbay._observe import (
    GATES,
    LIFTS,
    PACK,
    OpRecord,
    elements,
    is_compared,
    record_of,
    sizes_of,
)
from torchbay._reason import CannotServe
from torchbay._source import user_line, user_stack_entry
from torchbay._torch_compat import (
    PAD,
    ObservingDispatchMode,
    ObservingFunctionMode,
    is_fake,
    is_transformed,
    set_node_stack,
)
from torchbay._torch_symbols import bind, is_number
from torchbay._trace._gates import GateAnswers
from torchbay._trace._packing import KnownTensors, pack, pad

__all__ = ["OpTracer", "Substitution"]


class Substitution(ObservingFunctionMode):
    """Puts the graph's inputs in place of the program's own tensors, at every call into torch.

    The program's modules keep their real parameters throughout: swapping them would show fake
    tensors to every other thread that runs the same module.
    """

    def __init__(
        self, inputs: Mapping[int, torch.Tensor], answers: GateAnswers, known: KnownTensors
    ) -> None:
        super().__init__()
        self._inputs = inputs
        self._answers = answers
        self._known = known

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        args = substitute(args, self._inputs)
        if func is torch.Tensor.tolist:
            return self._answers.tolist(args[0])
        if func == PAD and args[1] in self._known:
            padded, lengths = pad(*args)
            return padded, self._known.add(lengths)
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


class OpTracer(ObservingDispatchMode):
    """Logs operators as `OpRecorder` does, answers gates, and refuses tensors of unknown origin."""

    def __init__(
        self,
        inputs: Mapping[int, torch.Tensor],
        answers: GateAnswers,
        known: KnownTensors,
        observed: Sequence[OpRecord],
    ) -> None:
        super().__init__()
        self._inputs = inputs
        self._answers = answers
        self._known = known
        self._observed = observed
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
            self._known.refuse_writes(func, args)
            if self._known.decide(args, kwargs):
                return self._run_known(func, args, kwargs)
            args = self._known.lifted(args)
            refuse_strangers((args, kwargs))
        if self._answers.is_copying:
            return func(*args, **(kwargs or {}))
        if func in GATES:
            return self._answers.answer(func, args)
        result = self._run(func, args, kwargs or {})
        if is_compared(func):
            self._bind_sizes(result)
            self.ops.append(record_of(func, args, kwargs or {}, result, user_line()))
        return result

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is not PACK:
            return func(*args, **kwargs)
        padded, lengths, batch_first = args
        data, batch_sizes = pack(padded, self._answers.fixed(elements, [lengths]), batch_first)
        return data, self._known.add(batch_sizes)

    def _run_known(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func in GATES:
            return self._answers.known(func)
        result = self._known.run(func, args, kwargs)
        if is_compared(func):
            self.ops.append(record_of(func, args, kwargs, result, user_line()))
        return result

    def _bind_sizes(self, result: Any) -> None:
        """Let sizes that depend on data be what they were in the observed run."""
        if len(self.ops) >= len(self._observed):
            return
        observed = self._observed[len(self.ops)].sizes
        if len(found := sizes_of(result)) == len(observed):
            for sizes, values in zip(found, observed, strict=True):
                for size, value in zip(sizes, values, strict=False):
                    if is_number(size):
                        bind(size, value)


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

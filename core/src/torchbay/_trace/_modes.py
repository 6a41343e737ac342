"""The modes that are active while a call runs again under fake tensors."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from torchbay._control_flow import is_control_flow, is_kept
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
from torchbay._torch_autograd import note_phase
from torchbay._torch_compat import (
    PAD,
    ObservingDispatchMode,
    ObservingFunctionMode,
    draws,
    is_fake,
    is_transformed,
    set_node_stack,
)
from torchbay._torch_symbols import bind, is_number
from torchbay._torch_workspaces import keeping_workspace
from torchbay._trace._branches import free_tensors, lifted
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
        inputs: dict[int, torch.Tensor],
        answers: GateAnswers,
        known: KnownTensors,
        observed: Sequence[OpRecord],
    ) -> None:
        super().__init__()
        self._inputs = inputs
        self._answers = answers
        self._known = known
        self._observed = observed
        self._depth = 0
        self._is_backward = False
        self.ops: list[OpRecord] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        set_node_stack(user_stack_entry())
        note_phase(is_after=self._is_backward)
        if func not in LIFTS:
            args = substitute(args, self._inputs)
            kwargs = substitute(kwargs or {}, self._inputs)
            self._known.refuse_writes(func, args)
            if not is_control_flow(func) and self._known.decide(args, kwargs):
                return self._run_known(func, args, kwargs)
            args = self._known.lifted(args)
            refuse_strangers((args, kwargs))
        if self._answers.is_copying:
            return func(*args, **(kwargs or {}))
        if func in GATES:
            return self._answers.answer(func, args)
        if self._is_backward:
            refuse_random(func, args, kwargs or {})
        result = self._run(func, args, kwargs or {})
        if is_compared(func) and not self._depth and not self._is_backward:
            self._bind_sizes(result)
            self.ops.append(record_of(func, args, kwargs or {}, result, user_line()))
        return result

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Be active in a backward that the observed call did not run."""
        self._is_backward = True
        try:
            yield
        finally:
            self._is_backward = False

    def tangent_of(self, root: torch.Tensor) -> torch.Tensor:
        """Return what stands for the gradient of a loss by a tensor."""
        is_channels_last = root.dim() == 4 and not root.is_contiguous()
        layout = torch.contiguous_format
        if is_channels_last and root.is_contiguous(memory_format=torch.channels_last):
            layout = torch.channels_last
        with self._answers.copying(), torch.no_grad():
            return torch.empty_like(root, memory_format=layout)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if is_control_flow(func):
            return self._with_functions(func, args, kwargs)
        if func is not PACK:
            return keeping_workspace(func, args)(*args, **kwargs)
        padded, lengths, batch_first = args
        data, batch_sizes = pack(padded, self._answers.fixed(elements, [lengths]), batch_first)
        return data, self._known.add(batch_sizes)

    def _with_functions(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operator that takes functions; what they do is not compared with the first run.

        Raises:
            CannotServe: No graph may hold the operator, or what its functions do.
        """
        if not is_kept(func):
            raise CannotServe(f"{func} is a higher-order operator", where=user_line())
        inside = functools.partial(self._inside, user_stack_entry())
        free = free_tensors(func, args, kwargs, self._inputs)
        self._refuse_known(func, free)
        operands = lifted(func, args, kwargs, free, self._inputs, inside)
        self._depth += 1
        try:
            return func(*operands)
        finally:
            self._depth -= 1

    def _refuse_known(self, func: Any, free: Sequence[torch.Tensor]) -> None:
        if any(tensor in self._known for tensor in free):
            what = f"{func}: a function given to it uses the layout of a packed sequence"
            raise CannotServe(what, where=user_line())

    @contextmanager
    def _inside(self, where: str) -> Iterator[None]:
        """Stay active in a function that an operator runs, and give the operator its line back."""
        with self:
            yield
        set_node_stack(where)

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


def refuse_random(func: Any, args: Any, kwargs: Any) -> None:
    """Raise CannotServe for random numbers in a backward: eager draws others there."""
    if draws(func, args, kwargs):
        raise CannotServe("its backward draws random numbers", where=user_line())


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

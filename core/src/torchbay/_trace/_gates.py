"""Answering, in the traced run, what the observed run read of tensor data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch

from torchbay._observe import Gate, as_it_is
from torchbay._reason import CannotServe
from torchbay._source import user_line
from torchbay._torch_symbols import (
    READS,
    Assumption,
    Decision,
    assumptions_of,
    bind,
    defined_numbers,
    is_number,
    size_source,
)

__all__ = ["GateAnswers", "TracedGate"]

aten = torch.ops.aten
_LONGEST = 64


@attrs.frozen(eq=False)
class TracedGate:
    """A gate, and what it reads of the traced graph: tensors, or numbers computed from them."""

    gate: Gate
    reads: tuple[Any, ...]


class GateAnswers:
    """Answers data-dependent reads from the record.

    With ``is_symbolic``, a number that is read stays a symbol; what the program decides about it
    is the gate. Otherwise its value is.

    Attributes:
        gates: What must come out as it did, in order.
        is_copying: Whether operators are being issued that are not the program's.
    """

    def __init__(self, record: Sequence[Gate], *, is_symbolic: bool) -> None:
        self._record = record
        self._position = 0
        self._is_symbolic = is_symbolic
        self._is_finished = False
        self._assumed: frozenset[str] = frozenset()
        self.gates: list[TracedGate] = []
        self.is_copying = False

    def tolist(self, tensor: torch.Tensor) -> Any:
        """Return what ``tensor.tolist()`` returned in the observed run."""
        gate = self._next(torch.Tensor.tolist)
        if self._is_symbolic and _is_short(gate.value):
            return self._numbers_of(tensor, gate.value)
        return self._fixed(gate, (tensor,))

    def answer(self, reader: Any, args: Sequence[Any]) -> Any:
        """Return what the observed run read here.

        Raises:
            CannotServe: The observed run did not read anything like it at this point.
        """
        gate = self._next(reader)
        if self._is_symbolic and reader in READS and _is_symbol(gate.value):
            return self._number_of(args[0], gate.value)
        return self._fixed(gate, args)

    def fixed(self, reader: Any, args: Sequence[Any]) -> Any:
        """Return what the observed run read here; the value itself is the gate."""
        return self._fixed(self._next(reader), args)

    def known(self, reader: Any) -> Any:
        """Return what the observed run read here of a tensor that earlier gates have fixed."""
        return self._next(reader).value

    def decided(self, decision: Decision) -> None:
        """Note that the program, or an operator, had to know something about a number.

        Raises:
            CannotServe: It is asked after the trace, or of a number that the graph does not hold.
        """
        if self._is_finished or decision.number is None:
            what = f"a decision on {decision.condition} cannot be checked"
            raise CannotServe(what, where=decision.where)
        gate = Gate(as_it_is, (), decision.outcome, decision.where)
        self.gates.append(TracedGate(gate, (decision.number,)))

    def finish(self, mode: Any, fakes: Sequence[torch.Tensor]) -> None:
        """Add what operators took to be true of numbers; from now on nothing may be decided."""
        assumptions = assumptions_of(mode)
        numbers = defined_numbers(mode, fakes) if assumptions else {}
        self.gates += [_assumed(assumption, numbers) for assumption in assumptions]
        self._assumed = frozenset(map(str, assumptions))
        self._is_finished = True

    def check_nothing_new(self, mode: Any) -> None:
        """Raise CannotServe if operators that others were rewritten to assume more of numbers."""
        for assumption in assumptions_of(mode):
            if str(assumption) not in self._assumed:
                raise CannotServe(f"that {assumption} cannot be checked")

    def check_used_up(self) -> None:
        """Raise CannotServe if the observed run read more than this one."""
        if self._position < len(self._record):
            raise CannotServe(
                "a second run of the call does not read data where the first did",
                where=self._record[self._position].where,
            )

    def _next(self, reader: Any) -> Gate:
        position = self._position
        if position >= len(self._record) or self._record[position].reader is not reader:
            raise CannotServe(
                "a second run of the call reads data where the first did not", where=user_line()
            )
        self._position += 1
        return self._record[position]

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Issue operators that are not the program's."""
        self.is_copying = True
        try:
            yield
        finally:
            self.is_copying = False

    def _fixed(self, gate: Gate, args: Sequence[Any]) -> Any:
        # Copied, because the program may change the tensor after reading it.
        read = [argument for argument in args if isinstance(argument, torch.Tensor)]
        with self.copying():
            copies = tuple(map(aten.clone.default, read))
        self.gates.append(TracedGate(gate, copies))
        return gate.value

    def _number_of(self, tensor: torch.Tensor, value: float) -> Any:
        with self.copying():
            number = aten._local_scalar_dense.default(tensor)  # noqa: SLF001 - an operator's name
        if is_number(number):
            bind(number, value)
        return number

    def _numbers_of(self, tensor: torch.Tensor, value: Any) -> Any:
        if not isinstance(value, list):
            return self._number_of(tensor, value)
        with self.copying():
            parts = [aten.select.int(tensor, 0, index) for index in range(len(value))]
        return [self._numbers_of(part, v) for part, v in zip(parts, value, strict=True)]


def _is_symbol(value: Any) -> bool:
    """Whether a symbol can stand for a number: none can for NaN or infinity."""
    return type(value) is int or (type(value) is float and math.isfinite(value))


def _is_short(value: Any) -> bool:
    numbers = list(_flat(value))
    return len(numbers) <= _LONGEST and all(map(_is_symbol, numbers))


def _flat(value: Any) -> Any:
    if isinstance(value, list):
        for item in value:
            yield from _flat(item)
    else:
        yield value


def _assumed(assumption: Assumption, numbers: dict[Any, Any]) -> TracedGate:
    symbols = sorted(assumption.symbols, key=str)
    if any(symbol not in numbers for symbol in symbols):
        raise CannotServe(f"that {assumption} cannot be checked")
    values = {symbol: f"value_{i}" for i, symbol in enumerate(symbols)}
    source = size_source(assumption.condition, values)
    code = f"lambda {', '.join(values.values())}: bool({source})"
    reader = eval(code, {"math": math, "torch": torch})  # noqa: S307 - our own source
    reader.__name__ = str(assumption)
    return TracedGate(Gate(reader, (), True, ""), tuple(numbers[symbol] for symbol in symbols))

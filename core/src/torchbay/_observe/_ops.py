"""Operators as both runs see them: what is compared, and what is a gate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch

from torchbay._structure import is_plain, same_value
from torchbay._torch_symbols import concrete

__all__ = [
    "BATCH_NORMS",
    "GATES",
    "LIFTS",
    "PACK",
    "Gate",
    "OpRecord",
    "as_it_is",
    "elements",
    "is_compared",
    "record_of",
    "sizes_of",
]

aten = torch.ops.aten

GATES = frozenset(
    {
        aten._local_scalar_dense.default,  # noqa: SLF001 - an operator's name
        aten.item.default,
        aten.is_nonzero.default,
        aten.equal.default,
        aten.allclose.default,
    }
)
"""Operators that turn tensor data into a Python value."""

PACK = aten._pack_padded_sequence.default  # noqa: SLF001 - an operator's name
"""Lays out its result by the elements of its second argument."""

BATCH_NORMS = frozenset({aten.native_batch_norm.default, aten.cudnn_batch_norm.default})
"""Operators that move the statistics they are given, as arguments 3 and 4, and do not say so."""

_WITH_WORKSPACE = aten.cudnn_batch_norm.default
"""Also returns memory whose size only cuDNN knows."""

LIFTS = frozenset({aten.lift_fresh.default, aten.lift_fresh_copy.default, aten.lift.default})
"""Operators that bring a tensor made from Python values into the program."""

_NOT_COMPARED = frozenset(
    {
        aten.alias.default,
        aten.detach.default,
        aten.size.default,
        aten.sym_size.default,
        aten.sym_stride.default,
        aten.sym_numel.default,
        aten.sym_storage_offset.default,
        torch.ops.prim.device.default,
    }
)


@attrs.frozen(eq=False)
class OpRecord:
    """One operator call.

    Attributes:
        name: The operator.
        values: The plain values among its arguments; for a lift, the tensor's own.
        outputs: Dtype and sizes of each tensor with elements that it returned; None for a size
            that depends on data.
        sizes: The sizes of every tensor it returned.
        where: File and line that called it.
    """

    name: str
    values: tuple[Any, ...]
    outputs: tuple[tuple[torch.dtype, tuple[int | None, ...]], ...]
    sizes: tuple[torch.Size, ...]
    where: str

    def agrees_with(self, other: OpRecord) -> bool:
        """Whether another run's operator is the same, sizes that it does not know left aside."""
        return (
            self.name == other.name
            and _values_agree(self.values, other.values)
            and len(self.outputs) == len(other.outputs)
            and all(map(_outputs_agree, self.outputs, other.outputs))
        )

    def __str__(self) -> str:
        shapes = ", ".join(f"{str(dtype)[6:]}{list(sizes)}" for dtype, sizes in self.outputs)
        return f"{self.name} -> {shapes}"


def _values_agree(first: Any, second: Any) -> bool:
    if isinstance(first, tuple) and isinstance(second, tuple):
        return len(first) == len(second) and all(map(_values_agree, first, second))
    is_rounded = type(first) is type(second) is float and first != second
    # Symbols are computed in another order than Python's floats.
    is_close = is_rounded and math.isclose(first, second, rel_tol=1e-12)
    return is_close or same_value(first, second)


def _outputs_agree(first: Any, second: Any) -> bool:
    (dtype, sizes), (other_dtype, other_sizes) = first, second
    return (
        dtype == other_dtype
        and len(sizes) == len(other_sizes)
        and all(a == b or b is None for a, b in zip(sizes, other_sizes, strict=True))
    )


@attrs.frozen
class Gate:
    """A data-dependent value that Python saw.

    Attributes:
        reader: What read it: an operator of `GATES`, or ``torch.Tensor.tolist``.
        extras: What it was given besides tensors.
        value: What it returned.
        where: File and line that asked.
    """

    reader: Callable[..., Any]
    extras: tuple[Any, ...]
    value: Any
    where: str

    @property
    def is_condition(self) -> bool:
        """Whether what is read is the value itself."""
        return self.reader is as_it_is

    def read(self, *values: Any) -> Any:
        """Read again, from other tensors or numbers."""
        return self.reader(*values, *self.extras)

    def reads_as(self, text: str) -> str:
        """Return what is read, given the text of what it is read from."""
        if self.is_condition:
            return text
        name = getattr(self.reader, "__name__", str(self.reader)).partition(".")[0].strip("_")
        return f"{_READABLE.get(name, name)}({text})"

    def __str__(self) -> str:
        return self.described("")

    def described(self, text: str) -> str:
        """Return what was read, its value and the line that asked."""
        where = f" at {self.where}" if self.where else ""
        return f"{self.reads_as(text)} == {self.value!r}{where}"


def as_it_is(value: Any) -> Any:
    """Return a condition that the graph computes."""
    return value


def elements(tensor: torch.Tensor) -> Any:
    """Return what a tensor holds, read by an operator rather than by the program."""
    return tensor.tolist()


_READABLE = {"local_scalar_dense": "item", "is_nonzero": "bool"}


def is_compared(operator: Any) -> bool:
    """Whether both runs must issue this operator: anything but pure views and metadata."""
    return operator not in _NOT_COMPARED and not getattr(operator, "is_view", False)


def record_of(
    operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, where: str
) -> OpRecord:
    """Describe an operator call."""
    results = result[:3] if operator is _WITH_WORKSPACE else result
    outputs = tuple((t.dtype, seen) for t in _tensors(results) if 0 not in (seen := _seen(t)))
    name = _MIRRORED.get(str(operator), str(operator))
    sizes = sizes_of(result)
    if operator in LIFTS:
        return OpRecord(name, (args[0].tolist(),), outputs, sizes, where)
    values = tuple(_plain_part(value) for value in (*args, *kwargs.values()))
    return OpRecord(name, values, outputs, sizes, where)


def sizes_of(result: Any) -> tuple[torch.Size, ...]:
    """Return the sizes of every tensor an operator returned."""
    return tuple(tensor.shape for tensor in _tensors(result))


def _tensors(result: Any) -> Iterator[torch.Tensor]:
    results = result if isinstance(result, (tuple, list)) else (result,)
    return (r for r in results if isinstance(r, torch.Tensor))


# Python asks a Parameter on the right hand side first, which a fake of it is not.
_MIRRORED = {"aten.gt.Tensor": "aten.lt.Tensor", "aten.ge.Tensor": "aten.le.Tensor"}


def _plain_part(value: Any) -> Any:
    """Return a value without what no two runs have in common, tensors and symbols."""
    if isinstance(value, (tuple, list)):
        return tuple(_plain_part(item) for item in value)
    value = concrete(value)
    return value if is_plain(value) else None


def _seen(tensor: torch.Tensor) -> tuple[int | None, ...]:
    return tuple(map(concrete, tensor.shape))

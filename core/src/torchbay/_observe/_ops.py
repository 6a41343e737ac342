"""Operators as both runs see them: what is compared, what is a gate, what cannot be in a graph."""

from __future__ import annotations

from typing import Any

import attrs
import torch

__all__ = ["GATES", "HIDDEN_READS", "Gate", "OpRecord", "is_compared", "record_of"]

aten = torch.ops.aten

GATES = frozenset(
    {
        aten._local_scalar_dense.default,  # noqa: SLF001 - an operator's name
        aten.item.default,
        aten.is_nonzero.default,
        aten.equal.default,
    }
)
"""Operators that turn tensor data into a Python value."""

HIDDEN_READS = {
    torch.Tensor.numpy: "numpy()",
    torch.Tensor.__array__: "numpy conversion",
    torch.Tensor.__repr__: "repr() of a tensor",
    torch.Tensor.__format__: "formatting a tensor",
    torch.Tensor.data_ptr: "data_ptr()",
    torch.Tensor.untyped_storage: "untyped_storage()",
    torch.Tensor.__dlpack__: "DLPack export",
    torch.Tensor.share_memory_: "share_memory_()",
    torch.Tensor.register_hook: "register_hook()",
    torch.Tensor.requires_grad_: "requires_grad_()",
    torch.Tensor.backward: "backward()",
    torch.Tensor.resize_: "resize_()",
    torch.Tensor.set_: "set_()",
}
"""What a tensor offers besides operators: reads and writes a graph cannot hold."""

_NOT_COMPARED = frozenset(
    {
        aten.alias.default,
        aten.detach.default,
        aten.lift_fresh.default,
        aten.lift_fresh_copy.default,
        torch.ops.prim.device.default,
        *(
            getattr(aten, name).default
            for name in ("sym_size", "sym_stride", "sym_numel", "sym_storage_offset")
        ),
        aten.size.default,
    }
)


@attrs.frozen
class OpRecord:
    """One operator call: its name, and dtype and sizes of each tensor it returned."""

    name: str
    outputs: tuple[tuple[torch.dtype, tuple[int | None, ...]], ...]
    where: str = attrs.field(default="", eq=False)


@attrs.frozen
class Gate:
    """A data-dependent value that Python saw, and the operator or method that read it."""

    reader: str
    value: Any
    where: str


def is_compared(operator: Any) -> bool:
    """Whether both runs must issue this operator: anything but pure views and metadata."""
    return operator not in _NOT_COMPARED and not getattr(operator, "is_view", False)


def record_of(operator: Any, result: Any, where: str) -> OpRecord:
    """Describe an operator call; sizes that depend on data are None."""
    results = result if isinstance(result, (tuple, list)) else (result,)
    outputs = tuple((r.dtype, _sizes(r)) for r in results if isinstance(r, torch.Tensor))
    return OpRecord(str(operator), outputs, where)


def _sizes(tensor: torch.Tensor) -> tuple[int | None, ...]:
    return tuple(size if isinstance(size, int) else None for size in tensor.shape)

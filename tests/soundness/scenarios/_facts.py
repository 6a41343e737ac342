"""Everything that can be seen of a call from outside, as facts that two runs can be compared by."""

from __future__ import annotations

import enum
import random
import types
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import numpy as np
import torch
from torch import nn

__all__ = ["Facts", "Ledger", "differences", "facts_of_process"]

Facts = dict[str, Any]

_PLAIN = (str, bytes, bool, int, float, complex, type(None), torch.dtype, torch.device, slice)
# The second is a mark of torch.compile's own.
_NOT_STATE = frozenset({*vars(nn.Module()), "_is_torch_compile"})


@attrs.define
class Ledger:
    """Numbers tensors and memory by first appearance, so that two runs can be compared.

    It keeps them alive: a number is never given twice.
    """

    tensors: dict[int, int] = attrs.field(factory=dict)
    storages: dict[int, int] = attrs.field(factory=dict)
    kept: list[Any] = attrs.field(factory=list)

    def facts(self, name: str, value: Any) -> Facts:
        """Return the facts of a value and of everything inside it."""
        return dict(self._walk(name, value, ()))

    def _walk(self, name: str, value: Any, above: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
        if isinstance(value, torch.Tensor):
            yield from self._of_tensor(name, value)
        elif isinstance(value, (*_PLAIN, enum.Enum)):
            yield name, Plain(value)
        elif id(value) in above or len(above) > 20:
            yield name, "seen above"
        else:
            yield f"{name}.class", type(value).__qualname__
            for key, part in _parts(value):
                yield from self._walk(f"{name}{key}", part, (*above, id(value)))

    def _of_tensor(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, Any]]:
        self.kept.append(tensor)
        yield f"{name}.class", type(tensor).__qualname__
        yield f"{name}.identity", self.tensors.setdefault(id(tensor), len(self.tensors))
        if nn.parameter.is_lazy(tensor):
            return
        for key in ("dtype", "device", "layout", "requires_grad", "is_leaf"):
            yield f"{name}.{key}", str(getattr(tensor, key))
        yield f"{name}.shape", tuple(tensor.shape) if not tensor.is_nested else "nested"
        yield f"{name}.inference", tensor.is_inference()
        if tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_quantized:
            yield from self._of_memory(name, tensor)
        if tensor.layout == torch.sparse_coo:
            yield f"{name}.dense", Values(_copy(tensor.to_dense()))
        # Asking another tensor for its gradient warns.
        if (tensor.is_leaf or tensor.retains_grad) and tensor.grad is not None:
            yield from self._of_gradient(f"{name}.grad", tensor.grad)

    def _of_gradient(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, Any]]:
        """Yield the facts of a gradient, less what no reader of values and strides can tell."""
        for fact, value in self._of_tensor(name, tensor):
            if fact == f"{name}.strides":
                sized = zip(tensor.shape, tensor.stride(), strict=True)
                yield fact, [stride for size, stride in sized if size != 1]
            elif fact != f"{name}.bits":
                yield fact, value

    def _of_memory(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, Any]]:
        storage = tensor.untyped_storage()
        self.kept.append(storage)
        yield f"{name}.storage", self.storages.setdefault(storage._cdata, len(self.storages))
        yield f"{name}.strides", (tensor.stride(), tensor.storage_offset())
        yield f"{name}.bits", (tensor.is_conj(), tensor.is_neg())
        if tensor.device.type == "cpu" and type(tensor) in (torch.Tensor, nn.Parameter):
            yield name, Values(_copy(tensor))


@attrs.frozen(eq=False)
class Plain:
    """A plain value; NaN equals itself, and 1, 1.0 and True are three."""

    value: Any

    def differs(self, other: Any, tolerance: float) -> bool:
        """Whether another run has another value."""
        if not isinstance(other, Plain) or type(self.value) is not type(other.value):
            return True
        if isinstance(self.value, float) and tolerance:
            return not np.isclose(self.value, other.value, tolerance, tolerance, equal_nan=True)
        return repr(self.value) != repr(other.value)

    def __repr__(self) -> str:
        return repr(self.value)


@attrs.frozen(eq=False)
class Values:
    """The values of a tensor: bit for bit, or within a tolerance."""

    values: torch.Tensor

    def differs(self, other: Any, tolerance: float) -> bool:
        """Whether another run has other values."""
        if not isinstance(other, Values) or self.values.dtype != other.values.dtype:
            return True
        if self.values.shape != other.values.shape:
            return True
        if not tolerance or not (self.values.is_floating_point() or self.values.is_complex()):
            return _bytes(self.values) != _bytes(other.values)
        one, two = self.values.to(torch.complex128), other.values.to(torch.complex128)
        size = one.abs().nan_to_num(0.0, 0.0, 0.0).max().item() if one.numel() else 0.0
        return not torch.allclose(one, two, tolerance, tolerance * max(1.0, size), equal_nan=True)

    def __repr__(self) -> str:
        return repr(self.values.flatten()[:8].tolist())


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return (
            tensor.detach()
            .resolve_conj()
            .resolve_neg()
            .clone(memory_format=torch.contiguous_format)
        )


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def _parts(value: Any) -> list[tuple[str, Any]]:
    """Return what a value holds, with how it is reached."""
    if isinstance(value, nn.Module):
        return _parts_of_module(value)
    if isinstance(value, type):
        return [(f".{n}", part) for n, part in vars(value).items() if _is_own(n, part)]
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", part) for key, part in value.items()]
    if isinstance(value, (set, frozenset)):
        return [(f"{{{n}}}", part) for n, part in enumerate(sorted(value, key=repr))]
    if isinstance(value, types.FunctionType):
        return _parts_of_function(value)
    if isinstance(value, types.MethodType):
        return [(".__self__", value.__self__)]
    if type(value).__module__.startswith("torch."):
        return []
    if hasattr(value, "__iter__") and hasattr(value, "__len__"):
        return [(f"[{n}]", part) for n, part in enumerate(value)]
    slots = [name for name in getattr(value, "__slots__", ()) if hasattr(value, name)]
    held = {**{name: getattr(value, name) for name in slots}, **getattr(value, "__dict__", {})}
    return [(f".{name}", part) for name, part in held.items()]


def _parts_of_module(module: nn.Module) -> list[tuple[str, Any]]:
    own = {name: part for name, part in vars(module).items() if name not in _NOT_STATE}
    held = {**module._parameters, **module._buffers, **module._modules, **own}
    return [(".training", module.training), *((f".{name}", part) for name, part in held.items())]


def _parts_of_function(function: types.FunctionType) -> list[tuple[str, Any]]:
    code, cells = function.__code__, function.__closure__ or ()
    free = zip(code.co_freevars, (cell.cell_contents for cell in cells), strict=True)
    used = [name for name in code.co_names if _is_own(name, function.__globals__.get(name, len))]
    return [
        *((f".{name}", part) for name, part in free),
        *((f".{name}", function.__globals__[name]) for name in used),
        (".__defaults__", function.__defaults__),
    ]


def _is_own(name: str, part: Any) -> bool:
    is_value = isinstance(part, (*_PLAIN, torch.Tensor, list, dict, set, enum.Enum))
    return is_value and not name.startswith("__")


def facts_of_process() -> Facts:
    """Return what a call may have left behind in the process."""
    return {
        "generator of torch": torch.get_rng_state().numpy().tobytes(),
        "generator of Python": random.getstate(),
        "generator of NumPy": np.random.get_state()[1].tobytes(),  # noqa: NPY002 - the global one
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "default dtype": torch.get_default_dtype(),
        "default device": str(torch.get_default_device()),
        "autocast": torch.is_autocast_enabled("cpu"),
        "compiling": torch.compiler.is_compiling(),
        "modes": len(torch.utils._python_dispatch._get_current_dispatch_mode_stack()),
    }


def differences(expected: Facts, found: Facts, tolerance: float) -> list[str]:
    """Return how the facts of a compiled run differ from those of eager, readable."""
    texts = [
        f"{name} is {_short(found[name])} where eager has {_short(fact)}"
        for name, fact in expected.items()
        if name in found and _differ(fact, found[name], tolerance)
    ]
    missing = [f"{name} is missing" for name in expected if name not in found]
    return [*texts, *missing, *(f"{name} is new" for name in found if name not in expected)]


def _differ(expected: Any, found: Any, tolerance: float) -> bool:
    if isinstance(expected, (Plain, Values)):
        return expected.differs(found, tolerance)
    return bool(expected != found)


def _short(fact: Any) -> str:
    text = repr(fact)
    return text if len(text) < 80 else f"{text[:77]}..."

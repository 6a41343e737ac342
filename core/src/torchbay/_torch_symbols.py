"""Symbolic sizes and numbers: the only file of the core that touches torch's private names of them.

A *symbol* stands for a size or a number that may differ from call to call. Those that an input has
are backed: what the program decides about them becomes a guard. Those that are read from tensor
data are known only once a part of the graph has run: what is decided about them becomes a gate.

Nothing here is imported from torch before a graph is traced.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard

import attrs
import torch

__all__ = [
    "READS",
    "Assumption",
    "Decision",
    "assumptions_of",
    "bind",
    "concrete",
    "defined_numbers",
    "fake_of",
    "has_symbols",
    "is_number",
    "keep_symbols",
    "number_leaves",
    "number_source",
    "size_guards",
    "size_source",
    "symbolic_int",
    "symbolic_kernels",
    "symbolic_mode",
    "symbols_of",
]

_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def is_number(value: object) -> TypeGuard[torch.SymInt | torch.SymFloat | torch.SymBool]:
    """Whether a value is a symbolic number."""
    return isinstance(value, _NUMBERS)


def has_symbols(fake: Any) -> bool:
    """Whether a fake tensor has symbolic sizes or strides, or is itself a symbolic number."""
    if not isinstance(fake, torch.Tensor):
        return is_number(fake)
    return any(map(is_number, (*fake.shape, *fake.stride())))


READS = (
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.item.default,
)
"""Operators that read a number from tensor data."""


@attrs.frozen(eq=False)
class Decision:
    """Something the program, or an operator, had to know about a number read from tensor data.

    Attributes:
        number: What was asked, as the graph computes it; None where no node of it does.
        condition: The same as an expression of sympy.
        outcome: What it came out as in the observed run.
        where: File and line that asked.
    """

    number: Any
    condition: Any
    outcome: Any
    where: str


@attrs.frozen(eq=False)
class Assumption:
    """Something an operator takes to be true of numbers read from tensor data."""

    condition: Any

    @property
    def symbols(self) -> frozenset[Any]:
        """The symbols it is about."""
        return frozenset(self.condition.free_symbols)

    def __str__(self) -> str:
        return str(self.condition)


def symbolic_mode(line: Callable[[], str], decided: Callable[[Decision], None]) -> Any:
    """Return a fake tensor mode whose symbols know what the observed run had for them.

    Args:
        line: Returns file and line of the user's code that is running.
        decided: Called once for everything that data decides.
    """
    from torchbay._torch_environment import ObservedShapeEnv, symbolic_fake_mode

    return symbolic_fake_mode(ObservedShapeEnv(line, decided))


def bind(number: Any, value: Any) -> None:
    """Let a number that was read from data be what the observed run had for it."""
    import sympy

    environment, expression = number.node.shape_env, number.node.expr
    if isinstance(expression, sympy.Symbol):
        environment.observed.setdefault(expression, sympy.sympify(value))
        environment.defined.setdefault(expression, number)
        environment.has_floats |= isinstance(value, float)


def concrete(value: Any) -> Any:
    """Return what a symbolic number was in the observed run, or None where that is unknown."""
    if not is_number(value):
        return value
    found = value.node.shape_env.value_of(value.node.expr)
    return None if found is None else value.node.pytype(found)


def assumptions_of(mode: Any) -> list[Assumption]:
    """Return what operators took to be true of numbers read from data, without knowing them."""
    environment = mode.shape_env
    found = environment.deferred_runtime_asserts.values()
    # A second trace names sizes anew before it learns which ones they are.
    return [Assumption(environment.replace(a.expr)) for group in found for a in group]


def defined_numbers(mode: Any, fakes: Sequence[torch.Tensor]) -> dict[Any, Any]:
    """Return the number that each symbol stands for, in the graph being traced."""
    found = dict(mode.shape_env.defined)
    for fake in fakes:
        sizes = [fake.size(dim) for dim in range(fake.dim())]
        found |= {size.node.expr: size for size in sizes if is_number(size)}
    return found


def symbols_of(fakes: Mapping[str, Any]) -> dict[Any, str]:
    """Return how each symbol of some fakes and symbolic ints is reached, given how those are."""
    found: dict[Any, str] = {}
    for access, fake in fakes.items():
        if is_number(fake):
            found.setdefault(fake.node.expr, access)
            continue
        for dim, size in enumerate(fake.shape):
            if is_number(size):
                found.setdefault(size.node.expr, f"{access}.size({dim})")
        for dim, stride in enumerate(fake.stride()):
            if is_number(stride):
                found.setdefault(stride.node.expr, f"{access}.stride({dim})")
    return found


def fake_of(
    mode: Any,
    tensor: torch.Tensor,
    name: str,
    dims: frozenset[int],
    serving_all: frozenset[int] = frozenset(),
) -> torch.Tensor:
    """Return the fake of a tensor, some of whose dimensions have symbolic sizes.

    Aliases stay aliases within one mode.

    Args:
        mode: The mode to make it in.
        tensor: The tensor.
        name: What guards call it.
        dims: The dimensions whose sizes are symbols, those of 0 and 1 aside.
        serving_all: Those of them whose sizes are symbols even then.
    """
    fake: torch.Tensor
    if dims and not (tensor.is_conj() or tensor.is_neg()):
        fake = _symbolic_fake(mode, tensor, name, dims, serving_all)
    else:
        fake = mode.from_tensor(tensor, static_shapes=True)
    if fake.is_leaf:
        # A copy of the real gradient, which the program must not read as a constant.
        fake.grad = None
    for attribute, value in vars(tensor).items():
        if isinstance(value, (bool, int, float, str)):
            setattr(fake, attribute, value)
    return fake


def _symbolic_fake(
    mode: Any, tensor: torch.Tensor, name: str, dims: frozenset[int], serving_all: frozenset[int]
) -> Any:
    from torch._dynamo.source import LocalSource, TensorProperty, TensorPropertySource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    mode.shape_env.serving_all |= {
        TensorPropertySource(LocalSource(name), TensorProperty.SIZE, dim) for dim in serving_all
    }
    # A view's base would get symbols too, which no input has.
    whole = tensor.detach()
    if whole._is_view():
        storage, offset = tensor.untyped_storage(), tensor.storage_offset()
        whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        whole.set_(storage, offset, tensor.size(), tensor.stride())
    whole.requires_grad_(tensor.requires_grad)
    kinds = [DimDynamic.DYNAMIC if d in dims else DimDynamic.STATIC for d in range(tensor.dim())]
    context: Any = StatelessSymbolicContext(dynamic_sizes=kinds)
    return mode.from_tensor(whole, source=LocalSource(name), symbolic_context=context)


def symbolic_int(mode: Any, value: int, name: str) -> torch.SymInt:
    """Return a symbol for a whole number that the call was given."""
    from torch._dynamo.source import LocalSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    environment, source = mode.shape_env, LocalSource(name)
    symbol = environment.create_unspecified_symbol(value, source, DimDynamic.DYNAMIC)
    number: torch.SymInt = environment.create_symintnode(symbol, hint=value, source=source)
    return number


@contextmanager
def symbolic_kernels() -> Iterator[None]:
    """Use what PyTorch has in Python of its operators, which takes symbols throughout."""
    from torch._dispatch.python import enable_python_dispatcher

    with enable_python_dispatcher():
        yield


def size_guards(mode: Any, inputs: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what the graph relies on about its symbols, as Python, and the line that does.

    The expressions reach an input as ``L['name']``.

    Args:
        mode: The mode the graph was traced in.
        inputs: The symbolic fakes and numbers by the name they were made with.
    """
    from torch._dynamo.source import LocalSource

    if not inputs:
        return []
    sources: Any = [LocalSource(name) for name in inputs]
    (found,) = mode.shape_env.produce_guards_verbose(
        list(inputs.values()), sources, ignore_static=False, langs=("verbose_python",)
    )
    parts = (line.partition("  # ") for line in found.exprs)
    return [
        (text, where[1] if (where := _LINE.fullmatch(comment)) is not None else "")
        for text, _, comment in parts
        if not _is_checked_elsewhere(text, inputs)
    ]


_LINE = re.compile(r"\(?(\S.*:\d+)\)?")
_FIXED = re.compile(r"L\['(\w+)'\]\.(size|stride)\(\)\[(\d+)\] == \d+")


def _is_checked_elsewhere(text: str, inputs: Mapping[str, Any]) -> bool:
    """Whether a guard is about what is no symbol, or about where a tensor begins in its storage."""
    if (about := _FIXED.fullmatch(text)) is None:
        return "storage_offset" in text
    fake = inputs[about[1]]
    values = fake.shape if about[2] == "size" else fake.stride()
    return isinstance(values[int(about[3])], int)


def size_source(value: Any, symbols: Mapping[Any, str]) -> str:
    """Return Python source for a size, given how each symbol is reached.

    Raises:
        KeyError: A symbol cannot be reached.
    """
    from torch.utils._sympy.printers import PythonPrinter

    if isinstance(value, (int, float)):
        return repr(value)
    expression = value.node.expr if is_number(value) else value
    reached = {symbol: symbols[symbol] for symbol in expression.free_symbols}

    class Printer(PythonPrinter):
        def _print_Symbol(self, expr: Any) -> str:  # noqa: N802 - as sympy names it
            return reached[expr]

    text: str = Printer().doprint(expression)
    return text


def keep_symbols(mode: Any, node: torch.fx.Node, result: Any) -> None:
    """Give what a node of a traced graph returned, run again, the symbols it had."""
    from torch.fx.experimental.symbolic_shapes import rebind_unbacked

    rebind_unbacked(mode.shape_env, node, result)


_INFIX: dict[Any, str] = {
    operator.add: "+",
    operator.sub: "-",
    operator.mul: "*",
    operator.truediv: "/",
    operator.floordiv: "//",
    operator.mod: "%",
    operator.pow: "**",
    operator.eq: "==",
    operator.ne: "!=",
    operator.lt: "<",
    operator.le: "<=",
    operator.gt: ">",
    operator.ge: ">=",
    operator.and_: "&",
    operator.or_: "|",
}


def number_source(
    node: Any, place: Callable[[torch.fx.Node], str], name: Callable[[Any], str]
) -> str:
    """Return Python source that computes a number of a graph as the graph does.

    Args:
        node: The node, or a plain number.
        place: How a tensor, or a number that is an input, is reached.
        name: How a function is called.
    """
    if not isinstance(node, torch.fx.Node):
        return repr(node)
    if node.op == "placeholder" or not is_number(node.meta["val"]):
        return place(node)
    arguments: Any = node.args
    if node.target in READS:
        return f"{place(arguments[0])}.item()"
    if isinstance(node.target, torch._ops.OpOverload):
        what, *rest = arguments
        return f"{place(what)}.{_METADATA[node.target]}({', '.join(map(repr, rest))})"
    parts = [number_source(argument, place, name) for argument in node.args]
    if (infix := _INFIX.get(node.target)) is not None:
        return f"({parts[0]} {infix} {parts[1]})"
    return f"{name(node.target)}({', '.join(parts)})"


def number_leaves(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Return the tensors and inputs that a number of a graph is computed from."""
    found: dict[torch.fx.Node, None] = {}
    number_source(node, lambda leaf: found.setdefault(leaf) or "", str)
    return list(found)


_METADATA = {
    torch.ops.aten.sym_size.int: "size",
    torch.ops.aten.sym_stride.int: "stride",
    torch.ops.aten.sym_numel.default: "numel",
    torch.ops.aten.sym_storage_offset.default: "storage_offset",
}

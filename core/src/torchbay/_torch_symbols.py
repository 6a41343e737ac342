"""Symbolic sizes and numbers: the only file of the core that touches torch's private names of them.

A *symbol* stands for a size or a number that may differ from call to call. Those that an input has
are backed: what the program decides about them becomes a guard. Those that are read from tensor
data are known only once a part of the graph has run: what is decided about them becomes a gate.

Nothing here is imported from torch before a graph is traced.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
    "symbolic_mode",
    "symbols_of",
]

_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def is_number(value: object) -> bool:
    """Whether a value is a symbolic number."""
    return isinstance(value, _NUMBERS)


def has_symbols(fake: Any) -> bool:
    """Whether a fake tensor has symbolic sizes or strides, or is itself a symbolic number."""
    if not isinstance(fake, torch.Tensor):
        return is_number(fake)
    return any(map(is_number, (*fake.shape, *fake.stride())))


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
    from torch._subclasses.fake_tensor import FakeTensorMode

    environment = _environment_class()(line, decided)
    return FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True)


@functools.cache
def _environment_class() -> Any:
    from torch.fx.experimental import symbolic_shapes as shapes

    class ObservedShapeEnv(shapes.ShapeEnv):
        """Answers what data decides from the observed run, and remembers that it was asked."""

        def __init__(self, line: Callable[[], str], decided: Callable[[Decision], None]) -> None:
            super().__init__()
            self._line = line
            self._decided = decided
            self._known: dict[Any, Any] = {}
            self.observed: dict[Any, Any] = {}
            self.defined: dict[Any, Any] = {}
            self.has_floats = False

        def evaluate_sym_node(self, sym_node: Any, *args: Any, **kwargs: Any) -> Any:
            # Rules of real numbers do not hold for floats: only v == v tells whether v is a NaN.
            if self.has_floats and _reads_float(number := _number_of(sym_node)):
                return self._decide(sym_node, number, _computed(number))
            try:
                return super().evaluate_sym_node(sym_node, *args, **kwargs)
            except shapes.GuardOnDataDependentSymNode:
                value = self.value_of(sym_node.expr)
                if value is None:
                    raise
                return self._decide(sym_node, _number_of(sym_node), value)

        def _decide(self, sym_node: Any, number: Any, value: Any) -> Any:
            import sympy

            key = _key_of(number if _reads_float(number) else sym_node.expr)
            if key not in self._known:
                self._known[key] = outcome = sym_node.pytype(value)
                self._decided(Decision(number, sym_node.expr, outcome, self._line()))
            return sympy.sympify(self._known[key])

        def value_of(self, expression: Any) -> Any:
            """Return what an expression came to in the observed run, or None."""
            value = expression.xreplace(self.observed).xreplace(self.backed_values())
            return None if getattr(value, "free_symbols", None) else value

        def backed_values(self) -> Mapping[Any, Any]:
            """Return the value each symbol of an input has."""
            values: Mapping[Any, Any] = getattr(self, _BACKED)
            return values

        def _get_sloc(self, framework_loc: str | None = None) -> Any:
            del framework_loc
            return shapes.SLoc(self._line(), None)

    _BACKED = (
        "backed_var_to_val" if hasattr(shapes.ShapeEnv(), "backed_var_to_val") else "var_to_val"
    )
    return ObservedShapeEnv


def _key_of(asked: Any) -> Any:
    return asked.node if isinstance(asked, _NUMBERS) else asked


def _number_of(sym_node: Any) -> Any:
    """Return the symbolic number of a node, if the graph being traced computes it."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

    kinds = {bool: torch.SymBool, int: torch.SymInt, float: torch.SymFloat}
    number: Any = kinds[sym_node.pytype](sym_node)
    mode = get_proxy_mode()
    if mode is None or get_proxy_slot(number, mode.tracer, None) is None:
        return None
    return number


def _node_of(number: Any) -> Any:
    """Return the node of the graph being traced that computes a number."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

    mode = get_proxy_mode()
    assert mode is not None, "only asked while a graph is traced"
    return get_proxy_slot(number, mode.tracer).force().node


def _reads_float(number: Any) -> bool:
    """Whether a float read from tensor data is part of how a number is computed."""
    if number is None:
        return False
    pending = [_node_of(number)]
    while pending:
        node = pending.pop()
        if isinstance(node.meta.get("val"), torch.SymFloat) and node.target in READS:
            return True
        pending += [n for n in node.all_input_nodes if is_number(n.meta.get("val"))]
    return False


READS = (
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.item.default,
)


def _computed(number: Any) -> Any:
    """Compute a number as the program did, from what the observed run read."""

    def compute(node: Any) -> Any:
        if not isinstance(node, torch.fx.Node):
            return concrete(node) if is_number(node) else node
        value = node.meta["val"]
        if node.op == "placeholder" or not _is_arithmetic(node):
            return concrete(value)
        return node.target(*map(compute, node.args))

    return compute(_node_of(number))


def _is_arithmetic(node: Any) -> bool:
    """Whether a node computes a number from numbers."""
    return node.op == "call_function" and not isinstance(node.target, torch._ops.OpOverload)


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
    found = mode.shape_env.deferred_runtime_asserts.values()
    return [Assumption(assertion.expr) for group in found for assertion in group]


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


def fake_of(mode: Any, tensor: torch.Tensor, name: str, dims: frozenset[int]) -> torch.Tensor:
    """Return the fake of a tensor, some of whose dimensions have symbolic sizes.

    Aliases stay aliases within one mode.
    """
    fake: torch.Tensor
    if dims and not (tensor.is_conj() or tensor.is_neg()):
        fake = _symbolic_fake(mode, tensor, name, dims)
    else:
        fake = mode.from_tensor(tensor, static_shapes=True)
    if fake.is_leaf:
        # A copy of the real gradient, which the program must not read as a constant.
        fake.grad = None
    return fake


def _symbolic_fake(mode: Any, tensor: torch.Tensor, name: str, dims: frozenset[int]) -> Any:
    from torch._dynamo.source import LocalSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

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


_INFIX = {
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
    if node.target in READS:
        return f"{place(node.args[0])}.item()"
    if isinstance(node.target, torch._ops.OpOverload):
        what, *rest = node.args
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

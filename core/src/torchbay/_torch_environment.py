"""The environment of symbols in which calls are traced; imported on use, as torch's own is."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import symbolic_shapes as shapes
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

from torchbay._torch_symbols import READS, Decision, concrete, is_number

__all__ = ["ObservedShapeEnv", "symbolic_fake_mode"]

_SLoc: Any = vars(shapes)["SLoc"]


def symbolic_fake_mode(environment: ObservedShapeEnv) -> FakeTensorMode:
    """Return a mode that makes fakes of results by what PyTorch has in Python of its operators.

    What it has in C++ of padding, unfolding and others fixes sizes without a word.
    What a kernel in Python is made of is not traced: it runs below the tracer.
    """
    mode = FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True)
    reference: Any = weakref.ref(mode)

    def dispatch(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with enable_python_dispatcher():
            result = FakeTensorMode.dispatch(reference(), func, types, args, kwargs)
            return _with_statistics(func, args, result)

    # Operators that take functions look for rules by the class of a mode: it has to stay.
    vars(mode)["dispatch"] = dispatch
    return mode


_NORMS = frozenset(
    {
        torch.ops.aten.native_layer_norm.default,
        torch.ops.aten.native_batch_norm.default,
        torch.ops.aten.native_group_norm.default,
    }
)


def _with_statistics(func: Any, args: Any, result: Any) -> Any:
    """Return what a norm returns with statistics as precise as the CPU computes them.

    For weights that are more precise than what they scale, as under autocast, the fake kernels
    return statistics of the lower precision.
    """
    if func not in _NORMS or args[0].device.type != "cpu":
        return result
    weight = next((a for a in args[1:] if isinstance(a, torch.Tensor)), None)
    if weight is None or weight.dtype is args[0].dtype:
        return result
    output, *statistics = result
    return output, *(torch.empty_like(s, dtype=weight.dtype) for s in statistics)


class ObservedShapeEnv(shapes.ShapeEnv):
    """Answers what data decides from the observed run, and reports that it was asked.

    Attributes:
        observed: What each symbol read from data was in the observed run.
        defined: The number that each of them stands for.
        has_floats: Whether any of them is a float.
        is_declaring: Whether what is decided is what the caller declared, and no line's doing.
        serving_all: Where sizes are from that are symbols even if they are 0 or 1.
    """

    def __init__(self, line: Callable[[], str], decided: Callable[[Decision], None]) -> None:
        super().__init__()
        self._line = line
        self._decided = decided
        self._known: dict[Any, Any] = {}
        self.observed: dict[Any, Any] = {}
        self.defined: dict[Any, Any] = {}
        self.has_floats = False
        self.is_declaring = False
        self.serving_all: set[Any] = set()
        self._serving_all_symbols: set[Any] = set()

    def create_symbol(self, val: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
        """Return a symbol, or the size itself where it is 0 or 1."""
        if source not in self.serving_all:
            return super().create_symbol(val, source, *args, **kwargs)
        kwargs["do_not_specialize_zero_one"] = True
        symbol = super().create_symbol(val, source, *args, **kwargs)
        self._serving_all_symbols.add(symbol)
        return symbol

    def evaluate_sym_node(self, sym_node: Any, *args: Any, **kwargs: Any) -> Any:
        """Return what a number or condition comes to, which becomes a guard or a gate."""
        # Rules of real numbers do not hold for floats: only v == v tells whether v is a NaN.
        if self.has_floats and _reads_float(number := _number_of(sym_node)):
            return self._decide(sym_node, number, _computed(number))
        if (fallback := kwargs.get("fallback_value")) is not None and self._serves_all(sym_node):
            return sympy.sympify(_known_or(sym_node, fallback))
        try:
            return super().evaluate_sym_node(sym_node, *args, **kwargs)
        except shapes.GuardOnDataDependentSymNode:
            value = self.value_of(sym_node.expr)
            if value is None:
                raise
            return self._decide(sym_node, _number_of(sym_node), value)

    def value_of(self, expression: Any) -> Any:
        """Return what an expression came to in the observed run, or None where that is unknown."""
        value = expression.xreplace(self.observed).xreplace(self._backed_values())
        return None if getattr(value, "free_symbols", None) else value

    def _decide(self, sym_node: Any, number: Any, value: Any) -> Any:
        key = number.node if _reads_float(number) else sym_node.expr
        if key not in self._known:
            self._known[key] = outcome = sym_node.pytype(value)
            self._decided(Decision(number, sym_node.expr, outcome, self._line()))
        return sympy.sympify(self._known[key])

    def _serves_all(self, sym_node: Any) -> bool:
        """Whether a condition is about a size that 0 and 1 are not to be told apart from."""
        is_condition = sym_node.pytype is bool
        return is_condition and bool(self._serving_all_symbols & sym_node.expr.free_symbols)

    def _backed_values(self) -> Mapping[Any, Any]:
        """Return the value that each symbol of an input has; renamed in torch 2.13."""
        is_renamed = hasattr(self, "backed_var_to_val")
        values: Mapping[Any, Any] = self.backed_var_to_val if is_renamed else self.var_to_val
        return values

    def _get_sloc(self, framework_loc: str | None = None) -> Any:
        del framework_loc
        return _SLoc("" if self.is_declaring else self._line(), None)


def _known_or(sym_node: Any, fallback: Any) -> Any:
    """Return what a condition comes to for every size, or else what serves every size."""
    if shapes.statically_known_true(torch.SymBool(sym_node)):
        return True
    opposite = torch.SymBool(sym_node.sym_not())
    return False if shapes.statically_known_true(opposite) else fallback


def _number_of(sym_node: Any) -> Any:
    """Return the symbolic number of a node, if the graph being traced computes it."""
    kinds = {bool: torch.SymBool, int: torch.SymInt, float: torch.SymFloat}
    number: Any = kinds[sym_node.pytype](sym_node)
    mode = get_proxy_mode()
    if mode is None or get_proxy_slot(number, mode.tracer, None) is None:
        return None
    return number


def _node_of(number: Any) -> Any:
    """Return the node of the graph being traced that computes a number."""
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


def _computed(number: Any) -> Any:
    """Compute a number as the program did, from what the observed run read."""

    def compute(node: Any) -> Any:
        if not isinstance(node, torch.fx.Node):
            return concrete(node) if is_number(node) else node
        value = node.meta["val"]
        if node.op == "placeholder" or not _is_arithmetic(node):
            return concrete(value)
        function: Any = node.target
        return function(*map(compute, node.args))

    return compute(_node_of(number))


def _is_arithmetic(node: Any) -> bool:
    """Whether a node computes a number from numbers."""
    return node.op == "call_function" and not isinstance(node.target, torch._ops.OpOverload)
